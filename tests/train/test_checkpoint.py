"""Saved runs go on to the same numbers, wherever they were stopped and whatever killed them."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import latest_run, load_run, save_run
from comera_fx.train.saving.files import read_state, write_atomically
from comera_fx.train.saving.random_states import random_states, restore_random_states
from tests.train.runs import END, Loop, as_lists, optimized

ROOT = Path(__file__).parents[2]
STAGES = {
    "warm-up": lambda loop: loop.step == 3,
    "early": lambda loop: loop.adapter.stage == "early" and loop.step % 5 == 3,
    "late": lambda loop: loop.adapter.stage == "late",
    "just after a cut": lambda loop: loop.adapter.size < loop.adapter.initial_size,
    "target met": lambda loop: loop.adapter.size <= loop.adapter.target_size,
}


def check_resume(make, stage, path):
    """Compare a run with one that was saved as it came to a stage, and went on in a new loop."""
    loop = make(0)
    while not STAGES[stage](loop):
        loop.train(loop.step + 1)
        assert loop.step < 100
    if stage == "just after a cut":
        assert loop.adapter.size > loop.adapter.target_size
    loop.save(path)
    end = loop.step + 12
    whole = loop.train(end).numbers()
    assert make(1).load(path).train(end).numbers() == whole


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [("adamw foreach", False), ("adamw foreach", True), ("adamw fused", False), ("sgd", False)],
)
def test_a_run_goes_on_to_the_same_numbers(optimizer, plain, stage, tmp_path):
    check_resume(lambda seed: Loop(seed, optimizer, plain), stage, tmp_path / "run.pt")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "proximal", "regrow": 0.1, "shrink_steps": 20},
        {"method": "rounding", "regrow": 0.1, "shrink_steps": 20},
    ],
)
def test_methods_of_singular_values_go_on_too(settings, stage, tmp_path):
    check_resume(lambda seed: Loop(seed, **settings), stage, tmp_path / "run.pt")


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_numbers_differ_without_one_of_the_random_states(kind, tmp_path):
    loop = Loop().train(12)
    loop.save(tmp_path / "run.pt")
    whole = loop.train(20).numbers()
    state = read_state(tmp_path / "run.pt")
    assert Loop(1).load(tmp_path / "run.pt").train(20).numbers() == whole
    state["random"][0][kind] = random_states()[kind]
    write_atomically(tmp_path / "run.pt", state)
    assert Loop(1).load(tmp_path / "run.pt").train(20).numbers() != whole


def test_random_states_of_devices_that_are_gone_are_said():
    states = random_states()
    states["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    if torch.cuda.is_available():
        states["cuda"][:-1] = torch.cuda.get_rng_state_all()
    with pytest.warns(UserWarning, match=r"random states of \d CUDA devices, of which \d are here"):
        restore_random_states(states)


def test_states_without_numpy_change_nothing_in_it(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        states = random_states()
    assert states["numpy"] is None
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    restore_random_states(states)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64"])
def test_other_generators_of_numpy_are_restored_where_they_are_the_same(kind, tmp_path):
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, kind)(0))
    try:
        write_atomically(tmp_path / "states.pt", random_states())
        expected = np.random.rand(3).tolist()  # noqa: NPY002
        states = read_state(tmp_path / "states.pt")
        restore_random_states(states)
        assert np.random.rand(3).tolist() == expected  # noqa: NPY002
    finally:
        np.random.set_bit_generator(own)
    with pytest.warns(UserWarning, match=f"NumPy drawing from {kind}, and here .* MT19937"):
        restore_random_states(states)


def test_a_model_that_was_loaded_before_can_be_gone_back_with(tmp_path):
    loop = Loop().train(10)
    loop.save(tmp_path / "run.pt")
    whole = loop.train(60).numbers()
    assert loop.adapter.size < loop.adapter.initial_size
    assert loop.load(tmp_path / "run.pt").step == 10
    assert all(p.grad is None for p in loop.model.parameters())
    assert loop.train(60).numbers() == whole


def test_two_models_two_optimizers_and_a_generator(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        models = [nn.Linear(3, 3), nn.Linear(3, 3)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [2, 5]),
            torch.optim.lr_scheduler.SequentialLR(
                optimizers[1],
                [
                    torch.optim.lr_scheduler.LinearLR(optimizers[1]),
                    torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.1, total_steps=20),
                ],
                milestones=[3],
            ),
        ]
        generator = torch.Generator().manual_seed(seed)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0 + seed)
        return {
            "first": models[0],
            "second": models[1],
            "optimizer": optimizers,
            "scheduler": schedulers,
            "generator": generator,
            "scaler": scaler,
            "nothing": None,
        }

    def train(parts, steps):
        for _ in range(steps):
            x = torch.randn(4, 3, generator=parts["generator"])
            loss = (parts["first"](x) + parts["second"](x)).square().mean()
            for optimizer in parts["optimizer"]:
                optimizer.zero_grad()
            parts["scaler"].scale(loss).backward()
            for optimizer, scheduler in zip(parts["optimizer"], parts["scheduler"], strict=True):
                parts["scaler"].step(optimizer)
                scheduler.step()
            parts["scaler"].update()
        states = [
            each.state_dict() for key in ("first", "second", "scaler") for each in [parts[key]]
        ]
        states += [each.state_dict() for key in ("optimizer", "scheduler") for each in parts[key]]
        return repr(as_lists(states))

    parts = make(0)
    train(parts, 4)
    save_run(tmp_path / "run.pt", step=4, **parts)
    again = make(1)
    assert load_run(tmp_path / "run.pt", **again).extra is None
    assert train(again, 6) == train(parts, 6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_and_plain_models_take_each_others_checkpoints(tmp_path):
    loop = Loop().train(7)
    compiled = torch.compile(loop.model, backend="eager")
    save_run(tmp_path / "run.pt", step=7, model=compiled)
    other = Loop(1)
    load_run(tmp_path / "run.pt", model=other.model)
    assert repr(as_lists(other.model.state_dict())) == repr(as_lists(loop.model.state_dict()))


def test_a_model_alone_is_loaded_for_evaluation(tmp_path):
    loop = Loop().train(60)
    loop.save(tmp_path / "run.pt")
    loop.model.eval()
    x = torch.randn(4, 32)
    model = optimized().eval()
    before = torch.get_rng_state()
    assert load_run(tmp_path / "run.pt", strict=False, model=model).step == 60
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(x), loop.model(x))
    load_run(tmp_path / "run.pt", strict=False, model=model.double())


def test_a_layer_called_twice_takes_other_ranks(tmp_path):
    saved, fresh = (
        TTLinear(TTSpec("tt", (4, 4), (4, 4), (1, rank, rank, rank, 1)), 16, 16) for rank in (2, 4)
    )
    save_run(tmp_path / "run.pt", step=0, model=nn.Sequential(saved, nn.Tanh(), saved))
    model = nn.Sequential(fresh, nn.Tanh(), fresh)
    load_run(tmp_path / "run.pt", model=model)
    assert fresh.spec.ranks == (1, 2, 2, 2, 1)
    assert torch.equal(fresh.core_1, saved.core_1)


# ---- kills ----


def start(folder, kill_in=0):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.runs", str(folder), str(kill_in)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def undisturbed():
    return Loop(1).train(END).numbers()


def test_a_run_killed_in_the_middle_of_a_save_goes_on_from_the_one_before(tmp_path):
    with start(tmp_path, kill_in=30) as process:
        process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name[:17] for name in names] == [f"step-{step:09d}.pt" for step in (28, 29, 30)]
    assert names[2].endswith(".tmp")
    loop = Loop(2).load(tmp_path)
    assert loop.step == 29
    loop.train(30).save(tmp_path, keep=2)
    assert not list(tmp_path.glob("*.tmp"))
    assert loop.train(END).numbers() == undisturbed()


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_numbers(tmp_path):
    rng = random.Random(0)
    kills_in_saves = 0
    for kill in range(16):
        with start(tmp_path) as process:
            for _ in range(rng.randrange(1, 4)):
                process.stdout.readline()
            if kill % 2:  # while the draft is there
                while not list(tmp_path.glob("*.tmp")) and process.poll() is None:
                    pass
            for _ in range(rng.randrange(20_000)):
                pass
            process.kill()
        kills_in_saves += bool(list(tmp_path.glob("*.tmp")))
        path = latest_run(tmp_path)
        if path is not None:
            assert read_state(path)["step"] == int(path.stem[5:])
    assert kills_in_saves >= 3
    with start(tmp_path) as process:
        process.communicate(timeout=300)
    assert process.returncode == 0
    loop = Loop(3).load(tmp_path)
    assert loop.step == END
    assert loop.numbers() == undisturbed()


# ---- many processes ----

CODE = """
import sys, warnings
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from comera_fx.errors import RankError
from comera_fx.train.saving import checkpoint
from tests.train.runs import Loop, torch

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def start(seed):
    loop = Loop(seed)
    loop.model = DistributedDataParallel(loop.model)
    torch.manual_seed(100 * seed + rank)  # dropout of its own in every process
    return loop


