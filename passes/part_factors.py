"""The factors ``W^T = L R`` by which parts of reconstructed matrices are read, once a matrix."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from functools import cached_property

import torch
from torch import fx

from comera_fx.passes.weight_only import WeightOnly
from comera_fx.passes.weight_parts import Reconstruction, WeightPart
from comera_fx.replay import VALUE_KEYS


class PartFactors:
    """Inserts factors of matrices, and views of these for parts of the matrices.

    Matrices of equal cores and sizes, made in the same state of gradients and autocast, share
    their factors. These stand where the first of the matrices that is asked for is made.

    Args:
        gm: The graph.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._made: dict[Hashable, _Factors] = {}

    def of(self, part: WeightPart, reader: fx.Node, *, autocast: bool) -> tuple[fx.Node, fx.Node]:
        """Return nodes that hold L and R of a part.

        Args:
            part: Its rows are the columns of R, and its columns the rows of L.
            reader: The node that is to read the part.
            autocast: Whether the reader takes factors of the dtype that autocast asks for.
        """
        dense = part.dense
        state = self._weights.state(dense.node)
        key = (*map(self._core_key, dense.cores), *_sizes(dense), state)
        if key not in self._made:
            self._made[key] = _Factors(dense)
        factors = self._made[key]
        if not autocast or self._weights.state(reader).autocasts != state.autocasts:
            factors.keep_dtype()
        return factors.narrowed(0, part.columns), factors.narrowed(1, part.rows)

    @cached_property
    def _weights(self) -> WeightOnly:
        return WeightOnly(self._gm)

    def _core_key(self, core: fx.Node) -> Hashable:
        key = self._weights.key(core)
        return core if key is None else key


class _Factors:
    """The factors of one matrix."""

    def __init__(self, dense: Reconstruction) -> None:
        self._dense = dense
        self._meta = {key: value for key, value in dense.node.meta.items() if key not in VALUE_KEYS}
        graph = dense.node.graph
        target = torch.ops.comera_fx.tt_factors.default
        with graph.inserting_before(dense.node):
            self._node = graph.call_function(target, (list(dense.cores), 1, *_sizes(dense)))
            self._sides = [graph.call_function(operator.getitem, (self._node, k)) for k in (0, 1)]
        for node in (self._node, *self._sides):
            node.meta = dict(self._meta)
        self._last = self._sides[-1]
        self._parts: dict[tuple[int, range], fx.Node] = {}

    def keep_dtype(self) -> None:
        """Have the factors in the cores' dtype under autocast."""
        self._node.kwargs = {"autocast": False}

    def narrowed(self, side: int, which: range) -> fx.Node:
        """Return L (side 0) or R (side 1) with some of its rows or columns, by node."""
        sizes = (self._dense.in_features, self._dense.out_features)
        if len(which) == sizes[side]:
            return self._sides[side]
        if (side, which) not in self._parts:
            args = (self._sides[side], side, which.start, len(which))
            with self._last.graph.inserting_after(self._last):
                self._last = self._last.graph.call_method("narrow", args)
            self._last.meta = dict(self._meta)
            self._parts[side, which] = self._last
        return self._parts[side, which]


def _sizes(dense: Reconstruction) -> tuple[str, int, int, int]:
    return dense.layout, dense.num_in_modes, dense.in_features, dense.out_features
