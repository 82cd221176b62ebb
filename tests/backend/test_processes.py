"""The backend in other processes: inductor and its caches, DistributedDataParallel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(code: str, *args: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ".", **environment},
    )


def output_of(run: subprocess.Popen) -> str:
    out, error = run.communicate(timeout=300)
    assert run.returncode == 0, error
    return out


INDUCTOR = """
import sys
import torch
from torch._dynamo.utils import counters
from tests.backend.models import (
    WIDTH, SelfAttention, assert_as_eager, assert_expanded, compiled, counted, floats
)

torch.set_num_threads(1)
model = SelfAttention().eval()
if len(sys.argv) > 2:
    torch.compiler.load_cache_artifacts(open(sys.argv[2], "rb").read())
assert_as_eager(compiled(model, inner="inductor"), model, floats(2, 4, WIDTH))
assert counted("graphs", "tt_layers", "expanded") == [1, 3, 3]
if sys.argv[1] == "cold":
    assert_expanded(3)
    artifacts, _ = torch.compiler.save_cache_artifacts()
    open(sys.argv[2], "wb").write(artifacts) if len(sys.argv) > 2 else None
else:
    assert counted("cached_graphs", "forward_graphs", "backward_graphs") == [1, 0, 0]
print("equal")
"""


@pytest.mark.slow
def test_inductor_and_a_second_process_with_its_cache(tmp_path):
    folder = str(tmp_path / "cache")
    for kind in ("cold", "warm"):
        assert "equal" in output_of(start(INDUCTOR, kind, TORCHINDUCTOR_CACHE_DIR=folder))


SAVED = INDUCTOR.replace("if len(sys.argv) > 2:\n    torch", 'if sys.argv[1] == "warm":\n    torch')


@pytest.mark.slow
def test_artifacts_of_the_cache_are_saved_and_loaded(tmp_path):
    file = tmp_path / "artifacts"
    for kind in ("cold", "warm"):
        folder = str(tmp_path / kind)  # the second process finds nothing but the file
        assert "equal" in output_of(start(SAVED, kind, file, TORCHINDUCTOR_CACHE_DIR=folder))


PARALLEL = """
import copy, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tests.backend.models import WIDTH, Stack, compiled, counted, floats

rank, place = int(sys.argv[1]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = Stack(4)
alone = copy.deepcopy(model)
if place == "inside":
    parallel = DDP(compiled(model))
else:
    # Several buckets, each a graph of its own; torch counts biases, not what is in lists.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 64
    parallel = compiled(DDP(model, bucket_cap_mb=64 / 2**20), fullgraph=False)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
for step in range(3):
    x = floats(8, WIDTH, seed=step)
    for optimizer in optimizers:
        optimizer.zero_grad()
    parallel(x[rank::2]).square().mean().backward()
    alone(x).square().mean().backward()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    for optimizer in optimizers:
        optimizer.step()
graphs, *others = counted("graphs", "tt_layers", "expanded", "forward_graphs", "backward_graphs")
assert others == [4, 4, graphs, graphs], others
assert (graphs > 1) == (place == "outside"), graphs
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_compiled_inside_and_outside_of_ddp(tmp_path, place):
    runs = [start(PARALLEL, rank, tmp_path / "store", place) for rank in range(2)]
    for run in runs:
        assert "equal" in output_of(run)


EXPORTED = """
import sys
import torch
import comera_fx
from tests.backend.models import CONFIG

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(40, 16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
)
ids = torch.randint(0, 40, (2, 6))
model = comera_fx.optimize(model, ids, config=CONFIG).eval()
tokens = torch.export.Dim("tokens", min=2, max=64)
program = torch.export.export(model, (ids,), dynamic_shapes=({1: tokens},))
names = {str(node.target) for node in program.graph.nodes}
assert any(name.startswith("comera_fx.") for name in names), names
decomposed = program.run_decompositions()
names = {str(node.target) for node in decomposed.graph.nodes}
assert not any(name.startswith("comera_fx.") for name in names), names
for each, file in ((program, "whole"), (decomposed, "parts")):
    path = torch._inductor.aoti_compile_and_package(each, package_path=f"{sys.argv[1]}/{file}.pt2")
    packaged = torch._inductor.aoti_load_package(path)
    for length in (6, 11):
        ids = torch.randint(0, 40, (2, length))
        torch.testing.assert_close(packaged(ids), model(ids), rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_an_exported_model_is_packaged_ahead_of_time(tmp_path):
    assert "equal" in output_of(start(EXPORTED, tmp_path))
