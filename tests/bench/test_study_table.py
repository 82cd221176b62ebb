"""The table and the figure of a study."""

import math

from bench.study_table import mean_curve, table, write_report
from bench.study_task import SELECTION_SEED
from tests.bench.study_tasks import RATIO
from tests.bench.told import FIRST, FIRST_RATE, SECOND, SIZES, Told, make


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
    assert dense.split(" | ")[1:4] == ["0.001 x1 (edge of the grid)", "0.5000 ± 0.1414", "-"]
    assert tt.split(" | ")[2:6] == [
        "0.7000 ± 0.2828",
        "+0.2000 ± 0.1414",
        "0.7000 ± 0.2828",
        "+0.2000 ± 0.1414",
    ]
    ratio = f"{study.target * RATIO / 700:.2f}x"
    assert tt.split(" | ")[6:] == [ratio, "2,000", "0.0", "1", "2.00", "2 |"]


def test_a_best_rate_at_an_edge_of_the_grid_is_marked(tmp_path):
    told = Told({("tt", SELECTION_SEED, 4e-3): 0.1, ("dense", SELECTION_SEED, 2e-3): 0.1})
    study = make(tmp_path, told, rates=(1e-3, 2e-3, 4e-3))
    study.run()
    dense, tt = table(study).splitlines()[-2:]
    assert "| 0.002 x1 |" in dense
    assert "| 0.004 x1 (edge of the grid) |" in tt


def test_a_table_of_few_rows_has_dashes(tmp_path):
    told = Told()
    study = make(tmp_path, told)
    study._run("tt", "steps", SELECTION_SEED, FIRST, 60)
    line = table(study).splitlines()[-1]
    assert line == "| tt | - | - | - | - | - | - | - | - | - | - | 0 |"
    study._run("tt", "steps", SELECTION_SEED, SECOND, 60)
    study._run("tt", "steps", 0, FIRST, 60)
    cells = table(study).splitlines()[-1].split(" | ")
    assert cells[1:6] == ["0.001 x1 (edge of the grid)", "0.5000", "-", "-", "-"]


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
    sizes = {"steps": 2, "seconds": 4.0, "cut_share": 0.0, **dict.fromkeys(SIZES, 700)}
    runs = [
        {"curve": [[1, 2.0, 4.0], [2, 4.0, 2.0]], "failure": "", **sizes},
        {"curve": [[1, 4.0, 6.0], [2, 8.0, 4.0]], "failure": "", **sizes, "seconds": 8.0},
        {"curve": [[1, 9.0, 9.0]], "failure": "diverged by step 2"},
    ]
    timing = {"start_ms": 500.0, "final_ms": 500.0}
    assert mean_curve(runs, timing) == [(0.5, 5.0), (1.0, 3.0)]
    assert mean_curve([], timing) == []
