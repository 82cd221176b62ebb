"""Where the boxes of a graph go: rows from top to bottom, each box below all that it reads.

A connection that passes rows by gets a place in each of them, so that it runs between the boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import networkx

GAP, ROW_GAP, LANE = 28.0, 34.0, 10.0
"""Between boxes, between rows; the width of a connection on its way through a row."""
SWEEPS = 8

Point = tuple[float, float]
Place = tuple[int, ...]
"""A box is ``(number,)``, a connection in a row that it passes ``(from, to, row)``."""


@dataclass(frozen=True)
class Placed:
    """The middle of each box, and the points of each connection, its two ends included."""

    centers: tuple[Point, ...]
    lines: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def place(sizes: Sequence[tuple[float, float]], reads: Sequence[Sequence[int]]) -> Placed:
    """Return where the boxes of an acyclic graph go.

    Args:
        sizes: Width and height of each box.
        reads: For each the numbers of those it reads.

    Example:
        >>> placed = place([(40, 20), (40, 20), (40, 20)], [[], [0], [0]])
        >>> [round(x) for x, _ in placed.centers]
        [54, 20, 88]
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(sizes)))
    graph.add_edges_from((a, b) for b, given in enumerate(reads) for a in given)
    generations = [sorted(found) for found in networkx.topological_generations(graph)]
    row_of = {box: row for row, boxes in enumerate(generations) for box in boxes}
    chains = [_chain(a, b, row_of) for a, b in sorted(graph.edges)]
    rows: list[list[Place]] = [[(box,) for box in boxes] for boxes in generations]
    for chain in chains:
        for dummy in chain[1:-1]:
            rows[dummy[2]].append(dummy)
    xs = _ordered(rows, chains, sizes)
    tops, height = _tops(generations, sizes)
    left = min((xs[(b,)] - sizes[b][0] / 2 for b in row_of), default=0.0)
    left = min([left, *xs.values()])
    right = max((xs[(b,)] + sizes[b][0] / 2 for b in row_of), default=0.0)
    right = max([right, *xs.values()])
    heights = [max(sizes[box][1] for box in boxes) for boxes in generations]
    centers = tuple(
        (xs[(b,)] - left, tops[row_of[b]] + heights[row_of[b]] / 2) for b in range(len(sizes))
    )
    lines = tuple(_line(chain, xs, left, centers, sizes, tops, heights) for chain in chains)
    return Placed(centers, lines, right - left, height)


def _chain(start: int, end: int, row_of: dict[int, int]) -> list[Place]:
    passed = range(row_of[start] + 1, row_of[end])
    return [(start,), *((start, end, row) for row in passed), (end,)]


def _tops(
    generations: Sequence[Sequence[int]], sizes: Sequence[tuple[float, float]]
) -> tuple[list[float], float]:
    tops, y = [], 0.0
    for boxes in generations:
        tops.append(y)
        y += max(sizes[box][1] for box in boxes) + ROW_GAP
    return tops, max(y - ROW_GAP, 0.0)


def _ordered(
    rows: list[list[Place]], chains: Sequence[Sequence[Place]], sizes: Sequence[tuple[float, float]]
) -> dict[Place, float]:
    """Return the x of each place, after sweeps down and up that draw neighbours together."""
    above: dict[Place, list[Place]] = {}
    below: dict[Place, list[Place]] = {}
    for chain in chains:
        for one, other in pairwise(chain):
            below.setdefault(one, []).append(other)
            above.setdefault(other, []).append(one)
    xs: dict[Place, float] = {}
    for row in rows:
        xs |= _packed([(place, 0.0) for place in row], sizes)
    for sweep in range(SWEEPS):
        neighbours, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        for row in order:
            wished = [
                (
                    place,
                    fmean(xs[n] for n in neighbours[place]) if place in neighbours else xs[place],
                )
                for place in row
            ]
            wished.sort(key=lambda item: item[1])
            row[:] = [place for place, _ in wished]
            xs |= _packed(wished, sizes)
    return xs


def _packed(
    wished: Sequence[tuple[Place, float]], sizes: Sequence[tuple[float, float]]
) -> dict[Place, float]:
    """Push the places of a row apart; together they stay where they wished to be."""
    if not wished:
        return {}
    found: list[float] = []
    reached = float("-inf")
    for place, x in wished:
        half = (sizes[place[0]][0] if len(place) == 1 else LANE) / 2
        found.append(max(x, reached + half))
        reached = found[-1] + half + GAP
    shift = fmean(x - at for (_, x), at in zip(wished, found, strict=True))
    return {place: at + shift for (place, _), at in zip(wished, found, strict=True)}


def _line(
    chain: Sequence[Place],
    xs: dict[Place, float],
    left: float,
    centers: Sequence[Point],
    sizes: Any,
    tops: Sequence[float],
    heights: Sequence[float],
) -> tuple[Point, ...]:
    (start,), (end,) = chain[0], chain[-1]
    points: list[Point] = [(centers[start][0], centers[start][1] + sizes[start][1] / 2)]
    for dummy in chain[1:-1]:
        x, row = xs[dummy] - left, dummy[2]
        points += [(x, tops[row]), (x, tops[row] + heights[row])]
    return (*points, (centers[end][0], centers[end][1] - sizes[end][1] / 2))
