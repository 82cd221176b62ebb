"""What a study trains: a dense model, its batches, a loss and a quality to compare by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera_fx import OptimizeConfig
from comera_fx.demo.config import DemoConfig, first_cycle

Part = Literal["validation", "test"]
"""Rates are chosen on "validation"; what is reported is measured on "test"."""
DEFAULT_RATIO = 9.5
SELECTION_SEED = 100
"""Seed that rates are chosen on; it is never reported."""


@dataclass(frozen=True)
class Task:
    """One thing to learn, made ready on a device.

    Args:
        name: Its name in file names, tables and CSV rows.
        quality: What ``evaluate`` returns, with its unit.
        better: Whether a lower or a higher quality is better.
        steps: Steps that all methods take where steps are what is equal.
        build: Makes the dense model; chance is seeded by the caller.
        batch: The batch of a seed and a step, the same one every time.
        loss: Of model and batch, a scalar.
        evaluate: Quality of a model on a share of a part of the data, the whole of it at 1.
        config: Says which layers are compressed (by ``targets`` and ``exclude``), and how they
            are rewritten; ranks are chosen by a study.
        inputs: What ``optimize`` is given as example inputs.
        settings: All that the results depend on, the digest of the data among it.
        device: Where the model trains.
        clip_norm: Gradients are scaled down to this norm.
        warmup_steps: Steps over which rates rise, if ``steps`` are taken.
        final_rate: Rates at the last step, as a share of their peak.
    """

    name: str
    quality: str
    better: Literal["lower", "higher"]
    steps: int
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module, Part, float], float]
    config: OptimizeConfig
    inputs: object
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    clip_norm: float = 1.0
    warmup_steps: int = 20
    final_rate: float = 0.1

    def dense(self, seed: int) -> nn.Module:
        """Return the dense model of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(self.device)

    def rate_share(self, steps: int) -> Callable[[int], float]:
        """Return the share of the peak rate as a function of the step, for a run of ``steps``."""
        warmup = max(1, self.warmup_steps * steps // self.steps)
        config = DemoConfig(steps=steps, warmup_steps=warmup, final_lr=self.final_rate)
        return lambda step: first_cycle(step, config)

    def is_better(self, one: float, other: float) -> bool:
        """Return whether one quality is better than another."""
        return one < other if self.better == "lower" else one > other


def compressed_layers(model: nn.Module, config: OptimizeConfig) -> dict[str, nn.Module]:
    """Return name to layer of those that every method compresses.

    Args:
        model: The dense model.
        config: Its ``targets`` and ``exclude`` choose, of linear layers and embedding tables.
    """

    def is_chosen(name: str) -> bool:
        wanted = config.targets is None or any(fnmatchcase(name, p) for p in config.targets)
        return wanted and not any(fnmatchcase(name, p) for p in config.exclude)

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding)) and is_chosen(name)
    }


def target_params(task: Task, ratio: float) -> int:
    """Return how many parameters the compressed layers may hold at the end, without biases."""
    layers = compressed_layers(task.dense(0), task.config).values()
    counts = [p.numel() for layer in layers for n, p in layer.named_parameters() if n == "weight"]
    return int(sum(counts) / ratio)


def digest(settings: Mapping[str, Any]) -> str:
    """Return a short text that changes when any of the settings does."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
