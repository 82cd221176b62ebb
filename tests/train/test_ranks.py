"""RankAdapter: stages, targets, cuts in mid-training, resume, and what it refuses."""

import copy
import warnings

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.errors import ComeraError, RankError
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.methods.select import _lost_shares, ranks_to_give_up
from comera_fx.train.methods.size import SizeOf
from tests.train.students import STUDENT, make, train


def test_size_is_the_parameter_count_and_the_surrogate_its_l1_form():
    model, _, adapter = make()
    sizes = SizeOf([model[0], model[2]], 0.01)()
    assert sizes.size.item() == adapter.size == 2 * STUDENT.num_params
    assert sizes.surrogate.item() == pytest.approx(adapter.size)
    with torch.no_grad():
        model[0].rank_weight_2.mul_(0.5)
        model[0].rank_weight_2[0] = 0.0
    sizes = SizeOf([model[0], model[2]], 0.01)()
    one_less = TTSpec("tt", (4, 8), (8, 4), (1, 4, 15, 4, 1))
    assert sizes.size.item() == STUDENT.num_params + one_less.num_params
    outer = 4 * 4 + 4 * 4
    expected = STUDENT.num_params + outer + 8 * 4 * 7.5 + 7.5 * 8 * 4
    assert sizes.surrogate.item() == pytest.approx(expected)


def test_the_stages_follow_one_another():
    model, optimizer, adapter = make(warmup_steps=5, early_steps=10, target_ratio=0.9)
    seen = []
    for step in range(20):
        seen.append(adapter.stage)
        train(model, optimizer, adapter, [step])
    assert seen == ["warmup"] * 5 + ["early"] * 10 + ["late"] * 5
    assert [entry["stage"] for entry in adapter.history if entry["step"] in (5, 15)] == [
        "early",
        "late",
    ]


def test_warmup_trains_the_task_loss_alone():
    _, _, adapter = make(warmup_steps=5)
    task = torch.tensor(2.0, requires_grad=True)
    assert adapter.loss(task) is task


def test_early_penalty():
    _, _, adapter = make(gamma=0.5, beta=0.0)
    assert adapter.loss(torch.tensor(2.0)).item() == pytest.approx(2.5)
    model, _, adapter = make(gamma=0.0, beta=1.0)
    norm = sum(core.square().sum() for layer in (model[0], model[2]) for core in layer.cores)
    assert adapter.loss(torch.tensor(2.0)).item() == pytest.approx(2.0 + norm.item(), rel=1e-5)


@pytest.mark.parametrize("lagging", ["loss", "size"])
def test_late_stage_works_on_the_objective_that_lags(lagging):
    _, _, adapter = make(target_ratio=0.5, early_steps=1, rho=0.1)
    adapter.loss(torch.tensor(1.0))
    adapter.step()
    assert adapter.stage == "late"
    # The size is at twice its target, so its lag is 1; the loss lags more from 2 on.
    value = 4.0 if lagging == "loss" else 0.5
    task = torch.tensor(value, requires_grad=True)
    weights = list(adapter.optimizers[0].param_groups[-1]["params"])
    result = adapter.loss(task)
    grads = torch.autograd.grad(result, [task, *weights])
    scale = 1 / 1.1
    main, both = (value, 0.1 * (value + 2)) if lagging == "loss" else (2.0, 0.1 * (value + 2))
    assert result.item() == pytest.approx(scale * (main + both), rel=1e-4)
    assert grads[0].item() == pytest.approx(1.0 if lagging == "loss" else 0.1 * scale, rel=1e-5)
    # Only the ranks that the target asks to cut are pushed, and some of every kind stay.
    pushed = torch.cat([(grad > 0).flatten() for grad in grads[1:]])
    assert all((grad >= 0).all() for grad in grads[1:])
    assert 0 < pushed.sum() < pushed.numel()


