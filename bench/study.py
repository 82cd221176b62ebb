"""Studies: methods of training compared on one task, each at its own best rate.

What a study does, run by run, each a row of a CSV file that is appended as the run ends:

1. Every method trains at rates of one shared grid, on a seed that is not reported, and is measured
   on the data's validation part: from the middle of the grid on, until all around the best ones
   are known to be worse. There are two rates, of the compressed layers' weights and of the rest of
   the model. The best ones are the method's own from there on.
2. Steps of all methods are timed in turns, in one process.
3. Every method trains at its rate on the reported seeds: for the task's number of steps, and for
   as many as fit into the time that the dense model takes, with the schedule over all of them.

Rows that are there are not run again, so that a study adds up over several runs. A run that
fails or diverges is a row without quality.
"""

from __future__ import annotations

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
from bench.study_child import Job, Source, Timing, work_apart
from bench.study_rows import KEY, as_text, end_line, key_of, latest, mean_ms, read_rows
from bench.study_search import RATES, RESTS, Rates, best_rates, is_selection, next_rates, rates_of
from bench.study_task import SELECTION_SEED, Task, digest, target_params
from bench.timing import Row, append_rows
from comera_fx.errors import ConfigError

SEEDS = (0, 1, 2)
ROUNDS = 20
RESULT = (
    *("steps", "quality", "compressed_params", "ratio", "start_params", "mean_params"),
    *("total_params", "optimizer_bytes", "peak_bytes", "step_ms", "seconds", "cut_share"),
    *("curve", "shapes", "failure", "device"),
)
"""Columns of a row, beside its key and what ``append_rows`` adds."""
Work = Callable[[Source, Job | Timing], list[Row]]
Planned = tuple[str, str, int, Rates, int]
"""Method, budget, seed, rates and steps of a run."""


@dataclass
class Study:
    """A task, what is to be run of it, and the rows there are.

    Args:
        source: Where the task comes from.
        folder: Where the files are.
        methods: What is compared.
        rates: Rates of the compressed layers' weights to choose from.
        rests: Rates of the rest of the model to choose from, over these.
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
    rests: Sequence[float] = RESTS
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
        self.grid = [Rates(rate, rest) for rate in self.rates for rest in self.rests]
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
            chosen = [name for name in group if self.best_rates(name) is not None]
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

    def best_rates(self, method: str) -> Rates | None:
        """Return the rates of the best quality on the seed that is not reported.

        ``None``, if none gave one, or while there are others to try.
        """
        rows = self.rows_of(method)
        if next_rates(rows, self.task, self.grid) is not None:
            return None
        return best_rates(rows, self.task, self.grid)

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
        rates = self.best_rates(method)
        assert rates is not None, "methods without rates are not run"
        yield method, "steps", seed, rates, self.task.steps
        steps = self._steps_in_time(method)
        if method != "dense" and steps is not None:
            yield method, "time", seed, rates, steps

    def _steps_in_time(self, method: str) -> int | None:
        """Return how many steps of a method fit into the time of all of the dense model's."""
        timing, chosen = self.timing_of(method), self._chosen_row(method)
        if timing is None or chosen is None:
            return None
        return max(1, int(self.task.steps * timing["dense_ms"] / mean_ms(timing, chosen)))

    def _chosen_row(self, method: str) -> dict[str, Any] | None:
        """Return the run at the best rates on the seed that is not reported."""
        rates = self.best_rates(method)
        rows = [r for r in self.rows_of(method) if is_selection(r) and rates_of(r) == rates]
        return rows[-1] if rows else None

    def _each(self, do: Callable[[Any], None], items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(do, items))

    def _search(self, method: str) -> None:
        """Try rates until the best of them are known; each is a run."""
        rows = [row for row in self.rows_of(method) if row["failure"] and is_selection(row)]
        for row in rows if self.retry else ():
            self._run(method, "steps", SELECTION_SEED, rates_of(row), self.task.steps)
        tried: set[Rates] = set()
        while (rates := next_rates(self.rows_of(method), self.task, self.grid)) is not None:
            if rates in tried:  # no time is left for it
                return
            tried.add(rates)
            self._run(method, "steps", SELECTION_SEED, rates, self.task.steps)

    def _run(self, method: str, budget: str, seed: int, rates: Rates, steps: int) -> None:
        values = (self.task.name, method, budget, seed, *rates, self.digests[method])
        key: Row = dict(zip(KEY, values, strict=True))
        done = {key_of(row): row for row in self.rows}.get(key_of(key))
        if self._is_late() or (done and not (self.retry and done["failure"])):
            return
        shown = f"rates {rates.rate:g} x{rates.rest:g}"
        name = f"{self.task.name}: {method}, seed {seed}, {shown}, {steps} steps"
        print(name, flush=True)
        found: Row = dict.fromkeys(RESULT, "")
        try:
            found |= self.work(self._share(), Job(method, seed, *rates, steps))[0]
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
        chosen = {name: self._chosen_row(name) for name in missing if METHODS[name].adapts}
        shapes = {name: row["shapes"] for name, row in chosen.items() if row is not None}
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
        setup = Setup(task, SELECTION_SEED, Rates(1e-3, 1.0), task.steps, self.target)
        return digest(
            {
                "task": {**task.settings, "steps": task.steps, "clip": task.clip_norm},
                "schedule": (task.warmup_steps, task.final_rate),
                "layers": str(task.config),
                "ratio": self.source.ratio,
                "device": task.device,
                "method": method,
                "settings": METHODS[method].settings(setup),
            }
        )
