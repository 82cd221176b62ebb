"""Run programs of matrix products, with autograd.

In ordinary training a program runs inside one ``autograd.Function`` that saves what the plan
says. Where autograd has to see every step (``torch.func`` transforms, forward-mode
differentiation, tracing, and gradients of gradients), the same products run as plain operators,
so that no derivative is ever silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from comera_fx.plan.program import Product, Program, Read

Shape = tuple[int, ...]


class _View(NamedTuple):
    """A ``Read`` with the number of tokens filled in."""

    slot: int
    shape: Shape
    axes: Shape | None
    final: Shape
    transposed: bool

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        tensor = tensors[self.slot]
        assert tensor is not None, "the program reads a tensor that it has freed"
        view = tensor.reshape(self.shape)
        if self.axes is not None:
            view = view.permute(self.axes).reshape(self.final)
        return view.t() if self.transposed else view


class _Step(NamedTuple):
    """A ``Product`` with the number of tokens filled in."""

    out: int
    left: _View
    right: _View
    free: tuple[int, ...]


class BoundProgram(NamedTuple):
    """A program for one number of tokens, ready to run."""

    program: Program
    forward: tuple[_Step, ...]
    result: _View
    backward: tuple[_Step, ...]
    gradients: tuple[_View | None, ...]
    recompute: tuple[_Step, ...]


def bind(program: Program, num_tokens: int) -> BoundProgram:
    """Fill in the number of tokens; ``num_tokens`` may be symbolic."""
    if type(num_tokens) is int:
        return _bind_cached(program, num_tokens)
    return _bind(program, num_tokens)


def _bind(program: Program, num_tokens: int) -> BoundProgram:
    def sizes(shape: Shape) -> Shape:
        return tuple(-size * num_tokens if size < 0 else size for size in shape)

    def view(read: Read) -> _View:
        return _View(read.slot, sizes(read.shape), read.axes, sizes(read.final), read.transposed)

    def steps(products: Iterable[Product]) -> tuple[_Step, ...]:
        return tuple(_Step(p.out, view(p.left), view(p.right), p.free) for p in products)

    return BoundProgram(
        program,
        steps(program.forward),
        view(program.result),
        steps(program.backward),
        tuple(None if read is None else view(read) for read in program.gradients),
        steps(program.recompute),
    )


_bind_cached = lru_cache(maxsize=4096)(_bind)


def contract(
    bound: BoundProgram, leaves: Sequence[Tensor], shape: Shape, bias: Tensor | None = None
) -> Tensor:
    """Return the forward result of a program, differentiable in every wanted leaf.

    Args:
        bound: The program; the leaves that require grad must be among its wanted ones.
        leaves: The given tensors, each with the indices of its leaf in storage order, in any
            grouping into axes.
        shape: Shape of the result, in its indices' order, in any grouping into axes.
        bias: Added over the last axis of the result.
    """
    tracked = torch.is_grad_enabled() and (
        any(leaf.requires_grad for leaf in leaves) or (bias is not None and bias.requires_grad)
    )
    if tracked and not needs_plain_operators(leaves[0]):
        result: Tensor = _Contraction.apply(bound, shape, bias, *leaves)  # type: ignore[no-untyped-call]
        return result
    tensors: list[Tensor | None] = [*leaves]
    return _run_forward(bound, tensors, shape, bias)


def needs_plain_operators(tensor: Tensor) -> bool:
    """Whether something looks at single operators: a transform, a tracer, forward-mode."""
    return (
        type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
    )


def _run(steps: Sequence[_Step], tensors: list[Tensor | None]) -> None:
    for step in steps:
        tensors[step.out] = torch.mm(step.left.of(tensors), step.right.of(tensors))
        for slot in step.free:
            tensors[slot] = None


def _run_forward(
    bound: BoundProgram, tensors: list[Tensor | None], shape: Shape, bias: Tensor | None
) -> Tensor:
    """Fill ``tensors`` up with the forward messages and return the result."""
    program, steps = bound.program, bound.forward
    tensors += [None] * (program.num_slots - len(tensors))
    fused = bias is not None and program.bias_fits
    _run(steps[:-1] if fused else steps, tensors)
    if fused:
        last = steps[-1]
        assert bias is not None
        return torch.addmm(bias, last.left.of(tensors), last.right.of(tensors)).reshape(shape)
    result = bound.result.of(tensors).reshape(shape).contiguous()
    if not steps:
        result = result.clone()  # else the result would be the leaf itself
    return result if bias is None else result + bias


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bound: BoundProgram, shape: Shape, bias: Tensor | None, *leaves: Tensor
    ) -> Tensor:
        program = bound.program
        tensors: list[Tensor | None] = [*leaves]
        result = _run_forward(bound, tensors, shape, bias)
        kept = (leaves[s] if s < program.num_leaves else tensors[s] for s in program.kept)
        ctx.save_for_backward(*kept)
        ctx.bound = bound
        ctx.bias_size = None if bias is None else bias.shape[0]
        ctx.leaf_shapes = [t.shape for t in leaves]
        # A view made in here could not be changed in place afterwards, as a layer's output may.
        return torch.ops.aten._unsafe_view(result, shape) if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bound: BoundProgram = ctx.bound
        program = bound.program
        tensors: list[Tensor | None] = [None] * program.num_slots
        for slot, tensor in zip(program.kept, ctx.saved_tensors, strict=True):
            tensors[slot] = tensor
        if torch.is_grad_enabled():
            # A graph of the backward pass is wanted: saved messages have no history, so they
            # are made again from the leaves, which have.
            _run(bound.recompute, tensors)
        tensors[program.num_leaves] = grad
        grad_bias = None
        if ctx.bias_size is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, ctx.bias_size).sum(0)
        _run(bound.backward, tensors)
        gradients = (
            None if read is None else read.of(tensors).reshape(size)
            for read, size in zip(bound.gradients, ctx.leaf_shapes, strict=True)
        )
        return (None, None, grad_bias, *gradients)
