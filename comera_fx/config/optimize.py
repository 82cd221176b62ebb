"""Settings of ``optimize`` and of the planner, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from comera_fx.config.checks import check, check_names, is_count, is_number

Objective = Literal["flops", "time", "memory"]
Layout = Literal["tt", "ttm"]
Ranks = int | tuple[int, ...]
ModePair = tuple[tuple[int, ...], tuple[int, ...]]


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
        check(
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
            check(isinstance(value, bool), f"PlanConfig.{name}", value, "True or False", mend)
        limit = self.memory_limit_bytes
        check(
            limit is None or is_count(limit, 1),
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
            check(
                is_count(value, least),
                f"OptimizeConfig.{name}",
                value,
                f"an int of at least {least}",
                f"give an int, {least} or more",
            )
        check(
            self.tol is None or (is_number(self.tol) and 0 <= self.tol < 1),
            "OptimizeConfig.tol",
            self.tol,
            "a relative error, 0 <= tol < 1, or None",
            "use tol=0.05 for 5 %",
        )
        check(
            is_count(self.seed, 0) and self.seed < 2**64,
            "OptimizeConfig.seed",
            self.seed,
            "an int, 0 or more, below 2**64",
            "give a small int such as 0",
        )

    def _check_types(self) -> None:
        if self.targets is not None:
            check_names("OptimizeConfig.targets", self.targets)
        check_names("OptimizeConfig.exclude", self.exclude)
        for name, example in (("ranks", "30"), ("layouts", "'ttm'"), ("modes", "((8, 8), (8, 8))")):
            value = getattr(self, name)
            check(
                isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
                f"OptimizeConfig.{name}",
                value,
                "a mapping from patterns",
                f"write {name}={{'*.fc1': {example}}}",
            )
        check(
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
            check(isinstance(value, bool), f"OptimizeConfig.{name}", value, "True or False", mend)

    def _check_choices(self) -> None:
        check(
            self.init in ("decompose", "random"),
            "OptimizeConfig.init",
            self.init,
            "'decompose' or 'random'",
            "use 'decompose' for trained weights, 'random' from scratch",
        )
        for pattern, layout in self.layouts.items():
            check(
                layout in ("tt", "ttm"),
                f"OptimizeConfig.layouts[{pattern!r}]",
                layout,
                "'tt' or 'ttm'",
                "use 'tt' for linear layers, 'ttm' for embeddings",
            )

    def _check_patterns(self) -> None:
        for pattern, rank in self.ranks.items():
            entries = rank if isinstance(rank, tuple) else (rank,)
            check(
                bool(entries) and all(is_count(r, 1) for r in entries),
                f"OptimizeConfig.ranks[{pattern!r}]",
                rank,
                "an int of at least 1, or a tuple of such ints with both ends 1",
                "write 30 or (1, 12, 30, 30, 30, 12, 1)",
            )
        for pattern, pair in self.modes.items():
            sides = tuple(pair) if isinstance(pair, (tuple, list)) else ()
            good = len(sides) == 2 and all(
                isinstance(side, (tuple, list)) and side and all(is_count(m, 1) for m in side)
                for side in sides
            )
            check(
                good,
                f"OptimizeConfig.modes[{pattern!r}]",
                pair,
                "a pair (in_modes, out_modes) of non-empty tuples of positive ints",
                "write ((12, 8, 8), (8, 8, 12))",
            )
