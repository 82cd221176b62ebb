"""How many singular directions each bond keeps, for the layers together to hold so many numbers."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

Counts = dict[str, list[int]]
"""Layer name to what each of its inner bonds keeps, left to right."""
Shares = Mapping[str, Sequence[Sequence[float]]]
"""Layer name to, per inner bond, the share of ``|W|^2`` that each direction carries, strongest
first."""
Modes = Mapping[str, Sequence[int]]
"""Layer name to the sizes of its cores' modes."""


def params_of(counts: Counts, modes: Modes) -> int:
    """Return the parameters of layers with these ranks; one rank of 0 leaves a layer none.

    Example:
        >>> params_of({"fc": [2]}, {"fc": [3, 5]})
        16
    """
    total = 0
    for name, inner in counts.items():
        ranks = (1, *(inner if all(inner) else [0] * len(inner)), 1)
        total += sum(ranks[k] * mode * ranks[k + 1] for k, mode in enumerate(modes[name]))
    return total


def rank_cost(inner: Sequence[int], modes: Sequence[int], bond: int) -> int:
    """Return the parameters that one rank of an inner bond (0 is the leftmost) stands for."""
    ranks = (1, *inner, 1)
    return ranks[bond] * modes[bond] + modes[bond + 1] * ranks[bond + 2]


def out_of_reach(target: int, ranks: Counts, modes: Modes, floors: Mapping[str, int]) -> str | None:
    """Return what to say where even the smallest ranks that cuts may reach hold more."""
    least = {
        name: [min(rank, max(floors[name], 1)) for rank in inner] for name, inner in ranks.items()
    }
    smallest = params_of(least, modes)
    if smallest <= target:
        return None
    return (
        f"the target of {target:,} parameters is out of reach: at the smallest ranks that cuts "
        f"may leave the layers hold {smallest:,}."
    )


def counts_within(shares: Shares, modes: Modes, target: int, floors: Mapping[str, int]) -> Counts:
    """Return the ranks that carry most of the layers' weights in ``target`` parameters.

    Directions that carry least for the parameters they hold go first; what then still fits comes
    back. One direction a bond always stays.

    Args:
        shares: What every direction there is carries.
        modes: Sizes of the modes.
        target: Parameters of all layers together. Where the floors alone hold more, these.
        floors: Layer name to the ranks of a bond that stay in any case.

    Example:
        >>> counts_within({"fc": [[0.9, 0.1]]}, {"fc": [3, 5]}, 8, {"fc": 0})
        {'fc': [1]}
    """
    counts = {name: [len(bond) for bond in bonds] for name, bonds in shares.items()}
    size = params_of(counts, modes)
    # A cost falls as neighbours do, so that a worth only rises: one that has is queued again.
    queue = [(_worth(shares, modes, counts, place), place) for place in _places(counts)]
    heapq.heapify(queue)
    while size > target and queue:
        worth, (name, bond) = heapq.heappop(queue)
        if counts[name][bond] <= max(floors[name], 1):
            continue
        now = _worth(shares, modes, counts, (name, bond))
        if now <= worth:
            size -= rank_cost(counts[name], modes[name], bond)
            counts[name][bond] -= 1
            now = _worth(shares, modes, counts, (name, bond))
        heapq.heappush(queue, (now, (name, bond)))
    return filled(shares, modes, target, counts)


def filled(shares: Shares, modes: Modes, target: int, counts: Counts) -> Counts:
    """Return larger counts, where they still are within ``target``: the worthiest first.

    A layer of which one bond keeps nothing holds nothing; it comes back first, or not at all.
    """
    counts = _revived(shares, modes, target, counts)
    size = params_of(counts, modes)
    while True:
        fits = [
            (-shares[name][bond][counts[name][bond]] / cost, name, bond, cost)
            for name, bond in _places(counts)
            if all(counts[name])
            and counts[name][bond] < len(shares[name][bond])
            and size + (cost := rank_cost(counts[name], modes[name], bond)) <= target
        ]
        if not fits:
            return counts
        _, name, bond, cost = min(fits)
        counts[name][bond] += 1
        size += cost


def _revived(shares: Shares, modes: Modes, target: int, counts: Counts) -> Counts:
    """Let every bond of a layer keep one direction, where that is within the target."""
    counts = {name: list(inner) for name, inner in counts.items()}
    for name in sorted(counts):
        if not all(counts[name]) and all(shares[name]):
            alive = {**counts, name: [max(count, 1) for count in counts[name]]}
            counts = alive if params_of(alive, modes) <= target else counts
    return counts


def _places(counts: Counts) -> list[tuple[str, int]]:
    return [(name, bond) for name, inner in counts.items() for bond in range(len(inner))]


def _worth(shares: Shares, modes: Modes, counts: Counts, place: tuple[str, int]) -> float:
    """What the weakest direction left of a bond carries, for a parameter it holds."""
    name, bond = place
    left = counts[name][bond]
    if not left:
        return 0.0
    return shares[name][bond][left - 1] / rank_cost(counts[name], modes[name], bond)
