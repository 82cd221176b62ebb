"""Closed tensor networks of the contractions that a TT layer makes.

A network lists the tensors that are given (its *leaves*) and one more, the *target*: the tensor
whose place the forward result takes. For a linear layer the leaves are ``x, G1 .. Gn`` and the
target is the output gradient ``dy``, so that the closed network ``<dy | G1 .. Gn | x>`` with any
one tensor taken out is the output or the gradient of that tensor. Every index sits on exactly two
of the tensors, which is why each pairwise contraction is one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from string import ascii_letters

from comera_fx.errors import PlanError
from comera_fx.spec import TTSpec

TOKENS = "b"
"""The index of the input rows: the only one whose size may differ from call to call."""


@dataclass(frozen=True)
class Network:
    """Leaves and target of one contraction.

    Args:
        names: Name of each leaf, ``("x", "G1", "G2")``.
        indices: The indices of each leaf, in storage order, one letter an index.
        target: Name of the tensor that closes the network, ``"dy"``.
        target_indices: Its indices; the forward result is stored in this order.
        result: Name of the forward result, ``"y"``.
        sizes: Pairs of index and size; the tokens have the number planned for.
    """

    names: tuple[str, ...]
    indices: tuple[str, ...]
    target: str
    target_indices: str
    result: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def size_of(self) -> dict[str, int]:
        """Index to size."""
        return dict(self.sizes)

    def resized(self, sizes: Mapping[str, int]) -> Network:
        """Return the same network with other sizes for some of its indices."""
        if not sizes:
            return self
        return replace(self, sizes=tuple((i, sizes.get(i, size)) for i, size in self.sizes))


@dataclass(frozen=True)
class _Letters:
    """The letters of a spec's modes and bonds; an empty string where the size is 1."""

    in_modes: tuple[str, ...]
    out_modes: tuple[str, ...]
    bonds: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]


def _letters(spec: TTSpec) -> _Letters:
    fresh = iter(letter for letter in ascii_letters if letter != TOKENS)
    num_indices = sum(size > 1 for size in (*spec.in_modes, *spec.out_modes, *spec.ranks))
    if num_indices >= len(ascii_letters):
        raise PlanError(
            "the weight has more modes and bonds than a plan has names for",
            got=f"{num_indices} of more than one entry",
            expected=f"at most {len(ascii_letters) - 1}",
            mend="use fewer, larger modes",
        )
    sizes: list[tuple[str, int]] = []

    def name(count: int) -> str:
        if count == 1:
            return ""
        sizes.append((next(fresh), count))
        return sizes[-1][0]

    return _Letters(
        tuple(name(mode) for mode in spec.in_modes),
        tuple(name(mode) for mode in spec.out_modes),
        tuple(name(rank) for rank in spec.ranks),
        tuple(sizes),
    )


def _core_indices(spec: TTSpec, letters: _Letters) -> Iterator[str]:
    if spec.layout == "ttm":
        modes = tuple(map("".join, zip(letters.in_modes, letters.out_modes, strict=True)))
    elif spec.transposed:
        modes = letters.out_modes + letters.in_modes
    else:
        modes = letters.in_modes + letters.out_modes
    for k, mode in enumerate(modes):
        yield letters.bonds[k] + mode + letters.bonds[k + 1]


def _core_names(spec: TTSpec) -> tuple[str, ...]:
    return tuple(f"G{k + 1}" for k in range(spec.num_cores))


@lru_cache(maxsize=4096)
def linear_network(spec: TTSpec, num_tokens: int) -> Network:
    """Return the network of ``y = x W^T`` with ``num_tokens`` rows of input.

    A single row has no index of its own, as nothing of size 1 has.

    Example:
        >>> spec = TTSpec("tt", (2, 3), (4,), (1, 2, 3, 1))
        >>> linear_network(spec, 8).indices
        ('bac', 'ae', 'ecf', 'fd')
    """
    letters = _letters(spec)
    tokens = TOKENS if num_tokens > 1 else ""
    return Network(
        names=("x", *_core_names(spec)),
        indices=(tokens + "".join(letters.in_modes), *_core_indices(spec, letters)),
        target="dy",
        target_indices=tokens + "".join(letters.out_modes),
        result="y",
        sizes=(*(((TOKENS, num_tokens),) if tokens else ()), *letters.sizes),
    )


@lru_cache(maxsize=4096)
def dense_network(spec: TTSpec) -> Network:
    """Return the network of the dense matrix, ``(out_size, in_size)``.

    Example:
        >>> dense_network(TTSpec("tt", (2,), (4,), (1, 2, 1))).target_indices
        'ca'
    """
    letters = _letters(spec)
    return Network(
        names=_core_names(spec),
        indices=tuple(_core_indices(spec, letters)),
        target="dW",
        target_indices="".join((*letters.out_modes, *letters.in_modes)),
        result="W",
        sizes=letters.sizes,
    )


@lru_cache(maxsize=4096)
def chain_network(spec: TTSpec, first: int, last: int) -> Network:
    """Return the network of cores ``first .. last - 1`` of ``spec`` contracted over their bonds.

    The result keeps its indices in the order ``(in modes, left bond, out modes, right bond)``:
    a table with one entry per index of the input modes.

    Example:
        >>> spec = TTSpec("ttm", (2, 3), (4, 5), (1, 2, 1))
        >>> chain_network(spec, 0, 1).target_indices
        'adf'
    """
    letters = _letters(spec)
    inner = range(first, last)
    held_in, held_out = spec.modes_of(inner)
    in_modes = [letters.in_modes[k] for k in held_in]
    out_modes = [letters.out_modes[k] for k in held_out]
    indices = tuple(_core_indices(spec, letters))[first:last]
    kept = set(chain.from_iterable(indices))
    return Network(
        names=_core_names(spec)[first:last],
        indices=indices,
        target="dT",
        target_indices="".join((*in_modes, letters.bonds[first], *out_modes, letters.bonds[last])),
        result="T",
        sizes=tuple((letter, size) for letter, size in letters.sizes if letter in kept),
    )
