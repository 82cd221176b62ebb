"""Training steps, dense and TT, eager and compiled: their time, and that of compiling.

Forward, loss, backward and a fused AdamW step of the paper's six-encoder at batch 32 and 1, a
GPT-like decoder, a DLRM and a stack of 24 layers. Before it is timed, each version must have the
losses of the eager one, dropout off. Versions then run in turns in one process; compiling is
timed in new processes, with an empty cache (cold) and with the one that this left (warm).
Appends a row per version to ``bench/results/compile.csv``; ``--write-auto`` also writes the
table that ``inner="auto"`` of the backend ``comera`` reads on this type of device.
Run: ``python -m bench.compile [--workloads six-1 stack] [--versions dense tt_per_layer]
[--device cuda] [--repeats N] [--threads 2] [--skip-compile-times] [--write-auto] [--small]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch

from bench.compile_time import Figures, cold_and_warm
from bench.compiled import (
    PER_LAYER,
    VERSIONS,
    available,
    check,
    default_versions,
    make_trainer,
)
from bench.inner import inner_compilers, write_table
from bench.options import parse
from bench.tasks import Task, Trainer, make_task
from bench.timing import Row, append_rows, format_table, repeats_within, times_ms
from bench.workloads import SMALL_TRAINING, TRAINING, Training

SECONDS = 30.0
"""What the timed turns of one workload may take, if that is more than its least number of them."""
WARM_STEPS = {"cpu": 1, "cuda": 3}
"""Steps before the first turn: CUDA graphs are recorded in the second or third."""
QUANTILES = {"median": 0.5, "q20": 0.2, "q80": 0.8}
RATIOS = {"over_per_layer": PER_LAYER, "over_inductor": "tt_inductor"}
"""Columns of a version's median over that of another one."""
NOT_COMPILED: Mapping[str, float | None] = dict.fromkeys(
    ("cold_s", "warm_s", "graphs", "graph_breaks")
)
SHOWN = ("workload", "version", "median_ms", "dense_over", *RATIOS, "cold_s", "warm_s", "graphs")


def measure(
    workload: Training,
    names: Sequence[str],
    device: str = "cpu",
    repeats: int | None = None,
    compiling: Mapping[str, Figures] | None = None,
) -> list[Row]:
    """Return one row per version: quantiles of its step, after checking its losses.

    Args:
        workload: What trains.
        names: The versions.
        device: ``"cpu"`` or ``"cuda"``.
        repeats: Measured turns; by their time and the workload's least if ``None``.
        compiling: What ``cold_and_warm`` measured of each version, where that was asked for.
    """
    task = make_task(workload, device)
    check(names, task)
    ms = _times(workload, names, task, repeats)
    medians = {name: _quantile(times, 0.5) for name, times in ms.items()}
    rows: list[Row] = []
    for name, times in ms.items():
        row: Row = {"workload": workload.name, "version": name, "device": device_name(device)}
        row |= {"batch": workload.batch, "length": workload.length, "dropout": workload.dropout}
        row |= {f"{column}_ms": round(_quantile(times, q), 4) for column, q in QUANTILES.items()}
        row["dense_over"] = _ratio(medians.get("dense"), medians[name])
        row |= {column: _ratio(medians[name], medians.get(of)) for column, of in RATIOS.items()}
        row |= (compiling or {}).get(name, NOT_COMPILED)
        row["repeats"] = len(times)
        rows.append(row)
    return rows


def device_name(device: str) -> str:
    """Return what rows call a device."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def _times(
    workload: Training, names: Sequence[str], task: Task, repeats: int | None
) -> dict[str, list[float]]:
    torch._dynamo.reset()
    # All versions of a network are compilations of one forward method: there must be room for
    # all, and what one is given must not make the next one's sizes dynamic.
    with torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False):
        trainers = {name: make_trainer(name, task, workload.dropout) for name in names}
        runs = {name: _run_of(trainer) for name, trainer in trainers.items()}
        for run in runs.values():
            for _ in range(WARM_STEPS[task.device]):
                run()
        takes_seconds = task.device == "cpu" and not workload.twice
        if repeats is None:
            repeats = workload.rounds
            if not takes_seconds:
                repeats = max(repeats, repeats_within(SECONDS, runs))
        return times_ms(runs, repeats, twice=not takes_seconds)


def _run_of(trainer: Trainer) -> Callable[[], object]:
    if trainer.task.device != "cuda":
        return trainer.step

    def run() -> None:
        trainer.step()
        torch.cuda.synchronize()

    return run


def _quantile(times: Sequence[float], q: float) -> float:
    return float(torch.tensor(times, dtype=torch.float64).quantile(q))


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else round(above / below, 3)


def _extend(parser: argparse.ArgumentParser) -> None:
    names = [workload.name for workload in TRAINING]
    versions = list(VERSIONS)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--versions", nargs="+", choices=versions, help="all that make sense")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--skip-compile-times", action="store_true", help="leave out the new processes"
    )
    parser.add_argument(
        "--write-auto", action="store_true", help='write the table that inner="auto" reads'
    )
    parser.add_argument("--small", action="store_true", help="sizes that take no time")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was chosen, print a table and append the rows, workload by workload."""
    options = parse(__doc__, results="compile.csv", extend=_extend, arguments=arguments)
    names = available(options.versions or default_versions(options.device))
    if options.write_auto and options.small:
        raise SystemExit("--write-auto: what is measured at the sizes of --small decides nothing")
    if options.write_auto and not inner_compilers(names):
        raise SystemExit("--write-auto: no inner compiler of the backend comera is to run")
    rows: list[Row] = []
    for workload in SMALL_TRAINING if options.small else TRAINING:
        if workload.name not in options.workloads:
            continue
        compiling = {}
        if not options.skip_compile_times:
            for name in names:
                if VERSIONS[name].backend is not None:
                    compiling[name] = cold_and_warm(
                        workload, name, options.device, small=options.small
                    )
        found = measure(workload, names, options.device, options.repeats, compiling)
        print(format_table([{key: row[key] for key in SHOWN} for row in found]), flush=True)
        append_rows(options.results, found)
        rows += found
    if options.write_auto:
        print(f"wrote {write_table(rows, options.device)}")


if __name__ == "__main__":
    main()
