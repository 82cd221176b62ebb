"""TT rounding: ranks that the weights do not need are cut, within a given error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from comera_fx.balance import Directions
from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.train.adaptable import check_unclaimed
from comera_fx.train.adapted import AdaptedLayers
from comera_fx.train.methods import above_error


def compact(
    model: nn.Module, tol: float, optimizers: Optimizer | Sequence[Optimizer] = ()
) -> float:
    """Round the weights of all TT layers to the smallest ranks within an error.

    Cores come into balanced form: every index of a bond is a singular direction, strongest first.
    Where a ``RankAdapter`` is at work use its method of this name.

    Args:
        model: A model from ``optimize``.
        tol: Relative Frobenius error allowed in each layer; 0 cuts only ranks that hold nothing.
            It is of all that the cores hold: where the modes' products are larger than the layer,
            what a layer computes with may come out somewhat worse.
        optimizers: All that hold the cores; their state follows.

    Returns:
        A bound on the largest relative error that was made in a layer, of all that its cores hold:
        the errors of its bonds, added in squares.

    Raises:
        RankError: If ``tol`` is out of range, the model has no trainable TT layer or is a
            ``RankAdapter``'s, a core is not finite, or the state of an optimizer cannot follow;
            nothing has changed.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011, Algorithm 2 (rounding); from memory.

    Example:
        >>> error = comera_fx.train.compact(model, tol=0.01)
        >>> error <= 0.01
        True
    """
    check_tolerance(tol)
    layers = AdaptedLayers(model, _held(model, optimizers), RankConfig(), None)
    check_unclaimed(layers.by_name)
    return compact_layers(layers, tol)


def _held(model: object, optimizers: object) -> list[Optimizer]:
    """The optimizers, which may be none, of types that ``compact`` takes."""
    held = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    wanted = [("model", model, nn.Module), *(("optimizer", each, Optimizer) for each in held)]
    for name, value, kind in wanted:
        if not isinstance(value, kind):
            raise RankError(
                f"compact got the wrong type of {name}",
                got=type(value).__name__,
                expected="an nn.Module, a tolerance, and a torch optimizer or several",
                mend="write compact(model, 0.01, optimizer), or leave the optimizer out",
            )
    return [each for each in held if isinstance(each, Optimizer)]


def check_tolerance(tol: float) -> None:
    """Raise unless a layer may have such an error.

    Raises:
        RankError: If it is no number from 0 to 1.
    """
    if isinstance(tol, bool) or not isinstance(tol, (int, float)) or not 0 <= tol < 1:
        raise RankError(
            "the tolerance of compact is out of range",
            got=repr(tol),
            expected="a relative error, 0 <= tol < 1",
            mend="use tol=0.01 for 1 %",
        )


def compact_layers(layers: AdaptedLayers, tol: float) -> float:
    """Round all layers; see ``compact``."""
    layers.check_can_change()
    layers.check_finite()
    kept, floors = layers.balanced(), layers.floors
    cut = {
        name: [_first(bond, tol / math.sqrt(len(own)), floors[name]) for bond in own]
        for name, own in kept.items()
    }
    layers.turn(cut, by_method=False)
    errors = [
        math.sqrt(sum(_dropped(bond, small) for bond, small in zip(own, cut[name], strict=True)))
        for name, own in kept.items()
    ]
    return max(errors, default=0.0)


def _first(bond: Directions, tol: float, floor: int) -> Directions:
    """Keep the fewest directions, but not below the floor, whose loss is within the error."""
    return bond.first(max(above_error(bond.values, tol), floor))


def _dropped(bond: Directions, small: Directions) -> float:
    squares = bond.values.square()
    total = squares.sum()
    return float(squares[len(small.values) :].sum() / total) if bool(total) else 0.0
