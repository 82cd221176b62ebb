"""How the steps of a tree become matrix products on views.

A stored tensor is read as a matrix without a copy where its indices lie as (kept, contracted) or
as (contracted, kept). Where they lie as (kept, contracted, kept), as those of an input whose
middle mode is contracted do, a batched product over the first group reads it without a copy as
well. What is free is which operand comes first, and so in which order the result is stored; the
choice is the one of least predicted time, copies and the shapes of products both counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from comera_fx.plan.cost import CostModel
from comera_fx.plan.networks import Network
from comera_fx.plan.steps import Message, Step, Steps

Order = str
"""Indices in the order in which a tensor stores them, slowest first."""

BATCHED_SLOWDOWN = 1.2
"""Time of a batched product of small matrices over that of one product of the same work."""
MAX_SWEEPS = 2


@dataclass(frozen=True)
class Arrangement:
    """One way to run a step.

    Args:
        kind: "mm", or "bmm": the first operand is read as (batch, contracted, rest).
        swapped: Whether the step's right operand comes first.
        flipped: Of a "bmm", whether the second operand's indices come before the rest.
        out: Storage order of the result.
        contracted: Order of the contracted indices.
        seconds: Predicted time, copies counted.
        copied: Numbers moved by reads that are no views.
    """

    kind: Literal["mm", "bmm"]
    swapped: bool
    flipped: bool
    out: Order
    contracted: Order
    seconds: float
    copied: int

    @cached_property
    def form(self) -> tuple[str, bool, bool]:
        """What can be chosen whatever the operands' storage orders are."""
        return self.kind, self.swapped, self.flipped


@dataclass(frozen=True)
class Layout:
    """Storage order of every message and the arrangement of every step.

    Args:
        orders: By name of the message.
        arrangements: One a step, forward then backward.
        seconds: Predicted time of all steps and of handing out the results.
        copied: Numbers moved by reads that are no views, handing out counted.
    """

    orders: Mapping[str, Order]
    arrangements: tuple[Arrangement, ...]
    seconds: float
    copied: int


def best_layout(network: Network, steps: Steps, itemsize: int, costs: CostModel) -> Layout:
    """Return the fastest layout found: each step at its best, then one step changed at a time.

    Where a step still copies, the one that made what it reads is changed together with a reader.
    """
    search = _Search(network, steps, itemsize, costs)
    best = search.lay_out()
    if best.copied == 0 and all(a.kind == "mm" for a in best.arrangements):
        return best
    for _ in range(MAX_SWEEPS):
        before = best
        for k in range(len(best.arrangements)):
            for arrangement in search.alternatives(k, best):
                other = search.change(best, k, arrangement)
                if other.seconds < best.seconds:
                    best = other
        if best is before:
            break
    return _with_pairs_changed(search, best) if best.copied else best


def _with_pairs_changed(search: _Search, best: Layout) -> Layout:
    """Change two steps at once: another order of a result may pay only for another reader."""
    for k in range(len(best.arrangements)):
        readers = search.readers(k)
        if not any(best.arrangements[reader].copied for reader in readers):
            continue
        for arrangement in search.alternatives(k, best):
            tried = search.change(best, k, arrangement, limit=float("inf"))
            for reader in readers:
                for other in search.alternatives(reader, tried):
                    both = search.change(tried, reader, other, limit=best.seconds)
                    if both.seconds < best.seconds:
                        best = both
    return best