writes, write = [], checkpoint.write_atomically
checkpoint.write_atomically = lambda path, state: (writes.append(path), write(path, state))
loop = start(0).train(22)
loop.save(f"{folder}/run.pt")
assert len(writes) == (rank == 0)
whole = loop.train(30).numbers()
assert loop.adapter.size < loop.adapter.initial_size
again = start(1).load(f"{folder}/run.pt")
again.losses = loop.losses[:22]  # extra is that of the first
assert again.train(30).numbers() == whole
draws = [None, None]
dist.all_gather_object(draws, torch.rand(1).item())
assert draws[0] != draws[1]

def broken(path, state):
    raise OSError("disk full")

checkpoint.write_atomically = broken
try:
    again.save(f"{folder}/run.pt")
except (RankError, OSError) as error:
    print(str(error).splitlines()[:2])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_save_once_and_go_on_with_their_own_random_states(tmp_path):
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    said = [run.communicate(timeout=300)[0].strip() for run in runs]
    assert said[0] == "['disk full']"
    assert "process 0 could not write" in said[1]
    assert "OSError: disk full" in said[1]
    with pytest.warns(
        UserWarning, match="saved by 2 processes and the run goes on with another number"
    ):
        assert Loop(1).load(tmp_path / "run.pt").step == 22
