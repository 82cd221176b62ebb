"""The race: a dense model and its optimised twin, step for step on the same batches.

Equal steps first: both take ``DemoConfig.steps`` steps, in turns, so that whatever else the
machine does meets both. Then equal time: the optimised model trains on until it has used as many
seconds as the dense one did. Only training steps are timed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera_fx import OptimizeConfig, PlanConfig, RankAdapter, RankConfig, optimize, param_groups
from comera_fx.demo.config import DemoConfig, first_cycle, second_cycle
from comera_fx.demo.data import Corpus, held_out_batches, train_batch
from comera_fx.demo.model import Decoder, next_byte_loss
from comera_fx.errors import ConfigError
from comera_fx.modules import TTModule

Phase = Literal["equal steps", "equal time", "done"]
Ranks = dict[str, list[int]]
HELD_UP = 1.5  # a step counts for at most so many medians


@dataclass
class Side:
    """One of the two models, what trains it, and what was measured of it, step by step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip_norm: float
    adapter: RankAdapter | None = None
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def counted_seconds(self) -> list[float]:
        """Seconds of each step, without what held single steps up.

        A step of more than ``HELD_UP`` times the median counts as so many medians. Where other
        programs want the machine too, a step can take thirty times as long as its neighbours;
        the steps of the equal-time phase, which only one side takes, would be luckier or less
        lucky than those before, and decide the race.
        """
        if not self.step_seconds:
            return []
        longest = HELD_UP * median(self.step_seconds)
        return [min(seconds, longest) for seconds in self.step_seconds]

    @property
    def seconds(self) -> float:
        """Time this side has trained for, all of its counted seconds together."""
        return sum(self.counted_seconds)

    def train_step(self, batch: Tensor, lr_share: float) -> None:
        """Train on a batch at a share of the peak learning rates, and note loss and time."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_share
        start = _clock(batch)
        loss = next_byte_loss(self.model, batch)
        minimised = loss if self.adapter is None else self.adapter.loss(loss)
        self.optimizer.zero_grad()
        minimised.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.adapter is not None:
            self.adapter.step()
        self.step_seconds.append(_clock(batch) - start)
        self.losses.append(loss.item())

    def held_out_loss(self, batches: list[Tensor]) -> float:
        """Return the mean loss over held-out batches, in nats a byte."""
        self.model.eval()
        with torch.no_grad():
            losses = [next_byte_loss(self.model, batch).item() for batch in batches]
        self.model.train()
        return sum(losses) / len(losses)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to train on, readable by ``torch.load(weights_only=True)``."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "adapter": None if self.adapter is None else self.adapter.state_dict(),
            "losses": self.losses,
            "step_seconds": self.step_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where ``state`` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.adapter is not None:
            self.adapter.load_state_dict(state["adapter"])
        self.losses = list(state["losses"])
        self.step_seconds = list(state["step_seconds"])


class Race:
    """Both sides, and how far the run is.

    Args:
        config: Settings of the run.
        corpus: What to train on.

    Raises:
        ConfigError: If the device asked for is not there.
    """

    def __init__(self, config: DemoConfig, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.device = _device(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = Decoder(config).to(self.device)
        optimised = _optimise(model, config, self.device)
        self.dense = Side(model, _dense_optimizer(model, config), config.clip_norm)
        optimizer = _tt_optimizer(optimised, config)
        adapter = RankAdapter(optimised, optimizer, _rank_config(config))
        self.optimised = Side(optimised, optimizer, config.clip_norm, adapter)
        self.phase: Phase = "equal steps"
        self.held_out: dict[str, float] = {}  # by side and moment
        self.extra_steps = 0  # that the time left at equal steps should be enough for
        self.sizes = [tt_params(optimised)]  # before the first step, and after each
        self.ranks: list[tuple[int, Ranks]] = [(0, layer_ranks(optimised))]  # where they changed
        self._held_out_batches = [
            batch.to(self.device) for batch in held_out_batches(corpus, config)
        ]

    def advance(self) -> None:
        """Do what comes next: a step of each, a step of the optimised model, or a measurement."""
        if self.phase == "equal steps":
            if len(self.dense.losses) < self.config.steps:
                self._step_both()
            else:
                self._end_equal_steps()
        elif self.phase == "equal time":
            if self._has_time_left():
                self._step_optimised()
            else:
                self.held_out["optimised, equal time"] = self._measure(self.optimised)
                self.phase = "done"

    def state_dict(self) -> dict[str, Any]:
        """Return the whole run, readable by ``torch.load(weights_only=True)``."""
        return {
            "config": self.config.to_dict(),
            "corpus": self.corpus.digest,
            "phase": self.phase,
            "held_out": self.held_out,
            "extra_steps": self.extra_steps,
            "sizes": self.sizes,
            "ranks": self.ranks,
            "dense": self.dense.state_dict(),
            "optimised": self.optimised.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            ConfigError: If the state was made with another corpus.
        """
        if state["corpus"] != self.corpus.digest:
            raise ConfigError(
                "the run to resume was trained on other text",
                got=f"a corpus with digest {self.corpus.digest[:12]}",
                expected=f"digest {state['corpus'][:12]}, as in the checkpoint",
                mend="resume with the Python that started the run, or leave out --resume",
            )
        self.phase = state["phase"]
        self.held_out = dict(state["held_out"])
        self.extra_steps = state["extra_steps"]
        self.sizes = list(state["sizes"])
        self.ranks = [(step, ranks) for step, ranks in state["ranks"]]
        self.dense.load_state_dict(state["dense"])
        self.optimised.load_state_dict(state["optimised"])

    def _step_both(self) -> None:
        step = len(self.dense.losses)
        batch = train_batch(self.corpus, step, self.config).to(self.device)
        lr_share = first_cycle(step, self.config)
        # In turns: what the first of a pair leaves in the caches must not always help one side.
        sides = (self.dense, self.optimised) if step % 2 == 0 else (self.optimised, self.dense)
        for side in sides:
            side.train_step(batch, lr_share)
        self._note_ranks()

    def _end_equal_steps(self) -> None:
        self.held_out["dense"] = self._measure(self.dense)
        self.held_out["optimised, equal steps"] = self._measure(self.optimised)
        left = self.dense.seconds - self.optimised.seconds
        self.extra_steps = max(0, int(left / self._recent_step_seconds()))
        self.phase = "equal time"

    def _has_time_left(self) -> bool:
        return self.optimised.seconds + self._recent_step_seconds() <= self.dense.seconds

    def _step_optimised(self) -> None:
        step = len(self.optimised.losses)
        batch = train_batch(self.corpus, step, self.config).to(self.device)
        lr_share = second_cycle(step - self.config.steps, self.extra_steps, self.config)
        self.optimised.train_step(batch, lr_share)
        self._note_ranks()

    def _recent_step_seconds(self) -> float:
        """Median over the steps of late, as steps become faster while ranks shrink."""
        return median(self.optimised.step_seconds[-25:])

    def _note_ranks(self) -> None:
        self.sizes.append(tt_params(self.optimised.model))
        ranks = layer_ranks(self.optimised.model)
        if ranks != self.ranks[-1][1]:
            self.ranks.append((len(self.optimised.losses), ranks))

    def _measure(self, side: Side) -> float:
        return side.held_out_loss(self._held_out_batches)


