"""An optimizer's state of one parameter, as the parameter gets another shape or another basis.

What becomes of an entry depends on what it is an average of (``like``) and how (``form``):

| | select | pad | turn: v -> A v B |
|---|---|---|---|
| signed | sliced | 0 | A, B |
| squared | sliced | the mean of what is there | A, B squared by the entry |
| absolute | sliced | the mean | the root of what happens to the squares |
| unknown, of the parameter's shape | sliced | all state of the parameter starts anew | the same |
| number, one element, ``None`` | kept | kept | kept |

Squares are right in expectation where entries are uncorrelated. ``A`` and ``B`` are those of the
parameter or, for what is like a gradient, their inverse transposes: the gradient of ``A G B``.

Unknown entries start anew by forgetting the state, so that the optimizer sets it up as at its
first step. Zeros with the step count of old would be a divisor of 0 where the entry is one of
squares, and pull weights to 0 where it is a copy of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_fx.errors import RankError
from comera_fx.train.caller import warn
from comera_fx.train.state.state_entries import Entry, UnfitError, resolve, sharing

Axes = Sequence[tuple[int, Tensor]]
"""Pairs of axis and the indices kept along it."""


@dataclass(frozen=True)
class Basis:
    """A change of basis along one axis of a parameter.

    Args:
        axis: The axis.
        forward: ``(new, old)``, acts on the parameter.
        dual: ``(new, old)``, acts on its gradient.
    """

    axis: int
    forward: Tensor
    dual: Tensor


_WARNED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_DEPTH = 4
"""Containers within containers in which an optimizer's own buffers are looked for."""


# ---- before anything is changed ----


