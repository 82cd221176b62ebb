"""What operators check of their inputs, and cast where autocast is on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from comera_fx.errors import InputError


def check_linear_input(x: Tensor, cores: list[Tensor], in_features: int) -> None:
    """Check the input of a linear layer.

    Raises:
        InputError: If its last axis is not ``in_features``, or its dtype not that of the cores.
    """
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise InputError(
            "input does not fit the TT linear layer",
            got=f"a tensor of shape {tuple(x.shape)}",
            expected=f"(..., {in_features}), the layer's in_features last",
            mend="check the layer that makes this input",
        )
    _check_same_dtype(x, cores)


def _check_same_dtype(x: Tensor, cores: list[Tensor]) -> None:
    if x.dtype != cores[0].dtype:
        to_x = f"model.to({x.dtype}) or " if x.is_floating_point() else ""
        raise InputError(
            "input and cores have different dtypes",
            got=f"input {x.dtype}, cores {cores[0].dtype}",
            expected="one dtype, or torch.autocast",
            mend=f"use {to_x}x.to({cores[0].dtype})",
        )


def _is_autocast_on(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def autocasted(
    x: Tensor, cores: list[Tensor], bias: Tensor | None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Cast as ``F.linear`` would: an active autocast takes all but float64 to its dtype."""
    device = x.device.type
    if not _is_autocast_on(device):
        return x, cores, bias
    dtype = torch.get_autocast_dtype(device)

    def cast_one(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast_one(x), [cast_one(c) for c in cores], None if bias is None else cast_one(bias)


def no_autocast(core: Tensor) -> AbstractContextManager[Any]:
    """Rows and matrices keep the cores' dtype, as those of a dense layer do under autocast."""
    device = core.device.type
    if not _is_autocast_on(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def can_look_at(ids: Tensor) -> bool:
    """Whether the numbers are at hand without a wait, and not those of a tracer or transform."""
    return (
        type(ids) is Tensor
        and ids.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def check_ids(ids: Tensor, num_embeddings: int) -> None:
    """Check row numbers of a table.

    Raises:
        InputError: If they are not integers, or, where one can look, out of range.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(
            "embedding ids are not int32 or int64",
            got=f"ids of dtype {ids.dtype}",
            expected="torch.int64 or torch.int32",
            mend="use ids.long()",
        )
    if can_look_at(ids) and ids.numel():
        least, most = (int(bound) for bound in ids.aminmax())
        if least < 0 or most >= num_embeddings:
            raise InputError(
                "embedding id out of range",
                got=f"ids from {least} to {most}",
                expected=f"0 to {num_embeddings - 1}",
                mend="check the tokenizer's vocabulary against num_embeddings",
            )
