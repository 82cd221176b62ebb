"""Saved runs: the same numbers after a resume or a kill, and nothing changed by what is refused.

A run that is to be killed runs this file as a script: ``main``.
"""

import copy
import os
import random
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from comera_fx import OptimizeConfig, optimize
from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.train import RankAdapter, latest_run, load_run, param_groups, save_run
from comera_fx.train import files as files_module
from comera_fx.train.files import read_state, write_atomically

SETTINGS = {
    "target_ratio": 0.5,
    "warmup_steps": 5,
    "early_steps": 10,
    "rho": 0.5,
    "prune_every": 5,
}
STAGES = {
    "warm-up": lambda loop: loop.step == 3,
    "early": lambda loop: loop.adapter.stage == "early" and loop.step % 5 == 3,
    "late": lambda loop: loop.adapter.stage == "late",
    "just after a cut": lambda loop: loop.adapter.size < loop.adapter.initial_size,
    "target met": lambda loop: loop.adapter.size <= loop.adapter.target_size,
}
OPTIMIZERS = {
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
}


class Loop:
    """A training loop as users write it: a dense model, optimised, with dropout and a schedule.

    Args:
        seed: Of the weights; a resumed run has another, and its numbers come from the file.
        optimizer: A name in ``OPTIMIZERS``.
        plain: Whether the optimizer gets ``model.parameters()`` instead of groups.
    """

    def __init__(self, seed=0, optimizer="adamw foreach", plain=False):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - users' loops do
        dense = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 32))
        config = OptimizeConfig(
            init="random", max_rank=8, min_params=0, only_if_faster=False, seed=seed
        )
        self.model = optimize(dense, config=config)
        lr = 0.1 if optimizer == "sgd" else 3e-3
        groups = (
            [{"params": list(self.model.parameters()), "lr": lr}]
            if plain
            else param_groups(self.model, lr=lr, rank_lr=20 * lr)
        )
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.adapter = RankAdapter(self.model, self.optimizer, RankConfig(**SETTINGS))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=200)
        self.step = 0
        self.losses = []

    @property
    def parts(self):
        names = ("model", "optimizer", "adapter", "scheduler")
        return {name: getattr(self, name) for name in names}

    def train(self, until):
        while self.step < until:
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(self.step))
            x = x * (1 + 0.01 * random.random()) + 0.01 * np.random.rand()  # noqa: NPY002
            task = nn.functional.mse_loss(self.model(x), torch.tanh(x.roll(1, 1)))
            self.optimizer.zero_grad()
            self.adapter.loss(task).backward()
            self.optimizer.step()
            self.adapter.step()
            self.scheduler.step()
            self.step += 1
            self.losses.append(task.item())
        return self

    def save(self, path, **settings):
        extra = {"losses": self.losses}
        return save_run(path, step=self.step, extra=extra, **settings, **self.parts)

    def load(self, path):
        run = load_run(path, **self.parts)
        self.step, self.losses = run.step, list(run.extra["losses"])
        return self

    def numbers(self):
        """Every number of the run, exactly."""
        states = [part.state_dict() for part in self.parts.values()]
        draws = (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002
        return repr((as_lists(states), self.losses, draws))


def as_lists(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(entry) for key, entry in value.items()}
    return [as_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [("adamw foreach", False), ("adamw foreach", True), ("adamw fused", False), ("sgd", False)],
)
def test_a_run_goes_on_to_the_same_numbers(optimizer, plain, stage, tmp_path):
    loop = Loop(0, optimizer, plain)
    while not STAGES[stage](loop):
        loop.train(loop.step + 1)
        assert loop.step < 60
    if stage == "just after a cut":
        assert loop.adapter.size > loop.adapter.target_size
    loop.save(tmp_path / "run.pt")
    end = loop.step + 12
    whole = loop.train(end).numbers()
    again = Loop(1, optimizer, plain).load(tmp_path / "run.pt")
    assert again.train(end).numbers() == whole


def test_numbers_differ_without_any_one_part_of_what_is_saved(tmp_path, monkeypatch):
    loop = Loop().train(12)
    loop.save(tmp_path / "run.pt")
    whole = loop.train(20).numbers()
    whole_random = read_state(tmp_path / "run.pt")["random"][0]
    for kind in whole_random:
        again = Loop(1)
        if kind != "cuda":
            kept = files_module.read_state(tmp_path / "run.pt")
            own = {"torch": torch.get_rng_state(), "python": random.getstate()}
            state = np.random.get_state()  # noqa: NPY002
            own["numpy"] = [state[1].tolist(), *state[2:]]
            kept["random"][0][kind] = own[kind]
            write_atomically(tmp_path / "other.pt", kept)
            assert again.load(tmp_path / "other.pt").train(20).numbers() != whole, kind


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
    loop.parts["model"]
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
    dense = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 32))
    config = OptimizeConfig(init="random", max_rank=8, min_params=0, only_if_faster=False)
    model = optimize(dense, config=config).eval()
    before = torch.get_rng_state()
    assert load_run(tmp_path / "run.pt", strict=False, model=model).step == 60
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(x), loop.model(x))
    load_run(tmp_path / "run.pt", strict=False, model=model.double())


