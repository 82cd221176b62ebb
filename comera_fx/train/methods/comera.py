"""The method "comera": rank weights are parameters that the size penalty pulls down."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from comera_fx.config import RankConfig
from comera_fx.modules import TTModule
from comera_fx.train.adapted import AdaptedLayers
from comera_fx.train.methods.deaths import Deaths
from comera_fx.train.methods.select import Bond, ranks_to_give_up, spare
from comera_fx.train.methods.size import SizeOf
from comera_fx.train.stages import Stage

SMALLEST_REFERENCE = 1e-12
"""Floor of |L0|, which the late stage divides by."""
STALE = 0.3
"""Where a rank weight has fallen below this since the last cut, what optimizers have averaged of
gradients from before would be divided by it, and squares by its square: they begin anew."""
REVIVED = 1.01
"""Dead ranks that the target has room for go back to this multiple of the threshold: live, and
next to nothing in the weight."""


class CoMERA:
    """Rank weights that the optimizer trains, on the objective of the stage.

    Args:
        layers: Layers with rank weights.
        config: Weights of the objective, threshold and patience.
        target: Parameters to come down to, or ``None``.
        initial_size: Parameters at the start.

    Source:
        Yang et al., "CoMERA", NeurIPS 2024, section 3 (from memory); what differs is told in the
        README of this folder.
    """

    def __init__(
        self, layers: AdaptedLayers, config: RankConfig, target: int | None, initial_size: int
    ) -> None:
        self._layers, self._config, self._target = layers, config, target
        self._initial_size = initial_size
        self._reference: float | None = None
        self.met = False
        self._strikes = self._no_strikes()
        self._deaths = Deaths(config.patience, layers.floors)
        self._choose_pushed()

    # ---- objective ----

    def compares(self, stage: Stage) -> bool:
        """Whether the late objective is minimised, which compares the loss with its reference."""
        return stage == "late" and not self.met and self._reference is not None

    def objective(self, task_loss: Tensor, seen: Tensor, stage: Stage) -> Tensor:
        """Return the objective of the stage."""
        if stage == "early":
            return self._early(task_loss)
        return self._late(task_loss, seen) if self.compares(stage) else task_loss

    def _early(self, loss: Tensor) -> Tensor:
        config = self._config
        penalty = config.gamma * self._size_of().surrogate / max(self._initial_size, 1)
        if config.beta:
            layers = self._layers.by_name.values()
            cores = (core for layer in layers for core in layer.cores)
            penalty = penalty + config.beta * sum(core.square().sum() for core in cores)
        return loss + penalty.to(loss)

    def _late(self, loss: Tensor, seen: Tensor) -> Tensor:
        config, target, reference = self._config, self._target, self._reference
        assert target is not None, "the late stage needs a target"
        assert reference is not None, "the late objective needs a reference"
        scale = max(abs(reference), SMALLEST_REFERENCE)
        sizes = self._size_of()
        surrogate = (sizes.surrogate / target).to(loss)
        loss_lag = config.w1 * (seen - reference) / scale
        size_lag = config.w2 * (sizes.size - target) / target
        over = sizes.size > target
        size_leads = over & (size_lag > loss_lag)
        main = torch.where(size_leads, config.w2 * surrogate, config.w1 * loss / scale)
        both = config.rho * (loss / scale + torch.where(over, surrogate, 0.0))
        return (main + both) * (scale / (config.w1 + config.rho))

    def begin_late(self, mean_loss: float | None) -> None:
        """Take the mean loss for L0, and clear the optimizers' state of the rank weights.

        That is of gradients of the early loss, which may have been a hundred times as large: Adam
        would divide by them for a thousand steps, and no rank weight would move.
        """
        self._reference = mean_loss
        self._forget(self._layers.rank_weights)

    # ---- which rank weights move ----

    def _choose_pushed(self) -> None:
        """With a target, let the size penalty push only on ranks that the target asks to cut.

        Under Adam a penalty pulls on all rank weights alike, however small it is. Where all fall,
        a layer of five bonds at a half is left with 3 % of its weight, gets no gradient to speak
        of, and dies; so those that the target lets stay are let alone.
        """
        pushed = None
        if self._target is not None:
            layers = self._layers
            masks = ranks_to_give_up(layers.by_name, self._target, layers.floors)
            pushed = [mask for layer in masks.values() for mask in layer]
        self._push(pushed)

    def _push(self, pushed: list[Tensor] | None) -> None:
        self._pushed = pushed
        self._held = [weight.detach().clone() for weight in self._layers.rank_weights]
        modules = list(self._layers.by_name.values())
        self._size_of = SizeOf(modules, self._config.threshold, pushed)

    @torch.no_grad()
    def stepped(self) -> None:
        """Put the rank weights that are not pushed on back to where they were.

        Their scale is the cores' as well; at ten times the cores' rate they would only wander.
        """
        if self._pushed is None or self.met:
            return
        weights = self._layers.rank_weights
        for weight, pushed, held in zip(weights, self._pushed, self._held, strict=True):
            weight.copy_(torch.where(pushed, weight, held))

    def _settle(self, met: bool) -> None:
        """Stop training the rank weights once the target is met: each would go on wandering.

        Under Adam they move by their learning rate, noise or not, and one that wanders below the
        threshold gets no gradient that could bring it back.
        """
        self.met = met
        frozen = self._layers.frozen
        for name, weight in zip(self._names(), self._layers.rank_weights, strict=True):
            weight.requires_grad_(not met and name not in frozen)
            weight.grad = None

    # ---- cuts ----

    def prune(self, stage: Stage, progress: float) -> None:
        """Cut the ranks that have died, and choose anew which to push on."""
        layers, target = self._layers, self._target
        layers.check_can_change()
        layers.check_finite()
        bonds = self._bonds()
        self._give_another_chance(bonds)
        if target is not None:
            spare(bonds, layers.modes, target)
        kept = {name: [b.alive for b in bonds if b.layer == name] for name in layers.by_name}
        layers.processes.compare({name: (layers.ranks[name], kept[name]) for name in kept})
        self._revive(bonds)
        self._strikes = [
            [strikes[index] for index in bond.alive]
            for bond, strikes in zip(bonds, self._strikes, strict=True)
        ]
        was_cut = layers.cut(kept)
        # One empty bond empties all of its layer.
        self._count_anew({bond.layer for bond in bonds if not bond.alive})
        settles = target is not None and layers.size <= target and not self.met
        if target is not None and layers.size <= target:
            self._settle(True)
        if settles and not was_cut:
            layers.processes.rebuild()
        if target is None and self._config.balance:
            layers.check_alike()
            self._balance()
        self._choose_pushed()

    def settle(self) -> None:
        """Do nothing: no rank is on trial."""

    def grow(self, stage: Stage, progress: float) -> None:
        """Do nothing: there is no budget to grow into."""

    def _balance(self) -> None:
        """Turn every bond into its singular directions, without those that have died.

        As cores learn, every index of a bond comes to hold a part of what the bond carries, and
        none can go. Singular directions are the ones of which as many as possible can; what the
        penalty takes off their rank weights stays off their singular values.
        """
        layers, threshold = self._layers, self._config.threshold
        # Ranks that have died but are not cut yet would be lost with their direction.
        resting = [
            name for name, layer in layers.by_name.items() if self._lowest(layer) > threshold
        ]
        bonds = layers.balanced(resting)
        counts = self._deaths.alive(
            bonds, lambda values, largest: int((values > threshold * largest).sum())
        )
        for name in bonds:
            if self._lowest(layers.by_name[name]) < STALE:
                self._forget(layers.by_name[name].cores)
        layers.turn(
            {
                name: [bond.first(n) for bond, n in zip(own, counts[name], strict=True)]
                for name, own in bonds.items()
            }
        )
        self._count_anew(bonds)

    @staticmethod
    def _lowest(layer: TTModule) -> float:
        weights = [weight.detach() for weight in layer.rank_weights if weight.numel()]
        return float(torch.cat(weights).min()) if weights else 0.0

    def _forget(self, parameters: Iterable[nn.Parameter]) -> None:
        for optimizer in self._layers.optimizers:
            for parameter in parameters:
                optimizer.state.pop(parameter, None)

    def resized(self) -> None:
        """Begin anew with the rank weights there are, all of them 1."""
        self._strikes = self._no_strikes()
        self._deaths.forget()
        if self._target is not None and self._layers.size <= self._target:
            self._settle(True)
        self._choose_pushed()

    def _give_another_chance(self, bonds: list[Bond]) -> None:
        """Keep ranks that were not found dead ``patience`` times in a row.

        A rank that one noisy step has put below the threshold gets no gradient there; what an
        optimizer has averaged of those before brings it back. With a target only those die that
        it asks to cut.
        """
        if self._target is not None:
            return
        for bond, strikes in zip(bonds, self._strikes, strict=True):
            dead = set(range(len(bond.values))) - set(bond.alive)
            for index in range(len(strikes)):
                strikes[index] = strikes[index] + 1 if index in dead else 0
            early = sorted(index for index in dead if strikes[index] < self._config.patience)
            bond.keep(early)

    def _no_strikes(self) -> list[list[int]]:
        return [[0] * weight.numel() for weight in self._layers.rank_weights]

    def _count_anew(self, names: Container[str]) -> None:
        """Forget the strikes of these layers, whose indices now mean something else."""
        self._strikes = [
            none if name in names else strikes
            for name, none, strikes in zip(
                self._names(), self._no_strikes(), self._strikes, strict=True
            )
        ]

    def _names(self) -> list[str]:
        """The layer of every bond."""
        layers = self._layers.by_name.items()
        return [name for name, layer in layers for _ in layer.rank_weights]

    def _bonds(self) -> list[Bond]:
        """The rank weights as numbers, in one wait for the device."""
        layers = self._layers
        weights = layers.rank_weights
        values = iter(torch.cat([weight.detach().double() for weight in weights]).tolist())
        threshold, floors = self._config.threshold, layers.floors
        return [
            Bond.of(name, list(islice(values, weight.numel())), threshold, floors[name])
            for name, weight in zip(self._names(), weights, strict=True)
        ]

    @torch.no_grad()
    def _revive(self, bonds: list[Bond]) -> None:
        """Put spared ranks just above the threshold, where a gradient reaches them."""
        for bond, weight in zip(bonds, self._layers.rank_weights, strict=True):
            if bond.spared:
                lifted = weight[bond.spared].clamp(min=REVIVED * self._config.threshold)
                weight[bond.spared] = lifted

    # ---- save and resume ----

    def retarget(self, target: int | None, initial_size: int) -> None:
        """Measure size against these; what to push on is in the state loaded next."""
        self._target, self._initial_size = target, initial_size

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists."""
        return {
            "met": self.met,
            "reference_loss": self._reference,
            "pushed": self._pushed and [mask.tolist() for mask in self._pushed],
            "strikes": [list(strikes) for strikes in self._strikes],
            "deaths": self._deaths.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._settle(state["met"])
        self._reference = state["reference_loss"]
        self._strikes = [list(strikes) for strikes in state["strikes"]]
        self._deaths.load_state_dict(state["deaths"])
        device, pushed = self._layers.device, state["pushed"]
        self._push(
            pushed and [torch.tensor(mask, dtype=torch.bool, device=device) for mask in pushed]
        )
