"""Runs that train in several processes, and by themselves beside it."""

import contextlib
import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups

SPEC = TTSpec("tt", (4, 4), (4, 4), (1, 4, 8, 4, 1))
CUTTING = {"target_ratio": 0.5, "early_steps": 15, "prune_every": 5, "gamma": 0.1}
ROWS = 16


class Net(nn.Module):
    """Three layers; the one in the middle is left out where ``skips`` says so."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.layers = nn.ModuleList(TTLinear(SPEC, 16, 16, dtype=dtype) for _ in range(3))
        self.skips = False

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 1):
                x = torch.tanh(layer(x))
        return x


class Run:
    """A model in training; under DDP it sees every other row of a batch."""

    def __init__(
        self,
        model,
        rank=None,
        rank_lr=0.05,
        hook=None,
        late_wrap=False,
        ddp=None,
        check_processes=None,
        **config,
    ):
        self.model, self.rank = model, rank
        groups = param_groups(model, lr=3e-3, rank_lr=rank_lr)
        self.optimizer = torch.optim.AdamW(groups)
        self.called = model
        wrap = rank is not None and DistributedDataParallel
        if wrap and not late_wrap:
            self.called = wrap(model, **(ddp or {}))
        self.adapter = RankAdapter(
            self.called,
            self.optimizer,
            RankConfig(**{"method": "comera", **config}),
            check_processes=check_processes,
        )
        if wrap and late_wrap:
            self.called = wrap(model, **(ddp or {}))
        if not wrap and dist.is_initialized():
            self.adapter.wrapped()
        if hook:
            self.called.register_comm_hook(None, hook)

    def backward(self, step, synchronise=True, scale=1.0):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 16, dtype=torch.float64, generator=generator)
        y = torch.tanh(x.roll(1, 1))
        dtype = self.model.layers[0].cores[0].dtype
        rows = slice(None) if self.rank is None else slice(self.rank, None, 2)
        x, y = x[rows].to(dtype), y[rows].to(dtype)
        alone = synchronise or self.rank is None
        with contextlib.nullcontext() if alone else self.called.no_sync():
            task = scale * nn.functional.mse_loss(self.called(x), y)
            self.adapter.loss(task).backward()
        return task

    def step(self, number, micro_batches=1):
        self.optimizer.zero_grad()
        for micro in range(micro_batches):
            self.backward(number * micro_batches + micro, micro == micro_batches - 1)
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        self.adapter.step()
        return gradients


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    return Net(dtype)


def pair(rank, skips=False, dtype=torch.float64, **options):
    """The same model under DDP and by itself."""
    model = model_of(dtype)
    model.skips = skips
    alone = copy.deepcopy(model)
    own = ("hook", "late_wrap", "ddp", "check_processes")
    plain = {key: value for key, value in options.items() if key not in own}
    return Run(model, rank, **options), Run(alone, **plain)


def check_alike(many, one, tolerance=1e-6, message=""):
    assert many.adapter.ranks == one.adapter.ranks, message
    for (name, found), wanted in zip(
        many.model.named_parameters(), one.model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=name)


def train_alike(rank, steps=50, cuts=2, micro_batches=1, tolerance=1e-6, **options):
    """Train both and compare gradients and parameters of every step."""
    many, one = pair(rank, **{**CUTTING, **options})
    sizes = {one.adapter.size}
    for number in range(steps):
        found, wanted = (run.step(number, micro_batches) for run in (many, one))
        for f, w in zip(found, wanted, strict=True):
            if w is None:
                assert f is None or not f.any(), number
            else:
                torch.testing.assert_close(f, w, rtol=tolerance, atol=tolerance)
        check_alike(many, one, tolerance, f"step {number}")
        sizes.add(one.adapter.size)
    assert len(sizes) - 1 >= cuts, sizes
    for found, wanted in zip(many.adapter.history, one.adapter.history, strict=True):
        assert found == {**wanted, "loss": pytest.approx(wanted["loss"], rel=tolerance)}
    return many, one


def run_processes(file, tmp_path, scenario, number=2):
    """Run a test file as a script in several processes, with the name of a scenario."""
    command = [sys.executable, file, scenario]
    root = str(Path(__file__).parents[2])
    runs = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(number)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
        )
        for rank in range(number)
    ]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * number, "\n".join(errors)


def run_scenario(scenarios):
    """What such a script does: take part as one of the processes."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    name, rank, store, number = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(number)
    )
    scenarios[name](int(rank))
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo that the interpreter meets at its end abort the process now and then.
    os._exit(0)
