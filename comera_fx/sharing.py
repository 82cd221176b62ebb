"""The hook by which the layers of an optimised model share: installed on the model itself.

It holds names only, so it is copied and pickled with the model, and adds nothing to its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from comera_fx.modules import TTLinear
from comera_fx.share.forward import enter, leave
from comera_fx.share.layers import Layers


class ShareForward:
    """Opens a forward pass of a model, within which its layers share; see ``share.forward``.

    Args:
        names: Layers that may share, by qualified name.
        joint: Those among them that read one input.
    """

    def __init__(self, names: Sequence[str], joint: Sequence[Sequence[str]] = ()) -> None:
        self.names, self.joint = tuple(names), tuple(map(tuple, joint))
        self._layers: Layers | None = None

    def __call__(self, root: nn.Module, args: object) -> None:
        """Open a forward pass of ``root``."""
        if torch.compiler.is_compiling():  # first: dynamo goes no further
            return
        if torch._C._get_tracing_state() is not None:  # sizes are tensors there
            return
        enter(root, self._layers_of)

    def _layers_of(self, root: nn.Module) -> Layers:
        layers = self._layers
        if layers is None or layers.root() is not root:
            layers = self._layers = self._find(root)
        return layers

    def _find(self, root: nn.Module) -> Layers:
        """Return the layers that still are where they were; others may have taken their place."""
        modules = dict(root.named_modules(remove_duplicate=False))
        found = {name: modules.get(name) for name in self.names}
        layers = {name: module for name, module in found.items() if isinstance(module, TTLinear)}
        joint = [tuple(layers[name] for name in names if name in layers) for names in self.joint]
        once = list(dict.fromkeys(layers.values()))
        return Layers(root, once, [members for members in joint if len(set(members)) > 1])

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names, "joint": self.joint, "_layers": None}

    def __repr__(self) -> str:
        return f"ShareForward({len(self.names)} layers, {len(self.joint)} joint inputs)"


class EndForward:
    """Closes what ``ShareForward`` opened, also where the forward pass raises."""

    def __call__(self, root: nn.Module, args: object, output: object) -> None:
        """Close the forward pass of ``root``."""
        if not torch.compiler.is_compiling():
            leave(root)

    def __repr__(self) -> str:
        return "EndForward()"


def install(root: nn.Module, names: Sequence[str], joint: Sequence[Sequence[str]] = ()) -> None:
    """Let the layers of ``root`` share; what was installed on it before goes.

    Args:
        root: The model.
        names: Its layers that may share, by qualified name.
        joint: Those among them that read one input.
    """
    uninstall(root)
    if names:
        root.register_forward_pre_hook(ShareForward(names, joint))
        root.register_forward_hook(EndForward(), always_call=True)


def uninstall(root: nn.Module) -> None:
    """Undo ``install``."""
    for key, hook in list(root._forward_pre_hooks.items()):
        if isinstance(hook, ShareForward):
            del root._forward_pre_hooks[key]
    for key, hook in list(root._forward_hooks.items()):
        if isinstance(hook, EndForward):
            del root._forward_hooks[key]
            root._forward_hooks_always_called.pop(key, None)
