"""Which inner compiler ``inner="auto"`` of the backend takes on a device, by what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import comera_fx
from bench.compiled import COMERA

NEAR = 1.03
"""Steps this much longer than the fastest's count as equal: then what compiles faster is taken."""

Row = Mapping[str, Any]


def inner_compilers(versions: Sequence[str]) -> list[str]:
    """Return the inner compilers that versions stand for, in their order."""
    inners = [name.removeprefix(COMERA) for name in versions if name.startswith(COMERA)]
    return [inner for inner in inners if inner != "auto"]


def write_table(rows: Sequence[Row], device_type: str, folder: Path | None = None) -> Path:
    """Write the table of a device type into the package, or into ``folder``; return its path."""
    folder = Path(comera_fx.__file__).parent if folder is None else folder
    path = folder / f"inner_{device_type}.json"
    path.write_text(json.dumps(table(rows), indent=1) + "\n")
    return path


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return device, inner compiler, and by workload and inner the figures that led to it.

    Args:
        rows: Those of ``bench.compile``, all of one device.

    Raises:
        ValueError: If no inner compiler ran, or some only on some of the workloads.
    """
    steps = _by_workload(rows, "median_ms")
    inners = sorted({inner for measured in steps.values() for inner in measured})
    if not inners or any(sorted(measured) != inners for measured in steps.values()):
        raise ValueError("every inner compiler must run on every workload, and at least one must")
    seconds = _by_workload(rows, "cold_s")
    return {
        "device": rows[0]["device"],
        "inner": _choose(inners, steps, seconds),
        "steps": steps,
        "compile_seconds": seconds,
    }


def _choose(
    inners: Sequence[str],
    steps: Mapping[str, Mapping[str, float]],
    seconds: Mapping[str, Mapping[str, float | None]],
) -> str:
    means = {
        inner: math.exp(sum(math.log(ms[inner]) for ms in steps.values()) / len(steps))
        for inner in inners
    }
    near = [inner for inner in inners if means[inner] <= NEAR * min(means.values())]
    # Times of compiling that were not measured say nothing for or against.
    compiling = {i: sum(by_inner[i] or 0.0 for by_inner in seconds.values()) for i in near}
    return min(near, key=lambda inner: (compiling[inner], means[inner]))


def _by_workload(rows: Sequence[Row], column: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for inner in inner_compilers([str(row["version"])]):
            found.setdefault(str(row["workload"]), {})[inner] = row[column]
    return found
