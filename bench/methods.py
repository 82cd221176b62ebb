"""Ways to train a small model that a study compares, behind one interface.

A method makes a ``Run`` of a ``Setup``: a model, its optimizers, and what it does around a step.
All compress the same layers; at the end these hold at most ``Setup.target`` parameters, except
where weights stay dense. All train the weights of these layers at one rate and the rest of the
model at another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench.adalora import Budget, orthogonality
from bench.galore import GaLoreAdamW
from bench.low_rank import LowRankLayer, low_rank_of, put, ranks_within
from bench.study_search import Rates
from bench.study_task import Task, compressed_layers
from comera_fx import OptimizeConfig, RankAdapter, RankConfig, optimize, param_groups
from comera_fx.errors import ConfigError
from comera_fx.modules import TTModule, tt_modules

Shapes = dict[str, Any]
"""Layer name to what its size depends on: a rank, or input modes, output modes and ranks."""

LARGER_TT = 1.7
"""Size that adaptive TT methods start from, over the target."""
LARGER_ADALORA = 1.5
"""The same for AdaLoRA, as its paper has it."""
ORTHOGONALITY = 0.1
"""Weight of AdaLoRA's penalty, as its paper has it."""
GALORE: dict[str, Any] = {"rank": 0.25, "refresh_every": 50, "scale": 0.25}
"""Rank (a quarter of the width) and scale as in its paper; refreshed oftener, as runs are short."""


