"""Let elementwise operators write over an operand that nothing reads any more.

A fresh tensor costs page faults and a pass through the caches; what is overwritten has both behind
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_IN_PLACE: dict[object, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.clamp.default: aten.clamp_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.relu.default: aten.relu_.default,
}
_UNTOLD = (aten.reshape.default, aten._unsafe_view.default, aten.contiguous.default)
"""Operators that may hand their input's memory on, though their schemas do not say so."""
_COMMUTE = (aten.add.Tensor, aten.mul.Tensor)


def reuse_operands(graph: fx.Graph) -> int:
    """Make elementwise operators in place where that is not seen; return how many.

    An operand is written over if the graph itself made it, nothing that shares its memory is read
    later or returned, and it has the result's dtype, shape and strides.

    Args:
        graph: A graph of AOTAutograd, changed in place.
    """
    memory = _Memory(graph)
    num_reused = 0
    for place, node in enumerate(graph.nodes):
        if node.target not in _IN_PLACE:
            continue
        for operand in _operands(node):
            if memory.is_free(operand, place, node):
                if node.args[0] is not operand:
                    node.args = (operand, node.args[0], *node.args[2:])
                node.target = _IN_PLACE[node.target]
                memory.join(node, operand)
                num_reused += 1
                break
    return num_reused


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node could write over, by exchanging them if need be."""
    given = node.args[:2] if node.target in _COMMUTE and not node.kwargs else node.args[:1]
    return [operand for operand in given if isinstance(operand, fx.Node)]


class _Memory:
    """Which nodes share memory, and when each piece of it is read last."""

    def __init__(self, graph: fx.Graph) -> None:
        self._roots: dict[fx.Node, fx.Node] = {}
        self._last: dict[fx.Node, int] = {}
        for place, node in enumerate(graph.nodes):
            for given in node.all_input_nodes:
                root = self._roots[given]
                self._last[root] = len(graph.nodes) if node.op == "output" else place
            self._roots[node] = self._root(node)
            self._last.setdefault(self._roots[node], place)

    def _root(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory a node's result may be a part of."""
        inputs = node.all_input_nodes
        if not inputs or node.op == "output":
            return node
        if isinstance(node.target, torch._ops.OpOverload):
            shares = any(result.alias_info is not None for result in node.target._schema.returns)
            shares = shares or node.target in _UNTOLD
            return self._roots[inputs[0]] if shares else node
        source = inputs[0].target  # an item of several results
        is_fresh = isinstance(source, torch._ops.OpOverload) and not any(
            result.alias_info is not None for result in source._schema.returns
        )
        return node if is_fresh else self._roots[inputs[0]]

    def is_free(self, operand: fx.Node, place: int, node: fx.Node) -> bool:
        """Whether the node at ``place``, the last to read it, may write over an operand."""
        root = self._roots[operand]
        if not _is_made_here(root) or self._last[root] != place:
            return False
        sharing = [given for given in node.all_input_nodes if self._roots[given] is root]
        if len(sharing) > 1 or sum(arg is operand for arg in node.args) > 1:
            return False
        before, after = operand.meta.get("val"), node.meta.get("val")
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return False
        return _form(before) == _form(after)

    def join(self, node: fx.Node, operand: fx.Node) -> None:
        """Note that a node's result now is its operand's memory."""
        root, own = self._roots[operand], self._roots[node]
        last = max(self._last[root], self._last[own])
        for other, its_root in self._roots.items():
            if its_root is own:
                self._roots[other] = root
        self._last[root] = last


def _is_made_here(root: fx.Node) -> bool:
    """Whether an operator of the graph made this memory, and not one that hands it on."""
    return root.op == "call_function" and not isinstance(
        root.target, torch._ops.HigherOrderOperator
    )


def _form(tensor: Tensor) -> tuple[object, ...]:
    """Return dtype, shape and strides; symbols by name, so that no graph is bound to a number."""
    sizes = [*tensor.shape, *tensor.stride()]
    return (tensor.dtype, tensor.device, *map(str, sizes))
