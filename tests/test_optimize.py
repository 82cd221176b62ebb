"""optimize: what comes back works as the user's own model, with TT weights inside."""

import copy
import pickle
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx import OptimizeConfig, PlanConfig, TTEmbedding, TTLinear
from comera_fx.plan.linear import bucket_tokens, plan_linear
from tests.lossless import LOSSLESS, RANDOM, SPEC, Block, Branching, Nested, exact_linear
from tests.tolerances import EXACT


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
    nn.init.constant_(model[0].weight, 0.5)
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comera_fx.optimize(model, config=LOSSLESS)
    assert caught == []


# ---- tolerance ----


def test_tolerance_is_met_with_the_ranks_it_takes():
    torch.manual_seed(0)
    model = nn.Sequential(exact_linear())
    model[0].weight.data += 1e-4 * torch.randn(64, 64)
    config = OptimizeConfig(tol=0.01, max_rank=64, modes=LOSSLESS.modes)

    layer = comera_fx.explain(comera_fx.optimize(model, config=config)).layers["0"]

    assert layer.ranks == SPEC.ranks
    assert 0 < layer.init_error <= 0.01


def test_tolerance_that_the_ranks_do_not_meet_is_said():
    torch.manual_seed(0)
    model = nn.Sequential(exact_linear(), exact_linear(seed=1))
    model[0].weight.data += 0.05 * torch.randn(64, 64)
    config = OptimizeConfig(tol=0.01, max_rank=8, modes=LOSSLESS.modes)

    result = comera_fx.optimize(model, config=config)

    for each in (
        result,
        comera_fx.optimize(
            nn.Sequential(result, nn.Linear(64, 64)),
            config=OptimizeConfig(init="random", max_rank=4),
        ),
    ):
        report = comera_fx.explain(each)
        missed, met = report.compressed[:2]
        assert missed.init_error > 0.1
        assert missed.detail == f"tol 0.01 not met at rank 8: error {missed.init_error:.2f}"
        assert (met.reason, met.detail, met.init_error <= 0.01) == ("", "", True)
        lines = repr(report).splitlines()
        assert lines[1].endswith(f" {missed.init_error:.3f}  {missed.detail}")
        assert lines[2].endswith(f" {met.init_error:.3f}")


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


# ---- limit of memory ----


@pytest.mark.parametrize("num_tokens", [1, 5, 8, 33])
def test_within_a_memory_limit_the_tokens_seen_always_have_a_plan(num_tokens):
    model = nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 64))
    ids = torch.zeros(num_tokens, dtype=torch.long)
    at_exact, at_planned = (
        plan_linear(SPEC, n).peak_bytes for n in (num_tokens, bucket_tokens(num_tokens))
    )
    for limit in (1, at_exact // 2, at_exact - 1, at_exact, at_planned - 1, at_planned):
        config = OptimizeConfig(
            init="random",
            max_rank=4,
            modes={"1": (SPEC.in_modes, SPEC.out_modes)},
            plan=PlanConfig(memory_limit_bytes=limit),
        )

        result = comera_fx.optimize(model, ids, config=config)

        layer = comera_fx.explain(result).layers["1"]
        too_small = f"no plan for {bucket_tokens(num_tokens)} tokens is within memory_limit_bytes"
        assert layer.reason == ("" if isinstance(result[1], TTLinear) else too_small)
        result(ids).sum().backward()
        result[1](torch.zeros(num_tokens, 64))
        assert limit != 1 or layer.reason
        assert limit != at_planned or not layer.reason


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


def test_version_is_that_of_the_package():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert comera_fx.__version__ == tomllib.loads(text)["project"]["version"]


def test_public_names_are_there_and_sorted():
    assert all(hasattr(comera_fx, name) for name in comera_fx.__all__)
    assert sorted(comera_fx.__all__) == comera_fx.__all__


@pytest.mark.parametrize("with_inputs", [False, True], ids=["no-inputs", "inputs"])
def test_random_start_keeps_a_weight_of_zeros_that_can_still_train(with_inputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data.zero_()
    x = torch.randn(8, 64)

    result = comera_fx.optimize(model, x if with_inputs else None, config=RANDOM)

    assert torch.equal(result[1](x), model[1].bias.expand(8, 64))
    result[1](x).square().sum().backward()
    assert any(core.grad.abs().max() > 0 for core in result[1].cores)
