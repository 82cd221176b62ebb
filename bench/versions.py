"""One linear layer without bias, computed in every way that people do.

All versions but ``tltorch`` hold the numbers of the same cores: the dense one their matrix, the
low-rank ones the two factors that the matrix has at its middle bond. ``tltorch`` is the package
tensorly-torch, which pairs each input mode with an output mode (its "BlockTT") and so cannot hold
these cores; it gets numbers of its own, and about as many parameters. It contracts by one einsum,
which, as torch's own, has a good order only where the package opt_einsum is installed. Both come
with ``pip install -e '.[bench]'``; the columns of what is missing stay empty.

Shape legend: B tokens, I in, O out, R the rank of the middle bond.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_fx
from comera_fx import TTLinear, TTSpec
from comera_fx.tt import random_cores, to_dense

Cores = Sequence[Tensor]

PLAN = comera_fx.PlanConfig(objective="time")
LOW_RANK = ("low_rank_matmul", "low_rank_linear")
"""The two GEMMs of ideal low rank in both storage orders; the faster one counts."""
EINSUM = ("einsum_in_order", "einsum_planned")
"""One einsum, operands from left to right or as opt_einsum orders them; the faster one counts."""
NEEDS = {"tltorch": "tltorch", "einsum_planned": "opt_einsum"}
"""The package without which a version is left out."""


def draw_cores(spec: TTSpec, seed: int = 0) -> list[Tensor]:
    """Draw cores whose matrix keeps the size of what it is applied to."""
    generator = torch.Generator().manual_seed(seed)
    return random_cores(spec, 1 / math.sqrt(spec.in_size), generator=generator)


def dense_weight(layer: nn.Module) -> Tensor:
    """Return the matrix (O, I) of a version, differentiable in its parameters."""
    weight: Tensor = layer.weight if isinstance(layer, nn.Linear) else layer.dense_weight()
    return weight


def make(name: str, spec: TTSpec, cores: Cores) -> nn.Module:
    """Return the version called ``name`` of the layer that the cores stand for."""
    return MAKERS[name](spec, cores)


def available(names: Sequence[str]) -> list[str]:
    """Return the names whose packages are installed, and print which are left out."""
    kept = [n for n in names if n not in NEEDS or importlib.util.find_spec(NEEDS[n]) is not None]
    for name in names:
        if name not in kept:
            print(f"{name} is left out: {NEEDS[name]} is not installed (pip install -e '.[bench]')")
    return kept


# ---- versions ----


def _dense(spec: TTSpec, cores: Cores) -> nn.Linear:
    linear = nn.Linear(spec.in_size, spec.out_size, bias=False)
    linear.weight = nn.Parameter(to_dense(cores, spec))
    return linear


class LowRankMatmul(nn.Module):
    """Ideal low rank: two matrix products, the factors stored as (I, R) and (R, O)."""

    def __init__(self, spec: TTSpec, cores: Cores) -> None:
        super().__init__()
        left_IR, right_RO = factors(cores, len(spec.in_modes))
        self.left = nn.Parameter(left_IR.contiguous())
        self.right = nn.Parameter(right_RO.contiguous())

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return (B, O)."""
        return x_BI @ self.left @ self.right

    def dense_weight(self) -> Tensor:
        """Return the matrix (O, I)."""
        return (self.left @ self.right).T


class LowRankLinear(nn.Module):
    """Ideal low rank: two linear layers, the factors stored as (R, I) and (O, R)."""

    def __init__(self, spec: TTSpec, cores: Cores) -> None:
        super().__init__()
        left_IR, right_RO = factors(cores, len(spec.in_modes))
        self.down = nn.Parameter(left_IR.T.contiguous())
        self.up = nn.Parameter(right_RO.T.contiguous())

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return (B, O)."""
        return F.linear(F.linear(x_BI, self.down), self.up)

    def dense_weight(self) -> Tensor:
        """Return the matrix (O, I)."""
        return self.up @ self.down


class _OfCores(nn.Module):
    def __init__(self, spec: TTSpec, cores: Cores) -> None:
        super().__init__()
        self.spec = spec
        self.cores = nn.ParameterList(core.clone() for core in cores)

    def dense_weight(self) -> Tensor:
        """Return the matrix (O, I)."""
        return to_dense(list(self.cores), self.spec)


class FixedPath(_OfCores):
    """The paper's path by hand: all left cores, all right cores, then both to the input."""

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return (B, O)."""
        left_IR, right_RO = factors(list(self.cores), len(self.spec.in_modes))
        return x_BI @ left_IR @ right_RO


class OneEinsum(_OfCores):
    """Input and cores in one ``torch.einsum``.

    Args:
        spec: Shape of the layer.
        cores: Its numbers.
        planned: Whether opt_einsum orders the operands; from left to right if not.
    """

    def __init__(self, spec: TTSpec, cores: Cores, *, planned: bool) -> None:
        super().__init__(spec, cores)
        self.planned = planned
        letters = "cdefghijklmnopqrstuvwxyz"
        modes, bonds = letters[: len(cores)], letters[len(cores) : 2 * len(cores) - 1]
        ends = ["", *bonds, ""]
        terms = [ends[k] + mode + ends[k + 1] for k, mode in enumerate(modes)]
        num_in = len(spec.in_modes)
        self.equation = f"b{modes[:num_in]},{','.join(terms)}->b{modes[num_in:]}"

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return (B, O)."""
        first, *inner, last = self.cores
        operands = (x_BI.unflatten(1, self.spec.in_modes), first[0], *inner, last[..., 0])
        with torch.backends.opt_einsum.flags(enabled=self.planned):
            return torch.einsum(self.equation, *operands).flatten(1)


