"""Which ranks to give up for a target size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from comera_fx.modules import TTModule


@torch.no_grad()
def ranks_to_give_up(
    layers: Mapping[str, TTModule], target: int, min_rank: int
) -> dict[str, list[Tensor]]:
    """Return, per layer and bond, a mask of the ranks without which the target is met.

    The ranks that carry least for the parameters they hold go first. What a rank carries is the
    energy of its slices in both neighbouring cores and of its weight, relative to its bond's
    mean, so that bonds and layers of different scale compare. One rank a bond always stays.

    Args:
        layers: Name to layer; each has rank weights.
        target: Parameters to come down to.
        min_rank: Ranks of a bond that stay in any case, if more than one.
    """
    masks = {
        name: [torch.zeros_like(weight, dtype=torch.bool) for weight in layer.rank_weights]
        for name, layer in layers.items()
    }
    ranks = {name: list(layer.spec.ranks) for name, layer in layers.items()}
    modes = {name: layer.spec.mode_sizes for name, layer in layers.items()}
    size = sum(layer.tt_params for layer in layers.values())
    for _, name, bond, index in sorted(_by_worth(layers)):
        if size <= target:
            break
        left, here, right = ranks[name][bond - 1 : bond + 2]
        if here <= max(min_rank, 1):
            continue
        size -= left * modes[name][bond - 1] + modes[name][bond] * right
        ranks[name][bond] -= 1
        masks[name][bond - 1][index] = True
    return masks


def _by_worth(layers: Mapping[str, TTModule]) -> list[tuple[float, str, int, int]]:
    """Energy a parameter of every rank, with its layer, bond and index."""
    entries = []
    for name, layer in layers.items():
        spec = layer.spec
        for bond, weight in enumerate(layer.rank_weights, start=1):
            left, right = layer.cores[bond - 1], layer.cores[bond]
            energy = (
                weight.double().square()
                * left.double().flatten(0, -2).square().sum(0)
                * right.double().flatten(1).square().sum(1)
            )
            held = spec.ranks[bond - 1] * spec.mode_sizes[bond - 1]
            held += spec.mode_sizes[bond] * spec.ranks[bond + 1]
            worth = energy / energy.mean().clamp(min=torch.finfo(torch.float64).tiny) / held
            entries += [(value, name, bond, k) for k, value in enumerate(worth.tolist())]
    return entries
