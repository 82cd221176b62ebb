"""Which rank weights to give up for a target size, and which of the dead ones to spare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from comera_fx.modules import TTModule
from comera_fx.train.methods.budget import params_of, rank_cost


@torch.no_grad()
def ranks_to_give_up(
    layers: Mapping[str, TTModule], target: int, floors: Mapping[str, int]
) -> dict[str, list[Tensor]]:
    """Return, per layer and bond, a mask of the ranks without which the target is met.

    The ranks that carry least for the parameters they hold go first. What a rank carries is the
    share of its layer's weight that is lost without it, so that layers of different scale
    compare. One rank a bond always stays.

    Args:
        layers: Name to layer; each has rank weights.
        target: Parameters to come down to.
        floors: Layer name to the ranks of a bond that stay in any case, if more than one.
    """
    masks = {
        name: [torch.zeros_like(weight, dtype=torch.bool) for weight in layer.rank_weights]
        for name, layer in layers.items()
    }
    ranks = {name: list(layer.spec.ranks[1:-1]) for name, layer in layers.items()}
    modes = {name: layer.spec.mode_sizes for name, layer in layers.items()}
    size = sum(layer.tt_params for layer in layers.values())
    for _, name, bond, index in sorted(_by_worth(layers)):
        if size <= target:
            break
        if ranks[name][bond] <= max(floors[name], 1):
            continue
        size -= rank_cost(ranks[name], modes[name], bond)
        ranks[name][bond] -= 1
        masks[name][bond][index] = True
    return masks


def _by_worth(layers: Mapping[str, TTModule]) -> list[tuple[float, str, int, int]]:
    """What every rank carries for a parameter it holds, with its layer, bond and index."""
    places: list[tuple[str, int, int]] = []
    worths: list[Tensor] = []
    for name, layer in layers.items():
        spec = layer.spec
        for bond, share in enumerate(_lost_shares(layer)):
            worths.append(share / rank_cost(spec.ranks[1:-1], spec.mode_sizes, bond))
            places += [(name, bond, index) for index in range(share.numel())]
    values = torch.cat(worths).tolist()  # one wait for the device
    return [(value, *place) for value, place in zip(values, places, strict=True)]


def _lost_shares(layer: TTModule) -> list[Tensor]:
    """Per inner bond and rank, ``|W - W without it|^2 / |W|^2``.

    Without rank j of a bond, W lacks ``L[:, j] R[j, :]``, where L and R are all that is left and
    right of the bond: its squared norm is the product of two diagonal entries of Gram matrices.
    """
    cores = [core.double().flatten(1, -2) for core in layer.effective_cores()]
    lefts = [torch.ones(1, 1, dtype=torch.float64, device=cores[0].device)]
    for core in cores[:-1]:
        lefts.append(torch.einsum("ab,anc,bnd->cd", lefts[-1], core, core))
    rights = [torch.ones_like(lefts[0])]
    for core in reversed(cores[1:]):
        rights.append(torch.einsum("cd,anc,bnd->ab", rights[-1], core, core))
    grams = list(zip(lefts[1:], reversed(rights[1:]), strict=True))
    norm = (grams[0][0] * grams[0][1]).sum().clamp(min=torch.finfo(torch.float64).tiny)
    return [left.diagonal() * right.diagonal() / norm for left, right in grams]


@dataclass
class Bond:
    """The rank weight of one bond as numbers.

    Args:
        layer: Name of its layer; the bonds of a layer come left to right.
        values: The rank weight.
        alive: Indices that stay, in rising order.
        spared: Those of them that had died and are to live.
    """

    layer: str
    values: list[float]
    alive: list[int]
    spared: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, layer: str, values: list[float], threshold: float, min_rank: int) -> Bond:
        """Keep what is above the threshold or NaN, and the strongest up to ``min_rank``."""
        alive = {index for index, value in enumerate(values) if not value <= threshold}
        for index in sorted(range(len(values)), key=lambda index: -values[index]):
            if len(alive) >= min_rank:
                break
            alive.add(index)
        return cls(layer, values, sorted(alive))

    def keep(self, indices: Sequence[int]) -> None:
        """Have dead indices stay."""
        self.alive = sorted([*self.alive, *indices])


def spare(bonds: Sequence[Bond], modes: Mapping[str, Sequence[int]], target: int) -> None:
    """Keep dead ranks after all, strongest first, while the size stays within the target.

    Rank weights fall side by side, so that many can die at once; without this a cut could take
    far more than was asked.

    Args:
        bonds: All bonds; their ``alive`` and ``spared`` are changed.
        modes: Layer name to the sizes of its cores' modes.
        target: Parameters to stay within.
    """
    of_layer: dict[str, list[Bond]] = {}
    for bond in bonds:
        of_layer.setdefault(bond.layer, []).append(bond)

    def size(name: str) -> int:
        return params_of({name: [len(bond.alive) for bond in of_layer[name]]}, modes)

    total = sum(map(size, of_layer))
    dead = [
        (-bond.values[index], number, index)
        for number, bond in enumerate(bonds)
        for index in sorted(set(range(len(bond.values))) - set(bond.alive))
    ]
    for _, number, index in sorted(dead):
        bond, kept = bonds[number], bonds[number].alive
        before = size(bond.layer)
        bond.alive = sorted([*kept, index])
        grown = total - before + size(bond.layer)
        bond.alive = kept
        if grown <= target:
            total = grown
            bond.keep([index])
            bond.spared.append(index)
