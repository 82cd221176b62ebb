"""Stages: where the early stage ends, how far the late one is, and the running mean of the loss."""

import math

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.stages import IMPROVEMENT, LOSS_MEMORY, LossMemory, Stages

SPEC = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))


def stages_of(steps, losses=None, has_target=True, **config):
    """The stage of every step, where the mean loss is seen after it."""
    stages = Stages(RankConfig(target_ratio=0.5, **config), has_target=has_target)
    seen = []
    for step in range(steps):
        seen.append(stages.stage)
        stages.count()
        if losses is not None:
            stages.watch(losses[step])
    return stages, seen


def lengths(seen):
    return tuple(seen.count(stage) for stage in ("warmup", "early", "late"))


# ---- ends of the early stage ----


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"early_steps": 10}, (0, 10, 30)),
        ({"early_steps": 0}, (0, 0, 40)),
        ({"early_steps": 10, "warmup_steps": 5}, (5, 10, 25)),
        ({"early_steps": 0, "warmup_steps": 5}, (5, 0, 35)),
        ({"early_epochs": 1.5, "steps_per_epoch": 8}, (0, 12, 28)),
        ({"early_epochs": 2, "steps_per_epoch": 7, "warmup_steps": 3}, (3, 14, 23)),
        ({"early_epochs": 0, "steps_per_epoch": 7}, (0, 0, 40)),
        ({"prune_every": 2, "method": "comera"}, (0, 20, 20)),
        ({"prune_every": 2, "method": "proximal"}, (0, 0, 40)),
        ({"prune_every": 2, "method": "rounding", "warmup_steps": 6}, (6, 0, 34)),
        ({"warmup_steps": 100, "early_steps": 1}, (40, 0, 0)),
    ],
    ids=str,
)
def test_the_early_stage_ends_after_its_length(config, expected):
    _, seen = stages_of(40, **config)
    assert lengths(seen) == expected
    assert seen == ["warmup"] * expected[0] + ["early"] * expected[1] + ["late"] * expected[2]


@pytest.mark.parametrize("method", ["comera", "proximal", "rounding"])
@pytest.mark.parametrize("end", [{"early_steps": 3}, {"plateau": 2}, {}])
def test_without_a_target_it_has_no_end(method, end):
    stages, seen = stages_of(
        300, [1.0] * 300, has_target=False, method=method, warmup_steps=4, prune_every=5, **end
    )
    assert lengths(seen) == (4, 296, 0)
    assert stages.late_progress == 0.0


@pytest.mark.parametrize("patience", [1, 3, 10])
@pytest.mark.parametrize("falls", [0, 5, 12])
def test_a_plateau_ends_it(patience, falls):
    losses = [0.9 ** min(step, falls) for step in range(40)]
    stages, seen = stages_of(40, losses, plateau=patience)
    # The loss of step ``falls`` (from 0) is the last that is new.
    assert lengths(seen) == (0, falls + 1 + patience, 39 - falls - patience)
    assert stages.late_since == falls + 1 + patience


@pytest.mark.parametrize(
    ("share", "is_plateau"), [(1 - 0.9 * IMPROVEMENT, True), (1 - 1.1 * IMPROVEMENT, False)]
)
def test_a_plateau_is_a_fall_of_less_than_a_hundredth(share, is_plateau):
    losses = [share**step if step < 2 else share for step in range(4)]
    stages, _ = stages_of(4, losses, plateau=3)
    assert (stages.late_since == 4) is is_plateau


def test_slow_falls_add_up():
    losses = [0.997**step for step in range(100)]
    assert stages_of(100, losses, plateau=5)[0].late_since is None
    assert stages_of(100, losses, plateau=2)[0].late_since == 3


def test_negative_losses_fall_too():
    falling = [-(1.1**step) for step in range(30)]
    assert stages_of(30, falling, plateau=3)[0].late_since is None
    assert stages_of(30, [-1.0] * 30, plateau=3)[0].late_since == 4


def test_a_plateau_in_the_warm_up_does_not_count():
    stages, seen = stages_of(30, [1.0] * 30, plateau=3, warmup_steps=10)
    # The step after the tenth is early; its mean is the first that is looked at.
    assert stages.late_since == 13
    assert lengths(seen) == (10, 3, 17)


