"""The methods "proximal" and "rounding": the singular values of every bond are the rank weights.

At every cut the layers are brought into balanced form (``balance.py``), where the rank weights of
a bond are its singular values: no parameter stands for them, and nothing is multiplied in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comera_fx.balance import Bonds, Directions
from comera_fx.config import RankConfig
from comera_fx.train.adapted import AdaptedLayers
from comera_fx.train.methods.budget import Counts, counts_within, filled, rank_cost
from comera_fx.train.methods.deaths import Deaths, above_error
from comera_fx.train.methods.growth import Growth
from comera_fx.train.stages import Stage

FADE = 0.9
"""What singular values that have to go at the next cut keep at this one. Where half was taken, and
two cuts ahead, one cut in twenty raised the loss by more than 1 %: more than cutting at once."""


MOST_LOWERED = 0.95
"""The most that the largest singular value of a bond loses at a cut before the norm is restored."""


class SingularValues:
    """Lowers and cuts singular values.

    Early: "proximal" takes ``gamma`` times the largest that the bond has had off all its singular
    values (soft thresholding: the proximal step of their sum), more where a rank holds more, and
    scales what stays to their norm; "rounding" cuts each bond to a relative error. Late: the
    budget falls from the size there is to the target, ``S* + (S - S*) (1 - p)^3`` at the share p
    of the way, and the directions that carry most per parameter stay; "proximal" fades what will
    have to go.

    Args:
        layers: The layers.
        config: Method, pace and floors.
        target: Parameters to come down to, or ``None``.

    Source:
        Soft thresholding: Cai, Candes and Shen, "A Singular Value Thresholding Algorithm for
        Matrix Completion", SIOPT 2010, section 2.1. Cubic budget: Zhu and Gupta, "To Prune, or
        Not to Prune", 2017, section 3. Both from memory.
    """

    def __init__(self, layers: AdaptedLayers, config: RankConfig, target: int | None) -> None:
        self._layers, self._config, self._target = layers, config, target
        self._start_size = layers.size
        self._deaths = Deaths(config.patience, layers.floors)
        self._growth = Growth(layers, config)
        self.met = target is not None and layers.size <= target

    # ---- objective ----

    def compares(self, stage: Stage) -> bool:
        """Whether the loss is compared with anything: it is not."""
        return False

    def objective(self, task_loss: Tensor, seen: Tensor, stage: Stage) -> Tensor:
        """Return the task loss."""
        return task_loss

    def stepped(self) -> None:
        """Do nothing: singular values change at cuts only."""

    def resized(self) -> None:
        """Forget which directions were found dead, and look at the target again."""
        self._deaths.forget()
        self.met = self._target is not None and self._layers.size <= self._target

    def begin_late(self, mean_loss: float | None) -> None:
        """Note the size that the budget falls from."""
        self._start_size = self._layers.size

    # ---- cuts ----

    def prune(self, stage: Stage, progress: float) -> None:
        """Bring all layers that train into balanced form, with fewer directions or weaker ones."""
        layers = self._layers
        layers.check_can_change()
        layers.check_finite()
        self.settle()
        layers.check_alike()
        bonds = layers.balanced()
        if not bonds:
            return
        modes = {name: layers.modes[name] for name in bonds}
        counts = {name: [len(bond.values) for bond in own] for name, own in bonds.items()}
        if stage == "early":
            if self._config.method == "proximal":
                bonds = self._soft_thresholded(bonds)
            counts = self._deaths.alive(bonds, self._live)
            if self._target is not None:
                counts = filled(_shares(bonds), modes, self._target - layers.frozen_size, counts)
        elif not self.met:
            counts, bonds = self._within_budget(bonds, progress)
        kept = {
            name: [bond.first(count) for bond, count in zip(own, counts[name], strict=True)]
            for name, own in bonds.items()
        }
        layers.turn(kept)
        self.met = self._target is not None and layers.size <= self._target

    def settle(self) -> None:
        """Decide on trials that no step of the optimizer has met."""
        self._growth.settle()

    def grow(self, stage: Stage, progress: float) -> None:
        """Try new directions on the way to a target."""
        if stage == "late" and not self.met:
            self._growth.begin(self._room(progress))

    def _soft_thresholded(self, bonds: Bonds) -> Bonds:
        """Take the threshold off all singular values, weighted by what a rank costs."""
        modes = self._layers.modes
        costs = {
            name: [rank_cost([len(b.values) for b in own], modes[name], k) for k in range(len(own))]
            for name, own in bonds.items()
        }
        every = [cost for own in costs.values() for cost in own]
        mean, largest = sum(every) / len(every), self._deaths.largest(bonds)
        config = self._config
        return {
            name: [
                _lowered(bond, config.gamma * cost / mean * top, config.threshold / 2 * top)
                for bond, cost, top in zip(own, costs[name], largest[name], strict=True)
            ]
            for name, own in bonds.items()
        }

    def _live(self, values: Tensor, largest: float) -> int:
        if self._config.method == "proximal":
            return int((values > self._config.threshold * largest).sum())
        return above_error(values, self._config.threshold)

    # ---- the way to a target ----

    def _budget(self, progress: float) -> int:
        assert self._target is not None, "only a target has a budget"
        start = max(self._start_size, self._target)
        return self._target + int((start - self._target) * (1 - min(progress, 1.0)) ** 3)

    def _ahead(self, progress: float) -> float:
        """The progress at the next cut."""
        length = self._config.effective_shrink_steps
        return progress + self._config.prune_every / length if length else 1.0

    def _room(self, progress: float) -> int:
        """Parameters that new ranks may hold until the next cut."""
        return int(self._config.regrow * self._budget(progress))

    def _within_budget(self, bonds: Bonds, progress: float) -> tuple[Counts, Bonds]:
        shares = _shares(bonds)
        modes = {name: self._layers.modes[name] for name in bonds}
        floors, frozen = self._layers.floors, self._layers.frozen_size
        counts = counts_within(shares, modes, self._budget(progress) - frozen, floors)
        if self._config.method == "rounding" or progress >= 1:
            return counts, bonds
        ahead = self._budget(self._ahead(progress)) - frozen
        later = counts_within(shares, modes, ahead, floors)
        return counts, {
            name: [_faded(bond, count) for bond, count in zip(own, later[name], strict=True)]
            for name, own in bonds.items()
        }

    # ---- save and resume ----

    def retarget(self, target: int | None, initial_size: int) -> None:
        """Come down to another target; the size at the start tells nothing here."""
        self._target = target

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists."""
        return {
            "met": self.met,
            "start_size": self._start_size,
            "deaths": self._deaths.state_dict(),
            "growth": self._growth.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.met, self._start_size = state["met"], state["start_size"]
        self._deaths.load_state_dict(state["deaths"])
        self._growth.load_state_dict(state["growth"])


def _shares(bonds: Mapping[str, list[Directions]]) -> dict[str, list[list[float]]]:
    """Return the share of ``|W|^2`` that each direction carries."""
    return {
        name: [(bond.values.square() / bond.values.square().sum()).tolist() for bond in own]
        for name, own in bonds.items()
    }


def _lowered(bond: Directions, amount: float, least: float) -> Directions:
    """Take an amount off all singular values, but none of them below ``least``; keep the norm.

    A direction of exactly 0 has no gradient that could bring it back. If the norm fell too, a
    model that learns slowly would lose all it knows, cut by cut.
    """
    values = bond.values
    if not values.numel():
        return bond
    lowered = (values - min(amount, MOST_LOWERED * float(values.max()))).clamp(min=0.0)
    lowered = lowered * (values.norm() / lowered.norm())
    return bond.scaled(torch.maximum(lowered, values.clamp(max=least)) / values)


def _faded(bond: Directions, count: int) -> Directions:
    """Weaken all but the first directions."""
    factors = torch.ones_like(bond.values)
    factors[count:] = FADE
    return bond.scaled(factors)
