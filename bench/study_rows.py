"""The CSV files of a study: one row a run, appended as it is done, and one a timed method."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.timing import Row

Rows = Sequence[dict[str, Any]]

KEY = ("task", "method", "budget", "seed", "rate", "rest", "digest")
"""What makes two runs the same."""
_INTEGERS = (
    "seed",
    "steps",
    "compressed_params",
    "start_params",
    "mean_params",
    "total_params",
    "optimizer_bytes",
    "peak_bytes",
    "rounds",
)
_NUMBERS = (
    *("rate", "rest", "quality", "step_ms", "seconds", "cut_share", "ratio"),
    *("start_ms", "final_ms", "dense_ms"),
)
_STRUCTURES = ("curve", "shapes")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, with numbers as numbers; none, if there is no file.

    A row that was cut off as it was written is left out.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if None not in row and _is_whole(row)]
    return [{name: _value(name, text) for name, text in row.items()} for row in found]


def key_of(row: Row) -> tuple[object, ...]:
    """Return what a row is known by: equal for runs that would give the same."""
    return tuple(row[name] for name in KEY)


def as_text(row: Row) -> Row:
    """Return a row for a CSV file: what is no number or text as JSON."""
    return {
        name: json.dumps(value, separators=(",", ":")) if name in _STRUCTURES else value
        for name, value in row.items()
    }


def end_line(path: Path) -> None:
    """End the last line of a file, if it was cut off as it was written."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a", newline="") as file:
            file.write("\r\n")


def latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last row of each key, in the order of their first ones."""
    return list({key_of(row): row for row in rows}.values())


def mean_ms(timing: Row, row: Row) -> float:
    """Return the milliseconds of a step, over a run whose layers became smaller.

    Times between start and end are taken to follow the sizes; cuts come on top.
    """
    start, final = float(str(timing["start_ms"])), float(str(timing["final_ms"]))
    first, mean, last = (int(str(row[f"{n}_params"])) for n in ("start", "mean", "compressed"))
    share = (mean - last) / (first - last) if first > last else 1.0
    return (final + share * (start - final)) * (1 + float(str(row["cut_share"])))


def _is_whole(row: dict[str, Any]) -> bool:
    if any(value is None for value in row.values()):
        return False
    try:
        for name, text in row.items():
            _value(name, text)
    except ValueError:
        return False
    return True


def _value(name: str, text: str) -> Any:
    if name in _STRUCTURES:
        return json.loads(text)
    if name in _INTEGERS:
        return int(text) if text else 0
    if name in _NUMBERS:
        return float(text) if text else math.nan
    return text
