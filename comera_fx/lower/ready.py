"""What a layer keeps from one call to the next, so that the same call again runs at once.

Checks, look-ups of plans and the dispatcher take longer than the matrix products of a small batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera_fx.config import PlanConfig
from comera_fx.lower.choose import linear_program
from comera_fx.lower.execute import contract_by_operators, contract_directly, needs_plain_operators
from comera_fx.lower.source import Compiled, compiled
from comera_fx.plan.program import Program
from comera_fx.spec import TTSpec

MOST_CALLS = 32
"""Shapes of input that a layer remembers; past that it forgets all of them."""


class _Call(NamedTuple):
    """A call that has been checked and planned."""

    config: PlanConfig
    run: tuple[Program, Compiled, int, tuple[int, ...]]
    core_shapes: list[torch.Size]
    wanted: list[bool]
    dtype: torch.dtype
    tracked: bool


class ReadyCalls:
    """The calls that one linear layer has planned, by what they depend on.

    Copies and pickles of it are empty: the functions in it are made anew where they are needed.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[Any, _Call] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadyCalls, ()

    def run(
        self, x: Tensor, cores: Sequence[Tensor], bias: Tensor | None, config: PlanConfig
    ) -> Tensor | None:
        """Return ``x W^T + bias`` if such a call is ready, ``None`` if it is not.

        The caller has made sure that nothing observes single operators; see ``is_unobserved``.
        """
        call = self._calls.get((x.shape, x.device, x.requires_grad, torch.is_grad_enabled()))
        if (
            call is None
            or config is not call.config
            or x.dtype is not call.dtype
            or cores[0].dtype is not call.dtype
            or [core.shape for core in cores] != call.core_shapes
            or [core.requires_grad for core in cores] != call.wanted
        ):
            return None
        if call.tracked:
            return contract_directly(call.run, bias, x, *cores)
        _, code, num_tokens, shape = call.run
        return contract_by_operators(code, num_tokens, (x, *cores), shape, bias)

    def add(
        self,
        x: Tensor,
        cores: Sequence[Tensor],
        spec: TTSpec,
        config: PlanConfig,
    ) -> None:
        """Plan a call that has been checked, for the next of its kind.

        Args:
            x: ``(..., in_size)``.
            cores: The cores of the layer.
            spec: Shape of the weight, without padding; no rank is 0.
            config: How to plan.
        """
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
        program, num_tokens = linear_program(x, cores, spec, num_tokens_hint=1, **vars(config))
        shape = (*x.shape[:-1], spec.out_size)
        wanted = [core.requires_grad for core in cores]
        tracks = torch.is_grad_enabled()
        self._calls[x.shape, x.device, x.requires_grad, tracks] = _Call(
            config,
            (program, compiled(program), num_tokens, shape),
            [core.shape for core in cores],
            wanted,
            x.dtype,
            tracks and (x.requires_grad or any(wanted)),
        )


def is_unobserved(x: Tensor) -> bool:
    """Whether no tracer, transform, mode or autocast looks at the operators that are called."""
    return not (
        torch.compiler.is_compiling()  # first: dynamo goes no further
        or needs_plain_operators(x)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state() is not None
    )
