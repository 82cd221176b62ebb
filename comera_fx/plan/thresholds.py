"""Numbers of tokens at which a layer's best plan changes, where one graph serves many batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from comera_fx.plan.linear import plan_linear
from comera_fx.plan.networks import linear_network
from comera_fx.plan.plan import Plan
from comera_fx.spec import TTSpec

BUCKETS = tuple(1 << k for k in range(1, 13))
"""Numbers of tokens that are looked at; above the last, two products with the tokens win."""
MOST_KINDS = 3
"""Kinds of layers that decide: planning each for every bucket takes a tenth of a second or more."""
WORTH_A_RANGE = 0.05
"""What one range more must save, as a share of the best time, added up over the buckets."""


@dataclass(frozen=True)
class Interval:
    """A range of numbers of tokens that one plan serves.

    Args:
        first: The smallest number in it.
        planned: The number that is planned for.
        last: The largest number in it; ``None`` where there is no end.
    """

    first: int
    planned: int
    last: int | None

    def __contains__(self, num_tokens: int) -> bool:
        return self.first <= num_tokens and (self.last is None or num_tokens <= self.last)


def token_intervals(
    specs: tuple[TTSpec, ...], most: int, itemsize: int = 4, device_type: str = "cpu"
) -> tuple[Interval, ...]:
    """Return ranges of tokens, from 2 on, for each of which all layers keep one plan.

    Of all ways to cut the buckets into at most ``most`` ranges, and to plan each for one of its
    buckets, the one that loses least against planning every bucket by itself, by the predicted
    time of all layers; of those that lose about as little, the one with the fewest ranges.

    Layers of equal modes count as one kind, whatever their ranks: after a few cuts no two layers
    have the same, and their crossovers lie close by.

    Args:
        specs: Shape of each layer; no rank is 0.
        most: Largest number of ranges.
        itemsize: Bytes of one number.
        device_type: Whose speeds times are predicted by.

    Example:
        >>> spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
        >>> intervals = token_intervals((spec,), 3)
        >>> len(intervals) <= 3, intervals[0].first, intervals[-1].last
        (True, 2, None)
    """
    return _intervals_of(_kinds(specs), most, itemsize, device_type)


def _kinds(specs: Sequence[TTSpec]) -> tuple[tuple[TTSpec, int], ...]:
    """Return the kinds of layers that weigh most: the largest of each, and how many there are."""
    groups: dict[tuple[object, ...], list[TTSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.layout, spec.in_modes, spec.out_modes, spec.transposed), []).append(
            spec
        )
    kinds = [(max(group, key=_weight), len(group)) for group in groups.values()]
    kinds.sort(key=lambda kind: (-kind[1] * kind[0].num_params, _weight(kind[0])))
    return tuple(kinds[:MOST_KINDS])


def _weight(spec: TTSpec) -> tuple[object, ...]:
    return spec.num_params, spec.ranks, spec.in_modes, spec.out_modes, spec.transposed


@lru_cache(maxsize=256)
def _intervals_of(
    kinds: tuple[tuple[TTSpec, int], ...], most: int, itemsize: int, device_type: str
) -> tuple[Interval, ...]:
    lost = _losses(_seconds(kinds, itemsize, device_type))
    cuts = _best_cuts(lost, most)
    return tuple(_intervals(cuts, lost))


def _seconds(
    kinds: Sequence[tuple[TTSpec, int]], itemsize: int, device_type: str
) -> list[list[float]]:
    """Return the time of all layers, planned for one bucket (row), at another (column)."""
    table = [[0.0] * len(BUCKETS) for _ in BUCKETS]
    for spec, count in kinds:
        known: dict[object, list[float]] = {}
        for row, bucket in zip(table, BUCKETS, strict=True):
            plan = plan_linear(spec, bucket, itemsize=itemsize, device_type=device_type)
            form = (plan.path, plan.pads, plan.recompute)
            if form not in known:
                known[form] = [_at(plan, tokens).seconds for tokens in BUCKETS]
            for column, seconds in enumerate(known[form]):
                row[column] += count * seconds
    return table


def _losses(seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return by which share of the best time each plan (row) is slower at a bucket (column)."""
    best = [min(column) for column in zip(*seconds, strict=True)]
    return [[s / least - 1 for s, least in zip(row, best, strict=True)] for row in seconds]


def _planned(lost: Sequence[Sequence[float]], first: int, end: int) -> tuple[float, int]:
    """Return the least loss over the buckets ``first:end``, and which of them to plan for."""
    return min((sum(lost[row][first:end]), -row) for row in range(first, end))


def _best_cuts(lost: Sequence[Sequence[float]], most: int) -> tuple[int, ...]:
    """Return where ranges of buckets begin and end, such that little is lost."""
    # For each number of ranges: the least loss of the first `end` buckets, and their cuts.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    chosen: tuple[float, tuple[int, ...]] | None = None
    for _ in range(min(most, len(BUCKETS))):
        best = {
            end: min(
                (loss + _planned(lost, first, end)[0], (*cuts, end))
                for first, (loss, cuts) in best.items()
                if first < end
            )
            for end in range(min(best) + 1, len(BUCKETS) + 1)
        }
        last = best[len(BUCKETS)]
        if chosen is None or last[0] < chosen[0] - WORTH_A_RANGE:
            chosen = last
    assert chosen is not None, "there is at least one range"
    return chosen[1]


def _at(plan: Plan, num_tokens: int) -> Plan:
    """Return a plan's tree and padding at another number of tokens."""
    network = linear_network(plan.spec, num_tokens)
    return replace(plan, num_tokens=num_tokens, network=network)


def _intervals(cuts: Sequence[int], lost: Sequence[Sequence[float]]) -> list[Interval]:
    ranges = list(pairwise(cuts))
    firsts = [2, *(BUCKETS[first] // 2 + 1 for first, _ in ranges[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), None]
    planned = [BUCKETS[-_planned(lost, first, end)[1]] for first, end in ranges]
    return [Interval(*each) for each in zip(firsts, planned, lasts, strict=True)]
