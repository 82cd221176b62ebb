"""What the TT layers of a model share during one forward pass of it.

A hook on the model opens a ``RootForward`` on its thread and closes it when the pass is over, also
on exceptions; in between each layer asks ``take`` for its output. Nothing is made before a layer
asks. The first layer of a group of equal shapes has the factors of all of them made at once, and
the first of several that read one input has the outputs of all of them made. A layer uses these
only if it would compute the same by itself: its parameters are the same objects at the same
version, and the thread's state (gradients, autocast, saved-tensor hooks, modes) is that in which
the pass began. In any doubt ``take`` says ``None``, and the layer goes its own way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from comera_fx.lower.factors import make_factors
from comera_fx.lower.shared_input import apply_factors
from comera_fx.plan.shared import joint_saving
from comera_fx.share.layers import Decision, Group, Layers, Signature, is_sharded, signature_of
from comera_fx.tt_module import TTModule


class _Thread(threading.local):
    """The forward passes that are under way on a thread, outermost first."""

    def __init__(self) -> None:
        self.forwards: list[RootForward] = []


_thread = _Thread()


def take(layer: TTModule, x: Tensor) -> Tensor | None:
    """Return the layer's output if the forward pass under way has it, ``None`` if it has not."""
    if torch.compiler.is_compiling():
        return None
    forwards = _thread.forwards
    return forwards[-1].take(layer, x) if forwards else None


def enter(root: nn.Module, find: Callable[[nn.Module], Layers]) -> None:
    """Open a forward pass of ``root`` on this thread, unless something looks at single operators.

    One that was left open, as by an interrupt, is dropped first.

    Args:
        root: The model.
        find: Returns its layers.
    """
    leave(root)
    state = thread_state()
    if state is None:
        return
    layers = find(root)
    layers.refresh()
    if root.training or torch.is_grad_enabled():
        layers.kept.clear()
    _thread.forwards.append(RootForward(root, layers, state))


def leave(root: nn.Module) -> None:
    """Close the forward pass of ``root`` on this thread, if there is one, and all within it."""
    forwards = _thread.forwards
    for depth in range(len(forwards) - 1, -1, -1):
        if forwards[depth].root is root:
            del forwards[depth:]


def thread_state() -> Hashable | None:
    """Return what a forward pass depends on besides tensors.

    ``None`` where something looks at single operators: a tracer, a transform, forward-mode
    differentiation. Saved-tensor hooks are part of it: a block that is checkpointed has its own.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return None
    autocast = None
    if torch._C._is_any_autocast_enabled():
        autocast = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


class _Entry(NamedTuple):
    """The factors of one layer, and what they were made of."""

    given: tuple[Tensor, ...]
    versions: list[int]
    left: Tensor
    right: Tensor
    head: Tensor | None

    def is_current(self, given: Sequence[Tensor]) -> bool:
        """Whether a layer's parameters still are what the factors were made of."""
        return len(given) == len(self.given) and all(
            [
                now is then and now._version == version
                for now, then, version in zip(given, self.given, self.versions, strict=True)
            ]
        )


class _Output(NamedTuple):
    """The output of one layer, and what it was made of."""

    x: Tensor
    version: int
    bias: Tensor | None
    bias_version: int
    y: Tensor

    def fits(self, x: Tensor, bias: Tensor | None) -> bool:
        """Whether the layer would compute the same of ``x``, its factors being current."""
        return (
            x is self.x
            and x._version == self.version
            and bias is self.bias
            and (bias is None or bias._version == self.bias_version)
        )


