"""Ranks that adapt while a model trains: penalty, stages, and cuts that really shrink it."""

from __future__ import annotations

import warnings
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTModule, tt_modules
from comera_fx.train.groups import RANK_LR_SCALE
from comera_fx.train.select import ranks_to_give_up
from comera_fx.train.shrink import check_state, cut_ranks
from comera_fx.train.size import SizeOf

Stage = Literal["warmup", "early", "late"]

EARLY_PRUNINGS = 10
"""Default length of the early stage, in prune intervals, where there is a target."""
LOSS_MEMORY = 0.9
"""Weight of the past in the running mean of the task loss."""
FORGOTTEN_AFTER = 100
"""Calls of ``loss`` without a ``step`` after which the user is warned."""
REVIVED = 1.01
"""Where the target needs fewer cuts than there are dead ranks, the rest go back to this
multiple of the threshold: live, and next to nothing in the weight."""


class RankAdapter:
    """Prunes the ranks of a model's TT layers while it trains.

    It gives every inner bond a rank weight d (a parameter, 1 at the start) and adds these to the
    optimizer: to the group of ``param_groups`` made for them, or to a new one at ten times the
    cores' learning rate.

    Args:
        model: A model from ``optimize``; DDP and compiled wrappers of one work too.
        optimizer: Holds the model's cores.
        config: Method, target and pace.

    Attributes:
        history: One dict per cut or change of stage: ``step``, ``stage``, ``loss`` (running
            mean of the task loss), ``size`` and ``ranks`` (layer name to inner ranks).
        initial_size: TT parameters of the adapted layers at the start.
        target_size: Parameters to reach, or ``None``.

    Raises:
        RankError: If there is no layer to adapt, or the optimizer does not hold the cores.

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
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: RankConfig | None = None
    ) -> None:
        self.config = config or RankConfig()
        self.optimizer = optimizer
        self._layers = _adaptable(model, self.config)
        _check_optimizer(optimizer, self._layers)
        check_state(optimizer, self._layers.items())
        for layer in self._layers.values():
            layer.attach_rank_weights(self.config.threshold)
        self._join_optimizer()
        self.initial_size = self.size
        self.target_size = self._target()
        self.history: list[dict[str, Any]] = []
        self._num_steps = 0
        self._reference_loss: float | None = None
        self._mean_loss: Tensor | None = None
        self._num_forgotten = 0
        self._target_met = False
        self._choose_pushed()

    # ---- what a training loop calls ----

    def loss(self, task_loss: Tensor) -> Tensor:
        """Return what to minimise in the present stage.

        Args:
            task_loss: The model's loss, a scalar.

        Returns:
            Warm-up: the task loss L. Early: ``L + gamma S^/S(1) + beta sum |G|^2``. Late:
            ``max{w1 (L-L0)/L0, w2 (S-S*)/S*} + rho (L/L0 + S^/S*)``, scaled by
            ``L0 / (w1 + rho)`` so that gradients keep the size of the task loss's own; once the
            size has met its target, the terms in S are left out.
        """
        if task_loss.numel() != 1:
            raise RankError(
                "RankAdapter.loss needs a scalar",
                got=f"a tensor of shape {tuple(task_loss.shape)}",
                expected="one number",
                mend="reduce the loss first: loss.mean()",
            )
        self._note(task_loss)
        stage = self.stage
        if stage == "warmup":
            return task_loss
        return self._early(task_loss) if stage == "early" else self._late(task_loss)

    def step(self) -> None:
        """Count a step; every ``prune_every`` steps cut the ranks whose weight has died.

        Call it after ``optimizer.step()``.
        """
        before = self.stage
        self._num_steps += 1
        self._num_forgotten = 0
        self._hold_others()
        pruning = before != "warmup" and self._num_steps % self.config.prune_every == 0
        if pruning:
            self._prune()
        if self.stage == "late" and self._reference_loss is None:
            self._reference_loss = self._finite_mean()
        if pruning or self.stage != before:
            self._record()

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
        if state["ranks"] != self.ranks:
            raise RankError(
                "the adapter's state belongs to other ranks than the model has",
                got=f"model {self.ranks}",
                expected=f"{state['ranks']}",
                mend="call model.load_state_dict with the checkpoint's model first",
            )
        self._num_steps = state["num_steps"]
        self.initial_size = state["initial_size"]
        self.target_size = state["target_size"]
        if state["target_met"]:
            self._settle()
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

    def _late(self, loss: Tensor) -> Tensor:
        config, target, reference = self.config, self.target_size, self._reference_loss
        assert target is not None, "the late stage needs a target"
        if reference is None or reference == 0:
            return loss
        sizes = self._size_of()
        surrogate = (sizes.surrogate / target).to(loss)
        loss_lag = config.w1 * (loss.detach() - reference) / reference
        size_lag = config.w2 * (sizes.size - target) / target
        over = sizes.size > target
        size_leads = over & (size_lag > loss_lag)
        main = torch.where(size_leads, config.w2 * surrogate, config.w1 * loss / reference)
        both = config.rho * (loss / reference + torch.where(over, surrogate, 0.0))
        return (main + both) * (reference / max(config.w1 + config.rho, 1e-12))

    def _note(self, task_loss: Tensor) -> None:
        """Keep a running mean of the loss, without waiting for the device."""
        loss = task_loss.detach().double()
        mean = self._mean_loss
        past = loss if mean is None else mean.to(loss.device)
        self._mean_loss = LOSS_MEMORY * past + (1 - LOSS_MEMORY) * loss
        self._num_forgotten += 1
        if self._num_forgotten == FORGOTTEN_AFTER:
            warnings.warn(
                f"RankAdapter.loss was called {FORGOTTEN_AFTER} times without RankAdapter.step: "
                "no rank is ever cut. Call adapter.step() after optimizer.step().",
                stacklevel=3,
            )

    def _finite_mean(self) -> float | None:
        mean = None if self._mean_loss is None else float(self._mean_loss)
        return mean if mean is not None and abs(mean) < float("inf") else None

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
        self._held = [weight.detach().clone() for weight in self._weights()]
        self._size_of = SizeOf(list(self._layers.values()), self.config.threshold, pushed)

    @torch.no_grad()
    def _hold_others(self) -> None:
        """Put the rank weights that are not pushed on back to where they were.

        Their scale is the cores' as well, and at ten times the cores' rate they would only
        wander: trained without any penalty they cost a small language model 3 % of its loss.
        """
        if self._pushed is None or self._target_met:
            return
        for weight, pushed, held in zip(self._weights(), self._pushed, self._held, strict=True):
            weight.copy_(torch.where(pushed, weight, held))

    def _weights(self) -> list[Tensor]:
        return [weight for layer in self._layers.values() for weight in layer.rank_weights]

    # ---- cuts ----

    def _prune(self) -> None:
        if self._mean_loss is not None and self._finite_mean() is None:
            return
        check_state(self.optimizer, self._layers.items())
        alive = {name: self._alive(layer) for name, layer in self._layers.items()}
        if self.target_size is not None:
            self._spare(alive)
        for name, layer in self._layers.items():
            kept = [mask.nonzero().squeeze(1) for mask in alive[name]]
            if any(not mask.all() for mask in alive[name]):
                cut_ranks(layer, kept, self.optimizer)
        if self.target_size is not None and self.size <= self.target_size:
            self._settle()
        self._choose_pushed()

    def _settle(self) -> None:
        """Stop training the rank weights: the target is met, and each would go on wandering.

        Under Adam they move by their learning rate, noise or not, and one that wanders below the
        threshold gets no gradient that could bring it back.
        """
        self._target_met = True
        for layer in self._layers.values():
            for weight in layer.rank_weights:
                weight.requires_grad_(False)
                weight.grad = None

    def _alive(self, layer: TTModule) -> list[Tensor]:
        """Per bond, a mask of the ranks to keep: not at or below the threshold (NaN is kept)."""
        masks = []
        for weight in layer.rank_weights:
            mask = ~(weight.detach() <= self.config.threshold)
            missing = min(self.config.min_rank, mask.numel()) - int(mask.sum())
            if missing > 0:
                dead = torch.where(mask, -torch.inf, weight.detach())
                mask[dead.topk(missing).indices] = True
            masks.append(mask)
        return masks

    def _spare(self, alive: dict[str, list[Tensor]]) -> None:
        """Put dead ranks back, strongest first, while the size stays within the target.

        Rank weights fall side by side, so that many can die at once; without this a step could
        cut far more than was asked.
        """
        target = self.target_size
        assert target is not None, "only a target spares ranks"
        dead = [
            (weight.detach()[index].item(), name, bond, index)
            for name, layer in self._layers.items()
            for bond, weight in enumerate(layer.rank_weights)
            for index in (~alive[name][bond]).nonzero().squeeze(1).tolist()
        ]
        counts = {name: [int(mask.sum()) for mask in masks] for name, masks in alive.items()}
        size = sum(self._size_with(name, ranks) for name, ranks in counts.items())
        for strength, name, bond, index in sorted(dead, key=lambda entry: -entry[0]):
            ranks = list(counts[name])
            ranks[bond] += 1
            grown = size - self._size_with(name, counts[name]) + self._size_with(name, ranks)
            if grown > target:
                continue
            size, counts[name] = grown, ranks
            alive[name][bond][index] = True
            weight = self._layers[name].rank_weights[bond]
            with torch.no_grad():
                weight[index] = max(strength, REVIVED * self.config.threshold)

    def _size_with(self, name: str, inner: list[int]) -> int:
        """Parameters of a layer with these inner ranks; one empty bond empties them all."""
        if 0 in inner:
            return 0
        ranks = (1, *inner, 1)
        modes = self._layers[name].spec.mode_sizes
        return sum(ranks[k] * mode * ranks[k + 1] for k, mode in enumerate(modes))

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
            first = next(iter(self._layers.values())).cores[0]
            return max(config.target_bytes // first.element_size(), 1)
        return config.target_params

    def _join_optimizer(self) -> None:
        """Hand the rank weights to the optimizer, unless it has them."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        fresh = [weight for weight in self._weights() if id(weight) not in held]
        if not fresh:
            return
        for group in self.optimizer.param_groups:
            if group.get("rank_weights"):
                group["params"].extend(fresh)
                return
        cores = {id(core) for layer in self._layers.values() for core in layer.cores}
        lr = next(
            group["lr"]
            for group in self.optimizer.param_groups
            if any(id(p) in cores for p in group["params"])
        )
        self.optimizer.add_param_group(
            {
                "params": fresh,
                "lr": RANK_LR_SCALE * lr,
                "weight_decay": 0.0,
                "rank_weights": True,
            }
        )


