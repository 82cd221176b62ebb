"""Which nodes read a matrix as a layer does, and which may write to one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import Argument

from comera_fx import ops as ops  # registers the operators

aten = torch.ops.aten

# Targets, a string being a method of a tensor, with the names of their arguments in order.
_LINEAR: dict[object, str] = {
    F.linear: "input weight bias",
    aten.linear.default: "input weight bias",
}
_MATMUL: dict[object, str] = {
    operator.matmul: "input weight",
    torch.matmul: "input other",
    torch.mm: "input mat2",
    aten.matmul.default: "self other",
    aten.mm.default: "self mat2",
    "matmul": "self other",
    "mm": "self mat2",
}
_ADDMM: dict[object, str] = {
    torch.addmm: "input mat1 mat2",
    aten.addmm.default: "self mat1 mat2",
    "addmm": "self mat1 mat2",
}
_EMBEDDING: dict[object, str] = {
    F.embedding: "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    torch.embedding: "weight indices padding_idx scale_grad_by_freq sparse",
    aten.embedding.default: "weight indices padding_idx scale_grad_by_freq sparse",
}
_READS = (_LINEAR, _MATMUL, _ADDMM, _EMBEDDING)

IN_PLACE = (
    operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
    operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub,
    operator.itruediv, operator.ixor, operator.setitem,
)  # fmt: skip


@dataclass(frozen=True)
class WeightRead:
    """A product with a matrix, or a look-up of its rows.

    Args:
        input: The activations, or the ids.
        weight: The matrix.
        is_lookup: Whether it looks rows up.
        by_columns: Whether the input's last axis runs over the columns of the matrix, as in
            ``F.linear``, and not over its rows, as in ``x @ weight``; ids count rows.
        bias: What is added to the product.
        padding_idx: The row that gets no gradient; a negative number counts from the end.
    """

    input: fx.Node
    weight: fx.Node
    is_lookup: bool = False
    by_columns: bool = False
    bias: fx.Node | None = None
    padding_idx: int | None = None


def weight_read_of(node: fx.Node) -> WeightRead | None:
    """Return what ``node`` reads if it computes what a linear layer or a table computes.

    A product with a vector or a batch of matrices on the left is one; which operand is a weight
    is for the caller to tell. Products with a factor, and look-ups that change the table
    (``max_norm``) or its gradient (``sparse``, ``scale_grad_by_freq``), are none.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    names = next((table[node.target] for table in _READS if node.target in table), None)
    given = None if names is None else arguments_of(node, names)
    if given is None:
        return None
    if node.target in _EMBEDDING:
        return _lookup(node, given)
    if node.target in _ADDMM:
        bias, x, weight = given.values()
    else:
        x, weight, bias = (*given.values(), None)[:3]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if not (bias is None or isinstance(bias, fx.Node)):
        return None
    return WeightRead(x, weight, by_columns=node.target in _LINEAR, bias=bias)


def _lookup(node: fx.Node, given: dict[str, Any]) -> WeightRead | None:
    ids, table = given.get("input", given.get("indices")), given.get("weight")
    padding_idx = given.get("padding_idx")
    if not isinstance(ids, fx.Node) or not isinstance(table, fx.Node):
        return None
    if any(given.get(key) for key in ("scale_grad_by_freq", "sparse")):
        return None
    if given.get("max_norm") is not None or not isinstance(padding_idx, (int, type(None))):
        return None
    if node.target is not F.embedding and padding_idx is not None and padding_idx < 0:
        padding_idx = None  # to the operator, other than to the function, it means none
    return WeightRead(ids, table, is_lookup=True, padding_idx=padding_idx)


def arguments_of(node: fx.Node, names: str) -> dict[str, Any] | None:
    """Return the arguments by name, in the order of ``names``; ``None`` where there are others."""
    order = names.split()
    given = {**dict(zip(order, node.args, strict=False)), **node.kwargs}
    if len(node.args) > len(order) or not given.keys() <= set(order):
        return None
    return {name: given[name] for name in order if name in given}


def is_written(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether some node may change in place what ``node`` holds; in doubt it may.

    A reader that is rewritten to read the cores would miss such a change.
    """
    return any(True for _ in writers_of(gm, node))


def writers_of(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Return the nodes that may change in place what ``node`` holds, by it or by its views."""
    seen, waiting = {node}, [node]
    while waiting:
        held = waiting.pop()
        for user in held.users:
            if _writes(gm, user, held):
                yield user
            if user not in seen and may_return_view(user):
                seen.add(user)
                waiting.append(user)


def is_writer(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node may change in place something that it reads."""
    return any(_writes(gm, node, held) for held in node.all_input_nodes)


def _writes(gm: fx.GraphModule, user: fx.Node, held: fx.Node) -> bool:
    if user.op == "call_module":
        return bool(getattr(gm.get_submodule(str(user.target)), "inplace", False))
    if isinstance(user.target, torch._ops.OpOverload):
        return any(held is written for written in _written_arguments(user, user.target))
    if user.kwargs.get("out") is held or user.kwargs.get("inplace"):
        return True
    name = str(user.target if user.op == "call_method" else getattr(user.target, "__name__", ""))
    in_place = user.target in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return in_place and bool(user.args) and user.args[0] is held


def _written_arguments(user: fx.Node, target: torch._ops.OpOverload) -> Iterator[Argument]:
    for k, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = user.args[k] if k < len(user.args) else user.kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def may_return_view(user: fx.Node) -> bool:
    """Whether what ``user`` returns may share the memory of what it reads."""
    if isinstance(user.target, torch._ops.OpOverload):
        return any(result.alias_info is not None for result in user.target._schema.returns)
    return user.op == "call_module" or not any(user.target in table for table in _READS)
