"""Run programs of matrix products, with autograd.

In ordinary training a program runs inside one ``autograd.Function`` that saves what the plan
says. Where autograd has to see every step (``torch.func`` transforms, forward-mode
differentiation, tracing, and gradients of gradients), the same products run as plain operators,
so that no derivative is ever silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from comera_fx.lower.source import Compiled, compiled
from comera_fx.plan.program import Program

Shape = tuple[int, ...]


def contract(
    program: Program,
    num_tokens: int,
    leaves: Sequence[Tensor],
    shape: Shape,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the forward result of a program, differentiable in every wanted leaf.

    Args:
        program: What to run; the leaves that require grad must be among its wanted ones.
        num_tokens: Rows of the input; may be symbolic. 1 where there is none.
        leaves: The given tensors, each with the indices of its leaf in storage order, in any
            grouping into axes.
        shape: Shape of the result, in its indices' order, in any grouping into axes.
        bias: Added over the last axis of the result.
    """
    code = compiled(program)
    tracked = torch.is_grad_enabled() and (
        any(leaf.requires_grad for leaf in leaves) or (bias is not None and bias.requires_grad)
    )
    if tracked and not needs_plain_operators(leaves[0]):
        result: Tensor = _Contraction.apply((program, code, num_tokens, shape), bias, *leaves)  # type: ignore[no-untyped-call]
        return result
    return contract_by_operators(code, num_tokens, leaves, shape, bias)


def contract_by_operators(
    code: Compiled, num_tokens: int, leaves: Sequence[Tensor], shape: Shape, bias: Tensor | None
) -> Tensor:
    """Return the forward result by plain operators; arguments as of ``contract``."""
    return _forward(code, num_tokens, leaves, shape, bias)[0]


def needs_plain_operators(tensor: Tensor) -> bool:
    """Whether something looks at single operators: a transform, a tracer, forward-mode.

    Complex numbers too: the products of the backward pass do not conjugate.
    """
    return (
        type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
        or tensor.is_complex()
    )


def _forward(
    code: Compiled, num_tokens: int, leaves: Sequence[Tensor], shape: Shape, bias: Tensor | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the result and the messages that backward reads."""
    if bias is not None and code.forward_bias is not None:
        result, *messages = code.forward_bias(num_tokens, shape, bias, *leaves)
        return result, messages
    result, *messages = code.forward(num_tokens, shape, *leaves)
    return (result if bias is None else result + bias), messages


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: tuple[Program, Compiled, int, Shape],
        bias: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        program, code, num_tokens, shape = run
        ctx.folded = bias is not None and code.forward_folded is not None
        if ctx.folded:
            assert code.forward_folded is not None
            result, *messages = code.forward_folded(num_tokens, shape, bias, *leaves)
        else:
            result, messages = _forward(code, num_tokens, leaves, shape, bias)
        kept_leaves = [leaves[slot] for slot in program.kept if slot < program.num_leaves]
        ctx.save_for_backward(*kept_leaves, *messages)
        ctx.run = code, num_tokens, len(kept_leaves), [leaf.shape for leaf in leaves]
        ctx.bias_size = None if bias is None else bias.shape[0]
        # A view made in here could not be changed in place afterwards, as a layer's output may.
        owned: Tensor = torch.ops.aten._unsafe_view(result, shape) if result._is_view() else result
        return owned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        code, num_tokens, num_leaves, shapes = ctx.run
        kept = ctx.saved_tensors
        with_graph = torch.is_grad_enabled()
        if ctx.folded and not with_graph:
            return None, *code.backward_folded(num_tokens, shapes, grad, *kept)
        if with_graph:
            # A graph of the backward pass is wanted: saved messages have no history, so they
            # are made again from the leaves, which have.
            leaves = kept[:num_leaves]
            kept = (*leaves, *code.recompute(num_tokens, *leaves))
        grad_bias = None
        if ctx.bias_size is not None and ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, ctx.bias_size).sum(0)
        return None, grad_bias, *code.backward(num_tokens, shapes, grad, *kept)


# ``Function.apply`` looks for functorch transforms first, which ``needs_plain_operators`` has ruled
# out; the method below it does the rest.
contract_directly: Callable[..., Tensor] = super(torch.autograd.Function, _Contraction).apply
"""``(run, bias, *leaves)``: the contraction inside one autograd node, where no transform is on."""
