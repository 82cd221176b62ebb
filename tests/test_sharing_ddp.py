"""Sharing under DistributedDataParallel: two processes, gradients equal to one process's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import copy, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import comera_fx
from comera_fx.share import layers as share_layers
from comera_fx.sharing import uninstall
import dataclasses

rank, skips = int(sys.argv[1]), sys.argv[3] == "skips"
decide = share_layers.Layers._decide
share_layers.Layers._decide = lambda *args: dataclasses.replace(
    decide(*args), makes=True, uses=True
)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.skips = False

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 2):
                x = torch.tanh(layer(x))
        return x


torch.manual_seed(0)
config = comera_fx.OptimizeConfig(init="random", max_rank=6, min_params=0, only_if_faster=False)
model = comera_fx.optimize(Net(), torch.randn(4, 48), config=config).double()
model.skips = skips
alone = copy.deepcopy(model)
uninstall(alone)
parallel = DDP(model, find_unused_parameters=skips)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
for step in range(3):
    x = torch.randn(8, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    for optimizer in optimizers:
        optimizer.zero_grad()
    parallel(x[rank::2]).square().mean().backward()
    alone(x).square().mean().backward()
    for (name, found), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        if wanted.grad is None:
            assert found.grad is None or not found.grad.any(), name
        else:
            torch.testing.assert_close(found.grad, wanted.grad, msg=name)
    for optimizer in optimizers:
        optimizer.step()
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "skips"])
def test_gradients_of_two_processes_equal_those_of_one(tmp_path, kind):
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), str(tmp_path / "store"), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    for run in runs:
        out, error = run.communicate(timeout=120)
        assert run.returncode == 0, error
        assert "equal" in out
