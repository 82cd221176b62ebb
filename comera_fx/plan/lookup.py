"""How the rows of a TT embedding are looked up.

The cores are cut at one bond into a left and a right *pair table*, each built by a contraction
that reads no ids; a row is then the product of one entry of each. Where as many rows are wanted
as there are, building the dense table once and gathering from it is cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from comera_fx.plan.networks import Network, chain_network
from comera_fx.plan.search import SsaPath, find_path
from comera_fx.plan.steps import make_steps
from comera_fx.spec import TTSpec


@dataclass(frozen=True)
class LookupPlan:
    """The cheapest way to look up rows.

    Args:
        cut: Number of cores in the left table; 0 to build the dense table.
        left: Network of the left table ``(rows, columns, rank)``, or of the dense table.
        left_path: Its tree.
        right: Network of the right table ``(rows, rank, columns)``; ``None`` for dense.
        right_path: Its tree.
        left_shape: ``(rows, columns, rank)``.
        right_shape: ``(rows, rank, columns)``.
        flops: Of the forward pass, at the number of ids planned for.
    """

    cut: int
    left: Network
    left_path: SsaPath
    right: Network | None
    right_path: SsaPath
    left_shape: tuple[int, int, int]
    right_shape: tuple[int, int, int]
    flops: int


@lru_cache(maxsize=4096)
def plan_lookup(spec: TTSpec, num_ids: int) -> LookupPlan:
    """Return the plan of fewest FLOPs for looking up ``num_ids`` rows.

    Args:
        spec: Shape of the table; its in_modes are the row modes.
        num_ids: Rows to look up, counted with repetition.
    """
    plans = [_pair_tables(spec, num_ids, cut) for cut in range(1, spec.num_cores)]
    # The dense table is never larger than the output then, so it costs no extra order of memory.
    if num_ids >= spec.in_size or not plans:
        plans.append(_dense_table(spec))
    return min(plans, key=lambda plan: plan.flops)


def _dense_table(spec: TTSpec) -> LookupPlan:
    network = chain_network(spec, 0, spec.num_cores)
    path, flops = _tree(network)
    shape = (spec.in_size, spec.out_size, 1)
    return LookupPlan(0, network, path, None, (), shape, (1, 1, 1), flops)


def _pair_tables(spec: TTSpec, num_ids: int, cut: int) -> LookupPlan:
    left, right = chain_network(spec, 0, cut), chain_network(spec, cut, spec.num_cores)
    left_path, left_flops = _tree(left)
    right_path, right_flops = _tree(right)
    num_in, num_out = map(len, spec.modes_of(range(cut)))
    rows = (prod(spec.in_modes[:num_in]), prod(spec.in_modes[num_in:]))
    columns = (prod(spec.out_modes[:num_out]), prod(spec.out_modes[num_out:]))
    rank = spec.ranks[cut]
    flops = left_flops + right_flops + 2 * num_ids * columns[0] * rank * columns[1]
    return LookupPlan(
        cut,
        left,
        left_path,
        right,
        right_path,
        (rows[0], columns[0], rank),
        (rows[1], rank, columns[1]),
        flops,
    )


def _tree(network: Network) -> tuple[SsaPath, int]:
    path = find_path(network)
    return path, make_steps(network, path, (False,) * len(network.names)).flops_forward
