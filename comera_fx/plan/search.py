"""Find contraction trees with cotengra.

A tree is a path in single-static-assignment form: leaves are numbered ``0 .. n - 1`` and pair
``t`` makes tensor ``n + t``. The last tensor is the forward result, so the path is an unrooted
tree over the leaves and the target, hung up at the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from comera_fx.plan.networks import Network

SsaPath = tuple[tuple[int, int], ...]

MAX_LEAVES_OUTER = 7
"""Up to this many leaves (eight tensors with the target) outer products are searched as well:
without them the optimum is missed where ranks or modes are 1. The search grows fast with more."""
MAX_LEAVES_OPTIMAL = 11
"""Above this the exhaustive search gives way to seeded random-greedy ones."""
NUM_GREEDY_RESTARTS = 128
SUBTREE_SIZE = 8
"""Tensors of a subtree that is made optimal by itself."""


@lru_cache(maxsize=4096)
def find_path(network: Network, minimize: str = "flops", *, outer: bool = True) -> SsaPath:
    """Return the tree of ``network`` that minimises cotengra's ``minimize``.

    Args:
        network: The network; indices of size 1 are dropped before the search.
        minimize: A cotengra objective: "flops", "size", "write" or "combo".
        outer: Whether outer products are searched as well, in networks small enough.

    Source:
        Gray and Kourtis, "Hyper-optimized tensor network contraction", Quantum 2021; the
        exhaustive search is Pfeifer, Haegeman and Verstraete, Phys. Rev. E 90, 2014.
    """
    size_of = {index: size for index, size in network.sizes if size > 1}
    leaves = [frozenset(indices) & size_of.keys() for indices in network.indices]
    output = frozenset(network.target_indices) & size_of.keys()
    # Scalars are outside cotengra's search, which would multiply them in last of all.
    connected = [leaf for leaf, indices in enumerate(leaves) if indices]
    scalars = [leaf for leaf, indices in enumerate(leaves) if not indices]
    tree = _search([leaves[leaf] for leaf in connected], output, size_of, minimize, outer)
    numbered = _renumber(tree, [*connected, *scalars])
    for scalar in scalars[1:] if not connected else scalars:
        numbered = _join_smallest(numbered, scalar, leaves, size_of)
    return tuple(_ssa_pairs(numbered, len(leaves)))


def two_sided_path(num_first: int, num_last: int, *, from_last: bool = False) -> SsaPath:
    """Return the tree that contracts the cores of either side, then applies both to x.

    Two products with the tokens, on views alone: the tree to beat where there are many tokens,
    even where another takes fewer FLOPs. Leaves are x, then the cores of layout "tt".

    Args:
        num_first: Number of cores of the first side.
        num_last: Number of cores of the last side.
        from_last: Whether x meets the last side first, as where the cores are transposed.

    Example:
        >>> two_sided_path(2, 2)
        ((1, 2), (4, 3), (0, 5), (7, 6))
    """
    pairs: list[tuple[int, int]] = []
    num_leaves = 1 + num_first + num_last

    def chain(leaves: Sequence[int]) -> int:
        made = leaves[0]
        for leaf in leaves[1:]:
            pairs.append((made, leaf))
            made = num_leaves + len(pairs) - 1
        return made

    sides = [chain(range(1, num_first + 1)), chain(range(num_first + num_last, num_first, -1))]
    chain((0, *(reversed(sides) if from_last else sides)))
    return tuple(pairs)


def core_by_core_path(num_cores: int, *, from_last: bool = False) -> SsaPath:
    """Return the tree that contracts x with one core after another.

    Few steps to run where there are few tokens.

    Example:
        >>> core_by_core_path(3)
        ((0, 1), (4, 2), (5, 3))
    """
    first, *rest = range(num_cores, 0, -1) if from_last else range(1, num_cores + 1)
    return ((0, first), *((num_cores + 1 + k, core) for k, core in enumerate(rest)))


Tree = int | tuple["Tree", "Tree"]
"""A leaf number, or the pair whose contraction makes the tensor."""


def _search(
    leaves: Sequence[frozenset[str]],
    output: frozenset[str],
    size_of: dict[str, int],
    minimize: str,
    outer: bool,
) -> Tree:
    """Return cotengra's tree over leaves ``0 .. n - 1``."""
    if len(leaves) <= 1:
        return 0
    # Sorted, since the order in which a set is walked differs from run to run.
    inputs = [tuple(sorted(indices)) for indices in leaves]
    if len(inputs) <= MAX_LEAVES_OPTIMAL:
        path = _optimal(inputs, tuple(sorted(output)), size_of, minimize, outer)
    else:
        path = _greedy(inputs, tuple(sorted(output)), size_of, minimize)
    tensors: list[Tree] = list(range(len(inputs)))
    for group in path:
        first, *rest = (tensors[member] for member in group)
        for other in rest:
            first = (first, other)
        tensors.append(first)
    return tensors[-1]


Indices = tuple[str, ...]


def _optimal(
    inputs: list[Indices], output: Indices, size_of: dict[str, int], minimize: str, outer: bool
) -> Any:
    import cotengra

    search_outer = outer and len(inputs) <= MAX_LEAVES_OUTER
    optimizer = cotengra.OptimalOptimizer(minimize=minimize, search_outer=search_outer)
    return optimizer.ssa_path(inputs, output, size_of)


def _greedy(inputs: list[Indices], output: Indices, size_of: dict[str, int], minimize: str) -> Any:
    """Search at random from a fixed seed, then make the best tree's subtrees optimal."""
    import cotengra

    optimizer = cotengra.RandomGreedyOptimizer(
        max_repeats=NUM_GREEDY_RESTARTS, seed=0, parallel=False
    )
    path = optimizer.ssa_path(inputs, output, size_of)
    tree = cotengra.ContractionTree.from_path(inputs, output, size_of, ssa_path=path)
    tree.subtree_reconfigure_(subtree_size=SUBTREE_SIZE, minimize=minimize)
    return tree.get_ssa_path()


def _renumber(tree: Tree, numbers: Sequence[int]) -> Tree:
    if isinstance(tree, int):
        return numbers[tree]
    return _renumber(tree[0], numbers), _renumber(tree[1], numbers)


def _join_smallest(
    tree: Tree, scalar: int, leaves: Sequence[frozenset[str]], size_of: dict[str, int]
) -> Tree:
    """Multiply a scalar into the smallest tensor of the tree."""

    def walk(node: Tree) -> Iterator[tuple[int, Tree, frozenset[str]]]:
        if isinstance(node, int):
            indices = leaves[node]
        else:
            left, right = list(walk(node[0])), list(walk(node[1]))
            yield from (*left, *right)
            indices = left[-1][2] ^ right[-1][2]
        yield prod(size_of[i] for i in indices), node, indices

    _, smallest, _ = min(walk(tree), key=lambda entry: entry[0])

    def replaced(node: Tree) -> Tree:
        if node == smallest:
            return (node, scalar)
        return node if isinstance(node, int) else (replaced(node[0]), replaced(node[1]))

    return replaced(tree)


def _ssa_pairs(tree: Tree, num_leaves: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []

    def number(node: Tree) -> int:
        if isinstance(node, int):
            return node
        pairs.append((number(node[0]), number(node[1])))
        return num_leaves + len(pairs) - 1

    number(tree)
    return pairs
