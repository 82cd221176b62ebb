"""Choose the plan of a TT linear layer: candidate trees, scored by what the objective counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from comera_fx.config import Objective, PlanConfig
from comera_fx.errors import PlanError
from comera_fx.plan.cost import CostModel, cost_model
from comera_fx.plan.networks import TOKENS, Network, linear_network
from comera_fx.plan.plan import Plan
from comera_fx.plan.program import Recompute
from comera_fx.plan.search import SsaPath, core_by_core_path, find_path, two_sided_path
from comera_fx.spec import TTSpec

MOST_TOKENS = 1 << 40
NUM_PADDED = 2
"""How many of the fastest trees are also tried with padded ranks."""
MEMORY_SLACK = 1.02
"""Among plans whose bytes are within this factor of the least, objective "memory" takes the
fastest: what is left to save is not worth a slow tree."""


def plan_linear(
    spec: TTSpec,
    num_tokens: int,
    objective: Objective = "time",
    needs_input_grad: bool = True,
    *,
    needs_core_grad: bool = True,
    memory_limit_bytes: int | None = None,
    pad_ranks: bool = True,
    itemsize: int = 4,
    device_type: str = "cpu",
) -> Plan:
    """Plan ``y = x W^T`` and its gradients for a weight in TT form.

    Args:
        spec: Shape of the weight.
        num_tokens: Rows of ``x``.
        objective: What is minimised: the predicted "time", the "flops", or the "memory": the
            bytes saved for backward and the peak, added up.
        needs_input_grad: Whether the gradient of ``x`` is wanted.
        needs_core_grad: Whether those of the cores are; with neither, the plan is for inference.
        memory_limit_bytes: Plans whose peak is above this are refused.
        pad_ranks: Whether objective "time" may pad ranks where that is predicted to be faster.
        itemsize: Bytes of one number, 4 for float32.
        device_type: Whose speeds the time is predicted by, "cpu" or "cuda".

    Returns:
        The plan; equal arguments give the same object.

    Raises:
        PlanError: If no plan stays below the limit, or an argument is no layer's.
        ConfigError: If a setting is none of ``PlanConfig``.

    Example:
        >>> spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
        >>> plan_linear(spec, 4096, "flops").flops_forward // 2
        190195200
    """
    _check(spec, num_tokens, itemsize)
    _check_device_type(device_type)
    for name, value in (("input", needs_input_grad), ("core", needs_core_grad)):
        if type(value) is not bool:
            raise PlanError(
                f"needs_{name}_grad is neither true nor false",
                got=repr(value),
                expected="True or False",
                mend="leave it True for training",
            )
    config = PlanConfig(objective, memory_limit_bytes, pad_ranks)
    return rank_plans(
        spec,
        num_tokens,
        config.objective,
        needs_input_grad,
        needs_core_grad,
        memory_limit_bytes=memory_limit_bytes,
        pad_ranks=pad_ranks,
        itemsize=itemsize,
        device_type=device_type,
    )[0]


def _check(spec: object, num_tokens: object, itemsize: object) -> None:
    if not isinstance(spec, TTSpec) or 0 in spec.ranks:
        raise PlanError(
            "there is nothing to plan",
            got=repr(spec),
            expected="a TTSpec whose ranks are positive",
            mend="write TTSpec('tt', (8, 8), (8, 8), (1, 8, 16, 8, 1))",
        )
    if type(num_tokens) is not int or not 1 <= num_tokens <= MOST_TOKENS:
        raise PlanError(
            "a plan needs at least one token",
            got=f"num_tokens={num_tokens!r:.40}",
            expected=f"an int from 1 to {MOST_TOKENS:,}",
            mend="give the number of rows of the layer's input",
        )
    if type(itemsize) is not int or itemsize not in (1, 2, 4, 8, 16):
        raise PlanError(
            "numbers have no such size",
            got=f"itemsize={itemsize!r}",
            expected="1, 2, 4, 8 or 16 bytes",
            mend="give dtype.itemsize, 4 for float32",
        )


def _check_device_type(device_type: object) -> None:
    """A device is no type of device: "cuda:0" would be planned for as if it were a CPU."""
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise PlanError(
            "that is no type of device",
            got=repr(device_type),
            expected="'cpu' or 'cuda'; other types are planned for like a CPU",
            mend="give tensor.device.type",
        )


@lru_cache(maxsize=4096)
def rank_plans(
    spec: TTSpec,
    num_tokens: int,
    objective: Objective,
    needs_input_grad: bool,
    needs_core_grad: bool,
    *,
    memory_limit_bytes: int | None,
    pad_ranks: bool,
    itemsize: int,
    device_type: str,
) -> Sequence[Plan]:
    """Return the candidate plans, best first; arguments and limit as of ``plan_linear``."""
    costs = cost_model(device_type)
    network = linear_network(spec, num_tokens)
    recompute = _RECOMPUTE[objective]

    def plan(path: SsaPath) -> Plan:
        return Plan(
            spec,
            num_tokens,
            itemsize,
            needs_input_grad,
            network,
            path,
            recompute=recompute,
            costs=costs,
            needs_core_grad=needs_core_grad,
        )

    plans = [plan(path) for path in _paths(network, spec, objective)]
    if objective == "time" and pad_ranks:
        best = sorted(plans, key=lambda each: each.program.seconds)[:NUM_PADDED]
        plans += [padded for each in best for padded in _padded(each, costs)]
    if memory_limit_bytes is not None:
        plans = _within(memory_limit_bytes, plans, [plan(p) for p in _small_paths(network)])
    if objective == "flops":
        return sorted(plans, key=lambda each: (_flops(each), each.program.seconds))
    if objective == "memory":
        limit = MEMORY_SLACK * min(map(_bytes, plans))
        return sorted(plans, key=lambda each: (max(_bytes(each), limit), each.program.seconds))
    return sorted(plans, key=lambda each: each.program.seconds)


_RECOMPUTE: dict[Objective, Recompute] = {"flops": "none", "time": "cheap", "memory": "all"}


def _flops(plan: Plan) -> int:
    return plan.flops_forward + plan.flops_backward


def _bytes(plan: Plan) -> int:
    return plan.saved_bytes + plan.peak_bytes


def _paths(network: Network, spec: TTSpec, objective: Objective) -> list[SsaPath]:
    """Return the trees to score, each once."""
    paths = [find_path(network)]
    if objective != "flops":
        paths += [find_path(network, minimize, outer=False) for minimize in ("write", "combo")]
        paths.append(core_by_core_path(spec.num_cores, from_last=spec.transposed))
        if spec.layout == "tt":
            paths.append(two_sided_path(*map(len, spec.sides), from_last=spec.transposed))
    if objective == "memory":
        paths += _small_paths(network)
    return list(dict.fromkeys(paths))


def _small_paths(network: Network) -> list[SsaPath]:
    """Return the trees that hold least, whatever they cost."""
    return [find_path(network, minimize, outer=False) for minimize in ("size", "write", "combo")]


def _padded(plan: Plan, costs: CostModel) -> Iterator[Plan]:
    """Yield the plan with those ranks padded whose products with the tokens are ragged."""
    size_of = plan.network.size_of
    modes = {*plan.network.indices[0], *plan.network.target_indices}
    held = [step.out.indices for step in plan.steps.forward if TOKENS in step.out.indices]
    bonds = sorted(frozenset().union(*held) - modes)
    padded = {bond: costs.padded(size_of[bond]) for bond in bonds}
    pads = [(bond, rank) for bond, rank in padded.items() if rank != size_of[bond]]
    if pads:
        yield replace(plan, pads=tuple(pads))


def _within(limit: int, plans: list[Plan], smaller: list[Plan]) -> list[Plan]:
    """Return the plans below the limit, smaller ones where no other is.

    Raises:
        PlanError: If there is none.
    """
    if all(plan.peak_bytes > limit for plan in plans):
        plans = plans + smaller
    fitting = [plan for plan in plans if plan.peak_bytes <= limit]
    if fitting:
        return fitting
    least = min(plans, key=lambda plan: plan.peak_bytes)
    raise PlanError(
        f"no plan of {least.spec} at {least.num_tokens} tokens stays below the memory limit",
        got=f"memory_limit_bytes={limit}",
        expected=f"at least {least.peak_bytes}, the smallest peak found",
        mend="raise the limit, or use smaller batches or ranks",
    )


def bucket_tokens(num_tokens: int) -> int:
    """Return the number of tokens that is planned for: the next power of two.

    Few plans then serve all batch sizes. The plan for one token serves only that.

    Example:
        >>> [bucket_tokens(n) for n in (0, 1, 5, 4096)]
        [2, 1, 8, 4096]
    """
    return 1 << (num_tokens - 1).bit_length() if num_tokens else 2
