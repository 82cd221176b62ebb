"""Apply the factors of one or more layers to one input: ``y_i = (x L_i) R_i + b_i``.

With several layers their left factors stand side by side in one product, forward, for the input's
gradient and for their own. What is kept is the input, the middle and the factors.

A right factor may come as two, its first core H and the rest R: with few tokens ``(x L) H`` takes
less than H R does. The middle's rows then are (token, mode of H).

Shape legend: T tokens, I in, O out, r a layer's middle rank, m the sum of these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera_fx.lower.execute import needs_plain_operators
from comera_fx.lower.partial import PartialBackward

BY_COLUMNS_FROM = 1024
"""Number of tokens from which right factors are stored by columns for the backward pass: their
gradients then are products of many rows, which several threads share better."""


def apply_factors(
    x: Tensor,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    heads: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Return the outputs of layers that read one input.

    A layer whose output gets no gradient has none either: its factors' gradients stay ``None``.

    Args:
        x: ``(..., I)``.
        lefts: ``(I, r)`` each.
        rights: ``(r, O)`` each; without its first core ``(s, O / mode)``.
        biases: ``(O,)`` each, or ``None``.
        heads: The first core ``(r, mode, s)`` of each right factor that is without it.
    """
    x_TI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    plain = x.is_complex() or needs_plain_operators(x)
    middles: Sequence[Tensor]
    if len(lefts) == 1:
        middles = (torch.mm(x_TI, lefts[0]),)
    elif plain:
        middles = _plain_middles(x_TI, lefts)
    else:
        middles = _SharedInput.apply(x_TI, *lefts)  # type: ignore[no-untyped-call]
    heads = (None,) * len(lefts) if heads is None else heads
    if not plain and x_TI.shape[0] >= BY_COLUMNS_FROM:
        rights = [_by_columns(right) for right in rights]
    outputs = map(_output, middles, heads, rights, biases)
    if x.dim() == 2:
        return list(outputs)
    return [y_TO.reshape(*x.shape[:-1], y_TO.shape[1]) for y_TO in outputs]


def _output(middle_Tr: Tensor, head: Tensor | None, right: Tensor, bias: Tensor | None) -> Tensor:
    if head is not None:
        rank, mode, last = head.shape
        rows = torch.mm(middle_Tr, head.reshape(rank, mode * last)).reshape(-1, last)
        y_TO = torch.mm(rows, right).reshape(middle_Tr.shape[0], mode * right.shape[1])
        return y_TO if bias is None else y_TO + bias
    return torch.mm(middle_Tr, right) if bias is None else torch.addmm(bias, middle_Tr, right)


def _by_columns(right: Tensor) -> Tensor:
    tracked = right.requires_grad and torch.is_grad_enabled()
    return right.t().contiguous().t() if tracked else right


def _plain_middles(x_TI: Tensor, lefts: Sequence[Tensor]) -> Sequence[Tensor]:
    middle_Tm = torch.mm(x_TI, torch.cat(list(lefts), 1))
    return torch.split_with_sizes(middle_Tm, [left.shape[1] for left in lefts], 1)


class _SharedInput(torch.autograd.Function):
    """The middles of several layers, made in one product; one node, as if each had its own."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, *lefts: Tensor) -> tuple[Tensor, ...]:
        left_Im = torch.cat(lefts, 1)
        ctx.save_for_backward(x_TI, left_Im)
        ctx.set_materialize_grads(False)
        ctx.lefts, ctx.versions = lefts, [left._version for left in lefts]
        ctx.widths = [left.shape[1] for left in lefts]
        ctx.partial = PartialBackward(len(lefts))
        return tuple(torch.split_with_sizes(torch.mm(x_TI, left_Im), ctx.widths, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = {k: grad for k, grad in enumerate(grads) if grad is not None}
        if not given:
            return (None,) * (1 + len(grads))
        x_TI, left_Im = ctx.partial.saved(ctx, set(given))
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, x_TI, given)
        if len(given) < len(grads):
            parts = torch.split_with_sizes(left_Im, ctx.widths, 1)
            left_Im = torch.cat([parts[k] for k in given], 1)
        dmiddle_Tm = torch.cat(tuple(given.values()), 1)
        dx_TI = torch.mm(dmiddle_Tm, left_Im.t()) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return (dx_TI, *(None for _ in grads))
        dleft_Im = torch.mm(x_TI.t(), dmiddle_Tm)
        parts = torch.split_with_sizes(dleft_Im, [ctx.widths[k] for k in given], 1)
        dlefts = dict(zip(given, parts, strict=True))
        return (dx_TI, *(dlefts.get(k) for k in range(len(grads))))


def _differentiable_gradients(
    ctx: Any, x_TI: Tensor, grads: dict[int, Tensor]
) -> tuple[Tensor | None, ...]:
    """Return gradients that have a graph: the middles concerned are made again."""
    lefts: tuple[Tensor, ...] = ctx.lefts
    if [left._version for left in lefts] != ctx.versions:
        raise RuntimeError(
            "a factor of a TT layer has been modified by an inplace operation between the forward "
            "pass and a backward pass with create_graph=True"
        )
    with torch.enable_grad():
        made = _plain_middles(x_TI, [lefts[k] for k in grads])
    inputs = {0: x_TI, **{1 + k: lefts[k] for k in grads}}
    inputs = {place: tensor for place, tensor in inputs.items() if tensor.requires_grad}
    found = torch.autograd.grad(
        made, list(inputs.values()), list(grads.values()), create_graph=True
    )
    by_place = dict(zip(inputs, found, strict=True))
    return tuple(by_place.get(place) for place in range(1 + len(lefts)))
