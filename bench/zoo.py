"""Which models train under ``torch.compile(model, backend="comera")``.

    python -m bench.zoo

prints the table of the README: each model of ``bench/models/zoo.py`` beside an eager twin.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import comera_fx
from bench.models.zoo import CONFIG, ZOO, Entry, Inputs, loss_of

OPTIONS = {"inner": "aot_eager"}
NUM_SAMPLES, OTHER_NUM_SAMPLES = 4, 7
TOLERANCE = 1e-4
"""Of a loss, against the eager twin's."""


@dataclass(frozen=True)
class Counts:
    """What dynamo and the backend counted.

    Args:
        graphs: Graphs that the backend got.
        graph_breaks: Places where dynamo cut the model's code.
        tt_layers: Layers in TT form in those graphs.
        expanded: Those that became the steps of their plans.
    """

    graphs: int
    graph_breaks: int
    tt_layers: int
    expanded: int

    @classmethod
    def now(cls) -> Counts:
        """Return what was counted since the last reset."""
        ours = counters["comera_fx"]
        breaks = sum(counters["graph_break"].values())
        return cls(ours["graphs"], breaks, ours["tt_layers"], ours["expanded"])


class Twins:
    """A compiled model and an eager copy of it, trained side by side.

    Args:
        entry: What to compile.
        options: Of the backend.
    """

    def __init__(self, entry: Entry, options: Mapping[str, Any] = OPTIONS) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        self.entry = entry
        model = entry.make()
        if not entry.optimised:
            model = comera_fx.optimize(model, self.inputs(NUM_SAMPLES), config=CONFIG)
        self.model = model.train()
        self.eager = copy.deepcopy(model)
        self.compiled = torch.compile(self.model, backend="comera", options=dict(options))
        self._optimizers = [_adamw(self.model), _adamw(self.eager)]

    def inputs(self, num_samples: int, seed: int = 0) -> Inputs:
        """Return what the model is called with."""
        torch.manual_seed(seed)
        return self.entry.inputs(num_samples)

    def train(self, batches: Sequence[Inputs]) -> tuple[list[float], list[float]]:
        """Train a step on each batch; return the losses, compiled and eager."""
        runs = zip((self.compiled, self.eager), self._optimizers, strict=True)
        mine, theirs = ([_step(run, opt, batch) for batch in batches] for run, opt in runs)
        return mine, theirs

    @torch.no_grad()
    def evaluate(self, batch: Inputs) -> tuple[float, float]:
        """Return the losses in eval mode, compiled and eager."""
        self.model.eval()
        self.eager.eval()
        losses = [float(loss_of(run(**batch))) for run in (self.compiled, self.eager)]
        self.model.train()
        self.eager.train()
        return losses[0], losses[1]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(run: Any, optimizer: torch.optim.Optimizer, batch: Inputs) -> float:
    loss: Tensor = loss_of(run(**batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def row(entry: Entry) -> str:
    """Return a model's line of the table."""
    twins = Twins(entry)
    mine, theirs = twins.train([twins.inputs(NUM_SAMPLES, seed) for seed in (1, 2)])
    difference = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
    assert difference < TOLERANCE, f"{entry.name}: losses {mine}, eager {theirs}"
    seen = Counts.now()
    return (
        f"| {entry.name} | {seen.graphs} | {seen.graph_breaks} "
        f"| {seen.expanded} of {seen.tt_layers} |"
    )


def main() -> None:
    """Print the table."""
    print("| model | graphs | graph breaks | TT layers expanded |\n|---|---|---|---|")
    for entry in ZOO:
        print(row(entry), flush=True)


if __name__ == "__main__":
    main()
