"""Which singular directions have died for good: found dead several cuts in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor

from comera_fx.train.balance import Bonds
from comera_fx.train.budget import Counts


class Deaths:
    """Remembers how many directions of every bond were found dead at the last cuts.

    Singular directions come strongest first, so that the dead ones are the last.

    Args:
        patience: Cuts in a row that must find a direction dead.
        floors: Layer name to the directions of a bond that never die.
    """

    def __init__(self, patience: int, floors: Mapping[str, int]) -> None:
        self._patience, self._floors = patience, floors
        self._seen: dict[str, list[deque[int]]] = {}

    def alive(self, bonds: Bonds, count_live: Callable[[Tensor], int]) -> Counts:
        """Return how many directions every bond keeps.

        Args:
            bonds: The directions there are; all dead ones of a bond were noted at this cut once.
            count_live: How many of a bond's singular values, in falling order, are not dead.
        """
        counts: Counts = {}
        for name, own in bonds.items():
            memory = self._seen.setdefault(name, [deque(maxlen=self._patience) for _ in own])
            counts[name] = []
            for bond, seen in zip(own, memory, strict=True):
                there = len(bond.values)
                seen.append(there - count_live(bond.values))
                gone = min(seen) if len(seen) == self._patience else 0
                gone = min(gone, max(there - self._floors[name], 0))
                for index in range(len(seen)):
                    seen[index] -= min(seen[index], gone)
                counts[name].append(there - gone)
        return counts

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()

    def state_dict(self) -> dict[str, list[list[int]]]:
        """Return plain numbers."""
        return {name: [list(seen) for seen in own] for name, own in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, list[list[int]]]) -> None:
        """Go on from ``state_dict``."""
        self._seen = {
            name: [deque(seen, maxlen=self._patience) for seen in own]
            for name, own in state.items()
        }


def above(values: Tensor, threshold: float) -> int:
    """Return how many values, in falling order, are above this share of the first.

    Example:
        >>> above(torch.tensor([1.0, 0.5, 0.001]), 0.01)
        2
    """
    return int((values > threshold * values[:1]).sum())


def above_error(values: Tensor, error: float) -> int:
    """Return the fewest of the values whose rest has at most this share of the norm of all.

    Example:
        >>> above_error(torch.tensor([1.0, 0.5, 0.001]), 0.01)
        2
    """
    tails = values.square().flip(0).cumsum(0).flip(0)
    return int((tails > error**2 * tails[:1]).sum())
