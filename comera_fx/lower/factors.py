"""The two factors of weights in layout "tt", ``W^T = L R``, for many equal-shaped layers at once.

Cut at its middle bond a tensor train is the product of two matrices: L, of all input cores, and
R, of all output cores. They hold no activation. For equal-shaped layers the k-th cores are stacked,
and each step of the chains is one batched product: few large launches in place of many small ones.
Every read is a view, and L comes out as ``(in, r)``, R as ``(r, out)``, as tokens are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comera_fx.lower.chunk import Chains, Chunk
from comera_fx.lower.execute import needs_plain_operators
from comera_fx.lower.partial import PartialBackward
from comera_fx.plan.cost import cost_model
from comera_fx.spec import TTSpec

MOST_FILLING = 1.25
"""How many times the middle rank a width may be that is chosen without knowing the tokens."""


def factors(
    cores: Sequence[Tensor],
    spec: TTSpec,
    num_layers: int,
    features: tuple[int, int],
    *,
    without_head: bool = False,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the left and the right factors of equal-shaped layers.

    Args:
        cores: The cores, one layer after another.
        spec: Shape of each layer, in layout "tt".
        num_layers: Number of layers.
        features: Rows of the left factors and columns of the right ones.
        without_head: Whether the right factors are made without their first cores, which then are
            not among the cores given.

    Returns:
        Factors whose width the device's products like, the middle rank filled up with zeros; the
        middle rank itself where the first cores are left out.
    """
    middle = spec.middle_rank
    padded = cost_model(cores[0].device.type).padded(middle)
    width = padded if padded <= MOST_FILLING * middle and not without_head else middle
    chains = Chains(spec, num_layers, *features, width, without_head=without_head)
    return make_factors(chains, cores)


def make_factors(
    chains: Chains, cores: Sequence[Tensor], weights: Sequence[Tensor] = ()
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the left and the right factors, one of each a layer.

    Cores of a layer whose factors get no gradient get none either: theirs stays ``None``.

    Args:
        chains: What to make.
        cores: The cores, one layer after another.
        weights: Rank weights of the inner bonds, one layer after another; none, or all.

    Returns:
        Factors ``(in_features, r)`` and ``(r, out_features)``, r the width.
    """
    given = (*cores, *weights)
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    made: Sequence[Tensor]
    if tracked and not (cores[0].is_complex() or needs_plain_operators(cores[0])):
        made = _Factors.apply(chains, *given)  # type: ignore[no-untyped-call]
    else:
        made = _forward(chains, given)[0]
    return made[: chains.num_layers], made[chains.num_layers :]


def _forward(chains: Chains, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return all left factors, then all right ones; and what backward reads."""
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    saved: list[Tensor] = []
    for layers in chains.chunks_on(given[0].device.type):
        chunk = Chunk.of(chains, given, layers)
        left, right = chunk.factors()
        lefts += left.unbind(0)
        rights += right.unbind(0)
        saved += chunk.saved()
    return (*lefts, *rights), saved


class _Factors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chains: Chains, *given: Tensor) -> tuple[Tensor, ...]:
        made, saved = _forward(chains, given)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        # Not saved by autograd: stacking copied them, and only gradients of gradients read them.
        ctx.chains, ctx.given = chains, given
        ctx.versions = [tensor._version for tensor in given]
        num, num_cores = chains.num_layers, chains.num_cores
        frozen: list[Tensor] = []
        if len(given) == num * num_cores:  # rank weights adapt, so none of their cores is frozen
            needs = ctx.needs_input_grad[1:]
            if not any(need for k, need in enumerate(needs) if k % num_cores < chains.num_in):
                frozen += made[:num]
            if not any(need for k, need in enumerate(needs) if k % num_cores >= chains.num_in):
                frozen += made[num:]
        ctx.mark_non_differentiable(*frozen)
        ctx.partial = PartialBackward(len(made) - len(frozen))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * (1 + len(ctx.given))
        if torch.is_grad_enabled():
            return (None, *_differentiable_gradients(ctx, grads))
        saved = ctx.partial.saved(ctx, {k for k, grad in enumerate(grads) if grad is not None})
        return (None, *_gradients(ctx.chains, ctx.given, saved, grads))


