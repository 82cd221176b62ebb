"""Let elementwise operators write over an operand that nothing reads any more.

A fresh tensor costs page faults and a pass through the caches; what is overwritten has both behind
it.
"""

from __future__ import annotations

import operator
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
_FRESH = {
    "add", "sub", "mul", "div", "neg", "reciprocal", "sqrt", "rsqrt", "pow", "exp", "log", "tanh",
    "sigmoid", "relu", "gelu", "silu", "clamp", "where", "threshold", "gelu_backward",
    "silu_backward", "tanh_backward", "sigmoid_backward", "threshold_backward",
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "sum", "mean", "var",
    "cat", "stack", "clone", "_to_copy", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "embedding", "embedding_dense_backward", "index_select",
    "index_add", "gather", "scatter_add", "randint", "bernoulli", "native_dropout",
    "native_dropout_backward", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full",
    "constant_pad_nd", "slice_backward", "select_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
"""Operators whose results are memory of their own. Others may hand on what they read, whatever
their schemas say."""
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
                memory.join(node, operand)
                node.target = _IN_PLACE[node.target]
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
        self._items: dict[tuple[fx.Node, object], fx.Node] = {}
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
        source = inputs[0] if node.target is operator.getitem else node
        if _makes_memory(source):
            if source is node:
                return node
            return self._items.setdefault((source, node.args[1]), node)
        for given in inputs[1:]:  # in doubt it shares the memory of all
            self._merge(self._roots[given], self._roots[inputs[0]])
        return self._roots[inputs[0]]

    def _merge(self, one: fx.Node, other: fx.Node) -> None:
        """Take two pieces of memory for one, which stays the caller's if one of them is."""
        if not _is_made_here(one):
            one, other = other, one
        if one is not other:
            self._last[other] = max(self._last[one], self._last[other])
            for node, root in self._roots.items():
                if root is one:
                    self._roots[node] = other

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
        self._merge(self._roots[node], self._roots[operand])


def _is_made_here(root: fx.Node) -> bool:
    """Whether an operator of the graph made this memory, and not one that hands it on."""
    return _makes_memory(root.args[0] if root.target is operator.getitem else root)


def _makes_memory(node: object) -> bool:
    target = node.target if isinstance(node, fx.Node) else None
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return target._schema.name.removeprefix("aten::") in _FRESH


def _form(tensor: Tensor) -> tuple[object, ...]:
    """Return dtype, shape and strides; symbols by name, so that no graph is bound to a number."""
    sizes = [*tensor.shape, *tensor.stride()]
    return (tensor.dtype, tensor.device, *map(str, sizes))
