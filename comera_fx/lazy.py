"""A tensor that is computed when its numbers are read.

Much code outside reads ``layer.weight.dtype`` or ``.device`` and never the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from comera_fx.errors import InputError

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_meta")
_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size")
_ANSWERED = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
}


class LazyWeight(Tensor):
    """Stands for a tensor of known shape, dtype and device; any reading of numbers builds it.

    Changing it in place is refused, since that would change a temporary.
    """

    _build: Callable[[], Tensor]
    _requires_grad: bool

    @staticmethod
    def of(
        shape: tuple[int, ...],
        like: Tensor,
        build: Callable[[], Tensor],
        requires_grad: bool | None = None,
    ) -> LazyWeight:
        """Return the tensor that ``build`` makes when needed.

        Args:
            shape: Its shape.
            like: A tensor of its dtype and device, which requires grad if it does.
            build: Makes it.
            requires_grad: Whether it requires grad, if not as ``like`` does.
        """
        lazy: LazyWeight = Tensor._make_wrapper_subclass(
            LazyWeight, shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        lazy._build = build
        lazy._requires_grad = like.requires_grad if requires_grad is None else requires_grad
        return lazy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no numbers; build the tensor for the rest."""
        kwargs = kwargs or {}
        if func in _ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return args[0]._requires_grad
        if func == Tensor.grad.__get__:  # type: ignore[union-attr]
            return None
        if func == Tensor.__deepcopy__:
            return args[0]._build().detach()
        if func in (Tensor.detach, torch.detach):
            lazy = args[0]
            return LazyWeight.of(tuple(lazy.shape), lazy, lambda: lazy._build().detach(), False)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0]
        changed = (args[0] if args else kwargs.get("tensor"), kwargs.get("out"))
        if any(isinstance(tensor, LazyWeight) for tensor in changed[not _changes(name) :]):
            raise InputError(
                "the weight of a TT layer cannot be changed in place",
                got=f"{name} on the dense view of a tensor-train weight",
                expected="reading only: the numbers are held by the cores",
                mend="change the dense model before comera_fx.optimize, or change layer.cores",
            )
        args, kwargs = tree_map_only(LazyWeight, lambda lazy: lazy._build(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Build the tensor for calls that come from below Python's own dispatch."""
        args, kwargs = tree_map_only(LazyWeight, lambda lazy: lazy._build(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyWeight(shape={tuple(self.shape)}, dtype={self.dtype})"


def _changes(name: str) -> bool:
    """Whether a function of this name changes its first argument, or hangs something on it."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__", "register_hook", "retain_grad")
