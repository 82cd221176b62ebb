"""Versions of a network that ``bench.compile`` sets side by side: dense or TT, and what runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.tasks import Task, Trainer

PER_LAYER, SHARED = "tt_per_layer", "tt_shared"
COMERA = "tt_comera_"
CHECKED_STEPS = 3
TOLERANCE = 1e-4
"""How far a loss may be from that of the version's reference, as a share of it."""


@dataclass(frozen=True)
class Kind:
    """How one version runs.

    Args:
        is_tt: Whether the network is optimised.
        share: Whether its TT layers share work in eager mode.
        backend: Of ``torch.compile``; ``None`` runs eagerly.
        options: Of the backend.
    """

    is_tt: bool
    share: bool = True
    backend: str | None = None
    options: dict[str, Any] | None = None

    @property
    def reference(self) -> str:
        """Name of the eager version whose losses it must have."""
        return PER_LAYER if self.is_tt else "dense"


VERSIONS = {
    "dense": Kind(is_tt=False),
    "dense_inductor": Kind(is_tt=False, backend="inductor"),
    PER_LAYER: Kind(is_tt=True, share=False),
    SHARED: Kind(is_tt=True),
    "tt_aot_eager": Kind(is_tt=True, backend="aot_eager"),
    "tt_inductor": Kind(is_tt=True, backend="inductor"),
    **{
        COMERA + inner: Kind(is_tt=True, backend="comera", options={"inner": inner})
        for inner in ("eager", "aot_eager", "inductor", "cudagraphs", "auto")
    },
}
NOT_ASKED_FOR = ("tt_aot_eager", "tt_comera_auto")
"""Versions that run only where they are named."""


def default_versions(device: str) -> list[str]:
    """Return the versions that make sense on a device."""
    left_out = (*NOT_ASKED_FOR, *(() if device == "cuda" else (COMERA + "cudagraphs",)))
    return [name for name in VERSIONS if name not in left_out]


def available(names: Sequence[str]) -> list[str]:
    """Return the names whose backend is registered, and print which are left out."""
    known = {None, *torch._dynamo.list_backends(exclude_tags=())}
    kept = [name for name in names if VERSIONS[name].backend in known]
    for name in names:
        if name not in kept:
            print(f"{name} is left out: there is no backend {VERSIONS[name].backend!r}")
    return kept


def make_trainer(name: str, task: Task, dropout: float = 0.0) -> Trainer:
    """Return the version called ``name``, at the weights that all of its reference start at."""
    kind = VERSIONS[name]
    model = task.in_tt_form(dropout, share=kind.share) if kind.is_tt else task.dense(dropout)
    if kind.backend is None:
        return Trainer(task, model, model)
    compiled = torch.compile(model, backend=kind.backend, options=kind.options)
    return Trainer(task, model, compiled)


def check(names: Sequence[str], task: Task, steps: int = CHECKED_STEPS) -> None:
    """Train some steps of every version, without dropout, and compare the losses.

    Raises:
        AssertionError: If one differs from its eager reference, dense or TT layer by layer.
    """
    losses: dict[str, Tensor] = {}
    for name in (*dict.fromkeys(VERSIONS[name].reference for name in names), *names):
        if name not in losses:
            losses[name] = _losses(name, task, steps)
    for name in names:
        _assert_equal(name, losses[name], losses[VERSIONS[name].reference])


def _assert_equal(name: str, losses: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(
        losses,
        wanted,
        rtol=TOLERANCE,
        atol=0.0,
        msg=lambda text: f"{name}: losses are not the eager version's\n{text}",
    )


def _losses(name: str, task: Task, steps: int) -> Tensor:
    torch._dynamo.reset()
    trainer = make_trainer(name, task)
    return torch.stack([trainer.step().clone() for _ in range(steps)]).cpu()
