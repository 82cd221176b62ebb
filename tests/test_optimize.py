"""optimize: what comes back works as the user's own model, with TT weights inside."""

import copy
import pickle
import subprocess
import sys
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx import OptimizeConfig, TTEmbedding, TTLinear, TTSpec
from comera_fx.tt import random_cores, to_dense
from tests.tolerances import EXACT

SPEC = TTSpec("tt", (8, 8), (8, 8), (1, 4, 4, 4, 1))
RANDOM = OptimizeConfig(init="random", max_rank=4)
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


def shared_layer() -> nn.Module:
    layer = exact_linear()
    return nn.Sequential(layer, nn.Tanh(), layer)


MODELS = {
    "bias": lambda: nn.Sequential(exact_linear(), nn.Tanh()),
    "no-bias": lambda: nn.Sequential(exact_linear(bias=False), nn.Tanh()),
    "twice": shared_layer,
    "back-to-back": lambda: nn.Sequential(exact_linear(), exact_linear(seed=1), exact_linear()),
    "nested": Nested,
    "control-flow": Branching,
    "root": exact_linear,
}


@pytest.mark.parametrize("with_inputs", [False, True], ids=["no-inputs", "inputs"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_nothing_is_lost_where_the_ranks_suffice(make, with_inputs):
    model = make()
    x = torch.randn(5, 64, dtype=torch.float64)

    result = comera_fx.optimize(model, x if with_inputs else None, config=LOSSLESS)

    expected_x, found_x = (x.clone().requires_grad_() for _ in range(2))
    expected, found = model(expected_x), result(found_x)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(found_x.grad, expected_x.grad, **EXACT)
    assert not any(type(module) is nn.Linear for module in result.modules())
    assert any(type(module) is nn.Linear for module in model.modules())


def test_biases_and_other_parameters_get_the_same_gradients():
    model = Nested()
    x = torch.randn(5, 64, dtype=torch.float64)
    result = comera_fx.optimize(model, x, config=LOSSLESS)
    for net in (model, result):
        net(x).square().sum().backward()
    found = dict(result.named_parameters())
    for name, param in model.named_parameters():
        if not name.endswith("weight"):
            torch.testing.assert_close(found[name].grad, param.grad, **EXACT)


def test_the_result_is_a_copy_of_the_users_own_class():
    model = Nested().eval()
    state = copy.deepcopy(model.state_dict())

    result = comera_fx.optimize(model, config=LOSSLESS)

    assert type(result) is Nested
    assert type(result.blocks[0]) is Block
    assert not result.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert list(vars(model)) == list(vars(Nested()))
    assert comera_fx.explain(result).capture == "symbolic_trace"


def test_in_place():
    model = Nested()
    assert comera_fx.optimize(model, config=LOSSLESS, inplace=True) is model
    assert isinstance(model.blocks[1].down, TTLinear)
    assert comera_fx.explain(model).capture == "symbolic_trace"


def test_frozen_layers_stay_frozen():
    model = nn.Sequential(exact_linear(), exact_linear())
    model[0].requires_grad_(False)
    result = comera_fx.optimize(model, config=LOSSLESS)
    assert not any(param.requires_grad for param in result[0].parameters())
    assert all(param.requires_grad for param in result[1].parameters())


def test_embedding_keeps_its_padding_row():
    model = nn.Sequential(nn.Embedding(200, 64, padding_idx=3))
    result = comera_fx.optimize(model, config=RANDOM)
    ids = torch.tensor([3, 4, 3])
    assert isinstance(result[0], TTEmbedding)
    assert result[0].padding_idx == 3
    assert torch.equal(result(ids)[0], torch.zeros(64))
    assert comera_fx.explain(result).layers["0"].layout == "ttm"


def test_copies_and_pickles_of_the_result_are_independent():
    result = comera_fx.optimize(nn.Sequential(nn.Linear(64, 64)), config=RANDOM)
    x = torch.randn(2, 64)
    expected = result(x)
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert torch.equal(other(x), expected)
        other[0].core_0.data.zero_()
        assert torch.equal(result(x), expected)


def test_optimising_the_rest_later():
    first = comera_fx.optimize(Nested(), config=replace(LOSSLESS, targets=["*up"]))
    second = comera_fx.optimize(first, config=LOSSLESS)
    assert isinstance(first.blocks[0].down, nn.Linear)
    assert isinstance(second.blocks[0].down, TTLinear)
    assert torch.equal(second.blocks[0].up.core_0, first.blocks[0].up.core_0)


# ---- init ----


def test_random_init_depends_on_the_seed_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(200, 64), nn.Linear(64, 128))
    state = torch.get_rng_state()

    def cores(**config: Any) -> list[torch.Tensor]:
        result = comera_fx.optimize(
            model, config=OptimizeConfig(init="random", max_rank=4, **config)
        )
        return [param for name, param in result.named_parameters() if "core" in name]

    first, again, other = cores(), cores(), cores(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_random_init_is_the_same_however_the_model_is_captured():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(2, 64)
    config = OptimizeConfig(init="random", max_rank=4, only_if_faster=False)
    by_trace, by_export = (comera_fx.optimize(model, each, config=config) for each in (None, x))
    assert torch.equal(by_trace[1].core_0, by_export[1].core_0)


@pytest.mark.parametrize("std", [0.01, 3.0, 1e30])
def test_random_init_has_the_deviation_of_the_dense_weight(std):
    model = nn.Sequential(nn.Linear(128, 128))
    nn.init.normal_(model[0].weight, std=std)
    result = comera_fx.optimize(model, config=OptimizeConfig(init="random", max_rank=8))
    found, expected = (each.weight.detach().double().std() for each in (result[0], model[0]))
    assert float(found) == pytest.approx(float(expected), rel=1e-2)


def test_random_init_of_a_constant_weight_takes_that_of_a_linear_layer():
    model = nn.Sequential(nn.Linear(64, 64))
    nn.init.zeros_(model[0].weight)
    result = comera_fx.optimize(model, config=RANDOM)
    found = float(result[0].weight.detach().square().mean().sqrt())
    assert found == pytest.approx((3 * 64) ** -0.5, rel=1e-3)


def test_one_warning_for_all_layers_that_look_untrained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comera_fx.optimize(model, config=OptimizeConfig(max_rank=2))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("decomposition loses more than half of the weight in 3 of 3 layers")
    assert 'use OptimizeConfig(init="random")' in text
    assert caught[0].filename == __file__


def test_no_warning_for_weights_that_are_kept():
    model = nn.Sequential(exact_linear())
    comera_fx.optimize(model, config=LOSSLESS)


# ---- tolerance ----


def test_tolerance_is_met_with_the_ranks_it_takes():
    torch.manual_seed(0)
    model = nn.Sequential(exact_linear())
    model[0].weight.data += 1e-4 * torch.randn(64, 64)
    config = OptimizeConfig(tol=0.01, max_rank=64, modes=LOSSLESS.modes)

    layer = comera_fx.explain(comera_fx.optimize(model, config=config)).layers["0"]

    assert layer.ranks == SPEC.ranks
    assert 0 < layer.init_error <= 0.01


def test_tolerance_that_takes_too_many_ranks_leaves_the_layer_dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), exact_linear().float())
    config = OptimizeConfig(tol=1e-3, max_rank=64, modes=LOSSLESS.modes)
    result = comera_fx.optimize(model, config=config)
    report = comera_fx.explain(result)
    assert report.layers["0"].reason == "TT form would hold more parameters than dense"
    assert isinstance(result[1], TTLinear)
    with pytest.raises(comera_fx.ConfigError, match="TT form would hold more parameters"):
        comera_fx.optimize(model[0], config=OptimizeConfig(tol=1e-6, max_rank=64))


