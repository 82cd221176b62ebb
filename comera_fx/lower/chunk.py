"""Chains of stacked cores: their products, and the gradients of those.

Shape legend: N layers, R and S the bonds left and right of a core, M its mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_fx.spec import TTSpec

CHUNK_BYTES = 2 << 20
"""Bytes of the stacked factors of a chunk on a CPU: more would leave its cache between steps."""
TILE = 16
"""Columns below which, or at multiples of which, a product is not slow for their number."""


@dataclass(frozen=True)
class Chains:
    """What is made of the cores of equal-shaped layers.

    Args:
        spec: Shape of each layer, in layout "tt".
        num_layers: Number of layers.
        in_features: Rows of L; those of padded modes are cut off.
        out_features: Columns of R; likewise.
        width: Columns of L and rows of R: the middle rank, or more, filled up with zeros.
        dtype: What the cores are cast to; ``None`` leaves them as they are.
        threshold: Rank weights at or below it count as 0.
        without_head: Whether R is made without its first core, which then is not among the cores
            given; there are no rank weights then, and no zeros.
    """

    spec: TTSpec
    num_layers: int
    in_features: int
    out_features: int
    width: int
    dtype: torch.dtype | None = None
    threshold: float = 0.0
    without_head: bool = False

    @cached_property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the cores given for each layer."""
        shapes = self.spec.core_shapes
        if not self.without_head:
            return shapes
        return shapes[: self.num_in] + shapes[self.num_in + 1 :]

    @property
    def num_cores(self) -> int:
        """Cores given for each layer."""
        return len(self.core_shapes)

    @property
    def num_in(self) -> int:
        """Cores on the left of the cut."""
        return len(self.spec.in_modes)

    @cached_property
    def scales(self) -> tuple[tuple[int | None, int | None], ...]:
        """Per core which inner bonds' weights scale its first and its last axis.

        A bond's weight goes into the smaller of its two cores, as in ``TTModule``.
        """
        sizes = [prod(shape) for shape in self.core_shapes]
        into_left = [left <= right for left, right in pairwise(sizes)]
        first = [None, *(None if joins else b for b, joins in enumerate(into_left))]
        last = [*(b if joins else None for b, joins in enumerate(into_left)), None]
        return tuple(zip(first, last, strict=True))

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """The layers that are worked on together on a CPU."""
        widest = max(self.spec.in_size, self.spec.out_size) * max(self.width, 1)
        num_bytes = widest * (self.dtype or torch.float32).itemsize
        num_chunks = -(-self.num_layers // max(1, CHUNK_BYTES // num_bytes))
        size = -(-self.num_layers // num_chunks)
        firsts = range(0, self.num_layers, size)
        return tuple(range(first, min(first + size, self.num_layers)) for first in firsts)

    def chunks_on(self, device_type: str) -> tuple[range, ...]:
        """Return the layers that are worked on together: elsewhere, all of them."""
        return self.chunks if device_type == "cpu" else (range(self.num_layers),)


@dataclass
class Chunk:
    """The stacked cores of some layers, and their partial products.

    Args:
        chains: What is made.
        stacks: The k-th cores of all layers, scaled and filled up, (N, R, M, S) each.
        raw: The cores before they were scaled; none where there are no rank weights.
        weights: The rank weights of each inner bond, (N, R).
        left_inner: ``G1 G2`` and so on, without the last, (N, product of modes, S) each.
        right_inner: Partial products of the output cores, (N, R, product of modes) each.
    """

    chains: Chains
    stacks: Sequence[Tensor]
    raw: Sequence[Tensor]
    weights: Sequence[Tensor]
    left_inner: Sequence[Tensor] = ()
    right_inner: Sequence[Tensor] = ()

    @classmethod
    def of(cls, chains: Chains, given: Sequence[Tensor], layers: range) -> Chunk:
        """Stack the cores of some layers, with their rank weights.

        Args:
            chains: What is made.
            given: Cores, one layer after another, then rank weights, one layer after another.
            layers: Numbers of the layers.
        """
        num_cores, num_bonds = chains.num_cores, chains.num_cores - 1
        cores = given[layers.start * num_cores : layers.stop * num_cores]
        stacks = [torch.stack(tuple(cores[k::num_cores])) for k in range(num_cores)]
        if chains.dtype is not None:
            stacks = [stack.to(chains.dtype) for stack in stacks]
        held = given[chains.num_layers * num_cores :]
        held = held[layers.start * num_bonds : layers.stop * num_bonds]
        raw: list[Tensor] = []
        weights: list[Tensor] = []
        if held:
            weights = [torch.stack(tuple(held[b::num_bonds])) for b in range(num_bonds)]
            raw, stacks = stacks, [_scaled(chains, k, s, weights) for k, s in enumerate(stacks)]
        chunk = cls(chains, stacks, raw, weights)
        chunk._fill_up()
        return chunk

    def _fill_up(self) -> None:
        """Give the cores at the cut the width of the factors."""
        cut = self.chains.num_in
        missing = self.chains.width - self.chains.spec.ranks[cut]
        if missing:
            stacks = list(self.stacks)
            stacks[cut - 1] = torch.constant_pad_nd(stacks[cut - 1], (0, missing))
            stacks[cut] = torch.constant_pad_nd(stacks[cut], (0, 0, 0, 0, 0, missing))
            self.stacks = stacks

    def factors(self) -> tuple[Tensor, Tensor]:
        """Contract the stacks: all L, (N, in_features, r), and all R, (N, r, out_features).

        Without its first core R is (N, s, product of the other modes).
        """
        num_in = self.chains.num_in
        lefts = _left_products(self.stacks[:num_in])
        rights = _right_products(self.stacks[num_in:])
        self.left_inner, self.right_inner = lefts[1:-1], rights[1:-1]
        left, right = lefts[-1], rights[0]
        # Only where there is padding: in a graph the gradient of such a view is a copy.
        if self.chains.in_features < self.chains.spec.in_size:
            left = left.narrow(1, 0, self.chains.in_features)
        if not self.chains.without_head and self.chains.out_features < self.chains.spec.out_size:
            right = right.narrow(2, 0, self.chains.out_features)
        return left, right

    # ---- what is kept from forward to backward, as one list of tensors ----

    def saved(self) -> list[Tensor]:
        """Return all that ``from_saved`` makes the chunk of; the factors are not among it."""
        return [*self.stacks, *self.raw, *self.weights, *self.left_inner, *self.right_inner]

    @classmethod
    def from_saved(cls, chains: Chains, saved: Sequence[Tensor]) -> Chunk:
        """Return the chunk that gave ``saved``, or a part of its layers."""
        num_cores, num_in = chains.num_cores, chains.num_in
        num_inner = [max(num_in - 2, 0), max(num_cores - num_in - 2, 0)]
        has_weights = len(saved) > num_cores + sum(num_inner)
        counts = [num_cores, *((num_cores, num_cores - 1) if has_weights else (0, 0)), *num_inner]
        tensors = iter(saved)
        return cls(chains, *([next(tensors) for _ in range(count)] for count in counts))

    # ---- backward ----

    def gradients(self, grad: Tensor, *, is_left: bool) -> list[Tensor]:
        """Return the gradients of the stacks on one side from that of the factor."""
        chains = self.chains
        if is_left:
            missing = chains.spec.in_size - chains.in_features
            grad = torch.constant_pad_nd(grad, (0, 0, 0, missing)) if missing else grad
            return _left_gradients(self.stacks[: chains.num_in], self.left_inner, grad)
        missing = 0 if chains.without_head else chains.spec.out_size - chains.out_features
        grad = torch.constant_pad_nd(grad, (0, missing)) if missing else grad
        return _right_gradients(self.stacks[chains.num_in :], self.right_inner, grad)

    def unscaled(self, core: int, grad: Tensor) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the gradient of the k-th cores as given, and of the rank weights in them.

        Args:
            core: The number k.
            grad: Gradient of ``stacks[k]``.

        Returns:
            The gradient, and pairs of inner bond and gradient of its weights.
        """
        first, _, last = self.chains.core_shapes[core]
        if grad.shape[1] != first or grad.shape[3] != last:
            grad = grad.narrow(1, 0, first).narrow(3, 0, last)
        grad = grad.contiguous()
        if not self.weights:
            return grad, []
        of_weights = []
        for axis, bond in enumerate(self.chains.scales[core]):
            if bond is not None:
                rest = self._scale(core, 1 - axis)
                product = grad * self.raw[core]
                product = product if rest is None else product * rest
                slope = product.sum((1, 2) if axis else (2, 3))
                weight = self.weights[bond]
                live = weight > self.chains.threshold
                of_weights.append((bond, torch.where(live, slope.to(weight.dtype), 0.0)))
        for axis in (0, 1):
            scale = self._scale(core, axis)
            grad = grad if scale is None else grad * scale
        return grad, of_weights

    def _scale(self, core: int, axis: int) -> Tensor | None:
        bond = self.chains.scales[core][axis]
        if bond is None:
            return None
        return _live(self.chains, self.weights[bond], self.raw[core].dtype, axis)


def _live(chains: Chains, weight: Tensor, dtype: torch.dtype, axis: int) -> Tensor:
    """Return rank weights (N, R), dead ones at 0, as they scale a core's first or last axis."""
    live = F.threshold(weight, chains.threshold, 0.0).to(dtype)
    num, rank = live.shape
    return live.reshape(num, 1, 1, rank) if axis else live.reshape(num, rank, 1, 1)


def _scaled(chains: Chains, core: int, stack: Tensor, weights: Sequence[Tensor]) -> Tensor:
    for axis, bond in enumerate(chains.scales[core]):
        if bond is not None:
            stack = stack * _live(chains, weights[bond], stack.dtype, axis)
    return stack


# ---- products ----


def _left_products(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return ``G1``, ``G1 G2``, and so on, (N, product of modes, S) each."""
    num, _, mode, last = cores[0].shape
    products = [cores[0].reshape(num, mode, last)]
    for core in cores[1:]:
        num, first, mode, last = core.shape
        made = torch.bmm(products[-1], core.reshape(num, first, mode * last))
        products.append(made.reshape(num, made.shape[1] * mode, last))
    return products


def _left_gradients(cores: Sequence[Tensor], inner: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    num, _, mode, last = cores[0].shape
    products = [cores[0].reshape(num, mode, last), *inner]
    gradients = []
    for k in range(len(cores) - 1, 0, -1):
        num, first, mode, last = cores[k].shape
        grad = grad.reshape(num, products[k - 1].shape[1], mode * last)
        gradients.append(torch.bmm(products[k - 1].mT, grad).reshape(cores[k].shape))
        grad = _times_transpose(grad, cores[k].reshape(num, first, mode * last))
    return [grad.reshape(cores[0].shape), *reversed(gradients)]


def _right_products(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return the product of all cores, without the first, and so on, (N, R, modes) each."""
    num, first, mode, _ = cores[-1].shape
    products = [cores[-1].reshape(num, first, mode)]
    for core in reversed(cores[:-1]):
        num, first, mode, last = core.shape
        made = torch.bmm(core.reshape(num, first * mode, last), products[-1])
        products.append(made.reshape(num, first, mode * made.shape[2]))
    return products[::-1]


def _right_gradients(
    cores: Sequence[Tensor], inner: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    num, first, mode, _ = cores[-1].shape
    products = [*inner, cores[-1].reshape(num, first, mode)]
    gradients = []
    for k, core in enumerate(cores[:-1]):
        num, first, mode, last = core.shape
        grad = grad.reshape(num, first * mode, products[k].shape[2])
        gradients.append(_times_transpose(grad, products[k]).reshape(core.shape))
        grad = torch.bmm(core.reshape(num, first * mode, last).mT, grad)
    return [*gradients, grad.reshape(cores[-1].shape)]


def _times_transpose(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left right^T``, made by columns where its own columns would be ragged."""
    columns = right.shape[1]
    if columns < TILE or columns % TILE == 0 or left.shape[1] < columns:
        return torch.bmm(left, right.mT)
    return torch.bmm(right, left.mT).mT
