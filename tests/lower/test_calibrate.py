"""calibrate: what is made of measured times, and how they are kept. No test looks at a clock."""

import json
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch

from comera_fx.errors import ConfigError
from comera_fx.lower import calibrate as module
from comera_fx.lower import choose, probes
from comera_fx.lower.calibrate import calibrate, forget_plans, model_of
from comera_fx.lower.fit import (
    ANCHORS,
    COLUMNS,
    SIDES,
    ascending,
    filled,
    fit_tile,
    lifted,
    shorter,
)
from comera_fx.lower.probes import COPIED, TALL, TINY, TINY_TOKENS, Rounds, make_runs
from comera_fx.plan import cost, plan_linear
from comera_fx.plan.cost import CostModel, cost_model, costs_path, shipped_model
from comera_fx.spec import TTSpec

SPEC = TTSpec("tt", (8, 8), (8, 8), (1, 8, 16, 8, 1))
BARE = 1e-6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_FX_CACHE", str(tmp_path))
    forget_plans()
    yield tmp_path
    forget_plans()


# ---- a made-up machine ----


def law(shape: tuple[int, int, int]) -> float:
    """FLOPs per second: more where the shortest side is longer."""
    return 1e7 * min(shape) ** 0.5


TRUE = CostModel(
    device="made up",
    launch_seconds=3e-6,
    call_seconds=90e-6,
    dense_call_seconds=40e-6,
    sides=SIDES,
    rates=tuple(tuple(tuple(law((m, n, k)) for k in SIDES) for n in SIDES) for m in SIDES),
    tile=16,
    ragged_tile=0.8,
    bytes_per_second=2e10,
    copied_bytes_per_second=5e9,
)


def times_of(machine: CostModel) -> dict[probes.Key, float]:
    """What the machine takes for everything that is run."""
    times: dict[probes.Key, float] = {("launch",): machine.launch_seconds}
    times["stream",] = BARE + 2 * 4 * SIDES[-1] ** 2 / machine.bytes_per_second
    for number, (sizes, _) in enumerate(COPIED):
        times["copy", number] = BARE + 4 * prod(sizes) / machine.copied_bytes_per_second
    for (m, k), n in product(TALL, (*ANCHORS, *COLUMNS)):
        worth = machine._whole_columns(n)
        times["tall", m, n, k] = BARE + 1e-7 * m * worth * k
    for number, spec in enumerate(TINY):
        plan = replace(plan_linear(spec, TINY_TOKENS), costs=machine)
        times["layer", number], times["dense", number] = plan.seconds, plan.dense_seconds
    for shape in ascending():
        times[shape] = BARE + 2 * prod(shape) / law(shape) * (shape != (1, 1, 1))
    return times


def same(found: CostModel, expected: CostModel) -> None:
    ours, true = found.to_dict(), expected.to_dict()
    rates = ours.pop("rates"), true.pop("rates")
    assert (ours.pop("device"), true.pop("device")) == (cost.device_name("cpu"), "made up")
    assert ours.pop("sides") == true.pop("sides")
    assert ours == pytest.approx(true, rel=1e-6)
    for m, n, k in list(product(range(len(SIDES)), repeat=3))[1:]:
        assert rates[0][m][n][k] == pytest.approx(rates[1][m][n][k], rel=1e-6)


@pytest.mark.parametrize("tile", [1, 8, 16])
def test_the_speeds_of_a_machine_are_found_from_its_times(tile):
    machine = replace(TRUE, tile=tile, ragged_tile=0.8 if tile > 1 else 1.0)
    same(model_of("cpu", times_of(machine)), machine)


def test_products_that_were_too_long_get_the_rate_of_the_next_smaller():
    times = times_of(TRUE)
    missing = [shape for shape in ascending() if prod(shape) > 2**27]
    model = model_of("cpu", {key: t for key, t in times.items() if key not in missing})
    assert model.rate(4096, 4096, 4096) == pytest.approx(model.rate(1024, 256, 256), rel=1e-9)
    assert model.rate(256, 256, 256) == pytest.approx(TRUE.rate(256, 256, 256))


