"""New ranks where the loss gradient asks for them.

The gradient of a core says nothing of directions that are not there. So every bond gets trial
directions that change no output: random columns left of it, rows of zeros right of it. The next
backward pass gives the rows a gradient, which is what the loss would gain per step in such a
direction. Before the optimizer uses it, the trials whose gradient is largest for the parameters
they hold are kept, and the rest are cut.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from comera_fx.config import RankConfig
from comera_fx.train.adapted import AdaptedLayers
from comera_fx.train.methods.budget import Counts, rank_cost

TRIALS = 2
"""Trial directions of every bond."""


class Growth:
    """Adds ranks between one cut and the next.

    Args:
        layers: The layers.
        config: Says whether ranks grow at all.
    """

    def __init__(self, layers: AdaptedLayers, config: RankConfig) -> None:
        self._layers = layers
        self._before: Counts | None = None
        self._room = self._num_trials = 0
        self._grows = bool(config.regrow)
        self._watch()

    def _watch(self) -> None:
        """Put hooks on the optimizers, which go when this object does."""
        if self._grows:
            for optimizer in self._layers.optimizers:
                handle = optimizer.register_step_pre_hook(_hook_of(weakref.ref(self)))
                weakref.finalize(self, handle.remove)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()

    def begin(self, room: int) -> None:
        """Put trial directions into all bonds.

        Args:
            room: Parameters that those kept may hold.
        """
        if not room:
            return
        self._before, self._room = self._layers.ranks, room
        frozen = self._layers.frozen
        ranks = self._before.items()
        alive = {name: inner for name, inner in ranks if all(inner) and name not in frozen}
        trials = {name: [TRIALS] * len(inner) for name, inner in alive.items()}
        self._layers.grow(trials, seed=self._num_trials)
        self._num_trials += 1

    def settle(self) -> None:
        """Keep the trials that the gradient asks for most; without gradients none.

        Raises:
            RankError: As ``AdaptedLayers.check_can_change``; the trials are still there.
        """
        before = self._before
        if before is None:
            return
        self._layers.check_can_change()
        counts = self._layers.ranks
        chosen = {name: [list(range(rank)) for rank in inner] for name, inner in before.items()}
        room, modes = self._room, self._layers.modes
        for _, name, bond, index in sorted(self._demands(before)):
            cost = rank_cost(counts[name], modes[name], bond)
            if cost <= room:
                room -= cost
                chosen[name][bond].append(index)
        kept = {name: [sorted(bond) for bond in inner] for name, inner in chosen.items()}
        self._layers.cut(kept)
        self._before = None

    def _demands(self, before: Counts) -> list[tuple[float, str, int, int]]:
        """Per trial the negative square of its gradient for a parameter, its bond and index.

        A trial whose gradient is 0 is asked for by nothing, and is left out.
        """
        demands = []
        for name, inner in before.items():
            layer = self._layers.by_name[name]
            ranks = layer.spec.ranks[1:-1]
            for bond, old in enumerate(inner):
                grad = layer.cores[bond + 1].grad
                if grad is None or ranks[bond] == old:
                    continue
                squares = grad[old:].detach().double().flatten(1).square().sum(1)
                cost = rank_cost(ranks, layer.spec.mode_sizes, bond)
                values = squares.tolist()
                demands += [(-v / cost, name, bond, old + k) for k, v in enumerate(values) if v]
        is_finite = all(value > -float("inf") for value, *_ in demands)
        return demands if is_finite else []

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists."""
        return {"before": self._before, "room": self._room, "num_trials": self._num_trials}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._before, self._room = state["before"], state["room"]
        self._num_trials = state["num_trials"]


def _hook_of(owner: weakref.ref[Growth]) -> Any:
    @_disable_dynamo
    @torch.no_grad()
    def settle(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        growth = owner()
        if growth is not None:
            growth.settle()

    return settle
