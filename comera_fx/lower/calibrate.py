"""Measure how fast this machine runs what plans are made of, and keep it for later plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median

import torch

from comera_fx.errors import ConfigError
from comera_fx.lower import choose
from comera_fx.lower.fit import ANCHORS, COLUMNS, SIDES, ascending, filled, fit_tile, lifted
from comera_fx.lower.probes import (
    CALLS,
    COPIED,
    TALL,
    TINY,
    TINY_TOKENS,
    Key,
    Rounds,
    make_runs,
    shape_of,
)
from comera_fx.lower.timing import fastest
from comera_fx.plan.cost import (
    FLOAT32_BYTES,
    CostModel,
    cost_model,
    costs_path,
    device_name,
    write_model,
)
from comera_fx.plan.linear import plan_linear, rank_plans
from comera_fx.plan.shared import joint_saving, plan_shared

LEAST_BUSY = 0.05
"""Least time of a product above that of a bare call, in such calls: below, it is noise."""

SURE = 4
"""Bare calls that a product takes at least whose rate can be the highest."""

BUSY = 2.0
"""Time with all threads, over that with one, above which other processes hold the cores."""

_CUBE = (256, 256, 256)


def calibrate(device: str = "cpu", *, seconds: float = 4.0) -> CostModel:
    """Measure the speeds that plans are predicted by, and keep them for this device.

    Plans made afterwards, in this process and in later ones, are made by them; layers that have
    run keep the plans of calls that they have run. On a CPU the speeds hold for the number of
    threads that torch uses now.

    Args:
        device: "cpu" or "cuda", the current one.
        seconds: How long to measure; a slow machine takes longer for the first of its rounds.

    Returns:
        The model as it was written, to the user's cache folder or to that which the environment
        variable ``COMERA_FX_CACHE`` names.

    Raises:
        ConfigError: If there is no such device, or no place to keep the figures, or other
            processes keep the machine too busy.
    """
    _check(device, seconds)
    path = _path(device)
    with _plain_torch(device):
        rounds = Rounds(make_runs(device), device, seconds)
        rounds.go()
        if device == "cpu":
            _refuse_if_busy(rounds)
    model = model_of(device, rounds.times)
    try:
        write_model(model, path)
    except OSError as error:
        raise _no_place(path, error) from error
    forget_plans()
    return cost_model(device)


def forget_plans() -> None:
    """Have plans made anew, by the speeds that are found now."""
    for cached in (cost_model, rank_plans, plan_shared, joint_saving, choose._linear_program):
        cached.cache_clear()


def _check(device: str, seconds: float) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            "calibrate does not know the device",
            got=repr(device),
            expected="'cpu', or 'cuda' for the current CUDA device",
            mend="write calibrate('cpu')",
        )
    if device_name(device) is None:
        raise ConfigError(
            "calibrate runs on the device it measures",
            got="'cuda', and torch sees no CUDA device",
            expected="a device that torch can use",
            mend="run it on the machine with the GPU, or write calibrate('cpu')",
        )
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < float("inf"):
        raise ConfigError(
            "calibrate's seconds is out of range",
            got=repr(seconds),
            expected="a positive number of seconds",
            mend="use the default, 4.0",
        )


def _path(device: str) -> Path:
    path = costs_path(device)
    if path is None:
        raise ConfigError(
            "there is no place to keep the measured speeds",
            got="no home folder",
            expected="a folder that can be written",
            mend="set the environment variable COMERA_FX_CACHE to one",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_place(path, error) from error
    return path


def _no_place(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "the measured speeds cannot be written",
        got=f"{path}: {error.strerror or error}",
        expected="a folder that can be written",
        mend="set the environment variable COMERA_FX_CACHE to one",
    )


@contextmanager
def _plain_torch(device: str) -> Iterator[None]:
    """Whatever modes the caller is in, products run as they do in ordinary training."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _refuse_if_busy(rounds: Rounds) -> None:
    """Threads that wait for their turn on a core make everything slower than one thread does.

    Raises:
        ConfigError: If they do: plans would be made by what other processes were at.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return
    checked = [_CUBE, *(key for key in rounds.runs if shape_of(key) is None)]
    torch.set_num_threads(1)
    try:
        alone = {key: fastest(rounds.runs[key], CALLS["cpu"], "cpu") for key in checked}
    finally:
        torch.set_num_threads(threads)
    together = {key: rounds.times.get(key, float("inf")) for key in checked}
    worst = max(checked, key=lambda key: together[key] / alone[key])
    if together[worst] > BUSY * alone[worst]:
        raise ConfigError(
            "the machine is too busy to be measured",
            got=f"{' '.join(map(str, worst))}: {_shown(together[worst])} with {threads} threads, "
            f"{_shown(alone[worst])} with one",
            expected="threads that gain time, as they do where nothing else runs",
            mend="run it again when less is running, or with fewer threads",
        )


def _shown(seconds: float) -> str:
    return "too long to be run" if seconds == float("inf") else f"{1e3 * seconds:.3f} ms"


def model_of(device: str, times: Mapping[Key, float]) -> CostModel:
    """Return the model that explains the seconds things took; large products may be missing."""
    bare = times[1, 1, 1]

    def busy(key: Key) -> float:
        return max(times[key] - bare, LEAST_BUSY * bare)

    measured = {shape: 2 * prod(shape) / busy(shape) for shape in ascending() if shape in times}
    # A product hardly longer than a bare call has any rate, by noise.
    sure = [rate for shape, rate in measured.items() if times[shape] > SURE * bare]
    peak = max(sure, default=max(measured.values()))
    rates = lifted(filled({shape: min(rate, peak) for shape, rate in measured.items()}))
    tile, ragged_tile = fit_tile(
        [{n: busy(("tall", m, n, k)) for n in (*ANCHORS, *COLUMNS)} for m, k in TALL]
    )
    seconds_copied = sum(busy(("copy", number)) for number in range(len(COPIED)))
    numbers_copied = sum(prod(sizes) for sizes, _ in COPIED)
    name = device_name(device)
    assert name is not None, "checked before anything was measured"
    launch = times["launch",]
    model = CostModel(
        device=name,
        launch_seconds=launch,
        call_seconds=launch,
        dense_call_seconds=launch,
        sides=SIDES,
        rates=tuple(tuple(tuple(rates[m, n, k] for k in SIDES) for n in SIDES) for m in SIDES),
        tile=tile,
        ragged_tile=ragged_tile,
        bytes_per_second=2 * FLOAT32_BYTES * SIDES[-1] ** 2 / busy(("stream",)),
        copied_bytes_per_second=FLOAT32_BYTES * numbers_copied / seconds_copied,
    )
    return _with_calls(model, device, times)


def _with_calls(model: CostModel, device: str, times: Mapping[Key, float]) -> CostModel:
    """Take from the times of tiny layers what their products are predicted to take."""
    planned, dense = [], []
    for number, spec in enumerate(TINY):
        plan = replace(plan_linear(spec, TINY_TOKENS, device_type=device), costs=model)
        planned.append(times["layer", number] - plan.program.seconds)
        products = plan.dense_seconds - model.dense_call_seconds
        dense.append(times["dense", number] - products)
    least = model.launch_seconds  # noise may leave nothing
    return replace(
        model,
        call_seconds=max(median(planned), least),
        dense_call_seconds=max(median(dense), least),
    )
