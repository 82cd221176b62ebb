"""A task that takes no time."""

import torch
from torch import nn

from bench.study_task import Task
from comera_fx import OptimizeConfig

RATIO = 4.0


def squared_error(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def draw(seed, step):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(8, 32, generator=generator)
    return x, x.flip(1).cumsum(1) / 6


def build():
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32), nn.Linear(32, 32))


def make_task(quick=False, device="cpu", width=None, *, steps=60, better="lower", name="tiny"):
    """Two layers are compressed, the last one is not."""
    parts = {"validation": draw(900, 0), "test": draw(901, 0)}
    return Task(
        name=name,
        quality="squared error",
        better=better,
        steps=steps,
        build=build,
        batch=draw,
        loss=squared_error,
        evaluate=lambda model, part, share: squared_error(model, parts[part]).item(),
        config=OptimizeConfig(targets=("0", "2"), min_params=0),
        inputs=(torch.zeros(8, 32),),
        settings={"text": "a"},
        device=device,
        warmup_steps=4,
    )
