import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.adalora import Budget, orthogonality
from bench.galore import GaLoreAdamW, basis_of, project, project_back
from bench.low_rank import low_rank_of, ranks_within
from bench.methods import METHODS, Setup, of_shapes, within
from bench.study_search import Rates
from bench.study_task import compressed_layers, target_params
from bench.study_train import train_step
from comera_fx import optimize
from comera_fx.modules import tt_modules
from tests.bench.study_tasks import RATIO, make_task

SMALL = [name for name in METHODS if METHODS[name].size == "target"]
TIGHT = {"rtol": 1e-5, "atol": 1e-6}


def setup(steps=80, rate=1e-2):
    task = make_task(steps=steps)
    return Setup(task, 0, Rates(rate, 1.0), steps, target_params(task, RATIO))


def trained(method, given):
    run = METHODS[method].build(given)
    share = given.task.rate_share(given.steps)
    losses = [
        train_step(run, given.task, given.task.batch(0, step), share(step)).item()
        for step in range(given.steps)
    ]
    return run, losses


# ---- all methods ----


def test_the_target_is_a_share_of_the_chosen_layers_alone():
    task = make_task()
    assert list(compressed_layers(task.dense(0), task.config)) == ["0", "2"]
    assert target_params(task, 4.0) == (32 * 48 + 48 * 32) // 4


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_ends_at_the_equal_size(method):
    # GaLore moves all by a fourth of its rate.
    given = setup(rate=4e-2 if method == "galore" else 1e-2)
    run, losses = trained(method, given)
    run.finish()
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    if method in SMALL:
        assert 0.75 * given.target < run.compressed_params <= given.target
    else:
        assert run.compressed_params == 2 * 32 * 48
    assert run.model[3].weight.shape == (32, 32), "a layer that was not chosen has changed"


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].adapts])
def test_adaptive_methods_start_larger_and_hold_less_at_the_end(method):
    given = setup()
    first = METHODS[method].build(given).compressed_params
    run, _ = trained(method, given)
    run.finish()
    assert given.target < first <= 1.7 * given.target
    assert run.compressed_params < first


@pytest.mark.parametrize("method", METHODS)
def test_a_run_starts_at_the_sizes_that_another_has_ended_with(method):
    given = setup()
    run, _ = trained(method, given)
    run.finish()
    again = METHODS[method].build(replace(given, shapes=run.shapes))
    assert again.shapes == run.shapes
    assert again.compressed_params == run.compressed_params


@pytest.mark.parametrize("method", ["tt", "low_rank", "adalora"])
def test_small_layers_start_at_the_scale_of_the_dense_ones(method):
    given = setup()
    dense, run = given.task.dense(0), METHODS[method].build(given)
    for name in run.layers:
        small = run.model.get_submodule(name).dense_weight().detach()
        wanted = dense.get_submodule(name).weight.detach()
        assert small.shape == wanted.shape
        exact = method != "tt"  # whose cores are drawn
        tolerance = 1e-5 if exact else 0.3
        assert float(small.square().mean()) == pytest.approx(
            float(wanted.square().mean()), rel=tolerance
        )


def test_tt_layers_fill_the_size_but_do_not_pass_it():
    task = make_task()
    dense = task.dense(0)
    for size in (300, 500, 768, 1200):
        config = replace(within(dense, task.config, size), init="random")
        model = optimize(dense, config=config)
        held = sum(layer.tt_params for _, layer in tt_modules(model))
        assert 0.7 * size < held <= size


def test_a_layer_that_died_is_timed_at_rank_one():
    shapes = {"0": [[8, 4], [8, 6], [1, 0, 0, 0, 1]]}
    config = of_shapes(make_task().config, shapes)
    assert config.ranks == {"0": (1, 1, 1, 1, 1)}
    assert config.modes == {"0": ((8, 4), (8, 6))}


# ---- low rank ----


def test_ranks_share_out_what_the_target_leaves():
    shapes = {"a": (8, 8), "b": (8, 24)}
    assert ranks_within(shapes, 112) == {"a": 2, "b": 2}
    assert ranks_within(shapes, 128) == {"a": 2, "b": 3}
    assert ranks_within(shapes, 112, extra=1) == {"a": 2, "b": 2}
    assert ranks_within(shapes, 96, extra=1) == {"a": 1, "b": 2}
    assert ranks_within(shapes, 10**6) == {"a": 8, "b": 8}


@pytest.mark.parametrize("with_scale", [False, True])
def test_factors_of_full_rank_are_the_layer(with_scale):
    torch.manual_seed(0)
    linear, table = nn.Linear(6, 9), nn.Embedding(9, 6, padding_idx=2)
    x, ids = torch.randn(4, 6), torch.tensor([[0, 2], [8, 5]])
    torch.testing.assert_close(low_rank_of(linear, 6, with_scale=with_scale)(x), linear(x), **TIGHT)
    small = low_rank_of(table, 6, with_scale=with_scale)
    torch.testing.assert_close(small(ids), table(ids), **TIGHT)
    small(ids).sum().backward()
    assert not small.left.grad[2].any()


# ---- GaLore ----


def adamw_and_galore(first_grad, **settings):
    """Return two parameters, trained by AdamW and by GaLore on the same gradients."""
    torch.manual_seed(0)
    start = torch.randn(first_grad.shape)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([one], lr=1e-2, weight_decay=0.1)
    galore = GaLoreAdamW([other], lr=1e-2, weight_decay=0.1, **settings)
    for step in range(5):
        grad = first_grad if step == 0 else torch.randn(first_grad.shape)
        for parameter, optimizer in ((one, adamw), (other, galore)):
            parameter.grad = grad.clone()
            optimizer.step()
    return one, other


