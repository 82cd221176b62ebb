import csv
import json
import math
import sys
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from bench import code_lm, study_child
from bench.data.tokens import Example, make_dataset
from bench.methods import METHODS, Setup
from bench.models.classifier import ClassifierSizes
from bench.study import Study, best_rate, main, next_rate
from bench.study_child import Job, Source, Timing, work, work_apart
from bench.study_classes import classification
from bench.study_rows import key_of, mean_ms, read_rows
from bench.study_table import mean_curve, table, write_report
from bench.study_task import SELECTION_SEED, target_params
from bench.study_train import PeakMemory, evaluate, train
from comera_fx.errors import ConfigError
from tests.bench.study_tasks import RATIO, make_task

SOURCE = Source("tests.bench.study_tasks", ratio=RATIO)
FIRST_RATE, SECOND_RATE = 1e-3, 1e-2
SIZES = ("start_params", "mean_params", "compressed_params")


class Told:
    """Answers jobs without training; notes which there were."""

    def __init__(self, qualities=None, failing=()):
        self.jobs, self.qualities, self.failing = [], qualities or {}, failing

    def __call__(self, source, job):
        self.jobs.append(job)
        if isinstance(job, Timing):
            return [self.times(name) for name in job.methods]
        if job.method in self.failing:
            raise RuntimeError("exit 1: out of memory")
        quality = self.qualities.get((job.method, job.seed, job.rate), 0.5)
        start, end = (768, 700) if METHODS[job.method].adapts else (700, 700)
        return [
            {
                "quality": quality,
                "curve": [[job.steps, 1.5, quality]],
                "compressed_params": end,
                "start_params": start,
                "mean_params": (start + end) // 2,
                "total_params": 2000,
                "optimizer_bytes": 4000,
                "peak_bytes": 2**20,
                "step_ms": 2.0,
                "seconds": 1.5,
                "shapes": {"0": 3},
                "failure": "" if math.isfinite(quality) else "diverged by step 3",
            }
        ]

    @staticmethod
    def times(name):
        start, final = {"dense": (6.0, 6.0), "ours": (4.0, 2.0)}.get(name, (3.0, 3.0))
        return {"method": name, "start_ms": start, "final_ms": final, "dense_ms": 6.0, "rounds": 2}

    @property
    def runs(self):
        return [job for job in self.jobs if isinstance(job, Job)]


def make(tmp_path, told, **settings):
    settings = {
        "methods": ("dense", "tt"),
        "rates": (FIRST_RATE, SECOND_RATE),
        "seeds": (0, 1),
        **settings,
    }
    return Study(SOURCE, tmp_path, work=told, **settings)


# ---- order and choice ----


def test_rates_are_chosen_first_and_on_a_seed_that_is_not_reported(tmp_path):
    # On the reported seeds the other rate would be the better one.
    told = Told({("tt", SELECTION_SEED, SECOND_RATE): 0.1, ("tt", 0, SECOND_RATE): 9.0})
    study = make(tmp_path, told)
    study.run()
    choice, reported = told.runs[:4], told.runs[4:]
    assert [(job.method, job.seed, job.rate) for job in choice] == [
        (method, SELECTION_SEED, rate)
        for method in ("dense", "tt")
        for rate in (SECOND_RATE, FIRST_RATE)  # from the middle on
    ]
    assert {job.seed for job in reported} == {0, 1}
    assert {job.rate for job in reported if job.method == "tt"} == {SECOND_RATE}
    assert {job.rate for job in reported if job.method == "dense"} == {FIRST_RATE}
    assert study.best_rate("tt") == SECOND_RATE


def test_reported_rows_never_choose_a_rate():
    rows = [
        {"seed": SELECTION_SEED, "budget": "steps", "rate": FIRST_RATE, "quality": 0.5},
        {"seed": 0, "budget": "steps", "rate": SECOND_RATE, "quality": 0.1},
        {"seed": SELECTION_SEED, "budget": "time", "rate": SECOND_RATE, "quality": 0.1},
    ]
    assert best_rate(rows, make_task(), (FIRST_RATE,)) == FIRST_RATE
    assert best_rate(rows, make_task(), (SECOND_RATE,)) is None