def check(optimizers: Sequence[Optimizer], parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise unless all state of the parameters can follow a change of shape or basis.

    Args:
        optimizers: Any of them may hold any of the parameters.
        parameters: Pairs of the layer's name and a parameter of it.

    Raises:
        RankError: Where an entry is neither shaped like the parameter, nor such with one axis
            averaged, nor a number; and where an optimizer has tensors outside its ``state``, or
            wraps one that is not given too.
    """
    parameters = list(parameters)
    for optimizer in optimizers:
        _check_type(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held or p in optimizer.state for _, p in parameters):
            continue
        _check_is_by_parameter(optimizer)
        _check_wraps_none(optimizer, optimizers)
        _check_keeps_no_more(optimizer, held)
        for name, parameter in parameters:
            _check_entries(optimizer, name, parameter)


def _check_type(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise RankError(
            "the state of this optimizer cannot follow a change of ranks",
            got=f"a {type(optimizer).__name__}",
            expected="a torch.optim.Optimizer, which keeps its state by parameter",
            mend="give a sequence of torch optimizers",
        )


def _check_is_by_parameter(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise RankError(
            "the state of LBFGS cannot follow a change of ranks",
            got="LBFGS, whose directions join all parameters",
            expected="state by parameter",
            mend="use SGD, Adam, AdamW or another first-order optimizer",
        )


def _check_wraps_none(optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
    for attribute, value in _own(optimizer):
        is_other = isinstance(value, Optimizer) and value.state is not optimizer.state
        if is_other and all(value is not known for known in optimizers):
            raise RankError(
                f"the optimizer wraps another, whose state would be left behind ({attribute})",
                got=f"{type(optimizer).__name__} around {type(value).__name__}",
                expected="an optimizer with one state, or all of them",
                mend=f"give {type(value).__name__} too, or train with it alone",
            )


def _check_keeps_no_more(optimizer: Optimizer, held: set[int]) -> None:
    """Refuse tensors outside ``state``: nothing says which parameter they belong to."""
    name = type(optimizer).__name__
    for attribute, value in _own(optimizer):
        if isinstance(value, Tensor) and value.numel() > 1 and id(value) not in held:
            raise RankError(
                f"the optimizer keeps tensors outside its state, in {attribute}",
                got=f"{name} with a tensor of shape {tuple(value.shape)} there",
                expected="all that belongs to a parameter in optimizer.state[parameter]",
                mend="use an optimizer of torch.optim for the TT layers",
            )


def _check_entries(optimizer: Optimizer, layer: str, parameter: nn.Parameter) -> None:
    for key, value in optimizer.state.get(parameter, {}).items():
        try:
            resolve(optimizer, key, value, parameter)
        except UnfitError as unfit:
            raise RankError(
                f"the optimizer state {key!r} of layer {layer!r} cannot follow a change of ranks",
                got=f"{type(optimizer).__name__} state {key!r}: {unfit}",
                expected=f"a tensor of the parameter's shape {tuple(parameter.shape)}, one of its "
                "axes averaged or not, or a number",
                mend="use an optimizer of torch.optim, or exclude the layer in RankConfig.exclude",
            ) from None


def _own(optimizer: Optimizer) -> Iterator[tuple[str, object]]:
    """Yield what lies in an optimizer's attributes and groups, with where it lies."""
    for holder in sharing(optimizer):
        for name, value in vars(holder).items():
            if name == "param_groups":
                value = [[v for k, v in group.items() if k != "params"] for group in value]
            elif name == "state":
                value = [v for key, v in value.items() if not isinstance(key, Tensor)]
            yield from _leaves(name, value, _DEPTH)


def _leaves(name: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        if depth:
            for item in value:
                yield from _leaves(name, item, depth - 1)
        return
    yield name, value


# ---- changes; the parameter still has its old shape ----


def select(optimizers: Sequence[Optimizer], parameter: nn.Parameter, axes: Axes) -> None:
    """Keep some indices along some axes."""

    def change(value: Tensor, entry: Entry) -> Tensor:
        for axis, indices in axes:
            if axis in entry.axes:
                value = value.index_select(entry.axes.index(axis), indices.to(value.device))
        return value.contiguous()

    _change(optimizers, parameter, change, needs_meaning=False)


def pad(
    optimizers: Sequence[Optimizer], parameter: nn.Parameter, counts: Mapping[int, int]
) -> None:
    """Append entries at the end of axes: 0, or the mean of those there for what is not signed.

    With 0 for its squares, Adam's first step in a new entry would be three times its rate.

    Args:
        optimizers: May hold the parameter.
        parameter: The parameter, not yet padded.
        counts: Axis to how many entries.
    """

    def change(value: Tensor, entry: Entry) -> Tensor:
        shape = [
            size + counts.get(-1 if axis is None else axis, 0)
            for size, axis in zip(value.shape, entry.axes, strict=True)
        ]
        padded = value.new_full(shape, _fresh(value, entry))
        padded[tuple(slice(size) for size in value.shape)] = value
        return padded

    _change(optimizers, parameter, change)


def turn(optimizers: Sequence[Optimizer], parameter: nn.Parameter, bases: Sequence[Basis]) -> None:
    """Follow a change of basis, computed in float64."""

    def change(value: Tensor, entry: Entry) -> Tensor:
        assert entry.meaning is not None
        form = entry.meaning.form
        turned = value.double().square() if form == "absolute" else value.double()
        for basis in bases:
            if basis.axis in entry.axes:
                matrix = basis.forward if entry.meaning.like == "parameter" else basis.dual
                matrix = (matrix if form == "signed" else matrix.square()).to(value.device)
                turned = along(turned, matrix, entry.axes.index(basis.axis))
        turned = turned.sqrt() if form == "absolute" else turned
        return turned.to(value.dtype).contiguous()

    _change(optimizers, parameter, change)


def renew(optimizers: Sequence[Optimizer], parameter: nn.Parameter, count: int) -> None:
    """Make the state that of a vector of new entries, of which there are ``count``."""

    def change(value: Tensor, entry: Entry) -> Tensor:
        return value.new_full((count,), _fresh(value, entry))

    _change(optimizers, parameter, change)


def along(tensor: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Multiply by a matrix ``(new, old)`` along one axis."""
    turned: Tensor = torch.tensordot(matrix, tensor, dims=([1], [axis]))
    return turned.movedim(0, axis)


def _fresh(value: Tensor, entry: Entry) -> float:
    assert entry.meaning is not None
    if entry.meaning.form == "signed" or not value.numel():
        return 0.0
    return float(value.double().mean())


def _change(
    optimizers: Sequence[Optimizer],
    parameter: nn.Parameter,
    change: Callable[[Tensor, Entry], Tensor],
    *,
    needs_meaning: bool = True,
) -> None:
    """Change all entries of a parameter that follow it, in each state once."""
    for optimizer in {id(optimizer.state): optimizer for optimizer in optimizers}.values():
        state = optimizer.state.get(parameter, {})
        entries = {k: resolve(optimizer, k, value, parameter) for k, value in state.items()}
        unknown = [k for k, entry in entries.items() if entry and entry.meaning is None]
        if needs_meaning and unknown:
            del optimizer.state[parameter]
            _warn_of_new_start(optimizer, unknown)
            continue
        with torch.no_grad():
            changed = {k: change(state[k], entry) for k, entry in entries.items() if entry}
        state.update(changed)


def _warn_of_new_start(optimizer: Optimizer, keys: list[str]) -> None:
    if optimizer in _WARNED:
        return
    _WARNED.add(optimizer)
    names = ", ".join(map(repr, keys))
    warn(
        f"it is not known what {names} of {type(optimizer).__name__} become as ranks grow or "
        "change their basis: the optimizer's state of the layers concerned starts anew."
    )