class _Search:
    def __init__(self, network: Network, steps: Steps, itemsize: int, costs: CostModel) -> None:
        self.steps, self.itemsize, self.costs = (*steps.forward, *steps.backward), itemsize, costs
        self.size_of = network.size_of
        self.given = dict(zip(network.names, network.indices, strict=True))
        self.given[network.target] = network.target_indices
        self.results = results(network, steps)
        self.known: dict[tuple[int, Order, Order], list[Arrangement]] = {}

    def lay_out(self) -> Layout:
        """Return the layout in which each step runs at its fastest, whatever it does to others."""
        return self._extend(dict(self.given), [], (), float("inf"))

    def alternatives(self, k: int, layout: Layout) -> list[Arrangement]:
        """Return what step ``k`` could be instead in a layout."""
        chosen = layout.arrangements[k]
        return [a for a in self._options(k, layout.orders) if a is not chosen]

    def readers(self, k: int) -> list[int]:
        """Return the steps that read the result of step ``k``."""
        name = self.steps[k].out.name
        later = range(k + 1, len(self.steps))
        return [j for j in later if name in (self.steps[j].left.name, self.steps[j].right.name)]

    def change(
        self, layout: Layout, k: int, arrangement: Arrangement, *, limit: float | None = None
    ) -> Layout:
        """Return a layout with another step ``k``; later steps keep their form where they can.

        Gives up where the time exceeds the limit, that of ``layout`` if none is given; the
        result's is then above it too.
        """
        before = layout.arrangements[:k]
        orders = dict(self.given)
        for step, earlier in zip(self.steps, before, strict=False):
            orders[step.out.name] = earlier.out
        orders[self.steps[k].out.name] = arrangement.out
        limit = layout.seconds if limit is None else limit
        return self._extend(orders, [*before, arrangement], layout.arrangements[k + 1 :], limit)

    def _extend(
        self,
        orders: dict[str, Order],
        chosen: list[Arrangement],
        wished: Sequence[Arrangement],
        limit: float,
    ) -> Layout:
        """Choose for the steps that are left, as wished where that can be, and add up."""
        seconds, copied = sum(a.seconds for a in chosen), sum(a.copied for a in chosen)
        start = len(chosen)
        for k in range(start, len(self.steps)):
            options = self._options(k, orders)
            best = options[0]
            if wished:
                form = wished[k - start].form
                best = next((a for a in options if a.form == form), best)
            chosen.append(best)
            orders[self.steps[k].out.name] = best.out
            seconds += best.seconds
            copied += best.copied
            if seconds >= limit:
                return Layout(orders, tuple(chosen), seconds, copied)
        for message, order in self.results:
            if orders[message.name] != order:
                size = self._size(order)
                copied += size
                seconds += self.costs.copy_seconds(size * self.itemsize)
        return Layout(orders, tuple(chosen), seconds, copied)

    def _options(self, k: int, orders: Mapping[str, Order]) -> list[Arrangement]:
        """Return the arrangements of step ``k``, fastest first."""
        step = self.steps[k]
        key = k, orders[step.left.name], orders[step.right.name]
        if key not in self.known:
            self.known[key] = sorted(self._arrange(step, *key[1:]), key=lambda a: a.seconds)
        return self.known[key]

    def _arrange(self, step: Step, left: Order, right: Order) -> list[Arrangement]:
        shared = step.left.indices & step.right.indices
        options = []
        for swapped, first, second in ((False, left, right), (True, right, left)):
            options.append(self._product(shared, swapped, first, second))
            groups = _three_groups(first, shared)
            if groups is not None:
                options += self._batched(groups, swapped, second)
        return options

    def _product(
        self, shared: frozenset[str], swapped: bool, first: Order, second: Order
    ) -> Arrangement:
        by_first, by_second = only(first, shared), only(second, shared)
        rows, columns = drop(first, shared), drop(second, shared)
        found = []
        for contracted in dict.fromkeys((by_first, by_second)):
            copies = [
                self._size(stored)
                for stored, is_view in (
                    (first, is_matrix(first, rows, contracted)),
                    (second, is_matrix(second, contracted, columns)),
                )
                if not is_view
            ]
            found.append((sum(map(self._copy_seconds, copies)), sum(copies), contracted))
        seconds, copied, contracted = min(found)
        m, n, k = map(self._size, (rows, columns, contracted))
        seconds += self.costs.product_seconds(m, n, k, self.itemsize)
        return Arrangement("mm", swapped, False, rows + columns, contracted, seconds, copied)

    def _batched(
        self, groups: tuple[Order, Order, Order], swapped: bool, second: Order
    ) -> list[Arrangement]:
        """Return both forms of a product batched over the first group of the first operand."""
        batch, contracted, rest = groups
        columns = drop(second, frozenset(contracted))
        copied = 0 if is_matrix(second, contracted, columns) else self._size(second)
        num, k, m, n = map(self._size, (batch, contracted, rest, columns))
        options = []
        for flipped in (False, True):
            rows, width = (num * n, m) if flipped else (num * m, n)
            seconds = self.costs.product_seconds(rows, width, k, self.itemsize)
            seconds = BATCHED_SLOWDOWN * seconds + (self._copy_seconds(copied) if copied else 0.0)
            out = batch + (columns + rest if flipped else rest + columns)
            options.append(Arrangement("bmm", swapped, flipped, out, contracted, seconds, copied))
        return options

    def _size(self, order: Order) -> int:
        return prod(self.size_of[i] for i in order)

    def _copy_seconds(self, size: int) -> float:
        return self.costs.copy_seconds(size * self.itemsize)


def results(network: Network, steps: Steps) -> list[tuple[Message, Order]]:
    """Return pairs of result message and the order in which it is handed out."""
    gradients = [(message, network.indices[leaf]) for leaf, message in steps.gradients]
    return [(steps.result, network.target_indices), *gradients]


def only(order: Order, kept: frozenset[str]) -> Order:
    """Return the indices of ``order`` that are in ``kept``."""
    return "".join([index for index in order if index in kept])


def drop(order: Order, dropped: frozenset[str]) -> Order:
    """Return the indices of ``order`` that are not in ``dropped``."""
    return "".join([index for index in order if index not in dropped])


def is_matrix(stored: Order, rows: Order, columns: Order) -> bool:
    """Whether a view, transposed or not, reads a tensor as the matrix (rows, columns)."""
    return stored in (rows + columns, columns + rows)


def _three_groups(stored: Order, shared: frozenset[str]) -> tuple[Order, Order, Order] | None:
    """Split as (kept, contracted, kept), no group empty; ``None`` where that cannot be."""
    inside = [index in shared for index in stored]
    if not any(inside) or inside[0] or inside[-1]:
        return None
    start = inside.index(True)
    stop = len(inside) - inside[::-1].index(True)
    if not all(inside[start:stop]):
        return None
    return stored[:start], stored[start:stop], stored[stop:]
