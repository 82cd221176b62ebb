"""How long calls take on a device, on a machine that others use at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Run = Callable[[], object]

LEAST_TURNS, MOST_TURNS = 5, 50


def fastest(run: Run, calls: int, device_type: str) -> float:
    """Return the seconds of the fastest of some calls; on "cuda" of one among that many in a row.

    What else the machine does only ever adds to a time.
    """
    if device_type == "cuda":
        return _in_a_row(run, calls)
    least = float("inf")
    for _ in range(calls):
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    return least


def _in_a_row(run: Run, calls: int) -> float:
    """A device works on while the next call is prepared, as it does in training."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def medians(runs: Mapping[str, Run], device_type: str, *, seconds: float) -> dict[str, float]:
    """Return the median seconds of each run.

    They take turns, so that whatever else the machine does meets all of them. In each turn a run
    goes before that which counts, so that none finds the caches filled by another.

    Args:
        runs: What to run, by name.
        device_type: Where; "cuda" is waited for.
        seconds: How long to go on, within 5 and 50 turns.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() > end:
            break
        for name, run in runs.items():
            run()
            times[name].append(_waited_for(run, device_type))
    return {name: median(taken) for name, taken in times.items()}


def _waited_for(run: Run, device_type: str) -> float:
    if device_type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
