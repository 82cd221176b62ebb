"""A deep learning recommendation model (DLRM), in plain PyTorch.

Shape legend: B samples, N dense features, D size of a vector, F categorical features, H ids a
feature, P pairs of vectors.

Source:
    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems", arXiv 1906.00091, section 2 (from memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """Dense features and looked-up vectors, their pairwise dot products, one logit (B,).

    Args:
        num_dense: Number of dense features.
        tables: Number of ids of each categorical feature.
        width: Size of a feature's vector.
        bottom: Hidden sizes of the MLP over the dense features; its last layer has ``width``.
        top: Hidden sizes of the MLP over the products; its last layer has one output.
        bags: Whether a feature's table is an ``nn.EmbeddingBag``; an ``nn.Embedding`` if not,
            whose rows are then added up.
    """

    first: Tensor
    second: Tensor

    def __init__(
        self,
        num_dense: int,
        tables: Sequence[int],
        width: int,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (512, 256),
        *,
        bags: bool = False,
    ) -> None:
        super().__init__()
        self.bags = bags
        self.tables = nn.ModuleList(_table(size, width, bags=bags) for size in tables)
        num_vectors = len(tables) + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.bottom = mlp([num_dense, *bottom, width], nn.ReLU())
        self.top = mlp([width + num_pairs, *top, 1], nn.Identity())
        first, second = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)

    def forward(self, dense_BN: Tensor, ids_BFH: Tensor) -> Tensor:
        """Return the logit of each sample (B,).

        Args:
            dense_BN: The dense features.
            ids_BFH: Ids of each categorical feature, whose rows are added up.
        """
        dense_BD = self.bottom(dense_BN)
        vectors = [self._look_up(k, ids_BH) for k, ids_BH in enumerate(ids_BFH.unbind(1))]
        pairs_BP = self.interact(torch.stack([dense_BD, *vectors], dim=1))
        logits_B: Tensor = self.top(torch.cat([dense_BD, pairs_BP], dim=1)).squeeze(1)
        return logits_B

    def interact(self, vectors_BVD: Tensor) -> Tensor:
        """Return the dot product of each pair of different vectors of a sample, (B, P)."""
        products_BVV = vectors_BVD @ vectors_BVD.transpose(1, 2)
        return products_BVV[:, self.first, self.second]

    def _look_up(self, index: int, ids_BH: Tensor) -> Tensor:
        rows: Tensor = self.tables[index](ids_BH)
        return rows if self.bags else rows.sum(1)


def _table(size: int, width: int, *, bags: bool) -> nn.Embedding | nn.EmbeddingBag:
    table = nn.EmbeddingBag(size, width, mode="sum") if bags else nn.Embedding(size, width)
    nn.init.uniform_(table.weight, -(width**-0.5), width**-0.5)
    return table


def mlp(sizes: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Return linear layers from each size to the next, a ReLU between, ``last`` at the end."""
    layers: list[nn.Module] = []
    for in_size, out_size in pairwise(sizes):
        layers += [nn.Linear(in_size, out_size), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)
