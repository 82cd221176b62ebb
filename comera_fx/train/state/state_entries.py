"""What an entry of an optimizer's state is: an average of what, over which axes of its parameter.

Classes of torch and transformers are known by name and entry. Of others, entries shaped like the
parameter are known where their names are; what else can be told is told by the shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Meaning:
    """What an entry is an average of, and the axis that it is also a mean over, if any."""

    like: Literal["gradient", "parameter"]
    form: Literal["signed", "squared", "absolute"]
    averaged: int | None = None


@dataclass(frozen=True)
class Entry:
    """An entry's meaning, if known, and the parameter's axis that each of its own stands for."""

    meaning: Meaning | None
    axes: tuple[int | None, ...]


class UnfitError(Exception):
    """Why an entry cannot follow a change, in a few words."""


_GRADIENT = Meaning("gradient", "signed")
_SQUARES = Meaning("gradient", "squared")
_LARGEST = Meaning("gradient", "absolute")
_MOVES = Meaning("parameter", "signed")
_SQUARED_MOVES = Meaning("parameter", "squared")
_ROWS = Meaning("gradient", "squared", averaged=-1)
_COLUMNS = Meaning("gradient", "squared", averaged=-2)

_BY_CLASS: dict[str, dict[str, Meaning]] = {
    "SGD": {"momentum_buffer": _GRADIENT},
    "Adam": {"exp_avg": _GRADIENT, "exp_avg_sq": _SQUARES, "max_exp_avg_sq": _SQUARES},
    "NAdam": {"exp_avg": _GRADIENT, "exp_avg_sq": _SQUARES},
    "RAdam": {"exp_avg": _GRADIENT, "exp_avg_sq": _SQUARES},
    "Adamax": {"exp_avg": _GRADIENT, "exp_inf": _LARGEST},
    "Adagrad": {"sum": _SQUARES},
    # Its momentum is of the steps, after their division by the root of the squares.
    "RMSprop": {"square_avg": _SQUARES, "grad_avg": _GRADIENT, "momentum_buffer": _MOVES},
    "Adadelta": {"square_avg": _SQUARES, "acc_delta": _SQUARED_MOVES},
    # Torch's keeps the averaged axis as one of size 1, that of Hugging Face leaves it out. The
    # scale of the rows cancels in both, so a mean over an axis that changes stays as it is.
    "Adafactor": {
        "row_var": _ROWS,
        "col_var": _COLUMNS,
        "variance": _SQUARES,
        "exp_avg_sq_row": _ROWS,
        "exp_avg_sq_col": _COLUMNS,
        "exp_avg_sq": _SQUARES,
        "exp_avg": _MOVES,
    },
}
"""Class name, of the optimizer or a base of it, to what its entries mean: classes of torch and
transformers only, as others have taken the names with other layouts."""

_BY_NAME = {**_BY_CLASS["Adam"], "momentum_buffer": _GRADIENT}
"""What entries of these names mean in optimizers of other classes, where shaped like the
parameter: Lion, LAMB and their like took the names with the meaning."""

_NUMBERS = ("step", "mu_product", "RMS")
"""Entries that are one number, also where the parameter itself has one element."""


def sharing(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and those that it wraps without a state of its own."""
    inner = [v for v in vars(optimizer).values() if isinstance(v, Optimizer)]
    shared = [v for v in inner if v.state is optimizer.state]
    return [optimizer, *(holder for v in shared for holder in sharing(v))]


def resolve(optimizer: Optimizer, key: str, value: Any, parameter: Tensor) -> Entry | None:
    """Return what an entry is, or ``None`` for one that stays as it is.

    Raises:
        UnfitError: If it can be neither.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return None
    if not isinstance(value, Tensor):
        raise UnfitError(f"a {type(value).__name__}")
    if value.ndim == 0 or (value.numel() == 1 and key in _NUMBERS):
        return None
    meaning = _by_class(optimizer, key)
    if meaning is None and value.numel() == 1 and value.shape != parameter.shape:
        return None
    if type(value) not in (Tensor, nn.Parameter):
        raise UnfitError(f"a tensor of class {type(value).__name__}")
    if not value.is_floating_point():
        raise UnfitError(f"{value.dtype} of shape {tuple(value.shape)}, as of a quantized state")
    if meaning is not None:
        return Entry(meaning, _axes_by_name(value, parameter, meaning))
    if value.shape == parameter.shape:
        return Entry(_BY_NAME.get(key), tuple(range(value.ndim)))
    return Entry(None, _axes_by_shape(value, parameter))


def _by_class(optimizer: Optimizer, key: str) -> Meaning | None:
    for cls in (cls for holder in sharing(optimizer) for cls in type(holder).__mro__):
        if cls.__name__ in _BY_CLASS and cls.__module__.split(".")[0] in ("torch", "transformers"):
            return _BY_CLASS[cls.__name__].get(key)
    return None


def _axes_by_name(value: Tensor, parameter: Tensor, meaning: Meaning) -> tuple[int | None, ...]:
    if meaning.averaged is None:
        if value.shape == parameter.shape:
            return tuple(range(parameter.ndim))
    else:
        for axes, shape in _averaged(parameter, meaning.averaged % parameter.ndim):
            if value.shape == shape:
                return axes
    raise UnfitError(f"shape {tuple(value.shape)}")


def _axes_by_shape(value: Tensor, parameter: Tensor) -> tuple[int | None, ...]:
    found = [
        axes
        for axis in range(parameter.ndim)
        for axes, shape in _averaged(parameter, axis)
        if value.shape == shape
    ]
    if len(found) > 1:
        raise UnfitError(f"shape {tuple(value.shape)}, of which axes cannot be told")
    if not found:
        raise UnfitError(f"shape {tuple(value.shape)}")
    return found[0]


def _averaged(
    parameter: Tensor, axis: int
) -> Iterator[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """Yield the layouts of a mean over one axis: kept with size 1, and left out."""
    shape, axes = list(parameter.shape), list(range(parameter.ndim))
    yield (*axes[:axis], None, *axes[axis + 1 :]), (*shape[:axis], 1, *shape[axis + 1 :])
    yield (*axes[:axis], *axes[axis + 1 :]), (*shape[:axis], *shape[axis + 1 :])
