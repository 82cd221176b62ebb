"""Which layers adapt, what their optimizer must hold, and what is said where that cannot work."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from comera_fx.config import RankConfig, RankMethod
from comera_fx.errors import RankError
from comera_fx.modules import TTModule, tt_modules
from comera_fx.train.caller import warn
from comera_fx.train.groups import RANK_LR_SCALE
from comera_fx.train.processes import unwrapped

_OWNERS: weakref.WeakKeyDictionary[TTModule, weakref.ref[object]] = weakref.WeakKeyDictionary()


def adaptable_layers(model: nn.Module, config: RankConfig) -> dict[str, TTModule]:
    """Return name to layer for every trainable TT layer that has a bond and is not excluded.

    Raises:
        RankError: If there is none, or ``exclude`` or ``min_ranks`` names none.
    """
    modules = dict(tt_modules(unwrapped(model)))
    fields = [("exclude", pattern) for pattern in config.exclude]
    for field, pattern in [*fields, *(("min_ranks", pattern) for pattern in config.min_ranks)]:
        if not any(fnmatchcase(name, pattern) for name in modules):
            close = difflib.get_close_matches(pattern, list(modules), n=3, cutoff=0)
            raise RankError(
                f"RankConfig.{field} has a pattern that matches no TT layer",
                got=repr(pattern),
                expected=f"an fnmatch pattern over names of TT layers, such as {close}",
                mend="correct the name, or use a wildcard such as '*.fc1'",
            )
    layers = {
        name: layer
        for name, layer in modules.items()
        if layer.num_cores > 1
        and all(core.requires_grad for core in layer.cores)
        and not any(fnmatchcase(name, pattern) for pattern in config.exclude)
    }
    if not layers:
        raise RankError(
            "the model has no TT layer whose ranks could adapt",
            got=f"{type(model).__name__} with {len(modules)} TT layers",
            expected="at least one trainable TT layer that RankConfig.exclude does not name",
            mend="call model = comera_fx.optimize(model) first, or shorten exclude",
        )
    return layers


def claim(adapter: object, layers: dict[str, TTModule]) -> None:
    """Note whose layers these are.

    Raises:
        RankError: If another adapter that is still in use has one of them.
    """
    name = _claimed(layers)
    if name is not None:
        raise RankError(
            "two adapters on one layer would cut each other's ranks",
            got=f"a second RankAdapter for layer {name!r}",
            expected="one adapter per layer",
            mend="go on with the first, delete it, or exclude the layer from one of them",
        )
    for layer in layers.values():
        _OWNERS[layer] = weakref.ref(adapter)


def check_unclaimed(layers: dict[str, TTModule]) -> None:
    """Raise where an adapter is at work, which would not know of a cut that it has not made.

    Raises:
        RankError: Naming the first such layer.
    """
    name = _claimed(layers)
    if name is not None:
        raise RankError(
            "a RankAdapter is at work on the model, and must make its cuts",
            got=f"compact(model, ..) with an adapter for layer {name!r}",
            expected="a model without an adapter that is still in use",
            mend="call adapter.compact(tol) instead, or delete the adapter first",
        )


def _claimed(layers: dict[str, TTModule]) -> str | None:
    """The first layer that an adapter in use has."""
    for name, layer in layers.items():
        owner = _OWNERS.get(layer)
        if owner is not None and owner() is not None:
            return name
    return None


def check_holds_cores(optimizers: Sequence[Optimizer], layers: dict[str, TTModule]) -> None:
    """Raise unless the optimizers train the cores of all layers.

    Raises:
        RankError: If it was built before ``optimize``, or from another model.
    """
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    missing = [
        name for name, layer in layers.items() if any(id(c) not in held for c in layer.cores)
    ]
    if missing:
        raise RankError(
            "the optimizer does not hold the model's cores",
            got=f"not all cores of {len(missing)} layers, the first of them {missing[0]!r}",
            expected="an optimizer built after comera_fx.optimize, from the optimised model",
            mend="build it with torch.optim.AdamW(comera_fx.param_groups(model, lr=1e-3))",
        )


def hand_over(optimizers: Sequence[Optimizer], layers: dict[str, TTModule]) -> None:
    """Give an optimizer the layers' rank weights, in a group of their own.

    Of several it is the first with a group made for them, or else the first that holds a core.

    They go to the group of ``param_groups`` made for them, or to a new one. Where they stand in
    another group, as after ``AdamW(model.parameters())`` on a resumed model, they leave it: there
    they would have the cores' rate and weight decay.
    """
    cores = {id(core) for layer in layers.values() for core in layer.cores}
    weights = [weight for layer in layers.values() for weight in layer.rank_weights]
    optimizer = _holder(optimizers, cores)
    own = [group for group in optimizer.param_groups if group.get("rank_weights")]
    ids = {id(weight) for weight in weights}
    for group in [group for each in optimizers for group in each.param_groups]:
        if not group.get("rank_weights"):
            group["params"] = [p for p in group["params"] if id(p) not in ids]
    if own:
        held = {id(p) for p in own[0]["params"]}
        own[0]["params"].extend(weight for weight in weights if id(weight) not in held)
        return
    lr = next(
        group["lr"]
        for group in optimizer.param_groups
        if any(id(p) in cores for p in group["params"])
    )
    lr = RANK_LR_SCALE * lr
    optimizer.add_param_group(
        {"params": weights, "lr": lr, "weight_decay": 0.0, "rank_weights": True}
    )


def check_can_hand_over(optimizers: Sequence[Optimizer], layers: dict[str, TTModule]) -> None:
    """Raise where ``hand_over`` would need a new group that the optimizer cannot take.

    Raises:
        RankError: For LBFGS, and for an optimizer that a scheduler knows the groups of.
    """
    optimizer = _holder(optimizers, {id(c) for layer in layers.values() for c in layer.cores})
    if not any(group.get("rank_weights") for group in optimizer.param_groups):
        _check_takes_groups(optimizer)


def _holder(optimizers: Sequence[Optimizer], cores: set[int]) -> Optimizer:
    for optimizer in optimizers:
        if any(group.get("rank_weights") for group in optimizer.param_groups):
            return optimizer
    return next(
        optimizer
        for optimizer in optimizers
        if any(id(p) in cores for group in optimizer.param_groups for p in group["params"])
    )


def _check_takes_groups(optimizer: torch.optim.Optimizer) -> None:
    mend = "build it from comera_fx.param_groups(model, lr=...), which has a group for them"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RankError(
            "rank adaptation needs an optimizer of several parameter groups",
            got="LBFGS, which takes one",
            expected="SGD, Adam, AdamW or another first-order optimizer",
            mend="use AdamW(comera_fx.param_groups(model, lr=1e-3))",
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise RankError(
            "a learning-rate scheduler was made before the rank weights had a group",
            got=f"{type(optimizer).__name__} with a scheduler and no group for rank weights",
            expected="a group for the rank weights that the scheduler knows",
            mend=f"{mend}, or make the scheduler after the RankAdapter",
        )


def check_types(model: object, optimizer: object, config: object) -> list[Optimizer]:
    """Return the optimizers; raise where something is of another kind than ``RankAdapter`` takes.

    Raises:
        RankError: Naming what is.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    wanted: tuple[tuple[str, object, type | tuple[type, ...]], ...] = (
        ("model", model, nn.Module),
        *(("optimizer", each, Optimizer) for each in optimizers or [None]),
        ("config", config, (RankConfig, type(None))),
    )
    for name, value, kind in wanted:
        if not isinstance(value, kind):
            raise RankError(
                f"RankAdapter got the wrong type of {name}",
                got=type(value).__name__,
                expected="an nn.Module, a torch optimizer or several, and a RankConfig",
                mend="write RankAdapter(model, optimizer, RankConfig(target_ratio=0.5))",
            )
    return [each for each in optimizers if isinstance(each, Optimizer)]


