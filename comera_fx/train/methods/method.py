"""What the methods of rank adaptation have in common."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from comera_fx.train.stages import Stage


class Method(Protocol):
    """Brings ranks to zero, and cuts them."""

    met: bool
    """Whether the size has come down to its target, if there is one."""

    def compares(self, stage: Stage) -> bool:
        """Whether what is minimised depends on how large the loss is."""

    def objective(self, task_loss: Tensor, seen: Tensor, stage: Stage) -> Tensor:
        """Return what to minimise.

        Args:
            task_loss: The loss of this process.
            seen: The mean loss of all processes where ``compares``, detached.
            stage: The stage of this step.
        """

    def stepped(self) -> None:
        """Do what is due after every step of the optimizer."""

    def prune(self, stage: Stage, progress: float) -> None:
        """Cut ranks, or bring them closer to zero.

        Args:
            stage: The stage of the step that has ended.
            progress: Share of ``RankConfig.shrink_steps`` of the late stage that has gone by.
        """

    def grow(self, stage: Stage, progress: float) -> None:
        """Try out new ranks, once a cut has been looked at; arguments as for ``prune``."""

    def settle(self) -> None:
        """Decide now on new ranks that are being tried out."""

    def resized(self) -> None:
        """Take note that ranks have changed otherwise than by ``prune``."""

    def begin_late(self, mean_loss: float | None) -> None:
        """Take the mean loss for reference: the late stage begins."""

    def retarget(self, target: int | None, initial_size: int) -> None:
        """Take another target, and size at the start, than it was made with."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; the layers have their ranks already."""
