"""How many directions bonds keep within a budget: never more than it, never fewer than fit."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx.spec import TTSpec
from comera_fx.train.methods.budget import counts_within, filled, params_of, rank_cost

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)


@st.composite
def layers(draw):
    """Shares, modes and floors of one to three layers; one of them may hold nothing."""
    shares, modes, floors = {}, {}, {}
    for number in range(draw(st.integers(1, 3))):
        name = f"layer{number}"
        num_bonds = draw(st.integers(1, 4))
        modes[name] = draw(st.lists(st.integers(1, 6), min_size=num_bonds + 1))[: num_bonds + 1]
        modes[name] = tuple(modes[name])
        is_dead = draw(st.booleans()) and draw(st.booleans())
        sizes = st.integers(0, 0) if is_dead else st.integers(1, 8)
        shares[name] = [
            sorted((draw(st.integers(0, 9)) / 10 for _ in range(draw(sizes))), reverse=True)
            for _ in range(num_bonds)
        ]
        floors[name] = draw(st.integers(0, 4))
    return shares, modes, floors


def places(counts):
    return [(name, bond) for name, inner in counts.items() for bond in range(len(inner))]


def one_more(counts, name, bond):
    more = copy.deepcopy(counts)
    more[name][bond] += 1
    return more


def least(shares, floors):
    """The fewest that may stay: the floors, and one of a bond that holds anything."""
    return {
        name: [min(len(bond), max(floors[name], 1)) for bond in bonds]
        for name, bonds in shares.items()
    }


def all_of(shares):
    return {name: [len(bond) for bond in bonds] for name, bonds in shares.items()}


@PROPERTY
@given(layers(), st.floats(0, 1.2))
def test_the_size_is_within_the_target_or_at_the_floors(given_layers, share):
    shares, modes, floors = given_layers
    target = int(share * params_of(all_of(shares), modes))
    counts = counts_within(shares, modes, target, floors)
    lowest = least(shares, floors)
    assert params_of(counts, modes) <= target or counts == lowest
    for name, bond in places(counts):
        assert lowest[name][bond] <= counts[name][bond] <= len(shares[name][bond])


@PROPERTY
@given(layers(), st.floats(0, 1.2))
def test_no_direction_more_would_fit(given_layers, share):
    shares, modes, floors = given_layers
    target = int(share * params_of(all_of(shares), modes))
    counts = counts_within(shares, modes, target, floors)
    for name, bond in places(counts):
        if counts[name][bond] < len(shares[name][bond]):
            assert params_of(one_more(counts, name, bond), modes) > target


@PROPERTY
@given(layers(), st.floats(0, 1.2))
def test_neither_repetition_nor_the_order_of_layers_matters(given_layers, share):
    shares, modes, floors = given_layers
    before = copy.deepcopy((shares, modes, floors))
    target = int(share * params_of(all_of(shares), modes))
    counts = counts_within(shares, modes, target, floors)
    assert counts_within(shares, modes, target, floors) == counts
    other = dict(reversed(shares.items()))
    assert counts_within(other, modes, target, floors) == counts
    assert (shares, modes, floors) == before


@PROPERTY
@given(
    st.sampled_from(["tt", "ttm"]),
    st.lists(st.integers(1, 6), min_size=4, max_size=4),
    st.lists(st.integers(1, 7), min_size=3, max_size=3),
    st.booleans(),
)
def test_parameters_are_those_of_the_specs(layout, modes, inner, is_dead):
    half = tuple(modes[:2]), tuple(modes[2:])
    bonds = [0] * 3 if is_dead else inner
    bonds = bonds if layout == "tt" else bonds[:1]
    spec = TTSpec(layout, *half, (1, *bonds, 1))
    named = {"a": spec.mode_sizes, "b": (2, 3)}
    assert params_of({"a": list(bonds), "b": [4]}, named) == spec.num_params + 4 * (2 + 3)


@PROPERTY
@given(
    st.lists(st.integers(1, 6), min_size=4, max_size=4),
    st.lists(st.integers(1, 7), min_size=3, max_size=3),
    st.integers(0, 2),
)
def test_what_a_rank_costs_is_what_the_layer_grows_by(modes, inner, bond):
    more = one_more({"fc": inner}, "fc", bond)
    grown = params_of(more, {"fc": modes}) - params_of({"fc": inner}, {"fc": modes})
    assert rank_cost(inner, modes, bond) == grown


@PROPERTY
@given(layers(), st.floats(0, 1.2), st.randoms(use_true_random=False))
def test_filling_up_takes_nothing_away_and_stays_within(given_layers, share, random):
    shares, modes, _ = given_layers
    target = int(share * params_of(all_of(shares), modes))
    few = {k: [random.randint(0, len(bond)) for bond in own] for k, own in shares.items()}
    before = copy.deepcopy(few)
    counts = filled(shares, modes, target, few)
    assert few == before
    assert params_of(counts, modes) <= max(target, params_of(few, modes))
    for name, bond in places(counts):
        assert few[name][bond] <= counts[name][bond] <= len(shares[name][bond])
        if all(counts[name]) and counts[name][bond] < len(shares[name][bond]):
            assert params_of(one_more(counts, name, bond), modes) > target


@PROPERTY
@given(layers(), st.floats(0, 1.2))
def test_layers_come_back_from_nothing_where_they_fit(given_layers, share):
    shares, modes, _ = given_layers
    whole = params_of(all_of(shares), modes)
    counts = filled(shares, modes, int(share * whole), {k: [0] * len(v) for k, v in shares.items()})
    size = params_of(counts, modes)
    assert size <= share * whole
    for name, bonds in shares.items():
        least_of_it = params_of({name: [min(len(bond), 1) for bond in bonds]}, modes)
        assert all(counts[name]) or not least_of_it or size + least_of_it > int(share * whole)


def test_the_direction_that_carries_least_goes_first():
    shares = {"strong": [[0.7, 0.3]], "weak": [[0.8, 0.2]]}
    modes = {"strong": (4, 4), "weak": (4, 4)}
    floors = {"strong": 0, "weak": 0}
    assert counts_within(shares, modes, 24, floors) == {"strong": [2], "weak": [1]}


def test_of_two_that_carry_alike_the_one_of_more_parameters_goes_first():
    shares = {"large": [[0.8, 0.2]], "small": [[0.8, 0.2]]}
    modes = {"large": (9, 9), "small": (4, 4)}
    floors = {"large": 0, "small": 0}
    assert counts_within(shares, modes, 36, floors) == {"large": [1], "small": [2]}


def test_what_a_rank_is_worth_is_asked_anew_as_its_neighbours_go():
    # At the start a rank of the left bond holds 2 + 2 * 4 = 10 numbers and one of the right 16.
    # The right bond's three weakest go: then one of the left holds 4, and is worth its 0.03.
    shares = {"fc": [[0.97, 0.03], [0.97, 0.01, 0.01, 0.01]]}
    modes = {"fc": (2, 2, 6)}
    assert counts_within(shares, modes, 18, {"fc": 0}) == {"fc": [2, 1]}


@pytest.mark.parametrize("floor", [0, 1, 2, 3])
def test_a_target_of_nothing_leaves_the_floors(floor):
    shares = {"fc": [[0.5, 0.3, 0.2], [0.9, 0.1]]}
    counts = counts_within(shares, {"fc": (3, 4, 5)}, 0, {"fc": floor})
    assert counts == {"fc": [max(floor, 1), min(max(floor, 1), 2)]}


def test_what_fits_comes_back_the_worthiest_first():
    shares = {"a": [[0.5, 0.3, 0.2]], "b": [[0.6, 0.4]]}
    modes = {"a": (3, 3), "b": (3, 3)}
    for target, expected in [(17, [1, 1]), (18, [1, 2]), (24, [2, 2]), (30, [3, 2])]:
        assert filled(shares, modes, target, {"a": [1], "b": [1]}) == {
            "a": expected[:1],
            "b": expected[1:],
        }


@pytest.mark.parametrize(
    ("target", "expected"), [(47, [0, 5, 0]), (48, [1, 5, 1]), (71, [1, 5, 1]), (72, [1, 5, 2])]
)
def test_a_layer_that_has_died_comes_back_whole_or_not_at_all(target, expected):
    shares = {"fc": [[0.8, 0.2], [0.5, 0.2, 0.1, 0.1, 0.1], [0.6, 0.4]]}
    modes = {"fc": (4, 4, 4, 4)}
    assert filled(shares, modes, target, {"fc": [0, 5, 0]}) == {"fc": expected}


def test_larger_targets_keep_more_of_what_layers_carry():
    shares = {"a": [[0.5, 0.2, 0.2, 0.1], [0.6, 0.4]], "b": [[0.9, 0.05, 0.05]]}
    modes = {"a": (3, 2, 4), "b": (5, 5)}
    kept = []
    for target in (0, 15, 30, 45, 60, 75):
        counts = counts_within(shares, modes, target, {"a": 0, "b": 0})
        kept.append(sum(sum(shares[n][k][: counts[n][k]]) for n, k in places(counts)))
    assert kept == sorted(kept)
    assert kept[0] == pytest.approx(0.5 + 0.6 + 0.9)
    assert kept[-1] == pytest.approx(3.0)