def test_training_shrinks_to_the_target_and_not_far_below():
    model, optimizer, adapter = make(target_ratio=0.5, early_steps=20, rho=0.5)
    parameters = {id(p) for p in model.parameters()}
    losses = train(model, optimizer, adapter, range(300))
    assert adapter.size <= adapter.target_size
    largest_rank = max(
        2 * mode * 16 for mode in STUDENT.mode_sizes
    )  # one rank more could cost this much
    assert adapter.size > adapter.target_size - largest_rank
    assert sum(p.numel() for layer in (model[0], model[2]) for p in layer.cores) == adapter.size
    assert {id(p) for p in model.parameters()} == parameters
    assert losses[-1] < losses[0]
    sizes = [entry["size"] for entry in adapter.history]
    assert sizes == sorted(sizes, reverse=True)
    assert adapter.history[-1]["ranks"] == adapter.ranks


def test_all_parameters_move_after_a_cut_and_the_state_has_their_shape():
    model, optimizer, adapter = make(target_ratio=0.5, early_steps=10, rho=0.5)
    train(model, optimizer, adapter, range(150))
    assert adapter.size < adapter.initial_size
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, adapter, range(150, 155))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # Once the target is met the rank weights stand still.
    assert moved == {name for name in before if "rank_weight" not in name}
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_min_rank_and_exclude():
    model, optimizer, adapter = make(
        rank_lr=0.1, gamma=100.0, min_rank=2, exclude=("2",), prune_every=5
    )
    train(model, optimizer, adapter, range(100))
    assert adapter.ranks == {"0": [2, 2, 2]}
    assert model[2].spec == STUDENT
    assert model[2].rank_weights == ()


@pytest.mark.parametrize("patience", [1, 3])
def test_dead_ranks_go_while_other_layers_are_turned(patience):
    """No rank of the second layer has died: it comes into balanced form at every cut."""
    model, _, adapter = make(gamma=0.0, patience=patience, prune_every=1)
    with torch.no_grad():
        model[0].rank_weight_2[3] = 0.0
    for cut in range(1, patience + 1):
        adapter.loss(torch.tensor(1.0))
        adapter.step()
        assert adapter.ranks["0"] == ([4, 15, 4] if cut == patience else [4, 16, 4])


def test_ranks_may_fall_to_zero_which_is_said():
    model, optimizer, adapter = make(rank_lr=0.1, gamma=100.0, prune_every=5)
    with pytest.warns(UserWarning, match="the layer is its bias alone"):
        train(model, optimizer, adapter, range(100))
    assert adapter.ranks == {"0": [0, 0, 0], "2": [0, 0, 0]}
    assert adapter.size == 0
    train(model, optimizer, adapter, range(100, 102))


def test_a_target_close_by_is_met_and_not_passed_by_much():
    model, optimizer, adapter = make(rank_lr=0.1, target_ratio=0.999, early_steps=5)
    train(model, optimizer, adapter, range(60))
    assert 0.9 * adapter.target_size < adapter.size <= adapter.target_size


@pytest.mark.parametrize("config", [{"target_ratio": 1e-6}, {"target_ratio": 0.4, "min_rank": 9}])
def test_a_target_out_of_reach_is_said_and_training_goes_on(config):
    with pytest.warns(UserWarning, match="is out of reach"):
        model, optimizer, adapter = make(rank_lr=0.1, early_steps=5, **config)
    losses = train(model, optimizer, adapter, range(60))
    assert losses[-1] < losses[0]
    least = min(config.get("min_rank", 1), 4)
    assert all(rank >= least for ranks in adapter.ranks.values() for rank in ranks)


def test_forgetting_loss_warns():
    _, _, adapter = make()
    for _ in range(99):
        adapter.step()
    with pytest.warns(UserWarning, match=r"without RankAdapter\.loss"):
        adapter.step()


def test_a_second_adapter_is_refused_while_the_first_lives():
    model, optimizer, adapter = make()
    with pytest.raises(RankError, match="two adapters"):
        RankAdapter(model, optimizer)
    del adapter
    RankAdapter(model, optimizer)


