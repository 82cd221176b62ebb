"""Set a layer's plan beside other ways to run it.

Figures are those of plans wherever a way is a plan: dense and low-rank layers are tensor trains of
one core and of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from comera_fx.config import Objective
from comera_fx.plan.linear import plan_linear
from comera_fx.plan.networks import Network, linear_network
from comera_fx.plan.picture import TO, short_number
from comera_fx.plan.plan import Plan
from comera_fx.plan.program import make_program
from comera_fx.plan.search import core_by_core_path, find_path, two_sided_path
from comera_fx.plan.steps import make_steps
from comera_fx.spec import TTSpec

COLUMNS = (
    "",
    "FLOPs\nforward",
    "FLOPs\nbackward",
    "both\nof dense",
    "bytes\nsaved",
    "bytes\npeak",
    "time\npredicted",
)


@dataclass(frozen=True)
class Way:
    """What one way to run a layer costs, forward and backward, every gradient wanted.

    Args:
        name: A word or two.
        flops_forward: 2 a multiply-add; no padding, no recomputation.
        flops_backward: Likewise.
        saved_bytes: Kept from forward to backward, parameters left out.
        peak_bytes: Largest sum of bytes alive at once, parameters left out; ``None`` if unknown.
        seconds: Predicted time of forward and backward; ``None`` if unknown.
        detail: What is contracted in which order.
    """

    name: str
    flops_forward: int
    flops_backward: int
    saved_bytes: int
    peak_bytes: int | None
    seconds: float | None
    detail: str


def compare_plans(
    spec: TTSpec, num_tokens: int, *, itemsize: int = 4, device_type: str = "cpu"
) -> list[Way]:
    """Return the ways to run a layer: the best plan, the simpler trees, low rank and dense.

    Args:
        spec: Shape of the weight.
        num_tokens: Rows of the input.
        itemsize: Bytes of one number.
        device_type: Whose speeds times are predicted by.

    Raises:
        PlanError: If there are no tokens.

    Example:
        >>> ways = compare_plans(TTSpec("tt", (12, 8), (8, 12), (1, 12, 20, 12, 1)), 512)
        >>> [way.name for way in ways]
        ['best plan', 'fewest FLOPs', 'fixed path', 'VJP per core', 'low rank 20', 'dense']
    """

    def plan(objective: Objective) -> Plan:
        return plan_linear(spec, num_tokens, objective, itemsize=itemsize, device_type=device_type)

    fewest = plan("flops")
    return [
        _best(plan("time")),
        _way("fewest FLOPs", fewest, "the tree of fewest FLOPs"),
        _fixed_path(fewest),
        _vjp_per_core(fewest),
        _low_rank(fewest),
        _dense(fewest),
    ]


def comparison_table(ways: Sequence[Way]) -> Group:
    """Return a table of ways and, below it, what each of them does; ``rich`` prints it.

    Args:
        ways: What ``compare_plans`` returned; FLOPs are set against those of the last.
    """
    table, details = Table(box=SIMPLE_HEAD), Table.grid(padding=(0, 2))
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    dense = ways[-1].flops_forward + ways[-1].flops_backward
    for way in ways:
        table.add_row(
            way.name,
            short_number(way.flops_forward),
            short_number(way.flops_backward),
            f"{(way.flops_forward + way.flops_backward) / dense:.1%}",
            f"{short_number(way.saved_bytes)}B",
            "-" if way.peak_bytes is None else f"{short_number(way.peak_bytes)}B",
            "-" if way.seconds is None else f"{1e3 * way.seconds:.3f} ms",
        )
        details.add_row(f" {way.name}", way.detail)
    return Group(table, details)


def _way(name: str, plan: Plan, detail: str) -> Way:
    flops = plan.flops_forward, plan.flops_backward
    return Way(name, *flops, plan.saved_bytes, plan.peak_bytes, plan.seconds, detail)


def _best(plan: Plan) -> Way:
    more = {"padding": plan.flops_padding, "recomputation": plan.flops_recomputed}
    added = [f"{flops:,} FLOPs more for {name}" for name, flops in more.items() if flops]
    return _way("best plan", plan, ", ".join(["of least predicted time", *added]))


def _fixed_path(plan: Plan) -> Way:
    """The order that needs no search; where there are two sides, the one that copies nothing."""
    spec = plan.spec
    if spec.layout == "tt":
        path = two_sided_path(*map(len, spec.sides), from_last=spec.transposed)
        detail = "input cores, output cores, then x with both"
    else:
        path = core_by_core_path(spec.num_cores)
        detail = "x with the cores, one after the other"
    return _way("fixed path", replace(plan, path=path), detail)


def _vjp_per_core(plan: Plan) -> Way:
    """The output and each gradient by its own best contraction, from x, dy and the cores alone."""
    none = (False,) * len(plan.wanted)
    networks = [plan.network]
    networks += [_gradient_network(plan.network, leaf) for leaf in range(len(none))]
    flops, seconds = [], plan.costs.call_seconds
    for network in networks:
        path = find_path(network)
        flops.append(make_steps(network, path, none).flops_forward)
        seconds += make_program(network, path, none, plan.itemsize, plan.costs).seconds
    saved_bytes = plan.itemsize * plan.num_tokens * plan.spec.in_size
    detail = "y and each gradient by its own best contraction, nothing shared"
    return Way("VJP per core", flops[0], sum(flops[1:]), saved_bytes, None, seconds, detail)


def _gradient_network(network: Network, leaf: int) -> Network:
    """The network whose result is the gradient of a leaf: the target takes the leaf's place."""

    def swapped(values: tuple[str, ...], by: str) -> tuple[str, ...]:
        return (*values[:leaf], by, *values[leaf + 1 :])

    return Network(
        names=swapped(network.names, network.target),
        indices=swapped(network.indices, network.target_indices),
        target=network.names[leaf],
        target_indices=network.indices[leaf],
        result=f"d{network.names[leaf]}",
        sizes=network.sizes,
    )


def _low_rank(plan: Plan) -> Way:
    spec, rank = plan.spec, plan.spec.middle_rank
    factors = TTSpec("tt", (spec.in_size,), (spec.out_size,), (1, rank, 1))
    network = linear_network(factors, plan.num_tokens)
    plan = replace(plan, spec=factors, network=network, path=two_sided_path(1, 1))
    return _way(f"low rank {rank}", plan, f"x {TO} {rank} {TO} y, the rank of the middle bond")


def _dense(plan: Plan) -> Way:
    weight = TTSpec("ttm", (plan.spec.in_size,), (plan.spec.out_size,), (1, 1))
    network = linear_network(weight, plan.num_tokens)
    plan = replace(plan, spec=weight, network=network, path=((0, 1),))
    return replace(_way("dense", plan, "x with the whole matrix"), seconds=plan.dense_seconds)