class Tensorly(nn.Module):
    """tltorch's factorized linear layer, of about as many parameters, with its own numbers."""

    def __init__(self, spec: TTSpec, cores: Cores) -> None:
        super().__init__()
        import tltorch

        paired = paired_spec(spec)
        self.layer: Any = tltorch.FactorizedLinear(
            spec.in_modes,
            spec.out_modes,
            bias=False,
            factorization="blocktt",
            rank=paired.ranks,
            implementation="factorized",
        )
        own = draw_cores(paired)
        with torch.no_grad():
            for factor, core in zip(self.layer.weight.factors, own, strict=True):
                factor.copy_(core.transpose(1, 2))  # theirs are (R, out, in, S)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return (B, O)."""
        result: Tensor = self.layer(x_BI)
        return result

    def dense_weight(self) -> Tensor:
        """Return the matrix (O, I)."""
        matrix: Tensor = self.layer.weight.to_matrix()
        return matrix


def _ours(spec: TTSpec, cores: Cores) -> TTLinear:
    layer = TTLinear(spec, spec.in_size, spec.out_size, bias=False, plan=PLAN)
    layer.set_cores([core.clone() for core in cores])
    return layer


MAKERS: dict[str, Callable[[TTSpec, Cores], nn.Module]] = {
    "dense": _dense,
    "low_rank_matmul": LowRankMatmul,
    "low_rank_linear": LowRankLinear,
    "fixed_path": FixedPath,
    "einsum_in_order": partial(OneEinsum, planned=False),
    "einsum_planned": partial(OneEinsum, planned=True),
    "tltorch": Tensorly,
    "ours": _ours,
}


# ---- what they are made of ----


def factors(cores: Cores, num_in: int) -> tuple[Tensor, Tensor]:
    """Return the matrices (I, R) and (R, O) of a chain cut at its middle bond."""
    return _joined(cores[:num_in])[0], _joined(cores[num_in:])[..., 0]


def _joined(cores: Cores) -> Tensor:
    """Contract a chain, first core first, into one core (R, product of the modes, S)."""
    joined = cores[0]
    for core in cores[1:]:
        product = joined.flatten(0, 1) @ core.flatten(1)
        joined = product.reshape(joined.shape[0], -1, core.shape[-1])
    return joined


def paired_spec(spec: TTSpec) -> TTSpec:
    """Return the layout of paired modes with the largest equal rank that holds no more numbers.

    Example:
        >>> spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
        >>> spec.num_params, paired_spec(spec).ranks, paired_spec(spec).num_params
        (20448, (1, 16, 16, 1), 19456)
    """

    def of_rank(rank: int) -> TTSpec:
        inner = (rank,) * (len(spec.in_modes) - 1)
        return TTSpec("ttm", spec.in_modes, spec.out_modes, (1, *inner, 1))

    rank = 1
    while of_rank(rank + 1).num_params <= spec.num_params:
        rank += 1
    return of_rank(rank).clipped()


def optimised(
    model: nn.Module, x: Tensor, spec: TTSpec, cores: Sequence[Cores]
) -> tuple[nn.Module, list[TTLinear]]:
    """Return what ``comera_fx.optimize`` makes of a model, and its TT layers.

    Args:
        model: A model of dense layers that all have the shape of ``spec``.
        x: An input of it.
        spec: The shape that each layer gets.
        cores: The numbers that the layers then get, in the order of the model's modules.
    """
    config = comera_fx.OptimizeConfig(
        init="random",
        modes={"*": (spec.in_modes, spec.out_modes)},
        ranks={"*": spec.ranks},
        min_params=0,
        plan=PLAN,
    )
    result = comera_fx.optimize(model, x, config=config)
    layers = [module for module in result.modules() if isinstance(module, TTLinear)]
    with torch.no_grad():
        for layer, numbers in zip(layers, cores, strict=True):
            for parameter, core in zip(layer.cores, numbers, strict=True):
                parameter.copy_(core)
    return result, layers
