"""The table and the figure of a study, made of its rows alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from bench.methods import METHODS
from bench.study_rows import mean_ms
from bench.study_search import Rates, rates_of
from bench.study_task import SELECTION_SEED

if TYPE_CHECKING:
    from bench.study import Study

BLANK = "-"
MEBI = 2**20
Runs = Mapping[int, Mapping[str, Any]]
"""Seed to the row of its run."""


def write_report(study: Study) -> str:
    """Write the table as markdown and the figure as SVG beside the CSV; return the table."""
    text = table(study)
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / f"{study.task.name}.md").write_text(text)
    draw(study, study.folder / f"{study.task.name}.svg")
    return text


def table(study: Study) -> str:
    """Return what there is as a markdown table, one line a method; gaps are dashes."""
    task = study.task
    heading = (
        "method",
        "rates",
        "equal steps",
        "to dense",
        "equal time",
        "to dense",
        "layers smaller",
        "parameters",
        "optimizer MiB",
        "peak MiB",
        "dense / step",
        "seeds",
    )
    dense = reported(study, "dense", "steps")
    lines = [_cells(study, name, dense) for name in METHODS if study.rows_of(name)]
    rows = [heading, ["---"] * len(heading), *lines]
    notes = [
        f"# {task.name}",
        "",
        f"{task.quality}, {task.better} is better; mean and standard deviation over seeds. "
        f"{task.steps} steps, or as many as fit into the dense model's time. Compressed layers "
        f"hold at most {study.target:,} parameters at the end, a share of 1 / "
        f"{study.source.ratio:g}, except where weights stay dense (dense, galore). Rates: of the "
        f"compressed layers' weights, times that of the rest of the model over it; the best of "
        f"those tried on seed {SELECTION_SEED}, which is not reported, on data for validation.",
        "",
    ]
    return "\n".join([*notes, *("| " + " | ".join(row) + " |" for row in rows), ""])


def reported(study: Study, method: str, budget: str) -> dict[int, dict[str, Any]]:
    """Return the reported runs of a method at its best rates, failed ones among them, by seed.

    The dense model has all the time that it takes: both budgets are one.
    """
    rates = study.best_rates(method)
    budget = "steps" if method == "dense" else budget
    return {
        row["seed"]: row
        for row in study.rows_of(method)
        if (row["budget"], rates_of(row)) == (budget, rates) and row["seed"] != SELECTION_SEED
    }


def _cells(study: Study, method: str, dense: Runs) -> list[str]:
    rates, timing = study.best_rates(method), study.timing_of(method)
    steps, timed = reported(study, method, "steps"), reported(study, method, "time")
    small = " (above the target)" if _is_too_large(study, method, steps.values()) else ""
    return [
        method,
        BLANK if rates is None else f"{rates.rate:g} x{rates.rest:g}" + _edge(study, rates),
        *_qualities(steps, dense, is_dense=method == "dense"),
        *_qualities(timed, dense, is_dense=method == "dense"),
        _mean(steps.values(), "ratio", "{:.2f}x") + small,
        _mean(steps.values(), "total_params", "{:,.0f}"),
        _mean(steps.values(), "optimizer_bytes", "{:.1f}", MEBI),
        _mean(steps.values(), "peak_bytes", "{:.0f}", MEBI),
        BLANK if timing is None else _speed(timing),
        str(max(len(steps), len(timed))),
    ]


def _edge(study: Study, rates: Rates) -> str:
    """Say that a better rate may lie outside of the grid."""
    return " (edge of the grid)" if rates.rate in (min(study.rates), max(study.rates)) else ""


def _qualities(runs: Runs, dense: Runs, *, is_dense: bool) -> tuple[str, str]:
    """Return quality and its difference to dense, of the seeds that both have."""
    values = [run["quality"] for run in runs.values()]
    common = [seed for seed in runs if seed in dense]
    differences = [runs[seed]["quality"] - dense[seed]["quality"] for seed in common]
    return _spread(values, "{:.4f}"), BLANK if is_dense else _spread(differences, "{:+.4f}")


def _spread(values: Sequence[float], form: str) -> str:
    """Return mean and standard deviation of what is finite, and say how many are not."""
    finite = [value for value in values if math.isfinite(value)]
    failed = len(values) - len(finite)
    note = f" ({failed} failed)" if failed else ""
    if not finite:
        return (BLANK + note) if values else BLANK
    spread = f" ± {stdev(finite):.4f}" if len(finite) > 1 else ""
    return form.format(fmean(finite)) + spread + note


def _mean(rows: Iterable[Mapping[str, Any]], column: str, form: str, unit: float = 1) -> str:
    values = [row[column] / unit for row in rows if not row["failure"]]
    return form.format(fmean(values)) if values else BLANK


def _speed(timing: Mapping[str, Any]) -> str:
    """Return how many times faster than dense's a step is, at the start and at the end."""
    ratios = [f"{timing['dense_ms'] / timing[f'{when}_ms']:.2f}" for when in ("start", "final")]
    return ratios[0] if ratios[0] == ratios[1] else " to ".join(ratios)


def _is_too_large(study: Study, method: str, rows: Iterable[Mapping[str, Any]]) -> bool:
    sizes = [row["compressed_params"] for row in rows if not row["failure"]]
    return METHODS[method].size == "target" and any(size > study.target for size in sizes)


def draw(study: Study, path: Path) -> None:
    """Draw quality against the seconds trained for, one line a method, as SVG.

    Lines are means over seeds of the runs at equal time, as far as there are any. Seconds are
    those of the steps timed in turns, as runs may have shared the machine with others.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": study.task.name, "font.size": 9}):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for method in METHODS:
            timing, runs = study.timing_of(method), reported(study, method, "time").values()
            curve = mean_curve(runs, timing) if timing else []
            if curve:
                seconds, qualities = zip(*curve, strict=True)
                axes.plot(seconds, qualities, marker="o", markersize=3, label=method)
        axes.set_xlabel("seconds of training steps")
        axes.set_ylabel(f"{study.task.quality} ({study.task.better} is better)")
        axes.set_title(f"{study.task.name}, equal time")
        axes.grid(alpha=0.3)
        if axes.get_lines():
            axes.legend()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def mean_curve(
    runs: Iterable[Mapping[str, Any]], timing: Mapping[str, Any]
) -> list[tuple[float, float]]:
    """Return mean seconds and mean quality of each point of the curves of runs that ended.

    Args:
        runs: Of one method.
        timing: Times of its steps in turns, which the seconds of the runs are scaled to.
    """
    curves = []
    for run in runs:
        if not run["failure"]:
            scale = run["steps"] * mean_ms(timing, run) / 1e3 / run["seconds"]
            curves.append([(scale * point[1], point[2]) for point in run["curve"]])
    return [
        (fmean(point[0] for point in points), fmean(point[1] for point in points))
        for points in zip(*curves, strict=False)
    ]
