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
from comera_fx.passes.part_factors import PartFactors
from comera_fx.passes.regions import states_of
from comera_fx.passes.weight_parts import Reconstruction, WeightPart, is_view, part_of
from comera_fx.passes.weight_reads import WeightRead, weight_read_of
from comera_fx.passes.writes import changes_between, is_written
from comera_fx.replay import VALUE_KEYS, value_of
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

    A part of a weight is read by the same part of its factors ``W^T = L R``, however it is split
    off: by ``split``, ``chunk``, ``tensor_split``, ``narrow`` and slices, of the weight or of what
    they give, transposed or not.

    Before::

        %w = call_function[comera_fx.tt_dense.default]([%core_0, %core_1], 'tt', 1, 8, 24)
        %parts = call_function[aten.split_with_sizes.default](%w, [8, 16])
        %w_q = call_function[getitem](%parts, 0)
        %q = call_function[linear](%x, %w_q, %bias)

    After::

        %factors = call_function[comera_fx.tt_factors.default](
            [%core_0, %core_1], 1, 'tt', 1, 8, 24)
        %left = call_function[getitem](%factors, 0)
        %right = call_function[getitem](%factors, 1)
        %right_q = call_method[narrow](%right, 1, 0, 8)
        %results = call_function[comera_fx.tt_apply.default](%x, [%left], [%right_q], [%bias])
        %q = call_function[getitem](%results, 0)

    Look-ups in a part become ``tt_rows``. All parts of weights on equal cores share their factors,
    which stand where the first of these weights was made. They keep the cores' dtype under
    autocast where a look-up reads them, or a product in another region of autocast.

    Numerics: keeps them, up to rounding.
    Leaves alone: any other reader of the matrix, and with it the ``tt_dense``; parts of a matrix
    in layout "ttm", which is not cut at one bond, slices with a step, and empty parts; a weight,
    part or core that something in the graph may write to, or that is made in another state of
    gradients than it is read in; products with a factor; look-ups with
    ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011: an unfolding of the tensor at a bond.
    """

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of nodes that now read the cores."""
        num_rewrites = 0
        factors, states = PartFactors(gm), states_of(gm)
        for node in list(gm.graph.nodes):
            read = weight_read_of(node)
            part = None if read is None else part_of(read.weight)
            if read is None or part is None or not _is_safe(gm, node, read, part):
                continue
            made_in = [part.dense.node, *part.views, *([node] if part.is_whole else ())]
            if len({(states[each].grad, states[each].inference) for each in made_in}) > 1:
                continue  # gradients would reach the cores where they did not, or the other way
            weight = _Weight(part, _spec(gm, part.dense), read.by_columns == part.is_turned)
            with gm.graph.inserting_before(node):
                insert = _insert_lookup if read.is_lookup else _insert_product
                new = insert(gm, node, read, weight, factors)
            new.meta = {**node.meta, **new.meta}
            replace_call(node, new)
            _erase_unused(part.dense.node)
            num_rewrites += 1
        return num_rewrites


def _is_safe(gm: fx.GraphModule, node: fx.Node, read: WeightRead, part: WeightPart) -> bool:
    dense = part.dense
    if not part.is_whole and dense.layout != "tt":
        return False
    num_rows = len(part.columns if part.is_turned else part.rows)
    if read.padding_idx is not None and not -num_rows <= read.padding_idx < num_rows:
        return False
    if any(is_written(gm, held) for held in (dense.node, *dense.cores)):
        return False
    return not any(changes_between(gm, core, dense.node, node) for core in dense.cores)


def _erase_unused(weight: fx.Node) -> None:
    """Erase a weight that no node reads any more, and its views that none does."""
    for user in list(weight.users):
        if is_view(user):
            _erase_unused(user)
    if not weight.users:
        weight.graph.erase_node(weight)


# ---- what is read, by either side ----