# ---- what is refused ----


def other_size():
    loop = Loop(1)
    loop.model[3].bias = nn.Parameter(torch.zeros(33))
    return loop


def other_modes():
    loop = Loop(1)
    core = loop.model[3].core_1
    core.data = core.data[:, :1]
    return loop


def other_dtype():
    loop = Loop(1)
    loop.model[0].bias.data = loop.model[0].bias.data.double()
    return loop


def other_layers():
    loop = Loop(1)
    loop.model.append(nn.Linear(32, 4))
    return loop


def without_a_layer():
    loop = Loop(1)
    del loop.model[3]
    return loop


def other_optimizer():
    return Loop(1, "sgd")


def other_groups():
    return Loop(1, plain=True)


def other_order():
    loop = Loop(1)
    loop.optimizer.param_groups[0]["params"].reverse()
    return loop


def other_scheduler():
    loop = Loop(1)
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3)
    return loop


def other_exclusions():
    loop = Loop(1)
    loop.adapter = None
    loop.optimizer.param_groups[-1]["params"].clear()
    loop.adapter = RankAdapter(loop.model, loop.optimizer, RankConfig(exclude=("3",)))
    loop.optimizer.param_groups[-1]["params"].extend(loop.model[3].rank_weights)
    return loop


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (other_size, r"another model\n.*3.bias of shape \(33,\)\n.*\(32,\), as in the file"),
        (other_modes, r"another model\n.*3.core_1 of shape"),
        (other_dtype, r"another model\n.*0.bias of torch.float64\n.*torch.float32"),
        (other_layers, r"another model\n.*not in the file: 4.weight, 4.bias"),
        (without_a_layer, r"another model\n.*only in the file: 3.core_0, .* and \d more"),
        (other_optimizer, r"'optimizer' is of another kind.*\n.*a SGD\n.*a AdamW"),
        (other_groups, r"another optimizer\n.*groups of \["),
        (other_order, r"another optimizer\n.*model.*in the place of model"),
        (other_scheduler, r"'scheduler' is of another kind.*\n.*StepLR\n.*CosineAnnealingLR"),
        (other_exclusions, r"another adapter\n.*layer missing or in another place: 3"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(make, problem, tmp_path):
    Loop().train(35).save(tmp_path / "run.pt")
    loop = make()
    before = copy.deepcopy([part.state_dict() for part in loop.parts.values()])
    draws = torch.get_rng_state()
    with pytest.raises(RankError, match=problem) as caught:
        loop.load(tmp_path / "run.pt")
    assert len(str(caught.value).splitlines()) == 4
    assert torch.equal(torch.get_rng_state(), draws)
    after = [part.state_dict() for part in loop.parts.values()]
    assert repr(as_lists(after)) == repr(as_lists(before))


def rewrite(path, change):
    state = read_state(path)
    change(state)
    write_atomically(path, state)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path):
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda each: each.file_size)
        found = record.header_offset + 30 + len(record.filename) + 200
    content = bytearray(path.read_bytes())
    content[found] ^= 1
    path.write_bytes(content)


def inconsistent_ranks(state):
    model = state["parts"]["model"]["state"]
    model["3.core_1"] = model["3.core_1"][1:]


