"""The shape of a weight in tensor-train form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from comera_fx.config import Layout
from comera_fx.errors import SpecError


@dataclass(frozen=True)
class TTSpec:
    """The shape of a weight in tensor-train form.

    Layout ``"tt"`` has one core per mode, input modes first: core k is ``(R, mode, S)``. Layout
    ``"ttm"`` has one core per pair of modes: core k is ``(R, N, M, S)``.

    Cores of layout ``"tt"`` that are read by their other side, as those of an embedding are by a
    head that is tied to it, are ``transposed``: their output modes come first.

    Args:
        layout: ``"tt"`` or ``"ttm"``.
        in_modes: Factors of the in features (of the rows of an embedding table); their product
            may exceed the layer's size, the rest is padding.
        out_modes: Factors of the out features; as many as ``in_modes`` in layout ``"ttm"``.
        ranks: Bond sizes, one more than there are cores; both ends are 1. Inner ranks are all
            positive, or all 0: such a weight is zero and holds no parameters.
        transposed: Whether the cores have the output modes first; in layout ``"tt"`` only.

    Raises:
        SpecError: If a field is malformed or the fields disagree.

    Example:
        >>> spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
        >>> spec.in_size, spec.out_size, spec.num_params
        (768, 768, 20448)
    """

    layout: Layout
    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]
    ranks: tuple[int, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.layout not in ("tt", "ttm"):
            _refuse("layout", self.layout, "'tt' or 'ttm'", "use 'tt' for linear layers")
        for name in ("in_modes", "out_modes"):
            modes = getattr(self, name)
            if not _are_counts(modes, 1) or not modes:
                _refuse(name, modes, "a non-empty tuple of positive ints", "write (12, 8, 8)")
        if self.layout == "ttm" and len(self.in_modes) != len(self.out_modes):
            _refuse(
                "out_modes",
                f"{len(self.in_modes)} in_modes, {len(self.out_modes)} out_modes",
                "as many out_modes as in_modes in layout 'ttm'",
                "fill the shorter side up with modes of 1",
            )
        if self.transposed and self.layout == "ttm":
            _refuse(
                "transposed",
                self.transposed,
                "False in layout 'ttm'",
                "change the places of in_modes and out_modes, and of the two modes of each core",
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        ranks, num_ranks = self.ranks, self.num_cores + 1
        if not _are_counts(ranks, 0):
            _refuse("ranks", ranks, "a tuple of ints, 0 or more", "write (1, 30, 30, 1)")
        if len(ranks) != num_ranks:
            _refuse(
                "ranks",
                f"{len(ranks)} ranks for {self.num_cores} cores",
                "one rank more than there are cores",
                f"give {num_ranks} ranks",
            )
        if ranks[0] != 1 or ranks[-1] != 1:
            _refuse("ranks", ranks, "1 at both ends", f"use {(1, *ranks[1:-1], 1)}")
        if 0 in ranks and any(ranks[1:-1]):
            _refuse(
                "ranks",
                ranks,
                "inner ranks all positive, or all 0 (a weight that is zero)",
                "set the other inner ranks to 0 too, or the zeros to 1",
            )

    @property
    def num_cores(self) -> int:
        """Number of cores: one per mode in layout "tt", one per pair of modes in "ttm"."""
        return len(self.mode_sizes)

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Input and output modes, those of the first cores first."""
        if self.transposed:
            return self.out_modes, self.in_modes
        return self.in_modes, self.out_modes

    def turned(self) -> TTSpec:
        """Return the spec of the transpose: of the same cores, those of "ttm" transposed each."""
        transposed = self.layout == "tt" and not self.transposed
        return TTSpec(self.layout, self.out_modes, self.in_modes, self.ranks, transposed)

    @property
    def middle_rank(self) -> int:
        """Rank of the bond between the two sides; in layout "ttm" of the one in the middle."""
        cut = len(self.sides[0]) if self.layout == "tt" else self.num_cores // 2
        return self.ranks[cut]

    @property
    def mode_sizes(self) -> tuple[int, ...]:
        """Size that each core adds to the matrix: its mode, or the product of its two modes."""
        if self.layout == "tt":
            return self.sides[0] + self.sides[1]
        return tuple(n * m for n, m in zip(self.in_modes, self.out_modes, strict=True))

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of every core, ``(R, mode, S)`` in layout "tt", ``(R, N, M, S)`` in "ttm"."""
        if self.layout == "tt":
            modes: list[tuple[int, ...]] = [(mode,) for mode in self.mode_sizes]
        else:
            modes = list(zip(self.in_modes, self.out_modes, strict=True))
        bonds = zip(self.ranks[:-1], modes, self.ranks[1:], strict=True)
        return tuple((left, *mode, right) for left, mode, right in bonds)

    def modes_of(self, cores: range) -> tuple[range, range]:
        """Return which of the input and which of the output modes some cores hold.

        Example:
            >>> TTSpec("tt", (4, 8), (8,), (1, 4, 8, 1)).modes_of(range(1, 3))
            (range(1, 2), range(0, 1))
        """
        if self.layout == "ttm":
            return cores, cores
        cut = len(self.sides[0])
        first = range(min(cores.start, cut), min(cores.stop, cut))
        second = range(max(cores.start, cut) - cut, max(cores.stop, cut) - cut)
        return (second, first) if self.transposed else (first, second)

    @property
    def in_size(self) -> int:
        """Product of ``in_modes``, padding included."""
        return math.prod(self.in_modes)

    @property
    def out_size(self) -> int:
        """Product of ``out_modes``, padding included."""
        return math.prod(self.out_modes)

    @property
    def num_params(self) -> int:
        """Number of scalars held by all cores."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    def clipped(self) -> TTSpec:
        """Return the spec with every rank cut to the largest its bond can use.

        A bond can use no more than the product of the mode sizes on either side of it, nor more
        than a neighbouring bond's rank times the mode between them.

        Example:
            >>> TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 30, 30, 30, 30, 30, 1)).clipped().ranks
            (1, 12, 30, 30, 30, 12, 1)
        """
        return replace(self, ranks=clip_ranks(self.ranks, self.mode_sizes))


def clip_ranks(ranks: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Cut bond ranks to what a chain of cores with these mode sizes can use.

    Args:
        ranks: Ranks asked for, one more than there are cores.
        sizes: Mode size of every core.

    Example:
        >>> clip_ranks((1, 30, 30, 1), (12, 8, 8))
        (1, 12, 8, 1)
    """
    cut = list(ranks)
    for k in range(1, len(cut) - 1):
        cut[k] = min(cut[k], cut[k - 1] * sizes[k - 1])
    # Cutting from the right keeps what was cut from the left: where bond k is cut to
    # cut[k + 1] * size, bond k + 1 still is at most cut[k] * size.
    for k in range(len(cut) - 2, 0, -1):
        cut[k] = min(cut[k], cut[k + 1] * sizes[k])
    return tuple(cut)


def _refuse(field: str, got: object, expected: str, mend: str) -> NoReturn:
    raise SpecError(f"TTSpec.{field} is malformed", got=repr(got), expected=expected, mend=mend)


def _are_counts(values: object, least: int) -> bool:
    return isinstance(values, tuple) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= least for v in values
    )
