"""Which nodes read a matrix as a layer does."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

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
