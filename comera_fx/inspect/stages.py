"""The graphs of a model from capture to what runs, one a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx, nn

from comera_fx.capture import capture
from comera_fx.errors import ConfigError
from comera_fx.lowering import lowering_passes
from comera_fx.ops import operator_name
from comera_fx.passes.pipeline import Pass, numerics_of, run_pipeline
from comera_fx.report import active_watchers

CAPTURED = "capture"
"""Name of the first stage, which no pass has seen yet."""
NOTHING_TO_DO = "nothing to do"


class Stage(NamedTuple):
    """A graph, and the pass that made it.

    Args:
        name: Class of the pass; "capture" for the graph that the passes start from.
        graph: Shares its weights with the model. ``meta["change"]`` says what the pass did.
    """

    name: str
    graph: fx.GraphModule


class Stages(list[Stage]):
    """The stages of a model, in order; ``repr`` is a table.

    Args:
        stages: A graph from capture, then one after each pass.
        notes: What is to be known of all of them, such as that no layer is in TT form.
    """

    def __init__(self, stages: Sequence[Stage], notes: Sequence[str] = ()) -> None:
        super().__init__(stages)
        self.notes = tuple(notes)

    def __repr__(self) -> str:
        width = max((len(stage.name) for stage in self), default=0)
        lines = [
            f"{number}  {stage.name:<{width}}  {len(stage.graph.graph.nodes):>5} nodes  "
            f"{stage.graph.meta['change']}"
            for number, stage in enumerate(self)
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def stages(model: nn.Module, example_inputs: object = None) -> Stages:
    """Return the graphs of a model from capture to what runs, one after each pass.

    Each is an ``fx.GraphModule`` that takes what the model takes, gives what it gives up to
    rounding, and shares its weights; ``comera_fx.format_graph(graph.graph)`` is its text. In the
    last one every layer in TT form is the products of its plan. A pass that finds nothing to do
    has a stage as well, equal to the one before. ``notes`` say what falls short of this, such as
    that no layer is in TT form.

    Args:
        model: An optimised model, or any other; it is not changed.
        example_inputs: As for ``optimize``; with it the graphs come from ``torch.export``. Without
            it sizes are not known, and operators on cores stay whole.

    Returns:
        A list of pairs of pass name and graph; ``repr`` is a table of them.

    Raises:
        ConfigError: If ``model`` is no module, or ``example_inputs`` no arguments.
        CaptureError: If the model fails on ``example_inputs``.

    Example:
        >>> for name, graph in stages(model, torch.randn(4, 256)):
        ...     print(name, tuple(graph(torch.randn(8, 256)).shape))
        capture (8, 256)
        ExpandAttention (8, 256)
        TTModuleToOp (8, 256)
        FuseReconstruction (8, 256)
        BatchChains (8, 256)
        ShareInput (8, 256)
        ExpandPlan (8, 256)
        BatchProducts (8, 256)
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "stages works on modules",
            got=type(model).__name__,
            expected="a torch.nn.Module",
            mend="pass the model itself",
        )
    captured = capture(model, example_inputs)
    gm = captured.gm
    gm.meta.update(capture=captured.kind, change=f"captured by {captured.kind}")
    found = [Stage(CAPTURED, gm)]
    for graph_pass in lowering_passes():
        gm, change = _after(graph_pass, gm)
        gm.meta.update(capture=captured.kind, change=change)
        found.append(Stage(type(graph_pass).__name__, gm))
    notes = list(captured.notes)
    left = sum(map(_runs_cores, gm.graph.nodes))
    if left and captured.kind != "module_graph":
        notes.append(
            f"{left} operators on cores are not taken apart into products: the graph does not tell "
            "the sizes of their inputs; give example_inputs"
        )
    if captured.kind == "module_graph":
        notes.append("these graphs have no data flow and cannot be run")
    if not any(_runs_cores(node) for stage in found for node in stage.graph.graph.nodes):
        notes.append(
            "no layer is in TT form, so no pass has anything to do: comera_fx.optimize first"
        )
    return Stages(found, notes)


def _after(graph_pass: Pass, gm: fx.GraphModule) -> tuple[fx.GraphModule, str]:
    change = NOTHING_TO_DO

    def note(graph_pass: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        nonlocal change
        change = f"numerics {numerics_of(graph_pass)}"

    made = run_pipeline(gm, [graph_pass], watchers=[*active_watchers(), note])
    return made, change


def _runs_cores(node: fx.Node) -> bool:
    return operator_name(node.target) is not None
