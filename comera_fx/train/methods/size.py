"""The TT size as a function of the rank weights, and its differentiable surrogate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_fx.modules import TTModule


class Sizes(NamedTuple):
    """Scalars on the rank weights' device.

    Args:
        surrogate: ``sum_k modes_k |d_(k-1)|_1 |d_k|_1``, differentiable.
        size: The same with the number of live entries of d; what would be held after a cut.
    """

    surrogate: Tensor
    size: Tensor


class SizeOf:
    """Computes the sizes of many modules at once, in a handful of operators.

    Build it anew whenever ranks have changed.

    Args:
        modules: Modules with rank weights.
        threshold: Rank weights at or below it count as 0.
        pushed: Per bond, in order, a mask of the ranks that the surrogate's gradient reaches;
            ``None`` for all of them.

    Source:
        Yang et al., "CoMERA", NeurIPS 2024, section 3 (from memory: the size S(d) of the late
        stage and its l1 surrogate of the early one).
    """

    def __init__(
        self,
        modules: Sequence[TTModule],
        threshold: float,
        pushed: Sequence[Tensor] | None = None,
    ) -> None:
        self._weights: list[Tensor] = [
            weight for module in modules for weight in module.rank_weights
        ]
        self._threshold = threshold
        self._pushed = None if pushed is None else torch.cat(list(pushed))
        device = self._weights[0].device
        counts = torch.tensor([weight.numel() for weight in self._weights])
        segments = torch.arange(len(self._weights)).repeat_interleave(counts)
        # Entry 0 of the bond sums is the end bond, whose rank is 1; inner bonds follow.
        left, right, modes = [], [], []
        bond = 0
        for module in modules:
            last = module.num_cores - 1
            for k, mode in enumerate(module.spec.mode_sizes):
                left.append(0 if k == 0 else bond + k)
                right.append(0 if k == last else bond + k + 1)
                modes.append(float(mode))
            bond += last
        self._segments = segments.to(device)
        self._left = torch.tensor(left, device=device)
        self._right = torch.tensor(right, device=device)
        self._modes = torch.tensor(modes, device=device, dtype=torch.float64)
        self._end = torch.ones(1, device=device, dtype=torch.float64)

    def __call__(self) -> Sizes:
        """Return both sizes at the present rank weights."""
        flat = F.threshold(torch.cat(self._weights), self._threshold, 0.0).double()
        alive = (flat.detach() > 0).double()
        if self._pushed is not None:
            flat = torch.where(self._pushed, flat, flat.detach())
        return Sizes(self._contract(flat), self._contract(alive))

    def _contract(self, entries: Tensor) -> Tensor:
        zeros = entries.new_zeros(len(self._weights))
        bonds = torch.cat([self._end, zeros.index_add(0, self._segments, entries)])
        return (self._modes * bonds[self._left] * bonds[self._right]).sum()
