"""Make products that nothing waits for together, late in a backward graph.

The gradients of the factors of equal layers are products of few rows with few tokens; nothing reads
them before those of all layers are stacked. One batched product then does for all of them, and
gives the stack without a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor, fx

from comera_fx.passes.batch_products import aten, batched_view

Nodes = tuple[fx.Node, ...]


def batch_late_products(graph: fx.Graph) -> int:
    """Batch products that are stacked or returned; return how many were made with others.

    Only where the operands to be stacked hold no more than the results, which otherwise would be.

    Args:
        graph: A graph of AOTAutograd, changed in place.
    """
    late = _Late(graph)
    for node in list(graph.nodes):
        if node.target is aten.stack.default and len(node.args) == 1:
            late.batch_stack(node)
    late.batch_results()
    return late.num_batched


class _Late:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._made: dict[Nodes, fx.Node] = {}
        self.num_batched = 0

    def batch_stack(self, stack: fx.Node) -> None:
        """Replace a stack of products by a batched product."""
        nodes: Nodes = tuple(stack.args[0])  # type: ignore[arg-type]
        product = self._product_of(nodes, {stack})
        if product is None:
            return
        with self._graph.inserting_before(stack):
            new = self._together(nodes, readers={stack})
        new.meta = {**stack.meta, **new.meta}
        stack.replace_all_uses_with(new)
        self._erase([stack])

    def batch_results(self) -> None:
        """Batch equal products, and sums of what is stacked, that the graph returns."""
        output = self._graph.output_node()
        for nodes in _groups(output.all_input_nodes, self._key_of_result):
            ends: Nodes = tuple(nodes)
            if self._product_of(ends, {output}) is None:
                continue
            with self._graph.inserting_before(output):
                batch = self._together(ends, readers={output})
                parts = self._graph.call_function(aten.unbind.int, (batch,))
                for place, node in enumerate(ends):
                    part = self._graph.call_function(operator.getitem, (parts, place))
                    part.meta = dict(node.meta)
                    node.replace_all_uses_with(part)
            self._erase(ends)

    def _key_of_result(self, node: fx.Node) -> Hashable | None:
        """Return what results have in common that may be batched, from product to result."""
        key: list[Hashable] = []
        while _is_view(node):
            key += [node.target, repr(node.args[1:])]
            node = node.args[0]  # type: ignore[assignment]
        return (*key, *_shapes(node)) if node.target is aten.mm.default else None

    def _product_of(self, nodes: Nodes, readers: set[fx.Node]) -> Nodes | None:
        """Return the products that nodes are views of, if these may be made together."""
        while all(map(_is_view, nodes)) and batched_view(nodes) is not None:
            if any(set(node.users) - readers for node in nodes):
                return None
            readers = set(nodes)
            nodes = tuple(node.args[0] for node in nodes)  # type: ignore[misc]
        if len(set(nodes)) < max(len(nodes), 2):
            return None
        if any(node.target is not aten.mm.default for node in nodes):
            return None
        if any(set(node.users) - readers for node in nodes):
            return None
        if len({_shapes(node) for node in nodes}) > 1 or not _pays(nodes[0]):
            return None
        return nodes

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
            target = aten.transpose.int if nodes[0].target is aten.t.default else nodes[0].target
            new = call(target, (made, *view))
        elif readers is not None and nodes[0].target is aten.mm.default:
            sides = [self._together(tuple(n.args[k] for n in nodes)) for k in (0, 1)]  # type: ignore[misc]
            new = call(aten.bmm.default, tuple(sides))
            self.num_batched += len(nodes)
        else:
            new = call(aten.stack.default, (list(nodes),))
        value = nodes[0].meta.get("val")
        if isinstance(value, Tensor):
            new.meta["val"] = value.new_empty((len(nodes), *value.shape))
        return new

    def _erase(self, nodes: Sequence[fx.Node]) -> None:
        """Erase nodes that nothing reads any more, and what only they have read."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node.users or node.op == "placeholder" or node not in self._order:
                continue
            waiting += node.all_input_nodes
            del self._order[node]
            self._graph.erase_node(node)


def _groups(nodes: Sequence[fx.Node], key: Callable[[fx.Node], Any]) -> list[list[fx.Node]]:
    found: dict[Hashable, list[fx.Node]] = {}
    for node in nodes:
        form = key(node)
        if form is not None:
            found.setdefault(form, []).append(node)
    return [group for group in found.values() if len(group) > 1]


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and batched_view((node,)) is not None


def _shapes(node: fx.Node) -> tuple[Hashable, ...]:
    """Return shapes and dtypes of a product's operands; symbols by name."""
    values = [given.meta.get("val") for given in node.args if isinstance(given, fx.Node)]
    return tuple((str(getattr(v, "shape", None)), getattr(v, "dtype", None)) for v in values)


def _pays(product: fx.Node) -> bool:
    """Whether the operands of a product hold no more than its result."""
    sizes = []
    for node in (*product.args, product):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in value.shape):
            return False
        sizes.append(value.numel())
    return sizes[0] + sizes[1] <= sizes[2]
