"""Cost models: what a product is predicted to take, and which table plans are made by."""

import json
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx.config import cache_folder
from comera_fx.plan import cost, plan_linear
from comera_fx.plan.cost import CostModel, from_dict, shipped_model
from comera_fx.plan.linear import rank_plans
from comera_fx.spec import TTSpec

SIDES = (1, 4, 16)
RATES = tuple(tuple(tuple(float(1 + m * 9 + n * 3 + k) for k in range(3)) for n in range(3))
              for m in range(3))  # fmt: skip
MODEL = CostModel(
    device="made up",
    launch_seconds=0.5,
    call_seconds=3.0,
    dense_call_seconds=2.0,
    sides=SIDES,
    rates=RATES,
    tile=1,
    ragged_tile=1.0,
    bytes_per_second=1e9,
    copied_bytes_per_second=8.0,
)
TILED = replace(MODEL, tile=16, ragged_tile=0.75)
SPEC = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))


def test_rates_are_exact_at_the_points_of_the_table():
    for m, n, k in product(range(3), repeat=3):
        assert MODEL.rate(SIDES[m], SIDES[n], SIDES[k]) == pytest.approx(RATES[m][n][k], rel=1e-12)


def test_rates_between_points_are_geometric_means_and_end_with_the_table():
    assert MODEL.rate(1, 1, 2) == pytest.approx((RATES[0][0][0] * RATES[0][0][1]) ** 0.5)
    assert MODEL.rate(2, 1, 4) == pytest.approx((RATES[0][0][1] * RATES[1][0][1]) ** 0.5)
    assert MODEL.rate(10**6, 1, 10**6) == pytest.approx(RATES[2][0][2])


sizes = st.integers(1, 10**5)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(sizes, sizes, sizes)
def test_rates_stay_between_those_of_the_table(m, n, k):
    assert MODEL.rate(m, n, k) * (1 + 1e-9) >= 1
    assert MODEL.rate(m, n, k) <= 27 * (1 + 1e-9)


def test_seconds_of_a_product_equal_a_hand_count():
    assert MODEL.product_seconds(4, 4, 4, 4) == pytest.approx(0.5 + 2 * 64 / RATES[1][1][1])
    assert MODEL.product_seconds(4, 4, 4, 2) == MODEL.product_seconds(4, 4, 4, 4)
    assert MODEL.product_seconds(4, 4, 4, 8) == pytest.approx(0.5 + 4 * 64 / RATES[1][1][1])
    slow = replace(MODEL, bytes_per_second=1.0)
    assert slow.product_seconds(4, 4, 4, 4) == pytest.approx(0.5 + 3 * 16 * 4)


def test_no_product_or_copy_is_faster_than_a_launch():
    for launch in (1e-6, 0.5, 7.0):
        model = replace(MODEL, launch_seconds=launch)
        assert model.product_seconds(1, 1, 1, 4) > launch
        assert model.copy_seconds(0) == launch
        assert model.copy_seconds(16) == launch + 2.0