@pytest.mark.parametrize("how", ["scheduler", "warning"])
def test_an_adapter_that_was_refused_claims_no_layer(how):
    """The traceback keeps the refused one alive."""
    model, optimizer = with_scheduler() if how == "scheduler" else with_lbfgs()
    config = {"method": "comera"} if how == "scheduler" else {"target_params": 1}
    with pytest.raises((RankError, UserWarning)) as caught:
        RankAdapter(model, optimizer, RankConfig(**config))
    assert not model[0].rank_weights
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    assert RankAdapter(model, optimizer).stage == "early"
    assert caught.value.__traceback__ is not None


def with_scheduler():
    model = nn.Sequential(TTLinear(STUDENT, 32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer


def with_lbfgs():
    model = nn.Sequential(TTLinear(STUDENT, 32, 32))
    return model, torch.optim.LBFGS(model.parameters())


def test_targets_in_parameters_and_bytes_agree():
    assert make(target_params=600)[2].target_size == 600
    assert make(target_bytes=2400)[2].target_size == 600


def test_a_loss_that_is_not_finite_prunes_nothing_and_is_forgotten():
    _, _, adapter = make(gamma=1.0, prune_every=1)
    for weight in adapter.optimizers[0].param_groups[-1]["params"]:
        weight.data.zero_()
    adapter.loss(torch.tensor(float("nan")))
    with pytest.warns(UserWarning, match="the step is skipped"):
        adapter.step()
    adapter.loss(torch.tensor(float("inf")))
    adapter.step()
    assert adapter.size == adapter.initial_size
    adapter.loss(torch.tensor(1.0))
    adapter.step()
    assert adapter.size == adapter.initial_size  # one more chance
    adapter.loss(torch.tensor(1.0))
    with pytest.warns(UserWarning, match="have died"):
        adapter.step()
    assert adapter.size == 0
    assert adapter.history[-1]["loss"] == pytest.approx(1.0)


def test_size_is_pushed_down_where_the_loss_is_negative_too():
    _, _, adapter = make(target_ratio=0.5, early_steps=1)
    adapter.loss(torch.tensor(-1.0))
    adapter.step()
    weights = list(adapter.optimizers[0].param_groups[-1]["params"])
    grads = torch.autograd.grad(adapter.loss(torch.tensor(-1.0)), weights)
    assert sum(grad.sum() for grad in grads) > 0


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_ranks_fall_where_the_loss_has_become_small(optimizer_class):
    torch.manual_seed(0)
    model = nn.Sequential(TTLinear(STUDENT, 32, 32), nn.Tanh(), TTLinear(STUDENT, 32, 32))
    optimizer = optimizer_class(param_groups(model, lr=3e-3, rank_lr=3e-2))
    adapter = RankAdapter(model, optimizer, RankConfig(method="comera", target_ratio=0.5))
    target = torch.randn(64, 32) * 1e-3
    x = torch.randn(64, 32)
    for _ in range(600):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        adapter.loss(loss).backward()
        optimizer.step()
        adapter.step()
    assert loss.item() < 0.01
    assert adapter.size <= adapter.target_size
    assert f"stage late, size {adapter.size:,} of {adapter.initial_size:,}" in repr(adapter)


def test_forgetting_step_warns_once():
    _, _, adapter = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            adapter.loss(torch.tensor(1.0))
    assert ["without RankAdapter.step" in str(warning.message) for warning in caught] == [True]


def test_a_plain_optimizer_gets_a_group_for_the_rank_weights():
    model = nn.Sequential(TTLinear(STUDENT, 32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1)
    RankAdapter(model, optimizer, RankConfig(method="comera"))
    group = optimizer.param_groups[-1]
    assert group["lr"] == pytest.approx(0.1)
    assert group["weight_decay"] == 0.0
    assert all(a is b for a, b in zip(group["params"], model[0].rank_weights, strict=True))


def test_param_groups_hold_every_trainable_parameter_once():
    model = nn.Sequential(TTLinear(STUDENT, 32, 32), nn.LayerNorm(32), nn.Linear(32, 2))
    model[2].bias.requires_grad_(False)
    groups = param_groups(model, lr=1e-3, rank_lr=7e-3, weight_decay=0.1)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decayed = [p for g in groups if g["weight_decay"] for p in g["params"]]
    assert {p.ndim for p in decayed} == {2, 3}
    assert [g["lr"] for g in groups] == [1e-3, 1e-3, 1e-3, 7e-3]
    groups = param_groups(model, lr=1e-3, rest_lr=2e-3)
    assert [g["lr"] for g in groups] == [1e-3, 2e-3, 2e-3, 1e-2]


def as_sharded(model):
    return type("FullyShardedDataParallel", (nn.Sequential,), {})(model)


def dense_then_optimized():
    dense = nn.Sequential(nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(dense.parameters())
    return nn.Sequential(TTLinear.from_linear(dense[0], STUDENT)), optimizer


def with_a_core_left_out():
    model = nn.Sequential(TTLinear(STUDENT, 32, 32))
    return model, torch.optim.AdamW(list(model.parameters())[:-2])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: RankAdapter(*dense_then_optimized()), "optimizer does not hold the model's cores"),
        (lambda: RankAdapter(*with_a_core_left_out()), "not all cores of 1 layers, .* them '0'"),
        (
            lambda: RankAdapter(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)])),
            "no TT layer whose ranks could adapt",
        ),
        (lambda: param_groups(nn.Linear(2, 2), lr=1e-3), "no TT layer"),
        (lambda: param_groups(None, lr=1e-3), "no TT layer"),
        (lambda: make()[2].loss(torch.ones(2)), "needs a scalar"),
        (
            lambda: RankAdapter(as_sharded(make()[0]), make()[1]),
            "ranks cannot be cut where parameters are divided",
        ),
        (
            lambda: RankAdapter(*with_scheduler(), RankConfig(method="comera")),
            "scheduler was made before",
        ),
        (
            lambda: RankAdapter(*with_lbfgs(), RankConfig(method="comera")),
            "several parameter groups",
        ),
        (lambda: RankAdapter(*make()[:2], {"target_ratio": 0.5}), "wrong type of config"),
        (lambda: RankAdapter(make()[0], None), "wrong type of optimizer"),
        (lambda: make()[2].loss(1.0), "needs a scalar"),
        (lambda: make(exclude=["nosuch"]), "pattern that matches no TT layer"),
        (lambda: make()[2].load_state_dict({}), "state is incomplete"),
        (
            lambda: make()[2].load_state_dict({**make()[2].state_dict(), "ranks": {"0": [1]}}),
            "other ranks than the model has",
        ),
    ],
)
def test_refusals(call, problem):
    with pytest.raises(RankError, match=problem) as caught:
        call()
    assert isinstance(caught.value, ComeraError)
    assert len(str(caught.value).splitlines()) == 4


