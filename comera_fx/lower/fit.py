"""Make a table of rates, and the tile of a device, of measured times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product as cartesian
from math import exp, log, prod
from statistics import median

SIDES = (1, 4, 8, 16, 64, 256, 1024, 4096)
"""Sides of the products that are measured, each with each."""

ANCHORS = (16, 32, 48)
"""Columns that are whole tiles."""

COLUMNS = (18, 22, 24, 28, 30, 36, 40, 44, 46)
"""Columns between them."""

FAR_BELOW = 1 / 4
"""A rate below this share of both neighbours' in every direction was disturbed."""

NOISE = 0.03
"""Part of a time that says nothing."""

_TILES = (8, 16)

Shape = tuple[int, int, int]
Rates = dict[Shape, float]


def ascending() -> list[Shape]:
    """Return all shapes; what fills a shape in comes before it."""
    shapes: list[Shape] = [(m, n, k) for m, n, k in cartesian(SIDES, repeat=3)]
    return sorted(shapes, key=lambda shape: (prod(shape), shape))


def shorter(shape: Shape) -> Shape:
    """Return the shape whose longest side is one step shorter."""
    longest = max(range(3), key=lambda axis: shape[axis])
    step = SIDES[SIDES.index(shape[longest]) - 1]
    m, n, k = (step if axis == longest else side for axis, side in enumerate(shape))
    return m, n, k


def filled(measured: Rates) -> Rates:
    """Return rates of all shapes: those left out get that of the next smaller product."""
    rates: Rates = {}
    for shape in ascending():
        rates[shape] = measured[shape] if shape in measured else rates[shorter(shape)]
    return rates


def lifted(rates: Rates) -> Rates:
    """Return the rates, those far below both neighbours in each direction lifted to them.

    On an edge of the table, which has both neighbours in one direction only, none is lifted.
    """
    result = dict(rates)
    for shape, rate in rates.items():
        lower = [
            min(rates[_moved(shape, axis, step)] for step in (-1, 1))
            for axis in range(3)
            if shape[axis] not in (SIDES[0], SIDES[-1])
        ]
        if len(lower) > 1 and rate < FAR_BELOW * min(lower):
            result[shape] = min(lower)
    return result


def _moved(shape: Shape, axis: int, step: int) -> Shape:
    moved = list(shape)
    moved[axis] = SIDES[SIDES.index(shape[axis]) + step]
    m, n, k = moved
    return m, n, k


def fit_tile(seconds: Sequence[Mapping[int, float]]) -> tuple[int, float]:
    """Return the columns of a tile, and the cost in tiles of each part of one that is not whole.

    A column of whole tiles costs what the products of 16, 32 and 48 columns say; whatever a
    product takes beyond its whole tiles at that price, the parts of its last one cost.

    Args:
        seconds: Of products that differ in their columns: columns to time, one mapping a product.

    Returns:
        ``(1, 1.0)`` where no tile explains the times much better than none.
    """
    # Columns that n columns cost as much as, averaged over the products.
    worth = {
        n: exp(sum(log(taken[n] / _price(taken, n)) for taken in seconds) / len(seconds))
        for n in COLUMNS
    }
    fits = [(_misfit(worth, tile, ragged), tile, ragged) for tile, ragged in _candidates(worth)]
    least, none = min(fits)[0], _misfit(worth, 1, 1.0)
    if least > 0.5 * none or none < len(worth) * NOISE**2:
        return 1, 1.0
    # Half a tile whose parts cost twice as much says the same: the smaller one pads less.
    return next((tile, ragged) for misfit, tile, ragged in fits if misfit <= 1.1 * least)


def _price(taken: Mapping[int, float], n: int) -> float:
    """Return the seconds of one of ``n`` columns, were they whole tiles."""
    low = max(anchor for anchor in ANCHORS[:-1] if anchor <= n)
    high = ANCHORS[ANCHORS.index(low) + 1]
    part = log(n / low) / log(high / low)
    return float((taken[low] / low) ** (1 - part) * (taken[high] / high) ** part)


def _candidates(worth: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    for tile in _TILES:
        costs = [(cost - n + n % tile) / (tile * (n % tile).bit_count())
                 for n, cost in worth.items() if n % tile]  # fmt: skip
        yield tile, max(median(costs), 1 / tile)


def _misfit(worth: Mapping[int, float], tile: int, ragged: float) -> float:
    return sum(log(worth[n] / _whole(n, tile, ragged)) ** 2 for n in worth)


def _whole(n: int, tile: int, ragged: float) -> float:
    rest = n % tile
    return n - rest + rest.bit_count() * ragged * tile
