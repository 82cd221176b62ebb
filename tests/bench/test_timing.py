import csv

import pytest

from bench.timing import (
    LEAST_REPEATS,
    MOST_REPEATS,
    append_rows,
    format_table,
    medians_ms,
    repeats_within,
    times_ms,
)


def test_versions_run_in_turns_and_each_is_prepared():
    calls = []
    versions = {name: lambda name=name: calls.append(name) for name in "ab"}
    ms = medians_ms(versions, 2, prepare=lambda name: calls.append(f"prepare {name}"))
    once = ["prepare a", "a"] * 2 + ["prepare b", "b"] * 2  # the second run counts
    assert calls == once * 3  # one turn is not measured
    assert list(ms) == ["a", "b"]


def test_without_preparation_nothing_runs_but_the_versions():
    calls = []
    medians_ms({"a": lambda: calls.append("a")}, 4)
    assert calls == ["a"] * 2 * 5


def test_what_takes_long_runs_once_a_turn_and_every_time_is_kept():
    calls = []
    times = times_ms({name: lambda name=name: calls.append(name) for name in "ab"}, 3, twice=False)
    assert calls == ["a", "b"] * 4
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0, LEAST_REPEATS), (1e9, MOST_REPEATS)])
def test_repeats_stay_within_bounds(seconds, repeats):
    assert repeats_within(seconds, {"a": lambda: None}) == repeats


def test_rows_say_what_they_depend_on_and_are_appended(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    append_rows(path, [{"layer": "a", "ms": 1.5}])
    append_rows(path, [{"layer": "b", "ms": None}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["layer"], row["ms"]) for row in rows] == [("a", "1.5"), ("b", "")]
    assert all(row["torch"] and row["threads"] == "1" for row in rows)


def test_rows_of_other_columns_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    append_rows(path, [{"layer": "a"}])
    before = path.read_text()
    with pytest.raises(ValueError, match="move it away"):
        append_rows(path, [{"workload": "a"}])
    assert path.read_text() == before


def test_a_table_is_aligned_and_leaves_missing_figures_blank():
    table = format_table([{"layer": "a", "ms": 12.5}, {"layer": "long", "ms": None}])
    assert table.splitlines() == ["layer    ms", "    a  12.5", " long      "]
