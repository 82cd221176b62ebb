"""Operators that run faster on a CPU by others, where the graph runs operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
BITS = 16
"""Random bits for each element of a dropout: a share is kept to within 2^-17 of what was asked."""


def faster_on_cpu() -> dict[Any, Callable[..., Any]]:
    """Return decompositions for AOTAutograd; on other devices they leave operators as they are."""
    return {
        aten.native_dropout.default: _dropout,
        aten.native_dropout_backward.default: _dropout_backward,
    }


def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """Dropout that takes four elements from each random number in place of one.

    Torch's own draws one number an element, one after another. The numbers are others, from the
    same generator, and the mask comes scaled, in the input's dtype.
    """
    is_plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not is_plain or not train or not 0 < p < 1:
        return NotImplemented
    most = (1 << (BITS - 1)) - 1
    dropped_to = most - round((1 - p) * (1 << BITS))
    num = x.numel()
    words = aten.randint.low(-(1 << 63), (1 << 63) - 1, [(num + 3) // 4], dtype=torch.int64)
    bits = words.view(torch.int16)[:num].view(x.shape)
    # Whole numbers above the bound become 1, the others 0: arithmetic on floats is vectorised,
    # comparisons of small integers are not.
    mask = (bits.to(torch.float32) - dropped_to).clamp(0, 1) * (1 / (1 - p))
    mask = mask.to(x.dtype)
    return x * mask, mask


def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    if mask.dtype == torch.bool:
        return NotImplemented
    return grad * mask
