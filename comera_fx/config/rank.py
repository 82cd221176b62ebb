"""Settings of rank adaptation, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from comera_fx.config.checks import check, check_names, is_count, is_number

EARLY_PRUNINGS = 10
"""Default length of the early stage of "comera", in cuts, where there is a target."""
SHRINK_PRUNINGS = 10
"""Default length of the way down to a target, in cuts."""
RankMethod = Literal["comera", "proximal", "rounding"]


@dataclass(frozen=True)
class RankConfig:
    """How ranks adapt in training; see ``comera_fx/train/README.md`` for the formulas.

    Args:
        method: How ranks are brought to zero. ``"proximal"``: every cut of the early stage lowers
            the singular values of every bond, and takes away those that have come down to next to
            nothing; the late stage weakens a little what the next cut takes. ``"rounding"``: the
            smallest singular values are cut at once. ``"comera"``, as in the paper: every rank has
            a weight, a parameter that the size penalty pulls down.
        target_ratio: Size to reach, as a share of the TT size at the start.
        target_params: Size to reach, in parameters. At most one target may be given.
        target_bytes: Size to reach, in bytes of the cores.
        gamma: Strength of what pulls ranks down in the early stage. "comera": weight of the size
            penalty. "proximal": what a bond's singular values lose at every cut, as a share, below
            1, of the largest that the bond has had, for a rank of average cost; what stays gets
            the norm back. "rounding" has none.
        beta: Weight of the squared norm of the cores in the early stage of "comera".
        threshold: What counts as zero. "comera": rank weights at or below it. "proximal":
            singular values at or below this share of the largest that their bond has ever had.
            "rounding", early stage: a bond is cut to this relative error.
        warmup_steps: Steps at the start in which the task loss alone is trained.
        early_steps: Length of the early stage, in which ranks fall as far as the loss lets them.
            The late stage follows, and it begins earlier once the target is met. ``None``: ten
            times ``prune_every`` for "comera", none for the others. Without a target the early
            stage has no end, and what sets it or the late stage is refused.
        early_epochs: The same in epochs of ``steps_per_epoch`` steps.
        steps_per_epoch: Steps in an epoch, where ``early_epochs`` is given.
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
            after a cut, and takes those at or below ``threshold`` of the largest that the bond has
            ever had for dead.
        min_rank: Ranks are never cut below this, by ``compact`` neither; 0 lets a whole layer fade
            to its bias.
        min_ranks: Pattern of layers to a ``min_rank`` of their own; the first that matches.
        exclude: Patterns of layers whose ranks stay as they are.
        skip_nonfinite: Whether a step whose loss or gradient is NaN or infinite is left out, and
            said to be. It reads the gradients, and waits for the device once a step.
    """

    method: RankMethod = "proximal"
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
        check(
            self.method in methods,
            "RankConfig.method",
            self.method,
            "'comera', 'proximal' or 'rounding'",
            f"use the default, {type(self).method!r}",
        )
        targets = (self.target_ratio, self.target_params, self.target_bytes)
        check(
            sum(t is not None for t in targets) <= 1,
            "RankConfig target",
            dict(zip(("target_ratio", "target_params", "target_bytes"), targets, strict=True)),
            "at most one target",
            "keep one of the three",
        )
        ratio = self.target_ratio
        check(
            ratio is None or (is_number(ratio) and 0 < ratio <= 1),
            "RankConfig.target_ratio",
            ratio,
            "0 < target_ratio <= 1, a share of the TT size at the start",
            "use target_ratio=0.5 for half",
        )
        self._check_optional_counts()
        self._check_weights()
        self._check_counts()
        self._check_ends()
        self._check_fits_method()
        self._check_fits_target(has_target=any(t is not None for t in targets))
        check_names("RankConfig.exclude", self.exclude)

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
            check(
                value is None or is_count(value, least),
                f"RankConfig.{name}",
                value,
                f"an int of at least {least}, or None",
                "leave it None for the default",
            )

    def _check_weights(self) -> None:
        for name in ("gamma", "beta", "threshold", "w1", "w2", "rho", "regrow"):
            value = getattr(self, name)
            check(
                is_number(value) and 0 <= value < float("inf"),
                f"RankConfig.{name}",
                value,
                "a finite number, 0 or more",
                "give 0 to switch it off",
            )
        check(
            self.w1 + self.rho > 0,
            "RankConfig.w1 + rho",
            self.w1 + self.rho,
            "above 0: the late stage must weigh the loss",
            "use the defaults, w1=1 and rho=0.1",
        )
        check(
            self.threshold < 1,
            "RankConfig.threshold",
            self.threshold,
            "below 1, the value at which rank weights start",
            "use the default, 0.01",
        )
        check(
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
            check(
                is_count(value, least),
                f"RankConfig.{name}",
                value,
                f"an int of at least {least}",
                f"give an int, {least} or more",
            )
        floors = self.min_ranks
        check(
            isinstance(floors, Mapping)
            and all(isinstance(k, str) and is_count(v, 0) for k, v in floors.items()),
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
            check(isinstance(value, bool), f"RankConfig.{name}", value, "True or False", mend)

    def _check_ends(self) -> None:
        epochs = self.early_epochs
        check(
            epochs is None or (is_number(epochs) and 0 <= epochs < float("inf")),
            "RankConfig.early_epochs",
            epochs,
            "a number of epochs, 0 or more, or None",
            "leave it None for the default",
        )
        check(
            epochs is None or self.steps_per_epoch is not None,
            "RankConfig.steps_per_epoch",
            self.steps_per_epoch,
            "the steps of an epoch, where early_epochs is given",
            "write steps_per_epoch=len(loader)",
        )
        check(
            epochs is not None or self.steps_per_epoch is None,
            "RankConfig.steps_per_epoch",
            self.steps_per_epoch,
            "None without early_epochs: nothing else is counted in epochs",
            "give early_epochs too, or count in steps: early_steps",
        )
        ends = (self.early_steps, epochs, self.plateau)
        check(
            sum(end is not None for end in ends) <= 1,
            "RankConfig end of the early stage",
            dict(zip(("early_steps", "early_epochs", "plateau"), ends, strict=True)),
            "at most one of the three",
            "keep one of the three",
        )

    def _check_fits_method(self) -> None:
        method, default = self.method, type(self)
        check(
            self.gamma < 1 or method != "proximal",
            "RankConfig.gamma",
            self.gamma,
            "below 1 with method='proximal', where it is the share that a cut takes off at once",
            "use the default, 0.01, or method='comera', where gamma weighs the size penalty",
        )
        for name in ("beta", "w1", "w2", "rho"):
            value = getattr(self, name)
            check(
                method == "comera" or value == getattr(default, name),
                f"RankConfig.{name}",
                value,
                f"left out with method={method!r}, which minimises the task loss alone",
                f"leave out {name}, or use method='comera'",
            )
        check(
            self.shrink_steps is None or method != "comera",
            "RankConfig.shrink_steps",
            self.shrink_steps,
            "None with method='comera', which comes down by its objective, by no schedule",
            "leave out shrink_steps and raise rho, or use method='proximal' or 'rounding'",
        )

    def _check_fits_target(self, *, has_target: bool) -> None:
        early = ("early_steps", "early_epochs", "plateau")
        for name in (*early, "shrink_steps", "regrow", "w1", "w2", "rho"):
            value, default = getattr(self, name), getattr(type(self), name)
            check(
                has_target or value == default,
                f"RankConfig.{name}",
                value,
                "left out without a target, where the early stage has no end",
                f"give a target such as target_ratio=0.5, or leave out {name}",
            )
