"""What a study runs, in which order, and what it keeps."""

import math
from dataclasses import replace
from threading import Barrier

import pytest

from bench.study import Study
from bench.study_child import Job, Timing
from bench.study_rows import key_of, mean_ms, read_rows
from bench.study_search import Rates
from bench.study_task import SELECTION_SEED
from comera_fx.errors import ConfigError
from tests.bench.told import FIRST_RATE, SECOND, SECOND_RATE, SOURCE, Told, make


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
    assert study.best_rates("tt") == SECOND


@pytest.mark.parametrize("method", ["dense", "tt"])
def test_all_methods_choose_the_rate_of_the_rest_as_well(tmp_path, method):
    told = Told(better=lambda job: job.rest == 5.0 and job.rate == FIRST_RATE)
    study = make(tmp_path, told, methods=(method,), rests=(1.0, 5.0))
    study.run()
    assert study.best_rates(method) == Rates(FIRST_RATE, 5.0)
    assert {job.rest for job in told.runs if job.seed == 0} == {5.0}


def test_a_search_that_time_ends_gives_no_rates(tmp_path):
    study = make(tmp_path, Told(), rates=(1e-3, 2e-3, 4e-3))
    study._run("tt", "steps", SELECTION_SEED, Rates(2e-3, 1.0), 60)
    assert study.best_rates("tt") is None
    study.minutes = 0.0
    study._search("tt")
    assert len(study.rows) == 1


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
    sizes = {"start_params": 200, "compressed_params": 100, "cut_share": 0.0}
    assert mean_ms(timing, {**sizes, "mean_params": 125}) == pytest.approx(5.0)
    assert mean_ms(timing, {**sizes, "mean_params": 200}) == pytest.approx(8.0)
    constant = {"start_params": 100, "compressed_params": 100, "mean_params": 100, "cut_share": 0.0}
    assert mean_ms(timing, constant) == pytest.approx(8.0)
    assert mean_ms(timing, {**constant, "cut_share": 0.25}) == pytest.approx(10.0)


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
        rests=(1.0,),
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


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_was_stopped_is_no_failure_and_ends_the_study(tmp_path, jobs):
    told = Told(stopped=("tt",))
    study = make(tmp_path, told, methods=("tt",), jobs=jobs)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    assert (study.rows, len(told.jobs)) == ([], 1)
    study.work = Told()
    study._is_stopped = False
    study.run()
    assert {row["failure"] for row in study.rows} == {""}


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
