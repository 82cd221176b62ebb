"""An adapter that is copied or pickled with its model and optimizer goes on as the first does."""

import copy
import io

import pytest
import torch

from comera_fx.errors import RankError
from comera_fx.train import RankAdapter
from tests.train.students import make, train

METHODS = {
    "comera": {"early_steps": 5, "rho": 0.5},
    "proximal": {"shrink_steps": 30, "regrow": 0.2},
    "rounding": {"shrink_steps": 30, "regrow": 0.2},
}


def pickled(run):
    stored = io.BytesIO()
    torch.save(run, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled}


def started(method="rounding"):
    run = make(rank_lr=0.1, method=method, target_ratio=0.5, prune_every=5, **METHODS[method])
    train(*run, range(10))
    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_a_copied_run_gives_the_same_numbers(method, way):
    run = started(method)
    other = WAYS[way](run)
    assert train(*other, range(10, 50)) == train(*run, range(10, 50))
    assert other[2].history == run[2].history
    assert other[2].size < other[2].initial_size
    pairs = zip(run[0].parameters(), other[0].parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_adapter_has_its_layers_to_itself(way):
    model, optimizer, adapter = WAYS[way](started())
    with pytest.raises(RankError, match="two adapters on one layer"):
        RankAdapter(model, optimizer)
    del adapter
    RankAdapter(model, optimizer)


def test_two_adapters_on_the_same_layers_cannot_come_from_a_shallow_copy():
    _, _, adapter = started()
    with pytest.raises(RankError, match="two adapters on one layer"):
        copy.copy(adapter)


def test_hooks_of_a_copy_go_with_it():
    _, optimizer, adapter = copy.deepcopy(started())
    assert len(optimizer._optimizer_step_pre_hooks) == 2
    del adapter
    assert not optimizer._optimizer_step_pre_hooks
