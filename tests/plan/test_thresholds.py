"""Ranges of tokens: without gaps, as few as asked, and no other joining loses less."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx.plan import thresholds
from comera_fx.plan.linear import plan_linear
from comera_fx.plan.thresholds import (
    BUCKETS,
    MOST_KINDS,
    WORTH_A_RANGE,
    _best_cuts,
    _losses,
    _planned,
    _seconds,
    token_intervals,
)
from comera_fx.spec import TTSpec

ATTENTION = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
UP = TTSpec("tt", (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
DOWN = TTSpec("tt", (16, 16, 12), (8, 8, 12), (1, 16, 30, 30, 30, 12, 1))
SMALL = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))

small_specs = st.builds(
    lambda ins, outs, rank: TTSpec(
        "tt", tuple(ins), tuple(outs), (1, *(rank,) * (len(ins) + len(outs) - 1), 1)
    ).clipped(),
    st.lists(st.integers(2, 12), min_size=1, max_size=2),
    st.lists(st.integers(2, 12), min_size=1, max_size=2),
    st.integers(1, 16),
)
losses = st.lists(
    st.lists(st.floats(0, 3), min_size=len(BUCKETS), max_size=len(BUCKETS)),
    min_size=len(BUCKETS),
    max_size=len(BUCKETS),
)


def all_cuts(most):
    for num_ranges in range(1, most + 1):
        for inner in combinations(range(1, len(BUCKETS)), num_ranges - 1):
            yield (0, *inner, len(BUCKETS))


def loss_of(lost, cuts):
    return sum(_planned(lost, first, end)[0] for first, end in pairwise(cuts))


@given(st.lists(small_specs, min_size=1, max_size=3), st.integers(1, 4))
@settings(deadline=None, derandomize=True, max_examples=10)
def test_ranges_cover_every_number_of_tokens_once(specs, most):
    intervals = token_intervals(tuple(specs), most)
    assert 1 <= len(intervals) <= most
    assert intervals[0].first == 2
    assert intervals[-1].last is None
    for before, after in pairwise(intervals):
        assert before.last is not None
        assert after.first == before.last + 1
    for each in intervals:
        assert each.planned in each
        assert each.planned in BUCKETS
    for tokens in (*range(2, 4100), 10**9):
        assert sum(tokens in each for each in intervals) == 1
    assert not any(1 in each for each in intervals)


@given(losses, st.integers(1, 4))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_no_other_joining_loses_less_than_a_range_is_worth(lost, most):
    cuts = _best_cuts(lost, most)
    least = min(loss_of(lost, other) for other in all_cuts(most))
    assert loss_of(lost, cuts) <= least + WORTH_A_RANGE + 1e-9


@pytest.mark.parametrize("specs", [(SMALL,), (ATTENTION, UP)])
def test_the_ranges_of_real_layers_lose_as_little_as_any(specs):
    lost = _losses(_seconds(tuple((spec, 1) for spec in specs), 4, "cpu"))
    assert min(min(row) for row in lost) == 0
    least = min(loss_of(lost, other) for other in all_cuts(3))
    intervals = token_intervals(specs, 3)
    total = sum(
        lost[BUCKETS.index(each.planned)][column]
        for column, bucket in enumerate(BUCKETS)
        for each in intervals
        if bucket in each
    )
    assert total <= least + WORTH_A_RANGE + 1e-9
    # One plan for all numbers of tokens is much worse than the three.
    assert total < loss_of(lost, (0, len(BUCKETS)))


def test_losses_are_against_the_best_plan_known():
    flat = [[float(column + 1) for column in range(len(BUCKETS))] for _ in BUCKETS]
    assert all(value == 0 for row in _losses(flat) for value in row)
    flat[3] = [2 * value for value in flat[3]]
    assert _losses(flat)[3] == [1.0] * len(BUCKETS)


def test_where_one_plan_serves_all_there_is_one_range():
    cuts = _best_cuts([[0.0] * len(BUCKETS) for _ in BUCKETS], 3)
    assert cuts == (0, len(BUCKETS))


def test_more_ranges_than_buckets_are_no_error():
    steep = [
        [float(row != column) for column in range(len(BUCKETS))] for row in range(len(BUCKETS))
    ]
    assert _best_cuts(steep, 100) == tuple(range(len(BUCKETS) + 1))


def test_neither_order_nor_slightly_smaller_ranks_matter():
    ranks = [(1, 12, rank, 30, rank - 1, 12, 1) for rank in (27, 25, 29)]
    cut = [TTSpec("tt", ATTENTION.in_modes, ATTENTION.out_modes, each) for each in ranks]
    layers = [ATTENTION, UP, DOWN, *cut]
    expected = token_intervals(tuple(layers), 3)
    assert token_intervals(tuple(reversed(layers)), 3) == expected
    assert token_intervals((ATTENTION,) * 4 + (UP, DOWN), 3) == expected


def test_a_model_of_many_kinds_plans_only_those_that_weigh_most(monkeypatch):
    planned = []

    def counting(spec, num_tokens, **settings):
        planned.append((spec, num_tokens))
        return plan_linear(spec, num_tokens, **settings)

    monkeypatch.setattr(thresholds, "plan_linear", counting)
    specs = tuple(
        TTSpec("tt", (4, size), (size, 4), (1, 4, 8, 4, 1))
        for size in range(41, 41 + 2 * MOST_KINDS)
    )
    first = token_intervals(specs, 3)
    assert len(planned) == MOST_KINDS * len(BUCKETS)
    assert {spec for spec, _ in planned} == set(specs[-MOST_KINDS:])
    planned.clear()
    assert token_intervals(specs, 3) is first
    assert not planned
