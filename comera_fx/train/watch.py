"""Says when adaptation goes wrong: what stands still, what a cut has raised, what is not called."""

from __future__ import annotations

from typing import Any

from comera_fx.train.caller import warn

EXPLODED, NOTABLE = 0.5, 0.05
"""A mean loss has exploded if it is the first share of itself above what it was before a cut, and
the second share of the first loss that was seen: one that has come down to noise may double."""
STUCK_AFTER = 50
"""Cuts without a change of size, on the way to a target, after which it is said."""

FORGOTTEN_AFTER = 100
"""Calls of ``loss`` without a ``step``, or the other way round, after which it is said."""


class Watch:
    """Looks at size and loss at every cut, and warns.

    Attributes:
        notes: What was said so far.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._size: int | None = None
        self._unmoved = 0
        self._first_loss: float | None = None
        self._loss_before: float | None = None
        self._cut_at = 0
        self._told = False

    def look(self, step: int, size: int, loss: float | None, *, awaits_cuts: bool) -> None:
        """Take in the state after a cut, or after one that had nothing to cut.

        Args:
            step: Number of the step that has ended.
            size: Parameters now.
            loss: Running mean of the loss, all of it from before this cut.
            awaits_cuts: Whether the size is to come down to a target.
        """
        if self._first_loss is None:
            self._first_loss = loss
        before = self._loss_before
        if not self._told and self._has_exploded(loss):
            self._told = True  # the mean goes on rising for a while
            self._loss_before = loss
            self.say(
                f"the mean loss has gone from {before:.4g} to {loss:.4g} since the cut of step "
                f"{self._cut_at}. Cut less at once: raise shrink_steps or the target, or lower "
                "gamma or the learning rate.",
            )
        moved = self._size is not None and size != self._size
        if moved or before is None:
            self._loss_before, self._cut_at, self._told = loss, step, False
        self._unmoved = 0 if moved or not awaits_cuts else self._unmoved + 1
        self._size = size
        if self._unmoved == STUCK_AFTER:
            self.say(
                f"the size has stood at {size:,} for {STUCK_AFTER} cuts, and its target is not "
                "met. Lower min_rank, or raise rho or the rank weights' learning rate; "
                "the method 'proximal' or 'rounding' meets a target by a schedule.",
            )

    def _has_exploded(self, loss: float | None) -> bool:
        before, first = self._loss_before, self._first_loss
        if before is None or first is None or loss is None:
            return False
        return loss - before > max(EXPLODED * abs(before), NOTABLE * abs(first))

    def say(self, note: str | None) -> None:
        """Warn, and remember it; ``None`` is nothing to say."""
        if note is not None:
            self.notes.append(note)
            warn(note)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {
            "notes": list(self.notes),
            "size": self._size,
            "unmoved": self._unmoved,
            "first_loss": self._first_loss,
            "loss_before": self._loss_before,
            "cut_at": self._cut_at,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.notes = list(state["notes"])
        self._size, self._unmoved = state["size"], state["unmoved"]
        self._first_loss, self._loss_before = state["first_loss"], state["loss_before"]
        self._cut_at, self._told = state["cut_at"], state["told"]


class Reminders:
    """Says when a loop calls only one of ``RankAdapter.loss`` and ``RankAdapter.step``.

    Args:
        watch: Remembers what is said.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._num_losses = 0

    def asked_for_loss(self) -> None:
        """Count a call of ``loss``."""
        self._num_losses += 1
        if self._num_losses == FORGOTTEN_AFTER:
            self._watch.say(
                f"RankAdapter.loss was called {FORGOTTEN_AFTER} times without RankAdapter.step: "
                "no rank is ever cut. Call adapter.step() after optimizer.step()."
            )

    def stepped(self) -> None:
        """Take note of a call of ``step``."""
        self._num_losses = 0

    def counted(self, num_steps: int, *, has_loss: bool) -> None:
        """Look whether ``loss`` has been called, now that so many steps have."""
        if num_steps == FORGOTTEN_AFTER and not has_loss:
            self._watch.say(
                f"RankAdapter.step was called {FORGOTTEN_AFTER} times without RankAdapter.loss: "
                "nothing asks ranks to shrink. Train on adapter.loss(task_loss)."
            )
