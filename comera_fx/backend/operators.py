"""Run a graph of operators one by one, with little time between them.

Small products take a few microseconds each, so what it takes to call them counts: views that
undo one another go, and operators are called by torch's own functions, which is faster than through
``torch.ops``.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from comera_fx.backend.late import batch_late_products
from comera_fx.backend.reuse import reuse_operands

aten = torch.ops.aten
_METHODS = {
    aten.view.default: "view",
    aten.reshape.default: "reshape",
    aten._unsafe_view.default: "view",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.expand.default: "expand",
    aten.select.int: "select",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.unbind.int: "unbind",
    aten.clone.default: "clone",
}
_FUNCTIONS: dict[object, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.sub_.Tensor: torch.Tensor.sub_,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.div_.Tensor: torch.Tensor.div_,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.sum.dim_IntList: torch.sum,
}
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_VIEWS = (*_RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default)


def boxed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, is_backward: bool = False
) -> Callable[..., Any]:
    """Return a function that runs a graph operator by operator, freeing what is used up.

    Args:
        gm: A graph of AOTAutograd; changed.
        example_inputs: What it takes.
        is_backward: Whether it is a backward graph, whose products for weights can wait.
    """
    simplify_views(gm.graph)
    if is_backward:
        batch_late_products(gm.graph)
    join_selects(gm.graph)
    reuse_operands(gm.graph)
    call_directly(gm.graph)
    gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    gm.recompile()
    run = gm.forward

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def simplify_views(graph: fx.Graph) -> int:
    """Drop views that do nothing or are there already; return how many.

    What the graph returns stays a tensor of its own.
    """
    returned = set(graph.output_node().all_input_nodes)
    known: dict[Hashable, fx.Node] = {}
    num_dropped = 0
    for node in list(graph.nodes):
        if node.target not in _VIEWS or node.kwargs:
            continue
        _skip_inner(node)
        back = _undone(node)
        if back is not None and node not in returned:
            node.replace_all_uses_with(back)
            graph.erase_node(node)
            num_dropped += 1
            continue
        key = (node.target, repr(node.args[1:]), node.args[0])
        same = node.args[0] if _does_nothing(node) else known.get(key)
        if isinstance(same, fx.Node) and node not in returned:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            num_dropped += 1
        else:
            known.setdefault(key, node)
    return num_dropped + _erase_unread(graph)


def _skip_inner(node: fx.Node) -> None:
    """Let a view read what the view below it reads, where that gives the same."""
    inner = node.args[0]
    while isinstance(inner, fx.Node) and node.target in _RESHAPES and inner.target in _RESHAPES:
        # A reshape of a reshape may have to copy where the outer one alone would be a view, and
        # never the other way round.
        if _is_view(inner):
            node.args = (inner.args[0], *node.args[1:])
            inner = node.args[0]
        else:
            break


def _undone(node: fx.Node) -> fx.Node | None:
    """Return what is read by the transpose that this one undoes."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not node.target:
        return None
    is_turn = node.target is aten.t.default or (
        node.target is aten.transpose.int and set(node.args[1:]) == set(inner.args[1:])
    )
    before = inner.args[0]
    return before if is_turn and isinstance(before, fx.Node) else None


def _is_view(node: fx.Node) -> bool:
    """Whether a reshape of this node's input has its elements in the same order in memory."""
    inner = node.args[0]
    value = inner.meta.get("val") if isinstance(inner, fx.Node) else None
    return isinstance(value, Tensor) and value.is_contiguous()


def _does_nothing(node: fx.Node) -> bool:
    """Whether a view gives what it reads."""
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if node.target in (aten.t.default, aten.transpose.int, aten.permute.default):
        return False
    fixed = all(isinstance(size, int) for size in (*before.shape, *after.shape))
    return fixed and before.shape == after.shape and before.stride() == after.stride()


def _erase_unread(graph: fx.Graph) -> int:
    """Erase views that no node reads any more; return how many."""
    unread = [node for node in graph.nodes if node.target in _VIEWS]
    num_erased = 0
    for node in reversed(unread):
        if not node.users:
            graph.erase_node(node)
            num_erased += 1
    return num_erased


def join_selects(graph: fx.Graph) -> int:
    """Take the parts of a tensor along its first axis in one call; return how many there were.

    The gradients of stacked weights come so.
    """
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.select.int and node.args[1] == 0 and not node.kwargs:
            groups.setdefault(node.args[0], []).append(node)
    num_joined = 0
    for source, nodes in groups.items():
        value = source.meta.get("val")
        count = value.shape[0] if isinstance(value, Tensor) else None
        if not isinstance(count, int) or 2 * len(nodes) < count or len(nodes) < 2:
            continue
        with graph.inserting_before(nodes[0]):
            parts = graph.call_function(aten.unbind.int, (source,))
        for node in nodes:
            with graph.inserting_before(node):
                part = graph.call_function(operator.getitem, (parts, node.args[2]))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            graph.erase_node(node)
        num_joined += len(nodes)
    return num_joined


def call_directly(graph: fx.Graph) -> None:
    """Call operators by torch's own functions and methods where these do the same."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        method = _METHODS.get(node.target)
        if method is not None and set(node.kwargs) <= {"memory_format"}:
            node.op, node.target = "call_method", method
            continue
        function = _FUNCTIONS.get(node.target) or _function_of(node.target)
        if function is not None and not node.kwargs:
            node.target = function


def _function_of(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Return torch's own function of an operator's name, which takes the same arguments."""
    if target.namespace != "aten" or target._overloadname != "default":
        return None
    # Torch's functions refuse None within a list of tensors, as in index_put(x, [None, ids], y).
    if any("List[Optional[Tensor]]" in str(each.type) for each in target._schema.arguments):
        return None
    function = getattr(torch, target._schema.name.removeprefix("aten::"), None)
    return function if isinstance(function, types.BuiltinFunctionType) else None
