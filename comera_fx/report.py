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

from comera_fx.candidates import Candidate, find_candidates, structural_reasons
from comera_fx.errors import ConfigError, PlanError
from comera_fx.modules import TTEmbedding, TTLinear, TTModule
from comera_fx.passes.pipeline import Pass, Watcher, numerics_of
from comera_fx.passes.text import format_graph as format_graph
from comera_fx.plan.linear import plan_linear
from comera_fx.plan.lookup import plan_lookup
from comera_fx.plan.plan import Plan
from comera_fx.shapes import ModeChoice

RECORD = "_comera_fx_record"
"""Attribute of an optimised model that holds why its layers are as they are, in plain types."""


@dataclass(frozen=True)
class LayerReport:
    """One layer that holds a weight matrix.

    What is not known, or has no meaning for the layer, is ``None``.

    Args:
        name: Qualified name.
        kind: "linear", "embedding", or the kind of a layer that is not supported.
        layout: "tt" or "ttm"; ``None`` for a dense layer, as are modes and ranks.
        in_modes: Factors of the in features, or of the rows of a table.
        out_modes: Factors of the out features, or of the columns.
        mode_balance: Largest mode over the smallest above 1: narrow modes make slow products.
        ranks: Bond ranks as they are now.
        dense_params: Numbers in the dense weight.
        tt_params: Numbers in the cores.
        ratio: ``dense_params / tt_params``; ``None`` if no rank is left.
        flops_forward: Of the plan at ``num_tokens``; 2 a multiply-add.
        flops_backward: Likewise, every gradient wanted.
        bytes: Size of the weight as it is held now.
        peak_bytes: Most that the plan of a linear layer holds at once, cores left out.
        saved_bytes: What it keeps from forward to backward.
        dense_flops_forward: Of the dense layer at ``num_tokens``; a table needs none.
        dense_flops_backward: Likewise, every gradient wanted.
        num_tokens: Rows of input planned for.
        init_error: Relative Frobenius error of the decomposition; ``None`` after a random start.
        reason: Why the layer is dense; empty for a TT layer.
        detail: The figures behind the reason; of a TT layer, what was asked for and not met.
    """

    name: str
    kind: str
    dense_params: int
    bytes: int
    layout: str | None = None
    in_modes: tuple[int, ...] | None = None
    out_modes: tuple[int, ...] | None = None
    mode_balance: float | None = None
    ranks: tuple[int, ...] | None = None
    tt_params: int | None = None
    ratio: float | None = None
    flops_forward: int | None = None
    flops_backward: int | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    dense_flops_forward: int | None = None
    dense_flops_backward: int | None = None
    num_tokens: int | None = None
    init_error: float | None = None
    reason: str = ""
    detail: str = ""


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
        lines = _table([_HEADER, *map(_row, self.compressed)]) if self.compressed else []
        lines += _dense_lines([layer for layer in self.layers.values() if layer.tt_params is None])
        before, after = self.compressed_before, self.compressed_after
        lines.append(f"compressed layers: {_change(before, after)}")
        lines.append(f"whole model:       {_change(self.params_before, self.params_after)}")
        if self.capture is not None:
            lines.append(f"captured by {self.capture}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def explain_model(model: nn.Module) -> Report:
    """Report on a model as it is now; ranks that have shrunk are shown as they are.

    Args:
        model: Any model. Optimised parts of it are found at any depth.
    """
    record = _find_record(model)
    candidates = find_candidates(model)
    reasons = structural_reasons(model, candidates)
    layers = {}
    for candidate in candidates:
        known = record["layers"].get(candidate.name, {})
        if isinstance(candidate.module, TTModule):
            layers[candidate.name] = _tt_layer(candidate, candidate.module, known)
        else:
            reason = known.get("reason") or reasons.get(candidate.name)
            layers[candidate.name] = _dense_layer(candidate, reason, known)
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


def _tt_layer(candidate: Candidate, module: TTModule, known: Mapping[str, Any]) -> LayerReport:
    spec = module.spec
    itemsize = module.cores[0].element_size()
    details = [known.get("detail", "")]
    figures: dict[str, Any] = {}
    if isinstance(module, TTLinear):
        figures, over = _linear_figures(module)
        details.append(over)
    elif isinstance(module, TTEmbedding):
        figures = _embedding_figures(module)
    return LayerReport(
        name=candidate.name,
        kind=module.kind,
        layout=spec.layout,
        in_modes=spec.in_modes,
        out_modes=spec.out_modes,
        mode_balance=ModeChoice(spec.in_modes, spec.out_modes).balance,
        ranks=spec.ranks,
        dense_params=module.dense_params,
        tt_params=spec.num_params,
        ratio=module.dense_params / spec.num_params if spec.num_params else None,
        bytes=spec.num_params * itemsize,
        init_error=module.init_error,
        detail="; ".join(filter(None, details)),
        **figures,
    )


def _linear_figures(module: TTLinear) -> tuple[dict[str, Any], str]:
    """Return the costs of the plan, and what there is to say where it is over its limit."""
    tokens = module.num_tokens_hint
    dense = _dense_flops("linear", module.in_features, module.out_features, tokens)
    costs = ("flops_forward", "flops_backward", "peak_bytes", "saved_bytes")
    if not module.spec.num_params:
        return {"num_tokens": tokens, **dense, **dict.fromkeys(costs, 0)}, ""
    planned, over = _plan_of(module, tokens)
    return {"num_tokens": tokens, **dense, **{c: getattr(planned, c) for c in costs}}, over


def _plan_of(module: TTLinear, num_tokens: int) -> tuple[Plan, str]:
    """Ranks loaded from a checkpoint may break a limit; the forward pass then says so too."""
    spec, config = module.spec, module.plan_config
    itemsize, limit = module.cores[0].element_size(), config.memory_limit_bytes
    try:
        return plan_linear(
            spec, num_tokens, config.objective, memory_limit_bytes=limit, itemsize=itemsize
        ), ""
    except PlanError as error:
        over = f"no plan for {num_tokens:,} tokens is within memory_limit_bytes={limit}"
        planned = plan_linear(spec, num_tokens, config.objective, itemsize=itemsize)
        return planned, f"{over}: {error.expected}"


def _embedding_figures(module: TTEmbedding) -> dict[str, Any]:
    tokens, spec = module.num_tokens_hint, module.spec
    forward = plan_lookup(spec, tokens).flops if spec.num_params else 0
    return {
        "num_tokens": tokens,
        "flops_forward": forward,
        "flops_backward": 2 * forward,  # each product has the gradients of its two operands
        **_dense_flops("embedding", module.num_embeddings, module.embedding_dim, tokens),
    }


def _dense_layer(candidate: Candidate, reason: str | None, known: Mapping[str, Any]) -> LayerReport:
    weights = [p for p in candidate.module._parameters.values() if p is not None]
    itemsize = weights[0].dtype.itemsize if weights else 0
    flops: dict[str, Any] = {}
    if candidate.kind in ("linear", "embedding") and "num_tokens" in known:
        flops = _dense_flops(candidate.kind, *candidate.sizes, known["num_tokens"])
    return LayerReport(
        name=candidate.name,
        kind=candidate.kind,
        dense_params=candidate.num_params,
        bytes=candidate.num_params * itemsize,
        reason=reason or "comera_fx.optimize has not been applied",
        detail=known.get("detail", ""),
        num_tokens=known.get("num_tokens"),
        **flops,
    )


def _dense_flops(kind: str, in_size: int, out_size: int, num_tokens: int) -> dict[str, int]:
    """A dense table is read, not multiplied."""
    forward = 2 * num_tokens * in_size * out_size if kind == "linear" else 0
    return {"dense_flops_forward": forward, "dense_flops_backward": 2 * forward}


# ---- text of the report ----

_HEADER = (
    "layer", "kind", "modes", "ranks", "balance", "dense", "TT", "ratio",
    "MFLOPs fwd", "bwd", "(dense both)", "tokens", "error", "",
)  # fmt: skip


def _row(layer: LayerReport) -> tuple[str, ...]:
    ranks = (layer.ranks or ())[1:-1]
    dense_flops = (layer.dense_flops_forward or 0) + (layer.dense_flops_backward or 0)
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


def _mega(flops: int | None) -> str:
    return "-" if flops is None else f"{flops / 1e6:,.2f}"


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}


# ---- diffs ----

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("comera_fx_watchers", default=())


def active_watchers() -> tuple[Watcher, ...]:
    """Return the watchers of every ``dump_to`` that is open."""
    return _watchers.get()


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

    token = _watchers.set((*_watchers.get(), watch))
    try:
        yield
    finally:
        _watchers.reset(token)
