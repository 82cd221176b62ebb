"""Storage orders: as fast as the best of all, and read without copies where that can be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx.plan.cost import shipped_model
from comera_fx.plan.layout import _Search, best_layout, is_matrix
from comera_fx.plan.networks import TOKENS, linear_network
from comera_fx.plan.search import find_path, two_sided_path
from comera_fx.plan.steps import make_steps
from comera_fx.spec import TTSpec

COSTS = shipped_model("cpu")


def fastest_of_all(search: _Search) -> float:
    """The least time over every arrangement of every step."""

    def after(k: int, orders: dict[str, str]) -> float:
        if k == len(search.steps):
            return sum(
                COSTS.copy_seconds(4 * search._size(order))
                for message, order in search.results
                if orders[message.name] != order
            )
        name = search.steps[k].out.name
        return min(
            option.seconds + after(k + 1, {**orders, name: option.out})
            for option in search._options(k, orders)
        )

    return after(0, dict(search.given))


small_specs = st.builds(
    lambda ins, outs, rank: TTSpec("tt", ins, outs, (1, *(rank,) * len(ins + outs[1:]), 1)),
    st.lists(st.integers(2, 9), min_size=1, max_size=2).map(tuple),
    st.lists(st.integers(2, 9), min_size=1, max_size=1).map(tuple),
    st.integers(1, 20),
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(small_specs, st.sampled_from([1, 8, 64, 1024]))
def test_close_to_the_fastest_of_all_arrangements(spec, num_tokens):
    network = linear_network(spec, num_tokens)
    steps = make_steps(network, find_path(network), (True,) * (1 + spec.num_cores))
    found = best_layout(network, steps, 4, COSTS).seconds
    assert found <= 1.03 * fastest_of_all(_Search(network, steps, 4, COSTS)) + 1e-12


def test_the_two_sided_tree_needs_no_copy_of_what_holds_tokens():
    spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 32, 32, 32, 12, 1))
    network = linear_network(spec, 2048)
    steps = make_steps(network, two_sided_path(3, 3), (True,) * 7)
    layout = best_layout(network, steps, 4, COSTS)
    for step, arrangement in zip(
        (*steps.forward, *steps.backward), layout.arrangements, strict=True
    ):
        holds_tokens = TOKENS in step.left.indices | step.right.indices
        assert not (holds_tokens and arrangement.copied), step
    assert layout.orders["y"] == network.target_indices
    assert layout.orders["dx"] == network.indices[0]


def test_a_middle_mode_is_contracted_by_a_batched_product():
    spec = TTSpec("tt", (16, 16), (16,), (1, 4, 8, 1))
    network = linear_network(spec, 64)
    steps = make_steps(network, ((0, 1), (4, 2), (5, 3)), (False,) * 4)
    layout = best_layout(network, steps, 4, COSTS)
    assert [a.kind for a in layout.arrangements] == ["bmm", "mm", "mm"]
    assert layout.copied == 0


@pytest.mark.parametrize(
    ("stored", "rows", "columns", "view"),
    [
        ("abc", "a", "bc", True),
        ("abc", "bc", "a", True),
        ("abc", "ac", "b", False),
        ("abc", "", "abc", True),
        ("abc", "c", "ab", True),
        ("abc", "b", "ac", False),
    ],
)
def test_a_matrix_is_a_view_of_two_neighbouring_groups(stored, rows, columns, view):
    assert is_matrix(stored, rows, columns) is view