@settings(deadline=None, derandomize=True, max_examples=50)
@given(sizes, sizes, sizes, st.floats(1e-7, 1.0), st.floats(1e-7, 1.0))
def test_seconds_grow_with_the_launch_alone(m, n, k, one, other):
    seconds = [
        replace(MODEL, launch_seconds=each).product_seconds(m, n, k, 4) for each in (one, other)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(one - other, rel=1e-3, abs=1e-6 * seconds[0])


@pytest.mark.parametrize(
    ("columns", "worth"),
    [(1, 1), (15, 15), (16, 16), (24, 28), (30, 52), (32, 32), (40, 44), (47, 80), (48, 48)],
)
def test_ragged_columns_are_worked_on_in_halves_quarters_and_so_on(columns, worth):
    """30 = 16 + 8 + 4 + 2: three parts at 0.75 of a tile each."""
    seconds = TILED.product_seconds(16, columns, 16, 4)
    assert seconds == pytest.approx(0.5 + 2 * 16 * worth * 16 / MODEL.rate(16, worth, 16))
    plain = MODEL.product_seconds(16, columns, 16, 4)
    assert plain == pytest.approx(0.5 + 2 * 16 * columns * 16 / MODEL.rate(16, columns, 16))


def test_ranks_are_padded_to_whole_tiles():
    assert [TILED.padded(rank) for rank in (1, 15, 16, 17, 30, 32)] == [1, 15, 16, 32, 32, 32]
    assert [MODEL.padded(rank) for rank in (1, 17, 30)] == [1, 17, 30]


def test_seconds_of_a_dense_layer_are_those_of_its_products():
    forward, weight, given_in = (
        MODEL.product_seconds(*shape, 4) for shape in ((8, 4, 16), (4, 16, 8), (8, 16, 4))
    )
    both = MODEL.dense_seconds(8, (16, 4), 4, needs_input_grad=True)
    assert both == pytest.approx(2.0 + forward + weight + given_in)
    first = MODEL.dense_seconds(8, (16, 4), 4, needs_input_grad=False)
    assert first == pytest.approx(2.0 + forward + weight)


# ---- tables as text ----


def test_round_trip():
    for model in (MODEL, TILED, shipped_model("cpu"), shipped_model("cuda")):
        read = from_dict(json.loads(json.dumps(model.to_dict())))
        assert read.to_dict() == model.to_dict()


def test_text_has_three_digits_and_one_row_of_rates_a_line():
    text = cost.to_text(replace(MODEL, launch_seconds=1.23456e-6))
    assert json.loads(text)["launch_seconds"] == 1.23e-6
    assert "\n  [[1, 2, 3],\n   [4, 5, 6],\n   [7, 8, 9]],\n" in text
    assert from_dict(json.loads(text)).rates == RATES


def test_summary_names_what_was_measured():
    lines = shipped_model("cpu").summary().splitlines()
    assert lines[0] == shipped_model("cpu").device
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "fastest product",
        "(4096, 256) @ (256, 16)",
        "(4096, 16) @ (16, 256)",
        "(256, 4096) @ (4096, 16)",
        "columns of a tile",
        "launch of a product",
        "call of a TT layer, both ways",
        "call of a dense layer, both ways",
        "bandwidth",
        "bandwidth of permuting copies",
    ]


def changed(**values: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(MODEL.to_dict())), **values}


MALFORMED: dict[str, Any] = {
    "no mapping": [],
    "a text": "rates",
    "nothing": None,
    "a field is missing": {k: v for k, v in changed().items() if k != "tile"},
    "rates are missing": {k: v for k, v in changed().items() if k != "rates"},
    "a plane is missing": changed(rates=changed()["rates"][:2]),
    "a row is short": changed(rates=[[[1.0] * 3, [1.0] * 3, [1.0] * 2], *changed()["rates"][1:]]),
    "rates are flat": changed(rates=[1.0, 2.0, 3.0]),
    "one side": changed(sides=[1], rates=[[[1.0]]]),
    "sides fall": changed(sides=[16, 4, 1]),
    "sides repeat": changed(sides=[1, 4, 4]),
    "a side is zero": changed(sides=[0, 4, 16]),
    "a side is no int": changed(sides=[1, 4.5, 16]),
    "a rate is zero": changed(rates=[[[0.0] * 3] * 3] * 3),
    "a rate is negative": changed(rates=[[[-1.0] * 3] * 3] * 3),
    "a rate is text": changed(rates=[[["fast"] * 3] * 3] * 3),
    "a speed is no number": changed(bytes_per_second=float("nan")),
    "a speed is infinite": changed(copied_bytes_per_second=float("inf")),
    "a speed is missing": changed(launch_seconds=None),
    "a speed is zero": changed(call_seconds=0),
    "the tile is zero": changed(tile=0),
    "the tile is no int": changed(tile=16.0),
}


