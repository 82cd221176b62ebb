"""Small models with layers in TT form, compiled by the backend and set against eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize

import comera_fx
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.spec import TTSpec
from comera_fx.tt import random_cores
from tests.dynamo_graphs import results_of
from tests.tolerances import EXACT

WIDTH = 12
CONFIG = comera_fx.OptimizeConfig(init="random", max_rank=3, min_params=0, only_if_faster=False)
SPEC = TTSpec("tt", (3, 4), (4, 3), (1, 3, 5, 3, 1))
BREAK = torch._dynamo.graph_break
graph_breaks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
"""Dynamo looks at ``.grad`` of what one graph hands to the next, and hides torch's warning."""


def floats(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(bias: bool = True, spec: TTSpec = SPEC) -> TTLinear:
    made = TTLinear(spec, spec.in_size, spec.out_size, bias=bias, dtype=torch.float64)
    if bias:
        nn.init.normal_(made.bias)
    return made


class Stack(nn.Module):
    """``count`` layers; what is done between them is given."""

    def __init__(self, count: int = 2, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(bias=number % 2 == 0) for number in range(count))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = self.between(each(x))
        return x


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self, stop: Callable[[Tensor], object] = lambda x: BREAK()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.stop = layer(), layer(bias=False), stop

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.stop(x)
        return self.second(x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = layer(), layer(bias=False), layer()
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        return x + self.dropout(F.scaled_dot_product_attention(query, key, value))


class Language(nn.Module):
    """A table, a layer, and a head that reads the table's cores or its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        spec = TTSpec("ttm", (3, 4), (5, 6), (1, 4, 1))  # of the head: WIDTH to 30 words
        self.table = TTEmbedding(
            TTSpec("ttm", (5, 6), (3, 4), (1, 4, 1)), 30, WIDTH, padding_idx=1, dtype=torch.float64
        )
        self.layer = layer()
        self.head = None if tied else layer(spec=spec)
        self.tied = tied

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.layer(self.table(ids)))
        if self.head is not None:
            return self.head(x)
        return F.linear(x, self.weight())

    def weight(self) -> Tensor:
        table = self.table
        return torch.ops.comera_fx.tt_dense.default(list(table.cores), "ttm", 2, 30, WIDTH).t()


class Made(nn.Module):
    """A parametrization: the weight is made from cores."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        half = out_features // 4
        self.spec = TTSpec("tt", (in_features // 3, 3), (4, half), (1, 3, 4, 3, 1))
        cores = random_cores(self.spec, 1.0, dtype=torch.float64)
        self.cores = nn.ParameterList(cores)

    def forward(self, _: Tensor) -> Tensor:
        spec = self.spec
        return torch.ops.comera_fx.tt_dense.default(
            list(self.cores), spec.layout, len(spec.in_modes), spec.in_size, spec.out_size
        )


def on_cores(module: nn.Module, name: str) -> None:
    """Have a matrix of a module made from cores."""
    out_features, in_features = getattr(module, name).shape
    getattr(module, name).requires_grad_(False)
    parametrize.register_parametrization(module, name, Made(out_features, in_features))
    module.parametrizations[name].original.requires_grad_(False)


def encoder(dropout: float = 0.2) -> nn.TransformerEncoderLayer:
    """torch's own encoder layer, all its matrices made from cores: four of them."""
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout, batch_first=True, dtype=torch.float64)
    on_cores(made.self_attn, "in_proj_weight")
    for linear in (made.self_attn.out_proj, made.linear1, made.linear2):
        on_cores(linear, "weight")
    return made


def compiled(function: Callable[..., Any], fullgraph: bool = True, **options: Any) -> Any:
    options = {"inner": "aot_eager", **options}
    return torch.compile(function, backend="comera", fullgraph=fullgraph, options=options)


def assert_as_eager(
    fast: Callable[..., Any],
    model: nn.Module,
    *inputs: Tensor,
    slow: Callable[..., Any] | None = None,
    tolerances: dict[str, float] = EXACT,
) -> None:
    """Check outputs, and gradients of every parameter and input."""
    mine = results_of(fast, model, inputs)
    theirs = results_of(slow or model, model, inputs)
    torch.testing.assert_close(mine, theirs, **tolerances)


def counted(*names: str) -> list[int]:
    return [counters["comera_fx"][name] for name in names]


def assert_expanded(layers: int, graphs: int = 1) -> None:
    """Check that all TT layers of a trained model were expanded, and both passes compiled."""
    found = counted("graphs", "tt_layers", "expanded", "forward_graphs", "backward_graphs")
    assert found == [graphs, layers, layers, graphs, graphs]


def num_graphs() -> int:
    """How many graphs were compiled; all of them, with every TT layer expanded, by this backend."""
    ours = counters["comera_fx"]
    assert ours["graphs"] == counters["stats"]["unique_graphs"]
    assert ours["expanded"] == ours["tt_layers"]
    return ours["graphs"]