class RootForward:
    """One forward pass of a model on one thread.

    Args:
        root: The model.
        layers: Its layers.
        state: The thread's state at the start.
    """

    def __init__(self, root: nn.Module, layers: Layers, state: Hashable) -> None:
        self.root, self.layers, self.state = root, layers, state
        self.entries: dict[TTModule, _Entry] = {}
        self.outputs: dict[TTModule, _Output] = {}
        self.tracks = torch.is_grad_enabled()

    def take(self, layer: TTModule, x: Tensor) -> Tensor | None:
        """Return the layer's output of ``x``, or ``None`` where it has to compute by itself."""
        group = self.layers.groups.get(layer)
        if group is None:
            return None
        cast = _autocast_dtype(group.signature)
        decision = self.layers.decide(group, x, self.tracks, cast)
        if decision is None or not (decision.makes or decision.keeps or layer in self.entries):
            return None
        if self.state != thread_state():
            return None
        given, bias = given_of(layer), layer._parameters["bias"]
        output = self.outputs.pop(layer, None)
        if output is not None and output.fits(x, bias):
            return output.y if self.entries[layer].is_current(given) else None
        kept = self.layers.kept_factors(layer, group, decision, given)
        if kept is not None:
            return apply_factors(x, kept[:1], kept[1:], (bias,))[0]
        entry = self._entry(layer, group, decision, cast)
        if entry is None or not entry.is_current(given):
            return None
        members = self.layers.joint.get(layer, ())
        if members and self._make_outputs(members, x, cast):
            return self.outputs.pop(layer).y
        return apply_factors(x, (entry.left,), (entry.right,), (bias,), (entry.head,))[0]

    def _entry(
        self, layer: TTModule, group: Group, decision: Decision, cast: torch.dtype | None
    ) -> _Entry | None:
        """Return the layer's factors, if it is to use them; the first of a group makes all."""
        entry = self.entries.get(layer)
        if entry is not None:
            return entry if decision.uses else None
        if not decision.makes:
            return None
        if self._is_as_grouped(group):
            self._make_factors(group, decision, cast)
            return self.entries[layer]
        self.layers.regroup()
        return None  # what is called next finds the new groups

    def _is_as_grouped(self, group: Group) -> bool:
        """Whether the layers still have in common what they were grouped by."""
        if any([signature_of(layer) != group.signature for layer in group.layers]):
            return False
        first_cores = [layer.cores[0] for layer in group.layers]
        if any([now is not then for now, then in zip(first_cores, group.first_cores, strict=True)]):
            if any(map(is_sharded, self.root.modules())):
                return False
            group.first_cores = first_cores
        return True

    def _make_factors(self, group: Group, decision: Decision, cast: torch.dtype | None) -> None:
        members = [member for member in group.layers if member not in self.entries]
        every = [given_of(member) for member in members]
        chains = group.chains(len(members), decision.width, cast, decision.without_head)
        num_cores, place = group.spec.num_cores, chains.num_in
        cores = [list(given[:num_cores]) for given in every]
        heads: list[Tensor | None] = [None] * len(members)
        if decision.without_head:
            heads = [of_layer.pop(place) for of_layer in cores]
        weights = [tensor for given in every for tensor in given[num_cores:]]
        lefts, rights = make_factors(chains, list(chain.from_iterable(cores)), weights)
        for member, given, left, right, head in zip(
            members, every, lefts, rights, heads, strict=True
        ):
            versions = [tensor._version for tensor in given]
            self.entries[member] = _Entry(given, versions, left, right, head)

    def _make_outputs(
        self, members: Sequence[TTModule], x: Tensor, cast: torch.dtype | None
    ) -> bool:
        """Make the outputs of layers that read one input, if that is faster; say whether."""
        # An output that nobody came for was made in vain: do not go on with it.
        if x.is_inference() or any([member in self.outputs for member in members]):
            return False
        if any(map(_may_change_input, members)) or _has_global_hooks():
            return False
        entries, sizes, widths = [], [], []
        for member in members:
            group = self.layers.groups.get(member)
            if group is None:
                return False
            decision = self.layers.decide(group, x, self.tracks, cast)
            if decision is None:
                return False
            entry = self._entry(member, group, decision, cast)
            if entry is None or not entry.is_current(given_of(member)):
                return False
            entries.append(entry)
            sizes.append(decision.sizes)
            widths.append(entry.left.shape[1])
        if joint_saving(tuple(sizes), tuple(widths)) <= 0:
            return False
        biases = [member._parameters["bias"] for member in members]
        ys = apply_factors(
            x if cast is None else x.to(cast),
            [entry.left for entry in entries],
            [entry.right for entry in entries],
            biases,
            [entry.head for entry in entries],
        )
        for member, bias, y in zip(members, biases, ys, strict=True):
            version = 0 if bias is None else bias._version
            self.outputs[member] = _Output(x, x._version, bias, version, y)
        return True


def given_of(layer: TTModule) -> tuple[Tensor, ...]:
    """Return a layer's cores, then its rank weights."""
    return (*layer.cores, *layer.rank_weights)


def _autocast_dtype(signature: Signature) -> torch.dtype | None:
    """Return what an active autocast casts the products to, if they are not that already."""
    kind = signature.device.type
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return None if signature.dtype in (torch.float64, dtype) else dtype


def _may_change_input(layer: TTModule) -> bool:
    """Whether calling a layer does more than to run its forward on the input given."""
    return bool(
        layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in vars(layer)
    )


def _has_global_hooks() -> bool:
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]
