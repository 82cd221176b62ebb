"""Studies: methods of training compared on one task, each at its own best rate.

What a study does, run by run, each a row of a CSV file that is appended as the run ends:

1. Every method trains at rates of one shared grid, on a seed that is not reported, and is measured
   on the data's validation part: from the middle of the grid on, until both neighbours of the best
   rate are known to be worse. The best rate is the method's own from there on.
2. Steps of all methods are timed in turns, in one process.
3. Every method trains at its rate on the reported seeds: for the task's number of steps, and for
   as many as fit into the time that the dense model takes, with the schedule over all of them.

Rows that are there are not run again, so that a study adds up over several runs. A run that
fails or diverges is a row without quality.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from bench.methods import FIRST, METHODS, Setup
from bench.options import RESULTS
from bench.study_child import Job, Source, Timing, work_apart
from bench.study_rows import DENSE_TIME, KEY, as_text, end_line, key_of, latest, mean_ms, read_rows
from bench.study_table import write_report
from bench.study_task import DEFAULT_RATIO, SELECTION_SEED, Task, digest, target_params
from bench.timing import Row, append_rows
from comera_fx.errors import ConfigError
from comera_fx.train.groups import REST_LR_SCALE

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (0, 1, 2)
QUICK_RATES, QUICK_SEEDS, QUICK_ROUNDS = (3e-3,), (0,), 2
ROUNDS = 20
QUICK_RESULTS = Path("build/studies")
RESULT = (
    *("steps", "quality", "compressed_params", "ratio", "start_params", "mean_params"),
    *("total_params", "optimizer_bytes", "peak_bytes", "step_ms", "seconds", "cut_share"),
    *("curve", "shapes", "failure", "device"),
)
"""Columns of a row, beside its key and what ``append_rows`` adds."""
Work = Callable[[Source, Job | Timing], list[Row]]
Planned = tuple[str, str, int, float, int]
"""Method, budget, seed, rate and steps of a run."""


@dataclass
class Study:
    """A task, what is to be run of it, and the rows there are.

    Args:
        source: Where the task comes from.
        folder: Where the files are.
        methods: What is compared.
        rates: Rates to choose from.
        seeds: Seeds to report.
        rounds: Turns in which steps are timed.
        jobs: Runs at a time, which share the threads; steps are timed alone, on all of them.
        minutes: No run starts after so many; never too late, if ``None``.
        retry: Whether runs that failed are run again.
        work: Does a job.

    Raises:
        ConfigError: If the seed that rates are chosen on is to be reported, or a method is none.
    """

    source: Source
    folder: Path
    methods: Sequence[str] = tuple(METHODS)
    rates: Sequence[float] = RATES
    seeds: Sequence[int] = SEEDS
    rounds: int = ROUNDS
    jobs: int = 1
    minutes: float | None = None
    retry: bool = False
    work: Work = work_apart
    rows: list[dict[str, Any]] = field(init=False)
    timings: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        if SELECTION_SEED in self.seeds:
            raise ConfigError(
                "rates are chosen on a seed that is to be reported",
                got=f"seeds {tuple(self.seeds)}",
                expected=f"seeds other than {SELECTION_SEED}",
                mend="choose other --seeds",
            )
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ConfigError(
                "a method is not known",
                got=", ".join(unknown),
                expected=f"of {', '.join(METHODS)}",
                mend="correct --only",
            )
        self.task: Task = self.source.load()
        self.target = target_params(self.task, self.source.ratio)
        self.digests = {name: self._digest(name) for name in METHODS}
        self.csv = self.folder / f"{self.task.name}.csv"
        self.steps_csv = self.folder / f"{self.task.name}_steps.csv"
        self._start = time.monotonic()
        self._lock, self._is_stopped = Lock(), False
        self._load()

    def run(self) -> None:
        """Do every run that is missing, as long as there is time."""
        for group in self._groups():
            self._each(self._search, group)
            chosen = [name for name in group if self.best_rate(name) is not None]
            self._time(chosen)
            self._each(
                lambda run: self._run(*run),
                [
                    run
                    for seed in self.seeds
                    for name in chosen
                    for run in self._of_seed(name, seed)
                ],
            )

    def best_rate(self, method: str) -> float | None:
        """Return the rate of the best quality on the seed that is not reported.

        ``None``, if no rate gave one, or while a neighbour of it in ``rates`` has not been tried.
        """
        rows = self.rows_of(method)
        if next_rate(rows, self.task, self.rates) is not None:
            return None
        return best_rate(rows, self.task, self.rates)

    def rows_of(self, method: str) -> list[dict[str, Any]]:
        """Return the rows of a method at the present settings."""
        return [
            row
            for row in self.rows
            if (row["task"], row["method"], row["digest"])
            == (self.task.name, method, self.digests[method])
        ]

    def timing_of(self, method: str) -> dict[str, Any] | None:
        """Return the latest times of a method's steps."""
        found = [
            row
            for row in self.timings
            if (row["method"], row["digest"]) == (method, self.digests[method])
        ]
        return found[-1] if found else None

    # ---- runs ----

    def _of_seed(self, method: str, seed: int) -> Iterator[Planned]:
        rate = self.best_rate(method)
        assert rate is not None, "methods without a rate are not run"
        yield method, "steps", seed, rate, self.task.steps
        steps = self._steps_in_time(method)
        if method not in DENSE_TIME and steps is not None:
            yield method, "time", seed, rate, steps

    def _steps_in_time(self, method: str) -> int | None:
        """Return how many steps of a method fit into the time of all of the dense model's."""
        timing, rate = self.timing_of(method), self.best_rate(method)
        chosen = [r for r in self.rows_of(method) if _is_selection(r) and r["rate"] == rate]
        if timing is None or not chosen:
            return None
        return max(1, int(self.task.steps * timing["dense_ms"] / mean_ms(timing, chosen[-1])))

    def _each(self, do: Callable[[Any], None], items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(do, items))

    def _search(self, method: str) -> None:
        """Try rates until the best of them is known; each is a run."""
        failed = [
            row["rate"] for row in self.rows_of(method) if row["failure"] and _is_selection(row)
        ]
        for rate in failed if self.retry else ():
            self._run(method, "steps", SELECTION_SEED, rate, self.task.steps)
        tried: set[float] = set()
        while (rate := next_rate(self.rows_of(method), self.task, self.rates)) is not None:
            if rate in tried:  # no time is left for it
                return
            tried.add(rate)
            self._run(method, "steps", SELECTION_SEED, rate, self.task.steps)

    def _run(self, method: str, budget: str, seed: int, rate: float, steps: int) -> None:
        values = (self.task.name, method, budget, seed, rate, self.digests[method])
        key: Row = dict(zip(KEY, values, strict=True))
        done = {key_of(row): row for row in self.rows}.get(key_of(key))
        if self._is_late() or (done and not (self.retry and done["failure"])):
            return
        name = f"{self.task.name}: {method}, seed {seed}, rate {rate:g}, {steps} steps"
        print(name, flush=True)
        found: Row = dict.fromkeys(RESULT, "")
        try:
            found |= self.work(self._share(), Job(method, seed, rate, steps))[0]
        except KeyboardInterrupt:
            self._is_stopped = True
            raise
        except RuntimeError as error:
            found |= {"quality": math.nan, "curve": [], "shapes": {}, "failure": str(error)}
        held = found["compressed_params"]
        if isinstance(held, int):
            found["ratio"] = round(self.target * self.source.ratio / held, 3) if held else ""
        found |= {"steps": steps, "device": self.source.device}
        self._append(self.csv, [as_text({**key, **{name: found[name] for name in RESULT}})])
        outcome = found["failure"] or f"{self.task.quality} {found['quality']:.4f}"
        print(f"{name}: {outcome}", flush=True)

    def _share(self) -> Source:
        """Return the source with the threads of one of several runs at a time."""
        if self.jobs == 1:
            return self.source
        threads = self.source.threads or torch.get_num_threads()
        return replace(self.source, threads=max(1, threads // self.jobs))

    def _time(self, methods: Sequence[str]) -> None:
        missing = [name for name in methods if self.timing_of(name) is None]
        if not missing or self._is_late():
            return
        shapes = {name: self._final_shapes(name) for name in missing if METHODS[name].adapts}
        names = ("dense", *(name for name in missing if name != "dense"))
        print(f"{self.task.name}: steps of {', '.join(names)} in turns", flush=True)
        try:
            rows = self.work(self.source, Timing(names, shapes, self.rounds))
        except RuntimeError as error:
            print(f"  {error}", flush=True)
            return
        self._append(
            self.steps_csv,
            [
                {"task": self.task.name, "digest": self.digests[str(row["method"])], **row}
                for row in rows
            ],
        )

    def _final_shapes(self, method: str) -> object:
        """Return the sizes that the run at the best rate has ended with."""
        rate = self.best_rate(method)
        rows = [r for r in self.rows_of(method) if _is_selection(r) and r["rate"] == rate]
        return rows[-1]["shapes"]

    # ---- what is there ----

    def _append(self, path: Path, rows: Sequence[Row]) -> None:
        with self._lock:
            end_line(path)
            append_rows(path, rows)
            self._load()

    def _load(self) -> None:
        self.rows = latest(read_rows(self.csv))
        self.timings = read_rows(self.steps_csv)

    def _groups(self) -> Iterator[list[str]]:
        """Return the methods that come first, then the others."""
        for first in (True, False):
            group = [n for n in METHODS if n in self.methods and (n in FIRST) == first]
            if group:
                yield group

    def _is_late(self) -> bool:
        passed = time.monotonic() - self._start
        return self._is_stopped or (self.minutes is not None and passed > 60 * self.minutes)

    def _digest(self, method: str) -> str:
        task = self.task
        setup = Setup(task, SELECTION_SEED, 1e-3, task.steps, self.target)
        return digest(
            {
                "task": {**task.settings, "steps": task.steps, "clip": task.clip_norm},
                "schedule": (task.warmup_steps, task.final_rate),
                "rest": REST_LR_SCALE,
                "layers": str(task.config),
                "ratio": self.source.ratio,
                "device": task.device,
                "method": method,
                "settings": METHODS[method].settings(setup),
            }
        )


def best_rate(rows: Sequence[dict[str, Any]], task: Task, rates: Sequence[float]) -> float | None:
    """Return the rate of the best quality among the rows that are not reported, if one has any.

    Args:
        rows: Of one method.
        task: Says what is better.
        rates: Rates to choose from.
    """
    tried = {row["rate"]: row["quality"] for row in rows if _is_selection(row)}
    best: float | None = None
    for rate in sorted(set(rates) & set(tried)):
        quality = tried[rate]
        if math.isfinite(quality) and (best is None or task.is_better(quality, tried[best])):
            best = rate
    return best


def next_rate(rows: Sequence[dict[str, Any]], task: Task, rates: Sequence[float]) -> float | None:
    """Return the rate to try next; ``None`` once the best one is known.

    It is known when the rates above and below it in the grid have been tried. While all have
    failed, lower ones are tried.

    Args:
        rows: Of one method.
        task: Says what is better.
        rates: The grid.
    """
    grid = sorted(rates)
    tried = {row["rate"] for row in rows if _is_selection(row)} & set(grid)
    if not tried:
        return grid[len(grid) // 2]
    best = best_rate(rows, task, rates)
    place = grid.index(min(tried) if best is None else best)
    around = (place - 1,) if best is None else (place + 1, place - 1)
    untried = [grid[i] for i in around if 0 <= i < len(grid) and grid[i] not in tried]
    return untried[0] if untried else None


def _is_selection(row: Row) -> bool:
    return row["seed"] == SELECTION_SEED and row["budget"] == "steps"


# ---- command line ----


def main(module: str, description: str | None, arguments: Sequence[str] | None = None) -> None:
    """Run the study of a module's task and write its table and figure.

    Args:
        module: A module with ``make_task(quick, device)``.
        description: Its docstring.
        arguments: Instead of those on the command line.
    """
    options = _parser(description).parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quick = options.quick
    default = QUICK_RESULTS if quick else RESULTS / "studies"
    source = Source(module, quick, options.device, options.threads, options.ratio)
    study = Study(
        source,
        options.results or default,
        methods=options.only or tuple(METHODS),
        rates=options.rates or (QUICK_RATES if quick else RATES),
        seeds=options.seeds or (QUICK_SEEDS if quick else SEEDS),
        rounds=QUICK_ROUNDS if quick else ROUNDS,
        jobs=options.jobs,
        minutes=options.minutes,
        retry=options.retry,
    )
    if not options.table_only:
        study.run()
    print(write_report(study))


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a task of seconds, in build/studies")
    parser.add_argument("--only", type=_names, help="methods to run, with commas between them")
    parser.add_argument("--seeds", type=_of(int), help="seeds to report, with commas")
    parser.add_argument("--rates", type=_of(float), help="rates to choose from, with commas")
    parser.add_argument("--jobs", type=_count, default=1, help="runs at a time; 1 by default")
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--ratio", type=float, default=DEFAULT_RATIO, help="dense over small")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of torch; by default, torch's choice")
    parser.add_argument("--results", type=Path, help="folder of the files")
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} runs at a time; give 1 or more")
    return count
