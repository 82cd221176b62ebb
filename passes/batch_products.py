"""Rewrite equal products of weights alone as one batched product."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from comera_fx.passes.weight_only import (
    WeightOnly,
    erase_unused,
    may_reorder,
    move_before,
)
from comera_fx.replay import VALUE_KEYS, value_of

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_VALUE = VALUE_KEYS[1]


@dataclass(frozen=True)
class BatchProducts:
    """Make equal products of weights alone in one batched product each.

    Before::

        %a = call_function[aten.mm.default](%a_core_0, %a_core_1)
        %b = call_function[aten.mm.default](%b_core_0, %b_core_1)

    After::

        %firsts = call_function[aten.stack.default]([%a_core_0, %b_core_0])
        %seconds = call_function[aten.stack.default]([%a_core_1, %b_core_1])
        %products = call_function[aten.bmm.default](%firsts, %seconds)
        %both = call_function[aten.unbind.int](%products)
        %a = call_function[getitem](%both, 0)
        %b = call_function[getitem](%both, 1)

    Products are equal if they are made in the same way of weights of the same shapes, dtype and
    device: those of one step in the plans of equal layers. Of products of the same weights one is
    left, and views between two batched products stay views of the batch.

    Numerics: keeps them, up to rounding.
    Leaves alone: groups that ``choose`` turns down; products that depend on more than weights, or
    on weights that may be written to; module graphs.

    Args:
        choose: Whether so many products of a shape ``(m, n, k)`` are made together, given their
            number, the shape, and a tensor like the result.
    """

    choose: Callable[[int, tuple[int, int, int], Tensor], bool]
    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of products made together with others."""
        if not may_reorder(gm):
            return 0
        weights = WeightOnly(gm)
        forms = _Forms(gm, weights)
        groups: dict[Hashable, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if node.target is aten.mm.default and (form := forms.of(node)) is not None:
                groups.setdefault(form, []).append(node)
        batches = _Batches()
        num_batched = 0
        for nodes in groups.values():
            nodes = _without_equal(weights, nodes)
            if len(nodes) > 1 and self.choose(len(nodes), *_shape_of(gm, nodes[0])):
                batches.batch(nodes)
                num_batched += len(nodes)
        return num_batched


class _Forms:
    """Tells which computations of weights differ in nothing but the weights."""

    def __init__(self, gm: fx.GraphModule, weights: WeightOnly) -> None:
        self._gm, self._weights = gm, weights
        self._known: dict[fx.Node, Hashable | None] = {}

    def of(self, node: fx.Node) -> Hashable | None:
        """Return what equal computations share; ``None`` if more than weights is read."""
        if node not in self._known:
            self._known[node] = None if self._weights.key(node) is None else self._form(node)
        return self._known[node]

    def _form(self, node: fx.Node) -> Hashable | None:
        value = _value(self._gm, node)
        if value is None:
            return None
        if not self._weights.is_computed(node):
            return (tuple(value.shape), value.dtype, value.device, value.requires_grad)
        inner = [self.of(given) for given in node.all_input_nodes]
        if any(form is None for form in inner):
            return None
        rest = fx.node.map_arg((node.args, node.kwargs), lambda given: None)
        return (str(node.target), tuple(inner), repr(rest), self._weights.state(node))


def _value(gm: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Return a tensor like what a node holds, where the graph tells."""
    value = node.meta.get(_VALUE, value_of(gm, node))
    is_fixed = isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)
    return value if is_fixed else None


def _shape_of(gm: fx.GraphModule, node: fx.Node) -> tuple[tuple[int, int, int], Tensor]:
    first, second = (_value(gm, given) for given in node.args)  # type: ignore[arg-type]
    assert first is not None, "a product in a group has known operands"
    assert second is not None, "a product in a group has known operands"
    (m, k), n = first.shape, second.shape[1]
    return (m, n, k), first


def _without_equal(weights: WeightOnly, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return one product of each set of weights, in the graph's order; readers get that one."""
    kept: dict[int | None, fx.Node] = {}
    for node in nodes:
        first = kept.setdefault(weights.key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            erase_unused([node])
    return list(kept.values())


class _Batches:
    """Puts batched products into a graph, and knows which nodes they stand for."""

    def __init__(self) -> None:
        self._places: dict[fx.Node, tuple[fx.Node, int, int]] = {}

    def batch(self, nodes: Sequence[fx.Node]) -> None:
        """Make some products in one, at the place of the first."""
        graph, first = nodes[0].graph, nodes[0]
        for node in nodes[1:]:
            for given in node.all_input_nodes:
                move_before(given, first)
        with graph.inserting_before(first):
            operands = [self._together([node.args[side] for node in nodes]) for side in (0, 1)]
            products = graph.call_function(aten.bmm.default, tuple(operands))
            each = graph.call_function(aten.unbind.int, (products,))
            results = [graph.call_function(operator.getitem, (each, k)) for k in range(len(nodes))]
        for made in (*operands, products, each, *results):
            made.meta = {**_kept_meta(first), **made.meta}
        for place, (node, result) in enumerate(zip(nodes, results, strict=True)):
            result.meta = dict(node.meta)
            self._places[result] = products, place, len(nodes)
            node.replace_all_uses_with(result)
            erase_unused([node])

    def _together(self, nodes: Sequence[Any]) -> fx.Node:
        """Return a node with the matrices of some nodes as a batch: a view where there is one."""
        graph: fx.Graph = nodes[0].graph
        count = len(nodes)
        places = [self._places.get(node) for node in nodes]
        if places[0] is not None and places == [(places[0][0], k, count) for k in range(count)]:
            return places[0][0]
        view = batched_view(nodes)
        if view is not None:
            inner = self._together([node.args[0] for node in nodes])
            return graph.call_function(batched_target(nodes[0]), (inner, *view))
        if len(set(nodes)) == 1:
            return graph.call_function(aten.expand.default, (nodes[0], [count, -1, -1]))
        return graph.call_function(aten.stack.default, (list(nodes),))


def batched_view(nodes: Sequence[fx.Node]) -> tuple[Any, ...] | None:
    """Return the arguments after the first of the view of a batch that some equal views make.

    Args:
        nodes: Views of one form, of the tensors in a batch.

    Returns:
        ``None`` where they are no views, or of different forms, or of tensors that are not alike.
        They are for ``batched_target``.
    """
    first = nodes[0]
    if len({(node.target, repr(node.args[1:]), repr(node.kwargs)) for node in nodes}) > 1:
        return None
    if first.op != "call_function" or first.kwargs or not _are_alike(nodes):
        return None
    rest: Any = first.args[1:]
    if first.target in RESHAPES:
        sizes = rest[0]
        is_known = all(isinstance(size, int) and size >= 0 for size in sizes)
        return ([len(nodes), *sizes],) if is_known else None
    if first.target is aten.permute.default:
        axes = rest[0]
        return ([0, *(axis % len(axes) + 1 for axis in axes)],)
    if first.target is aten.transpose.int:
        return tuple(axis + 1 if axis >= 0 else axis for axis in rest)
    return (1, 2) if first.target is aten.t.default else None


def batched_target(view: fx.Node) -> torch._ops.OpOverload:
    """Return the operator that makes of a batch what a view makes of one tensor.

    A reshape, since of a batch with gaps in memory it may have to be a copy.
    """
    if view.target in RESHAPES:
        return aten.reshape.default
    if view.target is aten.t.default:
        return aten.transpose.int
    assert isinstance(view.target, torch._ops.OpOverload)
    return view.target


def _are_alike(views: Sequence[fx.Node]) -> bool:
    """Whether views are of tensors of one shape, dtype and device, so that these can be stacked."""
    forms = set()
    for view in views:
        inner = view.args[0] if view.args else None
        value = inner.meta.get(_VALUE) if isinstance(inner, fx.Node) else None
        if not isinstance(value, Tensor):
            return False
        forms.add((str(value.shape), value.dtype, value.device))
    return len(forms) == 1


def _kept_meta(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of a product that its batch has too."""
    unwanted = (*VALUE_KEYS, "tensor_meta")
    return {key: value for key, value in node.meta.items() if key not in unwanted}