# ---- what is not supported keeps working ----


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer_encoder_is_untouched_and_works(training):
    torch.manual_seed(0)
    model, ids = Classifier().train(training), torch.randint(200, (2, 5))

    result = comera_fx.optimize(model, ids, config=RANDOM)

    report = comera_fx.explain(result)
    assert [layer.name for layer in report.compressed] == ["embed", "head"]
    assert report.layers["encoder.layers.0.linear1"].reason == (
        "inside nn.TransformerEncoderLayer, which reads its weight directly: not supported yet"
    )
    assert "  4 layers (encoder.layers.0.linear1, ...): inside nn.Tr" in repr(report)
    x = torch.randn(2, 5, 32)
    for mode in (training, True, False):  # in eval without gradients: the fast path
        for net in (model, result):
            net.train(mode)
        with torch.set_grad_enabled(mode):
            torch.manual_seed(1)
            expected = model.encoder(x)
            torch.manual_seed(1)
            torch.testing.assert_close(result.encoder(x), expected)
            assert result(ids).shape == (2, 5, 128)


@pytest.mark.parametrize("with_inputs", [True, False], ids=["inputs", "no-inputs"])
def test_transformer_encoder_alone_has_nothing_to_compress(with_inputs):
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with pytest.raises(comera_fx.ConfigError, match="which reads its weight directly"):
        comera_fx.optimize(model, torch.randn(2, 5, 32) if with_inputs else None, config=RANDOM)


