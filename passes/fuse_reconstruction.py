"""Rewrite layers on a weight that is reconstructed from cores as operators on the cores."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
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
    Where the other axis of the weight is read, the cores are transposed: in layout "ttm" the two
    modes of each core change places. In layout "tt" the cores come in reverse order, and with
    them the modes, so features and ids are put into that order where a side has several modes.
    The row of a ``padding_idx`` is read from the cores too, and detached. A bias that is not
    known to be a vector of the layer's size is added afterwards.

    Numerics: keeps them, up to rounding.
    Leaves alone: any other reader of the matrix, and with it the ``tt_dense``; a weight or core
    that something in the graph may write to; products with a factor; look-ups with ``max_norm``,
    ``scale_grad_by_freq`` or ``sparse``; in layout "tt" the other axis of cores whose shapes the
    graph does not tell.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011, eq. (1.3): an entry is a product of
        matrices, and so of their transposes in reverse order.
    """

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of nodes that now read the cores."""
        num_rewrites = 0
        transposed: dict[fx.Node, _Train | None] = {}
        for node in list(gm.graph.nodes):
            read = weight_read_of(node)
            found = None if read is None else reconstruction_of(read.weight)
            if read is None or found is None or not _is_safe(gm, read, *found):
                continue
            dense, is_turned = found
            train: _Train | None = _Train.of(gm, dense)
            if read.by_columns == is_turned:
                if dense.node not in transposed:
                    transposed[dense.node] = _transpose(gm, dense)
                train = transposed[dense.node]
            if train is None:
                continue
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


# ---- cores, as they are or transposed ----


@dataclass(frozen=True)
class _Train:
    """Cores with what an operator is told of them.

    Args:
        cores: Nodes of the cores.
        layout: "tt" or "ttm".
        num_in_modes: How many of the modes are input modes.
        in_features: Input features that the layer has; the modes may make up more.
        out_features: Output features; likewise.
        spec: The shapes of the cores, where the graph tells them.
        in_order: The input modes as the layer has them, where the cores have them reversed.
        out_order: The output modes; likewise.
    """

    cores: list[fx.Node]
    layout: str
    num_in_modes: int
    in_features: int
    out_features: int
    spec: TTSpec | None
    in_order: tuple[int, ...] = field(default=(), kw_only=True)
    out_order: tuple[int, ...] = field(default=(), kw_only=True)

    @classmethod
    def of(cls, gm: fx.GraphModule, dense: Reconstruction) -> _Train:
        return cls(
            list(dense.cores),
            dense.layout,
            dense.num_in_modes,
            dense.in_features,
            dense.out_features,
            _spec(gm, dense),
        )

    def sizes(self) -> tuple[str, int, int, int]:
        """Return the operator's arguments after the cores; a reversed axis has its padding."""
        in_size = math.prod(self.in_order) if self.in_order else self.in_features
        out_size = math.prod(self.out_order) if self.out_order else self.out_features
        return self.layout, self.num_in_modes, in_size, out_size


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


def _transpose(gm: fx.GraphModule, dense: Reconstruction) -> _Train | None:
    """Insert the cores of the transposed matrix, where their order can be told."""
    spec = _spec(gm, dense)
    sizes = (dense.out_features, dense.in_features)
    if dense.layout == "ttm":
        cores = _permute_cores(dense, dense.cores, (0, 2, 1, 3))
        if spec is not None:
            spec = TTSpec("ttm", spec.out_modes, spec.in_modes, spec.ranks)
        return _Train(cores, "ttm", dense.num_in_modes, *sizes, spec)
    if spec is None:
        return None
    return _Train(
        _permute_cores(dense, dense.cores[::-1], (2, 1, 0)),
        "tt",
        len(spec.out_modes),
        *sizes,
        TTSpec("tt", spec.out_modes[::-1], spec.in_modes[::-1], spec.ranks[::-1]),
        in_order=_order(spec.out_modes),
        out_order=_order(spec.in_modes),
    )


