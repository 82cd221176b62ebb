"""One run of a study, from the first step to the figures of its row; and timed steps."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor, nn

from bench.methods import METHODS, Run, Setup, adamw
from bench.study_task import Part, Task
from bench.timing import Row, times_ms
from comera_fx import OptimizeConfig, optimize

CURVE_POINTS = 5
CURVE_SHARE = 0.25
"""Share of the data on which points of a curve are measured; the last one is the result."""
NEARBY = 10
"""Steps on either side that a step with a cut is compared with."""
STILL = 1e-7
"""Rate of timed steps, at which nothing is learnt and no rank dies."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def train(setup: Setup, method: str, part: Part) -> Row:
    """Train a model and return what its row holds.

    A run whose loss is not finite at a point of its curve ends there, and has no quality.

    Args:
        setup: What to train.
        method: Its name in ``METHODS``.
        part: The data that quality is measured on.
    """
    task = setup.task
    memory = PeakMemory(task.device)
    run = METHODS[method].build(setup)
    start_params = run.compressed_params
    sizes: list[int] = []
    seconds: list[float] = []
    curve: list[tuple[int, float, float]] = []
    total, failure = torch.zeros((), device=task.device), ""
    share = task.rate_share(setup.steps)
    torch.manual_seed(setup.seed)
    memory.reset()
    for step in range(setup.steps):
        batch = task.batch(setup.seed, step)
        begin = _clock(task.device)
        loss = train_step(run, task, batch, share(step))
        seconds.append(_clock(task.device) - begin)
        total += loss.detach()
        sizes.append(run.compressed_params)
        if _is_point(step, setup.steps):
            if not math.isfinite(float(total)):
                failure = f"diverged by step {step + 1}"
                break
            if step + 1 < setup.steps:
                glance = evaluate(task, run.model, part, CURVE_SHARE)
                curve.append((step + 1, round(sum(seconds), 3), round(glance, 5)))
    peak_bytes, state_bytes = memory.peak_bytes(), optimizer_bytes(run)
    run.finish()
    quality = math.nan if failure else evaluate(task, run.model, part, 1.0)
    if not failure:
        curve.append((setup.steps, round(sum(seconds), 3), round(quality, 5)))
    return {
        "quality": quality,
        "curve": curve,
        "compressed_params": run.compressed_params,
        "start_params": start_params,
        "mean_params": round(fmean(sizes)),
        "total_params": sum(p.numel() for p in run.model.parameters()),
        "optimizer_bytes": state_bytes,
        "peak_bytes": peak_bytes,
        "step_ms": round(1e3 * median(seconds), 3),
        "seconds": round(sum(seconds), 3),
        "cut_share": round(cut_share(seconds, run.cut_every), 5),
        "shapes": run.shapes,
        "failure": failure,
    }


