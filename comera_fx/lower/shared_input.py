"""Apply the factors of one or more layers to one input: ``y_i = (x L_i) R_i + b_i``.

With several layers their left factors stand side by side in one product, forward, for the input's
gradient and for their own. What is kept is the input, the middle and the factors. A middle whose
ranks fill no whole tiles is stored with the tokens as columns, which autograd's own rules for
products keep up through the backward pass.

Shape legend: T tokens, I in, O out, r a layer's middle rank, m the sum of these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_fx.lower.execute import needs_plain_operators
from comera_fx.lower.partial import PartialBackward
from comera_fx.plan.shared import stores_transposed


def apply_factors(
    x: Tensor,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return the outputs of layers that read one input.

    A layer whose output gets no gradient has none either: its factors' gradients stay ``None``.

    Args:
        x: ``(..., I)``.
        lefts: ``(I, r)`` each.
        rights: ``(r, O)`` each.
        biases: ``(O,)`` each, or ``None``.
    """
    if needs_plain_operators(x):
        return _plain(x, lefts, rights, biases)
    num_tokens = x.numel() // max(x.shape[-1], 1)
    device_type = x.device.type
    transposed = any(stores_transposed(num_tokens, t.shape[1], device_type) for t in lefts)
    if len(lefts) == 1:
        return [_single(x, lefts[0], rights[0], biases[0], transposed)]
    given = (x, *lefts, *rights, *biases)
    outputs: Sequence[Tensor] = _SharedInput.apply(len(lefts), transposed, *given)  # type: ignore[no-untyped-call]
    return list(outputs)


def _plain(
    x: Tensor,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    if len(lefts) == 1:
        return [_product(x @ lefts[0], rights[0], biases[0])]
    middles = (x @ torch.cat(list(lefts), 1)).split([left.shape[1] for left in lefts], -1)
    return [_product(*each) for each in zip(middles, rights, biases, strict=True)]


def _product(middle: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return middle @ right if bias is None else F.linear(middle, right.t(), bias)


def _single(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    if not transposed:
        return _product(x @ left, right, bias)
    x_TI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    middle_rT = torch.mm(left.t(), x_TI.t())
    if bias is None:
        y_TO = torch.mm(middle_rT.t(), right)
    else:
        y_TO = torch.addmm(bias, middle_rT.t(), right)
    return y_TO if x.dim() == 2 else y_TO.reshape(*x.shape[:-1], right.shape[1])


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, num: int, transposed: bool, x: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        lefts, rights, biases = given[:num], given[num : 2 * num], given[2 * num :]
        x_TI, left_Im = x.reshape(-1, x.shape[-1]), torch.cat(lefts, 1)
        middle_Tm = _product_with(x_TI, left_Im, transposed)
        stops = list(accumulate(left.shape[1] for left in lefts))
        ctx.columns = columns = list(zip([0, *stops], stops, strict=False))
        outputs = []
        for (start, stop), right_rO, bias in zip(columns, rights, biases, strict=True):
            middle_Tr = middle_Tm[:, start:stop]
            if bias is None:
                y_TO = torch.mm(middle_Tr, right_rO)
            else:
                y_TO = torch.addmm(bias, middle_Tr, right_rO)
            # A view made in here could not be changed in place afterwards.
            shape = (*x.shape[:-1], right_rO.shape[1])
            outputs.append(y_TO if x.dim() == 2 else torch.ops.aten._unsafe_view(y_TO, shape))
        ctx.save_for_backward(x, left_Im, middle_Tm, *rights)
        ctx.set_materialize_grads(False)
        ctx.transposed, ctx.given = transposed, given
        ctx.versions = [None if t is None else t._version for t in given]
        ctx.partial = PartialBackward(num)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num = len(grads)
        results: list[Tensor | None] = [None] * (_FIRST + 3 * num)
        chosen = [k for k, grad in enumerate(grads) if grad is not None]
        if not chosen:
            return tuple(results)
        x, left_Im, middle_Tm, *rights = ctx.partial.saved(ctx, set(chosen))
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, x, grads)
        needs, columns = ctx.needs_input_grad, ctx.columns
        x_TI = x.reshape(-1, x.shape[-1])
        if len(chosen) < num:
            left_Im = torch.cat([left_Im[:, slice(*columns[k])] for k in chosen], 1)
        shape = (x_TI.shape[0], left_Im.shape[1])
        dmiddle_Tm = x.new_empty(shape[::-1]).t() if ctx.transposed else x.new_empty(shape)
        widths = [columns[k][1] - columns[k][0] for k in chosen]
        for k, dmiddle_Tr in zip(chosen, dmiddle_Tm.split(widths, 1), strict=True):
            dy_TO = grads[k].reshape(-1, grads[k].shape[-1])  # type: ignore[union-attr]
            _mm_into(dmiddle_Tr, dy_TO, rights[k].t(), ctx.transposed)
            if needs[_FIRST + num + k]:
                middle_rT = middle_Tm[:, slice(*columns[k])].t()
                results[_FIRST + num + k] = torch.mm(middle_rT, dy_TO)
            if needs[_FIRST + 2 * num + k]:
                results[_FIRST + 2 * num + k] = dy_TO.sum(0)
        if needs[_FIRST - 1]:
            results[_FIRST - 1] = torch.mm(dmiddle_Tm, left_Im.t()).reshape(x.shape)
        if any(needs[_FIRST + k] for k in chosen):
            dleft_Im = _product_with(x_TI.t(), dmiddle_Tm, ctx.transposed)
            results[_FIRST : _FIRST + num] = _spread(dleft_Im.split(widths, 1), chosen, num)
        return tuple(results)


_FIRST = 3
"""Place of the first factor among the arguments of ``_SharedInput``, after number, order and x."""


def _product_with(left: Tensor, right: Tensor, transposed: bool) -> Tensor:
    """Return ``left right``, stored by columns where ``transposed``."""
    return torch.mm(right.t(), left.t()).t() if transposed else torch.mm(left, right)


def _spread(parts: Sequence[Tensor], places: Sequence[int], num: int) -> list[Tensor | None]:
    by_place = dict(zip(places, parts, strict=True))
    return [by_place.get(place) for place in range(num)]


def _mm_into(out: Tensor, left: Tensor, right: Tensor, transposed: bool) -> None:
    if transposed:
        torch.mm(right.t(), left.t(), out=out.t())
    else:
        torch.mm(left, right, out=out)


def _differentiable_gradients(
    ctx: Any, x: Tensor, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return gradients that have a graph: the outputs concerned are made again."""
    given, num = ctx.given, len(grads)
    if [None if t is None else t._version for t in given] != ctx.versions:
        raise RuntimeError(
            "a factor of a TT layer has been modified by an inplace operation between the forward "
            "pass and a backward pass with create_graph=True"
        )
    chosen = [k for k, grad in enumerate(grads) if grad is not None]
    with torch.enable_grad():
        made = _plain(x, *([given[part * num + k] for k in chosen] for part in range(3)))
    inputs = {_FIRST - 1: x} if x.requires_grad else {}
    inputs |= {
        place: tensor
        for place, tensor in enumerate(given, start=_FIRST)
        if tensor is not None and tensor.requires_grad and (place - _FIRST) % num in chosen
    }
    found = torch.autograd.grad(
        made,
        list(inputs.values()),
        [grad for grad in grads if grad is not None],
        create_graph=True,
        allow_unused=True,
    )
    results: list[Tensor | None] = [None] * (_FIRST + 3 * num)
    for place, grad in zip(inputs, found, strict=True):
        results[place] = grad
    return tuple(results)
