"""Settings of the demo, and its learning-rate schedule as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from comera_fx.errors import ConfigError

VOCABULARY = 256  # text is read as bytes


@dataclass(frozen=True)
class DemoConfig:
    """Sizes, lengths and rates of one demo run; the defaults take a few minutes on two cores.

    Args:
        steps: Steps that both models take, batch for batch the same.
        rank: Largest rank of the optimised model at its start.
        target_ratio: Size its ranks are to shrink to, as a share of the TT size at the start.
        device: Where both models train, ``"cpu"`` or ``"cuda"``.
        seed: Seed of the weights, the cores and the batches.
        batch_size: Sequences in a step.
        context: Bytes in a sequence.
        width: Features of the decoder's stream.
        num_layers: Decoder blocks.
        num_heads: Heads of attention in a block.
        ffn_width: Hidden features of a block's feed-forward part.
        dense_lr: Peak learning rate of the dense model.
        tt_lr: Peak learning rate of the optimised model's cores.
        tt_rest_lr: That of the rest of the optimised model.
        warmup_steps: Steps over which the learning rate rises.
        final_lr: Learning rate after ``steps`` steps, as a share of the peak.
        second_peak: Peak of the second cycle, in the time that the optimised model has left.
        clip_norm: Gradients of either model are scaled down to this norm.
        adapt_after: Steps before ranks begin to adapt.
        prune_every: Steps between two cuts; ten of them lead to the target.
        held_out_every: One file in so many is held out.
        held_out_batches: Batches of held-out text that the losses are measured on.
        held_out_batch_size: Sequences in each of them.
        max_files: Read only the first files of the standard library; ``None`` reads all.
        checkpoint_seconds: Seconds between two checkpoints.
    """

    steps: int = 240
    rank: int = 32
    target_ratio: float = 0.58
    device: str = "cpu"
    seed: int = 0
    batch_size: int = 16
    context: int = 128
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    ffn_width: int = 1024
    dense_lr: float = 1e-3
    tt_lr: float = 2e-3
    tt_rest_lr: float = 1e-2
    warmup_steps: int = 20
    final_lr: float = 0.1
    second_peak: float = 0.7
    clip_norm: float = 1.0
    adapt_after: int = 20
    prune_every: int = 10
    held_out_every: int = 20
    held_out_batches: int = 8
    held_out_batch_size: int = 64
    max_files: int | None = None
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("steps", "rank", "batch_size", "context", "num_layers", "num_heads"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        ratio = self.target_ratio
        _check(0 < ratio <= 1, "target_ratio", ratio, "above 0, at most 1, such as 0.5 for half")
        _check(self.seed >= 0, "seed", self.seed, "0 or more")
        _check(
            self.width % self.num_heads == 0,
            "num_heads",
            self.num_heads,
            f"a divisor of the width, {self.width}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name, all of them numbers, strings or ``None``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _check(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"the demo's {name} is out of range",
            got=got,
            expected=expected,
            mend=f"give another {flag}, or leave it out for {getattr(DemoConfig, name)}",
        )


def conflict(given: Mapping[str, Any], saved: DemoConfig) -> ConfigError | None:
    """Return what to tell the user whose settings differ from those of the run they resume.

    The saved settings are the ones that count: half a run at one rank and half at another would
    be neither. The result is meant to be shown, not raised.
    """
    wrong = {key: value for key, value in given.items() if getattr(saved, key) != value}
    if not wrong:
        return None
    return ConfigError(
        "some settings differ from those of the run that is resumed, and are not used",
        got=", ".join(f"{key}={value}" for key, value in wrong.items()),
        expected=", ".join(f"{key}={getattr(saved, key)}" for key in wrong),
        mend="leave out --resume to start a new run with them",
    )


def first_cycle(step: int, config: DemoConfig) -> float:
    """Return the share of the peak learning rate at ``step`` of the steps both models take.

    It rises over ``warmup_steps`` and falls along half a cosine to ``final_lr`` at the last step,
    so that both losses are measured at a low rate, where they are at their best.

    Example:
        >>> config = DemoConfig(steps=100, warmup_steps=10, final_lr=0.1)
        >>> [round(first_cycle(step, config), 2) for step in (0, 9, 54, 99)]
        [0.1, 1.0, 0.55, 0.1]
    """
    warmup = min(config.warmup_steps, config.steps // 2)
    return _rise_and_fall(step, config.steps, warmup, low=config.final_lr)


def second_cycle(step: int, num_steps: int, config: DemoConfig) -> float:
    """Return the share of the peak at ``step`` of the ``num_steps`` in the time that is left.

    A shorter cycle that starts where the first ended, rises to ``second_peak`` and falls to where
    the first, and so the dense model, ended. ``num_steps`` is an estimate, made from measured step
    times: past it the rate stays there.

    Example:
        >>> config = DemoConfig(warmup_steps=10, final_lr=0.1, second_peak=0.5)
        >>> [round(second_cycle(step, 100, config), 2) for step in (0, 9, 54, 99, 120)]
        [0.14, 0.5, 0.3, 0.1, 0.1]
    """
    warmup = min(config.warmup_steps, num_steps // 2)
    if step < warmup:
        return config.final_lr + (config.second_peak - config.final_lr) * (step + 1) / warmup
    low = config.final_lr / config.second_peak
    return config.second_peak * _rise_and_fall(step, num_steps, warmup, low=low)


def _rise_and_fall(step: int, num_steps: int, warmup: int, low: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup + 1) / max(1, num_steps - warmup))
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
