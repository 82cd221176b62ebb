"""Shapes of weights in tensor-train form: exact sizes, useful ranks, refusals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx.errors import SpecError
from comera_fx.spec import TTSpec, clip_ranks

PAPER = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))


@pytest.mark.parametrize(
    ("spec", "num_params", "core_shapes"),
    [
        (PAPER, 20448, ((1, 12, 12), (12, 8, 30), (30, 8, 30), (30, 8, 30), (30, 8, 12))),
        (
            TTSpec("tt", (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1)),
            28960,
            ((1, 12, 12), (12, 8, 30), (30, 8, 30), (30, 12, 30), (30, 16, 16)),
        ),
        (
            TTSpec("ttm", (16, 20, 10, 10), (4, 4, 8, 6), (1, 32, 32, 32, 1)),
            167808,
            ((1, 16, 4, 32), (32, 20, 4, 32), (32, 10, 8, 32), (32, 10, 6, 1)),
        ),
        (TTSpec("ttm", (5,), (7,), (1, 1)), 35, ((1, 5, 7, 1),)),
        (TTSpec("tt", (1,), (1,), (1, 1, 1)), 2, ((1, 1, 1), (1, 1, 1))),
        (TTSpec("tt", (4, 2), (3,), (1, 0, 0, 1)), 0, ((1, 4, 0), (0, 2, 0), (0, 3, 1))),
    ],
)
def test_exact_sizes(spec, num_params, core_shapes):
    assert spec.num_params == num_params
    assert spec.core_shapes[: len(core_shapes)] == core_shapes
    assert len(spec.core_shapes) == spec.num_cores == len(spec.ranks) - 1


@pytest.mark.parametrize(
    ("asked", "sizes", "useful"),
    [
        ((1, 30, 30, 30, 30, 30, 1), (12, 8, 8, 8, 8, 12), (1, 12, 30, 30, 30, 12, 1)),
        ((1, 100, 2, 100, 1), (4, 4, 4, 4), (1, 4, 2, 4, 1)),
        ((1, 2, 100, 100, 1), (4, 4, 4, 4), (1, 2, 8, 4, 1)),
        ((1, 9, 9, 1), (1, 1, 5), (1, 1, 1, 1)),
        ((1, 0, 0, 1), (3, 4, 5), (1, 0, 0, 1)),
        ((1, 1), (7,), (1, 1)),
    ],
)
def test_ranks_are_cut_to_the_largest_useful(asked, sizes, useful):
    assert clip_ranks(asked, sizes) == useful


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=2, max_size=7))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_cut_ranks_satisfy_every_bound_and_are_not_cut_twice(entries):
    sizes = [size for size, _ in entries]
    asked = (1, *(rank for _, rank in entries[1:]), 1)
    cut = clip_ranks(asked, sizes)
    assert clip_ranks(cut, sizes) == cut
    for k in range(1, len(sizes)):
        assert 1 <= cut[k] <= min(asked[k], cut[k - 1] * sizes[k - 1], cut[k + 1] * sizes[k])


@pytest.mark.parametrize(
    ("fields", "problem", "mend"),
    [
        ({"layout": "cp"}, "TTSpec.layout", "use 'tt'"),
        ({"in_modes": ()}, "TTSpec.in_modes", "write (12, 8, 8)"),
        ({"in_modes": [4, 2]}, "TTSpec.in_modes", "write (12, 8, 8)"),
        ({"out_modes": (3, 0)}, "TTSpec.out_modes", "write (12, 8, 8)"),
        ({"out_modes": (3, 2.0)}, "TTSpec.out_modes", "write (12, 8, 8)"),
        ({"out_modes": (3, True)}, "TTSpec.out_modes", "write (12, 8, 8)"),
        ({"layout": "ttm"}, "TTSpec.out_modes", "modes of 1"),
        ({"ranks": (1, -1, 2, 1)}, "TTSpec.ranks", "write (1, 30, 30, 1)"),
        ({"ranks": 3}, "TTSpec.ranks", "write (1, 30, 30, 1)"),
        ({"ranks": (1, 2, 1)}, "TTSpec.ranks", "give 4 ranks"),
        ({"ranks": (2, 2, 2, 1)}, "TTSpec.ranks", "use (1, 2, 2, 1)"),
        ({"ranks": (1, 2, 2, 0)}, "TTSpec.ranks", "use (1, 2, 2, 1)"),
        ({"ranks": (1, 0, 2, 1)}, "TTSpec.ranks", "set the other inner ranks to 0"),
    ],
)
def test_each_wrong_field_is_refused(fields, problem, mend):
    good = {"layout": "tt", "in_modes": (4, 2), "out_modes": (3,), "ranks": (1, 2, 2, 1)}
    TTSpec(**good)
    with pytest.raises(SpecError) as caught:
        TTSpec(**{**good, **fields})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["got", "expected", "mend"]
    assert lines[0].startswith(problem)
    assert mend in lines[3]


def test_transposed_cores_have_the_output_modes_first():
    spec = TTSpec("tt", (2, 3), (5,), (1, 2, 4, 1))
    turned = spec.turned()
    assert turned == TTSpec("tt", (5,), (2, 3), (1, 2, 4, 1), transposed=True)
    assert turned.core_shapes == spec.core_shapes
    assert (turned.in_size, turned.out_size) == (spec.out_size, spec.in_size)
    assert turned.sides == spec.sides == ((2, 3), (5,))
    assert turned.middle_rank == spec.middle_rank == 4
    assert turned.turned() == spec
    assert turned.modes_of(range(1, 3)) == spec.modes_of(range(1, 3))[::-1]


def test_pairs_of_modes_change_places():
    spec = TTSpec("ttm", (2, 3), (5, 4), (1, 6, 1))
    assert spec.turned() == TTSpec("ttm", (5, 4), (2, 3), (1, 6, 1))
    with pytest.raises(SpecError, match="change the places"):
        TTSpec("ttm", (2, 3), (5, 4), (1, 6, 1), transposed=True)
