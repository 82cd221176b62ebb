"""Cuts, growth and changes of basis of one layer: what is held, gradients, bad arguments."""

import copy

import pytest
import torch
from torch import nn

from comera_fx.errors import RankError
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train.groups import param_groups
from comera_fx.train.state.resize import change_basis, check_state, cut_ranks, grow_ranks

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


# ---- growth ----


def layer_of(dtype=torch.float64, weights=True):
    torch.manual_seed(2)
    layer = TTLinear(SPEC, 12, 10, dtype=dtype)
    if weights:
        layer.attach_rank_weights(0.01)
        with torch.no_grad():
            for weight in layer.rank_weights:
                weight.uniform_(0.2, 1.5)
            layer.rank_weight_2[1] = 0.005  # acts as 0
    return layer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_growth_adds_random_columns_zero_rows_and_ones(dtype):
    layer = layer_of(dtype)
    cut_ranks(layer, KEPT, [])
    old, dense = [p.detach().clone() for p in layer.parameters()], layer.dense_weight()
    assert grow_ranks(layer, [1, 3, 2], []) == [1, 3, 2]
    assert layer.spec.ranks == (1, 3, 6, 3, 1)
    torch.testing.assert_close(layer.dense_weight(), dense, rtol=1e-6, atol=1e-6)
    for k, core in enumerate(layer.cores):
        left, right = old[k].shape[0], old[k].shape[-1]
        assert torch.equal(core[:left, ..., :right], old[k])
        assert not core[left:].any()
        columns = core[:left, ..., right:].detach().double()
        if k < 3:
            ratio = columns.square().mean() / old[k].double().square().mean()
            assert 0.05 < ratio < 5
    for weight, before in zip(layer.rank_weights, old[-3:], strict=True):
        assert torch.equal(weight[: len(before)], before)
        assert torch.equal(weight[len(before) :], torch.ones(len(weight) - len(before)))


def test_growth_takes_no_more_than_a_bond_can_use():
    layer = layer_of()
    assert grow_ranks(layer, [5, 100, 100], []) == [0, 4, 1]
    assert layer.spec.ranks == (1, 3, 10, 5, 1)
    assert layer.spec == layer.spec.clipped()
    cut_ranks(layer, [torch.tensor([0]), torch.arange(10), torch.arange(5)], [])
    assert grow_ranks(layer, [0, 1, 0], []) == [0, 0, 0]