@pytest.mark.parametrize("shape", [(5, 5), (5, 8), (8, 5)])
def test_galore_of_full_rank_is_adamw_where_the_basis_is_one_of_axes(shape):
    # AdamW is not the same in a turned basis; a diagonal gradient has its axes for a basis.
    first = torch.zeros(shape)
    first[range(5), range(5)] = torch.tensor([3.0, -5.0, 1.0, 4.0, 2.0])
    one, other = adamw_and_galore(first, rank=5, scale=1.0)
    torch.testing.assert_close(one, other, **TIGHT)
    _, halved = adamw_and_galore(first, rank=5, scale=0.5)
    assert not torch.allclose(one, halved)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_galore_keeps_moments_of_the_rank_and_moves_in_the_subspace(shape):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    galore = GaLoreAdamW([weight], lr=1.0, rank=2, refresh_every=2)
    bases = []
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(shape)
        galore.step()
        basis = galore.state[weight]["basis"]
        move = weight.detach() - before
        torch.testing.assert_close(
            project_back(project(move, basis), basis, move.shape), move, **TIGHT
        )
        bases.append(basis)
    assert galore.state[weight]["mean"].numel() == 2 * 8
    assert bases[0] is bases[1], "the subspace was chosen anew too early"
    assert not torch.allclose(bases[1], bases[2])


def test_galore_takes_a_share_of_the_smaller_side_for_rank():
    assert basis_of(torch.randn(12, 8), 0.25).shape == (8, 2)
    assert basis_of(torch.randn(8, 12), 0.25).shape == (8, 2)


def test_galore_keeps_less_state_than_the_dense_optimizer():
    given = setup()
    given.task.batch(0, 0)
    held = {}
    for method in ("dense", "galore"):
        run, _ = trained(method, replace(given, steps=2))
        states = [value for each in run.optimizers for value in each.state.values()]
        held[method] = sum(
            value.numel() for state in states for value in state.values() if torch.is_tensor(value)
        )
    assert held["galore"] < 0.75 * held["dense"]


# ---- AdaLoRA ----


def budget(steps=100, **settings):
    torch.manual_seed(0)
    layers = {
        "a": low_rank_of(nn.Linear(16, 12), 8, with_scale=True),
        "b": low_rank_of(nn.Linear(16, 20), 8, with_scale=True),
    }
    return Budget(layers, 300, steps, **settings)


def test_the_budget_waits_falls_by_a_cubic_and_stays():
    schedule = budget(start_share=0.1, end_share=0.4)
    first = 8 * (16 + 12 + 1) + 8 * (16 + 20 + 1)
    assert [schedule.budget(step) for step in (0, 10, 60, 100)] == [first, first, 300, 300]
    assert schedule.budget(35) == 300 + int((first - 300) * 0.5**3)
    values = [schedule.budget(step) for step in range(101)]
    assert values == sorted(values, reverse=True)


def grads(schedule):
    """Set a gradient that makes the last entries of "a" and the first ones of "b" important."""
    order = torch.arange(1.0, 9.0)
    schedule.layers["a"].scale.grad = order * (1 + torch.rand(1)) / schedule.layers["a"].scale
    schedule.layers["b"].scale.grad = (
        order.flip(0) * (1 + torch.rand(1)) / (schedule.layers["b"].scale)
    )


def test_what_carries_little_is_masked_over_all_layers():
    schedule = budget(steps=10, prune_every=1, start_share=0.1, end_share=0.5)
    for _ in range(schedule.end_step):
        for layer in schedule.layers.values():
            layer.scale.data.clamp_(min=0.1)  # where an optimizer would have moved it
        grads(schedule)
        schedule.step()
    masks = schedule.masks
    assert masks["a"].tolist() == sorted(masks["a"].tolist())
    assert masks["b"].tolist() == sorted(masks["b"].tolist(), reverse=True)
    assert 0 < sum(int(mask.sum()) for mask in masks.values()) < 16
    for name, layer in schedule.layers.items():
        assert (layer.scale != 0).tolist() == masks[name].tolist()


def test_cutting_what_is_masked_keeps_the_function_and_meets_the_target():
    schedule = budget(steps=10, prune_every=1, end_share=0.5)
    x = torch.randn(4, 16)
    for _ in range(10):
        grads(schedule)
        schedule.step()
    before = {name: layer(x) for name, layer in schedule.layers.items()}
    schedule.cut()
    for name, layer in schedule.layers.items():
        torch.testing.assert_close(layer(x), before[name], **TIGHT)
        assert 1 <= layer.rank < 8
    assert sum(layer.weight_params for layer in schedule.layers.values()) <= 300


def test_a_run_that_ends_early_is_cut_to_the_target_all_the_same():
    schedule = budget(steps=1000)
    schedule.cut()
    assert sum(layer.weight_params for layer in schedule.layers.values()) <= 300


def test_the_penalty_is_of_factors_that_are_not_orthonormal():
    schedule = budget()
    assert float(orthogonality(schedule.layers).detach()) == pytest.approx(0, abs=1e-9)
    layers = copy.deepcopy(schedule.layers)
    with torch.no_grad():
        layers["a"].left.mul_(2)  # eight columns of norm 2: 8 * (4 - 1)^2
    assert float(orthogonality(layers).detach()) == pytest.approx(72, rel=1e-4)