def test_steps_whose_mean_is_not_known_are_no_plateau():
    stages, _ = stages_of(10, [None] * 10, plateau=2)
    assert stages.late_since is None
    stages, _ = stages_of(4, [1.0, None, None, 1.0], plateau=2)
    assert stages.late_since == 4


def test_the_early_stage_ends_once():
    stages, _ = stages_of(5, early_steps=3)
    assert stages.late_since == 3
    stages.end_early()
    assert stages.late_since == 3


@pytest.mark.parametrize("method", ["comera", "proximal", "rounding"])
def test_a_target_that_is_met_ends_it_early(method):
    torch.manual_seed(0)
    model = nn.Sequential(TTLinear(SPEC, 32, 32))
    with torch.no_grad():
        model[0].cores[1][..., 4:] = 0.0
    optimizer = torch.optim.SGD(param_groups(model, lr=1e-3), lr=1e-3)
    adapter = RankAdapter(
        model,
        optimizer,
        RankConfig(method=method, target_ratio=0.9, early_steps=1000, prune_every=5, patience=1),
    )
    if method == "comera":
        with torch.no_grad():
            model[0].rank_weights[1][4:] = 0.0
    for _ in range(5):
        assert adapter.stage == "early"
        adapter.loss(torch.tensor(1.0))
        adapter.step()
    assert adapter.size <= adapter.target_size
    assert adapter.stage == "late"
    assert [entry["stage"] for entry in adapter.history] == ["late"]


# ---- the way of the late stage ----


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"shrink_steps": 4}, [0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1]),
        ({"shrink_steps": 0}, [0, 0, 1, 1, 1, 1, 1, 1, 1]),
        ({"prune_every": 1}, [0, 0, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
    ids=str,
)
def test_the_way_begins_with_the_late_stage(config, expected):
    stages = Stages(RankConfig(target_ratio=0.5, early_steps=2, **config), has_target=True)
    seen = []
    for _ in expected:
        seen.append(stages.late_progress)
        stages.count()
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("stop", [3, 8, 14])
def test_stages_go_on_from_where_they_were(stop):
    losses = [0.9 ** min(step, 6) for step in range(30)]
    config = RankConfig(target_ratio=0.5, plateau=4, warmup_steps=2, shrink_steps=10)
    straight, resumed = (Stages(config, has_target=True) for _ in range(2))
    for step in range(stop):
        straight.count()
        straight.watch(losses[step])
    resumed.load_state_dict(straight.state_dict())
    for step in range(stop, 30):
        for each in (straight, resumed):
            each.count()
            each.watch(losses[step])
        assert resumed.stage == straight.stage
        assert resumed.late_progress == straight.late_progress
        assert resumed.state_dict() == straight.state_dict()
    assert straight.late_since is not None


# ---- the running mean ----


def noted(*losses):
    memory = LossMemory()
    for loss in losses:
        memory.note(torch.tensor(loss))
    return memory


def test_the_mean_begins_at_the_first_loss_and_forgets():
    assert LossMemory().value is None
    assert noted(3.0).value == 3.0
    mean = 3.0
    for loss in (1.0, -2.0, 5.0):
        mean = LOSS_MEMORY * mean + (1 - LOSS_MEMORY) * loss
    assert noted(3.0, 1.0, -2.0, 5.0).value == pytest.approx(mean, rel=1e-12)
    assert noted(*[7.0] * 500).value == pytest.approx(7.0, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite_are_left_out(bad):
    memory = noted(2.0, bad)
    assert memory.value == 2.0
    assert not memory.is_finite
    memory = noted(2.0, bad, 4.0)
    assert memory.is_finite
    assert memory.value == pytest.approx(noted(2.0, 4.0).value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_mean_begins_at_the_first_finite_loss(bad):
    assert noted(bad).value is None
    assert noted(bad, bad).value is None
    assert noted(bad, bad, 4.0).value == 4.0
    assert noted(bad, 4.0, 2.0).value == pytest.approx(noted(4.0, 2.0).value)


def test_the_mean_is_kept_in_float64_and_goes_on_from_a_number():
    memory = noted(1.0)
    assert memory.mean.dtype == torch.float64
    other = LossMemory()
    other.load(memory.value)
    for each in (memory, other):
        each.note(torch.tensor(0.1, dtype=torch.bfloat16))
    assert other.value == memory.value
    other.load(None)
    assert other.value is None
    assert other.mean is None
