"""Parameter groups for optimizers: cores, rank weights and the rest."""

from __future__ import annotations

from typing import Any

from torch import nn

from comera_fx.errors import RankError
from comera_fx.modules import tt_modules

RANK_LR_SCALE = 10.0
"""Learning rate of rank weights over that of cores, as in the CoMERA paper (1e-3 and 1e-4)."""


def param_groups(
    model: nn.Module,
    lr: float,
    rank_lr: float | None = None,
    weight_decay: float = 0.0,
    *,
    rest_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimised model for any torch optimizer.

    Args:
        model: A model from ``optimize``.
        lr: Learning rate of cores, and of all else unless given.
        rank_lr: Learning rate of rank weights; ten times ``lr`` if not given. Their group is
            there, empty, before a ``RankAdapter`` fills it.
        weight_decay: Decay of cores and matrices; biases, norms and rank weights have none.
        rest_lr: Learning rate of what is no core: biases, norms, layers that stayed dense; ``lr``
            if not given.

    Returns:
        Groups of the trainable parameters, each parameter once.

    Raises:
        RankError: If the model has no TT layer.

    Example:
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=2e-3))
    """
    modules = [module for _, module in tt_modules(model)] if isinstance(model, nn.Module) else []
    if not modules:
        raise RankError(
            "the model has no TT layer",
            got=type(model).__name__,
            expected="a model that comera_fx.optimize returned",
            mend="call model = comera_fx.optimize(model) first",
        )
    ranks = [weight for module in modules for weight in module.rank_weights]
    cores = [core for module in modules for core in module.cores if core.requires_grad]
    taken = {id(parameter) for parameter in (*ranks, *cores)}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    rest_lr = lr if rest_lr is None else rest_lr
    groups = [
        {"params": cores, "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim > 1], "lr": rest_lr, "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "lr": rest_lr, "weight_decay": 0.0},
    ]
    rank_group = {
        "params": ranks,
        "lr": RANK_LR_SCALE * lr if rank_lr is None else rank_lr,
        "weight_decay": 0.0,
        "rank_weights": True,
    }
    return [*(group for group in groups if group["params"]), rank_group]