def test_ranks_are_given_up_where_the_weight_needs_them_least():
    # A layer whose middle bond carries a fourth of its ranks: that bond has to pay first.
    torch.manual_seed(0)
    layer = TTLinear(TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1)), 32, 32)
    with torch.no_grad():
        layer.core_1[..., 4:] *= 1e-3
    layer.attach_rank_weights(0.01)
    full = layer.dense_weight().detach()
    masks = ranks_to_give_up({"layer": layer}, int(0.5 * layer.tt_params), {"layer": 0})["layer"]
    assert [int(mask.sum()) for mask in masks][0::2] == [0, 0]
    assert not masks[1][:4].any()
    with torch.no_grad():
        for mask, weight in zip(masks, layer.rank_weights, strict=True):
            weight[mask] = 0.0
    left = layer.dense_weight().detach()
    assert (left - full).norm() < 1e-2 * full.norm()


def test_what_a_rank_carries_is_what_the_weight_loses_without_it():
    torch.manual_seed(0)
    layer = TTLinear(STUDENT, 32, 32, dtype=torch.float64)
    layer.attach_rank_weights(0.01)
    full = layer.dense_weight().detach()
    for bond, shares in enumerate(_lost_shares(layer)):
        for index in (0, len(shares) - 1):
            without = copy.deepcopy(layer)
            with torch.no_grad():
                without.rank_weights[bond][index] = 0.0
            lost = (full - without.dense_weight().detach()).norm() ** 2 / full.norm() ** 2
            assert shares[index].item() == pytest.approx(lost.item(), rel=1e-8)
