"""A layer that is frozen in the middle of a run keeps its ranks and its numbers; the rest pays."""

import copy

import pytest
import torch

from tests.train.students import make, train

METHODS = {
    "comera": {"rank_lr": 0.1, "early_steps": 5, "rho": 0.5},
    "proximal": {"shrink_steps": 30, "regrow": 0.1, "early_steps": 10},
    "rounding": {"shrink_steps": 30, "regrow": 0.1},
}
WITHOUT_TARGET = {
    "comera": {"rank_lr": 0.1, "gamma": 0.3, "min_rank": 1},
    "comera by its indices": {"rank_lr": 0.1, "gamma": 0.3, "min_rank": 1, "balance": False},
    "proximal": {"gamma": 0.1, "min_rank": 1},
    "rounding": {"threshold": 0.3},
}


def frozen_run(method, **settings):
    """A run whose first layer is frozen after some steps, and the layer as it was then."""
    run = make(method=method, prune_every=5, **settings)
    train(*run, range(8))
    run[0][0].requires_grad_(False)
    return run, copy.deepcopy(run[0][0])


def assert_kept(layer, before):
    assert layer.spec == before.spec
    for now, then in zip(layer.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, then)
        assert not now.requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_a_target_is_met_by_the_other_layers(method):
    (model, optimizer, adapter), before = frozen_run(method, target_ratio=0.7, **METHODS[method])
    train(model, optimizer, adapter, range(8, 120))
    assert_kept(model[0], before)
    assert adapter.size <= adapter.target_size
    assert model[2].tt_params == adapter.size - before.tt_params


@pytest.mark.parametrize("case", WITHOUT_TARGET)
def test_without_a_target_only_the_others_are_cut(case):
    run, before = frozen_run(case.split()[0], **WITHOUT_TARGET[case])
    train(*run, range(8, 80))
    assert_kept(run[0][0], before)
    assert run[0][2].tt_params < before.tt_params


@pytest.mark.parametrize("method", METHODS)
def test_compact_leaves_it_too(method):
    (model, _, adapter), before = frozen_run(method, target_ratio=0.7, **METHODS[method])
    assert 0 < adapter.compact(0.5) <= 0.5
    assert_kept(model[0], before)
    assert model[2].tt_params < before.tt_params


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_frozen_altogether_goes_on_without_a_cut(method):
    run, before = frozen_run(method, target_ratio=0.5, **METHODS[method])
    model, _, adapter = run
    model.requires_grad_(False)
    size = adapter.size
    for _ in range(40):
        adapter.loss(torch.tensor(0.1))
        adapter.step()
    assert_kept(model[0], before)
    assert adapter.size == size


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_trains_again_is_cut_again(method):
    run, before = frozen_run(method, target_ratio=0.3, **METHODS[method])
    train(*run, range(8, 40))
    run[0][0].requires_grad_(True)
    train(*run, range(40, 160))
    assert run[0][0].tt_params < before.tt_params
    assert run[2].size <= run[2].target_size


def test_resuming_does_not_thaw_it():
    (model, _, adapter), before = frozen_run("comera", target_ratio=0.7)
    adapter.load_state_dict(adapter.state_dict())
    assert_kept(model[0], before)
    assert all(weight.requires_grad for weight in model[2].rank_weights)
