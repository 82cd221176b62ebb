"""Time versions of one computation against each other: interleaved, medians, CSV rows."""

from __future__ import annotations

import csv
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch


def medians_ms(versions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run every version ``repeats`` times, in turns, and return its median milliseconds.

    Turns, so that whatever else the machine does meets all versions; one unmeasured turn first.
    """
    times: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(repeats + 1):
        for name, run in versions.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def append_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Append rows to a CSV file, with what the figures depend on in every row."""
    environment = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    rows = [{**row, **environment} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if fresh:
            writer.writeheader()
        writer.writerows(rows)
