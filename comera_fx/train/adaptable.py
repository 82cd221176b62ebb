"""Which layers adapt, and what their optimizer must hold."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTModule, tt_modules
from comera_fx.train.groups import RANK_LR_SCALE

SEVERAL_PROCESSES = ("DistributedDataParallel", "FullyShardedDataParallel")


def adaptable_layers(model: nn.Module, config: RankConfig) -> dict[str, TTModule]:
    """Return name to layer for every trainable TT layer that has a bond and is not excluded.

    Raises:
        RankError: If there is none, ``exclude`` names none, or the model is wrapped for several
            processes.
    """
    if type(model).__name__ in SEVERAL_PROCESSES:
        raise RankError(
            "rank adaptation works in one process",
            got=f"a {type(model).__name__}",
            expected="the model itself",
            mend="adapt the ranks in one process, then train on with several",
        )
    modules = dict(tt_modules(getattr(model, "_orig_mod", model)))  # where compile has wrapped it
    for pattern in config.exclude:
        if not any(fnmatchcase(name, pattern) for name in modules):
            close = difflib.get_close_matches(pattern, list(modules), n=3, cutoff=0)
            raise RankError(
                "RankConfig.exclude has a pattern that matches no TT layer",
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


def check_holds_cores(optimizer: torch.optim.Optimizer, layers: dict[str, TTModule]) -> None:
    """Raise unless the optimizer trains the cores of all layers.

    Raises:
        RankError: If it was built before ``optimize``, or from another model.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name for name, layer in layers.items() if any(id(c) not in held for c in layer.cores)
    ]
    if missing:
        raise RankError(
            "the optimizer does not hold the model's cores",
            got=f"no cores of {len(missing)} layers, the first of them {missing[0]!r}",
            expected="an optimizer built after comera_fx.optimize, from the optimised model",
            mend="build it with torch.optim.AdamW(comera_fx.param_groups(model, lr=1e-3))",
        )


def hand_over(optimizer: torch.optim.Optimizer, layers: dict[str, TTModule]) -> None:
    """Give the optimizer the layers' rank weights, unless it has them."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    weights = [weight for layer in layers.values() for weight in layer.rank_weights]
    fresh = [weight for weight in weights if id(weight) not in held]
    if not fresh:
        return
    for group in optimizer.param_groups:
        if group.get("rank_weights"):
            group["params"].extend(fresh)
            return
    cores = {id(core) for layer in layers.values() for core in layer.cores}
    lr = next(
        group["lr"]
        for group in optimizer.param_groups
        if any(id(p) in cores for p in group["params"])
    )
    optimizer.add_param_group(
        {"params": fresh, "lr": RANK_LR_SCALE * lr, "weight_decay": 0.0, "rank_weights": True}
    )