def _adaptable(model: nn.Module, config: RankConfig) -> dict[str, TTModule]:
    """Name to layer for every trainable TT layer that has a bond and is not excluded."""
    layers = {
        name: layer
        for name, layer in tt_modules(model)
        if layer.num_cores > 1
        and all(core.requires_grad for core in layer.cores)
        and not any(fnmatch(name, pattern) for pattern in config.exclude)
    }
    if not layers:
        raise RankError(
            "the model has no TT layer whose ranks could adapt",
            got=f"{type(model).__name__} with {sum(1 for _ in tt_modules(model))} TT layers",
            expected="at least one trainable TT layer that RankConfig.exclude does not name",
            mend="call model = comera_fx.optimize(model) first, or shorten exclude",
        )
    return layers


def _check_optimizer(optimizer: torch.optim.Optimizer, layers: dict[str, TTModule]) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name for name, layer in layers.items() if any(id(c) not in held for c in layer.cores)
    ]
    if missing:
        raise RankError(
            "the optimizer does not hold the model's cores",
            got=f"no cores of {len(missing)} layers, the first of them {missing[0]!r}",
            expected="an optimizer built after comera_fx.optimize, from the optimised model",
            mend="build it with torch.optim.AdamW(comera_fx.param_groups(model, lr=1e-3))",
        )
