"""Which part of which reconstruction a node is: views of a matrix made from cores, undone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from comera_fx.passes.weight_reads import arguments_of

aten = torch.ops.aten

# Targets, a string being a method of a tensor.
_VIEWS: tuple[object, ...] = (
    torch.t, aten.t.default, aten.numpy_T.default, aten.mT.default, "t",
    torch.transpose, torch.swapaxes, torch.swapdims, aten.transpose.int, aten.swapaxes.default,
    aten.swapdims.default, "transpose", "swapaxes", "swapdims",
    torch.permute, aten.permute.default, "permute",
    torch.split, torch.split_with_sizes, aten.split.Tensor, aten.split.sizes,
    aten.split_with_sizes.default, "split", "split_with_sizes",
    torch.chunk, aten.chunk.default, "chunk",
    torch.tensor_split, aten.tensor_split.sections, aten.tensor_split.indices, "tensor_split",
    torch.narrow, aten.narrow.default, "narrow",
    aten.slice.Tensor,
)  # fmt: skip


@dataclass(frozen=True)
class Reconstruction:
    """A ``tt_dense`` node with its arguments by name."""

    node: fx.Node
    cores: tuple[fx.Node, ...]
    layout: str
    num_in_modes: int
    in_features: int
    out_features: int


@dataclass(frozen=True)
class WeightPart:
    """Some rows and columns of a reconstructed matrix.

    Args:
        dense: The matrix.
        rows: Which of its rows, one after another.
        columns: Which of its columns, likewise.
        is_turned: Whether the part is transposed.
        views: The nodes between the matrix and the part.
    """

    dense: Reconstruction
    rows: range
    columns: range
    is_turned: bool
    views: tuple[fx.Node, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole matrix."""
        sizes = (len(self.rows), len(self.columns))
        return sizes == (self.dense.out_features, self.dense.in_features)


def part_of(node: fx.Node) -> WeightPart | None:
    """Return the part of a reconstruction that ``node`` is, seen through any views of it."""
    views: list[fx.Node] = []
    while is_view(node):
        views.append(node)
        node = node.all_input_nodes[0]
    dense = _reconstruction_of(node)
    if dense is None:
        return None
    # A tensor without numbers tells by its strides and offset what the views have done. Rows lie
    # further apart than their length, so that no size of 1 makes the axes look alike.
    step = dense.in_features + 1
    sizes = (dense.out_features, dense.in_features)
    value: Any = torch.empty_strided(sizes, (step, 1), device="meta")
    for view in reversed(views):
        value = _viewed(view, value)
    if not isinstance(value, Tensor) or not value.numel():
        return None
    if value.stride() not in ((step, 1), (1, step)):
        return None
    is_turned = value.stride() == (1, step)
    num_rows, num_columns = value.shape[::-1] if is_turned else value.shape
    row, column = divmod(int(value.storage_offset()), step)
    rows, columns = range(row, row + num_rows), range(column, column + num_columns)
    return WeightPart(dense, rows, columns, is_turned, tuple(views))


def is_view(node: fx.Node) -> bool:
    """Whether a node takes parts of one matrix or turns it, by numbers that the graph tells."""
    if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1:
        return False
    if node.target is getattr:
        return node.args[1] in ("T", "mT")
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_basic(node.args[1])
    return node.target in _VIEWS


def _is_basic(index: object) -> bool:
    """Whether an index makes a view: lists and tensors make a copy."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is ... or isinstance(part, (int, slice)) for part in parts)


def _viewed(view: fx.Node, value: Any) -> Any:
    """Return what a view makes of a value; ``None`` for what is no matrix, nor a list of them."""
    if value is None:
        return None
    args, kwargs = fx.node.map_arg((view.args, view.kwargs), lambda _: value)
    method = view.op == "call_method"
    function: Callable[..., Any] = (
        getattr(Tensor, str(view.target)) if method else view.target  # type: ignore[assignment]
    )
    try:
        result = function(*args, **kwargs)
    except (IndexError, RuntimeError, TypeError, ValueError):  # the graph itself would fail
        return None
    return None if isinstance(result, Tensor) and result.ndim != 2 else result


def _reconstruction_of(node: fx.Node) -> Reconstruction | None:
    dense = torch.ops.comera_fx.tt_dense
    if node.op != "call_function" or node.target not in (dense, dense.default):
        return None
    given = arguments_of(node, "cores layout num_in_modes in_features out_features")
    cores = None if given is None else given.pop("cores", None)
    if given is None or not isinstance(cores, (list, tuple)) or not cores:
        return None
    if not all(isinstance(core, fx.Node) for core in cores):
        return None
    if any(isinstance(value, fx.Node) for value in given.values()):
        return None
    return Reconstruction(node, tuple(cores), **given)
