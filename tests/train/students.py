"""A small student of one fixed lesson, with the adapter that cuts it."""

import io

import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups

STUDENT = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))


def make(rank_lr=3e-2, method="comera", **config):
    torch.manual_seed(1)
    model = nn.Sequential(TTLinear(STUDENT, 32, 32), nn.Tanh(), TTLinear(STUDENT, 32, 32))
    optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3, rank_lr=rank_lr))
    return model, optimizer, RankAdapter(model, optimizer, RankConfig(method=method, **config))


def batch(step):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x.roll(1, 1))


def train(model, optimizer, adapter, steps):
    losses = []
    for step in steps:
        x, y = batch(step)
        task = nn.functional.mse_loss(model(x), y)
        loss = adapter.loss(task)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        adapter.step()
        losses.append(task.item())
    return losses


def saved(values):
    stored = io.BytesIO()
    torch.save(values, stored)
    return stored.getvalue()
