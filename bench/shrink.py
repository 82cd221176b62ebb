"""What a cut of ranks does to a training step: whole steps, and the tensor-train products alone.

The language model of ``bench.code_lm`` from rank 32 and from rank 64, before and after its ranks
are cut to 0.3 of the size. Appends to ``bench/results/shrink.csv``.
Run: ``python -m bench.shrink [--repeats N] [--threads 2]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from bench.code_lm import make_task
from bench.options import parse
from bench.study_task import Task
from bench.timing import Row, append_rows, format_table, repeats_within, times_ms
from comera_fx import RankAdapter, RankConfig, optimize, param_groups
from comera_fx.modules import TTModule, tt_modules

RANKS, TARGET_RATIO, SECONDS = (32, 64), 0.3, 60.0


def measure(task: Task, rank: int, repeats: int | None = None) -> Row:
    """Return one row: a step and its TT products before and after the cut, interleaved."""
    before = in_tt_form(task, rank)
    after = shrunk(before)
    batch = task.batch(0, 0)
    versions: dict[str, Callable[[], object]] = {}
    for name, model in (("before", before), ("after", after)):
        versions[f"step_{name}"] = step_of(task, model, batch)
        versions[f"products_{name}"] = products_of(task, model, batch)
    turns = repeats_within(SECONDS, versions) if repeats is None else repeats
    ms = {name: median(values) for name, values in times_ms(versions, turns).items()}
    return {
        "rank": rank,
        "size_before": size_of(before),
        "size_after": size_of(after),
        **{f"{name}_ms": round(value, 2) for name, value in ms.items()},
        "products_ratio": round(ms["products_before"] / ms["products_after"], 3),
        "step_ratio": round(ms["step_before"] / ms["step_after"], 3),
        "repeats": turns,
    }


def in_tt_form(task: Task, rank: int) -> nn.Module:
    """Return the model with random cores of this rank."""
    config = replace(task.config, init="random", max_rank=rank)
    return optimize(task.dense(0), task.inputs, config=config)


def shrunk(model: nn.Module) -> nn.Module:
    """Return a copy whose ranks are cut to ``TARGET_RATIO`` at once."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(param_groups(model, lr=0.0))
    config = RankConfig(
        method="rounding", target_ratio=TARGET_RATIO, prune_every=1, shrink_steps=0, min_rank=1
    )
    adapter = RankAdapter(model, optimizer, config)
    adapter.step()
    assert adapter.size <= TARGET_RATIO * adapter.initial_size, "the cut missed its target"
    return model


def size_of(model: nn.Module) -> int:
    """Return the parameters in the cores."""
    return sum(layer.tt_params for _, layer in tt_modules(model))


def step_of(task: Task, model: nn.Module, batch: Tensor) -> Callable[[], object]:
    """Return a training step with AdamW."""
    optimizer = torch.optim.AdamW(
        [group for group in param_groups(model, lr=1e-3) if group["params"]], fused=True
    )

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def products_of(task: Task, model: nn.Module, batch: Tensor) -> Callable[[], object]:
    """Return forward and backward of every TT layer by itself, on what it is given in a step."""
    seen: list[tuple[TTModule, Tensor, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, TTModule)
        given = inputs[0].detach().clone().requires_grad_()
        seen.append((layer, given, torch.randn_like(output)))

    layers = [layer for _, layer in tt_modules(model)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        task.loss(model, batch)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(layers), "a layer ran inside of another operator"

    def run() -> None:
        for layer, given, gradient in seen:
            given.grad = None
            layer(given).backward(gradient)

    return run


def main() -> None:
    """Measure both ranks, print a table and append the rows."""
    options = parse(__doc__, results="shrink.csv")
    task = make_task()
    rows = [measure(task, rank, options.repeats) for rank in RANKS]
    print(format_table(rows))
    append_rows(options.results, rows)


if __name__ == "__main__":
    main()