def _gradients(
    chains: Chains,
    given: Sequence[Tensor],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradient of each core and rank weight, ``None`` where its factor has none."""
    results: list[Tensor | None] = [None] * len(given)
    chunks = chains.chunks_on(given[0].device.type)
    num_saved = len(saved) // len(chunks)
    for number, layers in enumerate(chunks):
        tensors = saved[number * num_saved : (number + 1) * num_saved]
        for is_left in (True, False):
            of_side = grads[: chains.num_layers] if is_left else grads[chains.num_layers :]
            chosen = {layer: grad for layer in layers if (grad := of_side[layer]) is not None}
            if not chosen:
                continue
            held = tensors
            if len(chosen) < len(layers):
                rows = [layer - layers.start for layer in chosen]
                held = [tensor[rows] for tensor in tensors]
            chunk = Chunk.from_saved(chains, held)
            stacked = torch.stack(tuple(chosen.values()))
            _place(chunk, chunk.gradients(stacked, is_left=is_left), list(chosen), is_left, results)
    dtypes = {tensor.dtype for tensor in given}
    if chains.dtype is None or dtypes == {chains.dtype}:
        return results
    return [g if g is None else g.to(t.dtype) for g, t in zip(results, given, strict=True)]


def _place(
    chunk: Chunk,
    gradients: Sequence[Tensor],
    layers: Sequence[int],
    is_left: bool,
    results: list[Tensor | None],
) -> None:
    """Give every core and rank weight on one side of some layers its part of the gradients."""
    chains = chunk.chains
    num_cores, num_bonds = chains.num_cores, chains.num_cores - 1
    first_weight = chains.num_layers * num_cores
    for core, stacked in enumerate(gradients, start=0 if is_left else chains.num_in):
        grad, of_weights = chunk.unscaled(core, stacked)
        for layer, part in zip(layers, grad.unbind(0), strict=True):
            results[layer * num_cores + core] = part
        for bond, of_weight in of_weights:
            for layer, part in zip(layers, of_weight.unbind(0), strict=True):
                results[first_weight + layer * num_bonds + bond] = part


def _differentiable_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that have a graph: the chains of the layers concerned are made again."""
    chains: Chains = ctx.chains
    given: tuple[Tensor, ...] = ctx.given
    if [tensor._version for tensor in given] != ctx.versions:
        raise RuntimeError(
            "a core of a TT layer has been modified by an inplace operation between the forward "
            "pass and a backward pass with create_graph=True"
        )
    num, num_cores = chains.num_layers, chains.num_cores
    layers = [n for n in range(num) if not (grads[n] is None and grads[num + n] is None)]
    first, num_bonds = num * num_cores, (num_cores - 1 if len(given) > num * num_cores else 0)
    chosen = [k for layer in layers for k in range(layer * num_cores, (layer + 1) * num_cores)]
    chosen += [first + k for n in layers for k in range(n * num_bonds, (n + 1) * num_bonds)]
    some = replace(chains, num_layers=len(layers))
    with torch.enable_grad():
        made = _forward(some, [given[k] for k in chosen])[0]
    wanted = [grads[layer] for layer in layers] + [grads[num + layer] for layer in layers]
    outputs = [(m, g) for m, g in zip(made, wanted, strict=True) if g is not None]
    inputs = [k for k in chosen if given[k].requires_grad]
    found = torch.autograd.grad(
        [output for output, _ in outputs],
        [given[k] for k in inputs],
        [grad for _, grad in outputs],
        create_graph=True,
        allow_unused=True,
    )
    results: list[Tensor | None] = [None] * len(given)
    for k, grad in zip(inputs, found, strict=True):
        results[k] = grad
    return results
