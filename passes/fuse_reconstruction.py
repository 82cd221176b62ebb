"""Rewrite layers on a weight that is reconstructed from cores as operators on the cores."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from comera_fx.modules import DEFAULT_NUM_TOKENS
from comera_fx.ops import spec_of
from comera_fx.passes.match import replace_call
from comera_fx.passes.weight_reads import (
    Reconstruction,
    WeightRead,
    is_written,
    reconstruction_of,
    weight_read_of,
)
from comera_fx.replay import value_of
from comera_fx.spec import TTSpec


@dataclass(frozen=True)
class FuseReconstruction:
    """Replace products with, and look-ups in, a ``tt_dense`` by operators on its cores.

    Before::

        %w = call_function[comera_fx.tt_dense.default]([%core_0, %core_1], 'tt', 1, 768, 3072)
        %y = call_function[linear](%x, %w, %bias)

    After::

        %y = call_function[comera_fx.tt_linear.default](
            %x, [%core_0, %core_1], %bias, 'tt', 1, 768, 3072)

    Likewise ``x @ w.t()``, ``x @ w`` and ``addmm``, and ``embedding(ids, w)`` becomes
    ``tt_embedding``; a weight that is transposed, by any of torch's names for it, is seen through.
    Where the other axis of the weight is read, the operator is told that the cores are
    ``transposed``. The row of a ``padding_idx`` is read from the cores too, and detached. A bias
    that is not known to be a vector of the layer's size is added afterwards.

    Numerics: keeps them, up to rounding.
    Leaves alone: any other reader of the matrix, and with it the ``tt_dense``; a weight or core
    that something in the graph may write to; products with a factor; look-ups with ``max_norm``,
    ``scale_grad_by_freq`` or ``sparse``.
    """

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of nodes that now read the cores."""
        num_rewrites = 0
        for node in list(gm.graph.nodes):
            read = weight_read_of(node)
            found = None if read is None else reconstruction_of(read.weight)
            if read is None or found is None or not _is_safe(gm, read, *found):
                continue
            dense, is_turned = found
            train = _Train(dense, _spec(gm, dense), transposed=read.by_columns == is_turned)
            with gm.graph.inserting_before(node):
                insert = _insert_lookup if read.is_lookup else _insert_product
                new = insert(gm, read, train)
            new.meta = {**node.meta, **new.meta}
            replace_call(node, new)
            _erase_unused(read.weight)
            num_rewrites += 1
        return num_rewrites


def _is_safe(gm: fx.GraphModule, read: WeightRead, dense: Reconstruction, is_turned: bool) -> bool:
    num_rows = dense.in_features if is_turned else dense.out_features
    if read.padding_idx is not None and not -num_rows <= read.padding_idx < num_rows:
        return False
    return not any(is_written(gm, node) for node in (dense.node, *dense.cores))


def _erase_unused(weight: fx.Node) -> None:
    """Erase a weight that no node reads any more, through its transposes to the cores."""
    while not weight.users and reconstruction_of(weight) is not None:
        inner = weight.all_input_nodes[0]
        weight.graph.erase_node(weight)
        weight = inner


# ---- the cores, read by either side ----


@dataclass(frozen=True)
class _Train:
    """The cores of a matrix as an operator reads them.

    Args:
        dense: The matrix.
        dense_spec: The shapes of its cores, where the graph tells them.
        transposed: Whether an operator reads the matrix by its other side.
    """

    dense: Reconstruction
    dense_spec: TTSpec | None
    transposed: bool

    @property
    def features(self) -> tuple[int, int]:
        """Input and output features, or rows and columns of a table."""
        sizes = self.dense.in_features, self.dense.out_features
        return sizes[::-1] if self.transposed else sizes

    @property
    def spec(self) -> TTSpec | None:
        """The shape of the weight that the operator applies, where the graph tells."""
        if self.dense_spec is None or not self.transposed:
            return self.dense_spec
        return self.dense_spec.turned()

    def sizes(self) -> tuple[str, int, int, int]:
        """Return the arguments of an operator that follow the bias."""
        dense, num_in = self.dense, self.dense.num_in_modes
        if self.transposed and dense.layout == "tt":
            num_in = len(dense.cores) - num_in
        return dense.layout, num_in, *self.features


def _spec(gm: fx.GraphModule, dense: Reconstruction) -> TTSpec | None:
    shapes = [_shape(gm, core) for core in dense.cores]
    known = tuple(shape for shape in shapes if shape is not None)
    if len(known) < len(shapes):
        return None
    return spec_of(dense.layout, dense.num_in_modes, known)


def _shape(gm: fx.GraphModule, node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of what a node holds, ``None`` if it is not known or not fixed."""
    value = value_of(gm, node) if node.op == "get_attr" else node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(value.shape)


# ---- operators on the cores ----


def _insert_product(gm: fx.GraphModule, read: WeightRead, train: _Train) -> fx.Node:
    bias = read.bias
    inside = bias if bias is not None and _shape(gm, bias) == (train.features[1],) else None
    y = _insert_operator(torch.ops.comera_fx.tt_linear.default, inside, read, train)
    return y if bias is inside else gm.graph.call_function(operator.add, (y, bias))


def _insert_lookup(gm: fx.GraphModule, read: WeightRead, train: _Train) -> fx.Node:
    graph = gm.graph
    rows = _insert_operator(torch.ops.comera_fx.tt_embedding.default, None, read, train)
    if read.padding_idx is None:
        return rows
    # The operator's own padding row is a constant, while this one follows the cores.
    padding_idx = read.padding_idx % train.features[0]
    is_padding = graph.call_function(operator.eq, (read.input, padding_idx))
    is_padding = graph.call_method("unsqueeze", (is_padding, -1))
    frozen = graph.call_method("detach", (rows,))
    return graph.call_function(torch.where, (is_padding, frozen, rows))


def _insert_operator(
    target: torch._ops.OpOverload, bias: fx.Node | None, read: WeightRead, train: _Train
) -> fx.Node:
    args = (read.input, list(train.dense.cores), bias, *train.sizes())
    settings = {**({"transposed": True} if train.transposed else {}), **_token_setting(read)}
    node = read.input.graph.call_function(target, args, settings)
    if train.spec is not None:
        node.meta["tt_spec"] = train.spec
    return node


def _token_setting(read: WeightRead) -> dict[str, Any]:
    """Return the tokens to plan for, if the graph tells and they are not the default."""
    value = read.input.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return {}
    sizes = value.shape if read.is_lookup else value.shape[:-1]
    num_tokens = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
    return {} if num_tokens in (0, DEFAULT_NUM_TOKENS) else {"num_tokens_hint": num_tokens}
