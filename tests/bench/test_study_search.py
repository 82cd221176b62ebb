"""Which rates are tried, and which are chosen."""

import math

import pytest

from bench.study_search import Rates, best_rates, next_rates
from bench.study_task import SELECTION_SEED
from tests.bench.study_tasks import make_task


def row(rates, quality, seed=SELECTION_SEED, budget="steps"):
    rate, rest = rates
    return {"seed": seed, "budget": budget, "rate": rate, "rest": rest, "quality": quality}


def search(qualities, task):
    """The order in which rates are tried, of which each has a quality, and the best of them."""
    rows, order = [], []
    while (rates := next_rates(rows, task, tuple(qualities))) is not None:
        order.append(rates)
        rows.append(row(rates, qualities[rates]))
    return order, best_rates(rows, task, tuple(qualities))


def test_reported_rows_never_choose_rates():
    one, other = Rates(1e-3, 1.0), Rates(1e-2, 1.0)
    rows = [row(one, 0.5), row(other, 0.1, seed=0), row(other, 0.1, budget="time")]
    assert best_rates(rows, make_task(), (one, other)) == one
    assert best_rates(rows, make_task(), (other,)) is None


@pytest.mark.parametrize(
    ("qualities", "tried"),
    [
        ({1: 0.9, 2: 0.5, 3: 0.4, 4: 0.6, 5: 0.1}, [3, 4, 2]),
        ({1: 0.3, 2: 0.2, 3: 0.4, 4: 0.6, 5: 0.1}, [3, 4, 2, 1]),
        ({1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.2}, [3, 4, 5]),
        ({1: 0.5, 2: math.nan, 3: math.nan, 4: 0.1, 5: 0.1}, [3, 2, 1]),
        (dict.fromkeys(range(1, 6), math.nan), [3, 2, 1]),
    ],
)
def test_rates_are_tried_until_both_neighbours_of_the_best_are_known(qualities, tried):
    grid = {Rates(rate, 1.0): quality for rate, quality in qualities.items()}
    order, _ = search(grid, make_task())
    assert [rates.rate for rates in order] == tried


def test_the_rate_of_the_rest_is_tried_at_the_best_rate_and_searched_on_from_there():
    grid = {
        **{Rates(rate, 1.0): q for rate, q in {1: 0.9, 2: 0.6, 3: 0.5, 4: 0.7}.items()},
        **{Rates(rate, 5.0): q for rate, q in {1: 0.9, 2: 0.2, 3: 0.3, 4: 0.8}.items()},
    }
    order, best = search(grid, make_task())
    assert order == [(3, 1), (4, 1), (2, 1), (3, 5), (4, 5), (2, 5), (1, 5)]
    assert best == (2, 5)


def test_the_better_direction_is_the_tasks_and_diverged_rates_lose():
    tried = {1e-4: math.nan, 1e-3: 0.7, 3e-3: 0.2, 1e-2: math.nan}
    rows = [row((rate, 1.0), quality) for rate, quality in tried.items()]
    grid = [Rates(rate, 1.0) for rate in tried]
    assert best_rates(rows, make_task(better="lower"), grid) == (3e-3, 1.0)
    assert best_rates(rows, make_task(better="higher"), grid) == (1e-3, 1.0)
    assert best_rates(rows[:1], make_task(), grid) is None
