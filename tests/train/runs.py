"""A run to save and resume; this file as a script is one that is going to be killed."""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from comera_fx import OptimizeConfig, optimize
from comera_fx.config import RankConfig
from comera_fx.train import RankAdapter, latest_run, load_run, param_groups, save_run

SETTINGS = {
    "method": "comera",
    "target_ratio": 0.5,
    "warmup_steps": 5,
    "early_steps": 10,
    "prune_every": 5,
}
OPTIMIZERS = {
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
}


def optimized(seed=0):
    dense = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 32))
    config = OptimizeConfig(
        init="random", max_rank=8, min_params=0, only_if_faster=False, seed=seed
    )
    return optimize(dense, config=config)


class Loop:
    """A training loop as users write it: a dense model, optimised, with dropout and a schedule.

    Args:
        seed: Of the weights; a resumed run has another, and its numbers come from the file.
        optimizer: A name in ``OPTIMIZERS``.
        plain: Whether the optimizer gets ``model.parameters()`` instead of groups.
        settings: Of ``RankConfig``, instead of those of ``SETTINGS``.
    """

    def __init__(self, seed=0, optimizer="adamw foreach", plain=False, **settings):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - users' loops do
        self.model = optimized(seed)
        lr = 0.1 if optimizer == "sgd" else 3e-3
        groups = (
            [{"params": list(self.model.parameters()), "lr": lr}]
            if plain
            else param_groups(self.model, lr=lr, rank_lr=20 * lr)
        )
        self.optimizer = OPTIMIZERS[optimizer](groups)
        settings = {**SETTINGS, **settings}
        if settings["method"] == "comera":
            settings = {"rho": 0.5, **settings}
        self.adapter = RankAdapter(self.model, self.optimizer, RankConfig(**settings))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=200)
        self.step = 0
        self.losses = []

    @property
    def parts(self):
        names = ("model", "optimizer", "adapter", "scheduler")
        return {name: getattr(self, name) for name in names}

    def train(self, until):
        while self.step < until:
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(self.step))
            x = x * (1 + 0.01 * random.random()) + 0.01 * np.random.rand()  # noqa: NPY002
            task = nn.functional.mse_loss(self.model(x), torch.tanh(x.roll(1, 1)))
            self.optimizer.zero_grad()
            self.adapter.loss(task).backward()
            self.optimizer.step()
            self.adapter.step()
            self.scheduler.step()
            self.step += 1
            self.losses.append(task.item())
        return self

    def save(self, path, **settings):
        extra = {"losses": self.losses}
        return save_run(path, step=self.step, extra=extra, **settings, **self.parts)

    def load(self, path):
        run = load_run(path, **self.parts)
        self.step, self.losses = run.step, list(run.extra["losses"])
        return self

    def numbers(self):
        """Every number of the run, exactly."""
        states = [part.state_dict() for part in self.parts.values()]
        draws = (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002
        return repr((as_lists(states), self.losses, draws))


def as_lists(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(entry) for key, entry in value.items()}
    return [as_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


END = 45


def main(folder, kill_in):
    """Train to the end with a checkpoint at every step; say each step before it is saved."""
    torch.set_num_threads(1)
    loop = Loop(1)
    if latest_run(folder) is not None:
        loop.load(folder)
    save = torch.save

    def half(state, path):
        save(state, path)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    while loop.step < END:
        loop.train(loop.step + 1)
        if loop.step == kill_in:
            torch.save = half
        print(loop.step, flush=True)  # noqa: T201 - what the test waits for
        loop.save(folder, keep=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
