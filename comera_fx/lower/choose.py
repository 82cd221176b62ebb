"""Which program a contraction runs: planned once per spec, dtype, device, tokens and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from comera_fx.config import Objective
from comera_fx.lower.execute import contract, needs_plain_operators
from comera_fx.lower.tune import fastest_program
from comera_fx.plan.cost import cost_model
from comera_fx.plan.linear import bucket_tokens, rank_plans
from comera_fx.plan.lookup import plan_lookup
from comera_fx.plan.networks import Network, dense_network
from comera_fx.plan.program import Program, make_program
from comera_fx.plan.search import find_path
from comera_fx.spec import TTSpec


def linear(
    x: Tensor,
    cores: list[Tensor],
    bias: Tensor | None,
    spec: TTSpec,
    *,
    num_tokens_hint: int,
    objective: Objective,
    memory_limit_bytes: int | None,
    pad_ranks: bool,
    autotune: bool,
) -> Tensor:
    """Return ``x W^T + bias`` by the plan for this number of tokens.

    Args:
        x: ``(..., in_size)``.
        cores: The cores of W.
        bias: ``(out_size,)`` or ``None``.
        spec: Shape of W; no rank is 0.
        num_tokens_hint: Tokens to plan for where their number is symbolic.
        objective: What the plan minimises.
        memory_limit_bytes: Limit of the plan's peak.
        pad_ranks: Whether the plan may pad ranks.
        autotune: Whether the best plans are timed once, where they can be run.
    """
    program, num_tokens = linear_program(
        x,
        cores,
        spec,
        num_tokens_hint=num_tokens_hint,
        objective=objective,
        memory_limit_bytes=memory_limit_bytes,
        pad_ranks=pad_ranks,
        autotune=autotune,
    )
    shape = (*x.shape[:-1], spec.out_size)
    return contract(program, num_tokens, (x, *cores), shape, bias)


def linear_program(
    x: Tensor,
    cores: Sequence[Tensor],
    spec: TTSpec,
    *,
    num_tokens_hint: int,
    objective: Objective,
    memory_limit_bytes: int | None,
    pad_ranks: bool,
    autotune: bool,
) -> tuple[Program, int]:
    """Return the program that ``linear`` runs, and the number of tokens; arguments are alike."""
    num_tokens = math.prod(x.shape[:-1])
    trains = torch.is_grad_enabled()
    program = _linear_program(
        spec,
        _bucket(num_tokens, num_tokens_hint),
        tuple(trains and leaf.requires_grad for leaf in (x, *cores)),
        x.dtype,
        x.device,
        objective,
        memory_limit_bytes,
        pad_ranks,
        autotune and _can_be_timed(x),
    )
    return program, num_tokens


def dense(cores: list[Tensor], spec: TTSpec) -> Tensor:
    """Return the matrix ``(out_size, in_size)``; no rank is 0."""
    network = dense_network(spec)
    return _weight_only(cores, network, (spec.out_size, spec.in_size))


def embedding(ids: Tensor, cores: list[Tensor], spec: TTSpec, *, num_tokens_hint: int) -> Tensor:
    """Return the rows ``ids`` of the table ``(in_size, out_size)``, shape ``(*ids, out_size)``.

    Args:
        ids: Integer row numbers, all valid.
        cores: The cores of the table.
        spec: Its shape, the in_modes being the row modes; no rank is 0.
        num_tokens_hint: Number of ids to plan for where it is symbolic.
    """
    plan = plan_lookup(spec, _bucket(ids.numel(), num_tokens_hint))
    rows, columns, rank = plan.left_shape
    if plan.right is None:
        table = _weight_only(cores, plan.left, (rows, columns))
        return torch.nn.functional.embedding(ids, table)
    flat = ids.reshape(-1)
    num_right = plan.right_shape[0]
    left = _weight_only(cores[: plan.cut], plan.left, (rows, columns * rank))
    right = _weight_only(cores[plan.cut :], plan.right, (num_right, rank * plan.right_shape[2]))
    if num_right == 1:
        picked = left.index_select(0, flat).reshape(-1, rank) @ right.reshape(rank, -1)
    elif rows == 1 and plan.right_shape[2] == 1:  # the columns' cores come first
        picked = right.index_select(0, flat) @ left.reshape(columns, rank).t()
    else:
        left_rows = left.index_select(0, flat // num_right).reshape(-1, columns, rank)
        right_rows = right.index_select(0, flat % num_right).reshape(-1, *plan.right_shape[1:])
        picked = torch.bmm(left_rows, right_rows)
    return picked.reshape(*ids.shape, spec.out_size)


def _weight_only(cores: list[Tensor], network: Network, shape: tuple[int, ...]) -> Tensor:
    wanted = tuple(core.requires_grad for core in cores)
    costs = cost_model(cores[0].device.type)
    program = make_program(network, find_path(network), wanted, cores[0].element_size(), costs)
    return contract(program, 1, cores, shape)


@lru_cache(maxsize=4096)
def _linear_program(
    spec: TTSpec,
    num_tokens: int,
    wanted: tuple[bool, ...],
    dtype: torch.dtype,
    device: torch.device,
    objective: Objective,
    memory_limit_bytes: int | None,
    pad_ranks: bool,
    autotune: bool,
) -> Program:
    plans = rank_plans(
        spec,
        num_tokens,
        objective,
        wanted[0],
        any(wanted[1:]),
        memory_limit_bytes=memory_limit_bytes,
        pad_ranks=pad_ranks,
        itemsize=dtype.itemsize,
        device_type=device.type,
    )
    return fastest_program(plans if autotune else plans[:1], wanted, dtype, device)


def _can_be_timed(x: Tensor) -> bool:
    """Whether plans can be run beside the caller's own work, unseen by it."""
    return not (
        needs_plain_operators(x)
        or x.device.type == "meta"
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def _bucket(num_tokens: int, hint: int) -> int:
    """Return the number to plan for.

    A symbolic number is never compared, which would bind the graph to a range of batches.
    """
    if type(num_tokens) is not int or torch.compiler.is_exporting():
        return max(hint, 2)  # a plan for one token has no index for them
    return bucket_tokens(num_tokens)