@pytest.mark.parametrize(
    ("qualities", "tried"),
    [
        ({1: 0.9, 2: 0.5, 3: 0.4, 4: 0.6, 5: 0.1}, [3, 4, 2]),
        ({1: 0.3, 2: 0.2, 3: 0.4, 4: 0.6, 5: 0.1}, [3, 4, 2, 1]),
        ({1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.2}, [3, 4, 5]),
        ({1: 0.5, 2: math.nan, 3: math.nan, 4: 0.1, 5: 0.1}, [3, 2, 1]),
        (dict.fromkeys(range(1, 6), math.nan), [3, 2, 1]),
    ],
)
def test_rates_are_tried_until_both_neighbours_of_the_best_are_known(qualities, tried):
    rows, order = [], []
    while (rate := next_rate(rows, make_task(), tuple(qualities))) is not None:
        order.append(rate)
        quality = qualities[rate]
        rows.append({"seed": SELECTION_SEED, "budget": "steps", "rate": rate, "quality": quality})
    assert order == tried


def test_a_search_that_time_ends_gives_no_rate(tmp_path):
    study = make(tmp_path, Told(), rates=(1e-3, 2e-3, 4e-3))
    study._run("tt", "steps", SELECTION_SEED, 2e-3, 60)
    assert study.best_rate("tt") is None
    study.minutes = 0.0
    study._search("tt")
    assert len(study.rows) == 1


def test_the_better_direction_is_the_tasks_and_diverged_rates_lose():
    tried = {1e-4: math.nan, 1e-3: 0.7, 3e-3: 0.2, 1e-2: math.nan}
    rows = [
        {"seed": SELECTION_SEED, "budget": "steps", "rate": rate, "quality": quality}
        for rate, quality in tried.items()
    ]
    assert best_rate(rows, make_task(better="lower"), tuple(tried)) == 3e-3
    assert best_rate(rows, make_task(better="higher"), tuple(tried)) == 1e-3
    assert best_rate(rows[:1], make_task(), (1e-4,)) is None


def test_the_methods_that_matter_most_are_done_before_the_others_begin(tmp_path):
    told = Told()
    make(tmp_path, told, methods=("galore", "ours", "dense")).run()
    order = list(dict.fromkeys(job.method for job in told.runs))
    assert order == ["dense", "ours", "galore"]


def test_a_method_without_a_rate_is_not_run_on(tmp_path):
    told = Told(failing=("tt",))
    study = make(tmp_path, told)
    study.run()
    assert {job.seed for job in told.runs if job.method == "tt"} == {SELECTION_SEED}
    failed = [row for row in study.rows if row["method"] == "tt"]
    assert all(math.isnan(row["quality"]) for row in failed)
    assert {row["failure"] for row in failed} == {"exit 1: out of memory"}


# ---- equal time ----


def test_equal_time_gives_as_many_steps_as_fit_into_denses_time(tmp_path):
    told = Told()
    make(tmp_path, told, methods=("dense", "tt", "ours"), seeds=(0,)).run()
    steps = {(job.method, job.steps) for job in told.runs if job.seed == 0}
    # tt takes 3 ms of dense's 6; ours 4 at its start, 2 at its end, halfway between in the mean.
    assert steps == {("dense", 60), ("tt", 60), ("tt", 120), ("ours", 60), ("ours", 120)}


def test_times_of_shrinking_layers_follow_their_sizes():
    timing = {"start_ms": 8.0, "final_ms": 4.0}
    sizes = {"start_params": 200, "compressed_params": 100}
    assert mean_ms(timing, {**sizes, "mean_params": 125}) == pytest.approx(5.0)
    assert mean_ms(timing, {**sizes, "mean_params": 200}) == pytest.approx(8.0)
    constant = {"start_params": 100, "compressed_params": 100, "mean_params": 100}
    assert mean_ms(timing, constant) == pytest.approx(8.0)


def test_steps_are_timed_once_and_at_the_sizes_of_the_best_run(tmp_path):
    told = Told()
    make(tmp_path, told, methods=("tt", "ours")).run()
    timings = [job for job in told.jobs if isinstance(job, Timing)]
    assert [job.methods for job in timings] == [("dense", "tt", "ours")]
    assert dict(timings[0].shapes) == {"ours": {"0": 3}}
    make(tmp_path, told, methods=("tt", "ours")).run()
    assert len([job for job in told.jobs if isinstance(job, Timing)]) == 1


# ---- rows ----


def test_several_runs_at_a_time_share_the_threads_and_steps_are_timed_on_all(tmp_path):
    told, both = Told(), Barrier(2)

    def work(source, job):
        threads[type(job)].add(source.threads)
        if isinstance(job, Job):
            both.wait(timeout=30)
        return told(source, job)

    threads = {Job: set(), Timing: set()}
    study = make(tmp_path, work, jobs=2)
    study.source = replace(study.source, threads=4)
    study.run()
    assert threads == {Job: {2}, Timing: {4}}
    alone = make(tmp_path / "alone", Told())
    alone.run()
    assert sorted(map(key_of, study.rows)) == sorted(map(key_of, alone.rows))


