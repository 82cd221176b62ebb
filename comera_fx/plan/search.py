"""Find contraction trees with cotengra.

A tree is a path in single-static-assignment form: leaves are numbered ``0 .. n - 1`` and pair
``t`` makes tensor ``n + t``. The last tensor is the forward result, so the path is an unrooted
tree over the leaves and the target, hung up at the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from comera_fx.plan.networks import Network

SsaPath = tuple[tuple[int, int], ...]

MAX_LEAVES_OUTER = 7
"""Up to this many leaves (eight tensors with the target) outer products are searched as well:
without them the optimum is missed where ranks or modes are 1. It costs 15 ms at ten tensors."""
MAX_LEAVES_OPTIMAL = 11
"""Above this the exhaustive search gives way to seeded random-greedy ones."""
NUM_GREEDY_RESTARTS = 128


@lru_cache(maxsize=4096)
def find_path(network: Network, minimize: str = "flops") -> SsaPath:
    """Return the tree of ``network`` that minimises cotengra's ``minimize``.

    Args:
        network: The network; indices of size 1 are dropped before the search.
        minimize: A cotengra objective: "flops", "size", "write" or "combo".

    Source:
        Gray and Kourtis, "Hyper-optimized tensor network contraction", Quantum 2021; the
        exhaustive search is Pfeifer, Haegeman and Verstraete, Phys. Rev. E 90, 2014.
    """
    sizes = {index: size for index, size in network.sizes if size > 1}
    inputs = [tuple(index for index in leaf if index in sizes) for leaf in network.indices]
    output = tuple(index for index in network.target_indices if index in sizes)
    if len(inputs) == 1:
        return ()
    pairs = _optimizer(len(inputs), minimize).ssa_path(inputs, output, sizes)
    return tuple(_as_pairs(pairs, len(inputs)))


def _optimizer(num_leaves: int, minimize: str) -> Any:
    import cotengra

    if num_leaves <= MAX_LEAVES_OPTIMAL:
        search_outer = num_leaves <= MAX_LEAVES_OUTER
        return cotengra.OptimalOptimizer(minimize=minimize, search_outer=search_outer)
    return cotengra.RandomGreedyOptimizer(
        max_repeats=NUM_GREEDY_RESTARTS, seed=0, parallel=False
    )


def _as_pairs(path: Any, num_leaves: int) -> Iterator[tuple[int, int]]:
    """Yield pairs only: cotengra may name one tensor alone, or several scalars at once."""
    renamed = {leaf: leaf for leaf in range(num_leaves)}
    made, number = num_leaves, num_leaves
    for group in path:
        tensors = [renamed[member] for member in group]
        while len(tensors) > 1:
            yield (tensors[0], tensors[1])
            tensors = [made, *tensors[2:]]
            made += 1
        renamed[number] = tensors[0]
        number += 1
