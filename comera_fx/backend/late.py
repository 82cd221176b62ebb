"""Make products that nothing waits for together, late in a backward graph.

The gradients of the factors of equal layers are products of few rows with few tokens; nothing reads
them before those of all layers are stacked. One batched product then does for all of them, and
gives the stack without a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from comera_fx.passes.batch_products import RESHAPES, batched_target, batched_view
from comera_fx.passes.weight_only import erase_unused

aten = torch.ops.aten

Nodes = tuple[fx.Node, ...]


def batch_late_products(graph: fx.Graph) -> int:
    """Batch products that are stacked or returned; return how many were made with others.

    Only where the operands to be stacked hold no more than the results, which otherwise would be;
    and in no graph that writes to what it is given, since products may read that.

    Args:
        graph: A backward graph of AOTAutograd, changed in place.
    """
    if any(map(_writes, graph.nodes)):
        return 0
    late = _Late(graph)
    for node in list(graph.nodes):
        if node.target is aten.stack.default and len(node.args) == 1:
            late.batch_stack(node)
    late.batch_results()
    return late.num_batched


class _Late:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._made: dict[Nodes, fx.Node] = {}
        self.num_batched = 0

    def batch_stack(self, stack: fx.Node) -> None:
        """Replace a stack of products by a batched product."""
        nodes: Nodes = tuple(stack.args[0])  # type: ignore[arg-type]
        if not self._may_batch(nodes, {stack}):
            return
        with self._graph.inserting_before(stack):
            new = self._together(nodes, readers={stack})
        new.meta = {**stack.meta, **new.meta}
        stack.replace_all_uses_with(new)
        erase_unused([stack])

    def batch_results(self) -> None:
        """Batch equal products, and sums of what is stacked, that the graph returns."""
        output = self._graph.output_node()
        for nodes in _groups(output.all_input_nodes, self._key_of_result):
            ends: Nodes = tuple(nodes)
            if not self._may_batch(ends, {output}):
                continue
            with self._graph.inserting_before(output):
                batch = self._together(ends, readers={output})
                parts = self._graph.call_function(aten.unbind.int, (batch,))
                for place, node in enumerate(ends):
                    part = self._graph.call_function(operator.getitem, (parts, place))
                    part.meta = dict(node.meta)
                    node.replace_all_uses_with(part)
            erase_unused(ends)

    def _key_of_result(self, node: fx.Node) -> Hashable | None:
        """Return what results have in common that may be batched, from product to result."""
        key: list[Hashable] = []
        while node.target in RESHAPES:
            key += [node.target, repr(node.args[1:])]
            node = node.args[0]  # type: ignore[assignment]
        return (*key, *_forms(node)) if node.target is aten.mm.default else None

    def _may_batch(self, nodes: Nodes, readers: set[fx.Node]) -> bool:
        """Whether nodes are products, or reshapes of such, that may be made together.

        Nothing but ``readers`` may read them. A batch of transposes would have other strides than
        a stack of them.
        """
        while all(node.target in RESHAPES for node in nodes) and batched_view(nodes) is not None:
            if any(set(node.users) - readers for node in nodes):
                return False
            readers = set(nodes)
            nodes = tuple(node.args[0] for node in nodes)  # type: ignore[misc]
        return (
            len(set(nodes)) == len(nodes) > 1
            and all(node.target is aten.mm.default for node in nodes)
            and not any(set(node.users) - readers for node in nodes)
            and len({_forms(node) for node in nodes}) == 1
            and _pays(nodes[0])
        )

    def _together(self, nodes: Nodes, readers: set[fx.Node] | None = None) -> fx.Node:
        """Return the stack of some nodes; of products, if all that reads them are ``readers``."""
        if nodes not in self._made:
            self._made[nodes] = self._make(nodes, readers)
        return self._made[nodes]

    def _make(self, nodes: Nodes, readers: set[fx.Node] | None) -> fx.Node:
        call: Callable[..., fx.Node] = self._graph.call_function
        view = batched_view(nodes)
        if view is not None:
            inner: Nodes = tuple(node.args[0] for node in nodes)  # type: ignore[misc]
            made = self._together(inner, set(nodes) if readers is not None else None)
            new = call(batched_target(nodes[0]), (made, *view))
        elif readers is not None and nodes[0].target is aten.mm.default:
            sides = [self._together(tuple(n.args[k] for n in nodes)) for k in (0, 1)]  # type: ignore[misc]
            new = call(aten.bmm.default, tuple(sides))
            self.num_batched += len(nodes)
        else:
            new = call(aten.stack.default, (list(nodes),))
        new.meta["val"] = _value_of(new)
        return new


def _groups(nodes: Sequence[fx.Node], key: Callable[[fx.Node], Any]) -> list[list[fx.Node]]:
    found: dict[Hashable, list[fx.Node]] = {}
    for node in nodes:
        form = key(node)
        if form is not None:
            found.setdefault(form, []).append(node)
    return [group for group in found.values() if len(group) > 1]


def _writes(node: fx.Node) -> bool:
    """Whether an operator writes to what it reads."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _value_of(node: fx.Node) -> Tensor:
    """Return a tensor like what a node computes, from those of its inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    value = next(given.meta["val"] for given in node.all_input_nodes)
    assert callable(node.target)
    with value.fake_mode if isinstance(value, FakeTensor) else nullcontext():
        result: Tensor = node.target(*args, **kwargs)
    return result


def _forms(node: fx.Node) -> tuple[Hashable, ...]:
    """Return shapes, dtypes and devices of a product's operands; symbols by name."""
    values = [given.meta.get("val") for given in node.args if isinstance(given, fx.Node)]
    return tuple(
        (str(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else None
        for value in values
    )


def _pays(product: fx.Node) -> bool:
    """Whether the operands of a product hold no more than its result."""
    sizes = []
    for node in (*product.args, product):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in value.shape):
            return False
        sizes.append(value.numel())
    return sizes[0] + sizes[1] <= sizes[2]