def test_rows_that_are_there_are_not_run_again(tmp_path):
    told = Told()
    make(tmp_path, told, seeds=(0,)).run()
    count = len(told.runs)
    assert count == 4 + 3
    make(tmp_path, told, seeds=(0,)).run()
    assert len(told.runs) == count
    make(tmp_path, told, seeds=(0, 1)).run()
    assert {job.seed for job in told.runs[count:]} == {1}


def test_rows_of_other_settings_are_run_again_and_not_shown(tmp_path):
    told = Told()
    study = make(tmp_path, told, methods=("dense",))
    study.run()
    count = len(told.runs)
    other = Study(
        replace(SOURCE, ratio=2.0),
        tmp_path,
        methods=("dense",),
        rates=(FIRST_RATE, SECOND_RATE),
        seeds=(0, 1),
        work=told,
    )
    assert other.rows_of("dense") == []
    other.run()
    assert len(told.runs) == 2 * count


def test_failures_stay_unless_they_are_to_be_retried(tmp_path):
    told = Told({("dense", SELECTION_SEED, SECOND_RATE): math.nan})
    make(tmp_path, told, methods=("dense",)).run()
    count = len(told.runs)
    make(tmp_path, told, methods=("dense",)).run()
    assert len(told.runs) == count
    again = make(tmp_path, Told(), methods=("dense",), retry=True)
    again.run()
    assert [(job.seed, job.rate) for job in again.work.runs] == [(SELECTION_SEED, SECOND_RATE)]
    assert not any(row["failure"] for row in again.rows)


def test_a_row_that_was_cut_off_is_left_out_and_run_again(tmp_path):
    told = Told()
    study = make(tmp_path, told, methods=("dense",), seeds=(0,))
    study.run()
    text = study.csv.read_text()
    study.csv.write_text(text[: len(text) - 60])
    assert len(read_rows(study.csv)) == 2
    make(tmp_path, told, methods=("dense",), seeds=(0,)).run()
    assert told.runs[-1] == told.runs[-2]
    assert len(read_rows(study.csv)) == 3


def test_no_run_starts_when_time_is_up(tmp_path):
    told = Told()
    make(tmp_path, told, minutes=-1.0).run()
    assert told.jobs == []


# ---- bad input ----


def test_the_seed_of_the_choice_cannot_be_reported(tmp_path):
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, Told(), seeds=(0, SELECTION_SEED))
    assert str(caught.value) == (
        "rates are chosen on a seed that is to be reported\n"
        "  got:      seeds (0, 100)\n"
        "  expected: seeds other than 100\n"
        "  mend:     choose other --seeds"
    )


def test_a_method_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, Told(), methods=("dense", "lora"))
    assert str(caught.value) == (
        "a method is not known\n"
        "  got:      lora\n"
        "  expected: of dense, tt, low_rank, ours, comera, adalora, galore\n"
        "  mend:     correct --only"
    )


# ---- table and figure ----


def test_the_table_holds_means_spreads_and_differences(tmp_path):
    told = Told(
        {
            ("dense", 0, FIRST_RATE): 0.4,
            ("dense", 1, FIRST_RATE): 0.6,
            ("tt", 0, FIRST_RATE): 0.5,
            ("tt", 1, FIRST_RATE): 0.9,
        }
    )
    study = make(tmp_path, told)
    study.run()
    lines = table(study).splitlines()
    dense, tt = (
        next(line for line in lines if line.startswith(f"| {n} ")) for n in ("dense", "tt")
    )
    assert dense.split(" | ")[1:4] == ["0.001", "0.5000 ± 0.1414", "-"]
    assert tt.split(" | ")[2:6] == [
        "0.7000 ± 0.2828",
        "+0.2000 ± 0.1414",
        "0.7000 ± 0.2828",
        "+0.2000 ± 0.1414",
    ]
    ratio = f"{study.target * RATIO / 700:.2f}x"
    assert tt.split(" | ")[6:] == [ratio, "2,000", "0.0", "1", "2.00", "2 |"]


def test_a_table_of_few_rows_has_dashes(tmp_path):
    told = Told()
    study = make(tmp_path, told)
    study._run("tt", "steps", SELECTION_SEED, FIRST_RATE, 60)
    line = table(study).splitlines()[-1]
    assert line == "| tt | - | - | - | - | - | - | - | - | - | - | 0 |"
    study._run("tt", "steps", SELECTION_SEED, SECOND_RATE, 60)
    study._run("tt", "steps", 0, FIRST_RATE, 60)
    assert table(study).splitlines()[-1].startswith("| tt | 0.001 | 0.5000 | - | - | - | ")