def train_step(run: Run, task: Task, batch: object, rate_share: float) -> Tensor:
    """Train on a batch at a share of the peak rates; return the task's loss."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate_share
        optimizer.zero_grad()
    loss = task.loss(run.model, batch)
    run.minimised(loss).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.model.parameters(), task.clip_norm)
    for optimizer in run.optimizers:
        optimizer.step()
    run.after_step()
    return loss


def evaluate(task: Task, model: nn.Module, part: Part, share: float) -> float:
    """Return the quality of a model on a share of a part of the data."""
    model.eval()
    with torch.no_grad():
        quality = task.evaluate(model, part, share)
    model.train()
    return quality


def optimizer_bytes(run: Run) -> int:
    """Return the bytes of all tensors that the optimizers keep from step to step."""
    states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cut_share(seconds: Sequence[float], cut_every: int | None) -> float:
    """Return what cuts cost over a run, as a share of what all of its other work takes.

    A cut falls into one step; in the one after it plans are made for the new sizes.

    Args:
        seconds: Of each step.
        cut_every: Steps from cut to cut; ``None`` if there are none.
    """
    if cut_every is None or cut_every < 3:
        return 0.0
    is_slow = [step % cut_every in (0, cut_every - 1) for step in range(len(seconds))]
    extra = 0.0
    for step, time_ in enumerate(seconds):
        low = max(0, step - NEARBY)
        around = range(low, min(len(seconds), step + NEARBY + 1))
        usual = [seconds[i] for i in around if not is_slow[i]]
        if is_slow[step] and usual and step >= cut_every - 1:  # not the first step of all
            extra += time_ - median(usual)
    return max(0.0, extra / (sum(seconds) - extra))


def _is_point(step: int, steps: int) -> bool:
    """Whether a step is the last one of a fifth of the run, or the very last one."""
    parts = [CURVE_POINTS * count // steps for count in (step, step + 1)]
    return parts[0] < parts[1] or step + 1 == steps


# ---- timed steps ----


def time_steps(
    setups: Mapping[str, Setup], shapes: Mapping[str, Mapping[str, object]], rounds: int
) -> list[Row]:
    """Time steps of methods in turns, each at its start and at the sizes that it has ended with.

    Args:
        setups: Method to what is trained; "dense" is among them.
        shapes: Method to the sizes that a run has ended with, of those whose layers shrink.
        rounds: Measured turns.

    Returns:
        A row for each method: medians in milliseconds, and that of dense in the same turns.
    """
    runs: dict[str, Run] = {}
    for name, setup in setups.items():
        runs[f"{name} start"] = METHODS[name].build(setup)
        if name in shapes:
            runs[f"{name} final"] = METHODS[name].build(replace(setup, shapes=dict(shapes[name])))
    batches = {name: setup.task.batch(setup.seed, 0) for name, setup in setups.items()}

    def step_of(name: str, run: Run) -> Callable[[], object]:
        method = name.partition(" ")[0]
        task, batch = setups[method].task, batches[method]

        def step() -> None:
            train_step(run, task, batch, STILL)
            _clock(task.device)

        return step

    # Few steps in all, as some methods come to cut at some step, whatever the rate.
    times = times_ms({name: step_of(name, run) for name, run in runs.items()}, rounds, twice=False)
    ms = {name: median(values) for name, values in times.items()}
    for name, run in runs.items():
        rare = run.occasional()
        if rare is not None:  # done once in many steps, so that it is in no median
            ms[name] += median(times_ms({name: rare[0]}, 3)[name]) / rare[1]
    return [
        {
            "method": name,
            "start_ms": round(ms[f"{name} start"], 3),
            "final_ms": round(ms.get(f"{name} final", ms[f"{name} start"]), 3),
            "dense_ms": round(ms["dense start"], 3),
            "rounds": rounds,
        }
        for name in setups
    ]


# ---- memory ----


class PeakMemory:
    """Peak memory of a run above what the process held before it.

    On a CPU it is the peak of the resident set. That is read, and set back, through ``/proc``
    where there is one: ``ru_maxrss`` of a process begins with the peak of the one that started
    it.

    Args:
        device: Where the model will be.
    """

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")
        if self.is_cuda:
            self.before = torch.cuda.memory_allocated()
            return
        warm_up()
        self.before = _status_bytes("VmRSS") or _most_resident_bytes()

    def reset(self) -> None:
        """Forget the peak of what was done until now, such as building the model."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        elif CLEAR.exists():
            CLEAR.write_text("5")

    def peak_bytes(self) -> int:
        """Return the peak since ``reset``, without what was there at the beginning."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated() - self.before
        return (_status_bytes("VmHWM") or _most_resident_bytes()) - self.before


def warm_up() -> None:
    """Train a layer or two, so that what libraries load at their first use is there."""
    config = OptimizeConfig(init="random", max_rank=4, min_params=0, only_if_faster=False)
    example = torch.ones(1, 64)
    # Example inputs have the model exported, which loads more than all else.
    for model in (nn.Linear(64, 64), optimize(nn.Linear(64, 64), example, config=config)):
        optimizer = adamw([{"params": list(model.parameters()), "lr": 1e-3}])
        model(torch.ones(256, 64)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _status_bytes(key: str) -> int | None:
    if not STATUS.exists():
        return None
    lines = STATUS.read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":")), None)


def _most_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
