"""Files are whole or not there, numbered ones are kept and found, drafts go."""

import os
import random
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from comera_fx.errors import RankError
from comera_fx.train import latest_run, load_run, save_run
from comera_fx.train.saving.files import read_state, write_atomically


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
