"""The balanced form of a tensor train, in which bond indices are singular directions.

At every inner bond W is a matrix: all modes left of it against all modes right of it. In balanced
form the left part has the Gram matrix ``diag(s)`` and so has the right part, with s the singular
values of that matrix. Then index j of the bond carries ``s_j^2`` of ``|W|^2``, the most that any
index could, and what is lost without it is exactly that.

Shape legend: R, S = left and right rank of a core, X = its modes, K = kept directions of a bond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Directions:
    """Singular directions of one bond, strongest first.

    Args:
        values: Singular values ``(K,)``, float64.
        into: ``(R, K)``: columns of the core left of the bond become ``core @ into``.
        out_of: ``(K, R)``: rows of the core right of it become ``out_of @ core``. ``out_of @ into``
            is the identity, and once ``scaled`` the diagonal matrix of the factors.
    """

    values: Tensor
    into: Tensor
    out_of: Tensor

    def first(self, count: int) -> Directions:
        """Keep the strongest directions only."""
        return Directions(self.values[:count], self.into[:, :count], self.out_of[:count])

    def scaled(self, factors: Tensor) -> Directions:
        """Multiply what every direction carries, ``(K,)`` positive factors, half on either side."""
        half = factors.sqrt()
        return Directions(self.values * factors, self.into * half, self.out_of * half[:, None])


Bonds = dict[str, list[Directions]]
"""Layer name to the directions of its inner bonds, left to right."""


@torch.no_grad()
def balanced_bonds(cores: Sequence[Tensor]) -> list[Directions]:
    """Return the change of basis of every inner bond that brings cores into balanced form.

    Directions in which W holds nothing are left out, so that a bond may have fewer than its rank.
    All bonds may be cut to their first directions at once: the square of what is lost is at most
    the sum of the squares of all singular values that are dropped.

    Args:
        cores: Cores ``(R, ..., S)`` of a tensor train, rank weights multiplied in.

    Returns:
        One entry per inner bond, on the CPU, in float64.

    Source:
        Two QR sweeps give a root of each Gram matrix, and the SVD of the product of two roots
        the basis, as in square-root balanced truncation; Vidal, "Efficient classical simulation
        of slightly entangled quantum computations", PRL 2003, for the form; from memory.

    Example:
        >>> cores = [torch.eye(2).reshape(1, 2, 2), torch.tensor([[[3.0]], [[4.0]]])]
        >>> [bond.values.tolist() for bond in balanced_bonds(cores)]
        [[5.0]]
    """
    flat_RXS = [core.detach().to("cpu", torch.float64).flatten(1, -2) for core in cores]
    lefts, rights = _roots(flat_RXS), _roots([core.transpose(0, 2) for core in reversed(flat_RXS)])
    return [_bond(left, right) for left, right in zip(lefts, reversed(rights), strict=True)]


def balanced_cores(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return cores of the same shapes and the same tensor in balanced form.

    A bond whose rank is more than its matrix has directions stays as it is.

    Args:
        cores: Cores ``(R, ..., S)`` of a tensor train.

    Returns:
        New cores, of the dtypes and on the devices of the old.

    Example:
        >>> cores = [torch.eye(2).reshape(1, 2, 2), 4 * torch.eye(2).reshape(2, 2, 1)]
        >>> [round(core.norm().item(), 3) for core in balanced_cores(cores)]
        [2.828, 2.828]
    """
    new = [core.detach().to("cpu", torch.float64) for core in cores]
    for k, bond in enumerate(balanced_bonds(cores)):
        if len(bond.values) == cores[k].shape[-1]:
            new[k] = torch.tensordot(new[k], bond.into, dims=1)
            new[k + 1] = torch.tensordot(bond.out_of, new[k + 1], dims=1)
    return [core.to(like.device, like.dtype) for core, like in zip(new, cores, strict=True)]


def _roots(cores_RXS: Sequence[Tensor]) -> list[Tensor]:
    """Return at each inner bond a root C of the left part's Gram matrix ``C^T C``."""
    root = torch.ones(1, 1, dtype=torch.float64)
    roots = []
    for core in cores_RXS[:-1]:
        grown = torch.tensordot(root, core, dims=1)
        root = torch.linalg.qr(grown.flatten(0, 1), mode="r").R
        roots.append(root)
    return roots


def _bond(left: Tensor, right: Tensor) -> Directions:
    vectors, values, others = torch.linalg.svd(left @ right.T, full_matrices=False)
    # Singular values below this are rounding, and their directions noise.
    floor = values.new_tensor(torch.finfo(torch.float64).eps) * max(left.shape[1], 1)
    count = int((values > floor * values[:1]).sum()) if values.numel() else 0
    values, half = values[:count], values[:count].rsqrt()
    into = right.T @ (others[:count].T * half)
    out_of = (vectors[:, :count] * half).T @ left
    return Directions(values, into, out_of)
