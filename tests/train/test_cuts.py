"""Two hundred cuts at default settings: none raises the loss of its batch by more than 1 %."""

import functools
import math

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups

NOISE = 0.3
"""Of what is learned: a loss that goes to nothing has no percents."""
STUDENT_RANK, TEACHER_RANK = 32, 3
LARGEST_RISE = 0.01
RUNS = {"comera": (6, 150), "proximal": (10, 100), "rounding": (10, 100)}
"""Seeds, and steps of each: down to the target of half the size."""


def net(rank):
    edge = min(rank, 8)
    spec = TTSpec("tt", (8, 8), (8, 8), (1, edge, rank, edge, 1))
    return nn.Sequential(TTLinear(spec, 64, 64), nn.Tanh(), TTLinear(spec, 64, 64))


class Run:
    """Trains a net of many ranks on what one of few says, and looks at the loss around cuts."""

    def __init__(self, method, seed):
        torch.manual_seed(seed)
        self.teacher = net(TEACHER_RANK).requires_grad_(False)
        self.model = net(STUDENT_RANK)
        self.optimizer = torch.optim.AdamW(param_groups(self.model, lr=3e-3))
        config = RankConfig(method=method, target_ratio=0.5)
        self.adapter = RankAdapter(self.model, self.optimizer, config)
        self.rises = []
        cut = self.adapter._method.prune
        self.adapter._method.prune = functools.partial(self.measured, cut)

    def train(self, steps):
        for _ in range(steps):
            self.x = torch.randn(64, 64)
            clean = self.teacher(self.x)
            self.y = clean + NOISE * torch.randn_like(clean)
            self.optimizer.zero_grad()
            self.adapter.loss(self.task()).backward()
            self.optimizer.step()
            self.adapter.step()
        return self

    def task(self):
        return nn.functional.mse_loss(self.model(self.x), self.y)

    def measured(self, cut, *args):
        """Cut, and note the rise of the loss if any rank has gone."""
        ranks = self.adapter.ranks
        with torch.no_grad():
            before = self.task().item()
            cut(*args)
            after = self.task().item()
        if self.adapter.ranks != ranks:
            self.rises.append(after / before - 1)


@functools.cache
def rises(method):
    """Of all cuts of a method's runs, each of which comes down to its target, or almost."""
    seeds, steps = RUNS[method]
    found = []
    for seed in range(seeds):
        run = Run(method, seed).train(steps)
        assert run.adapter.size < 0.6 * run.adapter.initial_size
        found += run.rises
    return found


@pytest.mark.parametrize("method", RUNS)
def test_no_cut_raises_the_loss_by_more_than_a_hundredth(method):
    assert max(rises(method)) <= LARGEST_RISE
    assert all(map(math.isfinite, rises(method)))


def test_they_are_two_hundred():
    assert sum(len(rises(method)) for method in RUNS) >= 200


def test_ranks_that_have_died_act_as_nothing_before_they_are_cut():
    assert max(map(abs, rises("comera"))) < 1e-5
