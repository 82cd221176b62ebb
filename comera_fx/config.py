"""Settings of ``optimize``, of the planner and of rank adaptation, checked when they are made.

And what the environment says: it is read here only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from comera_fx.errors import ConfigError

Objective = Literal["flops", "time", "memory"]
Layout = Literal["tt", "ttm"]
Ranks = int | tuple[int, ...]
ModePair = tuple[tuple[int, ...], tuple[int, ...]]


def cache_folder() -> Path | None:
    """Return the folder for what can be made again; ``None`` where there is no home.

    It is ``COMERA_FX_CACHE`` if that is set, and what is usual on the platform if not.
    """
    environment = os.environ
    if environment.get("COMERA_FX_CACHE"):
        return Path(os.path.expanduser(environment["COMERA_FX_CACHE"])).absolute()  # noqa: PTH111
    if sys.platform == "win32" and environment.get("LOCALAPPDATA"):
        return Path(environment["LOCALAPPDATA"])
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    if sys.platform not in ("win32", "darwin") and given.is_absolute():
        return given
    usual = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    try:
        return Path.home() / usual
    except RuntimeError:
        return None


def _check(holds: bool, name: str, got: object, expected: str, mend: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is out of range", got=repr(got), expected=expected, mend=mend)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_names(name: str, value: object) -> None:
    """Patterns must outlast one reading, which an iterator does not."""
    is_some = isinstance(value, Collection) and not isinstance(value, str)
    field = name.rpartition(".")[2]
    _check(
        is_some and all(isinstance(pattern, str) for pattern in value),  # type: ignore[attr-defined]
        name,
        value,
        "a sequence of patterns",
        f"write {field}=[{value!r}]" if isinstance(value, str) else f"write {field}=['*.fc1']",
    )


EARLY_PRUNINGS = 10
"""Default length of the early stage of "comera", in cuts, where there is a target."""
SHRINK_PRUNINGS = 10
"""Default length of the way down to a target, in cuts."""


@dataclass(frozen=True)
class PlanConfig:
    """How contraction trees are chosen.

    Args:
        objective: What is minimised: the predicted ``"time"`` of forward and backward, their
            ``"flops"``, or the ``"memory"``: the bytes saved for backward and the peak, added up.
        memory_limit_bytes: Plans of linear layers whose peak is above this are refused, at the
            next power of two of the rows seen, which is what is planned for; ``None`` is no limit.
        pad_ranks: Whether plans for ``"time"`` may pad ranks with zeros, inside the plan, to
            sizes at which the device's products run faster.
        autotune: Whether a layer times its best three plans, once per shape and process, at its
            first call in eager mode, and runs the fastest. Which one that is may differ from run
            to run, and with it results in their last digits.
    """

    objective: Objective = "time"
    memory_limit_bytes: int | None = None
    pad_ranks: bool = True
    autotune: bool = False

    def __post_init__(self) -> None:
        _check(
            self.objective in ("flops", "time", "memory"),
            "PlanConfig.objective",
            self.objective,
            "'time', 'flops' or 'memory'",
            "use the default, 'time'",
        )
        for name, mend in (
            ("pad_ranks", "give False to run the ranks as they are"),
            ("autotune", "give True to time plans at their first use"),
        ):
            value = getattr(self, name)
            _check(isinstance(value, bool), f"PlanConfig.{name}", value, "True or False", mend)
        limit = self.memory_limit_bytes
        _check(
            limit is None or _is_count(limit, 1),
            "PlanConfig.memory_limit_bytes",
            limit,
            "a positive number of bytes, or None",
            "leave it None for no limit",
        )


@dataclass(frozen=True)
class OptimizeConfig:
    """What ``optimize`` rewrites, and into which shapes.

    Patterns are ``fnmatch`` patterns over qualified module names, ``"encoder.*.fc1"``; where
    several patterns match one layer, the first in the mapping wins.

    Args:
        max_rank: Rank asked for on every bond that no ``ranks`` pattern names. Each bond gets
            the smaller of what is asked and of the largest rank it can use.
        ranks: Pattern to one rank for all bonds, or to the full tuple of a ``TTSpec``, whose
            two ends are 1.
        tol: Relative Frobenius error allowed when a weight is decomposed; ranks stop growing
            once it is met. ``None``: ``max_rank`` alone decides. With ``tol`` and a bond whose
            asked rank is too small to meet it, the error met is reported.
        init: ``"decompose"`` keeps what the weights hold (TT-SVD); ``"random"`` draws cores so
            that the entries of W have the standard deviation of the dense weight.
        modes: Pattern to ``(in_modes, out_modes)``; products may exceed the layer's sizes
            (padding), never fall below them.
        layouts: Pattern to ``"tt"`` (all input modes, then all output modes) or ``"ttm"``
            (one core per pair of modes). Linear layers default to "tt", embeddings to "ttm".
        targets: Patterns of the layers to rewrite; ``None`` is every supported layer.
        exclude: Patterns of layers that stay dense whatever ``targets`` says.
        min_params: Layers with fewer weights than this stay dense.
        only_if_faster: Leave a layer dense when its plan is worse than dense in what
            ``plan.objective`` minimises, at the tokens seen or hinted: predicted to be slower
            ("time"), of more FLOPs ("flops"), forward and backward, or with more bytes kept from
            forward to backward, weights counted ("memory"). Compared is the plan without a memory
            limit. Layers named in ``modes``, ``ranks`` or ``targets`` are exempt.
        num_tokens_hint: Rows of input to plan for where no example input tells.
        plan: How contraction trees are chosen.
        autotune: Short for ``PlanConfig(autotune=True)`` in ``plan``.
        share: Whether layers share work in eager mode while the whole model runs: equal-shaped
            ones make their weight-only messages in one batch, those that read one input take it
            in one product, where that is predicted to be faster. Two hooks on the model do it.
        seed: Seed of ``init="random"``.
    """

    max_rank: int = 32
    ranks: Mapping[str, Ranks] = field(default_factory=dict)
    tol: float | None = None
    init: Literal["decompose", "random"] = "decompose"
    modes: Mapping[str, ModePair] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    targets: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    min_params: int = 4096
    only_if_faster: bool = True
    num_tokens_hint: int = 4096
    plan: PlanConfig = field(default_factory=PlanConfig)
    autotune: bool = False
    share: bool = True
    seed: int = 0

    @property
    def effective_plan(self) -> PlanConfig:
        """``plan``, with ``autotune`` where that is asked for here."""
        return replace(self.plan, autotune=True) if self.autotune else self.plan

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_types()
        self._check_choices()
        self._check_patterns()

    def _check_numbers(self) -> None:
        for name, least in (("max_rank", 1), ("min_params", 0), ("num_tokens_hint", 1)):
            value = getattr(self, name)
            _check(
                _is_count(value, least),
                f"OptimizeConfig.{name}",
                value,
                f"an int of at least {least}",
                f"give an int, {least} or more",
            )
        _check(
            self.tol is None or (_is_number(self.tol) and 0 <= self.tol < 1),
            "OptimizeConfig.tol",
            self.tol,
            "a relative error, 0 <= tol < 1, or None",
            "use tol=0.05 for 5 %",
        )
        _check(
            _is_count(self.seed, 0) and self.seed < 2**64,
            "OptimizeConfig.seed",
            self.seed,
            "an int, 0 or more, below 2**64",
            "give a small int such as 0",
        )

    def _check_types(self) -> None:
        if self.targets is not None:
            _check_names("OptimizeConfig.targets", self.targets)
        _check_names("OptimizeConfig.exclude", self.exclude)
        for name, example in (("ranks", "30"), ("layouts", "'ttm'"), ("modes", "((8, 8), (8, 8))")):
            value = getattr(self, name)
            _check(
                isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
                f"OptimizeConfig.{name}",
                value,
                "a mapping from patterns",
                f"write {name}={{'*.fc1': {example}}}",
            )
        _check(
            isinstance(self.plan, PlanConfig),
            "OptimizeConfig.plan",
            self.plan,
            "a PlanConfig",
            "write plan=comera_fx.PlanConfig(objective='flops')",
        )
        for name, mend in (
            ("only_if_faster", "give False to compress whatever the speed"),
            ("autotune", "give True to time plans at their first use"),
            ("share", "give False to have every layer run by itself"),
        ):
            value = getattr(self, name)
            _check(isinstance(value, bool), f"OptimizeConfig.{name}", value, "True or False", mend)

    def _check_choices(self) -> None:
        _check(
            self.init in ("decompose", "random"),
            "OptimizeConfig.init",
            self.init,
            "'decompose' or 'random'",
            "use 'decompose' for trained weights, 'random' from scratch",
        )
        for pattern, layout in self.layouts.items():
            _check(
                layout in ("tt", "ttm"),
                f"OptimizeConfig.layouts[{pattern!r}]",
                layout,
                "'tt' or 'ttm'",
                "use 'tt' for linear layers, 'ttm' for embeddings",
            )

    def _check_patterns(self) -> None:
        for pattern, rank in self.ranks.items():
            entries = rank if isinstance(rank, tuple) else (rank,)
            _check(
                bool(entries) and all(_is_count(r, 1) for r in entries),
                f"OptimizeConfig.ranks[{pattern!r}]",
                rank,
                "an int of at least 1, or a tuple of such ints with both ends 1",
                "write 30 or (1, 12, 30, 30, 30, 12, 1)",
            )
        for pattern, pair in self.modes.items():
            sides = tuple(pair) if isinstance(pair, (tuple, list)) else ()
            good = len(sides) == 2 and all(
                isinstance(side, (tuple, list)) and side and all(_is_count(m, 1) for m in side)
                for side in sides
            )
            _check(
                good,
                f"OptimizeConfig.modes[{pattern!r}]",
                pair,
                "a pair (in_modes, out_modes) of non-empty tuples of positive ints",
                "write ((12, 8, 8), (8, 8, 12))",
            )


RankMethod = Literal["comera", "proximal", "rounding"]


@dataclass(frozen=True)
class RankConfig:
    """How ranks adapt in training; see ``comera_fx/train/README.md`` for the formulas.

    Args:
        method: How ranks are brought to zero. ``"comera"``: every rank has a weight, a parameter
            that the size penalty pulls down. ``"proximal"``: the singular values of every bond
            are lowered step by step to exact zeros. ``"rounding"``: the smallest singular values
            are cut at once.
        target_ratio: Size to reach, as a share of the TT size at the start.
        target_params: Size to reach, in parameters. At most one target may be given.
        target_bytes: Size to reach, in bytes of the cores.
        gamma: Strength of what pulls ranks down in the early stage. "comera": weight of the size
            penalty. "proximal": what a bond's singular values lose at every cut, as a share of
            the largest, for a rank of average cost. "rounding" has none.
        beta: Weight of the squared norm of the cores in the early stage of "comera".
        threshold: What counts as zero. "comera": rank weights at or below it. "proximal":
            singular values at or below this share of their bond's largest. "rounding", early
            stage: a bond is cut to this relative error.
        warmup_steps: Steps at the start in which the task loss alone is trained.
        early_steps: Length of the early stage, in which ranks fall as far as the loss lets them.
            If there is a target the late stage follows, and it begins earlier once the target is
            met. ``None``: ten times ``prune_every`` for "comera", none for the others; without a
            target, for ever.
        early_epochs: The same in epochs of ``steps_per_epoch`` steps.
        steps_per_epoch: Steps in an epoch.
        plateau: The early stage ends once the running mean of the loss has not fallen by 1 % for
            so many steps. At most one of the three ends may be given.
        shrink_steps: Steps of the late stage over which "proximal" and "rounding" come down to
            the target, fast at first. ``None``: ten times ``prune_every``.
        w1: Weight of the loss in the late stage of "comera".
        w2: Weight of the size there.
        rho: Weight of the sum of both there.
        prune_every: Steps between two cuts.
        patience: Cuts in a row that must find a rank dead before it goes, so that none is lost
            to one noisy step. Ranks that a target size asks for go at once.
        regrow: Share of the size that goes to new ranks at every cut of "proximal" and
            "rounding" on the way to a target, where the gradient asks for them most; the next
            cut takes back what is worth less.
        balance: Whether "comera" without a target turns every bond into its singular directions
            after a cut, and takes those at or below ``threshold`` of the largest for dead.
        min_rank: Ranks are never cut below this; 0 lets a whole layer fade to its bias.
        min_ranks: Pattern of layers to a ``min_rank`` of their own; the first that matches.
        exclude: Patterns of layers whose ranks stay as they are.
        skip_nonfinite: Whether a step whose loss is NaN or infinite is left out, and said to be.
            It waits for the device once a step.
    """

    method: RankMethod = "comera"
    target_ratio: float | None = None
    target_params: int | None = None
    target_bytes: int | None = None
    gamma: float = 0.01
    beta: float = 0.0
    threshold: float = 0.01
    warmup_steps: int = 0
    early_steps: int | None = None
    early_epochs: float | None = None
    steps_per_epoch: int | None = None
    plateau: int | None = None
    shrink_steps: int | None = None
    w1: float = 1.0
    w2: float = 1.0
    rho: float = 0.1
    prune_every: int = 10
    patience: int = 2
    regrow: float = 0.0
    balance: bool = True
    min_rank: int = 0
    min_ranks: Mapping[str, int] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    skip_nonfinite: bool = True

    @property
    def effective_early_steps(self) -> int:
        """Length of the early stage where there is a target and no plateau to wait for."""
        if self.early_steps is not None:
            return self.early_steps
        if self.early_epochs is not None and self.steps_per_epoch is not None:
            return round(self.early_epochs * self.steps_per_epoch)
        return EARLY_PRUNINGS * self.prune_every if self.method == "comera" else 0

    @property
    def effective_shrink_steps(self) -> int:
        """``shrink_steps``, or its default."""
        if self.shrink_steps is not None:
            return self.shrink_steps
        return SHRINK_PRUNINGS * self.prune_every

    def __post_init__(self) -> None:
        methods = get_args(RankMethod)
        _check(
            self.method in methods,
            "RankConfig.method",
            self.method,
            "'comera', 'proximal' or 'rounding'",
            f"use the default, {type(self).method!r}",
        )
        targets = (self.target_ratio, self.target_params, self.target_bytes)
        _check(
            sum(t is not None for t in targets) <= 1,
            "RankConfig target",
            dict(zip(("target_ratio", "target_params", "target_bytes"), targets, strict=True)),
            "at most one target",
            "keep one of the three",
        )
        ratio = self.target_ratio
        _check(
            ratio is None or (_is_number(ratio) and 0 < ratio <= 1),
            "RankConfig.target_ratio",
            ratio,
            "0 < target_ratio <= 1, a share of the TT size at the start",
            "use target_ratio=0.5 for half",
        )
        self._check_optional_counts()
        self._check_weights()
        self._check_counts()
        self._check_ends()
        _check_names("RankConfig.exclude", self.exclude)

    def _check_optional_counts(self) -> None:
        for name, least in (
            ("target_params", 1),
            ("target_bytes", 1),
            ("early_steps", 0),
            ("steps_per_epoch", 1),
            ("plateau", 1),
            ("shrink_steps", 0),
        ):
            value = getattr(self, name)
            _check(
                value is None or _is_count(value, least),
                f"RankConfig.{name}",
                value,
                f"an int of at least {least}, or None",
                "leave it None for the default",
            )

    def _check_weights(self) -> None:
        for name in ("gamma", "beta", "threshold", "w1", "w2", "rho", "regrow"):
            value = getattr(self, name)
            _check(
                _is_number(value) and 0 <= value < float("inf"),
                f"RankConfig.{name}",
                value,
                "a finite number, 0 or more",
                "give 0 to switch it off",
            )
        _check(
            self.w1 + self.rho > 0,
            "RankConfig.w1 + rho",
            self.w1 + self.rho,
            "above 0: the late stage must weigh the loss",
            "use the defaults, w1=1 and rho=0.1",
        )
        _check(
            self.threshold < 1,
            "RankConfig.threshold",
            self.threshold,
            "below 1, the value at which rank weights start",
            "use the default, 0.01",
        )
        _check(
            self.regrow < 1 and (self.regrow == 0 or self.method != "comera"),
            "RankConfig.regrow",
            self.regrow,
            "a share below 1, and 0 with method='comera', which has no budget to grow into",
            "use method='proximal' or 'rounding' with regrow=0.05",
        )

    def _check_counts(self) -> None:
        for name, least in (
            ("warmup_steps", 0),
            ("prune_every", 1),
            ("patience", 1),
            ("min_rank", 0),
        ):
            value = getattr(self, name)
            _check(
                _is_count(value, least),
                f"RankConfig.{name}",
                value,
                f"an int of at least {least}",
                f"give an int, {least} or more",
            )
        floors = self.min_ranks
        _check(
            isinstance(floors, Mapping)
            and all(isinstance(k, str) and _is_count(v, 0) for k, v in floors.items()),
            "RankConfig.min_ranks",
            floors,
            "a mapping from patterns to ints, 0 or more",
            "write min_ranks={'*.fc1': 4}",
        )
        for name, mend in (
            ("skip_nonfinite", "give False where no step may wait for the device"),
            ("balance", "give False for the rank weights of the paper"),
        ):
            value = getattr(self, name)
            _check(isinstance(value, bool), f"RankConfig.{name}", value, "True or False", mend)

    def _check_ends(self) -> None:
        epochs = self.early_epochs
        _check(
            epochs is None or (_is_number(epochs) and 0 <= epochs < float("inf")),
            "RankConfig.early_epochs",
            epochs,
            "a number of epochs, 0 or more, or None",
            "leave it None for the default",
        )
        _check(
            epochs is None or self.steps_per_epoch is not None,
            "RankConfig.steps_per_epoch",
            self.steps_per_epoch,
            "the steps of an epoch, where early_epochs is given",
            "write steps_per_epoch=len(loader)",
        )
        ends = (self.early_steps, epochs, self.plateau)
        _check(
            sum(end is not None for end in ends) <= 1,
            "RankConfig end of the early stage",
            dict(zip(("early_steps", "early_epochs", "plateau"), ends, strict=True)),
            "at most one of the three",
            "keep one of the three",
        )
