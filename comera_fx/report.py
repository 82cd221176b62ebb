"""Show what was done: a table per layer, graphs as text, and one diff per pass.

All text is the same on every run, so that it can be compared and tested.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from comera_fx import plan
from comera_fx.candidates import Candidate, find_candidates, structural_reasons
from comera_fx.modules import TTLinear, TTModule
from comera_fx.passes.pipeline import Watcher

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
        ranks: Bond ranks as they are now.
        dense_params: Numbers in the dense weight.
        tt_params: Numbers in the cores.
        ratio: ``dense_params / tt_params``; ``None`` if no rank is left.
        flops_forward: Of the plan at ``num_tokens``; 2 a multiply-add. Linear layers only.
        flops_backward: Likewise, every gradient wanted.
        bytes: Size of the weight as it is held now.
        peak_bytes: Most that the plan holds at once, cores left out.
        saved_bytes: What the plan keeps from forward to backward.
        dense_flops_forward: Of the dense layer at ``num_tokens``.
        dense_flops_backward: Likewise, every gradient wanted.
        num_tokens: Rows of input planned for.
        init_error: Relative Frobenius error of the decomposition; ``None`` after a random start.
        reason: Why the layer is dense; empty for a TT layer.
        detail: The figures behind the reason.
    """

    name: str
    kind: str
    dense_params: int
    bytes: int
    layout: str | None = None
    in_modes: tuple[int, ...] | None = None
    out_modes: tuple[int, ...] | None = None
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
    setattr(model, RECORD, {"capture": capture, "notes": list(notes), "layers": merged})


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
    fields: dict[str, Any] = {"num_tokens": known.get("num_tokens")}
    itemsize = module.cores[0].element_size()
    if isinstance(module, TTLinear):
        fields["num_tokens"] = tokens = module.num_tokens_hint
        fields |= _dense_flops(module.in_features, module.out_features, tokens)
        fields |= {"flops_forward": 0, "flops_backward": 0, "peak_bytes": 0, "saved_bytes": 0}
        if spec.num_params:
            config = module.plan_config
            planned = plan.plan_linear(
                spec,
                tokens,
                config.objective,
                memory_limit_bytes=config.memory_limit_bytes,
                itemsize=itemsize,
            )
            costs = ("flops_forward", "flops_backward", "peak_bytes", "saved_bytes")
            fields |= {cost: getattr(planned, cost) for cost in costs}
    return LayerReport(
        name=candidate.name,
        kind=module.kind,
        layout=spec.layout,
        in_modes=spec.in_modes,
        out_modes=spec.out_modes,
        ranks=spec.ranks,
        dense_params=module.dense_params,
        tt_params=spec.num_params,
        ratio=module.dense_params / spec.num_params if spec.num_params else None,
        bytes=spec.num_params * itemsize,
        init_error=module.init_error,
        **fields,
    )


def _dense_layer(candidate: Candidate, reason: str | None, known: Mapping[str, Any]) -> LayerReport:
    weights = [p for p in candidate.module._parameters.values() if p is not None]
    itemsize = weights[0].dtype.itemsize if weights else 0
    flops: dict[str, Any] = {}
    if candidate.kind == "linear" and "num_tokens" in known:
        flops = _dense_flops(*candidate.sizes, known["num_tokens"])
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


def _dense_flops(in_size: int, out_size: int, num_tokens: int) -> dict[str, int]:
    forward = 2 * num_tokens * in_size * out_size
    return {"dense_flops_forward": forward, "dense_flops_backward": 2 * forward}


# ---- text of the report ----

_HEADER = (
    "layer", "kind", "modes", "ranks", "dense", "TT", "ratio",
    "MFLOPs fwd", "bwd", "(dense)", "tokens", "error",
)  # fmt: skip


def _row(layer: LayerReport) -> tuple[str, ...]:
    ranks = (layer.ranks or ())[1:-1]
    dense_flops = (layer.dense_flops_forward or 0) + (layer.dense_flops_backward or 0)
    return (
        layer.name or "(the model itself)",
        f"{layer.kind} {layer.layout}",
        f"{_product(layer.in_modes or ())} -> {_product(layer.out_modes or ())}",
        ",".join(map(str, ranks)) or "-",
        f"{layer.dense_params:,}",
        f"{layer.tt_params:,}",
        "-" if layer.ratio is None else f"{layer.ratio:.1f}x",
        _mega(layer.flops_forward),
        _mega(layer.flops_backward),
        f"({_mega(dense_flops)})" if dense_flops else "-",
        "-" if layer.num_tokens is None else f"{layer.num_tokens:,}",
        "-" if layer.init_error is None else f"{layer.init_error:.3f}",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_text = 4  # names, kinds, modes and ranks stand left, figures right
    return [
        "  ".join(
            cell.ljust(width) if k < num_text else cell.rjust(width)
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


# ---- graphs as text ----

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("comera_fx_watchers", default=())


def active_watchers() -> tuple[Watcher, ...]:
    """Return the watchers of every ``dump_to`` that is open."""
    return _watchers.get()


@contextmanager
def dump_to(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Write one diff per pass that changes a graph, ``00_LinearToTT.diff`` and so on.

    Args:
        folder: Where to; made if it is not there.

    Example:
        >>> with comera_fx.dump_to("diffs"):  # doctest: +SKIP
        ...     model = comera_fx.optimize(model)
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    count = 0

    def watch(pass_name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
        nonlocal count
        old, new = (format_graph(gm.graph).splitlines() for gm in (before, after))
        lines = difflib.unified_diff(old, new, "before", "after", lineterm="", n=2)
        text = "".join(f"{line}\n" for line in lines)
        (target / f"{count:02d}_{pass_name}.diff").write_text(text, encoding="utf-8")
        count += 1

    token = _watchers.set((*_watchers.get(), watch))
    try:
        yield
    finally:
        _watchers.reset(token)


def format_graph(graph: fx.Graph) -> str:
    """Return one line per node, ``%name: shape = op[target](args)``, in execution order."""
    return "\n".join(map(_format_node, graph.nodes))


def _format_node(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_format_arg(node.args[0])}"
    shape = getattr(node.meta.get("val"), "shape", None)
    shown = "" if shape is None else f": {list(shape)}"
    args = [_format_arg(arg) for arg in node.args]
    args += [f"{key}={_format_arg(value)}" for key, value in node.kwargs.items()]
    return f"%{node.name}{shown} = {node.op}[{_name_of(node.target)}]({', '.join(args)})"


def _format_arg(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_format_arg, arg))}]"
    if isinstance(arg, dict):
        return f"{{{', '.join(f'{key!r}: {_format_arg(v)}' for key, v in arg.items())}}}"
    if isinstance(arg, slice):
        return ":".join(
            "" if v is None else _format_arg(v) for v in (arg.start, arg.stop, arg.step)
        )
    return _name_of(arg) if callable(arg) else repr(arg)


def _name_of(target: Any) -> str:
    """Name a target without the memory address that a function's own text may hold."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return getattr(target, "__name__", type(target).__name__)