def test_noise_below_a_bare_call_leaves_rates_that_can_be():
    times = times_of(TRUE)
    for shape in ascending():
        if prod(shape) <= 4**4:
            times[shape] = 0.9 * BARE
    times[1, 1, 1] = BARE
    times["layer", 0] = times["layer", 1] = times["dense", 0] = times["dense", 1] = 1e-9
    model = model_of("cpu", times)
    rates = [rate for plane in model.rates for row in plane for rate in row]
    assert 0 < min(rates) <= max(rates) == pytest.approx(law((4096, 4096, 4096)))
    assert model.call_seconds == model.dense_call_seconds == model.launch_seconds
    cost.from_dict(model.to_dict())


def test_shorter_takes_a_step_off_the_longest_side():
    assert shorter((4, 4096, 16)) == (4, 1024, 16)
    assert shorter((8, 8, 8)) == (4, 8, 8)
    assert shorter((1, 1, 4)) == (1, 1, 1)


def test_filled_needs_the_smallest_product_only():
    assert set(filled({(1, 1, 1): 3.0}).values()) == {3.0}


def test_a_rate_far_below_its_neighbours_is_lifted_to_them():
    rates = {shape: law(shape) for shape in ascending()}
    held_up = {**rates, (64, 64, 64): 1.0, (4096, 64, 64): 1.0}
    mended = lifted(held_up)
    assert mended[64, 64, 64] == min(law((16, 64, 64)), law((256, 64, 64)))
    assert mended[4096, 64, 64] == min(law((4096, 16, 64)), law((4096, 256, 64)))
    changed = {shape for shape in rates if mended[shape] != held_up[shape]}
    assert changed == {(64, 64, 64), (4096, 64, 64)}


def test_a_valley_of_slow_rates_is_left():
    """Products with 8 columns are slow on purpose: only across it are both neighbours faster."""
    rates = {shape: law(shape) / (20 if shape[1] == 8 else 1) for shape in ascending()}
    assert lifted(rates) == rates
    ends = {(1, 1, 1): 1.0, (4096, 4096, 4096): 1.0}
    assert lifted({**rates, **ends}) == {**rates, **ends}


@pytest.mark.parametrize(("tile", "ragged"), [(8, 0.5), (8, 0.8), (8, 1.0), (16, 0.7), (16, 0.9)])
def test_the_tile_is_found_in_noisy_times(tile, ragged):
    machine = replace(TRUE, tile=tile, ragged_tile=ragged)
    seconds = [
        {n: machine._whole_columns(n) * scale * (1 + 0.02 * (-1) ** n)
         for n in (*ANCHORS, *COLUMNS)}
        for scale in (1e-5, 3e-4)
    ]  # fmt: skip
    found, cost_of_a_part = fit_tile(seconds)
    assert found == tile
    assert cost_of_a_part == pytest.approx(ragged, rel=0.15)


