"""Whole models in the backend: all TT layers are planned, and results are those of eager."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import comera_fx
from comera_fx.config import OptimizeConfig
from comera_fx.modules import TTEmbedding, TTLinear
from tests.backend.models import (
    CONFIG,
    WIDTH,
    Broken,
    Language,
    SelfAttention,
    Stack,
    assert_as_eager,
    assert_expanded,
    compiled,
    counted,
    encoder,
    floats,
    graph_breaks,
    layer,
)

X = floats(5, WIDTH)
SEQUENCE = floats(2, 4, WIDTH)
IDS = torch.tensor([[0, 1, 29], [7, 7, 1]])


def test_layers_that_read_one_input():
    model = SelfAttention()
    assert_as_eager(compiled(model), model, SEQUENCE)
    assert_expanded(3)


@pytest.mark.parametrize(("tied", "layers"), [(False, 3), (True, 3)], ids=["own", "tied"])
def test_tables_and_heads(tied, layers):
    model = Language(tied)
    assert_as_eager(compiled(model), model, IDS)
    assert_expanded(layers)


def test_rank_weights_are_multiplied_in():
    model = Stack()
    for each in model.layers:
        each.attach_rank_weights(0.1)
        with torch.no_grad():
            each.rank_weights[0][0] = 0.05  # below the threshold
            each.rank_weights[1].mul_(1.5)
    assert_as_eager(compiled(model), model, X)
    assert_expanded(2)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_an_encoder_layer_of_torch_on_cores(train):
    model = encoder().train(train)
    assert_as_eager(compiled(model), model, SEQUENCE)
    assert_expanded(4)


def test_an_encoder_layer_of_torch_without_gradients():
    model = encoder().eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(SEQUENCE), model(SEQUENCE))
    assert counted("tt_layers", "expanded", "inference_graphs") == [4, 4, 1]


def test_frozen_layers_stay_so():
    model = Stack(3)
    model.layers[1].requires_grad_(False)
    assert_as_eager(compiled(model), model, X)
    assert_expanded(3)
    assert all(p.grad is None for p in model.layers[1].parameters())


def test_a_layer_called_twice_counts_per_call():
    model = Stack(1)
    twice = compiled(lambda x: model(model(x)))
    assert_as_eager(twice, model, X, slow=lambda x: model(model(x)))
    assert_expanded(2)


def test_layers_under_vmap_are_left_to_torch():
    model = Stack(1)

    def function(x):
        return model(torch.vmap(lambda row: model(row))(x))

    assert_as_eager(compiled(function), model, X, slow=function)
    assert counted("tt_layers", "expanded", "backward_graphs") == [2, 1, 1]


class Checkpointed(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stack() for _ in range(blocks))
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda y, f=block: self.dropout(f(y)), x, use_reentrant=False)
        return x


def test_checkpointed_blocks():
    model = Checkpointed()
    assert_as_eager(compiled(model), model, X)
    assert_expanded(4)


def test_what_optimize_returns():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(40, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)
    )
    model = comera_fx.optimize(model, torch.tensor([1, 2]), config=CONFIG).double()
    assert [type(each) for each in model[:2]] == [TTEmbedding, TTLinear]
    assert_as_eager(compiled(model), model, IDS)
    assert_expanded(3)


# ---- dense models ----

LARGE = 260
"""A matrix of this size is worth a word."""


class Dense(nn.Module):
    """Two dense layers, and a graph break in between if asked for."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(LARGE, LARGE), nn.Linear(LARGE, WIDTH)
        self.double()
        self.breaks = breaks

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


@graph_breaks
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "parts"])
def test_a_dense_model_is_pointed_to_optimize_once(breaks):
    model, x = Dense(breaks), floats(3, LARGE)
    fast = compiled(model, fullgraph=False)
    with pytest.warns(UserWarning, match=r"\(260, 260\).*comera_fx.optimize\(model\)"):
        assert_as_eager(fast, model, x)
    assert_as_eager(fast, model, floats(4, LARGE))  # another graph, and no word of it
    assert counted("dense_warnings", "tt_layers") == [1, 0]


def test_the_model_that_was_optimised_in_a_copy_is_pointed_out_too():
    model, x = Dense(), floats(3, LARGE)
    optimised = comera_fx.optimize(model, config=OptimizeConfig(init="random", max_rank=4))
    compiled(optimised)(x)
    with pytest.warns(UserWarning, match=r"comera_fx.optimize\(model\)"):
        compiled(model)(x)


def test_a_dense_model_trains_on_its_own_parameters():
    model, x = Dense(), floats(3, LARGE)
    alone = Dense()
    names = list(model.state_dict())
    with warnings.catch_warnings(action="ignore"):
        fast = compiled(model)
        for each, function in ((model, fast), (alone, alone)):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                function(x).square().mean().backward()
                optimizer.step()
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    torch.testing.assert_close(fast(x), alone(x))


def test_a_small_dense_model_is_not_worth_a_word():
    model = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    assert_as_eager(compiled(model), model, X)
    assert counted("dense_warnings", "graphs") == [0, 1]


class DenseFirst(nn.Module):
    """A graph of dense layers alone comes first, the TT layer after a break."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.last = Dense(), layer()

    def forward(self, x):
        x = self.dense(x)
        torch._dynamo.graph_break()
        return self.last(x)


@graph_breaks
def test_dense_graphs_of_an_optimised_model_are_not_worth_a_word():
    model, x = DenseFirst(), floats(3, LARGE)
    assert_as_eager(compiled(model, fullgraph=False), model, x)
    assert counted("graphs", "tt_layers", "dense_warnings") == [2, 1, 0]


@graph_breaks
def test_dense_graphs_of_a_compiled_step_are_not_worth_a_word():
    model, x = DenseFirst(), floats(3, LARGE)

    def step(x):
        return model(x).square().mean()

    assert_as_eager(compiled(step, fullgraph=False), model, x, slow=step)
    assert counted("graphs", "tt_layers", "dense_warnings")[1:] == [1, 0]


def test_dense_layers_beside_tt_layers_are_not_worth_a_word():
    model = nn.Sequential(Dense(), layer())
    assert_as_eager(compiled(model), model, floats(3, LARGE))
    assert_expanded(1)
    assert counted("dense_warnings") == [0]


@graph_breaks
def test_several_graphs_are_counted():
    model = Broken()
    assert_as_eager(compiled(model, fullgraph=False), model, X)
    assert_expanded(2, graphs=2)
