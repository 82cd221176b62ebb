"""What ``torch.compile(model, backend="comera")`` calls with each graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import fx, nn
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

from comera_fx.backend.advice import tell_of_optimize
from comera_fx.backend.freeze import frozen
from comera_fx.backend.graph import forget_weights, prepared
from comera_fx.backend.inner import compile_graph, count
from comera_fx.backend.options import Options
from comera_fx.backend.tokens import choose_tokens
from comera_fx.compiled_code import note_code
from comera_fx.inspect.dump import dump_graphs
from comera_fx.lowering import lower_graph, lowering_passes
from comera_fx.ops import operator_name
from comera_fx.report import active_watchers

LAYERS = ("tt_linear", "tt_embedding", "tt_dense")


def comera(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of dynamo: plan its TT layers together, then hand it to another compiler.

    Dense weights pass through as they are. ``torch._dynamo.utils.counters["comera_fx"]`` counts
    ``graphs``, the ``tt_layers`` in them and those ``expanded`` into the steps of their plans, and
    ``forward_graphs``, ``backward_graphs`` and ``inference_graphs`` compiled; those that
    torch's cache holds from before, forward and backward, count as ``cached_graphs``.

    Args:
        gm: The graph; parameters are inputs of it.
        example_inputs: What it was made with.
        options: See ``comera_fx.backend.options.Options``.
        mode: As of ``torch.compile``; the modes are those of inductor.

    Returns:
        A function that takes what the graph takes.

    Raises:
        ConfigError: On a wrong option.
    """
    chosen = Options.read(options, mode)
    graph = prepared(gm, example_inputs)
    note_code([x for x in example_inputs if isinstance(x, nn.Parameter)])
    count("graphs")
    num_layers = sum(1 for _ in _operators(graph, LAYERS))
    if not num_layers:
        tell_of_optimize(example_inputs)
    count("tt_layers", num_layers)
    choose_tokens(graph, chosen.memory_limit_bytes)
    # What a pass traces is none of the caller's, whose hooks would save it, as a checkpoint does.
    with _dumped(chosen.dump, graph), _disable_saved_tensors_hooks_during_tracing():
        lowered = lower_graph(graph, lowering_passes(chosen.disable), watchers=active_watchers())
    left = sum(1 for _ in _operators(lowered))
    count("expanded", max(num_layers - left, 0))
    if chosen.freeze:
        compiled = frozen(lowered, example_inputs, lambda g, x: compile_graph(g, x, chosen))
    else:
        compiled = compile_graph(lowered, example_inputs, chosen)
    forget_weights(lowered)
    return compiled


comera._tags = ()  # type: ignore[attr-defined]


def _operators(gm: fx.GraphModule, names: Sequence[str] = ()) -> Iterator[fx.Node]:
    """Yield the nodes that call operators of ours, in this graph and those it holds."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                name = operator_name(node.target)
                if name is not None and (not names or name in names):
                    yield node


def _dumped(folder: Path | None, gm: fx.GraphModule) -> AbstractContextManager[None]:
    if folder is None:
        return nullcontext()
    number = 0
    while (folder / f"graph_{number}").exists():
        number += 1
    return dump_graphs(folder / f"graph_{number}", gm)
