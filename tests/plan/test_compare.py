"""The ways to run a layer: costs equal to hand counts, in the order that theory gives."""

from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from comera_fx.errors import PlanError
from comera_fx.plan import plan_linear
from comera_fx.plan.compare import compare_plans, comparison_table
from comera_fx.spec import TTSpec

SMALL = TTSpec("tt", (4, 3), (5, 2), (1, 4, 3, 2, 1))
TTM = TTSpec("ttm", (4, 3), (5, 2), (1, 6, 1))


def named(spec, num_tokens, **options):
    return {
        way.name.rstrip(" 0123456789"): way for way in compare_plans(spec, num_tokens, **options)
    }


def test_the_ways_and_their_order():
    names = [way.name for way in compare_plans(SMALL, 100)]
    assert names == [
        "best plan",
        "fewest FLOPs",
        "fixed path",
        "VJP per core",
        "low rank 3",
        "dense",
    ]


def test_flops_equal_a_hand_count_of_a_tt_layer():
    ways = named(SMALL, 100)
    left, right = 4 * 4 * 3 * 3, 3 * 5 * 2 * 2  # G1 G2: 4 x 3 x 3; G3 G4: 3 x 5 x 2
    apply = 100 * 12 * 3 + 100 * 3 * 10
    forward = 2 * (left + right + apply)
    for name in ("fewest FLOPs", "fixed path"):
        assert (ways[name].flops_forward, ways[name].flops_backward) == (forward, 2 * forward)
    # Taking out any of the five other tensors leaves a network of the same cost.
    assert ways["VJP per core"].flops_forward == forward
    assert ways["VJP per core"].flops_backward == 5 * forward
    low = 2 * 100 * 3 * (12 + 10)
    assert (ways["low rank"].flops_forward, ways["low rank"].flops_backward) == (low, 2 * low)
    dense = 2 * 100 * 12 * 10
    assert (ways["dense"].flops_forward, ways["dense"].flops_backward) == (dense, 2 * dense)


def test_flops_equal_a_hand_count_of_a_ttm_layer():
    ways = named(TTM, 100)
    # The fixed path: x G1 (contracts 4, makes 5 and the rank), then G2.
    fixed = 2 * 100 * (3 * 4 * 5 * 6 + 5 * 3 * 6 * 2)
    assert (ways["fixed path"].flops_forward, ways["fixed path"].flops_backward) == (
        fixed,
        2 * fixed,
    )
    # The cheapest: the dense matrix first, (4 x 5) x (3 x 2) over the rank.
    fewest = 2 * (20 * 6 * 6 + 100 * 12 * 10)
    assert ways["fewest FLOPs"].flops_forward == fewest
    assert ways["VJP per core"].flops_backward == 3 * fewest
    low = 2 * 100 * 6 * (12 + 10)
    assert (ways["low rank"].flops_forward, ways["low rank"].flops_backward) == (low, 2 * low)


@pytest.mark.parametrize("itemsize", [4, 8])
def test_saved_bytes_equal_a_hand_count(itemsize):
    ways = named(SMALL, 100, itemsize=itemsize)
    x = 100 * 12 * itemsize
    middle, left, right = 100 * 3 * itemsize, 12 * 3 * itemsize, 3 * 10 * itemsize
    assert ways["dense"].saved_bytes == x
    assert ways["VJP per core"].saved_bytes == x
    assert ways["low rank"].saved_bytes == x + middle
    assert ways["fixed path"].saved_bytes == x + middle + left + right


def test_peak_bytes_equal_a_hand_count():
    ways = named(SMALL, 100)
    x, y, weight = 4 * 100 * 12, 4 * 100 * 10, 4 * 120
    assert ways["dense"].peak_bytes == 2 * x + y + weight  # x, dx, dy, dW
    assert ways["VJP per core"].peak_bytes is None


