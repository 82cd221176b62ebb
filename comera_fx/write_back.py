"""Put TT layers into the user's own model, or into a copy of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from comera_fx.errors import CaptureError, ConfigError
from comera_fx.modules import TTModule


def write_back(
    model: nn.Module, replacements: Mapping[nn.Module, TTModule], *, inplace: bool
) -> nn.Module:
    """Return the model with each old layer replaced by its new one, under all of its names.

    The copy is made by ``copy.deepcopy`` and so keeps the class, training flags, parameters
    tied among themselves and state outside of modules; the dense weights that go are never
    copied. With ``inplace`` only the model's registered children change: a layer that is also
    kept in a plain list stays the old one there.

    Args:
        model: The user's model.
        replacements: Old layer to new layer; the old ones are modules of ``model``.
        inplace: Change ``model`` itself and return it.

    Returns:
        The copy, or ``model``.

    Raises:
        CaptureError: If the model cannot be copied.
        ConfigError: If ``inplace`` and ``model`` itself is to be replaced.
    """
    if inplace:
        _check_inplace(model, replacements)
        _replace_children(model, replacements)
        return model
    # With these entries deepcopy takes the new layer wherever it meets the old one.
    memo: dict[int, Any] = {id(old): new for old, new in replacements.items()}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied",
            got=f"{type(error).__name__}: {error}".splitlines()[0],
            expected="a model that copy.deepcopy accepts",
            mend="use inplace=True, which changes the model itself",
        ) from error
    _check_copy(copied, replacements)
    assert isinstance(copied, nn.Module), "a model is copied into a model"
    return copied


def _check_inplace(model: nn.Module, replacements: Mapping[nn.Module, TTModule]) -> None:
    """A module cannot turn into another one while its caller holds on to it."""
    if model in replacements:
        raise ConfigError(
            "a model that is itself one layer cannot be changed in place",
            got=f"inplace=True for a {type(model).__name__}",
            expected="a module that holds layers",
            mend="leave inplace=False and use the result: layer = comera_fx.optimize(layer)",
        )


def _replace_children(model: nn.Module, replacements: Mapping[nn.Module, TTModule]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                # Not by register_module: a class that refuses would leave half of it done.
                parent._modules[name] = replacements[child]


def _check_copy(copied: Any, replacements: Mapping[nn.Module, TTModule]) -> None:
    """A class may define a copy of its own that loses what was replaced."""
    held = set(copied.modules()) if isinstance(copied, nn.Module) else set()
    if not held.issuperset(replacements.values()):
        raise CaptureError(
            "the copy of the model does not hold the layers that were replaced in it",
            got=f"a {type(copied).__name__} whose class has a __deepcopy__ of its own",
            expected="a __deepcopy__ that passes its memo on",
            mend="use inplace=True, which changes the model itself",
        )
