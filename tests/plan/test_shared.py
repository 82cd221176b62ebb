"""Predictions of what layers cost through shared factors."""

from dataclasses import replace

import pytest

from comera_fx import TTSpec
from comera_fx.plan.shared import Shared, Sizes, check_seconds, joint_saving, plan_shared

SQUARE = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
ONE_EACH = TTSpec("tt", (64,), (64,), (1, 16, 1))


def test_many_layers_share_the_cost_of_their_chains():
    sizes = Sizes(SQUARE, 128)
    costs = [plan_shared(sizes, count).chains_seconds / count for count in (1, 3, 24)]
    assert costs == sorted(costs, reverse=True)
    assert plan_shared(sizes, 24).wins(24)
    assert not plan_shared(sizes, 1).wins(1)


def test_what_is_saved_jointly_counts():
    shared = Shared(32, False, 10.0, apply_seconds=4.0, joint_seconds=0.0, own_seconds=5.0)
    assert not shared.wins(10)
    assert shared.wins(20)
    assert replace(shared, joint_seconds=2.0).wins(10)


@pytest.mark.parametrize(("num_tokens", "is_split"), [(8, True), (16, True), (4096, False)])
def test_with_few_tokens_the_first_output_core_is_applied_by_itself(num_tokens, is_split):
    assert plan_shared(Sizes(SQUARE, num_tokens), 24).without_head == is_split
    assert not plan_shared(Sizes(SQUARE, num_tokens), 24, can_split=False).without_head


def test_a_weight_with_one_output_core_is_never_split():
    assert not plan_shared(Sizes(ONE_EACH, 1), 24).without_head


def test_ragged_ranks_are_filled_up_where_that_is_faster():
    assert plan_shared(Sizes(SQUARE, 1024), 24).width == 32
    assert plan_shared(Sizes(ONE_EACH, 1024), 24).width == 16


def test_inference_costs_less_than_training():
    trains = plan_shared(Sizes(SQUARE, 128), 24)
    frozen = plan_shared(Sizes(SQUARE, 128, needs_core_grad=False), 24)
    infers = plan_shared(Sizes(SQUARE, 128, needs_input_grad=False, needs_core_grad=False), 24)
    assert infers.apply_seconds < frozen.apply_seconds < trains.apply_seconds
    assert infers.chains_seconds < trains.chains_seconds


def test_one_product_with_an_input_saves_most_where_tokens_are_many():
    savings = [joint_saving((Sizes(SQUARE, n),) * 3, (32,) * 3) for n in (64, 512, 4096)]
    assert savings == sorted(savings)
    assert savings[-1] > 0
    without = Sizes(SQUARE, 4096, needs_input_grad=False)
    assert joint_saving((without,) * 3, (32,) * 3) < savings[-1]


def test_comparing_cores_takes_longer_the_larger_they_are():
    larger = replace(SQUARE, ranks=(1, 12, 64, 64, 64, 12, 1))
    assert check_seconds(Sizes(SQUARE, 1)) < check_seconds(Sizes(larger, 1))
