"""The runs of a study: training, its tasks, and the command."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from bench import code_lm, study_child
from bench.data.tokens import Example, make_dataset
from bench.methods import METHODS, Setup
from bench.models.classifier import ClassifierSizes
from bench.study_child import Job, Timing, work, work_apart
from bench.study_classes import classification
from bench.study_command import main
from bench.study_search import Rates
from bench.study_task import SELECTION_SEED, target_params
from bench.study_train import PeakMemory, cut_share, evaluate, train
from tests.bench.study_tasks import RATIO, make_task
from tests.bench.told import SOURCE, Told, make


def test_a_run_gives_all_columns_and_is_the_same_every_time():
    job = Job("ours", 0, 1e-2, 1.0, 20)
    one, other = work(SOURCE, job)[0], work(SOURCE, job)[0]
    assert one["quality"] == other["quality"]
    assert one["start_params"] >= one["mean_params"] >= one["compressed_params"]
    assert [point[0] for point in one["curve"]] == [4, 8, 12, 16, 20]
    assert one["curve"][-1][2] == pytest.approx(one["quality"], abs=1e-5)
    assert one["optimizer_bytes"] > 0
    assert one["failure"] == ""


def test_rates_are_chosen_on_validation_data_and_results_are_of_the_test_data():
    task = make_task()
    for seed, part in ((SELECTION_SEED, "validation"), (0, "test")):
        row = work(SOURCE, Job("dense", seed, 1e-3, 1.0, 1))[0]
        setup = Setup(task, seed, Rates(1e-3, 1.0), 1, target_params(task, RATIO))
        assert row["quality"] == train(setup, "dense", part)["quality"]
    model = task.dense(0)
    assert evaluate(task, model, "validation", 1.0) != evaluate(task, model, "test", 1.0)


def test_a_run_that_diverges_ends_early_without_quality():
    finite = make_task()
    task = replace(finite, loss=lambda model, batch: finite.loss(model, batch) * math.nan)
    row = train(Setup(task, 0, Rates(1e-3, 1.0), 50, 700), "dense", "test")
    assert math.isnan(row["quality"])
    assert row["failure"] == "diverged by step 10"


def test_methods_are_timed_at_the_start_and_at_their_end():
    shapes = {"ours": work(SOURCE, Job("ours", 0, 1e-2, 1.0, 60))[0]["shapes"]}
    rows = work(SOURCE, Timing(("dense", "ours", "galore"), shapes, rounds=2))
    assert [row["method"] for row in rows] == ["dense", "ours", "galore"]
    assert all(row["start_ms"] > 0 and row["final_ms"] > 0 for row in rows)
    assert len({row["dense_ms"] for row in rows}) == 1
    assert rows[0]["start_ms"] == rows[0]["final_ms"] == rows[0]["dense_ms"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_cuts_cost_is_seen_beside_the_steps_around_them():
    seconds = [1.0] * 40
    seconds[0] = 9.0  # of the first step, which is slow for other reasons
    assert cut_share(seconds, 10) == 0.0
    for step in (9, 19, 29, 39):
        seconds[step] += 0.5  # the cut
    for step in (10, 20, 30):
        seconds[step] += 0.3  # plans for the new sizes
    assert cut_share(seconds, 10) == pytest.approx((4 * 0.5 + 3 * 0.3) / 48)
    assert cut_share(seconds, None) == 0.0
    falling = [2.0 - 0.02 * step for step in range(40)]
    assert cut_share(falling, 10) == pytest.approx(0.0, abs=5e-3)


def test_peak_memory_is_of_what_is_done_after_the_reset():
    memory = PeakMemory("cpu")
    torch.ones(2**25)  # 128 MiB, gone again
    memory.reset()
    low = memory.peak_bytes()
    torch.ones(2**24)
    assert memory.peak_bytes() - low > 2**25
    assert low < 2**26


def test_the_digest_follows_a_method_s_settings_and_the_data(tmp_path, monkeypatch):
    before = make(tmp_path, Told()).digests
    monkeypatch.setitem(METHODS, "tt", replace(METHODS["tt"], settings=lambda setup: {"a": 1}))
    after = make(tmp_path, Told()).digests
    assert {name for name in METHODS if before[name] != after[name]} == {"tt"}
    assert len(set(before.values())) == len(METHODS)


# ---- tasks ----


def test_code_is_split_into_three_parts_that_share_no_text():
    corpus = code_lm.load_corpus(code_lm.QUICK)
    less, validation = code_lm.split(corpus)
    assert torch.equal(torch.cat([less.train, validation.held_out]), corpus.train)
    assert len(validation.held_out) == len(corpus.train) // 20
    assert torch.equal(less.held_out, corpus.held_out)


def test_the_language_model_starts_near_a_uniform_guess():
    task = code_lm.make_task(quick=True)
    model = task.dense(0)
    assert evaluate(task, model, "test", 1.0) == pytest.approx(math.log(256), abs=0.2)
    assert evaluate(task, model, "test", 0.5) != evaluate(task, model, "test", 1.0)
    assert torch.equal(task.batch(3, 5), task.batch(3, 5))
    assert not torch.equal(task.batch(3, 5), task.batch(4, 5))


def words(label):
    return ("bad awful poor", "table chair door", "good great fine")[label]


def test_classes_are_told_apart_by_every_kind_of_method():
    examples = [Example((f"number {k} {words(k % 3)}",), k % 3, f"group {k}") for k in range(300)]
    data = make_dataset("words", examples, ("a", "b", "c"), vocabulary_size=320, length=12)
    sizes = ClassifierSizes(32, 64, 2, 1, vocabulary_size=320, length=12)
    task = classification("words", data, steps=40, batch_size=16, sizes=sizes, dropout=0.0)
    target = target_params(task, 2.0)
    for method in ("dense", "tt", "low_rank"):
        row = train(Setup(task, 0, Rates(3e-3, 1.0), 40, target), method, "test")
        assert row["quality"] > 0.9, method
    assert evaluate(task, task.dense(0), "test", 1.0) < 0.8


# ---- the command ----


@pytest.mark.slow
def test_a_child_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"^exit 1: KeyError: 'none'$"):
        work_apart(SOURCE, Job("none", 0, 1e-3, 1.0, 2))


def test_a_child_that_was_killed_says_nothing_of_its_job(monkeypatch):
    done = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(study_child.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(KeyboardInterrupt):
        work_apart(SOURCE, Job("dense", 0, 1e-3, 1.0, 1))


def test_a_child_prints_its_rows(monkeypatch, capsys):
    given = {"source": {"module": SOURCE.module}, "job": {"methods": ["dense"], "rounds": 1}}
    monkeypatch.setattr(sys, "argv", ["study_child", json.dumps(given)])
    study_child.main()
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["dense"]


@pytest.mark.slow
def test_the_quick_command_adds_up_over_runs(tmp_path, capsys):
    common = ["--quick", "--threads", "1", "--results", str(tmp_path)]
    main("bench.code_lm", None, [*common, "--only", "dense"])
    assert capsys.readouterr().out.count("held-out loss, nats a byte ") == 2
    main("bench.code_lm", None, [*common, "--only", "dense,low_rank"])
    assert "code_lm: dense" not in capsys.readouterr().out
    with (tmp_path / "code_lm.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    budgets = [(row["method"], row["seed"], row["budget"]) for row in rows]
    assert budgets == [
        ("dense", "100", "steps"),
        ("dense", "0", "steps"),
        ("low_rank", "100", "steps"),
        ("low_rank", "0", "steps"),
        ("low_rank", "0", "time"),
    ]
    assert all(int(row["peak_bytes"]) > 2**20 for row in rows)
    main("bench.code_lm", None, [*common, "--table-only"])
    shown = capsys.readouterr().out
    assert shown.strip() == (tmp_path / "code_lm.md").read_text().strip()
    assert (tmp_path / "code_lm.svg").exists()