def test_no_tile_is_found_where_columns_cost_alike():
    seconds = [{n: n * (1 + 0.01 * (-1) ** (n // 2)) for n in (*ANCHORS, *COLUMNS)}]
    assert fit_tile(seconds) == (1, 1.0)


# ---- rounds ----


class Clock:
    """Time passes in calls of what is run only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[probes.Key, list[float]]):
        self.now, self.seconds, self.calls = 0.0, seconds, []
        monkeypatch.setattr(probes.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(probes, "fastest", self.fastest)

    def runs(self) -> dict[probes.Key, probes.Run]:
        return {key: (lambda key=key: key) for key in self.seconds}

    def fastest(self, run: probes.Run, calls: int, device_type: str) -> float:
        key = run()
        self.calls.append((key, calls))
        taken = self.seconds[key]
        self.now += calls * taken[0]
        return taken.pop(0) if len(taken) > 1 else taken[0]


def test_rounds_keep_the_fastest_of_all_calls(monkeypatch):
    clock = Clock(monkeypatch, {("launch",): [3.0, 1.0, 2.0], (1, 1, 1): [1.0, 5.0, 4.0]})
    rounds = Rounds(clock.runs(), "cpu", 400.0)
    rounds.end = 14.0
    rounds.go()
    assert rounds.times == {("launch",): 1.0, (1, 1, 1): 1.0}
    assert [key for key, _ in clock.calls[:4]] == [("launch",), (1, 1, 1)] * 2


def test_rounds_leave_out_what_takes_too_long(monkeypatch):
    seconds = {(1, 1, 1): [0.5], (1, 1, 4): [0.9], (1, 4, 4): [3.6], (4, 4, 4): [9.0]}
    clock = Clock(monkeypatch, seconds)
    rounds = Rounds(clock.runs(), "cpu", 800.0)  # of which a product may take 2
    rounds.end = 40.0
    rounds.go()
    assert rounds.times == {(1, 1, 1): 0.5, (1, 1, 4): 0.9}


def test_short_things_are_called_more_often(monkeypatch):
    clock = Clock(monkeypatch, {("launch",): [0.001], ("stream",): [0.6]})
    rounds = Rounds(clock.runs(), "cpu", 800.0)
    rounds.end = 3.0
    rounds.go()
    assert clock.calls[2:4] == [(("launch",), 5), (("stream",), 3)]


def test_what_one_round_could_not_reach_is_left_out(monkeypatch):
    clock = Clock(monkeypatch, {("launch",): [9.0], (1, 1, 1): [1.0], (1, 1, 4): [1.0]})
    rounds = Rounds(clock.runs(), "cpu", 800.0)
    rounds.end = 8.0
    rounds.go()
    assert rounds.times == {("launch",): 9.0, (1, 1, 1): 1.0}


def test_everything_that_is_run_can_be_run():
    for key, run in make_runs("cpu").items():
        if prod(side for side in key if isinstance(side, int)) <= 64:
            run()


# ---- what is kept ----


def test_the_model_is_kept_and_later_plans_follow_it(folder):
    before = plan_linear(SPEC, 64)
    assert before.costs is shipped_model("cpu")
    threads, rng = torch.get_num_threads(), torch.get_rng_state()

    model = calibrate(seconds=0.02)

    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), rng)
    path = costs_path("cpu")
    assert [each for each in folder.rglob("*") if each.is_file()] == [path]
    assert cost.from_dict(json.loads(path.read_text())).to_dict() == model.to_dict()
    assert cost_model("cpu") is model
    assert plan_linear(SPEC, 64).costs is model
    assert plan_linear(SPEC, 64) is not before
    forget_plans()
    assert cost_model("cpu").to_dict() == model.to_dict()


def test_operators_that_have_run_take_up_the_new_speeds(folder):
    cores = [torch.randn(shape, dtype=torch.float64) for shape in SPEC.core_shapes]
    x = torch.ones(4, 64, dtype=torch.float64)

    def run() -> torch.Tensor:
        sizes = len(SPEC.in_modes), SPEC.in_size, SPEC.out_size
        return torch.ops.comera_fx.tt_linear.default(x, cores, None, "tt", *sizes)

    result = run()
    assert choose._linear_program.cache_info().currsize == 1
    calibrate(seconds=0.02)
    assert choose._linear_program.cache_info().currsize == 0
    torch.testing.assert_close(run(), result)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_the_caller_do_not_matter(folder, mode):
    with mode(), torch.autocast("cpu"):
        calibrate(seconds=0.02)
        assert torch.is_autocast_enabled("cpu")
    assert costs_path("cpu").exists()


@pytest.mark.parametrize(
    ("device", "seconds", "lines"),
    [
        (
            "tpu",
            1.0,
            [
                "calibrate does not know the device",
                "  got:      'tpu'",
                "  expected: 'cpu', or 'cuda' for the current CUDA device",
                "  mend:     write calibrate('cpu')",
            ],
        ),
        (
            "cuda",
            1.0,
            [
                "calibrate runs on the device it measures",
                "  got:      'cuda', and torch sees no CUDA device",
                "  expected: a device that torch can use",
                "  mend:     run it on the machine with the GPU, or write calibrate('cpu')",
            ],
        ),
        *(
            (
                "cpu",
                seconds,
                [
                    "calibrate's seconds is out of range",
                    f"  got:      {seconds!r}",
                    "  expected: a positive number of seconds",
                    "  mend:     use the default, 4.0",
                ],
            )
            for seconds in (0, -1.0, float("inf"), float("nan"), True, "4")
        ),
    ],
)
def test_bad_arguments_are_refused(folder, monkeypatch, device, seconds, lines):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        calibrate(device, seconds=seconds)
    assert str(caught.value).splitlines() == lines
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(folder, monkeypatch):
    (folder / "comera_fx").write_text("a file")
    monkeypatch.setattr(module, "make_runs", lambda device: pytest.fail("nothing is to run"))
    with pytest.raises(ConfigError) as caught:
        calibrate(seconds=0.02)
    assert str(caught.value).splitlines() == [
        "the measured speeds cannot be written",
        f"  got:      {costs_path('cpu')}: File exists",
        "  expected: a folder that can be written",
        "  mend:     set the environment variable COMERA_FX_CACHE to one",
    ]


def test_a_disk_that_is_full_is_an_error(folder, monkeypatch):
    def full(model: CostModel, path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_model", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        calibrate(seconds=0.02)


def test_without_a_home_there_is_no_place(monkeypatch):
    monkeypatch.setattr(module, "costs_path", lambda device: None)
    with pytest.raises(ConfigError) as caught:
        calibrate(seconds=0.02)
    assert str(caught.value).splitlines() == [
        "there is no place to keep the measured speeds",
        "  got:      no home folder",
        "  expected: a folder that can be written",
        "  mend:     set the environment variable COMERA_FX_CACHE to one",
    ]


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("key", [("layer", 0), (256, 256, 256)])
def test_a_busy_machine_is_refused(monkeypatch, key):
    rounds = Rounds({("layer", 0): int, (256, 256, 256): int}, "cpu", 1.0)
    rounds.times = {("layer", 0): 1e-3, (256, 256, 256): 1e-3}
    threads = []
    monkeypatch.setattr(
        module, "fastest", lambda *args: threads.append(torch.get_num_threads()) or 1e-3
    )
    module._refuse_if_busy(rounds)
    rounds.times[key] = 2.5e-3
    with pytest.raises(ConfigError) as caught:
        module._refuse_if_busy(rounds)
    assert str(caught.value).splitlines() == [
        "the machine is too busy to be measured",
        f"  got:      {' '.join(map(str, key))}: 2.500 ms with 2 threads, 1.000 ms with one",
        "  expected: threads that gain time, as they do where nothing else runs",
        "  mend:     run it again when less is running, or with fewer threads",
    ]
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2
    del rounds.times[256, 256, 256]  # held up so long that it was left out
    with pytest.raises(ConfigError, match="256 256 256: too long to be run with 2 threads"):
        module._refuse_if_busy(rounds)


def test_one_thread_waits_for_no_other(monkeypatch):
    monkeypatch.setattr(module, "fastest", lambda *args: pytest.fail("nothing is to run"))
    module._refuse_if_busy(Rounds({}, "cpu", 1.0))


def test_rates_are_those_of_float32_whatever_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        runs = make_runs("cpu")
        found = {result.dtype for run in runs.values() if isinstance(result := run(), torch.Tensor)}
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == {torch.float32}
