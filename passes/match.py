"""What the passes that make TT operators share: who calls a layer, who else reads its weight."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from comera_fx.modules import TTModule
from comera_fx.replay import value_of

Dense = TypeVar("Dense", nn.Linear, nn.Embedding)
TT = TypeVar("TT", bound=TTModule)


def calls_by_layer(gm: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Group calls by layer: one layer may be called twice and must be replaced once."""
    calls: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    return calls


def layers_by_input(gm: fx.GraphModule) -> list[list[str]]:
    """Return the names of layers that read one value, in the order in which they are called."""
    readers: dict[fx.Node, dict[str, None]] = {}
    for name, calls in calls_by_layer(gm).items():
        # A layer that is called twice would have to be made ready for either input.
        if len(calls) == 1 and isinstance(calls[0].all_input_nodes[0], fx.Node):
            readers.setdefault(calls[0].all_input_nodes[0], {})[name] = None
    return [list(names) for names in readers.values() if len(names) > 1]


def has_other_reader(gm: fx.GraphModule, weight: Tensor) -> bool:
    """Whether a second module owns ``weight``, or a node reads it without calling its module."""
    owners = sum(param is weight for _, param in gm.named_parameters(remove_duplicate=False))
    return owners > 1 or any(value_of(gm, node) is weight for node in gm.graph.nodes)


def replace_layers(
    gm: fx.GraphModule,
    dense_type: type[Dense],
    choose: Callable[[str, Dense], TT | None],
    insert: Callable[[fx.GraphModule, str, fx.Node, TT], fx.Node],
) -> int:
    """Replace the calls of each chosen dense layer by operators on the cores of its TT form.

    Args:
        gm: Graph to rewrite in place.
        dense_type: Exact type of the layers looked at: a subclass may compute something else.
        choose: Maps name and dense layer to the layer that takes its place, or ``None``.
        insert: Inserts the operator for one call; given graph, name, call and TT layer.

    Returns:
        The number of layers replaced; weights with a second reader are left alone.
    """
    num_replaced = 0
    for name, calls in calls_by_layer(gm).items():
        dense = gm.get_submodule(name)
        if type(dense) is not dense_type or has_other_reader(gm, dense.weight):
            continue
        layer = choose(name, dense)
        if layer is None:
            continue
        gm.set_submodule(name, layer)
        for call in calls:
            replace_call(call, insert(gm, name, call, layer))
        num_replaced += 1
    return num_replaced


def input_of(call: fx.Node) -> Argument:
    """Return the one input of a call of ``nn.Linear`` or ``nn.Embedding``."""
    return call.args[0] if call.args else call.kwargs["input"]


def replace_call(call: fx.Node, new: fx.Node) -> None:
    """Give every user of ``call`` the node ``new``, and drop ``call``."""
    call.replace_all_uses_with(new)
    call.graph.erase_node(call)


def insert_cores(gm: fx.GraphModule, name: str, layer: TTModule) -> list[fx.Node]:
    """Insert the nodes that read the cores of ``layer``, its rank weights multiplied in.

    Args:
        gm: Graph whose submodule ``name`` is ``layer``; nodes go to its insertion point.
        name: Qualified name of the layer.
        layer: The TT layer; the same products as in its ``effective_cores``.
    """
    graph, held = gm.graph, layer.cores
    cores = [graph.get_attr(f"{name}.core_{k}") for k in range(len(held))]
    for k in range(1, len(layer.rank_weights) + 1):
        weight = graph.get_attr(f"{name}.rank_weight_{k}")
        live = graph.call_function(F.threshold, (weight, layer.rank_threshold, 0.0))
        live = graph.call_method("to", (live, held[k].dtype))
        if layer.joins_left(k):
            cores[k - 1] = graph.call_function(operator.mul, (cores[k - 1], live))
        else:
            shape = (-1, *(1 for _ in held[k].shape[1:]))
            column = graph.call_method("reshape", (live, *shape))
            cores[k] = graph.call_function(operator.mul, (column, cores[k]))
    return cores
