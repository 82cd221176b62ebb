"""Changes of rank amid what loops do: accumulate, clip, scale, schedule, average."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.state.resize import change_basis, cut_ranks, grow_ranks

SPEC = TTSpec("tt", (3, 4), (2, 5), (1, 3, 6, 4, 1))
KEPT = [torch.tensor([0, 2]), torch.tensor([1, 2, 5]), torch.tensor([1, 3])]
EYES = [(torch.eye(n),) * 2 for n in (2, 3, 2)]
CHANGES = {
    "cut": lambda layer, optimizers: cut_ranks(layer, KEPT, optimizers),
    "grow": lambda layer, optimizers: grow_ranks(layer, [0, 2, 1], optimizers),
    "turn": lambda layer, optimizers: change_basis(layer, EYES, optimizers),
}


def make(optimizer_class=torch.optim.AdamW, **options):
    """A model whose ranks outside ``KEPT`` are zero."""
    torch.manual_seed(0)
    model = nn.Sequential(TTLinear(SPEC, 12, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    model[0].attach_rank_weights(0.01)
    with torch.no_grad():
        for weight, kept in zip(model[0].rank_weights, KEPT, strict=True):
            weight.copy_(torch.zeros_like(weight).index_fill(0, kept, 1.0))
    return model, optimizer_class(param_groups(model, lr=1e-2), **options)


def loss_of(model, seed):
    x = torch.randn(16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x[:, :3].tanh()).square().mean()


def assert_same_output(model, twin):
    x = torch.randn(16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    torch.testing.assert_close(model(x), twin(x), rtol=1e-10, atol=1e-12)


def accumulate(model, optimizer, step, between=None):
    loss_of(model, 2 * step).backward()
    if between:
        between(model[0], [optimizer])
    loss_of(model, 2 * step + 1).backward()
    optimizer.step()
    optimizer.zero_grad()


def clip(model, optimizer, step, between=None):
    loss_of(model, step).backward()
    if between:
        between(model[0], [optimizer])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=True)
    assert norm > 0.05
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


class Scaled:
    def __init__(self, **options):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **options)

    def __call__(self, model, optimizer, step, between=None):
        self.scaler.scale(loss_of(model, step)).backward()
        if between:
            between(model[0], [optimizer])
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


LOOPS = {
    "accumulate": lambda: accumulate,
    "clip": lambda: clip,
    "scaler": Scaled,
    "disabled scaler": lambda: Scaled(enabled=False),
}
FORMS = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), FORMS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cut_of_ranks_that_are_zero_is_not_seen_by_the_loop(loop, optimizer_class, options):
    model, optimizer = make(optimizer_class, **options)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    one, other = LOOPS[loop](), LOOPS[loop]()
    for step in range(6):
        one(model, optimizer, step, CHANGES["cut"] if step == 3 else None)
        other(twin, twin_optimizer, step)
    assert model[0].spec.ranks == (1, 2, 3, 2, 1)
    assert_same_output(model, twin)


@pytest.mark.parametrize("change", ["grow", "turn"])
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_go_on_after_growth_and_a_change_of_basis(loop, change):
    model, optimizer = make()
    cut_ranks(model[0], KEPT, [optimizer])
    run = LOOPS[loop]()
    first = loss_of(model, 50).item()
    for step in range(20):
        run(model, optimizer, step, CHANGES[change] if step == 3 else None)
    assert loss_of(model, 50).item() < first


SCHEDULERS = {
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, [1e-2] * 4, total_steps=20),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("before", [True, False])
def test_schedules_reach_all_groups_over_a_cut(schedule, before):
    model, optimizer = make()
    with torch.no_grad():
        for weight in model[0].rank_weights:
            weight.fill_(1.0)
    if before:
        scheduler = SCHEDULERS[schedule](optimizer)
    adapter = RankAdapter(model, optimizer, RankConfig(method="comera", prune_every=2))
    if not before:
        scheduler = SCHEDULERS[schedule](optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(6):
        optimizer.zero_grad()
        adapter.loss(loss_of(model, step)).backward()
        if step == 2:
            with torch.no_grad():
                model[0].rank_weight_2[4:] = 0
        optimizer.step()
        adapter.step()
        scheduler.step()
    assert model[0].spec.ranks[2] < 6
    assert all(g["lr"] != r for g, r in zip(optimizer.param_groups, rates, strict=True))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_cores_in_several_groups_are_cut_in_all():
    model, _ = make()
    layer = model[0]
    groups = [{"params": [p], "lr": 1e-3 * (k + 1)} for k, p in enumerate(model.parameters())]
    optimizer = torch.optim.Adam(groups)
    loss_of(model, 0).backward()
    optimizer.step()
    cut_ranks(layer, KEPT, [optimizer])
    for parameter in (*layer.cores, *layer.rank_weights):
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()


AVERAGES = {
    "mean": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("average", AVERAGES)
def test_an_average_that_is_cut_alike_goes_on_as_the_uncut_one(average):
    model, optimizer = make()
    averaged = AveragedModel(model, **AVERAGES[average])
    twin, twin_optimizer, twin_averaged = copy.deepcopy((model, optimizer, averaged))
    for step in range(6):
        if step == 3:
            cut_ranks(model[0], KEPT, [optimizer])
            cut_ranks(averaged.module[0], KEPT, [])
        for m, o, a in ((model, optimizer, averaged), (twin, twin_optimizer, twin_averaged)):
            o.zero_grad()
            loss_of(m, step).backward()
            o.step()
            a.update_parameters(m)
    assert averaged.module[0].spec.ranks == (1, 2, 3, 2, 1)
    assert_same_output(averaged, twin_averaged)


@pytest.mark.parametrize("average", AVERAGES)
def test_an_average_that_is_not_cut_fails_or_where_a_rank_is_one_goes_wrong_in_silence(average):
    # Torch's behaviour, not ours: why averages have to be cut along.
    model, optimizer = make()
    averaged = AveragedModel(model, **AVERAGES[average])
    averaged.update_parameters(model)
    cut_ranks(model[0], KEPT, [optimizer])
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        averaged.update_parameters(model)
    cut_ranks(model[0], [torch.tensor([0])] * 3, [optimizer])
    averaged.update_parameters(model)
    assert averaged.module[0].spec == SPEC
