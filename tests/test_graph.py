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


class Constants(nn.Module):
    """Makes tensors in its forward pass; a tracer keeps them as attributes while it traces."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x) * torch.tensor(2.0) + torch.arange(64))


class Noisy(Constants):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(x)
        return self.fc2(h + torch.rand(h.shape, generator=self.generator))


@pytest.mark.parametrize("with_inputs", [True, False], ids=["inputs", "no-inputs"])
@pytest.mark.parametrize("make", [Constants, Noisy])
def test_constants_and_generators_of_a_forward_pass(make, with_inputs):
    model, x = make(), torch.randn(2, 64)
    names = list(vars(model))
    result = comera_fx.optimize(model, x if with_inputs else None, config=RANDOM)
    assert [layer.name for layer in comera_fx.explain(result).compressed] == ["fc1", "fc2"]
    assert list(vars(model)) == names
    if isinstance(model, Noisy):
        model.generator.manual_seed(1)
        assert model(x).shape == (2, 64)
    else:
        gm = comera_fx.graph(result, x if with_inputs else None)
        torch.testing.assert_close(gm(x), result(x))
        assert comera_fx.graph(model).graph is not None


def test_the_generator_of_a_model_is_where_it_was():
    model, x = Noisy(), torch.randn(2, 64)
    state = model.generator.get_state()
    comera_fx.optimize(model, x, config=RANDOM)
    assert torch.equal(model.generator.get_state(), state)


class Named(nn.Module):
    """Has a part, on the top and inside, under any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(64, 64))
        self.inner = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 64))})
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[self.name](self._modules[self.name](x))


NAMES = ["graph", "code", "meta", "_graph", "_code", "recompile", "print_readable", "class", "self"]


@pytest.mark.parametrize("with_inputs", [True, False], ids=["inputs", "no-inputs"])
@pytest.mark.parametrize("name", NAMES)
def test_names_that_a_graph_module_has_for_itself(name, with_inputs):
    model, x = Named(name), torch.randn(2, 64)
    example = x if with_inputs else None

    result = comera_fx.optimize(model, example, config=RANDOM)

    report = comera_fx.explain(result)
    assert [layer.name for layer in report.compressed] == [name, f"inner.{name}.0"]
    assert report.capture == "symbolic_trace"
    if with_inputs:
        assert report.notes == (
            f"export was not used: a graph module cannot hold the name {name!r}",
        )
        assert [layer.num_tokens for layer in report.compressed] == [2, 2]
    gm = comera_fx.graph(result, example)
    assert torch.equal(gm(x), result(x))
    assert gm.get_parameter(f"{name}_.core_0") is result._modules[name].core_0


def test_a_renamed_part_gets_a_name_that_is_free():
    model = nn.Module()
    model.layers = nn.ModuleDict({key: nn.Linear(64, 64) for key in ("class", "class_", "class__")})
    gm = comera_fx.graph(model)
    targets = [n.target for n in gm.graph.nodes if n.op == "call_module"]
    assert targets == ["layers.class___", "layers.class_", "layers.class__"]
    assert [gm.get_submodule(target) for target in targets] == list(model.layers.values())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(96, 96) for _ in range(4))

    def forward(self, x):
        return self.out(torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x))


@pytest.mark.parametrize("given", [True, False])
def test_shared_graph_computes_the_same_with_fewer_nodes(given, monkeypatch):
    monkeypatch.setattr(
        comera_fx.lowering,
        "worth_sharing",
        lambda spec, nodes: "factors" if len(nodes) > 1 else "own",
    )
    config = comera_fx.OptimizeConfig(init="random", max_rank=8, only_if_faster=False, min_params=0)
    x = torch.randn(2, 5, 96)
    model = comera_fx.optimize(Attention(), x, config=config)
    alone, shared = (comera_fx.graph(model, x if given else None, share=s) for s in (False, True))
    found = [node.target for node in shared.graph.nodes]
    assert found.count(torch.ops.comera_fx.tt_factors.default) == 1
    assert found.count(torch.ops.comera_fx.tt_apply.default) == 2
    assert torch.ops.comera_fx.tt_linear.default not in found
    torch.testing.assert_close(shared(x), alone(x))
    assert comera_fx.format_graph(shared.graph).count("[comera_fx.tt_apply") == 2


@pytest.mark.parametrize(("num_layers", "shares"), [(24, True), (1, False)])
def test_whether_sharing_pays_is_predicted(num_layers, shares):
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(num_layers)))
    config = comera_fx.OptimizeConfig(init="random", max_rank=30, only_if_faster=False)
    x = torch.randn(128, 768)
    gm = comera_fx.graph(comera_fx.optimize(model, x, config=config), x, share=True)
    made = [node for node in gm.graph.nodes if "tt_factors" in str(node.target)]
    assert bool(made) is shares
