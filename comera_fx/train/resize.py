"""Cut ranks for good: out of cores, rank weights, their gradients and the optimizer's state.

The parameter objects stay the same, so optimizers, hooks and names go on holding them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from comera_fx.errors import RankError
from comera_fx.modules import TTModule, replace_data

Axes = tuple[tuple[int, Tensor], ...]
"""Pairs of axis and the indices kept along it."""


def check_state(
    optimizers: Sequence[torch.optim.Optimizer], modules: Iterable[tuple[str, TTModule]]
) -> None:
    """Raise unless every state entry of every TT parameter can be cut.

    State tensors shaped like the parameter are cut with it; numbers and one-element tensors
    are kept as they are.

    Raises:
        RankError: On any other entry, by name.
    """
    for name, module in modules:
        for parameter in (*module.cores, *module.rank_weights):
            for optimizer in optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if _is_scalar(value) or _is_like(value, parameter):
                        continue
                    is_tensor = isinstance(value, Tensor)
                    got = f"shape {tuple(value.shape)}" if is_tensor else type(value)
                    raise RankError(
                        f"the optimizer state {key!r} of layer {name!r} cannot be cut with its "
                        "ranks",
                        got=f"{type(optimizer).__name__} state {key!r}: {got}",
                        expected=f"a tensor of the parameter's shape {tuple(parameter.shape)}, "
                        "or a number",
                        mend="use SGD, Adam or AdamW, or exclude the layer in RankConfig.exclude",
                    )


def cut_ranks(
    module: TTModule, kept: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Keep only the given indices of every inner bond of a module.

    Args:
        module: The module; it has rank weights.
        kept: One tensor of indices per inner bond, left to right, in rising order. If any is
            empty the whole weight is zero, and all of them become empty.
        optimizers: Hold the parameters; their state must have passed ``check_state``.
    """
    if any(indices.numel() == 0 for indices in kept):
        kept = [indices[:0] for indices in kept]
    for parameter, axes in _axes_of(module, kept):
        _cut(parameter, axes, optimizers)


def _axes_of(module: TTModule, kept: Sequence[Tensor]) -> Iterator[tuple[nn.Parameter, Axes]]:
    last = module.num_cores - 1
    for k, core in enumerate(module.cores):
        left = () if k == 0 else ((0, kept[k - 1]),)
        right = () if k == last else ((core.ndim - 1, kept[k]),)
        yield core, (*left, *right)
    for weight, indices in zip(module.rank_weights, kept, strict=True):
        yield weight, ((0, indices),)


def _cut(parameter: nn.Parameter, axes: Axes, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if all(parameter.shape[axis] == indices.numel() for axis, indices in axes):
        return
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if _is_like(value, parameter):
                state[key] = _select(value, axes)
    grad = None if parameter.grad is None else _select(parameter.grad, axes)
    replace_data(parameter, _select(parameter.detach(), axes))
    parameter.grad = grad


def _select(tensor: Tensor, axes: Axes) -> Tensor:
    for axis, indices in axes:
        tensor = tensor.index_select(axis, indices)
    return tensor.contiguous()


def _is_scalar(value: object) -> bool:
    return (
        value is None
        or isinstance(value, (bool, int, float))
        or (isinstance(value, Tensor) and value.numel() == 1)
    )


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