def test_layers_above_the_target_and_failures_are_marked(tmp_path):
    told = Told({("tt", 1, FIRST_RATE): math.nan})
    study = make(tmp_path, told)
    study.run()
    for row in study.rows:
        row["compressed_params"] = study.target + 1
    line = next(line for line in table(study).splitlines() if line.startswith("| tt "))
    assert "(above the target)" in line
    assert "0.5000 (1 failed)" in line
    dense = next(line for line in table(study).splitlines() if line.startswith("| dense "))
    assert "(above the target)" not in dense


def test_the_report_is_the_same_every_time_and_needs_no_run(tmp_path):
    told = Told()
    make(tmp_path, told).run()
    study = make(tmp_path, told)
    texts = []
    for _ in range(2):
        write_report(study)
        texts.append(
            (study.folder / "tiny.md").read_text() + (study.folder / "tiny.svg").read_text()
        )
    assert texts[0] == texts[1]
    assert "<svg" in texts[0]


def test_a_curve_is_a_mean_over_runs_that_ended_at_the_speed_of_steps_in_turns():
    sizes = {"steps": 2, "seconds": 4.0, **dict.fromkeys(SIZES, 700)}
    runs = [
        {"curve": [[1, 2.0, 4.0], [2, 4.0, 2.0]], "failure": "", **sizes},
        {"curve": [[1, 4.0, 6.0], [2, 8.0, 4.0]], "failure": "", **sizes, "seconds": 8.0},
        {"curve": [[1, 9.0, 9.0]], "failure": "diverged by step 2"},
    ]
    timing = {"start_ms": 500.0, "final_ms": 500.0}
    assert mean_curve(runs, timing) == [(0.5, 5.0), (1.0, 3.0)]
    assert mean_curve([], timing) == []


# ---- runs ----


def test_a_run_gives_all_columns_and_is_the_same_every_time():
    job = Job("ours", 0, 1e-2, 20)
    one, other = work(SOURCE, job)[0], work(SOURCE, job)[0]
    assert one["quality"] == other["quality"]
    assert one["start_params"] >= one["mean_params"] >= one["compressed_params"]
    assert [point[0] for point in one["curve"]] == [4, 8, 12, 16, 20, 20]
    assert one["curve"][-1][2] == pytest.approx(one["quality"], abs=1e-5)
    assert one["optimizer_bytes"] > 0
    assert one["failure"] == ""


def test_rates_are_chosen_on_validation_data_and_results_are_of_the_test_data():
    task = make_task()
    for seed, part in ((SELECTION_SEED, "validation"), (0, "test")):
        row = work(SOURCE, Job("dense", seed, 1e-3, 1))[0]
        setup = Setup(task, seed, 1e-3, 1, target_params(task, RATIO))
        assert row["quality"] == train(setup, "dense", part)["quality"]
    model = task.dense(0)
    assert evaluate(task, model, "validation", 1.0) != evaluate(task, model, "test", 1.0)


def test_a_run_that_diverges_ends_early_without_quality():
    finite = make_task()
    task = replace(finite, loss=lambda model, batch: finite.loss(model, batch) * math.nan)
    row = train(Setup(task, 0, 1e-3, 50, 700), "dense", "test")
    assert math.isnan(row["quality"])
    assert row["failure"] == "diverged by step 10"


def test_methods_are_timed_at_the_start_and_at_their_end():
    shapes = {"ours": work(SOURCE, Job("ours", 0, 1e-2, 60))[0]["shapes"]}
    rows = work(SOURCE, Timing(("dense", "ours", "galore"), shapes, rounds=2))
    assert [row["method"] for row in rows] == ["dense", "ours", "galore"]
    assert all(row["start_ms"] > 0 and row["final_ms"] > 0 for row in rows)
    assert len({row["dense_ms"] for row in rows}) == 1
    assert rows[0]["start_ms"] == rows[0]["final_ms"] == rows[0]["dense_ms"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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
        row = train(Setup(task, 0, 1e-2, 40, target), method, "test")
        assert row["quality"] > 0.9, method
    assert evaluate(task, task.dense(0), "test", 1.0) < 0.8


# ---- the command ----


@pytest.mark.slow
def test_a_child_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"^exit 1: KeyError: 'none'$"):
        work_apart(SOURCE, Job("none", 0, 1e-3, 2))


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
