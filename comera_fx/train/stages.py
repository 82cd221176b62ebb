"""Where training stands: warm-up, early, late; and the running mean of the task loss."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from comera_fx.config import RankConfig
from comera_fx.train.processes import Processes

Stage = Literal["warmup", "early", "late"]

IMPROVEMENT = 0.01
"""A running mean that has not fallen by this share of itself within ``RankConfig.plateau`` steps
has reached a plateau."""
LOSS_MEMORY = 0.9
"""Weight of the past in the running mean of the task loss."""


class Stages:
    """Counts steps, and says which stage they belong to.

    Args:
        config: Lengths of the stages.
        has_target: Whether there is a size to reach; without one the early stage has no end.

    Attributes:
        num_steps: Steps so far.
        late_since: Step after which the late stage began, if it has.
    """

    def __init__(self, config: RankConfig, *, has_target: bool) -> None:
        self._config, self._has_target = config, has_target
        self.num_steps = 0
        self.late_since: int | None = None
        self._best: float | None = None
        self._best_at = 0
        self._begin_late_by_length()

    @property
    def stage(self) -> Stage:
        """The stage of the next step."""
        if self.num_steps < self._config.warmup_steps:
            return "warmup"
        return "early" if self.late_since is None else "late"

    def count(self) -> None:
        """Count a step."""
        self.num_steps += 1
        self._begin_late_by_length()

    def watch(self, mean_loss: float | None) -> None:
        """Let the early stage end where the mean loss has reached a plateau.

        Args:
            mean_loss: The running mean, alike in all processes; ``None`` if it is not finite.
        """
        patience = self._config.plateau
        if patience is None or self.stage != "early" or not self._has_target or mean_loss is None:
            return
        best = self._best
        if best is None or mean_loss < best - IMPROVEMENT * abs(best):
            self._best, self._best_at = mean_loss, self.num_steps
        elif self.num_steps - self._best_at >= patience:
            self.end_early()

    def end_early(self) -> None:
        """Begin the late stage, if it has not begun."""
        if self.late_since is None:
            self.late_since = self.num_steps

    @property
    def late_progress(self) -> float:
        """Share of ``RankConfig.shrink_steps`` that has gone by, 0 to 1."""
        if self.late_since is None:
            return 0.0
        length = self._config.effective_shrink_steps
        return min(1.0, (self.num_steps - self.late_since) / length) if length else 1.0

    def _begin_late_by_length(self) -> None:
        config = self._config
        if not self._has_target or config.plateau is not None:
            return
        if self.num_steps >= config.warmup_steps + config.effective_early_steps:
            self.end_early()

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {
            "num_steps": self.num_steps,
            "late_since": self.late_since,
            "best": self._best,
            "best_at": self._best_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.num_steps, self.late_since = state["num_steps"], state["late_since"]
        self._best, self._best_at = state["best"], state["best_at"]


class LossMemory:
    """Running mean of the task loss, kept without waiting for the device.

    Attributes:
        mean: NaN until the first finite loss; a loss that is not finite is left out.
        is_finite: Whether the last loss was.
    """

    def __init__(self) -> None:
        self.mean: Tensor | None = None
        self.is_finite: Tensor | None = None

    def note(self, seen: Tensor) -> None:
        """Take in a detached loss."""
        loss = seen.double()
        self.is_finite = torch.isfinite(loss)
        mean = self.mean
        past = loss if mean is None else mean.to(loss.device)
        fresh = LOSS_MEMORY * past + (1 - LOSS_MEMORY) * loss
        self.mean = torch.where(self.is_finite & torch.isfinite(past), fresh, past)
        if mean is not None:
            restart = self.is_finite & ~torch.isfinite(past)
            self.mean = torch.where(restart, loss, self.mean)

    def share(self, processes: Processes) -> None:
        """Have all processes go by the mean of their losses; one that is not finite counts."""
        if processes.group is None or self.mean is None or self.is_finite is None:
            return
        pair = torch.stack([self.mean, self.is_finite.to(self.mean)])
        shared = processes.mean(pair)
        self.mean, self.is_finite = shared[0], shared[1] == 1

    @property
    def value(self) -> float | None:
        """The mean as a number, for which the device is waited for; ``None`` if not finite."""
        mean = None if self.mean is None else float(self.mean)
        return mean if mean is not None and abs(mean) < float("inf") else None

    def load(self, value: float | None) -> None:
        """Go on from ``value``."""
        self.mean = None if value is None else torch.tensor(value, dtype=torch.float64)
