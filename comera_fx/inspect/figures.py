"""The rows of the tables that the page and the command line share."""

from __future__ import annotations

from collections.abc import Iterator

from comera_fx.inspect.blocks import blocks_of
from comera_fx.inspect.inspection import Inspection
from comera_fx.inspect.kernels import Kernel, kernels_of, lookup_lines
from comera_fx.inspect.plans import SharedPlan
from comera_fx.inspect.tree import Part
from comera_fx.plan.picture import short_number

Row = tuple[str, ...]

STAGES = ("pass", "what it did", "nodes")
GRAPH = ("part", "operators", "reads")
TIMES = ("layer", "kind", "rows", "MFLOPs", "(dense)", "ms", "(dense)", "faster")
KERNELS = ("pass", "makes", "call", "why", "m x n x k", "us")
LOOKUPS = ("table", "call", "why")
MOST_NAMES = 4


def summary(found: Inspection) -> list[Row]:
    """Return what matters most, as pairs of name and figure."""
    tree, report = found.tree, found.report
    rows: list[Row] = [
        ("parameters", f"{tree.params:,}, dense {tree.dense_params:,}{_ratio(tree)}"),
        ("layers in TT form", f"{len(report.compressed)} of {len(report.layers)}"),
    ]
    if report.capture:
        rows.append(("captured by", report.capture))
    if found.timed:
        rows.append(
            (
                "linear layers in TT form, forward and backward",
                f"{1e3 * found.seconds:,.3f} ms predicted, dense "
                f"{1e3 * found.dense_seconds:,.3f} ms",
            )
        )
    return rows


def tree_rows(part: Part, depth: int = 0) -> Iterator[tuple[int, Part]]:
    """Return each part with how deep it lies."""
    yield depth, part
    for inner in part.parts:
        yield from tree_rows(inner, depth + 1)


def sizes(part: Part) -> tuple[str, str, str]:
    """Return the parameters of a part now, were it dense, and the ratio where they differ."""
    return f"{part.params:,}", f"{part.dense_params:,}", _ratio(part).removeprefix(", ")


def stage_rows(found: Inspection) -> list[Row]:
    """Return a row a pass."""
    return [
        (stage.name, stage.graph.meta["change"], f"{len(stage.graph.graph.nodes):,}")
        for stage in found.stages
    ]


def graph_rows(found: Inspection) -> list[Row]:
    """Return a row a box of the picture of the last graph."""
    blocks = blocks_of(found.stages[-1].graph)
    weights = [block.title for block in blocks if block.kind == "weights"]
    return [
        (
            block.title,
            ", ".join(block.lines),
            ", ".join(
                (
                    *(blocks[number].title for number in block.reads),
                    *(weights if block.on_weights else ()),
                )
            ),
        )
        for block in blocks
    ]


def time_rows(found: Inspection) -> list[Row]:
    """Return a row a layer in TT form, and one for all whose time is predicted."""
    rows: list[Row] = []
    for layer in found.report.compressed:
        flops = (layer.flops_forward or 0) + (layer.flops_backward or 0)
        dense = (layer.dense_flops_forward or 0) + (layer.dense_flops_backward or 0)
        rows.append(
            (
                layer.name or "(the model itself)",
                f"{layer.kind} {layer.layout}",
                "-" if layer.num_tokens is None else f"{layer.num_tokens:,}",
                f"{flops / 1e6:,.2f}",
                f"({dense / 1e6:,.2f})",
                *_times(layer.predicted_seconds, layer.dense_predicted_seconds),
            )
        )
    if len(found.timed) > 1:
        totals = _times(found.seconds, found.dense_seconds)
        rows.append((f"{len(found.timed)} linear layers", "", "", "", "", *totals))
    return rows


def dense_rows(found: Inspection) -> list[Row]:
    """Return a row a layer that is dense: name, kind, parameters, why."""
    return [
        (
            layer.name or "(the model itself)",
            layer.kind,
            "; ".join(filter(None, (layer.reason, layer.detail))),
            f"{layer.dense_params:,}",
        )
        for layer in found.report.layers.values()
        if layer.tt_params is None
    ]


def kernel_rows(shared: SharedPlan) -> list[Row]:
    """Return a row a call, and one for what a plan's time holds beside its calls."""
    kernels = kernels_of(shared.plan)
    rest = shared.plan.seconds - sum(kernel.seconds for kernel in kernels)
    rows = [_kernel(kernel) for kernel in kernels]
    return [*rows, ("", "call of the layer, results put in order", "", "", "", _micro(rest))]


def lookup_rows(found: Inspection) -> list[Row]:
    """Return a row a call of the look-ups."""
    rows: list[Row] = []
    for name, plan in found.lookups.items():
        num_ids = found.report.layers[name].num_tokens or 1
        for number, (call, why) in enumerate(lookup_lines(plan, num_ids)):
            rows.append((name if not number else "", call, why))
    return rows


def names_of(shared: SharedPlan) -> str:
    """Return the layers of a plan, the first few by name."""
    shown = ", ".join(name or "(the model itself)" for name in shared.names[:MOST_NAMES])
    more = len(shared.names) - MOST_NAMES
    return shown if more <= 0 else f"{shown} and {more} more"


def title_of(shared: SharedPlan) -> str:
    """Return the shape that a plan is for."""
    plan = shared.plan
    spec = plan.spec
    sizes = f"{spec.in_size:,} to {spec.out_size:,}"
    flops = short_number(plan.flops_forward + plan.flops_backward)
    return f"{spec.layout} layer {sizes}, {plan.num_tokens:,} rows, {flops} FLOPs"


def _kernel(kernel: Kernel) -> Row:
    return (
        kernel.phase,
        kernel.makes,
        kernel.call,
        kernel.why,
        kernel.sizes,
        _micro(kernel.seconds),
    )


def _times(seconds: float | None, dense: float | None) -> tuple[str, str, str]:
    faster = f"{dense / seconds:.1f}x" if seconds and dense else "-"
    return _milli(seconds), f"({_milli(dense)})" if dense else "-", faster


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.3f}"


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


def _ratio(part: Part) -> str:
    if not part.params or part.params == part.dense_params:
        return ""
    return f", {part.dense_params / part.params:.1f}x fewer"
