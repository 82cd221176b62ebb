"""Numbers of tokens at which a layer's best plan changes, where one graph serves many batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from comera_fx.plan.linear import plan_linear
from comera_fx.plan.networks import linear_network
from comera_fx.plan.plan import Plan
from comera_fx.spec import TTSpec

BUCKETS = tuple(1 << k for k in range(1, 13))
"""Numbers of tokens that are looked at; above the last, two products with the tokens win."""


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


@lru_cache(maxsize=256)
def token_intervals(
    specs: tuple[TTSpec, ...], most: int, itemsize: int = 4, device_type: str = "cpu"
) -> tuple[Interval, ...]:
    """Return ranges of tokens, from 2 on, for each of which all layers keep their plan.

    The ranges begin where the fastest plan of some layer changes. Where there would be more than
    ``most``, those that lose least are joined, by the predicted time of all layers.

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
    costs = _Costs(specs, itemsize, device_type)
    ranges = _runs(costs)
    while len(ranges) > most:
        joined = [costs.joined(first, second) for first, second in pairwise(ranges)]
        more = [
            new.lost - first.lost - second.lost
            for new, (first, second) in zip(joined, pairwise(ranges), strict=True)
        ]
        place = more.index(min(more))
        ranges[place : place + 2] = [joined[place]]
    return tuple(_intervals(ranges))


class _Range(NamedTuple):
    """Buckets that one plan serves, and how much longer it takes there than the best."""

    buckets: tuple[int, ...]
    planned: int
    lost: float


class _Costs:
    """Predicted times of some layers, by the plans for one number of tokens at another."""

    def __init__(self, specs: Sequence[TTSpec], itemsize: int, device_type: str) -> None:
        self._counts = Counter(specs)
        self._itemsize, self._device_type = itemsize, device_type

    def plans(self, num_tokens: int) -> list[Plan]:
        """Return the plan of each kind of layer."""
        return [
            plan_linear(spec, num_tokens, itemsize=self._itemsize, device_type=self._device_type)
            for spec in self._counts
        ]

    def seconds(self, planned: int, num_tokens: int) -> float:
        """Return the time of all layers at a number of tokens, planned for another."""
        return sum(
            count * _at(plan, num_tokens).seconds
            for plan, count in zip(self.plans(planned), self._counts.values(), strict=True)
        )

    def joined(self, first: _Range, second: _Range) -> _Range:
        """Return one range for two, planned for as in the better of them."""
        buckets = first.buckets + second.buckets
        options = [
            _Range(buckets, planned, sum(self._lost(planned, bucket) for bucket in buckets))
            for planned in (first.planned, second.planned)
        ]
        return min(options, key=lambda option: option.lost)

    def _lost(self, planned: int, bucket: int) -> float:
        return self.seconds(planned, bucket) / self.seconds(bucket, bucket) - 1


def _runs(costs: _Costs) -> list[_Range]:
    """Return ranges of neighbours whose plans are the same."""
    ranges: list[_Range] = []
    last: object = None
    for bucket in BUCKETS:
        form = [(plan.path, plan.pads) for plan in costs.plans(bucket)]
        before = ranges.pop().buckets if ranges and form == last else ()
        ranges.append(_Range((*before, bucket), bucket, 0.0))
        last = form
    return ranges


def _at(plan: Plan, num_tokens: int) -> Plan:
    """Return a plan's tree and padding at another number of tokens."""
    network = linear_network(plan.spec, num_tokens)
    return replace(plan, num_tokens=num_tokens, network=network)


def _intervals(ranges: Sequence[_Range]) -> list[Interval]:
    firsts = [2, *(each.buckets[0] // 2 + 1 for each in ranges[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), None]
    return [
        Interval(first, each.planned, last)
        for first, last, each in zip(firsts, lasts, ranges, strict=True)
    ]
