"""Models and comparisons that the tests of capture share."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from comera_fx.capture import Captured


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))


class Reader(nn.Module):
    """One layer that is called, one whose weight is read, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.idle = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.called(x), self.read.weight, self.read.bias)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return y if y.sum().item() > 0 else -y


class Stateful(nn.Module):
    """Writes to everything that a forward pass can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, max_norm=0.5)
        self.norm, self.drop, self.fc = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))
        self.num_calls, self.cache = 0, None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.count.add_(1)
        y = self.fc(self.drop(self.norm(self.embed(ids)))) * random.random()
        self.last, self.cache = y.detach()[0], y
        return y


def calls(captured: Captured) -> list[str]:
    return [str(n.target) for n in captured.gm.graph.nodes if n.op == "call_module"]


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