@pytest.mark.parametrize("values", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_table_is_refused(values):
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_dict(values)


# ---- which table plans are made by ----


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_FX_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    cost.cost_model.cache_clear()
    rank_plans.cache_clear()


def own_model(**values: Any) -> CostModel:
    return replace(MODEL, device=cost.device_name("cpu"), **values)


def test_without_a_file_the_shipped_model_is_used(folder):
    assert cost.cost_model("cpu") is shipped_model("cpu")
    assert cost.cost_model("meta").to_dict() == shipped_model("cpu").to_dict()
    assert list(folder.iterdir()) == []


def test_a_measured_model_is_found_and_plans_follow_it(folder):
    before = plan_linear(SPEC, 512).seconds
    path = cost.costs_path("cpu")
    assert path.parent == folder / "comera_fx"
    cost.write_model(own_model(call_seconds=7.0), path)
    forget()
    model = cost.cost_model("cpu")
    assert model.to_dict() == own_model(call_seconds=7.0).to_dict()
    assert cost.cost_model("cpu") is model
    plan = plan_linear(SPEC, 512)
    assert plan.costs is model
    assert plan.seconds > 7.0 > before
    assert plan_linear(SPEC, 512) is plan


def test_plans_are_the_same_for_equal_tables(folder):
    def text() -> str:
        cost.write_model(own_model(), cost.costs_path("cpu"))
        forget()
        return repr(plan_linear(SPEC, 512))

    assert text() == text()


def test_the_file_is_named_after_device_and_threads(folder, monkeypatch):
    monkeypatch.setattr(cost, "_processor", lambda: "A (R) Core-9, 3.0 GHz")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    assert cost.costs_path("cpu").name == "costs-a-r-core-9-3-0-ghz-avx2-12-threads.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert cost.costs_path("cuda").name == "costs-nvidia-h200.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cost.costs_path("cuda") is None
    assert cost.measured_model("cuda") is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps(MODEL.to_dict()).encode(),
        json.dumps({**MODEL.to_dict(), "tile": 0}).encode(),
    ],
    ids=["empty", "cut off", "a list", "no text", "deep", "of another device", "malformed"],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(folder, text):
    path = cost.costs_path("cpu")
    path.parent.mkdir()
    path.write_bytes(text)
    with pytest.warns(UserWarning, match="are not used") as caught:
        assert cost.cost_model("cpu") is shipped_model("cpu")
    assert len(caught) == 1
    said = str(caught[0].message)
    assert said.startswith(f"the speeds measured in {path} are not used: ")
    assert said.endswith(
        "Measure anew with `comera-fx calibrate --device cpu`, or delete the file."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cost.cost_model("cpu") is shipped_model("cpu")
    assert path.read_bytes() == text


def test_a_file_that_cannot_be_read_is_ignored(folder):
    cost.costs_path("cpu").mkdir(parents=True)
    with pytest.warns(UserWarning, match="IsADirectoryError|PermissionError"):
        assert cost.cost_model("cpu") is shipped_model("cpu")


def test_a_file_is_written_whole_or_not_at_all(folder, monkeypatch):
    path = cost.costs_path("cpu")
    cost.write_model(own_model(), path)
    first = path.read_text()
    cost.write_model(own_model(call_seconds=4.0), path)
    second = path.read_text()
    assert first != second
    assert [each.name for each in path.parent.iterdir()] == [path.name]

    def fails(self: Path, target: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no"):
        cost.write_model(own_model(), path)
    assert path.read_text() == second
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_tests_never_see_what_this_machine_measured():
    assert cache_folder().name.startswith("comera-fx-tests-")
    assert cost.cost_model("cpu") is shipped_model("cpu")


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, "/home/me/.cache"),
        ("linux", {"XDG_CACHE_HOME": "/fast"}, "/fast"),
        ("linux", {"XDG_CACHE_HOME": "not/absolute"}, "/home/me/.cache"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache"),
        ("darwin", {"XDG_CACHE_HOME": "/fast"}, "/home/me/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/data"}, "/data"),
        ("win32", {}, "/home/me/AppData/Local"),
        ("linux", {"XDG_CACHE_HOME": "/fast", "COMERA_FX_CACHE": "/mine"}, "/mine"),
        ("win32", {"LOCALAPPDATA": "/data", "COMERA_FX_CACHE": "/mine"}, "/mine"),
    ],
)
def test_the_cache_folder_is_the_usual_one_of_the_platform(
    monkeypatch, platform, environment, expected
):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "COMERA_FX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert cache_folder() == Path(expected)


def test_without_a_home_there_is_no_cache_folder(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("COMERA_FX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None
    assert cost.costs_path("cpu") is None
    assert cost.measured_model("cpu") is None
