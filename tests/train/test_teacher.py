"""Teacher and student: ranks that a layer does not need are found, and no others.

The teacher is a TT layer whose bonds are all 4, its outputs are noisy, and the student, of the
same modes, starts at rank 16.
"""

import math

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.methods.budget import rank_cost

MODES = [((16, 16), (16, 16)), ((4, 8, 8), (8, 8, 4))]
TEACHER_RANK, STUDENT_RANK, NOISE = 4, 16, 1e-3
STRENGTHS = {
    "comera": {"gamma": 0.03},
    "proximal": {"gamma": 0.01},
    "rounding": {"threshold": 0.05},
}
SCHEDULES = [
    {"warmup_steps": 30, "shrink_steps": 60, "prune_every": 5, "early_steps": 20},
    {"shrink_steps": 90, "prune_every": 20, "early_steps": 40},
    {"shrink_steps": 0, "prune_every": 7, "early_steps": 30},
]


def spec_of(modes, rank):
    in_modes, out_modes = modes
    num_bonds = len(in_modes) + len(out_modes) - 1
    return TTSpec("tt", in_modes, out_modes, (1, *[rank] * num_bonds, 1))


def layer_of(modes, rank):
    return TTLinear(spec_of(modes, rank), *map(math.prod, modes))


class Lesson:
    """A student, and the teacher it learns from.

    Args:
        modes: Of both.
        seed: Of weights, inputs and noise.
        rank_lr: Learning rate of rank weights; the cores' is 0.01.
        settings: Of ``RankConfig``.
    """

    def __init__(self, modes, seed=0, rank_lr=1e-2, **settings):
        torch.manual_seed(seed)
        self.teacher = layer_of(modes, TEACHER_RANK).requires_grad_(False)
        self.student = layer_of(modes, STUDENT_RANK)
        groups = param_groups(self.student, lr=1e-2, rank_lr=rank_lr)
        self.optimizer = torch.optim.AdamW(groups)
        self.adapter = RankAdapter(self.student, self.optimizer, RankConfig(**settings))
        self.draws = torch.Generator().manual_seed(seed)
        self.loss = math.inf

    def batch(self):
        x = torch.randn(128, self.teacher.in_features, generator=self.draws)
        y = self.teacher(x)
        return x, y + NOISE * torch.randn(y.shape, generator=self.draws)

    def learn(self, steps):
        for _ in range(steps):
            x, y = self.batch()
            task = nn.functional.mse_loss(self.student(x), y)
            self.optimizer.zero_grad()
            self.adapter.loss(task).backward()
            self.optimizer.step()
            self.adapter.step()
        self.loss = task.item()
        return self

    @property
    def ranks(self):
        return self.adapter.ranks[""]

    @property
    def error(self):
        """Relative error of the student's weight."""
        ours, theirs = self.student.dense_weight(), self.teacher.dense_weight()
        return ((ours - theirs).norm() / theirs.norm()).item()


def assert_found(lesson):
    assert all(abs(rank - TEACHER_RANK) <= 1 for rank in lesson.ranks), lesson.ranks
    assert lesson.error < 0.15  # "proximal" holds every singular value down a little


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("method", STRENGTHS)
def test_the_ranks_of_the_teacher_are_found_without_a_target(method, modes):
    lesson = Lesson(modes, method=method, **STRENGTHS[method])
    assert_found(lesson.learn(200))
    assert_found(lesson.learn(100))  # and kept
    sizes = [entry["size"] for entry in lesson.adapter.history]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("method", STRENGTHS)
def test_they_are_found_whatever_the_seed(method, modes, seed):
    lesson = Lesson(modes, seed, method=method, **STRENGTHS[method])
    assert_found(lesson.learn(600))


def test_without_a_change_of_basis_indices_do_not_tell_the_ranks():
    """What ``balance`` is for."""
    lesson = Lesson(MODES[0], method="comera", gamma=0.03, balance=False).learn(300)
    assert max(lesson.ranks) > TEACHER_RANK + 1


def assert_meets_target(lesson):
    """Within the target; and one rank more of any bond would not be, or hardly anything is left."""
    adapter, modes = lesson.adapter, lesson.student.spec.mode_sizes
    costs = [rank_cost(lesson.ranks, modes, bond) for bond in range(len(lesson.ranks))]
    left = adapter.target_size - adapter.size
    assert left >= 0
    assert left < min(costs) or left <= 0.02 * adapter.target_size
    assert adapter.size == sum(core.numel() for core in lesson.student.cores)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"early{s['early_steps']}")
@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("method", ["proximal", "rounding"])
def test_a_target_is_met_by_a_schedule_and_not_passed_by_a_rank(method, modes, schedule):
    target = spec_of(modes, TEACHER_RANK).num_params
    lesson = Lesson(modes, method=method, target_params=target, **schedule)
    every = lesson.adapter.config.prune_every
    length = schedule.get("warmup_steps", 0) + schedule["early_steps"] + schedule["shrink_steps"]
    lesson.learn(length + every)
    assert_meets_target(lesson)
    ranks = lesson.ranks
    lesson.learn(30)
    assert lesson.ranks == ranks


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"early{s['early_steps']}")
@pytest.mark.parametrize("modes", MODES, ids=str)
def test_rank_weights_come_down_to_a_target(modes, schedule):
    """To a third: with no schedule to go by, they may rest above the teacher's own size."""
    target = spec_of(modes, STUDENT_RANK).num_params // 3
    settings = {key: value for key, value in schedule.items() if key != "shrink_steps"}
    lesson = Lesson(modes, rank_lr=0.1, method="comera", rho=0.5, target_params=target, **settings)
    lesson.learn(150)
    assert_meets_target(lesson)
    ranks = lesson.ranks
    lesson.learn(30)
    assert lesson.ranks == ranks


@pytest.mark.parametrize("method", ["proximal", "rounding"])
def test_a_target_of_the_teachers_size_costs_nothing(method):
    lesson = Lesson(
        MODES[1],
        method=method,
        target_params=spec_of(MODES[1], TEACHER_RANK).num_params,
        shrink_steps=100,
    ).learn(200)
    assert lesson.ranks == [TEACHER_RANK] * 5
    assert lesson.loss < 2 * NOISE**2
    assert lesson.error < 2 * NOISE