def _order(modes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the modes that change places when reversed: none if fewer than two are above 1."""
    longer = tuple(mode for mode in modes if mode > 1)
    return longer if len(longer) > 1 else ()


def _permute_cores(
    dense: Reconstruction, cores: tuple[fx.Node, ...], axes: tuple[int, ...]
) -> list[fx.Node]:
    graph = dense.node.graph
    with graph.inserting_before(dense.node):  # where every reader of it can reach them
        return [graph.call_method("permute", (core, axes)) for core in cores]


# ---- operators on the cores, and what puts their axes in order ----


def _insert_product(gm: fx.GraphModule, read: WeightRead, train: _Train) -> fx.Node:
    graph, x, bias = gm.graph, read.input, read.bias
    if train.in_order:
        padding = math.prod(train.in_order) - train.in_features
        if padding:
            x = graph.call_function(F.pad, (x, (0, padding)))
        x = _reverse_last_axis(x, train.in_order)
    fits = bias is not None and _shape(gm, bias) == (train.out_features,)
    inside = bias if fits and not train.out_order else None
    y = _insert_operator(torch.ops.comera_fx.tt_linear.default, x, inside, read, train)
    y = _restore_features(y, train)
    return y if bias is inside else graph.call_function(operator.add, (y, bias))


def _insert_lookup(gm: fx.GraphModule, read: WeightRead, train: _Train) -> fx.Node:
    graph, ids = gm.graph, read.input
    if train.in_order:
        ids = _renumber(ids, train.in_order, train.in_features)
    rows = _insert_operator(torch.ops.comera_fx.tt_embedding.default, ids, None, read, train)
    rows = _restore_features(rows, train)
    if read.padding_idx is None:
        return rows
    # The operator's own padding row is a constant, while this one follows the cores.
    padding_idx = read.padding_idx % train.in_features
    is_padding = graph.call_function(operator.eq, (read.input, padding_idx))
    is_padding = graph.call_method("unsqueeze", (is_padding, -1))
    frozen = graph.call_method("detach", (rows,))
    return graph.call_function(torch.where, (is_padding, frozen, rows))


def _insert_operator(
    target: torch._ops.OpOverload,
    x: fx.Node,
    bias: fx.Node | None,
    read: WeightRead,
    train: _Train,
) -> fx.Node:
    args = (x, train.cores, bias, *train.sizes())
    node = x.graph.call_function(target, args, _token_setting(read))
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


def _restore_features(y: fx.Node, train: _Train) -> fx.Node:
    """Put the last axis of a result into the layer's order, without its padding."""
    if not train.out_order:
        return y
    y = _reverse_last_axis(y, train.out_order[::-1])
    if math.prod(train.out_order) == train.out_features:
        return y
    y = y.graph.call_method("narrow", (y, -1, 0, train.out_features))
    return y.graph.call_method("contiguous", (y,))


def _reverse_last_axis(x: fx.Node, modes: tuple[int, ...]) -> fx.Node:
    """Reverse the order of the modes that make up the last axis."""
    graph, num_modes = x.graph, len(modes)
    x = graph.call_method("unflatten", (x, -1, modes))
    axes = tuple(range(-num_modes, 0))
    x = graph.call_method("movedim", (x, axes, axes[::-1]))
    return graph.call_method("flatten", (x, -num_modes))


def _renumber(ids: fx.Node, modes: tuple[int, ...], num_rows: int) -> fx.Node:
    """Number rows as cores in reverse order do; an id out of range stays an error."""
    graph = ids.graph
    device = graph.call_function(getattr, (ids, "device"))
    numbers = graph.call_function(torch.arange, (math.prod(modes),), {"device": device})
    numbers = _reverse_last_axis(numbers, modes[::-1])
    numbers = graph.call_method("narrow", (numbers, 0, 0, num_rows))
    numbers = graph.call_method("unsqueeze", (numbers, -1))
    renumbered = graph.call_function(F.embedding, (ids, numbers))
    return graph.call_method("squeeze", (renumbered, -1))
