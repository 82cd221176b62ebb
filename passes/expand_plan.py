"""Rewrite TT operators as the steps that their plans take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from comera_fx import ops
from comera_fx.passes.inline_body import BodyInliner

WEIGHT_ONLY = "comera_fx.weight_only"
"""Key in ``node.meta["custom"]``, which AOTAutograd hands on to the nodes that it makes."""
_ACTIVATIONS = ("x", "ids")


@dataclass(frozen=True)
class ExpandPlan:
    """Put the planned steps of every TT operator in its place: plain products and views.

    Before::

        %y = call_function[comera_fx.tt_linear.default](
            %x, [%core_0, %core_1], None, 'tt', 1, 768, 768)

    After::

        %rows = call_function[aten.reshape.default](%x, [512, 768])
        %left = call_function[aten.reshape.default](%core_0, [768, 30])
        %mm = call_function[aten.mm.default](%rows, %left)
        %right = call_function[aten.reshape.default](%core_1, [30, 768])
        %mm_1 = call_function[aten.mm.default](%mm, %right)
        %y = call_function[aten.reshape.default](%mm_1, [4, 128, 768])

    The plan is the one for the number of tokens in the graph, or for ``num_tokens_hint`` where
    that is a symbol, and for the gradients that are wanted.

    New nodes that read no activation, but cores, factors and biases alone, are marked, so that
    a partitioner can make them again in the backward pass; see ``is_weight_only``.

    Numerics: keeps them, up to rounding.
    Leaves alone: operators whose inputs' sizes the graph does not tell, or under a function
    transform; torch takes these apart by itself.
    """

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of operators expanded."""
        named = ((node, ops.operator_name(node.target)) for node in gm.graph.nodes)
        calls = [(node, name) for node, name in named if name is not None]
        if not calls:
            return 0
        inliner = BodyInliner(gm)
        num_expanded = 0
        for node, name in calls:
            activations = _activations(node, name)
            made = inliner.inline(node, getattr(ops, name))
            if made is not None:
                _mark(made, activations)
                num_expanded += 1
        return num_expanded


def is_weight_only(node: fx.Node) -> bool:
    """Whether ``ExpandPlan`` made this node from the weights of a TT operator alone.

    In a joint graph, whether AOTAutograd traced it from such a node. Nodes of the backward pass,
    which get a copy of the forward pass' mark, do not count.
    """
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    return not is_backward and WEIGHT_ONLY in node.meta.get("custom", {})


def _activations(node: fx.Node, operator: str) -> set[fx.Node]:
    schema = getattr(torch.ops.comera_fx, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    found = [given[name] for name in _ACTIVATIONS if name in given]
    return {inner for inner in found if isinstance(inner, fx.Node)}


def _mark(made: Iterable[fx.Node], activations: set[fx.Node]) -> None:
    """Mark the nodes that read neither an activation nor anything made of one."""
    others = set(activations)
    for node in made:
        inputs = node.all_input_nodes
        if inputs and others.isdisjoint(inputs):
            node.meta["custom"] = {**node.meta.get("custom", {}), WEIGHT_ONLY: True}
        else:
            others.add(node)
