"""bench.distributed: what is sent shrinks with the ranks, and torchrun runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.distributed import QUICK, measure, start

ROOT = Path(__file__).parents[2]


@pytest.fixture
def one_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield start()
    dist.destroy_process_group()


def test_fewer_bytes_are_sent_after_cuts(one_process):
    dense_bytes, rows = measure(QUICK, torch.device("cpu"))
    first, last = rows[0], rows[-1]
    assert dense_bytes > first["sent_bytes"] > last["sent_bytes"]
    cut = 4 * (first["tt_params"] - last["tt_params"])
    assert 0 < cut == first["sent_bytes"] - last["sent_bytes"]
    assert last["loss"] < first["loss"]


@pytest.mark.slow
def test_torchrun_runs_it_in_two_processes():
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node=2", "-m", "bench.distributed", "--quick"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "2 processes; all-reduced a step: dense" in run.stdout
