"""How long one version of a network takes to compile, in a process of its own.

``bench.compile`` starts it twice with one folder for what compilers cache: cold, then warm.
Compiling is what the first training step takes more than the third; a model's building and the
imports of torch and comera_fx come before.
Run: ``python -m bench.compile_time WORKLOAD VERSION [--device cpu] [--threads 2] [--small]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import torch

from bench.compiled import make_trainer
from bench.tasks import Trainer, make_task
from bench.workloads import SMALL_TRAINING, TRAINING, Training

Figures = dict[str, float]


def cold_and_warm(workload: Training, version: str, device: str, *, small: bool) -> Figures:
    """Return ``cold_s``, ``warm_s``, and the numbers of ``graphs`` and ``graph_breaks``."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cold, warm = (_in_new_process(workload, version, device, folder, small) for _ in range(2))
    return {
        "cold_s": round(cold["seconds"], 2),
        "warm_s": round(warm["seconds"], 2),
        "graphs": cold["graphs"],
        "graph_breaks": cold["graph_breaks"],
    }


def _in_new_process(
    workload: Training, version: str, device: str, folder: str, small: bool
) -> Figures:
    command = [sys.executable, "-m", "bench.compile_time", workload.name, version]
    command += ["--device", device, "--threads", str(torch.get_num_threads())]
    command += ["--dropout", str(workload.dropout), *(["--small"] if small else [])]
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **caches},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return cast(Figures, json.loads(done.stdout.splitlines()[-1]))


def measure(workload: Training, version: str, device: str, dropout: float) -> Figures:
    """Return what compiling takes in this process, and into how many graphs."""
    trainer = make_trainer(version, make_task(workload, device), dropout)
    first, _, third = (_step_seconds(trainer, device) for _ in range(3))
    counters = torch._dynamo.utils.counters
    return {
        "seconds": max(first - third, 0.0),
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def _step_seconds(trainer: Trainer, device: str) -> float:
    start = time.perf_counter()
    trainer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measure one version; the last line printed is the figures, as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workload")
    parser.add_argument("version")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    workloads = {w.name: w for w in (SMALL_TRAINING if options.small else TRAINING)}
    workload = workloads[options.workload]
    print(json.dumps(measure(workload, options.version, options.device, options.dropout)))


if __name__ == "__main__":
    main()
