"""Time versions of one computation against each other: interleaved, medians, CSV rows."""

from __future__ import annotations

import csv
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

Row = dict[str, object]

LEAST_REPEATS, MOST_REPEATS = 5, 200


def medians_ms(
    versions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    prepare: Callable[[str], object] | None = None,
) -> dict[str, float]:
    """Return the median milliseconds of every version, timed as ``times_ms`` does."""
    times = times_ms(versions, repeats, prepare=prepare)
    return {name: median(values) for name, values in times.items()}


def times_ms(
    versions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    prepare: Callable[[str], object] | None = None,
    twice: bool = True,
) -> dict[str, list[float]]:
    """Run every version ``repeats`` times, in turns, and return the milliseconds of each run.

    Turns, so that whatever else the machine does meets all versions; one unmeasured turn first.
    In each turn a version runs twice and the second run counts: none is to find the caches as
    another one, of quite another size, has left them.

    Args:
        versions: What to run, by name.
        repeats: Measured turns.
        prepare: Called with a version's name before each of its runs, outside the clock.
        twice: Whether there are two runs in a turn; for what takes seconds, one is enough.
    """
    times: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(repeats + 1):
        for name, run in versions.items():
            for counts in (False, turn > 0) if twice else (turn > 0,):
                if prepare is not None:
                    prepare(name)
                start = time.perf_counter()
                run()
                if counts:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return times


def repeats_within(
    seconds: float,
    versions: Mapping[str, Callable[[], object]],
    *,
    prepare: Callable[[str], object] | None = None,
) -> int:
    """Return how many turns of all versions fit into ``seconds``, between 5 and 200."""
    turn = 2 * sum(medians_ms(versions, 1, prepare=prepare).values()) / 1e3
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(seconds / turn)))


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a CSV file, with what the figures depend on in every row.

    Raises:
        ValueError: If the file holds other columns.
    """
    environment: Row = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    rows = [{**row, **environment} for row in rows]
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    if not fresh:
        with path.open(newline="") as file:
            held = next(csv.reader(file))
        if held != columns:
            raise ValueError(f"{path} holds the columns {held}, not {columns}: move it away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def format_table(rows: Sequence[Row]) -> str:
    """Return rows of equal keys as aligned text, the keys on top; ``None`` is left blank."""
    cells = [list(rows[0]), *(["" if v is None else str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
