"""GaLore: AdamW whose moments live in a small subspace of each matrix's gradient.

Shape legend: M rows, N columns, R rank of the subspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class GaLoreAdamW(torch.optim.Optimizer):
    """AdamW on projected gradients of matrices; weights stay dense.

    Every ``refresh_every`` steps the leading singular vectors of the gradient span a new
    subspace: the left ones where the matrix has no more rows than columns, the right ones where
    it has. AdamW's moments are of the projected gradient, and go on across a new subspace. What
    AdamW would add is projected back and multiplied by ``scale``.

    Args:
        matrices: Parameters of two dimensions.
        lr: Learning rate.
        rank: Dimensions of the subspaces, or the share of a matrix's smaller side.
        refresh_every: Steps between two subspaces.
        scale: Factor of every update.
        betas: Of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights, decoupled from gradient and scale.

    Source:
        Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection",
        ICML 2024, algorithm 2 (from memory, as are the defaults of scale and share).
    """

    def __init__(
        self,
        matrices: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        rank: int | float = 0.25,
        refresh_every: int = 200,
        scale: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"refresh_every": refresh_every, "scale": scale, "betas": betas, "eps": eps}
        super().__init__(
            matrices, {"lr": lr, "rank": rank, "weight_decay": weight_decay, **settings}
        )
        for group in self.param_groups:
            assert all(p.ndim == 2 for p in group["params"]), "GaLore projects matrices only"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None, "GaLore takes one gradient a step"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    @torch.no_grad()
    def refresh(self) -> None:
        """Choose every subspace anew from the present gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["basis"] = basis_of(weight.grad, group["rank"])

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if state.get("step", 0) % group["refresh_every"] == 0:
            state["basis"] = basis_of(grad, group["rank"])
        projected = project(grad, state["basis"])
        if "step" not in state:
            zeros = torch.zeros_like(projected)
            state.update(step=0, mean=zeros, square=zeros.clone())
        state["step"] += 1
        first, second = group["betas"]
        state["mean"].lerp_(projected, 1 - first)
        state["square"].mul_(second).addcmul_(projected, projected, value=1 - second)
        root = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        move = project_back(state["mean"] / root, state["basis"], weight.shape)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(move, alpha=group["lr"] * group["scale"] / (1 - first ** state["step"]))


def basis_of(grad: Tensor, rank: int | float) -> Tensor:
    """Return the leading singular vectors of the smaller side, as columns (M or N, R)."""
    small = min(grad.shape)
    count = rank if isinstance(rank, int) else max(1, math.ceil(rank * small))
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    basis = left if _on_the_left(grad.shape) else right.T
    kept: Tensor = basis[:, :count].contiguous()
    return kept


def project(grad: Tensor, basis: Tensor) -> Tensor:
    """Return a gradient (M, N) in a subspace: (R, N) or (M, R)."""
    return basis.T @ grad if _on_the_left(grad.shape) else grad @ basis


def project_back(move: Tensor, basis: Tensor, shape: torch.Size) -> Tensor:
    """Return a move in a subspace as one of the whole matrix, of ``shape``."""
    return basis @ move if _on_the_left(shape) else move @ basis.T


def _on_the_left(shape: torch.Size) -> bool:
    return shape[0] <= shape[1]
