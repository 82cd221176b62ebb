import importlib.util

import pytest

from bench import layer
from bench.layer import SHOWN, measure, predicted_ms
from bench.versions import MAKERS, NEEDS
from bench.workloads import LAYERS
from tests.bench.sizes import TINY_WIDE, tiny

PLAIN = [name for name in MAKERS if name not in NEEDS]


def is_ratio(ratio, above, below):
    return ratio == pytest.approx(above / below, rel=0.02, abs=2e-3)


@pytest.mark.parametrize("trains", [True, False], ids=["step", "forward"])
def test_a_row_holds_all_versions_and_ratios_of_their_medians(trains):
    row = measure(tiny(TINY_WIDE, trains=trains), PLAIN, repeats=2)
    assert set(SHOWN) <= set(row)
    assert all(row[f"{name}_ms"] > 0 for name in PLAIN)
    assert row["low_rank_ms"] == min(row["low_rank_matmul_ms"], row["low_rank_linear_ms"])
    assert row["einsum_ms"] == row["einsum_in_order_ms"]
    assert is_ratio(row["ours_over_low_rank"], row["ours_ms"], row["low_rank_ms"])
    assert is_ratio(row["dense_over_ours"], row["dense_ms"], row["ours_ms"])
    assert (row["tokens"], row["repeats"], row["ranks"]) == (8, 2, "1x3x4x5x4x3x1")


def test_versions_that_did_not_run_are_empty():
    row = measure(tiny(), PLAIN, repeats=1)
    assert row["tltorch_ms"] is None
    assert row["einsum_planned_ms"] is None


@pytest.mark.skipif(importlib.util.find_spec("tltorch") is None, reason="tltorch is missing")
def test_tltorch_runs_where_it_is_installed():
    assert measure(tiny(TINY_WIDE), list(MAKERS), repeats=1)["tltorch_ms"] > 0


def test_the_plan_s_promise_is_told_where_it_makes_one(monkeypatch):
    class Promise:
        seconds = 0.0025

    monkeypatch.setattr(layer, "plan_linear", lambda *args: Promise())
    assert predicted_ms(tiny()) == 2.5
    assert predicted_ms(tiny(trains=False)) is None


def test_one_command_measures_prints_and_appends(monkeypatch, capsys, tmp_path):
    path = tmp_path / "layer.csv"
    command = ["layer", "--tokens", "8", "--repeats", "1", "--threads", "1", "--results", str(path)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(layer, "LAYERS", (tiny(), *LAYERS))
    layer.main()
    *_, head, line = capsys.readouterr().out.splitlines()
    assert head.split() == list(SHOWN)
    assert line.split()[0] == "tiny"
    assert len(path.read_text().splitlines()) == 2
