"""Plans chosen by timing them: the right candidates run, and nothing of the caller is touched."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from comera_fx import OptimizeConfig, PlanConfig, TTLinear, TTSpec, optimize
from comera_fx.lower import choose, tune
from comera_fx.plan.linear import rank_plans

SPEC = TTSpec("tt", (4, 6), (6, 4), (1, 4, 10, 4, 1))


@pytest.fixture
def tuned(monkeypatch):
    """Names of the programs timed, with the last one the fastest of each choice."""
    chosen = []

    def medians(runs, device_type, *, seconds):
        for run in runs.values():
            run()
        chosen.append(len(runs))
        return {name: -float(name) for name in runs}

    monkeypatch.setattr(tune, "medians", medians)
    choose._linear_program.cache_clear()
    yield chosen
    choose._linear_program.cache_clear()


def candidates(num_tokens):
    return rank_plans(
        SPEC,
        num_tokens,
        "time",
        True,
        True,
        memory_limit_bytes=None,
        pad_ranks=True,
        itemsize=4,
        device_type="cpu",
    )


def test_the_fastest_of_the_best_three_runs(tuned):
    plans = candidates(64)
    assert len(plans) > tune.NUM_TUNED
    layer = TTLinear(SPEC, 24, 24, plan=PlanConfig(autotune=True))
    x = torch.randn(64, 24, requires_grad=True)
    layer(x)
    layer(x)
    assert tuned == [tune.NUM_TUNED]  # once per shape
    program = choose._linear_program(
        SPEC, 64, (True,) * 5, torch.float32, x.device, "time", None, True, True
    )
    assert program is plans[tune.NUM_TUNED - 1].program


def test_what_it_computes_is_the_same(tuned):
    layer = TTLinear(SPEC, 24, 24, plan=PlanConfig(autotune=True)).double()
    x = torch.randn(50, 24, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.linear(x, layer.dense_weight(), layer.bias)
    torch.testing.assert_close(layer(x), expected)
    found = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, wanted)


def test_random_numbers_gradients_and_modes_of_the_caller_are_untouched(tuned):
    layer = TTLinear(SPEC, 24, 24, plan=PlanConfig(autotune=True))
    state = torch.random.get_rng_state()
    with torch.inference_mode():
        layer(torch.ones(16, 24))
    with torch.autocast("cpu"):
        layer(torch.ones(16, 24))
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.ones(16, 24))
    assert len(packed) < 12  # of this call alone
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert len(tuned) == 3


def test_a_checkpointed_first_call_saves_as_much_as_the_second(tuned):
    layer = TTLinear(SPEC, 24, 24, plan=PlanConfig(autotune=True))
    x = torch.ones(16, 24, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_plans_are_timed_in_their_own_dtype_under_autocast(tuned, monkeypatch):
    dtypes = set()
    contract = tune.contract

    def watched(program, num_tokens, leaves, shape):
        result = contract(program, num_tokens, leaves, shape)
        dtypes.add(result.dtype)
        return result

    monkeypatch.setattr(tune, "contract", watched)
    plans = candidates(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tune.fastest_program(plans, (True,) * 5, torch.float32, torch.device("cpu"))
    assert dtypes == {torch.float32}


def test_a_traced_layer_is_not_timed(tuned):
    layer = TTLinear(SPEC, 24, 24, plan=PlanConfig(autotune=True))
    torch.compile(layer, backend="aot_eager")(torch.ones(16, 24))
    torch.export.export(layer, (torch.ones(16, 24),), strict=False)
    assert tuned == []


def test_optimize_asks_for_it():
    config = OptimizeConfig(init="random", autotune=True, targets=["0"], max_rank=8)
    model = optimize(torch.nn.Sequential(torch.nn.Linear(256, 256)), config=config)
    assert model[0].plan_config == PlanConfig(autotune=True)
    assert model[0].op_settings()["autotune"] is True
