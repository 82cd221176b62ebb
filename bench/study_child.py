"""A run of a study in a process of its own, so that its peak of memory is its own.

Started by ``bench.study`` as ``python -m bench.study_child JSON``; prints its row as JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.methods import Setup
from bench.study_search import Rates
from bench.study_task import SELECTION_SEED, Part, Task, target_params
from bench.study_train import time_steps, train
from bench.timing import Row

LONGEST_FAILURE = 200


@dataclass(frozen=True)
class Source:
    """Where a task comes from.

    Args:
        module: A module with ``make_task(quick, device, width)``.
        quick: Whether the task is one of seconds.
        device: Where it trains.
        threads: Threads of torch; its own choice if ``None``.
        ratio: How much smaller the compressed layers are to be.
        width: Size of the model's stream; the task's own choice if ``None``.
    """

    module: str
    quick: bool = False
    device: str = "cpu"
    threads: int | None = None
    ratio: float = 9.5
    width: int | None = None

    def load(self) -> Task:
        """Return the task."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        module = importlib.import_module(self.module)
        task: Task = module.make_task(self.quick, self.device, self.width)
        return task


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        method: How to train.
        seed: Seed of model and batches.
        rate: Peak learning rate of the compressed layers' weights.
        rest: That of the rest of the model, over it.
        steps: Length.
    """

    method: str
    seed: int
    rate: float
    rest: float
    steps: int


@dataclass(frozen=True)
class Timing:
    """Steps of several methods to be timed in turns.

    Args:
        methods: Which, "dense" among them.
        shapes: Method to the sizes that a run has ended with.
        rounds: Measured turns.
    """

    methods: tuple[str, ...]
    shapes: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 20


def work(source: Source, job: Job | Timing) -> list[Row]:
    """Do a job in this process and return its rows."""
    task = source.load()
    target = target_params(task, source.ratio)
    if isinstance(job, Timing):
        setup = Setup(task, SELECTION_SEED, Rates(1e-3, 1.0), task.steps, target)
        return time_steps(dict.fromkeys(job.methods, setup), job.shapes, job.rounds)
    setup = Setup(task, job.seed, Rates(job.rate, job.rest), job.steps, target)
    part: Part = "validation" if job.seed == SELECTION_SEED else "test"
    return [train(setup, job.method, part)]


def work_apart(source: Source, job: Job | Timing) -> list[Row]:
    """Do a job in a fresh process and return its rows.

    Raises:
        RuntimeError: If the process fails; its text is the last line of what it said.
        KeyboardInterrupt: If it was interrupted or killed, which says nothing about the job.
    """
    text = json.dumps({"source": asdict(source), "job": asdict(job)})
    command = [sys.executable, "-m", "bench.study_child", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        if done.returncode < 0 or lines[-1] == "KeyboardInterrupt":
            raise KeyboardInterrupt(f"a run was stopped, exit {done.returncode}")
        raise RuntimeError(f"exit {done.returncode}: {lines[-1]}"[:LONGEST_FAILURE])
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    """Do the job of the command line."""
    given = json.loads(sys.argv[1])
    kind = Timing if "methods" in given["job"] else Job
    rows = work(Source(**given["source"]), kind(**given["job"]))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