def test_tied_hugging_face_gpt2_works_in_train_and_eval():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=200, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(200, (2, 8))

    result = comera_fx.optimize(model, {"input_ids": ids, "labels": ids}, config=RANDOM)

    report = comera_fx.explain(result)
    assert report.capture == "export"
    assert [layer.name for layer in report.compressed] == ["transformer.wpe"]
    tied = "its weight is tied to another layer: not supported yet"
    assert report.layers["transformer.wte"].reason == report.layers["lm_head"].reason == tied
    conv1d = [layer for layer in report.layers.values() if layer.kind == "conv1d"]
    assert len(conv1d) == 8
    assert {layer.reason for layer in conv1d} == {"Hugging Face Conv1D is not supported yet"}
    assert isinstance(result, transformers.GPT2LMHeadModel)
    assert result.lm_head.weight is result.transformer.wte.weight

    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = result.train()(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        assert result.eval()(ids).logits.shape == (2, 8, 200)
        assert result.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 11)


def test_direct_reads_of_a_weight_still_work():
    class Reads(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x.to(self.fc.weight.dtype))
            return y @ self.fc.weight

    model, x = Reads(), torch.randn(3, 64)
    result = comera_fx.optimize(model, config=LOSSLESS)
    torch.testing.assert_close(result(x), model(x), **EXACT)


def test_model_that_is_a_graph_module():
    gm = torch.fx.symbolic_trace(nn.Sequential(exact_linear(), nn.Tanh()))
    x = torch.randn(3, 64, dtype=torch.float64)
    result = comera_fx.optimize(gm, x, config=LOSSLESS)
    assert isinstance(result, torch.fx.GraphModule)
    assert isinstance(result.get_submodule("0"), TTLinear)
    torch.testing.assert_close(result(x), gm(x), **EXACT)


def test_lazy_layers_are_left_to_be_filled():
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64))
    x = torch.randn(3, 64)
    result = comera_fx.optimize(model, x, config=RANDOM)
    report = comera_fx.explain(result)
    assert report.layers["0"].reason == "a lazy layer that has no weight yet"
    assert isinstance(result[1], TTLinear)
    assert result(x).shape == (3, 64)
    assert type(model[0]) is nn.LazyLinear


# ---- graph ----


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


# ---- sizes ----


@pytest.mark.parametrize(("sizes", "kind"), [((97, 64), "linear"), ((1, 97), "linear")])
def test_awkward_sizes_do_not_fail(sizes, kind):
    model = nn.Sequential(nn.Linear(*sizes), nn.Linear(64, 64))
    result = comera_fx.optimize(model, config=OptimizeConfig(init="random", max_rank=4))
    layer = comera_fx.explain(result).layers["0"]
    assert layer.kind == kind
    assert layer.tt_params is not None or layer.reason
    assert result[0](torch.randn(3, sizes[0])).shape == (3, sizes[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(200, 64)).to(dtype)
    result = comera_fx.optimize(model, config=RANDOM)
    assert {param.dtype for param in result.parameters()} == {dtype}
    assert result[0](torch.randn(2, 64, dtype=dtype)).dtype == dtype


# ---- the package ----


def test_import_and_optimize_load_no_heavy_packages():
    code = """
import sys, torch, comera_fx
config = comera_fx.OptimizeConfig(init="random", max_rank=4)
model = comera_fx.optimize(torch.nn.Sequential(torch.nn.Linear(64, 64)), config=config)
repr(comera_fx.explain(model))
heavy = ("numba", "rich", "typer", "matplotlib", "safetensors", "transformers")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version_is_that_of_the_package():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert comera_fx.__version__ == tomllib.loads(text)["project"]["version"]


def test_public_names_are_there_and_sorted():
    assert all(hasattr(comera_fx, name) for name in comera_fx.__all__)
    assert sorted(comera_fx.__all__) == comera_fx.__all__