def check_copy(copy: nn.Module, layers: dict[str, TTModule]) -> dict[str, TTModule]:
    """Return the layers of a copy of the model, by the names they have in the model.

    Raises:
        RankError: If it lacks one of them, or has one in other modes, ranks or the same object.
    """
    inner = unwrapped(copy.module if isinstance(copy, AveragedModel) else copy)
    own = dict(tt_modules(inner))
    for name, layer in layers.items():
        other = own.get(name)
        if other is None or other is layer or other.spec != layer.spec:
            is_same = "the model's own" if other is layer else getattr(other, "spec", "no TT layer")
            raise RankError(
                f"what is to follow the model is not a copy of it in layer {name!r}",
                got=str(is_same),
                expected=f"another layer of {layer.spec}",
                mend="make the copy of the model as it is now: copy.deepcopy(model)",
            )
    return {name: own[name] for name in layers}


PARTS = ("stages", "method_state", "deaths", "growth", "finite", "watch")
"""Entries of an adapter's state that have entries of their own."""


def missing_entries(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return what a state lacks of an adapter's own, as ``"stages.num_steps"`` for a part's."""
    missing: list[str] = []
    for name, value in own.items():
        entry = state.get(name)
        if name not in state or (name in PARTS and not isinstance(entry, Mapping)):
            missing.append(name)
        elif isinstance(entry, Mapping) and name in PARTS:
            missing += [f"{name}.{inner}" for inner in missing_entries(entry, value)]
    return missing


def check_loadable(state: object, own: Mapping[str, Any]) -> None:
    """Raise unless an adapter can go on from a state.

    Args:
        state: What is to be loaded.
        own: What the adapter's own ``state_dict`` returns.

    Raises:
        RankError: If something is missing, or the method or the model's ranks are others.
    """
    entries: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
    method = entries.get("method", own["method"])
    if method != own["method"]:
        raise RankError(
            "the adapter's state belongs to another method",
            got=f"method {own['method']!r}",
            expected=f"{method!r}",
            mend="make the RankAdapter with the RankConfig that the run was started with",
        )
    missing = missing_entries(entries, own)
    if missing:
        is_dict = isinstance(state, Mapping)
        raise RankError(
            "the adapter's state is incomplete",
            got=f"no {', '.join(missing)}" if is_dict else f"a {type(state).__name__}",
            expected="what RankAdapter.state_dict returned",
            mend="load the checkpoint's adapter state, not the model's or the optimizer's",
        )
    if entries["ranks"] != own["ranks"]:
        raise RankError(
            "the adapter's state belongs to other ranks than the model has",
            got=f"model {own['ranks']}",
            expected=f"{entries['ranks']}",
            mend="call model.load_state_dict with the checkpoint's model first",
        )


def warn_of_target(saved: int | None, own: int | None) -> None:
    """Say where a state has another target than the config that goes on from it."""
    if saved == own:
        return
    described = "no target" if saved is None else f"a target of {saved:,} parameters"
    asked = "none" if own is None else f"{own:,}"
    warn(
        f"the saved run has {described}, and the config {asked}: it goes on to what was saved. For "
        "another target load model and optimizer alone, and make a new RankAdapter."
    )


ADVICE: dict[RankMethod | None, str] = {
    "comera": "Raise min_rank, or lower gamma or the rank weights' learning rate.",
    "proximal": "Raise min_rank, or lower gamma.",
    "rounding": "Raise min_rank, or lower threshold.",
    None: "Its weight was zero.",
}
"""What keeps layers alive, by method; ``None``: where none was at work."""


def warn_of_death(name: str, method: RankMethod | None) -> None:
    """Say that a layer is left with its bias."""
    warn(
        f"all ranks of a bond of layer {name!r} have died: from now on the layer is its bias "
        f"alone. {ADVICE[method]}"
    )
