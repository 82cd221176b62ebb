"""Models whose weights have the ranks of SPEC: at these ranks TT form loses nothing."""

import torch
from torch import nn

from comera_fx.config import OptimizeConfig
from comera_fx.spec import TTSpec
from comera_fx.tt import random_cores, to_dense

SPEC = TTSpec("tt", (8, 8), (8, 8), (1, 4, 4, 4, 1))
RANDOM = OptimizeConfig(init="random", max_rank=4, only_if_faster=False)
LOSSLESS = OptimizeConfig(modes={"*": (SPEC.in_modes, SPEC.out_modes)}, max_rank=4)


def exact_linear(bias: bool = True, seed: int = 0) -> nn.Linear:
    """A float64 layer whose weight has the ranks of SPEC, so that nothing is lost."""
    torch.manual_seed(seed)
    layer = nn.Linear(64, 64, bias, dtype=torch.float64)
    layer.weight.data = to_dense(random_cores(SPEC, 0.1, dtype=torch.float64), SPEC)
    return layer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = exact_linear(), exact_linear(bias=False, seed=1)
        self.scale = nn.Parameter(torch.ones(64, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": exact_linear(), "b": nn.Sequential(exact_linear(seed=2))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) + self.heads["b"](x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = exact_linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return y if y.sum().item() > 0 else -y