def other_weight_length(state):
    model = state["parts"]["model"]["state"]
    model["3.rank_weight_1"] = model["3.rank_weight_1"][1:]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.unlink(), "there is no checkpoint"),
        (cut_short, r"cannot be read as a checkpoint\n.*BadZipFile"),
        (flip_a_bit, r"cannot be read as a checkpoint\n.*has changed since it was written"),
        (lambda path: path.write_bytes(b""), "cannot be read as a checkpoint"),
        (lambda path: path.write_bytes(b"no checkpoint"), "cannot be read as a checkpoint"),
        (lambda path: torch.save(nn.Linear(1, 1), path), "cannot be read .*\n.*UnpicklingError"),
        (lambda path: torch.save({"step": 3}, path), r"was not written by save_run\n.*a dict"),
        (lambda path: torch.save([3], path), r"was not written by save_run\n.*a list"),
        (
            lambda path: rewrite(path, lambda state: state.update(version=7)),
            r"another version of comera_fx\n.*format 7\n.*format 1",
        ),
        (
            lambda path: rewrite(path, lambda state: state["parts"].pop("adapter")),
            r"other parts than were given\n.*not in the file: adapter\n.*model, optimizer, sch",
        ),
        (
            lambda path: rewrite(
                path, lambda state: state["parts"]["adapter"]["state"].pop("pushed")
            ),
            r"another adapter\n.*no entry pushed",
        ),
        (lambda path: rewrite(path, inconsistent_ranks), r"another model\n.*3.core_1 of shape"),
        (lambda path: rewrite(path, other_weight_length), r"another model\n.*3.rank_weight_1 of"),
    ],
)
def test_files_that_are_no_checkpoint_of_the_run(damage, problem, tmp_path):
    path = tmp_path / "run.pt"
    loop = Loop().train(2)
    loop.save(path)
    damage(path)
    before = repr(as_lists(loop.model.state_dict()))
    with pytest.raises(RankError, match=problem) as caught:
        loop.load(path)
    assert len(str(caught.value).splitlines()) == 4
    assert repr(as_lists(loop.model.state_dict())) == before


def test_a_part_that_is_not_given_is_said(tmp_path):
    loop = Loop()
    loop.save(tmp_path / "run.pt")
    with pytest.raises(RankError, match=r"not given: adapter, scheduler\n(.*\n)*.*strict=False"):
        load_run(tmp_path / "run.pt", model=loop.model, optimizer=loop.optimizer)


def test_a_model_with_an_adapter_and_a_file_without(tmp_path):
    dense = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 32))
    config = OptimizeConfig(init="random", max_rank=8, min_params=0, only_if_faster=False)
    model = optimize(dense, config=config)
    save_run(tmp_path / "run.pt", step=0, model=model)
    with pytest.raises(RankError, match="the saved run had no RankAdapter"):
        load_run(tmp_path / "run.pt", model=Loop().model)
    load_run(tmp_path / "run.pt", model=model)


def test_a_scaler_that_was_off_gives_nothing_to_one_that_is_on(tmp_path):
    save_run(tmp_path / "run.pt", step=0, scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(RankError, match=r"another scaler\n.*no entry scale"):
        load_run(tmp_path / "run.pt", scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"step": -1}, "counts steps\n.*step=-1"),
        ({"step": 1.5}, "counts steps"),
        ({"step": 1, "keep": 0}, "keep nothing\n.*keep=0"),
        ({"step": 1, "model": 3}, "'model' is nothing that could be saved.*\n.*int"),
        ({"step": 1, "model": [None]}, r"'model\[0\]' is nothing"),
        ({"step": 1, "model": None}, "no part to save"),
        ({"step": 1, "keep": 2, "path": "file"}, "with keep into a folder\n.*a file"),
        ({"step": 1, "path": "folder"}, "writes a file.*\n.*a folder"),
        (
            {"step": 1, "extra": {"seen": [1, {2: RankConfig()}]}},
            r"would refuse to read\n.*extra\['seen'\]\[1\]\[2\], a RankConfig: ",
        ),
        ({"step": 1, "extra": lambda: 0}, r"would refuse to read\n.*extra, a function"),
        (
            {"step": 1, "extra": type("Words", (dict,), {})(a=1)},
            r"would refuse to read\n.*extra, a Words",
        ),
    ],
)
def test_saves_that_are_refused_leave_what_was_there(settings, problem, tmp_path):
    (tmp_path / "folder").mkdir()
    save_run(tmp_path / "file", step=0, model=nn.Linear(1, 1))
    before = (tmp_path / "file").read_bytes()
    settings = {"path": "file", "model": nn.Linear(1, 1), **settings}
    settings["path"] = tmp_path / settings["path"]
    with pytest.raises(RankError, match=problem) as caught:
        save_run(**settings)
    assert len(str(caught.value).splitlines()) == 4
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == before


