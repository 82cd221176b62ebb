"""Layers whose weight is a product of two factors, ``W = left diag(scale) right``.

Shape legend: O out features (rows of a table), I in features (columns of a table), R rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _LowRank(nn.Module):
    def __init__(self, left_OR: Tensor, right_RI: Tensor, scale_R: Tensor | None = None) -> None:
        super().__init__()
        self.left = nn.Parameter(left_OR.contiguous())
        self.right = nn.Parameter(right_RI.contiguous())
        self.scale = None if scale_R is None else nn.Parameter(scale_R.clone())

    @property
    def rank(self) -> int:
        """Columns of the left factor."""
        return self.left.shape[1]

    @property
    def weight_params(self) -> int:
        """Parameters of the weight: factors and scale, without a bias."""
        return self.left.numel() + self.right.numel() + (0 if self.scale is None else self.rank)

    def dense_weight(self) -> Tensor:
        """Return the matrix (O, I)."""
        return self._scaled(self.left) @ self.right

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x * self.scale


class LowRankLinear(_LowRank):
    """A linear layer of two factors.

    Args:
        left_OR: Left factor.
        right_RI: Right factor.
        scale_R: What stands between them; nothing, if ``None``.
        bias: Bias of the layer, if it has one.
    """

    def __init__(
        self,
        left_OR: Tensor,
        right_RI: Tensor,
        scale_R: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__(left_OR, right_RI, scale_R)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., O) of (..., I)."""
        return F.linear(self._scaled(F.linear(x, self.right)), self.left, self.bias)


class LowRankEmbedding(_LowRank):
    """A table of two factors.

    Args:
        left_OR: Left factor, a row for each token.
        right_RI: Right factor.
        scale_R: What stands between them; nothing, if ``None``.
        padding: Token whose row gets no gradient, if there is one.
    """

    def __init__(
        self,
        left_OR: Tensor,
        right_RI: Tensor,
        scale_R: Tensor | None = None,
        padding: int | None = None,
    ) -> None:
        super().__init__(left_OR, right_RI, scale_R)
        self.padding = padding

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows (..., I) of the tokens (...)."""
        return self._scaled(F.embedding(ids, self.left, self.padding)) @ self.right


LowRankLayer = LowRankLinear | LowRankEmbedding


def spectral_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``U (O, R), s (R), V (R, I)``, the leading part of a weight at the weight's scale.

    ``U diag(s) V`` is the best approximation of the weight, times the number that gives its
    entries the root mean square of the weight's, as a layer that starts smaller trains slower.

    Source:
        Khodak et al., "Initialization and Regularization of Factorized Neural Layers", ICLR 2021
        (spectral initialisation; from memory, the scale is added here).
    """
    left_OR, sizes, right_RI = torch.linalg.svd(weight.detach(), full_matrices=False)
    kept = sizes[:rank]
    grown = kept * (sizes.norm() / kept.norm().clamp(min=torch.finfo(kept.dtype).tiny))
    return left_OR[:, :rank], grown, right_RI[:rank]


def low_rank_of(dense: nn.Module, rank: int, *, with_scale: bool = False) -> LowRankLayer:
    """Return a layer of two factors in place of a dense one.

    Args:
        dense: An ``nn.Linear`` or ``nn.Embedding``.
        rank: Its rank.
        with_scale: Whether factors are orthonormal, with a scale between them; if not, each
            holds the root of the scale.
    """
    assert isinstance(dense, (nn.Linear, nn.Embedding)), f"no low-rank form of {type(dense)}"
    left, scale, right = spectral_factors(dense.weight, rank)
    if not with_scale:
        root = scale.sqrt()
        left, right = left * root, root[:, None] * right
    between = scale if with_scale else None
    if isinstance(dense, nn.Linear):
        return LowRankLinear(left, right, between, dense.bias)
    return LowRankEmbedding(left, right, between, dense.padding_idx)


def ranks_within(
    shapes: Mapping[str, tuple[int, int]], target: int, extra: int = 0
) -> dict[str, int]:
    """Return a rank for each layer: equal compression of all, then one more while there is room.

    Args:
        shapes: Name to (O, I).
        target: Parameters of all layers together to stay within; rank 1 is the least.
        extra: Parameters of a rank beside its column and its row.

    Example:
        >>> ranks_within({"a": (8, 8), "b": (8, 24)}, 112)
        {'a': 2, 'b': 2}
    """
    share = target / sum(out_size * in_size for out_size, in_size in shapes.values())
    costs = {name: out_size + in_size + extra for name, (out_size, in_size) in shapes.items()}
    ranks = {
        name: min(out_size, in_size, max(1, int(share * out_size * in_size / costs[name])))
        for name, (out_size, in_size) in shapes.items()
    }
    left = target - sum(ranks[name] * costs[name] for name in shapes)
    for name, shape in shapes.items():
        if costs[name] <= left and ranks[name] < min(shape):
            ranks[name] += 1
            left -= costs[name]
    return ranks


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of the one with this qualified name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
