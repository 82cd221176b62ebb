"""Choice of modes: known best ones, order, padding, balance, small sizes."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx.errors import SpecError
from comera_fx.shapes import MAX_PADDING, ModeChoice, choose_modes, choose_wide
from comera_fx.spec import TTSpec

LIMIT = settings(deadline=None, derandomize=True, max_examples=40)
layouts = pytest.mark.parametrize("layout", ["tt", "ttm"])


def num_params(choice, layout, rank):
    num_sizes = len(choice.in_modes) + (len(choice.out_modes) if layout == "tt" else 0)
    ranks = (1, *[rank] * (num_sizes - 1), 1)
    return TTSpec(layout, choice.in_modes, choice.out_modes, ranks).clipped().num_params


@pytest.mark.parametrize(
    ("sizes", "rank", "most"),
    [
        ((256, 256), 32, 12_416),
        ((768, 768), 30, 20_448),
        ((768, 3072), 30, 28_960),
        ((3072, 768), 30, 28_960),
        ((1024, 1024), 16, 8_192),
    ],
)
def test_as_few_parameters_as_the_best_known_modes(sizes, rank, most):
    choice = choose_modes(*sizes, layout="tt", max_rank=rank)
    assert num_params(choice, "tt", rank) <= most
    assert (prod(choice.in_modes), prod(choice.out_modes)) == sizes


def test_the_order_of_the_modes_is_searched():
    choice = choose_modes(256, 256, layout="tt", max_rank=32)
    assert choice == ModeChoice((8, 8, 4), (4, 8, 8))
    assert num_params(choice, "tt", 32) == 12_416
    assert num_params(ModeChoice((4, 8, 8), (8, 8, 4)), "tt", 32) == 18_464


def test_an_embedding_takes_fewer_parameters_than_the_modes_of_the_paper():
    choice = choose_modes(30522, 768, layout="ttm", max_rank=32)
    paper = ModeChoice((16, 20, 10, 10), (4, 4, 8, 6))
    assert num_params(choice, "ttm", 32) < num_params(paper, "ttm", 32) == 167_808
    assert prod(choice.in_modes) < 32_000


@pytest.mark.parametrize("layout", ["tt", "ttm"])
@pytest.mark.parametrize("most", [2, 3, 4])
def test_a_side_has_at_most_the_modes_asked_for(layout, most):
    for sizes in ((4096, 256), (768, 3072), (30522, 768)):
        choice = choose_modes(*sizes, layout=layout, max_rank=16, most=most)
        assert max(len(choice.in_modes), len(choice.out_modes)) <= most


@pytest.mark.parametrize(("rows", "width"), [(4096, 256), (30522, 768), (97, 10), (3, 2), (1, 1)])
@pytest.mark.parametrize("rank", [1, 8, 64])
def test_wide_tables_hold_their_rows_in_ranks_that_every_bond_can_use(rows, width, rank):
    spec = choose_wide(rows, width, max_rank=rank)
    assert spec.in_size >= rows
    assert spec.out_size >= width
    assert spec == spec.clipped()
    assert max(spec.ranks[len(spec.in_modes)], 1) <= rank
    assert (len(spec.in_modes) > 1) == (rows >= 16)


def test_rows_of_a_wide_table_span_half_of_what_two_factors_would():
    spec = choose_wide(4096, 256, max_rank=40)
    assert spec.ranks == (1, 32, 40, 8, 1)
    assert spec.num_params < 0.55 * 40 * (4096 + 256)


@pytest.mark.parametrize("sizes", [(0, 4, 1), (4, 0, 1), (4, 4, 0)])
def test_wide_tables_of_no_size_are_refused(sizes):
    with pytest.raises(SpecError, match="is not positive"):
        choose_wide(*sizes[:2], max_rank=sizes[2])


def test_two_modes_a_side_are_even_ones():
    choice = choose_modes(4096, 256, layout="ttm", max_rank=16, most=2)
    assert choice == ModeChoice((64, 64), (16, 16))


def test_the_two_sides_of_a_tt_mirror_each_other():
    one = choose_modes(768, 3072, layout="tt", max_rank=30)
    other = choose_modes(3072, 768, layout="tt", max_rank=30)
    assert (one.in_modes, one.out_modes) == (other.out_modes[::-1], other.in_modes[::-1])


@layouts
@pytest.mark.parametrize("size", [768, 3072, 1000, 97, 50257, 30522, 1])
@pytest.mark.parametrize("other", [768, 64, 1])
def test_sizes_that_failed_elsewhere(layout, size, other):
    for in_features, out_features in ((size, other), (other, size)):
        choice = choose_modes(in_features, out_features, layout=layout, max_rank=32)
        assert in_features <= prod(choice.in_modes) <= in_features * (1 + MAX_PADDING)
        assert out_features <= prod(choice.out_modes) <= out_features * (1 + MAX_PADDING)
        assert 1.0 <= choice.balance <= 24.0


@layouts
@pytest.mark.parametrize("size", [97, 101, 1009, 50257, 30522, 28996])
def test_sizes_with_a_large_prime_factor_are_padded_a_little(layout, size):
    choice = choose_modes(size, 768, layout=layout, max_rank=32)
    assert len(choice.in_modes) >= 2
    assert max(choice.in_modes) <= 3 * size ** (1 / len(choice.in_modes))
    assert size < prod(choice.in_modes) <= size * 1.05


@layouts
@pytest.mark.parametrize("size", [64, 768, 1000, 1024, 3072, 4096, 11008, 14336, 32000])
def test_sizes_with_small_factors_are_not_padded(layout, size):
    choice = choose_modes(size, 768, layout=layout, max_rank=32)
    other = choose_modes(768, size, layout=layout, max_rank=32)
    assert prod(choice.in_modes) == prod(other.out_modes) == size
    assert prod(choice.out_modes) == prod(other.in_modes) == 768


@pytest.mark.parametrize("rank", [32, 48, 64])
def test_layers_of_usual_size_get_few_cores_and_balanced_modes(rank):
    for size in (64, 128, 256, 512, 768, 1024, 2048):
        choice = choose_modes(size, size, layout="tt", max_rank=rank)
        assert 2 <= len(choice.in_modes) <= 3
        assert choice.balance <= 4.0


def test_few_classes_are_one_mode():
    assert choose_modes(512, 10, layout="tt", max_rank=16).out_modes == (10,)
    assert choose_modes(3, 2, layout="ttm", max_rank=16) == ModeChoice((3,), (2,))


@pytest.mark.parametrize("rows", [3, 17, 583, 1460])
def test_tiny_tables_get_modes_too(rows):
    choice = choose_modes(rows, 16, layout="ttm", max_rank=32)
    assert len(choice.in_modes) == len(choice.out_modes)
    assert rows <= prod(choice.in_modes) <= rows * (1 + MAX_PADDING)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 200), st.booleans())
@LIMIT
def test_every_size_gets_modes_that_make_a_spec(in_features, out_features, rank, is_tt):
    layout = "tt" if is_tt else "ttm"
    choice = choose_modes(in_features, out_features, layout=layout, max_rank=rank)
    assert in_features <= prod(choice.in_modes) <= in_features * (1 + MAX_PADDING)
    assert out_features <= prod(choice.out_modes) <= out_features * (1 + MAX_PADDING)
    assert len(choice.in_modes) <= 4
    assert len(choice.out_modes) <= 4
    assert num_params(choice, layout, rank) > 0


@pytest.mark.parametrize(
    ("arguments", "problem", "got"),
    [
        ({"in_features": 0}, "in_features is not positive", "0"),
        ({"out_features": -1}, "out_features is not positive", "-1"),
        ({"max_rank": 0}, "max_rank is not positive", "0"),
    ],
)
def test_what_cannot_be_is_refused(arguments, problem, got):
    good = {"in_features": 64, "out_features": 64, "layout": "ttm", "max_rank": 8}
    choose_modes(**good)
    with pytest.raises(SpecError) as caught:
        choose_modes(**{**good, **arguments})
    lines = str(caught.value).splitlines()
    assert lines[0] == problem
    assert lines[1] == f"  got:      {got}"
    assert [line.split(":")[0].strip() for line in lines[2:]] == ["expected", "mend"]


@pytest.mark.parametrize(
    ("in_modes", "out_modes", "balance"),
    [((8, 8, 4), (4, 8, 8), 2.0), ((12, 1), (3, 1), 4.0), ((1,), (1,), 1.0), ((7,), (7,), 1.0)],
)
def test_balance_looks_at_modes_above_1(in_modes, out_modes, balance):
    assert ModeChoice(in_modes, out_modes).balance == balance