def test_growth_draws_from_the_generator_and_leaves_the_global_one_alone():
    layers = [layer_of(), layer_of()]
    state = torch.get_rng_state()
    for layer in layers:
        grow_ranks(layer, [0, 2, 1], [], torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(layers[0].cores, layers[1].cores, strict=True):
        assert torch.equal(ours, theirs)


def test_growth_beside_a_core_of_zeros_still_gets_a_gradient():
    layer = layer_of(weights=False)
    with torch.no_grad():
        layer.core_1.zero_()
    grow_ranks(layer, [0, 2, 0], [])
    layer(torch.randn(5, 12, dtype=torch.float64)).square().mean().backward()
    layer(torch.randn(5, 12, dtype=torch.float64)).sum().backward()
    assert layer.core_2.grad[6:].abs().max() > 0


def test_new_directions_learn():
    layer = layer_of(weights=False)
    cut_ranks(layer, KEPT, [])
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    assert grow_ranks(layer, [1, 3, 2], [optimizer]) == [1, 3, 2]
    x = torch.randn(64, 12, dtype=torch.float64)
    for _ in range(5):
        optimizer.zero_grad()
        (layer(x) - x[:, :10]).square().mean().backward()
        optimizer.step()
    for core, (left, right) in zip(layer.cores, [(1, 2), (2, 3), (3, 1), (1, 1)], strict=True):
        assert all(part.all() for part in (core[left:], core[..., right:]))


# ---- change of basis ----


def bases_of(ranks, seed=6):
    torch.manual_seed(seed)
    for rank in ranks:
        t = torch.randn(rank, rank, dtype=torch.float64) + 3 * torch.eye(rank)
        yield t, torch.linalg.inv(t)


@pytest.mark.parametrize("weights", [True, False])
def test_a_change_of_basis_keeps_the_weight_and_makes_rank_weights_one(weights):
    layer = layer_of(weights=weights)
    effective = [core.detach().clone() for core in layer.effective_cores()]
    dense = layer.dense_weight()
    bases = list(bases_of((3, 6, 4)))
    change_basis(layer, bases, [])
    torch.testing.assert_close(layer.dense_weight(), dense, rtol=1e-10, atol=1e-10)
    (t1, inv1), (t2, _), _ = bases
    torch.testing.assert_close(layer.core_0, effective[0] @ t1, rtol=1e-12, atol=1e-12)
    middle = torch.einsum("ab,bnc,cd->and", inv1, effective[1], t2)
    torch.testing.assert_close(layer.core_1, middle, rtol=1e-12, atol=1e-12)
    assert len(layer.rank_weights) == (3 if weights else 0)
    assert all(torch.equal(w, torch.ones_like(w)) for w in layer.rank_weights)


def test_a_smaller_basis_keeps_what_it_spans():
    layer = layer_of()
    bases = list(bases_of((3, 6, 4)))
    smaller = [(t[:, : n - 1], inv[: n - 1]) for n, (t, inv) in zip((3, 6, 4), bases, strict=True)]
    projected = layer_of()
    change_basis(projected, [(t @ inv, torch.eye(len(t))) for t, inv in smaller], [])
    change_basis(layer, smaller, [])
    assert layer.spec.ranks == (1, 2, 5, 3, 1)
    torch.testing.assert_close(
        layer.dense_weight(), projected.dense_weight(), rtol=1e-10, atol=1e-10
    )


def test_a_basis_without_directions_empties_the_layer():
    layer = layer_of()
    empty = torch.zeros(6, 0), torch.zeros(0, 6)
    change_basis(layer, [(torch.eye(3),) * 2, empty, (torch.eye(4),) * 2], [])
    assert layer.spec.ranks == (1, 0, 0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cores_keep_their_dtype_in_another_basis(dtype):
    layer = layer_of(dtype)
    dense = layer.dense_weight().float()
    change_basis(layer, list(bases_of((3, 6, 4))), [])
    assert {core.dtype for core in layer.cores} == {dtype}
    bound = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(layer.dense_weight().float(), dense, rtol=bound, atol=bound)


def test_accumulated_gradients_follow_growth_and_a_change_of_basis():
    layer = layer_of()
    with torch.no_grad():
        layer.rank_weight_2[1] = 0.02  # at 0 its directions would have no gradient to follow
    x = torch.randn(9, 12, dtype=torch.float64)

    def backward(rows):
        layer(rows).square().sum().backward()

    backward(x[:4])
    change_basis(layer, list(bases_of((3, 6, 4))), [])
    assert [weight.grad for weight in layer.rank_weights] == [None] * 3
    backward(x[4:])
    summed = [core.grad.clone() for core in layer.cores]
    layer.zero_grad()
    backward(x)
    for core, grad in zip(layer.cores, summed, strict=True):
        torch.testing.assert_close(core.grad, grad, rtol=1e-10, atol=1e-10)
    grads = [core.grad.clone() for core in layer.cores]
    grow_ranks(layer, [0, 2, 0], [])
    assert torch.equal(layer.core_1.grad[..., :6], grads[1])
    assert torch.equal(layer.core_2.grad[6:], torch.zeros(2, 2, 4))


def test_ttm_cores_change_too():
    torch.manual_seed(0)
    table = TTEmbedding(TTSpec("ttm", (3, 4, 2), (2, 2, 2), (1, 3, 2, 1)), 20, 8)
    table.attach_rank_weights(0.01)
    optimizer = torch.optim.AdamW(table.parameters(), lr=1e-2)
    indices = torch.arange(20)

    def step():
        optimizer.zero_grad()
        table(indices).square().mean().backward()
        optimizer.step()

    step()
    dense = table.dense_weight()
    grow_ranks(table, [1, 1], [optimizer])
    torch.testing.assert_close(table.dense_weight(), dense)
    change_basis(table, [(torch.eye(4),) * 2, (torch.eye(3),) * 2], [optimizer])
    cut_ranks(table, [torch.arange(3), torch.arange(2)], [optimizer])
    torch.testing.assert_close(table.dense_weight(), dense)
    assert optimizer.state[table.core_1]["exp_avg"].shape == (3, 4, 2, 2)
    step()


# ---- bad arguments ----

EYES = [(torch.eye(n),) * 2 for n in (3, 6, 4)]
BAD = [
    (cut_ranks, KEPT[:2], "kept does not fit the layer\n.*2 entries"),
    (cut_ranks, [KEPT[0], torch.tensor([0, 6]), KEPT[2]], "bond 2 do not fit.*\n.*0, 6"),
    (cut_ranks, [KEPT[0], KEPT[1], torch.tensor([-1])], "bond 3 do not fit"),
    (cut_ranks, [torch.tensor([1, 0]), *KEPT[1:]], "bond 1 do not fit"),
    (cut_ranks, [torch.tensor([1, 1]), *KEPT[1:]], "bond 1 do not fit"),
    (cut_ranks, [torch.tensor([True, False, True]), *KEPT[1:]], "bond 1 do not .*\n.*torch.bool"),
    (cut_ranks, [torch.tensor([0.0]), *KEPT[1:]], "bond 1 do not fit"),
    (grow_ranks, [1], "counts does not fit the layer"),
    (grow_ranks, [1, -1, 0], "whole number of directions\n.*-1"),
    (grow_ranks, [1, 0.5, 0], "whole number of directions"),
    (change_basis, EYES[:2], "bases does not fit the layer"),
    (change_basis, [*EYES[:2], (torch.eye(3), torch.eye(3))], "basis of bond 3 does not fit"),
    (change_basis, [*EYES[:2], (torch.zeros(4, 2),) * 2], r"bond 3 .*\n.*Tinv \(4, 2\)"),
    (change_basis, [*EYES[:2], (torch.full((4, 4), torch.nan),) * 2], "not all of them finite"),
]


@pytest.mark.parametrize(("change", "argument", "match"), BAD)
def test_bad_arguments_change_nothing(change, argument, match):
    layer = layer_of()
    before = copy.deepcopy(list(layer.parameters()))
    with pytest.raises(RankError, match=match):
        change(layer, argument, [])
    torch.testing.assert_close(list(layer.parameters()), before, rtol=0, atol=0)


def test_a_layer_without_ranks_does_not_grow():
    layer = layer_of()
    cut_ranks(layer, [indices[:0] for indices in KEPT], [])
    with pytest.raises(RankError, match="lost all its ranks cannot grow"):
        grow_ranks(layer, [1, 1, 1], [])
