"""State of every usual optimizer, as ranks are cut, grown or turned into another basis."""

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train.state.resize import change_basis, check_state, cut_ranks, grow_ranks

SPEC = TTSpec("tt", (3, 4), (2, 5), (1, 3, 6, 4, 1))
KEPT = [torch.tensor([0, 2]), torch.tensor([1, 2, 5]), torch.tensor([1, 3])]
LR = 2e-3


class Lion(torch.optim.Optimizer):
    """The sign of an average, as of an optimizer that nothing here knows."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.add_(state["exp_avg"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


def forms(name, optimizer, *, fused=False, **options):
    """The forms in which torch runs an optimizer."""
    kinds = {"plain": {"foreach": False}, "foreach": {"foreach": True}}
    if fused:
        kinds["fused"] = {"fused": True}
    options = {"lr": LR, **options}
    return {f"{name}-{kind}": partial(optimizer, **options, **form) for kind, form in kinds.items()}


OPTIM = torch.optim
ELEMENTWISE = {
    **forms("sgd", OPTIM.SGD, fused=True, momentum=0.9, lr=0.02),
    "sgd-no-momentum": partial(OPTIM.SGD, lr=0.02),
    "sgd-nesterov": partial(OPTIM.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-2),
    **forms("adam", OPTIM.Adam, fused=True),
    **forms("adamw", OPTIM.AdamW, fused=True, amsgrad=True, weight_decay=1e-2),
    **forms("nadam", OPTIM.NAdam),
    **forms("radam", OPTIM.RAdam),
    **forms("adamax", OPTIM.Adamax),
    **forms("adagrad", OPTIM.Adagrad, fused=True, lr=0.02),
    **forms("rmsprop", OPTIM.RMSprop, centered=True, momentum=0.5),
    "rmsprop-plain-only": partial(OPTIM.RMSprop, lr=LR),
    **forms("adadelta", OPTIM.Adadelta, lr=1.0),
    "lion": partial(Lion, lr=1e-3),
}
FACTORED = {
    **forms("adafactor", OPTIM.Adafactor, lr=0.02),
    "hf-adafactor": partial(
        transformers.Adafactor, lr=LR, scale_parameter=False, relative_step=False
    ),
    "hf-adafactor-beta1": partial(transformers.Adafactor, beta1=0.9),
}
ALL = ELEMENTWISE | FACTORED

AVERAGED = {"row_var": -1, "col_var": -2, "exp_avg_sq_row": -1, "exp_avg_sq_col": -2}
NUMBERS = {"step", "mu_product", "RMS"}

every = pytest.mark.parametrize("name", ALL)
one_form = pytest.mark.parametrize("name", [n for n in ALL if "foreach" not in n])
elementwise = pytest.mark.parametrize("name", ELEMENTWISE)


def make(name, *, weights=True):
    torch.manual_seed(0)
    model = nn.Sequential(TTLinear(SPEC, 12, 10, dtype=torch.float64), nn.Tanh())
    if weights:
        model[0].attach_rank_weights(0.01)
    return model, ALL[name](model.parameters())


def train(model, optimizer, steps):
    x = torch.randn(32, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.tanh(x[:, :10] - x[:, 2:])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tt_parameters(layer):
    return [*layer.cores, *layer.rank_weights]


def states(optimizer, layer):
    return [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in tt_parameters(layer)]


def sliced(layer_index, tensor, kept=KEPT):
    """The part of a core (0 to 3) or rank weight (4 to 6) that stays."""
    if layer_index >= 4:
        return tensor[kept[layer_index - 4]]
    if layer_index > 0:
        tensor = tensor[kept[layer_index - 1]]
    return tensor[..., kept[layer_index]] if layer_index < 3 else tensor


def assert_trains_on(model, optimizer, layer):
    losses = train(model, optimizer, 20)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in tt_parameters(layer))


@every
def test_after_a_cut_state_is_sliced_and_training_goes_on(name):
    model, optimizer = make(name)
    layer = model[0]
    train(model, optimizer, 3)
    old, shapes = states(optimizer, layer), [p.shape for p in tt_parameters(layer)]
    check_state([optimizer], [("0", layer)])
    cut_ranks(layer, KEPT, [optimizer])
    num_compared = 0
    for k, parameter in enumerate(tt_parameters(layer)):
        state = optimizer.state.get(parameter, {})
        assert state.keys() == old[k].keys()
        for key, value in state.items():
            expected = old[k][key]
            if key in AVERAGED:
                axis = AVERAGED[key]
                keeps_axis = expected.ndim == len(shapes[k])
                full = expected if keeps_axis else expected.unsqueeze(axis)
                cut = sliced(k, full.expand(shapes[k]))
                expected = cut.narrow(axis, 0, 1) if keeps_axis else cut.select(axis, 0)
            elif isinstance(expected, torch.Tensor) and key not in NUMBERS:
                expected = sliced(k, expected)
            num_compared += key not in NUMBERS
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected))
    assert num_compared >= (0 if name == "sgd-no-momentum" else 7)
    assert_trains_on(model, optimizer, layer)


@elementwise
def test_a_cut_of_ranks_that_are_zero_leaves_the_next_steps_as_they_were(name):
    model, optimizer = make(name)
    with torch.no_grad():
        for weight, kept in zip(model[0].rank_weights, KEPT, strict=True):
            weight.copy_(torch.zeros_like(weight).index_fill(0, kept, 1.0))
    train(model, optimizer, 3)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    cut_ranks(model[0], KEPT, [optimizer])
    assert model[0].spec.ranks == (1, 2, 3, 2, 1)
    train(model, optimizer, 5)
    train(twin, twin_optimizer, 5)
    pairs = zip(tt_parameters(model[0]), tt_parameters(twin[0]), strict=True)
    for k, (parameter, uncut) in enumerate(pairs):
        torch.testing.assert_close(parameter, sliced(k, uncut), rtol=1e-12, atol=1e-12)


@every
def test_growth_keeps_the_output_and_the_first_step_in_it_is_an_ordinary_one(name):
    model, optimizer = make(name)
    layer = model[0]
    cut_ranks(layer, KEPT, [optimizer])
    train(model, optimizer, 10)
    dense = layer.dense_weight().detach()
    assert grow_ranks(layer, [1, 2, 1], [optimizer]) == [1, 2, 1]
    torch.testing.assert_close(layer.dense_weight(), dense, rtol=1e-13, atol=1e-14)
    before = [core.detach().clone() for core in layer.cores]
    train(model, optimizer, 1)
    for k, core in enumerate(layer.cores[1:], start=1):
        moved = (core - before[k]).abs()
        num_old = len(KEPT[k - 1])
        new, old = moved[num_old:], moved[:num_old]
        assert new.max() > 0
        if "sgd" not in name:  # whose steps are as large as the gradient
            # Half again the largest step elsewhere, or one at the rate where that is larger.
            assert new.max() <= max(1.5 * old.max(), optimizer.param_groups[0]["lr"] or 0)
    assert_trains_on(model, optimizer, layer)


def random_bases(ranks, new_ranks=None):
    generator = torch.Generator().manual_seed(3)
    for rank, new_rank in zip(ranks, new_ranks or ranks, strict=True):
        t = torch.randn(rank, rank, dtype=torch.float64, generator=generator)
        t = t + 3 * torch.eye(rank, dtype=torch.float64)
        yield t[:, :new_rank], torch.linalg.inv(t)[:new_rank]


def signed_permutations(ranks):
    generator = torch.Generator().manual_seed(4)
    for rank in ranks:
        order = torch.randperm(rank, generator=generator)
        signs = torch.randint(0, 2, (rank,), generator=generator) * 2.0 - 1
        t = (torch.eye(rank, dtype=torch.float64) * signs)[:, order]
        yield t, t.T


@one_form
@pytest.mark.parametrize("new_ranks", [(3, 6, 4), (2, 3, 2)])
def test_after_a_change_of_basis_training_goes_on(name, new_ranks):
    model, optimizer = make(name)
    layer = model[0]
    train(model, optimizer, 5)
    dense = layer.dense_weight().detach()
    change_basis(layer, list(random_bases((3, 6, 4), new_ranks)), [optimizer])
    if new_ranks == (3, 6, 4):
        torch.testing.assert_close(layer.dense_weight(), dense, rtol=1e-10, atol=1e-10)
    for parameter in tt_parameters(layer):
        for key, value in optimizer.state.get(parameter, {}).items():
            assert torch.as_tensor(value if value is not None else 0).isfinite().all()
            if key not in ("exp_avg", "momentum_buffer", "grad_avg") and value is not None:
                assert torch.as_tensor(value).min() >= 0
    assert_trains_on(model, optimizer, layer)


@one_form
def test_signed_permutations_of_a_basis_commute_with_training(name):
    model, optimizer = make(name, weights=False)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3)
    change_basis(model[0], list(signed_permutations((3, 6, 4))), [optimizer])
    losses = train(model, optimizer, 5)
    assert losses == pytest.approx(train(twin, twin_optimizer, 8)[3:], rel=1e-10)
    change_basis(twin[0], list(signed_permutations((3, 6, 4))), [])
    for core, other in zip(model[0].cores, twin[0].cores, strict=True):
        torch.testing.assert_close(core, other, rtol=1e-10, atol=1e-10)


@one_form
def test_a_basis_of_chosen_directions_is_a_cut(name):
    model, optimizer = make(name, weights=False)
    train(model, optimizer, 3)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    chosen = [torch.eye(n, dtype=torch.float64)[:, i] for n, i in zip((3, 6, 4), KEPT, strict=True)]
    change_basis(model[0], [(t, t.T) for t in chosen], [optimizer])
    cut_ranks(twin[0], KEPT, [twin_optimizer])
    pairs = zip(states(optimizer, model[0]), states(twin_optimizer, twin[0]), strict=True)
    for state, expected in pairs:
        torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if n.startswith("sgd")])
def test_orthogonal_changes_of_basis_commute_with_sgd(name):
    model, optimizer = make(name, weights=False)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3)
    rotations = [torch.linalg.qr(t).Q for t, _ in random_bases((3, 6, 4))]
    change_basis(model[0], [(q, q.T) for q in rotations], [optimizer])
    train(model, optimizer, 5)
    train(twin, twin_optimizer, 8)
    change_basis(twin[0], [(q, q.T) for q in rotations], [])
    for core, other in zip(model[0].cores, twin[0].cores, strict=True):
        torch.testing.assert_close(core, other, rtol=1e-10, atol=1e-10)


@every
def test_a_layer_without_ranks_trains_on_as_its_bias(name):
    model, optimizer = make(name)
    layer = model[0]
    train(model, optimizer, 2)
    cut_ranks(layer, [kept[:0] for kept in KEPT], [optimizer])
    optimizer.step()
    assert layer.spec.ranks == (1, 0, 0, 0, 1)
    losses = train(model, optimizer, 5)
    assert losses[-1] < losses[0]


LIKE_A_GRADIENT = {
    "sgd-plain": {"momentum_buffer": 1},
    "adam-plain": {"exp_avg": 1, "exp_avg_sq": 2},
    "adamax-plain": {"exp_avg": 1, "exp_inf": 1},
    "adagrad-plain": {"sum": 2},
    "rmsprop-plain": {"square_avg": 2, "grad_avg": 1, "momentum_buffer": -1},
    "adadelta-plain": {"square_avg": 2, "acc_delta": -2},
    "adafactor-plain": {"row_var": 2, "col_var": 2},
    "hf-adafactor-beta1": {"exp_avg": -1, "exp_avg_sq_row": 2, "exp_avg_sq_col": 2},
}


@pytest.mark.parametrize("name", LIKE_A_GRADIENT)
def test_a_change_of_scale_moves_gradients_one_way_and_steps_the_other(name):
    model, optimizer = make(name, weights=False)
    train(model, optimizer, 3)
    core = model[0].core_0
    old = dict(optimizer.state[core])
    # Core 0 is multiplied by the scales, so that its gradient is divided by them.
    scales = torch.tensor([2.0, 0.5, 4.0], dtype=torch.float64)
    unit = torch.eye(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    last = torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    change_basis(model[0], [(scales.diag(), (1 / scales).diag()), unit, last], [optimizer])
    for key, power in LIKE_A_GRADIENT[name].items():
        has_axis = AVERAGED.get(key) != -1
        expected = old[key] / scales ** float(power) if has_axis else old[key]
        torch.testing.assert_close(optimizer.state[core][key], expected)