# ---- files ----


def test_the_last_checkpoints_are_kept_and_found_by_step(tmp_path):
    model = nn.Linear(1, 1)
    folder = tmp_path / "a" / "b"
    assert latest_run(folder) is None
    for step in (8, 9, 10, 11):
        path = save_run(folder, step=step, keep=3, model=model)
        assert latest_run(folder) == path
    names = [f"step-{step:09d}.pt" for step in (9, 10, 11)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert load_run(folder, model=model).step == 11
    assert load_run(folder / names[0], model=model).path.name == names[0]
    (folder / names[2]).write_bytes(b"")
    with pytest.raises(RankError, match="such as an earlier one of its folder"):
        load_run(folder, model=model)
    with pytest.raises(RankError, match=r"there is no checkpoint\n.*a/step-\*.pt"):
        load_run(tmp_path / "a", model=model)


def test_going_back_keeps_what_is_saved_and_says_what_is_later(tmp_path):
    model = nn.Linear(1, 1)
    for step in (10, 20, 30):
        save_run(tmp_path, step=step, keep=3, model=model)
    with pytest.warns(UserWarning, match="a checkpoint of step 30, later than step 15"):
        save_run(tmp_path, step=15, keep=1, model=model)
    assert sorted(int(path.stem[5:]) for path in tmp_path.iterdir()) == [15, 20, 30]


def test_drafts_of_killed_saves_go_and_those_of_others_stay(tmp_path):
    stale = [f"{name}.{'0123456789ab'}.tmp" for name in ("step-000000001.pt", "run[1].pt")]
    others = ["step-000000001.pt.bak", "other.pt.0123456789ab.tmp", "run1.pt.0123456789ab.tmp"]
    for name in (*stale, *others):
        (tmp_path / name).write_bytes(b"half")
    assert latest_run(tmp_path) is None
    save_run(tmp_path, step=2, keep=1, model=nn.Linear(1, 1))
    assert not (tmp_path / stale[0]).exists()
    save_run(tmp_path / "run[1].pt", step=2, model=nn.Linear(1, 1))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "step-000000002.pt", "run[1].pt"}


def test_a_file_is_synced_then_renamed_then_its_folder_synced(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor):
        calls.append("folder" if os.path.isdir(f"/dev/fd/{descriptor}") else "file")  # noqa: PTH112
        fsync(descriptor)

    def noted_replace(path, target):
        calls.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_atomically(tmp_path / "run.pt", {"a": torch.ones(3)})
    assert calls == ["file", "rename", "folder"]
    assert read_state(tmp_path / "run.pt")["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["save", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_draft(where, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("disk full")

    write_atomically(tmp_path / "run.pt", {"a": 1})
    place = {"save": torch, "fsync": os, "replace": Path}[where]
    monkeypatch.setattr(place, where, broken)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "run.pt", {"a": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert read_state(tmp_path / "run.pt") == {"a": 1}


def test_any_changed_byte_is_refused_or_harmless(tmp_path):
    path = tmp_path / "run.pt"
    state = {"weights": torch.arange(50), "name": "first"}
    write_atomically(path, state)
    content = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = read_state(path)
        except RankError:
            refused += 1
        else:
            assert found["weights"].tolist() == list(range(50))
            assert found["name"] == "first"
    assert refused > 50


# ---- kills ----

END = 45


def main(folder, kill_in):
    """Train to the end with a checkpoint at every step; say each step before it is saved."""
    torch.set_num_threads(1)
    loop = Loop(1)
    if latest_run(folder) is not None:
        loop.load(folder)
    save = torch.save

    def half(state, path):
        save(state, path)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    while loop.step < END:
        loop.train(loop.step + 1)
        if loop.step == kill_in:
            torch.save = half
        print(loop.step, flush=True)  # noqa: T201 - what the test waits for
        loop.save(folder, keep=2)


def start(folder, kill_in=0):
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), str(kill_in)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
