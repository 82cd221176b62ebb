"""Choice of modes: how the two sizes of a layer are split into the factors of a tensor train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, permutations

from comera_fx.config import Layout
from comera_fx.errors import SpecError
from comera_fx.spec import TTSpec, clip_ranks

Modes = tuple[int, ...]

MAX_MODES = 4
"""Modes a side: beyond four, cores are so small that launching their products is the cost."""

TRAINABLE_MODES = 2
"""Modes a side of tables that train from scratch: at equal size two wide cores learn more than four
narrow ones (``comera_fx/train/README.md``)."""

OUTER_SHARE = 0.5
"""What the outer core of either side of such a table keeps of its mode, in layout "tt"."""

SINGLE_MODE_BELOW = 16
"""Below this a side may be one mode (a head with 10 classes): its factors would save nothing."""

CORE_COST = 0.05
"""Parameters that one more mode a side must save: it adds a step to forward and two to backward."""

FEW_CORES_BELOW, MANY_CORES_COST = 4096, 0.25
"""A fourth mode on a side below this size must save that much more: layers of this size are fast
enough that steps, not parameters, set their time. In layout "ttm" half as many cores hold as many
modes, so there it is free."""

IMBALANCE_COST = 0.15
"""Parameters that each doubling of (largest / smallest mode of a side) must save: narrow modes run
far below the peak rate of matrix products."""

ROUGH = 4.0
"""A side is padded only if its largest factor, when split as evenly as it goes, is this many times
what an even split would give. So 11008 = 16 x 16 x 43 stays as it is; 97, 30522 and 50257, with the
primes 97, 5087 and 1733, do not."""

PADDING_COST, MAX_PADDING = 0.25, 0.10
"""Parameters that padding a side must save, since it costs a copy of the activations, and the most
that is added to a side."""

SHORTLIST = 24
"""Sets of modes a side of which every order is scored; the best are within the first few."""

SHORTLIST_TTM = 8
"""The same in layout "ttm", where sets of both sides combine."""


@dataclass(frozen=True)
class ModeChoice:
    """Modes of both sides of a layer.

    Example:
        >>> ModeChoice((8, 8, 4), (4, 8, 8)).balance
        2.0
    """

    in_modes: Modes
    out_modes: Modes

    @property
    def balance(self) -> float:
        """Largest mode over the smallest above 1; 1.0 is perfectly balanced."""
        modes = [mode for mode in self.in_modes + self.out_modes if mode > 1]
        return max(modes) / min(modes) if modes else 1.0


def choose_modes(
    in_features: int,
    out_features: int,
    *,
    layout: Layout,
    max_rank: int,
    most: int = MAX_MODES,
) -> ModeChoice:
    """Choose the modes, and their order, for a layer of the given sizes.

    Among factorisations of both sizes, padded by a few percent where a size has large prime
    factors, takes the one with the fewest parameters at ``max_rank``, each weighed up by what its
    number of cores, imbalance and padding cost in time (the constants of this module).

    Args:
        in_features: In size of the layer, or rows of an embedding table.
        out_features: Out size of the layer, or width of an embedding table.
        layout: ``"tt"`` or ``"ttm"``; in "ttm" both sides get equally many modes.
        max_rank: Rank of all bonds, before each is cut to what it can use.
        most: Modes a side, at most.

    Returns:
        The same choice for the same arguments, always.

    Raises:
        SpecError: If a size or the rank is not positive.

    Example:
        >>> choose_modes(256, 256, layout="tt", max_rank=32)
        ModeChoice(in_modes=(8, 8, 4), out_modes=(4, 8, 8))
    """
    _check_positive(in_features, out_features, max_rank)
    search = _search_tt if layout == "tt" else _search_ttm
    return search(in_features, out_features, max_rank, most)


def _check_positive(in_features: int, out_features: int, max_rank: int) -> None:
    numbers = {"in_features": in_features, "out_features": out_features, "max_rank": max_rank}
    for name, value in numbers.items():
        if value < 1:
            raise SpecError(
                f"{name} is not positive", got=value, expected="at least 1", mend="give an int >= 1"
            )


def choose_wide(in_features: int, out_features: int, *, max_rank: int) -> TTSpec:
    """Choose modes and ranks for a table that trains from scratch, in layout "tt".

    A side has two modes. Its outer core keeps half of the first one, and its inner core, which
    holds nearly all of its parameters, takes that to the middle rank. So rows share little: they
    are nearly as free as those of two plain factors of that rank, at half their size.

    Args:
        in_features: Rows of the table.
        out_features: Width of the table.
        max_rank: Rank of the middle bond, before it is cut to what it can use.

    Returns:
        The same spec for the same arguments, always.

    Raises:
        SpecError: If a size or the rank is not positive.

    Example:
        >>> spec = choose_wide(4096, 256, max_rank=40)
        >>> spec.in_modes, spec.out_modes, spec.ranks
        ((64, 64), (16, 16), (1, 32, 40, 8, 1))
    """
    _check_positive(in_features, out_features, max_rank)
    in_modes, out_modes = _evenly(in_features), _evenly(out_features)[::-1]
    ranks = (1, *_outer(in_modes), max_rank, *_outer(out_modes[::-1]), 1)
    return TTSpec("tt", in_modes, out_modes, ranks).clipped()


def _evenly(size: int) -> Modes:
    """Return the two modes of a side, the smaller one at the end; one if the side is small."""
    if size < SINGLE_MODE_BELOW:
        return (size,)
    sets = _mode_sets(size, 2)
    return min(sets, key=lambda modes: (_weight(modes, size), modes))[::-1]


def _outer(modes: Modes) -> Modes:
    """Return the rank between the two modes of a side, if it has two."""
    return (max(1, round(OUTER_SHARE * modes[0])),) if len(modes) > 1 else ()


@lru_cache(maxsize=1024)
def _search_tt(in_features: int, out_features: int, max_rank: int, most: int) -> ModeChoice:
    # Ranks grow from both ends to the middle bond, so the sides do not affect each other and the
    # out side is an in side read backwards.
    in_modes = _best_side(in_features, out_features, max_rank, most)
    out_modes = _best_side(out_features, in_features, max_rank, most)[::-1]
    return ModeChoice(in_modes, out_modes)


def _best_side(size: int, other_size: int, max_rank: int, most: int) -> Modes:
    """Modes of one side, from the end of the chain to its middle."""

    def score(modes: Modes) -> float:
        extra = MANY_CORES_COST if len(modes) > 3 and size < FEW_CORES_BELOW else 0.0
        # The other side acts as one mode: it bounds the middle rank.
        ranks, sizes = (1, *[max_rank] * len(modes), 1), (*modes, other_size)
        return _num_params(ranks, sizes, len(modes)) * (_weight(modes, size) + extra)

    fewest = 1 if size < SINGLE_MODE_BELOW else 2
    sets = [
        modes for num in range(fewest, max(fewest, most) + 1) for modes in _mode_sets(size, num)
    ]
    sets = sorted(sets, key=lambda modes: (score(modes), modes))[:SHORTLIST]
    orders = {order for modes in sets for order in permutations(modes)}
    return min(orders, key=lambda modes: (score(modes), modes))


@lru_cache(maxsize=1024)
def _search_ttm(in_features: int, out_features: int, max_rank: int, most: int) -> ModeChoice:
    def score(choice: ModeChoice) -> float:
        sizes = [n * m for n, m in zip(choice.in_modes, choice.out_modes, strict=True)]
        num = len(sizes)
        ranks = (1, *[max_rank] * (num - 1), 1)
        weight = _weight(choice.in_modes, in_features) + _weight(choice.out_modes, out_features)
        return _num_params(ranks, sizes, num) * (weight - 1.0)

    fewest = 2 if max(in_features, out_features) > 3 else 1
    choices = [
        choice
        for num in range(fewest, max(fewest, most) + 1)
        for in_modes in _shortlist(in_features, num)
        for out_modes in _shortlist(out_features, num)
        for choice in _orders(in_modes, out_modes)
    ]
    return min(choices, key=lambda c: (score(c), c.in_modes, c.out_modes))


def _orders(in_modes: Modes, out_modes: Modes) -> Iterator[ModeChoice]:
    """Ways to pair the modes of two sides, each in its best order."""
    for order in sorted(set(permutations(out_modes))):
        pairs = sorted(zip(in_modes, order, strict=True), key=lambda p: (-p[0] * p[1], p))
        # The end cores have one bond only: the two largest pairs are cheapest there.
        first, *inner = pairs
        arranged = [first, *inner[1:], *inner[:1]]
        ins, outs = zip(*arranged, strict=True)
        yield ModeChoice(ins, outs)


def _num_params(ranks: Modes, sizes: Sequence[int], num_cores: int) -> int:
    """Parameters of the first ``num_cores`` cores, at ranks cut to what the bonds can use."""
    cut = clip_ranks(ranks, sizes)
    return sum(cut[k] * sizes[k] * cut[k + 1] for k in range(num_cores))


def _weight(modes: Modes, size: int) -> float:
    """What a parameter of a side with these modes counts, 1.0 for two equal modes unpadded."""
    factors = [mode for mode in modes if mode > 1]
    imbalance = math.log2(max(factors) / min(factors)) if factors else 0.0
    padding = math.prod(modes) / size - 1.0
    return (
        1.0
        + CORE_COST * max(0, len(modes) - 2)
        + IMBALANCE_COST * imbalance
        + (PADDING_COST + padding if padding else 0.0)
    )


def _shortlist(size: int, num: int) -> list[Modes]:
    sets = _mode_sets(size, num)
    return sorted(sets, key=lambda modes: (_weight(modes, size), sum(modes), modes))[:SHORTLIST_TTM]


@lru_cache(maxsize=1024)
def _mode_sets(size: int, num: int) -> tuple[Modes, ...]:
    """Sets of ``num`` modes, largest first, whose product is ``size`` or, if rough, near it."""
    if num == 1:
        return ((size,),)
    padded = _padded(size, num) if _is_rough(size) else ()
    sets = tuple(sorted({*_exact(size, num), *padded}))
    # A small side has no so many factors above 1.
    return sets or tuple((*modes, 1) for modes in _mode_sets(size, num - 1))


@lru_cache(maxsize=1024)
def _exact(size: int, num: int) -> tuple[Modes, ...]:
    divisors = [d for d in range(2, math.isqrt(size) + 1) if size % d == 0]
    divisors = sorted({*divisors, *(size // d for d in divisors)})
    return tuple(_splits(size, num, size, divisors))


def _is_rough(size: int) -> bool:
    num = 3 if size >= 4**3 else 2  # fewer than 4 a mode is not a split worth having
    largest = min((modes[0] for modes in _exact(size, num)), default=size)
    return largest > ROUGH * math.pow(size, 1 / num)


def _splits(size: int, num: int, most: int, divisors: list[int]) -> Iterator[Modes]:
    """Products of ``num`` factors, 2 to ``most``, in falling order, that equal ``size``."""
    if num == 1:
        if 1 < size <= most:
            yield (size,)
        return
    for factor in divisors:
        if factor <= most and factor**num >= size and size % factor == 0:
            for rest in _splits(size // factor, num - 1, factor, divisors):
                yield (factor, *rest)


def _padded(size: int, num: int) -> Iterator[Modes]:
    """Balanced factors whose product is above ``size``, by at most ``MAX_PADDING``.

    All but one are free of primes above 7, which thins them out and keeps matrix products wide.
    """
    even = size ** (1 / num)
    usable = [
        factor
        for factor in range(max(2, round(even / 2)), round(2 * even) + 1)
        if num == 2 or _is_smooth(factor)
    ]
    for most in combinations_with_replacement(usable, num - 1):
        last = -(-size // math.prod(most))
        if 1 < last <= most[0] * 4 and size < last * math.prod(most) <= size * (1 + MAX_PADDING):
            yield tuple(sorted((*most, last), reverse=True))


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number == 1
