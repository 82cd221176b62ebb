"""Ranks that adapt while a model trains: penalty, stages, and cuts that really shrink it."""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from comera_fx.compiled_code import forget_code
from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.train.adaptable import (
    adaptable_layers,
    check_holds_cores,
    check_types,
    claim,
    hand_over,
    warn_if_out_of_reach,
    warn_of_death,
)
from comera_fx.train.processes import Processes, check_whole, check_whole_optimizer
from comera_fx.train.resize import check_state, cut_ranks
from comera_fx.train.select import Bond, ranks_to_give_up, spare
from comera_fx.train.size import SizeOf

Stage = Literal["warmup", "early", "late"]

EARLY_PRUNINGS = 10
"""Default length of the early stage, in prune intervals, where there is a target."""
SMALLEST_REFERENCE = 1e-12
"""Floor of |L0|, which the late stage divides by."""
LOSS_MEMORY = 0.9
"""Weight of the past in the running mean of the task loss."""
FORGOTTEN_AFTER = 100
"""Calls of ``loss`` without a ``step`` after which the user is warned."""
WRAPPED = 2
"""Frames between a caller and a method that stays out of compiled code."""
REVIVED = 1.01
"""Where the target needs fewer cuts than there are dead ranks, the rest go back to this
multiple of the threshold: live, and next to nothing in the weight."""


