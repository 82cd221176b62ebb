"""Optimizer steps of a loss or gradient that is NaN or infinite are skipped, and said to be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.utils import get_total_norm

from comera_fx.errors import RankError
from comera_fx.train.caller import warn

Hook = Callable[[torch.optim.Optimizer, Any, Any], tuple[Any, Any] | None]
LONG_STREAK = 10
"""Skipped steps in a row from which on the warning says what to do."""


class Together(Protocol):
    """Knows which processes train one model, once that is known."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Their group; ``None`` for a process that trains by itself."""


class FiniteSteps:
    """Keeps what is not finite, loss or gradient, away from parameters and optimizer state.

    Losses are noted as they are computed. At ``optimizer.step`` a hook asks whether all since the
    last step were finite, and all gradients are; if not, it drops the gradients of that optimizer,
    so that no optimizer of ``torch.optim`` changes a parameter, a momentum or a step count. Losses
    of a closure count too. A ``GradScaler`` and learning-rate schedulers work as without it.

    The question waits for the device, once per optimizer and step; with ``enabled=False`` nothing
    is noted, asked or skipped (needed where the step is captured into a CUDA graph). Processes of
    ``torch.distributed`` agree on the answer, as gradients averaged over them are lost to all.

    A warning comes with the first skipped step of a streak, the 10th, the 100th, and so on.

    Args:
        optimizers: One optimizer, or several that are stepped together.
        gradients: Ask for finite gradients too, by their norm: a root or a division can have one
            that is not where the loss is. A ``GradScaler`` asks this itself.
        enabled: Whether anything is done at all.
        processes: Which processes train one model; all of them if not given.

    Attributes:
        num_steps: Steps ended so far, the skipped ones too.
        num_skipped: Steps that were skipped.
        in_a_row: Steps skipped since the last that was not.

    Raises:
        RankError: If one of the optimizers is none.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> finite = FiniteSteps(optimizer)
        >>> for x, y in batches:
        ...     loss = criterion(model(x), y)
        ...     finite.note(loss)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     was_skipped = finite.ended_step()
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        gradients: bool = True,
        enabled: bool = True,
        processes: Together | None = None,
    ) -> None:
        listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        self._optimizers = _checked(listed)
        self._gradients, self._enabled, self._processes = gradients, enabled, processes
        self.num_steps = self.num_skipped = self.in_a_row = 0
        self._noted: list[Tensor | None]
        self._skipped: bool
        self._watch()

    def note(self, loss: Tensor) -> None:
        """Remember whether a loss is finite, without waiting for the device.

        Args:
            loss: Any number of losses that the next step is to be made of.

        Raises:
            RankError: If it is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise RankError(
                "FiniteSteps.note needs losses",
                got=type(loss).__name__,
                expected="a tensor",
                mend="note the loss itself, before loss.item()",
            )
        if not self._enabled:
            return
        is_finite = torch.isfinite(loss.detach()).all()
        for k, before in enumerate(self._noted):
            self._noted[k] = is_finite if before is None else before & is_finite.to(before.device)

    def ended_step(self) -> bool:
        """Count a step, and return whether it was skipped; call it after ``optimizer.step``.

        A step also counts as skipped if a ``GradScaler`` left it out on its own and the loss was
        not finite.
        """
        if any([self._is_bad(k) for k in range(len(self._noted))]):
            self._skip("the loss")
        skipped, self._skipped = self._skipped, False
        if not skipped:
            self.in_a_row = 0
        self.num_steps += 1
        return skipped

    # ---- save and resume ----

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {name: getattr(self, name) for name in ("num_steps", "num_skipped", "in_a_row")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from ``state_dict``."""
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.in_a_row = state["in_a_row"]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_noted"], state["_skipped"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()

    # ---- at a step ----

    def _watch(self) -> None:
        """Put hooks on the optimizers, which go when this object does."""
        self._noted = [None] * len(self._optimizers)
        self._skipped = False
        if not self._enabled:
            return
        for k, optimizer in enumerate(self._optimizers):
            handle = optimizer.register_step_pre_hook(_hook_of(weakref.ref(self), k))
            weakref.finalize(self, handle.remove)

    def _before_step(self, k: int, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._drop_if_bad(k)
            return None

        def watched() -> Any:
            loss = closure()
            self._drop_if_bad(k)
            return loss

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _drop_if_bad(self, k: int) -> None:
        optimizer = self._optimizers[k]
        fault = self._fault(k)
        if fault is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._skip(fault)

    def _fault(self, k: int) -> str | None:
        """What of an optimizer's step is not finite: asked in one wait for the device."""
        optimizer = self._optimizers[k]
        # Set where a scaler leaves it to the optimizer to skip what it has found infinite.
        by_scaler = getattr(optimizer, "found_inf", None) is not None
        if not self._gradients or by_scaler:
            return "the loss" if self._is_bad(k) else None
        noted, self._noted[k] = self._noted[k], None
        grads = _gradients_of(optimizer)
        held = (p.device for group in optimizer.param_groups for p in group["params"])
        device = next(held, torch.device("cpu"))
        fine = torch.ones((), dtype=torch.bool, device=device)
        # Squares of finite numbers may add up to infinity; what is sure takes far longer.
        sum_is_finite = torch.isfinite(get_total_norm(grads)) if grads else fine
        loss_is_finite, sum_is_finite_too = self._agreed(
            fine if noted is None else noted.to(device), sum_is_finite.to(device)
        )
        if not loss_is_finite:
            return "the loss"
        if sum_is_finite_too:
            return None
        largest = get_total_norm(grads, norm_type=float("inf")) if grads else fine
        return None if self._agreed(torch.isfinite(largest).to(device))[0] else "a gradient"

    def _is_bad(self, k: int) -> bool:
        """Whether a loss since the optimizer's last step was not finite; they are forgotten."""
        noted, self._noted[k] = self._noted[k], None
        return noted is not None and not self._agreed(noted)[0]

    def _agreed(self, *flags: Tensor) -> list[bool]:
        """Which flags are set, in every process."""
        if self._processes is not None:
            group = self._processes.group
        else:
            together = dist.is_available() and dist.is_initialized()
            group = dist.group.WORLD if together else None
        answers = torch.stack(flags).to(torch.int32)
        if group is not None:
            dist.all_reduce(answers, op=dist.ReduceOp.MIN, group=group)
        return [bool(answer) for answer in answers.tolist()]

    def _skip(self, fault: str) -> None:
        """Count the step as skipped, once however many optimizers take it."""
        if self._skipped:
            return
        self._skipped = True
        self.num_skipped += 1
        self.in_a_row += 1
        if str(self.in_a_row).rstrip("0") != "1":
            return
        message = f"{fault} of step {self.num_steps + 1} is not finite: the step is skipped."
        if self.in_a_row >= LONG_STREAK:
            message = (
                f"{self.in_a_row} steps in a row were skipped, up to step {self.num_steps + 1}, "
                f"as {fault} was not finite: nothing is learnt any more. Go back to a checkpoint "
                "and lower the learning rate, clip gradients, or look at the batches."
            )
        warn(message)


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    own = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in held]
    dense = [grad._values() if grad.is_sparse else grad for grad in own if grad is not None]
    return [grad for grad in dense if grad.numel()]  # of nothing there is no largest entry


def _hook_of(owner: weakref.ref[FiniteSteps], k: int) -> Hook:
    @_disable_dynamo
    def drop_if_not_finite(
        optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        steps = owner()
        return None if steps is None else steps._before_step(k, args, kwargs)

    return drop_if_not_finite


def _checked(optimizers: list[Any]) -> list[torch.optim.Optimizer]:
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RankError(
                "FiniteSteps watches optimizers",
                got=type(optimizer).__name__,
                expected="a torch optimizer, or several",
                mend="write FiniteSteps(optimizer) or FiniteSteps([first, second])",
            )
    return optimizers
