"""Cutting ranks: exact slices of cores and state, nothing else moves, training goes on."""

import copy

import pytest
import torch
from torch import nn

from comera_fx.errors import RankError
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train.groups import param_groups
from comera_fx.train.resize import check_state, cut_ranks

SPEC = TTSpec("tt", (3, 4), (2, 5), (1, 3, 6, 4, 1))
KEPT = [torch.tensor([0, 2]), torch.tensor([1, 2, 5]), torch.tensor([3])]


def trained(optimizer_class, **options):
    torch.manual_seed(0)
    model = nn.Sequential(TTLinear(SPEC, 12, 10), nn.ReLU(), nn.Linear(10, 3))
    model[0].attach_rank_weights(0.01)
    model[2].weight.requires_grad_(False)
    optimizer = optimizer_class(param_groups(model, lr=1e-2), **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 12)).square().mean().backward()
        optimizer.step()
    return model, optimizer


OPTIMIZERS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.Adam, {}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
def test_cores_and_state_are_exact_slices(optimizer_class, options):
    model, optimizer = trained(optimizer_class, **options)
    layer = model[0]
    old = copy.deepcopy([dict(optimizer.state[p]) for p in (*layer.cores, *layer.rank_weights)])
    old_data = [p.detach().clone() for p in (*layer.cores, *layer.rank_weights)]
    identities = [id(p) for p in model.parameters()]

    check_state([optimizer], [("0", layer)])
    cut_ranks(layer, KEPT, [optimizer])

    def sliced(k, tensor):
        if k >= 4:
            return tensor[KEPT[k - 4]]
        if k > 0:
            tensor = tensor[KEPT[k - 1]]
        return tensor[..., KEPT[k]] if k < 3 else tensor

    assert layer.spec.ranks == (1, 2, 3, 1, 1)
    assert [id(p) for p in model.parameters()] == identities
    num_compared = 0
    for k, parameter in enumerate((*layer.cores, *layer.rank_weights)):
        assert torch.equal(parameter, sliced(k, old_data[k]))
        for key, value in optimizer.state[parameter].items():
            expected = old[k][key]
            if isinstance(value, torch.Tensor) and value.ndim:
                expected = sliced(k, expected)
                num_compared += 1
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected))
    assert num_compared >= 7


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
def test_after_a_cut_live_parameters_move_and_frozen_ones_do_not(optimizer_class, options):
    model, optimizer = trained(optimizer_class, **options)
    loss = model(torch.randn(5, 12)).square().mean()  # stays alive over the cut, as in a loop
    loss.backward()
    optimizer.step()
    cut_ranks(model[0], KEPT, [optimizer])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 12)).square().mean()
        loss.backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(before) - {"2.weight"}


def test_a_cut_of_dead_ranks_does_not_change_the_function():
    model, optimizer = trained(torch.optim.AdamW)
    layer = model[0]
    with torch.no_grad():
        for weight, kept in zip(layer.rank_weights, KEPT, strict=True):
            mask = torch.ones_like(weight, dtype=torch.bool)
            mask[kept] = False
            weight[mask] = 0.005
    x = torch.randn(7, 12)
    expected = model(x)
    cut_ranks(layer, KEPT, [optimizer])
    torch.testing.assert_close(model(x), expected)


def test_an_empty_bond_empties_the_layer():
    model, optimizer = trained(torch.optim.AdamW)
    cut_ranks(model[0], [KEPT[0], KEPT[1][:0], KEPT[2]], [optimizer])
    assert model[0].spec.ranks == (1, 0, 0, 0, 1)
    optimizer.zero_grad()
    model(torch.randn(5, 12)).sum().backward()
    optimizer.step()


def test_state_that_cannot_be_cut_is_refused_before_anything_changes():
    model, optimizer = trained(torch.optim.AdamW)
    core = model[0].core_1
    optimizer.state[core]["row_sums"] = torch.zeros(3, 2)
    before = core.detach().clone()
    with pytest.raises(RankError, match="'row_sums' of layer '0' cannot follow"):
        check_state([optimizer], [("0", model[0])])
    assert torch.equal(core, before)


def test_accumulated_gradients_are_cut_too():
    model, optimizer = trained(torch.optim.AdamW)
    optimizer.zero_grad()
    model(torch.randn(5, 12)).sum().backward()
    core = model[0].core_1
    expected = core.grad[KEPT[0]][..., KEPT[1]].clone()
    cut_ranks(model[0], KEPT, [optimizer])
    assert torch.equal(core.grad, expected)
