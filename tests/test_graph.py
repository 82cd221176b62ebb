"""graph: the model's FX graph, with each TT layer as one node."""

import pytest
import torch
from torch import nn

import comera_fx
from tests.lossless import LOSSLESS, RANDOM, Branching, Nested


@pytest.mark.parametrize("with_inputs", [True, False], ids=["inputs", "no-inputs"])
def test_graph_shows_each_tt_layer_as_one_node_and_runs(with_inputs):
    model = nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    ids = torch.randint(200, (2, 3))
    result = comera_fx.optimize(model, config=RANDOM)

    gm = comera_fx.graph(result, ids if with_inputs else None)

    targets = [str(n.target) for n in gm.graph.nodes if "comera_fx" in str(n.target)]
    assert targets == [
        "comera_fx.tt_embedding.default",
        "comera_fx.tt_linear.default",
        "comera_fx.tt_linear.default",
    ]
    assert torch.equal(gm(ids), result(ids))
    assert gm.meta["capture"] == ("export" if with_inputs else "symbolic_trace")
    assert gm.get_parameter("1.core_0") is result[1].core_0


def test_graph_of_a_model_that_cannot_be_traced():
    gm = comera_fx.graph(comera_fx.optimize(Branching(), config=LOSSLESS))
    assert gm.meta["capture"] == "module_graph"
    assert "tt_linear_default = call_function[comera_fx.tt_linear.default](%unknown" in (
        comera_fx.format_graph(gm.graph)
    )


def test_graph_of_one_layer():
    layer = comera_fx.optimize(nn.Linear(64, 64), config=RANDOM)
    x = torch.randn(2, 64)
    assert torch.equal(comera_fx.graph(layer)(x), layer(x))


def test_graph_text_is_the_same_every_time():
    def text() -> str:
        return comera_fx.format_graph(
            comera_fx.graph(comera_fx.optimize(Nested(), config=LOSSLESS)).graph
        )

    assert text() == text()