@dataclass(frozen=True)
class Setup:
    """What a method is asked for.

    Args:
        task: What is trained.
        seed: Seed of the model.
        rates: Peak learning rates.
        steps: Length of the run.
        target: Parameters that the compressed layers may hold at the end.
        shapes: Sizes to start at, as a run has ended with; by default, the method's own.
    """

    task: Task
    seed: int
    rates: Rates
    steps: int
    target: int
    shapes: Shapes | None = None

    @property
    def prune_every(self) -> int:
        """Steps between two cuts."""
        return max(1, min(10, self.task.steps // 12))


class Run:
    """A model in training; a method that does something around a step overrides what it needs.

    Args:
        model: The model.
        layers: Names of its compressed layers.
        optimizers: What trains it; groups have the peak rate as ``initial_lr``.
    """

    def __init__(
        self, model: nn.Module, layers: list[str], *optimizers: torch.optim.Optimizer
    ) -> None:
        self.model, self.layers, self.optimizers = model, layers, optimizers
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]

    def minimised(self, loss: Tensor) -> Tensor:
        """Return what to minimise in place of the task's loss."""
        return loss

    def after_step(self) -> None:
        """Do what follows the optimizers' step."""

    def finish(self) -> None:
        """Leave the model as small as it will be used."""

    @property
    def cut_every(self) -> int | None:
        """Steps from cut to cut; ``None`` without cuts."""
        return None

    def occasional(self) -> tuple[Callable[[], object], int] | None:
        """Return work that is done once in so many steps, and that number of steps."""
        return None

    @property
    def compressed_params(self) -> int:
        """Parameters that the weights of the compressed layers hold now."""
        return sum(_weight_params(self.model.get_submodule(name)) for name in self.layers)

    @property
    def shapes(self) -> Shapes:
        """What the sizes of the compressed layers depend on, now."""
        return {name: _shape(self.model.get_submodule(name)) for name in self.layers}


# ---- dense weights ----


def _dense(setup: Setup) -> Run:
    model = setup.task.dense(setup.seed)
    layers = compressed_layers(model, setup.task.config)
    return Run(model, list(layers), adamw(_groups(model, layers, setup.rates)))


class GaLoreRun(Run):
    """A dense model whose compressed layers are trained in subspaces."""

    @property
    def cut_every(self) -> int | None:
        """Steps from cut to cut; ``None`` without cuts."""
        return None

    def occasional(self) -> tuple[Callable[[], object], int]:
        """Return the choice of new subspaces."""
        galore = self.optimizers[0]
        assert isinstance(galore, GaLoreAdamW)
        return galore.refresh, GALORE["refresh_every"]


def _galore(setup: Setup) -> Run:
    model = setup.task.dense(setup.seed)
    layers = compressed_layers(model, setup.task.config)
    matrices = [model.get_parameter(f"{name}.weight") for name in layers]
    taken = {id(matrix) for matrix in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    rate, over = setup.rates
    # Matrices move by the scale times their rate.
    rest_group = {"params": rest, "lr": over * GALORE["scale"] * rate}
    galore = GaLoreAdamW(matrices, rate, **GALORE)
    return GaLoreRun(model, list(layers), galore, adamw([rest_group]))


# ---- two factors ----


def _low_rank(setup: Setup) -> Run:
    model, layers = _with_factors(setup, setup.target, with_scale=False)
    return Run(model, list(layers), adamw(_groups(model, layers, setup.rates)))


class AdaLoRARun(Run):
    """A low-rank model whose ranks are given by importance."""

    def __init__(self, model: nn.Module, layers: dict[str, LowRankLayer], setup: Setup) -> None:
        optimizer = adamw(_groups(model, layers, setup.rates))
        super().__init__(model, list(layers), optimizer)
        self.budget = Budget(layers, setup.target, setup.steps, prune_every=setup.prune_every)
        self._cut_every = setup.prune_every

    @property
    def cut_every(self) -> int:
        """Steps from mask to mask."""
        return self._cut_every

    def minimised(self, loss: Tensor) -> Tensor:
        """Return the loss and the penalty that keeps factors orthonormal."""
        return loss + ORTHOGONALITY * orthogonality(self.budget.layers)

    def after_step(self) -> None:
        """Note importance; mask."""
        self.budget.step()

    def finish(self) -> None:
        """Cut out what is masked."""
        self.budget.cut()


def _adalora(setup: Setup) -> Run:
    size = int(LARGER_ADALORA * setup.target)
    model, layers = _with_factors(setup, size, with_scale=True)
    return AdaLoRARun(model, layers, setup)


def _with_factors(
    setup: Setup, size: int, *, with_scale: bool
) -> tuple[nn.Module, dict[str, LowRankLayer]]:
    model = setup.task.dense(setup.seed)
    dense = compressed_layers(model, setup.task.config)
    sizes = {name: matrix_shape(layer) for name, layer in dense.items()}
    ranks = setup.shapes or ranks_within(sizes, size, extra=int(with_scale))
    layers = {
        name: low_rank_of(layer, ranks[name], with_scale=with_scale)
        for name, layer in dense.items()
    }
    for name, layer in layers.items():
        put(model, name, layer)
    return model, layers


def matrix_shape(layer: nn.Module) -> tuple[int, int]:
    """Return the two sizes of a dense layer's weight."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight.shape[0], weight.shape[1]


# ---- tensor trains ----


def _tt(setup: Setup) -> Run:
    model, layers = _in_tt_form(setup, setup.target)
    groups = [group for group in _tt_groups(model, setup.rates) if group["params"]]
    return Run(model, layers, adamw(groups))


class AdapterRun(Run):
    """A model in TT form whose ranks shrink to the target."""

    def __init__(
        self, model: nn.Module, layers: list[str], setup: Setup, config: RankConfig
    ) -> None:
        super().__init__(model, layers, adamw(_tt_groups(model, setup.rates)))
        self.adapter = RankAdapter(model, self.optimizers[0], config)

    @property
    def cut_every(self) -> int:
        """Steps from cut to cut."""
        return self.adapter.config.prune_every

    def minimised(self, loss: Tensor) -> Tensor:
        """Return the adapter's objective."""
        return self.adapter.loss(loss)

    def after_step(self) -> None:
        """Let the adapter cut."""
        self.adapter.step()


def rank_config(method: str, setup: Setup) -> RankConfig:
    """Return how ranks adapt: by the paper's method, or as is the default of this package."""
    pace: dict[str, Any] = {
        "target_params": setup.target,
        "warmup_steps": setup.steps // 12,
        "prune_every": setup.prune_every,
        "min_rank": 1,
    }
    if method == "comera":
        pace |= {"method": "comera", "gamma": 1.0, "rho": 1.0, "early_steps": setup.steps // 6}
    return RankConfig(**pace)


def _adapting(method: str) -> Callable[[Setup], Run]:
    def build(setup: Setup) -> Run:
        model, layers = _in_tt_form(setup, int(LARGER_TT * setup.target))
        return AdapterRun(model, layers, setup, rank_config(method, setup))

    return build


def _in_tt_form(setup: Setup, size: int) -> tuple[nn.Module, list[str]]:
    task, dense = setup.task, setup.task.dense(setup.seed)
    names = list(compressed_layers(dense, task.config))
    if setup.shapes is None:
        config = within(dense, task.config, size)
    else:
        config = of_shapes(task.config, setup.shapes)
    config = replace(config, init="random", seed=setup.seed)
    model = optimize(dense, task.inputs, config=config)
    rewritten = [name for name, _ in tt_modules(model)]
    assert sorted(rewritten) == sorted(names), f"in TT form are {rewritten}, not {names}"
    return model, names


def within(dense: nn.Module, config: OptimizeConfig, size: int) -> OptimizeConfig:
    """Return a config with the largest ranks at which the TT layers fit into a size.

    One rank for all layers, and one more for the first of them while there is room.

    Args:
        dense: The model, which stays as it is.
        config: Says which layers.
        size: Parameters of all cores together.
    """
    layers = compressed_layers(dense, config)

    def sizes(rank: int) -> dict[str, int]:
        at_rank = replace(config, init="random", max_rank=rank)
        specs = {name: layer.tt_params for name, layer in tt_modules(_optimised(dense, at_rank))}
        # A layer that would be larger in TT form stays dense there.
        return {name: specs.get(name, _weight_params(layer)) for name, layer in layers.items()}

    low, high = 1, 2
    # Wider ranks than layers can use change nothing: the search ends there at the latest.
    most = max(max(matrix_shape(layer)) for layer in layers.values())
    while high < most and sum(sizes(high).values()) <= size:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(sizes(middle).values()) <= size else (low, middle)
    now, more = sizes(low), sizes(low + 1)
    left = size - sum(now.values())
    ranks = {}
    for name in now:
        grows = now[name] < more[name] <= now[name] + left
        ranks[name] = low + grows
        left -= (more[name] - now[name]) * grows
    return replace(config, ranks=ranks, max_rank=low)


def _optimised(dense: nn.Module, config: OptimizeConfig) -> nn.Module:
    try:
        return optimize(dense, config=config)
    except ConfigError:  # at this rank nothing becomes smaller
        return dense


def of_shapes(config: OptimizeConfig, shapes: Shapes) -> OptimizeConfig:
    """Return a config that gives each layer the modes and ranks that it had in another run."""
    modes = {name: (tuple(shape[0]), tuple(shape[1])) for name, shape in shapes.items()}
    # A rank of 0, of a layer that has died, cannot be asked for.
    ranks = {name: tuple(max(1, rank) for rank in shape[2]) for name, shape in shapes.items()}
    return replace(config, modes=modes, ranks=ranks)


# ---- what they share ----


def adamw(groups: list[Shapes]) -> torch.optim.Optimizer:
    """Return AdamW without weight decay, fused; every group has its rate."""
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def _tt_groups(model: nn.Module, rates: Rates) -> list[Shapes]:
    return param_groups(model, rates.rate, rest_lr=rates.rest * rates.rate)


def _groups(model: nn.Module, layers: Mapping[str, nn.Module], rates: Rates) -> list[Shapes]:
    """Return weights of the compressed layers, and the rest."""
    weights = [
        parameter
        for layer in layers.values()
        for name, parameter in layer.named_parameters()
        if name != "bias"
    ]
    taken = {id(weight) for weight in weights}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [{"params": weights, "lr": rates.rate}, {"params": rest, "lr": rates.rest * rates.rate}]


def _weight_params(layer: nn.Module) -> int:
    if isinstance(layer, TTModule):
        return layer.tt_params
    if isinstance(layer, LowRankLayer):
        return layer.weight_params
    rows, columns = matrix_shape(layer)
    return rows * columns


def _shape(layer: nn.Module) -> Any:
    if isinstance(layer, TTModule):
        spec = layer.spec
        return [list(spec.in_modes), list(spec.out_modes), list(spec.ranks)]
    return layer.rank if isinstance(layer, LowRankLayer) else list(matrix_shape(layer))


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        build: Makes a run.
        settings: What, beside the task, its results depend on.
        size: Size that its layers end with: "target", or that of "dense".
        adapts: Whether its layers become smaller while it trains.
    """

    build: Callable[[Setup], Run]
    settings: Callable[[Setup], Mapping[str, Any]]
    size: Literal["target", "dense"] = "target"
    adapts: bool = False


METHODS: dict[str, Method] = {
    "dense": Method(_dense, lambda setup: {}, size="dense"),
    "tt": Method(_tt, lambda setup: {}),
    "low_rank": Method(_low_rank, lambda setup: {}),
    "ours": Method(
        _adapting("ours"),
        lambda setup: {"larger": LARGER_TT, "config": str(rank_config("ours", setup))},
        adapts=True,
    ),
    "comera": Method(
        _adapting("comera"),
        lambda setup: {"larger": LARGER_TT, "config": str(rank_config("comera", setup))},
        adapts=True,
    ),
    "adalora": Method(
        _adalora, lambda setup: {"larger": LARGER_ADALORA, "penalty": ORTHOGONALITY}, adapts=True
    ),
    "galore": Method(_galore, lambda setup: GALORE, size="dense"),
}
"""By name, the ones first that a study runs first."""
FIRST = ("dense", "tt", "low_rank", "ours")
