"""What is refused when runs are saved and loaded, and that it has changed nothing."""

import copy
import zipfile

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.train import RankAdapter, latest_run, load_run, save_run
from comera_fx.train.saving.files import read_state, write_atomically
from tests.train.runs import Loop, as_lists, optimized


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


def other_method():
    return Loop(1, method="rounding")


def other_exclusions():
    loop = Loop(1)
    loop.adapter = None
    loop.optimizer.param_groups[-1]["params"].clear()
    loop.adapter = RankAdapter(
        loop.model, loop.optimizer, RankConfig(method="comera", exclude=("3",))
    )
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
        (other_method, r"another adapter\n.*method 'rounding'\n.*'comera', as in the file"),
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
    model = state["parts"]["model"]["states"][0]
    model["3.core_1"] = model["3.core_1"][1:]


def other_weight_length(state):
    model = state["parts"]["model"]["states"][0]
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
                path, lambda state: state["parts"]["adapter"]["states"][0].pop("history")
            ),
            r"another adapter\n.*no entry history",
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


@pytest.mark.parametrize("path", [None, 3, b"runs"])
@pytest.mark.parametrize(
    "act",
    [
        lambda path: save_run(path, step=1, model=nn.Linear(1, 1)),
        lambda path: load_run(path, model=nn.Linear(1, 1)),
        latest_run,
    ],
    ids=["save_run", "load_run", "latest_run"],
)
def test_what_is_no_path_is_refused(act, path):
    with pytest.raises(RankError) as caught:
        act(path)
    assert str(caught.value) == (
        "a checkpoint needs a path\n"
        f"  got:      {type(path).__name__}\n"
        "  expected: a file or a folder, as text or pathlib.Path\n"
        "  mend:     write save_run('runs/first.pt', step=n, model=model, optimizer=optimizer)"
    )


def test_a_part_that_is_not_given_is_said(tmp_path):
    loop = Loop()
    loop.save(tmp_path / "run.pt")
    with pytest.raises(RankError, match=r"not given: adapter, scheduler\n(.*\n)*.*strict=False"):
        load_run(tmp_path / "run.pt", model=loop.model, optimizer=loop.optimizer)


def test_a_model_with_an_adapter_and_a_file_without(tmp_path):
    model = optimized()
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
