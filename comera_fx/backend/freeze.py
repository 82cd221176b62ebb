"""Compute what depends on weights alone once, for inference."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from comera_fx.backend.graph import forget_weights
from comera_fx.errors import ConfigError
from comera_fx.passes.regions import SWITCHES
from comera_fx.passes.weight_only import WeightOnly, erase_unused
from comera_fx.passes.writes import may_return_view
from comera_fx.replay import VALUE_KEYS

Compiled = Callable[..., Any]
State = tuple[int, int]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


def frozen(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_one: Compile) -> Compiled:
    """Compile a planned graph whose messages of weights alone are made once and kept.

    They are made again when a weight was changed in place or is another tensor. A write that torch
    does not record, such as one to ``weight.data``, goes unnoticed.

    Args:
        gm: The graph; changed.
        example_inputs: What it takes.
        compile_one: Compiles a graph, given what it takes.

    Raises:
        ConfigError: If a weight requires a gradient, or was made in inference mode.
    """
    _refuse_training(example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    outputs = _messages(gm)
    if not outputs:
        return compile_one(gm, example_inputs)
    making = _part(gm, outputs)
    for each in (gm, making):
        forget_weights(each)
    rest, places = _rest(gm, placeholders, outputs)
    weights = [place for place, x in enumerate(example_inputs) if isinstance(x, nn.Parameter)]
    kept = _Kept(making, weights)
    values = kept.values(example_inputs)
    compiled = compile_one(rest, [*(example_inputs[place] for place in places), *values])

    def run(*args: Any) -> Any:
        return compiled(*(args[place] for place in places), *kept.values(args))

    return run


def _refuse_training(example_inputs: Sequence[Any]) -> None:
    trained = [x for x in example_inputs if isinstance(x, nn.Parameter) and x.requires_grad]
    if trained:
        raise ConfigError(
            "freeze computes with weights once, and these may still be trained",
            got=f"{len(trained)} parameters that require gradients, such as one of shape "
            f"{tuple(trained[0].shape)}",
            expected="parameters that require none",
            mend="call model.requires_grad_(False), or leave freeze out",
        )


def _refuse_inference(weights: Sequence[Tensor]) -> None:
    if any(weight.is_inference() for weight in weights):
        raise ConfigError(
            "freeze cannot notice changes of weights made in inference mode",
            got="parameters without a version, made under torch.inference_mode()",
            expected="parameters made outside of it",
            mend="make or load the model before entering torch.inference_mode()",
        )


class _Kept:
    """Messages of weights alone, with the state of the weights they were made from."""

    def __init__(self, making: fx.GraphModule, weights: Sequence[int]) -> None:
        self._making, self._weights = making, tuple(weights)
        self._given: list[tuple[weakref.ref[Tensor], State]] | None = None
        self._made: list[State] = []
        self._values: tuple[Any, ...] = ()

    def values(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the messages, made anew if a weight is not what it was."""
        given: list[Tensor] = [args[place] for place in self._weights]
        _refuse_inference(given)
        if not self._are_current(given):
            with torch.inference_mode(False), torch.no_grad():
                self._values = tuple(self._making(*args))
            self._given = [(weakref.ref(weight), _state(weight)) for weight in given]
            self._made = [_state(value) for value in self._values]
        return self._values

    def _are_current(self, given: Sequence[Tensor]) -> bool:
        # The object itself: a new tensor may have the number and the place of one that is gone.
        return (
            self._given is not None
            and all(
                weight is then() and _state(weight) == state
                for weight, (then, state) in zip(given, self._given, strict=True)
            )
            and self._made == [_state(value) for value in self._values]  # the caller may hold them
        )


def _state(tensor: Tensor) -> State:
    """Return what is another after a write to a tensor."""
    return tensor._version, tensor.data_ptr()


def _messages(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of weights alone that some other node reads."""
    weights = WeightOnly(gm)
    alone = {
        node
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output")
        and weights.key(node) is not None
        and isinstance(node.meta.get(VALUE_KEYS[1]), Tensor)
    }
    return [n for n in gm.graph.nodes if n in alone and any(u not in alone for u in n.users)]


def _part(gm: fx.GraphModule, outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a graph of the same inputs that makes some nodes."""
    needed, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        # Nothing else has effects on these nodes; a write is left to the graph that is run.
        if node in needed or node.op == "placeholder" or node.target in SWITCHES:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(gm, graph)


def _rest(
    gm: fx.GraphModule, placeholders: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[int]]:
    """Return the graph that takes some nodes as inputs, and which of the old inputs it keeps."""
    last, kept = placeholders[-1], set()
    for node in outputs:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"kept_{node.name}")
        last.meta = {key: node.meta[key] for key in VALUE_KEYS if key in node.meta}
        node.replace_all_uses_with(last)
        kept.add(last)
    erase_unused(outputs)
    _return_copies(gm.graph, kept)
    places = [place for place, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm, places


def _return_copies(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Let the graph return copies of what is kept: the caller may change what it gets."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        source = node
        while source not in kept and may_return_view(source) and source.all_input_nodes:
            source = source.all_input_nodes[0]
        if source in kept:
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            output.replace_input_with(node, copy)