def test_plans_are_those_of_plan_linear():
    ways = named(SMALL, 512, itemsize=8)
    for name, objective in (("best plan", "time"), ("fewest FLOPs", "flops")):
        plan = plan_linear(SMALL, 512, objective, itemsize=8)
        way = ways[name]
        assert (way.flops_forward, way.flops_backward) == (plan.flops_forward, plan.flops_backward)
        assert (way.saved_bytes, way.peak_bytes) == (plan.saved_bytes, plan.peak_bytes)
        assert way.seconds == plan.seconds
    assert ways["dense"].seconds == plan.dense_seconds


def test_padding_and_recomputation_of_the_best_plan_are_told():
    spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
    plan = plan_linear(spec, 4096, "time")
    assert plan.pads
    detail = named(spec, 4096)["best plan"].detail
    assert f"of least predicted time, {plan.flops_padding:,} FLOPs more for padding" in detail


def modes(least: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, 12), min_size=1, max_size=3)


def tt_spec(ins: list[int], outs: list[int], rank: int) -> TTSpec:
    ranks = (1, *(rank,) * (len(ins) + len(outs) - 1), 1)
    return TTSpec("tt", tuple(ins), tuple(outs), ranks).clipped()


def ttm_spec(pairs: list[tuple[int, int]], rank: int) -> TTSpec:
    ins, outs = zip(*pairs, strict=True)
    return TTSpec("ttm", ins, outs, (1, *(rank,) * (len(pairs) - 1), 1)).clipped()


tt_specs = st.builds(tt_spec, modes(1), modes(1), st.integers(1, 30))
connected_specs = st.builds(tt_spec, modes(2), modes(2), st.integers(2, 30))
mode_pairs = st.tuples(st.integers(1, 8), st.integers(1, 8))
ttm_specs = st.builds(ttm_spec, st.lists(mode_pairs, min_size=1, max_size=4), st.integers(1, 16))
tokens = st.sampled_from([1, 7, 512])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.one_of(tt_specs, ttm_specs), tokens)
def test_no_way_on_the_same_cores_has_fewer_flops_than_the_best_tree(spec, num_tokens):
    ways = named(spec, num_tokens)
    total = {name: way.flops_forward + way.flops_backward for name, way in ways.items()}
    assert total["fewest FLOPs"] == 3 * ways["fewest FLOPs"].flops_forward
    for name in ("best plan", "fixed path", "VJP per core"):
        assert total["fewest FLOPs"] <= total[name]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(tt_specs, tokens)
def test_no_tree_is_predicted_to_be_faster_than_the_best_plan(spec, num_tokens):
    ways = named(spec, num_tokens)
    fastest = min(ways[name].seconds for name in ("fewest FLOPs", "fixed path"))
    # The best plan gives up to a hundredth of its time to save less.
    assert ways["best plan"].seconds <= 1.01 * fastest


@settings(deadline=None, derandomize=True, max_examples=40)
@given(connected_specs, tokens)
def test_without_sharing_every_gradient_costs_as_much_as_the_output(spec, num_tokens):
    ways = named(spec, num_tokens)
    forward = ways["fewest FLOPs"].flops_forward
    assert ways["VJP per core"].flops_forward == forward
    assert ways["VJP per core"].flops_backward == (spec.num_cores + 1) * forward


def test_the_table_names_every_way_and_explains_it():
    out = StringIO()
    ways = compare_plans(TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1)), 4096)
    Console(file=out, width=80).print(comparison_table(ways), highlight=False)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "forward backward of dense saved peak predicted" in lines
    assert any(line.startswith("fewest FLOPs 380M 761M 7.9%") for line in lines)
    assert any(line.startswith("low rank 30 377M 755M 7.8%") for line in lines)
    assert any(line.startswith("dense 4.83G 9.66G 100.0% 12.6MB") for line in lines)
    assert "VJP per core y and each gradient by its own best contraction, nothing shared" in lines
    assert "dense x with the whole matrix" in lines


def test_no_tokens_is_an_error():
    with pytest.raises(PlanError, match="at least one token"):
        compare_plans(SMALL, 0)