def tt_layers(model: nn.Module) -> dict[str, TTModule]:
    """Return the layers that ``optimize`` has rewritten, by qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, TTModule)}


def tt_params(model: nn.Module) -> int:
    """Return the number of parameters in the cores of all rewritten layers."""
    return sum(core.numel() for layer in tt_layers(model).values() for core in layer.cores)


def layer_ranks(model: nn.Module) -> Ranks:
    """Return the ranks of each rewritten layer, with the two ends, which are 1."""
    return {name: list(layer.spec.ranks) for name, layer in tt_layers(model).items()}


def _optimise(model: nn.Module, config: DemoConfig, device: torch.device) -> nn.Module:
    ids = torch.zeros(config.batch_size, config.context, dtype=torch.long, device=device)
    settings = OptimizeConfig(
        init="random",
        max_rank=config.rank,
        targets=("blocks.*",),  # the tables and the head of 256 bytes are small as they are
        min_params=0,
        plan=PlanConfig(objective="time"),
        seed=config.seed,
    )
    return optimize(model, example_inputs=(ids,), config=settings)


def _rank_config(config: DemoConfig) -> RankConfig:
    return RankConfig(
        target_ratio=config.target_ratio,
        warmup_steps=config.adapt_after,
        prune_every=config.prune_every,
        min_rank=1,
    )


def _dense_optimizer(model: nn.Module, config: DemoConfig) -> torch.optim.Optimizer:
    return _adamw([{"params": list(model.parameters()), "lr": config.dense_lr}])


def _tt_optimizer(model: nn.Module, config: DemoConfig) -> torch.optim.Optimizer:
    return _adamw(param_groups(model, lr=config.tt_lr, rest_lr=config.tt_rest_lr))


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    for group in groups:
        group["initial_lr"] = group["lr"]
    try:
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    except RuntimeError:  # not on every device
        return torch.optim.AdamW(groups, weight_decay=0.0, foreach=True)


def _device(config: DemoConfig) -> torch.device:
    kind = config.device.partition(":")[0]
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        return torch.device(config.device)
    raise ConfigError(
        "the device to train on is not there",
        got=config.device,
        expected="cpu, or cuda where PyTorch finds a GPU",
        mend="use --device cpu",
    )


def _clock(batch: Tensor) -> float:
    if batch.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