@dataclass(frozen=True)
class _Weight:
    """A part of a matrix as an operator reads it.

    Args:
        part: The part.
        dense_spec: The shapes of the matrix' cores, where the graph tells them.
        transposed: Whether an operator reads the matrix by its other side.
    """

    part: WeightPart
    dense_spec: TTSpec | None
    transposed: bool

    @property
    def features(self) -> tuple[int, int]:
        """Input and output features, or rows and columns of a table."""
        sizes = len(self.part.columns), len(self.part.rows)
        return sizes[::-1] if self.transposed else sizes

    @property
    def spec(self) -> TTSpec | None:
        """The shape of the whole weight that the operator applies, where the graph tells."""
        if self.dense_spec is None or not self.transposed:
            return self.dense_spec
        return self.dense_spec.turned()

    def sizes(self) -> tuple[str, int, int, int]:
        """Return the arguments of an operator on the cores that follow the bias."""
        dense, num_in = self.part.dense, self.part.dense.num_in_modes
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
    values = (value_of(gm, node), *(node.meta.get(key) for key in VALUE_KEYS))
    value = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if value is None or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(value.shape)


# ---- operators on the cores or factors ----


def _insert_product(
    gm: fx.GraphModule, node: fx.Node, read: WeightRead, weight: _Weight, factors: PartFactors
) -> fx.Node:
    bias = read.bias
    inside = bias if bias is not None and _shape(gm, bias) == (weight.features[1],) else None
    if weight.part.is_whole:
        y = _insert_operator(torch.ops.comera_fx.tt_linear.default, inside, read, weight)
    else:
        y = _insert_apply(node, inside, read, weight, factors)
    return y if bias is inside else gm.graph.call_function(operator.add, (y, bias))


def _insert_lookup(
    gm: fx.GraphModule, node: fx.Node, read: WeightRead, weight: _Weight, factors: PartFactors
) -> fx.Node:
    graph = gm.graph
    if weight.part.is_whole:
        rows = _insert_operator(torch.ops.comera_fx.tt_embedding.default, None, read, weight)
    else:
        sides = _insert_sides(node, weight, factors, autocast=False)
        args = (read.input, *sides, None)
        rows = graph.call_function(torch.ops.comera_fx.tt_rows.default, args)
    if read.padding_idx is None:
        return rows
    # The operator's own padding row is a constant, while this one follows the cores.
    padding_idx = read.padding_idx % weight.features[0]
    is_padding = graph.call_function(operator.eq, (read.input, padding_idx))
    is_padding = graph.call_method("unsqueeze", (is_padding, -1))
    frozen = graph.call_method("detach", (rows,))
    return graph.call_function(torch.where, (is_padding, frozen, rows))


def _insert_operator(
    target: torch._ops.OpOverload, bias: fx.Node | None, read: WeightRead, weight: _Weight
) -> fx.Node:
    args = (read.input, list(weight.part.dense.cores), bias, *weight.sizes())
    settings = {**({"transposed": True} if weight.transposed else {}), **_token_setting(read)}
    node = read.input.graph.call_function(target, args, settings)
    if weight.spec is not None:
        node.meta["tt_spec"] = weight.spec
    return node


def _insert_apply(
    node: fx.Node,
    bias: fx.Node | None,
    read: WeightRead,
    weight: _Weight,
    factors: PartFactors,
) -> fx.Node:
    left, right = _insert_sides(node, weight, factors, autocast=True)
    args = (read.input, [left], [right], [bias])
    results = node.graph.call_function(torch.ops.comera_fx.tt_apply.default, args)
    results.meta = {key: value for key, value in node.meta.items() if key not in VALUE_KEYS}
    return node.graph.call_function(operator.getitem, (results, 0))


def _insert_sides(
    node: fx.Node, weight: _Weight, factors: PartFactors, *, autocast: bool
) -> tuple[fx.Node, fx.Node]:
    """Return the factors of a part in the order in which an operator meets them."""
    left, right = factors.of(weight.part, node, autocast=autocast)
    if not weight.transposed:
        return left, right
    turned = node.graph.call_method("t", (right,)), node.graph.call_method("t", (left,))
    for each in turned:
        each.meta = {key: value for key, value in node.meta.items() if key not in VALUE_KEYS}
    return turned


def _token_setting(read: WeightRead) -> dict[str, Any]:
    """Return the tokens to plan for, if the graph tells and they are not the default."""
    value = read.input.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return {}
    sizes = value.shape if read.is_lookup else value.shape[:-1]
    num_tokens = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
    return {} if num_tokens in (0, DEFAULT_NUM_TOKENS) else {"num_tokens_hint": num_tokens}
