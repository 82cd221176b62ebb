"""Models that the tests of inspection look at."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_fx

SIZE = 96
CONFIG = comera_fx.OptimizeConfig(
    init="random", max_rank=8, only_if_faster=False, min_params=0, share=False
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x))


class Encoder(nn.Module):
    """Deep enough to be drawn by modules."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, SIZE)
        self.blocks = nn.ModuleList(Attention() for _ in range(num_layers))
        self.head = nn.Linear(SIZE, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = F.relu(block(x))
        return self.head(x)


def ids() -> Tensor:
    return torch.arange(14).reshape(2, 7)


def optimised(num_layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return comera_fx.optimize(Encoder(num_layers), ids(), config=CONFIG)


def with_inputs() -> tuple[nn.Module, tuple[Tensor]]:
    return optimised(2), (ids(),)


def dense() -> nn.Module:
    return Encoder(1)


def breaks() -> nn.Module:
    raise RuntimeError("no weights here")


def a_list() -> list[int]:
    return [1]


not_callable = 3
