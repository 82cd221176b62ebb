"""Compute what depends on weights alone once, for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from comera_fx.errors import ConfigError
from comera_fx.passes.weight_only import WeightOnly
from comera_fx.replay import VALUE_KEYS

Compiled = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


def frozen(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_one: Compile) -> Compiled:
    """Compile a planned graph whose messages of weights alone are made once and kept.

    They are made again when a weight was changed in place or is another tensor.

    Args:
        gm: The graph; changed.
        example_inputs: What it takes.
        compile_one: Compiles a graph, given what it takes.

    Raises:
        ConfigError: If a weight requires a gradient.
    """
    _refuse_training(example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    outputs = _messages(gm)
    if not outputs:
        return compile_one(gm, example_inputs)
    making = _part(gm, outputs)
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
            "freeze computes with weights once, while these are being trained",
            got=f"{len(trained)} parameters that require gradients, such as one of shape "
            f"{tuple(trained[0].shape)}",
            expected="parameters that require none",
            mend="call model.requires_grad_(False), or leave freeze out",
        )


class _Kept:
    """Messages of weights alone, with the state of the weights they were made from."""

    def __init__(self, making: fx.GraphModule, weights: Sequence[int]) -> None:
        self._making, self._weights = making, tuple(weights)
        self._state: tuple[tuple[int, int, int], ...] = ()
        self._values: tuple[Any, ...] = ()

    def values(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the messages, made anew if a weight is not what it was."""
        given = [args[place] for place in self._weights]
        state = tuple((id(w), w._version, w.data_ptr()) for w in given)
        if state != self._state:
            with torch.no_grad():
                self._values = tuple(self._making(*args))
            self._state = state
        return self._values


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
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    part = fx.GraphModule(gm, graph)
    part.graph.eliminate_dead_code()
    part.recompile()
    return part


def _rest(
    gm: fx.GraphModule, placeholders: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[int]]:
    """Return the graph that takes some nodes as inputs, and which of the old inputs it keeps."""
    last = placeholders[-1]
    for node in outputs:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"kept_{node.name}")
        last.meta = {key: node.meta[key] for key in VALUE_KEYS if key in node.meta}
        node.replace_all_uses_with(last)
    gm.graph.eliminate_dead_code()
    places = [place for place, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm, places
