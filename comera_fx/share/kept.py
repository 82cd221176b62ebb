"""Factors of layers that are only evaluated, kept from one forward pass to the next.

A decoder calls the same layers for every token. Their chains are then made once, and each token
takes two products. A version counter does not see every change of a parameter: one by way of
``parameter.data`` leaves it as it is. So the numbers themselves are compared, with a copy, before
kept factors are used; cores are small, which makes that cheaper than the chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comera_fx.lower.chunk import Chains
from comera_fx.lower.factors import make_factors


class _Kept(NamedTuple):
    """What is known of a layer.

    Args:
        given: Its cores and rank weights.
        copies: Their numbers; empty until factors are made.
        factors: L and R, made of ``copies``; ``None`` until then.
    """

    given: Sequence[Tensor]
    copies: Sequence[Tensor] = ()
    factors: tuple[Tensor, Tensor] | None = None


class KeptFactors:
    """Factors by layer."""

    def __init__(self) -> None:
        self._kept: dict[nn.Module, _Kept] = {}

    def clear(self) -> None:
        """Forget all factors."""
        if self._kept:
            self._kept.clear()

    def factors(
        self, layer: nn.Module, chains: Chains, given: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return a layer's L and R; ``None`` if it has to compute without them this time.

        They are made when a layer is called for the second time with the same parameters, so that
        one evaluation between two steps of training costs nothing.

        Args:
            layer: The layer.
            chains: How its factors are made.
            given: Its cores and its rank weights as they are now, on a CPU.
        """
        kept = self._kept.get(layer)
        if kept is None or not _are_same(given, kept.given):
            self._kept[layer] = _Kept(given)
            return None
        if kept.factors is None:
            copies = [tensor.detach().clone() for tensor in given]
            num_cores = chains.num_cores
            lefts, rights = make_factors(chains, copies[:num_cores], copies[num_cores:])
            kept = self._kept[layer] = _Kept(given, copies, (lefts[0], rights[0]))
        elif not all(map(torch.equal, given, kept.copies)):
            self._kept[layer] = _Kept(given)
            return None
        return kept.factors


def _are_same(given: Sequence[Tensor], known: Sequence[Tensor]) -> bool:
    return len(given) == len(known) and all(map(_is, given, known))


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other
