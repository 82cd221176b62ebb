"""Which singular directions have died for good: found dead several cuts in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from comera_fx.balance import Bonds
from comera_fx.train.methods.budget import Counts


class Deaths:
    """Remembers how many directions of every bond were found dead at the last cuts.

    And the largest singular value that each bond has had: what is next to nothing beside that is
    dead, also where all of a layer fades.

    Singular directions come strongest first, so that the dead ones are the last.

    Args:
        patience: Cuts in a row that must find a direction dead.
        floors: Layer name to the directions of a bond that never die.
    """

    def __init__(self, patience: int, floors: Mapping[str, int]) -> None:
        self._patience, self._floors = patience, floors
        self._seen: dict[str, list[deque[int]]] = {}
        self._largest: dict[str, list[float]] = {}

    def largest(self, bonds: Bonds) -> dict[str, list[float]]:
        """Return the largest singular value that each bond has had up to now."""
        for name, own in bonds.items():
            past = self._largest.get(name, [0.0] * len(own))
            firsts = [float(bond.values[0]) if bond.values.numel() else 0.0 for bond in own]
            self._largest[name] = [max(pair) for pair in zip(past, firsts, strict=True)]
        return self._largest

    def alive(self, bonds: Bonds, count_live: Callable[[Tensor, float], int]) -> Counts:
        """Return how many directions every bond keeps.

        Args:
            bonds: The directions there are; all dead ones of a bond were noted at this cut once.
            count_live: How many of a bond's singular values, in falling order, are not dead,
                given the largest that the bond has had.
        """
        largest = self.largest(bonds)
        counts: Counts = {}
        for name, own in bonds.items():
            memory = self._seen.setdefault(name, [deque(maxlen=self._patience) for _ in own])
            counts[name] = []
            for bond, seen, reference in zip(own, memory, largest[name], strict=True):
                there = len(bond.values)
                seen.append(there - count_live(bond.values, reference))
                gone = min(seen) if len(seen) == self._patience else 0
                gone = min(gone, max(there - self._floors[name], 0))
                for index in range(len(seen)):
                    seen[index] -= min(seen[index], gone)
                counts[name].append(there - gone)
        return counts

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        seen = {name: [list(seen) for seen in own] for name, own in self._seen.items()}
        return {"seen": seen, "largest": {k: list(own) for k, own in self._largest.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._seen = {
            name: [deque(seen, maxlen=self._patience) for seen in own]
            for name, own in state["seen"].items()
        }
        self._largest = {name: list(own) for name, own in state["largest"].items()}


def above_error(values: Tensor, error: float) -> int:
    """Return the fewest of the values whose rest has at most this share of the norm of all.

    Args:
        values: Singular values, in falling order.
        error: The share, 0 or more.

    Example:
        >>> above_error(torch.tensor([1.0, 0.5, 0.001]), 0.01)
        2
    """
    tails = values.square().flip(0).cumsum(0).flip(0)
    return int((tails > error**2 * tails[:1]).sum())
