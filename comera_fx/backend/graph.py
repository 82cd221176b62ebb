"""Make graphs of dynamo ready for the passes: which inputs are weights, and what state it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from comera_fx.passes.pipeline import copy_graph_module
from comera_fx.passes.regions import START, State
from comera_fx.replay import VALUE_KEYS, WEIGHT

DYNAMO_VALUE, VALUE = VALUE_KEYS
_BODIES = ("wrap", "tag_activation_checkpoint", "checkpoint")


def prepared(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Return a copy of a graph of dynamo in which weights and values are told.

    Args:
        gm: The graph, which takes parameters as inputs. It is not changed.
        example_inputs: What it was made with.
    """
    weights = [x if isinstance(x, nn.Parameter) else None for x in example_inputs]
    return _prepared(gm, weights)


def _prepared(gm: fx.GraphModule, weights: Sequence[Tensor | None]) -> fx.GraphModule:
    gm = copy_graph_module(gm)
    gm.meta[START] = State(grad=torch.is_grad_enabled())
    _drop_unread(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, weight in zip(placeholders, weights, strict=False):
        if weight is not None:
            node.meta[WEIGHT] = weight
    for node in gm.graph.nodes:
        if DYNAMO_VALUE in node.meta:
            node.meta[VALUE] = node.meta.pop(DYNAMO_VALUE)
    for node in gm.graph.find_nodes(op="get_attr"):
        child = getattr(gm, str(node.target), None)
        if isinstance(child, fx.GraphModule):
            setattr(gm, str(node.target), _prepared(child, _weights_given(node)))
    return gm


def _drop_unread(gm: fx.GraphModule) -> None:
    """Erase operators of ours that nothing reads.

    Code that asks for the shape or the device of a reconstructed weight leaves them.
    """
    for node in reversed(gm.graph.nodes):
        if not node.users and str(node.target).startswith("comera_fx."):
            gm.graph.erase_node(node)


def _weights_given(body: fx.Node) -> list[Tensor | None]:
    """Return which inputs of a graph that a checkpoint runs are weights."""
    for call in body.users:
        if str(call.target) in _BODIES and call.args and call.args[0] is body:
            operands = call.args[1:]
            return [x.meta.get(WEIGHT) if isinstance(x, fx.Node) else None for x in operands]
    return []


def forget_weights(gm: fx.GraphModule) -> None:
    """Let go of the weights, which the caller of the compiled graph holds."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="placeholder"):
                node.meta.pop(WEIGHT, None)
