"""Time linear layers in TT form, each alone, beside its dense counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comera_fx.lower.timing import medians
from comera_fx.modules import TTLinear, tt_modules

SECONDS = 0.5
"""How long two layers take turns."""


@dataclass(frozen=True)
class Measured:
    """Seconds of forward and backward of a layer, and of the dense layer of its sizes."""

    seconds: float
    dense_seconds: float


def measure_layers(model: nn.Module, num_tokens: Mapping[str, int]) -> dict[str, Measured]:
    """Return what each ``TTLinear`` of a model takes, by its first name; equal ones share a figure.

    Copies run, on inputs made for it, every gradient wanted: the model, its gradients and the
    random number generators stay as they are, and its hooks are not called. Rank weights are
    multiplied into the copies' cores. Layers without values or without ranks are left out.

    Args:
        model: The model.
        num_tokens: Rows of input, by name; others have as many as they were planned for.
    """
    found: dict[tuple[object, ...], Measured] = {}
    measured = {}
    for name, layer in tt_modules(model):
        if not isinstance(layer, TTLinear) or layer.cores[0].is_meta or 0 in layer.spec.ranks:
            continue
        core, tokens = layer.cores[0], num_tokens.get(name) or layer.num_tokens_hint
        sizes = layer.in_features, layer.out_features
        has_bias = layer.bias is not None
        key = layer.spec, sizes, has_bias, layer.plan_config, core.dtype, core.device, tokens
        if key not in found:
            found[key] = _measure(layer, tokens)
        measured[name] = found[key]
    return measured


def _measure(layer: TTLinear, num_tokens: int) -> Measured:
    # Whatever the caller's mode, what is timed is training.
    device_type = layer.cores[0].device.type
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device_type, enabled=False),
    ):
        runs = {
            "tt": _both_ways(_copy(layer), num_tokens),
            "dense": _both_ways(_dense(layer), num_tokens),
        }
        times = medians(runs, device_type, seconds=SECONDS)
    return Measured(times["tt"], times["dense"])


def _copy(layer: TTLinear) -> TTLinear:
    """Return a layer of the same cores that shares nothing with it."""
    core = layer.cores[0]
    copy = TTLinear(
        layer.spec,
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        num_tokens_hint=layer.num_tokens_hint,
        plan=layer.plan_config,
        device="meta",  # no numbers are drawn there
        dtype=core.dtype,
    ).to_empty(device=core.device)
    with torch.no_grad():
        for own, given in zip(copy.cores, layer.effective_cores(), strict=True):
            own.copy_(given)
        if copy.bias is not None:
            copy.bias.fill_(0.5)
    return copy


def _dense(layer: TTLinear) -> nn.Linear:
    core, has_bias = layer.cores[0], layer.bias is not None
    dense = nn.Linear(
        layer.in_features, layer.out_features, has_bias, device="meta", dtype=core.dtype
    ).to_empty(device=core.device)
    with torch.no_grad():
        for param in dense.parameters():
            param.fill_(1 / layer.in_features)
    return dense


def _both_ways(layer: TTLinear | nn.Linear, num_tokens: int) -> Callable[[], object]:
    wanted = list(layer.parameters())
    like = wanted[0].detach()
    x, grad = (
        like.new_full((num_tokens, size), 0.5) for size in (layer.in_features, layer.out_features)
    )
    wanted.append(nn.Parameter(x))

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(wanted[-1]), wanted, grad)

    return run
