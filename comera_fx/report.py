"""Show what was done: a table of the layers, and one diff per pass."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx, nn
from torch.nn.parameter import is_lazy

from comera_fx.candidates import find_candidates, structural_reasons
from comera_fx.errors import ConfigError
from comera_fx.layer_report import LayerReport as LayerReport
from comera_fx.layer_report import dense_layer, tt_layer
from comera_fx.measure import Measured
from comera_fx.modules import TTEmbedding, TTLinear, TTModule
from comera_fx.passes.pipeline import Pass, Watcher, numerics_of
from comera_fx.passes.text import format_graph as format_graph

RECORD = "_comera_fx_record"
"""Attribute of an optimised model that holds why its layers are as they are, in plain types."""


@dataclass(frozen=True, repr=False)
class Report:
    """Every layer of a model that holds a weight matrix; ``repr`` is a table.

    Args:
        layers: By qualified name, in the order of the model's modules.
        params_before: Parameters of the whole model, were all its layers dense.
        params_after: Parameters of the whole model as it is.
        capture: How its graph was found; ``None`` if it was never optimised.
        notes: What capture tried, and what its graph does not know.
    """

    layers: Mapping[str, LayerReport]
    params_before: int
    params_after: int
    capture: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def compressed(self) -> list[LayerReport]:
        """The layers in TT form."""
        return [layer for layer in self.layers.values() if layer.tt_params is not None]

    @property
    def compressed_before(self) -> int:
        """Numbers in the dense weights of the compressed layers."""
        return sum(layer.dense_params for layer in self.compressed)

    @property
    def compressed_after(self) -> int:
        """Numbers in their cores."""
        return sum(layer.tt_params or 0 for layer in self.compressed)

    def to_dict(self) -> dict[str, Any]:
        """Return everything in types that ``json`` writes."""
        return {
            "layers": {name: _plain(asdict(layer)) for name, layer in self.layers.items()},
            "params_before": self.params_before,
            "params_after": self.params_after,
            "compressed_before": self.compressed_before,
            "compressed_after": self.compressed_after,
            "capture": self.capture,
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        lines = _table(_rows(self.compressed)) if self.compressed else []
        lines += _dense_lines([layer for layer in self.layers.values() if layer.tt_params is None])
        before, after = self.compressed_before, self.compressed_after
        lines.append(f"compressed layers: {_change(before, after)}")
        lines.append(f"whole model:       {_change(self.params_before, self.params_after)}")
        if self.capture is not None:
            lines.append(f"captured by {self.capture}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def explain_model(
    model: nn.Module,
    num_tokens: Mapping[str, int] | None = None,
    measured: Mapping[str, Measured] | None = None,
) -> Report:
    """Report on a model as it is now; ranks that have shrunk are shown as they are.

    Args:
        model: Any model. Optimised parts of it are found at any depth.
        num_tokens: Rows of input seen, by name; costs of other layers are for the number that
            they were planned for.
        measured: What linear layers in TT form were measured to take, by name.
    """
    record = _find_record(model)
    candidates = find_candidates(model)
    reasons = structural_reasons(model, candidates)
    seen, measured = num_tokens or {}, measured or {}
    layers = {}
    for candidate in candidates:
        name, module = candidate.name, candidate.module
        known = record["layers"].get(name, {})
        if isinstance(module, (TTLinear, TTEmbedding)):
            tokens = seen.get(name) or module.num_tokens_hint
            layers[name] = tt_layer(candidate, module, known, tokens, measured.get(name))
        else:
            reason = known.get("reason") or reasons.get(name)
            tokens = seen.get(name, known.get("num_tokens"))
            layers[name] = dense_layer(candidate, reason, known, tokens)
    after = sum(param.numel() for param in model.parameters() if not is_lazy(param))
    saved = sum(
        layer.dense_params - sum(p.numel() for p in (*module.cores, *module.rank_weights))
        for layer, module in zip(layers.values(), (c.module for c in candidates), strict=True)
        if isinstance(module, TTModule)
    )
    return Report(layers, after + saved, after, record["capture"], tuple(record["notes"]))


def attach_record(
    model: nn.Module, *, capture: str, notes: Sequence[str], layers: Mapping[str, dict[str, Any]]
) -> None:
    """Keep on ``model``, as a plain attribute, what ``explain_model`` cannot read off its layers.

    Args:
        model: The optimised model.
        capture: How its graph was found.
        notes: What capture has to say.
        layers: Per qualified name: "num_tokens", "reason" and "detail".
    """
    earlier = vars(model).get(RECORD, {"layers": {}})
    merged = {**earlier["layers"], **layers}
    # Not by setattr: a class may refuse attributes, once the model has been changed in place.
    vars(model)[RECORD] = {"capture": capture, "notes": list(notes), "layers": merged}


def _find_record(model: nn.Module) -> dict[str, Any]:
    """Merge the records of the model and of optimised models inside it; outer ones win."""
    found: dict[str, Any] = {"capture": None, "notes": [], "layers": {}}
    for prefix, module in model.named_modules():
        record = vars(module).get(RECORD)
        if record is None:
            continue
        for name, known in record["layers"].items():
            full = ".".join(part for part in (prefix, name) if part)
            found["layers"].setdefault(full, known)
        if found["capture"] is None:
            found["capture"], found["notes"] = record["capture"], record["notes"]
    return found


# ---- text of the report ----

_HEADER = (
    "layer", "kind", "modes", "ranks", "balance", "dense", "TT", "ratio",
    "MFLOPs fwd", "bwd", "(dense both)", "saved MB", "(dense)", "ms", "(dense)",
)  # fmt: skip
_MEASURED_HEADER = ("measured ms", "(dense)", "predicted off", "(dense)")
_LAST_HEADER = ("tokens", "error", "")


def _rows(layers: Sequence[LayerReport]) -> list[tuple[str, ...]]:
    measured = any(layer.measured_seconds is not None for layer in layers)
    heading = (*_HEADER, *(_MEASURED_HEADER if measured else ()), *_LAST_HEADER)
    return [heading, *(_row(layer, measured) for layer in layers)]


def _row(layer: LayerReport, measured: bool) -> tuple[str, ...]:
    ranks = (layer.ranks or ())[1:-1]
    dense_flops = (layer.dense_flops_forward or 0) + (layer.dense_flops_backward or 0)
    # The weights are among what is kept, in both forms.
    saved = None if layer.saved_bytes is None else layer.saved_bytes + layer.bytes
    times = (
        _milli(layer.measured_seconds),
        _in_brackets(_milli(layer.dense_measured_seconds)),
        _percent(layer.prediction_error),
        _in_brackets(_percent(layer.dense_prediction_error)),
    )
    return (
        layer.name or "(the model itself)",
        f"{layer.kind} {layer.layout}",
        f"{_product(layer.in_modes or ())} -> {_product(layer.out_modes or ())}",
        ",".join(map(str, ranks)) or "-",
        f"{layer.mode_balance:.1f}",
        f"{layer.dense_params:,}",
        f"{layer.tt_params:,}",
        "-" if layer.ratio is None else f"{layer.ratio:.1f}x",
        _mega(layer.flops_forward),
        _mega(layer.flops_backward),
        f"({_mega(dense_flops)})" if dense_flops else "-",
        _mega(saved),
        _in_brackets(_mega(layer.dense_saved_bytes)),
        _milli(layer.predicted_seconds),
        _in_brackets(_milli(layer.dense_predicted_seconds)),
        *(times if measured else ()),
        "-" if layer.num_tokens is None else f"{layer.num_tokens:,}",
        "-" if layer.init_error is None else f"{layer.init_error:.3f}",
        layer.detail,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = (0, 1, 2, 3, len(widths) - 1)  # stands left: name, kind, modes, ranks and what is said
    return [
        "  ".join(
            cell.ljust(width) if k in text else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _dense_lines(layers: Sequence[LayerReport]) -> list[str]:
    by_reason: dict[str, list[LayerReport]] = {}
    for layer in layers:
        by_reason.setdefault(layer.reason, []).append(layer)
    lines = ["left dense:"] if layers else []
    for reason, group in by_reason.items():
        if len(group) == 1:
            detail = f" ({group[0].detail})" if group[0].detail else ""
            lines.append(f"  {group[0].name or '(the model itself)'}: {reason}{detail}")
        else:
            lines.append(f"  {len(group)} layers ({group[0].name}, ...): {reason}")
    return lines


def _change(before: int, after: int) -> str:
    ratio = f" ({before / after:.1f}x)" if after else ""
    return f"{before:,} -> {after:,} parameters{ratio}"


def _product(modes: Sequence[int]) -> str:
    return "x".join(map(str, modes))


def _mega(number: int | None) -> str:
    return "-" if number is None else f"{number / 1e6:,.2f}"


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.3f}"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:+.0f}%"


def _in_brackets(text: str) -> str:
    return text if text == "-" else f"({text})"


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}


# ---- diffs ----

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("comera_fx_watchers", default=())


def active_watchers() -> tuple[Watcher, ...]:
    """Return the watchers of every ``dump_to`` and ``watched_by`` that is open."""
    return _watchers.get()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Show ``watcher`` what passes change, in this thread or task, while the context is open."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


@contextmanager
def dump_to(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Write one diff per pass that changes a graph, ``00_LinearToTT.diff`` and so on.

    The head of each says whether the pass keeps the model's numerics.

    Args:
        folder: Where to; made if it is not there.

    Raises:
        ConfigError: If ``folder`` is no path.

    Example:
        >>> with comera_fx.dump_to("diffs"):  # doctest: +SKIP
        ...     model = comera_fx.optimize(model)
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(
            "dump_to writes into a folder",
            got=repr(folder),
            expected="a path",
            mend="write comera_fx.dump_to('diffs')",
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    count = 0

    def watch(graph_pass: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        nonlocal count
        name = type(graph_pass).__name__
        heads = f"before {name}", f"after {name}, numerics {numerics_of(graph_pass)}"
        old, new = (format_graph(gm.graph).splitlines() for gm in (before, after))
        lines = difflib.unified_diff(old, new, *heads, lineterm="", n=2)
        text = "".join(f"{line}\n" for line in lines)
        (target / f"{count:02d}_{name}.diff").write_text(text, encoding="utf-8")
        count += 1

    with watched_by(watch):
        yield
