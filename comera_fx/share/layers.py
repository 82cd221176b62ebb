"""The layers of a model that may share, grouped by what they have in common at the moment."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comera_fx.lower.chunk import Chains
from comera_fx.ops import spec_of
from comera_fx.plan.linear import bucket_tokens
from comera_fx.plan.shared import Sizes, check_seconds, plan_shared
from comera_fx.share.kept import KeptFactors
from comera_fx.spec import TTSpec
from comera_fx.tt_module import TTModule

MOST_DECISIONS = 64
"""Kinds of input that a group remembers; past that it forgets all of them."""


class Signature(NamedTuple):
    """What layers have in common whose factors are made at once.

    Args:
        shapes: Shapes of the cores.
        in_features: Size of the input.
        out_features: Size of the output.
        dtype: Of the cores.
        device: Of the cores.
        requires_grad: Whether the cores are trained.
        threshold: Of the rank weights; ``None`` without any.
    """

    shapes: tuple[torch.Size, ...]
    in_features: int
    out_features: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    threshold: float | None


def signature_of(layer: TTModule) -> Signature | None:
    """Return what a layer has in common with others now; ``None`` if it goes its own way."""
    cores = layer.cores
    first = cores[0]
    if not all(type(core) in (nn.Parameter, Tensor) for core in cores) or first.is_inference():
        return None
    if first.device.type == "meta" or first.is_complex() or not all(map(Tensor.numel, cores)):
        return None
    adapts = "rank_weight_1" in layer._parameters
    return Signature(
        tuple(core.shape for core in cores),
        layer._in_size,
        layer._out_size,
        first.dtype,
        first.device,
        first.requires_grad,
        layer.rank_threshold if adapts else None,
    )


class Group:
    """Layers of one signature.

    Args:
        layers: The layers.
        signature: What they have in common.
        spec: The shape of each.
    """

    def __init__(self, layers: Sequence[TTModule], signature: Signature) -> None:
        self.layers, self.signature = layers, signature
        self.spec: TTSpec = spec_of("tt", layers[0].num_in_modes, signature.shapes)
        self.first_cores = [layer.cores[0] for layer in layers]
        self.decisions: dict[Hashable, Decision | None] = {}
        self._chains: dict[Hashable, Chains] = {}

    def accepts(self, x: Tensor, cast: torch.dtype | None) -> bool:
        """Whether an input is one that a layer can be sure to accept."""
        signature = self.signature
        return (
            type(x) in (Tensor, nn.Parameter)
            and x.dim() > 0
            and x.numel() > 0
            and x.shape[-1] == signature.in_features
            and x.dtype in (signature.dtype, cast)
            and x.device == signature.device
        )

    def chains(
        self,
        num_layers: int,
        width: int,
        dtype: torch.dtype | None = None,
        without_head: bool = False,
    ) -> Chains:
        """Return how the factors of some of the layers are made; arguments as of ``Chains``."""
        key = num_layers, width, dtype, without_head
        if key not in self._chains:
            signature = self.signature
            self._chains[key] = Chains(
                self.spec,
                num_layers,
                signature.in_features,
                signature.out_features,
                width,
                dtype,
                signature.threshold or 0.0,
                without_head,
            )
        return self._chains[key]


@dataclass(frozen=True)
class Decision:
    """What is faster for a layer at some number of tokens.

    Args:
        sizes: What that depends on.
        width: Columns of left factors.
        without_head: Whether right factors are without their first core.
        makes: Whether to make the factors of the whole group.
        uses: Whether to use factors that are there.
        keeps: Whether to use factors that are kept from earlier passes; never in training.
    """

    sizes: Sizes
    width: int
    without_head: bool
    makes: bool
    uses: bool
    keeps: bool


class Layers:
    """The layers of a model that may share, grouped as they are now.

    Args:
        root: The model; only a weak reference to it is held.
        layers: Its layers.
        joint: Those that read one input.
    """

    def __init__(
        self, root: nn.Module, layers: Sequence[TTModule], joint: Sequence[Sequence[TTModule]]
    ) -> None:
        self.root = weakref.ref(root)
        self.layers = [layer for layer in layers if _may_share(layer)]
        able = [tuple(filter(_may_share, members)) for members in joint]
        self.joint = {layer: members for members in able if len(members) > 1 for layer in members}
        self.kept = KeptFactors()
        self.groups: dict[TTModule, Group] = {}
        self._num_passes = 0
        self.regroup()

    def regroup(self) -> None:
        """Group the layers by what their parameters are now."""
        root = self.root()
        found: dict[Signature, list[TTModule]] = {}
        # Under FSDP a layer's gradients are collected when its block is through, not at the end.
        if root is not None and not any(map(is_sharded, root.modules())):
            for layer in self.layers:
                signature = signature_of(layer)
                if signature is not None:
                    found.setdefault(signature, []).append(layer)
        groups = [Group(layers, signature) for signature, layers in found.items()]
        self.groups = {layer: group for group in groups for layer in group.layers}

    def refresh(self) -> None:
        """Look at one layer, and group anew if it is not what it was grouped by.

        Whoever makes factors looks at all of them; this is for changes, such as of the dtype, with
        which nobody would make any.
        """
        if not self.layers:
            return
        self._num_passes += 1
        layer = self.layers[self._num_passes % len(self.layers)]
        group = self.groups.get(layer)
        if signature_of(layer) != (group and group.signature):
            self.regroup()

    def kept_factors(
        self, layer: TTModule, group: Group, decision: Decision, given: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the factors that are kept of a layer, if there are any and they are to be used.

        Args:
            layer: A layer that is only evaluated.
            group: Its group.
            decision: What is faster for it.
            given: Its cores and rank weights.
        """
        if not decision.keeps or layer.training:
            return None
        kept = self.kept.factors(layer, given)
        if kept is None and self.kept.is_due(layer) and signature_of(layer) == group.signature:
            kept = self.kept.make(layer, group.chains(1, decision.width), given)
        return kept

    def decide(
        self, group: Group, x: Tensor, tracks: bool, cast: torch.dtype | None
    ) -> Decision | None:
        """Return what is faster for a layer, by prediction; ``None`` if it is to go its own way.

        Args:
            group: The layer's.
            x: Its input.
            tracks: Whether gradients are wanted.
            cast: What an autocast makes of the products, if it does.
        """
        key = type(x), x.shape, x.dtype, x.device, x.requires_grad, tracks, cast
        if key in group.decisions:
            return group.decisions[key]
        if len(group.decisions) >= MOST_DECISIONS:
            group.decisions.clear()
        decision = None
        if group.accepts(x, cast):
            sizes = Sizes(
                group.spec,
                bucket_tokens(x.numel() // x.shape[-1]),
                tracks and x.requires_grad,
                tracks and group.signature.requires_grad,
                (cast or x.dtype).itemsize,
                x.device.type,
            )
            decision = self._decide(group, sizes, cast)
        group.decisions[key] = decision
        return decision

    def _decide(self, group: Group, sizes: Sizes, cast: torch.dtype | None) -> Decision:
        num_layers = len(group.layers)
        trains = sizes.needs_input_grad or sizes.needs_core_grad
        plain = cast is None and group.signature.threshold is None
        can_split = plain and group.signature.out_features == group.spec.out_size
        inputs = {self.joint[layer] for layer in group.layers if layer in self.joint}
        whole = [members for members in inputs if all(self.groups.get(m) is group for m in members)]
        joint = tuple(sorted(map(len, whole)))
        shared = plan_shared(sizes, num_layers, can_split=can_split, joint=joint)
        alone = shared.apply_seconds + check_seconds(sizes)
        return Decision(
            sizes,
            shared.width,
            shared.without_head,
            makes=shared.wins(num_layers),
            uses=shared.apply_seconds < shared.own_seconds,
            keeps=not trains
            and cast is None
            and alone < shared.own_seconds
            and sizes.device_type == "cpu",
        )


def _may_share(layer: TTModule) -> bool:
    """Whether factors are a form of the layer, and time is what its plan is to save."""
    config = getattr(layer, "plan_config", None)
    return (
        layer.layout == "tt"
        and config is not None
        and config.objective == "time"
        and config.memory_limit_bytes is None
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's parameters are held in parts by several processes."""
    return any(
        cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__
    )
