"""Ranks that adapt while a model trains: the stages of a run, and the cuts that shrink it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.train.adaptable import (
    check_can_hand_over,
    check_holds_cores,
    check_loadable,
    check_types,
    claim,
    hand_over,
    warn_of_target,
)
from comera_fx.train.adapted import AdaptedLayers
from comera_fx.train.finite import FiniteSteps
from comera_fx.train.methods import CoMERA, Method, SingularValues, out_of_reach
from comera_fx.train.processes import check_whole_optimizer
from comera_fx.train.rounding import check_tolerance, compact_layers
from comera_fx.train.stages import LossMemory, Stage, Stages
from comera_fx.train.watch import Reminders, Watch


class RankAdapter:
    """Prunes the ranks of a model's TT layers while it trains.

    With ``RankConfig.method="comera"`` it gives every inner bond a rank weight d (a parameter, 1
    at the start) and adds these to the optimizer: to the group of ``param_groups`` made for them,
    or to a new one at ten times the cores' learning rate. The other methods work on singular
    values, and add nothing.

    ``loss`` and ``step`` run eagerly, also where a compiled function calls them, as their state
    changes with every step. Compile the model, or a function that ends with the task loss.

    Copy or pickle it together with model and optimizer, ``copy.deepcopy((model, optimizer,
    adapter))``: by itself it takes a model and an optimizer of its own along.

    Args:
        model: A model from ``optimize``; a compiled one works too, and one that is, or later gets,
            wrapped in ``DistributedDataParallel``: all processes then cut alike, the wrapper
            follows every cut, and what depends on the loss goes by its mean. Every process calls
            ``loss`` and ``step`` as often. See ``bench/distributed.py`` for an example.
        optimizer: Holds the model's cores; several that hold them together work too.
        config: Method, target and pace.
        check_processes: Whether processes compare what they are about to cut, and raise where
            they differ; ``None``: at torch's debug level DETAIL.

    Attributes:
        history: One dict every ``prune_every`` steps and at a change of stage: ``step``,
            ``stage``, ``loss`` (running mean of the task loss), ``size`` and ``ranks`` (layer
            name to inner ranks).
        initial_size: TT parameters of the adapted layers at the start.
        target_size: Parameters to reach, or ``None``.

    Raises:
        RankError: If there is no layer to adapt, ``exclude`` or ``min_ranks`` names none, the
            parameters are divided among processes (FSDP), or the optimizer does not hold the
            cores.

    Example:
        >>> optimizer = torch.optim.AdamW(comera_fx.param_groups(model, lr=1e-3))
        >>> adapter = RankAdapter(model, optimizer, RankConfig(target_ratio=0.5))
        >>> for x, y in batches:
        ...     loss = adapter.loss(criterion(model(x), y))
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     adapter.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: RankConfig | None = None,
        *,
        check_processes: bool | None = None,
    ) -> None:
        optimizers = check_types(model, optimizer, config)
        self.config = config or RankConfig()
        self.optimizers = optimizers
        for each in optimizers:
            check_whole_optimizer(each)
        self._layers = AdaptedLayers(model, optimizers, self.config, check_processes)
        check_holds_cores(optimizers, self._layers.by_name)
        if self.config.method == "comera":
            check_can_hand_over(optimizers, self._layers.by_name)
        self.initial_size = self.size
        self._watch = Watch()
        self._bytes_each = self._layers.num_bytes / max(self.size, 1)
        self.target_size = self._target(self.initial_size)
        if self.target_size is not None:
            ranks, modes, floors = self._layers.ranks, self._layers.modes, self._layers.floors
            self._watch.say(out_of_reach(self.target_size, ranks, modes, floors))
        claim(self, self._layers.by_name)  # the last that may fail, and before any change
        self.history: list[dict[str, Any]] = []
        self._stages = Stages(self.config, has_target=self.target_size is not None)
        self._memory = LossMemory()
        self._finite = FiniteSteps(
            optimizers, enabled=self.config.skip_nonfinite, processes=self._layers.processes
        )
        self._reminders = Reminders(self._watch)
        self._has_begun_late = False
        self._method = self._make_method()

    def _make_method(self) -> Method:
        layers, config, target = self._layers, self.config, self.target_size
        if config.method != "comera":
            return SingularValues(layers, config, target)
        for layer in layers.by_name.values():
            layer.attach_rank_weights(config.threshold)
        hand_over(self.optimizers, layers.by_name)
        layers.processes.rebuild()
        return CoMERA(layers, config, target, self.initial_size)

    # ---- what a training loop calls ----

    @_disable_dynamo
    def loss(self, task_loss: Tensor) -> Tensor:
        """Return what to minimise in the present stage.

        Where gradients of n batches add up to a step, write ``(adapter.loss(loss) /
        n).backward()``: the size penalty of ``adapter.loss(loss / n)`` would count n times. With
        a ``GradScaler``: ``scaler.scale(adapter.loss(loss)).backward()``.

        Args:
            task_loss: The model's loss, a scalar.

        Returns:
            The task loss L, but for the method "comera". There, early: ``L + gamma S^/S(1) + beta
            sum |G|^2``; late: ``max{w1 (L-L0)/L0, w2 (S-S*)/S*} + rho (L/L0 + S^/S*)``, scaled by
            ``L0 / (w1 + rho)`` so that gradients keep the size of the task loss's own; once the
            size has met its target, the task loss. With a target, the gradient of S^ reaches
            only the rank weights that would have to go for it.
        """
        if not isinstance(task_loss, Tensor) or task_loss.numel() != 1:
            raise RankError(
                "RankAdapter.loss needs a scalar",
                got=f"{type(task_loss).__name__} {tuple(getattr(task_loss, 'shape', ()))}",
                expected="one number",
                mend="reduce the loss first: loss.mean()",
            )
        processes, stage = self._layers.processes, self.stage
        processes.find(required=True)
        self._layers.check_unchanged()
        compares = self._method.compares(stage)
        seen = processes.mean(task_loss) if compares else task_loss.detach()
        self._memory.note(seen)
        self._finite.note(task_loss)
        self._reminders.asked_for_loss()
        if stage == "warmup":
            return task_loss
        loss = self._method.objective(task_loss, seen, stage)
        if loss is not task_loss:
            processes.expect(loss)
        return loss

    @_disable_dynamo
    def step(self) -> None:
        """Count a step; every ``prune_every`` steps cut the ranks that have died.

        Call it after ``optimizer.step()`` and, of a ``GradScaler``, ``update()``. A step that was
        skipped, as its loss or a gradient was not finite, does not count. One that a
        ``GradScaler`` left out by itself, as its scale was too large for finite gradients, does.

        Raises:
            RankError: If a cut is due and cannot be made, as a core is not finite or something
                that must follow it cannot; nothing is cut.
        """
        self._reminders.stepped()
        if self._finite.ended_step():
            return  # as if the batch had not been there
        before, processes = self.stage, self._layers.processes
        self._stages.count()
        self._reminders.counted(self._stages.num_steps, has_loss=self._memory.mean is not None)
        self._method.stepped()
        pruning = before != "warmup" and self._stages.num_steps % self.config.prune_every == 0
        if pruning or self.stage != before:
            self._memory.share(processes)
        pruned = pruning and self._prune(before)
        if self.stage == "late" and not self._has_begun_late:
            self._has_begun_late = True
            self._method.begin_late(self._memory.value)
        if self.stage != before:
            processes.change_objective()
        if pruning or self.stage != before:
            self._record()
        if pruned:  # trials are no ranks yet: neither watch nor history counts them
            self._method.grow(before, self._stages.late_progress)

    def wrapped(self, *wrappers: nn.Module) -> None:
        """Name the ``DistributedDataParallel`` around the model, or say that there is none.

        It is needed only where the first call of ``loss`` raises because the adapter does not
        find the wrapper, or finds two.

        Args:
            wrappers: The wrapper, or one for each part of the model. None at all: every process
                trains a model of its own.

        Raises:
            RankError: If they are not around the adapted layers.
        """
        self._layers.processes.tell(wrappers)

    def follow(self, copy: nn.Module) -> None:
        """Have a copy of the model take part in every cut, such as an average of its weights.

        Args:
            copy: A copy with the model's present ranks, as ``copy.deepcopy`` gives, or a
                ``torch.optim.swa_utils.AveragedModel``.

        Raises:
            RankError: If its TT layers are not those of the model, or follow already.

        Example:
            >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
            >>> adapter = RankAdapter(model, optimizer, RankConfig(target_ratio=0.5))
            >>> average = torch.optim.swa_utils.AveragedModel(model)
            >>> adapter.follow(average)
        """
        has_weights = self.config.method == "comera"
        self._layers.follow(copy, self.config.threshold if has_weights else None)

    def compact(self, tol: float) -> float:
        """Cut what the weights do not need, at any time: TT rounding.

        Args:
            tol: Relative Frobenius error allowed in each layer, of all that its cores hold,
                padding too; 0 cuts only ranks that hold nothing.

        Returns:
            A bound on the largest relative error that was made in a layer, of the same.

        Raises:
            RankError: If ``tol`` is out of range, a core is not finite, or something that must
                follow cannot; nothing is cut.
        """
        check_tolerance(tol)
        self._layers.check_can_change()
        self._layers.check_finite()
        self._method.settle()
        error = compact_layers(self._layers, tol)
        self._method.resized()
        self._layers.processes.refresh()
        return error

    # ---- what can be read ----

    @property
    def size(self) -> int:
        """TT parameters of the adapted layers now."""
        return self._layers.size

    @property
    def ranks(self) -> dict[str, list[int]]:
        """Layer name to its inner ranks now."""
        return self._layers.ranks

    @property
    def stage(self) -> Stage:
        """Where training stands: "warmup", "early" or "late"."""
        return self._stages.stage

    @property
    def num_skipped(self) -> int:
        """Steps that were left out because their loss, or a gradient, was not finite.

        Those that a ``GradScaler`` left out while the loss was finite are not among them.
        """
        return self._finite.num_skipped

    def diagnose(self) -> list[str]:
        """Return what has gone wrong so far, in sentences: what was warned of, and dead layers."""
        dead = [name for name, inner in self.ranks.items() if 0 in inner]
        notes = [f"layer {name!r} has lost all its ranks and is its bias alone." for name in dead]
        if self.num_skipped:
            skipped = "a loss or a gradient that was not finite"
            notes.append(f"{skipped} has had {self.num_skipped:,} steps skipped.")
        return [*self._watch.notes, *notes]

    def __repr__(self) -> str:
        target = "none" if self.target_size is None else f"{self.target_size:,}"
        return (
            f"RankAdapter({self.config.method}, {len(self._layers.by_name)} layers, step "
            f"{self._stages.num_steps}, stage {self.stage}, size {self.size:,} of "
            f"{self.initial_size:,}, target {target})"
        )

    # ---- save and resume ----

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts: ``torch.load(weights_only=True)``."""
        mean = self._memory.mean
        state = {
            "method": self.config.method,
            "initial_size": self.initial_size,
            "target_size": self.target_size,
            "mean_loss": None if mean is None else float(mean),
            "has_begun_late": self._has_begun_late,
            "stages": self._stages.state_dict(),
            "method_state": self._method.state_dict(),
            "finite": self._finite.state_dict(),
            "watch": self._watch.state_dict(),
            "history": self.history,
            "ranks": self.ranks,
        }
        return deepcopy(state)  # of which the run changes nothing later

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; load the model's and the optimizer's state first.

        The target is that of the state; where the config asks for another one, that is said.

        Raises:
            RankError: If something is missing in the state, or the model's ranks, or the method,
                are not those of the state; nothing has changed.
        """
        check_loadable(state, self.state_dict())
        state = deepcopy(state)
        warn_of_target(state["target_size"], self._target(state["initial_size"]))
        self._layers.processes.find(required=False)
        self.initial_size, self.target_size = state["initial_size"], state["target_size"]
        self._method.retarget(self.target_size, self.initial_size)
        self._stages = Stages(self.config, has_target=self.target_size is not None)
        self._stages.load_state_dict(state["stages"])
        self._memory.load(state["mean_loss"])
        self._has_begun_late = state["has_begun_late"]
        self._finite.load_state_dict(state["finite"])
        self._watch.load_state_dict(state["watch"])
        self.history = state["history"]
        self._layers.take_ranks()
        self._method.load_state_dict(state["method_state"])
        self._layers.processes.rebuild()  # the model's ranks may be others since it was loaded

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        claim(self, self._layers.by_name)

    # ---- within a step ----

    def _prune(self, stage: Stage) -> bool:
        """Cut, unless the loss is not finite; return whether it was."""
        is_finite = self._memory.is_finite
        if is_finite is not None and not bool(is_finite):
            self._layers.check_finite()  # a bad batch passes, cores that are lost do not
            return False
        self._method.prune(stage, self._stages.late_progress)
        self._layers.processes.refresh()
        if self._method.met:
            self._stages.end_early()
        loss = self._memory.value
        self._stages.watch(loss)
        awaits_cuts = self.stage == "late" and not self._method.met
        self._watch.look(self._stages.num_steps, self.size, loss, awaits_cuts=awaits_cuts)
        return True

    def _record(self) -> None:
        self.history.append(
            {
                "step": self._stages.num_steps,
                "stage": self.stage,
                "loss": self._memory.value,
                "size": self.size,
                "ranks": self.ranks,
            }
        )

    # ---- setting up ----

    def _target(self, initial_size: int) -> int | None:
        """The size that the config asks a run to reach that was of this size at the start."""
        config = self.config
        if config.target_ratio is not None:
            return max(int(config.target_ratio * initial_size), 1)
        if config.target_bytes is not None and self._bytes_each:
            return max(int(config.target_bytes / self._bytes_each), 1)
        return config.target_params
