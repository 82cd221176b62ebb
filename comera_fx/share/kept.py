"""Factors of layers that are only evaluated, kept from one forward pass to the next.

A decoder calls the same layers for every token. Their chains are then made once, and each token
takes two products. A version counter does not see every change of a parameter: one by way of
``parameter.data`` leaves it as it is. So the numbers themselves are compared, with a copy, before
kept factors are used; cores are small, which makes that cheaper than the chains.
"""

from __future__ import annotations

import operator
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
        is_due: Whether factors are to be made: the layer was called with the same parameters.
    """

    given: Sequence[Tensor]
    copies: Sequence[Tensor] = ()
    factors: tuple[Tensor, Tensor] | None = None
    is_due: bool = False


class KeptFactors:
    """Factors by layer; all of them on a CPU."""

    def __init__(self) -> None:
        self._kept: dict[nn.Module, _Kept] = {}

    def clear(self) -> None:
        """Forget all factors."""
        if self._kept:
            self._kept.clear()

    def factors(self, layer: nn.Module, given: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return a layer's L and R; ``None`` if there are none of what its parameters are now.

        Args:
            layer: The layer.
            given: Its cores and its rank weights.
        """
        kept = self._kept.get(layer)
        if kept is None or not _are(given, kept.given):
            self._kept[layer] = _Kept(given)
        elif kept.factors is None:
            self._kept[layer] = _Kept(given, is_due=True)
        elif all(map(_equals, given, kept.copies)):
            return kept.factors
        else:
            self._kept[layer] = _Kept(given)
        return None

    def is_due(self, layer: nn.Module) -> bool:
        """Whether factors are to be made of a layer.

        Not at its first call with these parameters: one evaluation between two steps of training
        is to cost nothing.
        """
        kept = self._kept.get(layer)
        return kept is not None and kept.is_due

    def make(
        self, layer: nn.Module, chains: Chains, given: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Make a layer's L and R, and keep them."""
        copies = [tensor.detach().clone() for tensor in given]
        num_cores = chains.num_cores
        lefts, rights = make_factors(chains, copies[:num_cores], copies[num_cores:])
        self._kept[layer] = _Kept(given, copies, (lefts[0], rights[0]))
        return lefts[0], rights[0]


def _are(given: Sequence[Tensor], known: Sequence[Tensor]) -> bool:
    return len(given) == len(known) and all(map(operator.is_, given, known))


def _equals(now: Tensor, then: Tensor) -> bool:
    return now.dtype is then.dtype and now.device == then.device and torch.equal(now, then)