class RankAdapter:
    """Prunes the ranks of a model's TT layers while it trains.

    It gives every inner bond a rank weight d (a parameter, 1 at the start) and adds these to the
    optimizer: to the group of ``param_groups`` made for them, or to a new one at ten times the
    cores' learning rate.

    ``loss`` and ``step`` run eagerly, also where a compiled function calls them, as their state
    changes with every step. Compile the model, or a function that ends with the task loss.

    Args:
        model: A model from ``optimize``; a compiled one works too, and one that is, or later gets,
            wrapped in ``DistributedDataParallel``: all processes then cut alike, the wrapper
            follows every cut, and what depends on the loss goes by its mean. Every process calls
            ``loss`` and ``step`` as often. See ``bench/distributed.py`` for an example.
        optimizer: Holds the model's cores.
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
        RankError: If there is no layer to adapt, ``exclude`` names none, the parameters are
            divided among processes (FSDP), or the optimizer does not hold the cores.

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
        optimizer: torch.optim.Optimizer,
        config: RankConfig | None = None,
        *,
        check_processes: bool | None = None,
    ) -> None:
        check_types(model, optimizer, config)
        self.config = config or RankConfig()
        self.optimizer = optimizer
        self._layers = adaptable_layers(model, self.config)
        check_whole_optimizer(optimizer)
        self._model = model
        self._processes = Processes(model, self._layers, check_processes)
        check_holds_cores(optimizer, self._layers)
        check_state([optimizer], self._layers.items())
        claim(self, self._layers)
        for layer in self._layers.values():
            layer.attach_rank_weights(self.config.threshold)
        hand_over(optimizer, self._layers)
        self._processes.rebuild()
        self.initial_size = self.size
        self.target_size = self._target()
        if self.target_size is not None:
            warn_if_out_of_reach(self._layers, self.target_size, self.config.min_rank)
        self.history: list[dict[str, Any]] = []
        self._num_steps = 0
        self._reference_loss: float | None = None
        self._mean_loss: Tensor | None = None
        self._is_finite: Tensor | None = None
        self._num_forgotten = 0
        self._target_met = False
        self._choose_pushed()

    # ---- what a training loop calls ----

    @_disable_dynamo
    def loss(self, task_loss: Tensor) -> Tensor:
        """Return what to minimise in the present stage.

        Args:
            task_loss: The model's loss, a scalar.

        Returns:
            Warm-up: the task loss L. Early: ``L + gamma S^/S(1) + beta sum |G|^2``. Late:
            ``max{w1 (L-L0)/L0, w2 (S-S*)/S*} + rho (L/L0 + S^/S*)``, scaled by
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
        self._processes.find(required=True)
        self._check_ranks()
        stage = self.stage
        # The late objective compares the loss, at every step; the others only train on it.
        compares = stage == "late" and not self._target_met and self._reference_loss is not None
        seen = self._processes.mean(task_loss) if compares else task_loss.detach()
        self._note(seen)
        if stage == "warmup":
            return task_loss
        loss = self._early(task_loss) if stage == "early" else self._late(task_loss, seen)
        if loss is not task_loss:
            self._processes.expect(loss)
        return loss

    @_disable_dynamo
    def step(self) -> None:
        """Count a step; every ``prune_every`` steps cut the ranks whose weight has died.

        Call it after ``optimizer.step()``.
        """
        before = self.stage
        self._num_steps += 1
        self._num_forgotten = 0
        if self._num_steps == FORGOTTEN_AFTER and self._mean_loss is None:
            warnings.warn(
                f"RankAdapter.step was called {FORGOTTEN_AFTER} times without RankAdapter.loss: "
                "nothing asks ranks to shrink. Train on adapter.loss(task_loss).",
                stacklevel=2 + WRAPPED,
            )
        self._hold_others()
        pruning = before != "warmup" and self._num_steps % self.config.prune_every == 0
        begins_late = self.stage == "late" and self._reference_loss is None
        if pruning or begins_late or self.stage != before:
            self._share_loss()
        if pruning:
            self._prune()
        if self.stage == "late" and self._reference_loss is None:
            self._reference_loss = self._finite_mean()
            self._forget_gradients()
        if self.stage != before:
            self._processes.change_objective()
        if pruning or self.stage != before:
            self._record()

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
        self._processes.tell(wrappers)

    # ---- what can be read ----

    @property
    def size(self) -> int:
        """TT parameters of the adapted layers now."""
        return sum(layer.tt_params for layer in self._layers.values())

    @property
    def ranks(self) -> dict[str, list[int]]:
        """Layer name to its inner ranks now."""
        return {name: list(layer.spec.ranks[1:-1]) for name, layer in self._layers.items()}

    @property
    def stage(self) -> Stage:
        """Where training stands: "warmup", "early" or "late"."""
        config = self.config
        if self._num_steps < config.warmup_steps:
            return "warmup"
        if self.target_size is None:
            return "early"
        if self._target_met:
            return "late"
        early = config.early_steps
        early = EARLY_PRUNINGS * config.prune_every if early is None else early
        return "early" if self._num_steps < config.warmup_steps + early else "late"

    def __repr__(self) -> str:
        target = "none" if self.target_size is None else f"{self.target_size:,}"
        return (
            f"RankAdapter({len(self._layers)} layers, step {self._num_steps}, stage {self.stage}, "
            f"size {self.size:,} of {self.initial_size:,}, target {target})"
        )

    # ---- save and resume ----

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts: ``torch.load(weights_only=True)``."""
        mean = self._mean_loss
        return {
            "num_steps": self._num_steps,
            "initial_size": self.initial_size,
            "target_size": self.target_size,
            "target_met": self._target_met,
            "reference_loss": self._reference_loss,
            "mean_loss": None if mean is None else float(mean),
            "pushed": self._pushed and [mask.tolist() for mask in self._pushed],
            "history": [dict(entry) for entry in self.history],
            "ranks": self.ranks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; load the model's and the optimizer's state first.

        Raises:
            RankError: If the model's ranks are not those of the state.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise RankError(
                "the adapter's state is incomplete",
                got=f"no {', '.join(missing)}",
                expected="what RankAdapter.state_dict returned",
                mend="load the checkpoint's adapter state, not the model's or the optimizer's",
            )
        if state["ranks"] != self.ranks:
            raise RankError(
                "the adapter's state belongs to other ranks than the model has",
                got=f"model {self.ranks}",
                expected=f"{state['ranks']}",
                mend="call model.load_state_dict with the checkpoint's model first",
            )
        self._processes.find(required=False)
        self._num_steps = state["num_steps"]
        self.initial_size = state["initial_size"]
        self.target_size = state["target_size"]
        self._settle(state["target_met"])
        self._processes.rebuild()  # the model's ranks may be others as well since it was loaded
        self._reference_loss = state["reference_loss"]
        mean = state["mean_loss"]
        self._mean_loss = None if mean is None else torch.tensor(mean, dtype=torch.float64)
        self.history = [dict(entry) for entry in state["history"]]
        device = next(iter(self._layers.values())).cores[0].device
        self._push(
            state["pushed"]
            and [torch.tensor(mask, dtype=torch.bool, device=device) for mask in state["pushed"]]
        )

    # ---- objective ----

    def _early(self, loss: Tensor) -> Tensor:
        config = self.config
        penalty = config.gamma * self._size_of().surrogate / max(self.initial_size, 1)
        if config.beta:
            cores = (core for layer in self._layers.values() for core in layer.cores)
            penalty = penalty + config.beta * sum(core.square().sum() for core in cores)
        return loss + penalty.to(loss)

    def _late(self, loss: Tensor, seen: Tensor) -> Tensor:
        config, target, reference = self.config, self.target_size, self._reference_loss
        assert target is not None, "the late stage needs a target"
        if self._target_met or reference is None:
            return loss
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

    def _note(self, seen: Tensor) -> None:
        """Keep a running mean of the loss, without waiting for the device."""
        loss = seen.double()
        self._is_finite = torch.isfinite(loss)
        mean = self._mean_loss
        past = loss if mean is None else mean.to(loss.device)
        fresh = LOSS_MEMORY * past + (1 - LOSS_MEMORY) * loss
        # NaN until the first finite loss; from then on a loss that is not finite is left out.
        self._mean_loss = torch.where(self._is_finite & torch.isfinite(past), fresh, past)
        if mean is not None:
            restart = self._is_finite & ~torch.isfinite(past)
            self._mean_loss = torch.where(restart, loss, self._mean_loss)
        self._num_forgotten += 1
        if self._num_forgotten == FORGOTTEN_AFTER:
            warnings.warn(
                f"RankAdapter.loss was called {FORGOTTEN_AFTER} times without RankAdapter.step: "
                "no rank is ever cut. Call adapter.step() after optimizer.step().",
                stacklevel=3 + WRAPPED,
            )

    def _share_loss(self) -> None:
        """Have all processes go by the mean of their losses; one that is not finite counts."""
        mean, is_finite = self._mean_loss, self._is_finite
        if self._processes.group is None or mean is None or is_finite is None:
            return
        shared = self._processes.mean(torch.stack([mean, is_finite.to(mean)]))
        self._mean_loss, self._is_finite = shared[0], shared[1] == 1

    def _finite_mean(self) -> float | None:
        mean = None if self._mean_loss is None else float(self._mean_loss)
        return mean if mean is not None and abs(mean) < float("inf") else None

    def _check_ranks(self) -> None:
        """Raise where ranks have changed since the last cut, as by loading a checkpoint."""
        if self._ranks_at_cut != [weight.numel() for weight in self._weights()]:
            raise RankError(
                "the model's ranks have changed outside the adapter",
                got=f"ranks {self.ranks}",
                expected=f"the ranks after the last cut, up to step {self._num_steps}",
                mend="after model.load_state_dict load the optimizer's and the adapter's state too",
            )

    def _forget_gradients(self) -> None:
        """Clear the optimizer's state of the rank weights, as the late stage begins.

        It is of gradients of the early loss, which may have been a hundred times as large: Adam
        would divide by them for a thousand steps, and no rank weight would move.
        """
        for weight in self._weights():
            self.optimizer.state.pop(weight, None)

    def _choose_pushed(self) -> None:
        """With a target, let the size penalty push only on ranks that the target asks to cut.

        Under Adam a penalty pulls on all rank weights alike, however small it is. Where all fall,
        a layer of five bonds at a half is left with 3 % of its weight, gets no gradient to speak
        of, and dies; so those that the target lets stay are let alone.
        """
        pushed = None
        if self.target_size is not None:
            masks = ranks_to_give_up(self._layers, self.target_size, self.config.min_rank)
            pushed = [mask for layer in masks.values() for mask in layer]
        self._push(pushed)

    def _push(self, pushed: list[Tensor] | None) -> None:
        self._pushed = pushed
        self._ranks_at_cut = [weight.numel() for weight in self._weights()]
        self._held = [weight.detach().clone() for weight in self._weights()]
        self._size_of = SizeOf(list(self._layers.values()), self.config.threshold, pushed)

    @torch.no_grad()
    def _hold_others(self) -> None:
        """Put the rank weights that are not pushed on back to where they were.

        Their scale is the cores' as well; at ten times the cores' rate they would only wander.
        """
        if self._pushed is None or self._target_met:
            return
        for weight, pushed, held in zip(self._weights(), self._pushed, self._held, strict=True):
            weight.copy_(torch.where(pushed, weight, held))

    def _weights(self) -> list[Tensor]:
        return [weight for layer in self._layers.values() for weight in layer.rank_weights]

    # ---- cuts ----

    def _prune(self) -> None:
        if self._is_finite is not None and not bool(self._is_finite):
            return
        check_whole(self._model, self._layers)
        check_state([self.optimizer], self._layers.items())
        bonds = self._bonds()
        if self.target_size is not None:
            modes = {name: layer.spec.mode_sizes for name, layer in self._layers.items()}
            spare(bonds, modes, self.target_size)
        self._processes.compare(
            {
                name: (layer.spec.ranks, [bond.alive for bond in bonds if bond.layer == name])
                for name, layer in self._layers.items()
            }
        )
        if self.target_size is not None:
            self._revive(bonds)
        cut: list[nn.Parameter] = []
        for name, layer in self._layers.items():
            kept = [bond.alive for bond in bonds if bond.layer == name]
            if any(len(alive) < len(w) for alive, w in zip(kept, layer.rank_weights, strict=True)):
                if layer.tt_params and not all(kept):
                    warn_of_death(name, stacklevel=4 + WRAPPED)
                device = layer.cores[0].device
                cut_ranks(
                    layer,
                    [torch.tensor(k, dtype=torch.long, device=device) for k in kept],
                    [self.optimizer],
                )
                cut += [*layer.cores, *layer.rank_weights]
        forget_code(cut)
        met = self.target_size is not None and self.size <= self.target_size
        settles = met and not self._target_met
        if met:
            self._settle(True)
        if cut or settles:
            self._processes.rebuild()
        self._choose_pushed()

    def _settle(self, met: bool) -> None:
        """Stop training the rank weights once the target is met: each would go on wandering.

        Under Adam they move by their learning rate, noise or not, and one that wanders below the
        threshold gets no gradient that could bring it back.
        """
        self._target_met = met
        for weight in self._weights():
            weight.requires_grad_(not met)
            weight.grad = None

    def _bonds(self) -> list[Bond]:
        """The rank weights as numbers, in one wait for the device."""
        names = [name for name, layer in self._layers.items() for _ in layer.rank_weights]
        weights = self._weights()
        values = iter(torch.cat([weight.detach().double() for weight in weights]).tolist())
        config = self.config
        return [
            Bond.of(name, list(islice(values, weight.numel())), config.threshold, config.min_rank)
            for name, weight in zip(names, weights, strict=True)
        ]

    @torch.no_grad()
    def _revive(self, bonds: list[Bond]) -> None:
        """Put dead ranks that stay just above the threshold, where a gradient reaches them."""
        for bond, weight in zip(bonds, self._weights(), strict=True):
            if bond.spared:
                weight[bond.spared] = weight[bond.spared].clamp(min=REVIVED * self.config.threshold)

    def _record(self) -> None:
        self.history.append(
            {
                "step": self._num_steps,
                "stage": self.stage,
                "loss": self._finite_mean(),
                "size": self.size,
                "ranks": self.ranks,
            }
        )

    # ---- setting up ----

    def _target(self) -> int | None:
        config = self.config
        if config.target_ratio is not None:
            return max(int(config.target_ratio * self.initial_size), 1)
        if config.target_bytes is not None:
            layers = self._layers.values()
            held = sum(layer.tt_params * layer.cores[0].element_size() for layer in layers)
            return max(int(self.initial_size * config.target_bytes / held), 1)
        return config.target_params
