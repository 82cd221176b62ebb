"""Which learning rates a method is tried at, and which are its best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.study_task import SELECTION_SEED, Task

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
RESTS = (1.0, 5.0)
"""Rate of the rest of the model over that of the compressed layers' weights."""


Rows = Sequence[Mapping[str, Any]]


class Rates(NamedTuple):
    """Peak rates of a run.

    Args:
        rate: That of the weights of the compressed layers.
        rest: That of the rest of the model, over it.
    """

    rate: float
    rest: float


def is_selection(row: Mapping[str, Any]) -> bool:
    """Whether a row is one that rates are chosen by, and that is not reported."""
    return bool(row["seed"] == SELECTION_SEED and row["budget"] == "steps")


def rates_of(row: Mapping[str, Any]) -> Rates:
    """Return the rates of a row."""
    return Rates(row["rate"], row["rest"])


def best_rates(rows: Rows, task: Task, grid: Sequence[Rates]) -> Rates | None:
    """Return the rates of the best quality among the rows that are not reported, if one has any.

    Args:
        rows: Of one method.
        task: Says what is better.
        grid: Rates to choose from.
    """
    tried = {rates_of(row): row["quality"] for row in rows if is_selection(row)}
    best: Rates | None = None
    for rates in sorted(set(grid) & set(tried)):
        quality = tried[rates]
        if math.isfinite(quality) and (best is None or task.is_better(quality, tried[best])):
            best = rates
    return best


def next_rates(rows: Rows, task: Task, grid: Sequence[Rates]) -> Rates | None:
    """Return the rates to try next; ``None`` once the best ones are known.

    The first are in the middle of the grid. The best are known when all around them have been
    tried: the rate above, the one below, and another one for the rest. While all have failed,
    lower ones are tried.

    Args:
        rows: Of one method.
        task: Says what is better.
        grid: All that may be tried.
    """
    known, rests = sorted({each.rate for each in grid}), sorted({each.rest for each in grid})
    tried = {rates_of(row) for row in rows if is_selection(row)} & set(grid)
    best = best_rates(rows, task, grid)
    if not tried:
        return Rates(known[len(known) // 2], rests[0])
    rate, rest = best or min(tried)
    place = known.index(rate)
    steps = (1, -1) if best else (-1,)
    around = [Rates(known[place + s], rest) for s in steps if 0 <= place + s < len(known)]
    around += [Rates(rate, other) for other in rests]
    untried = [each for each in around if each not in tried]
    return untried[0] if untried else None
