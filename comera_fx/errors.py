"""Errors a user can meet, one class per stage.

A user fault raises one of these. A broken promise between modules of this
package is an ``assert``: no message could help the user mend it.
"""

from __future__ import annotations


class ComeraError(ValueError):
    """A fault in the model, the configuration or the inputs.

    Args:
        problem: What is wrong, naming the module or graph node.
        got: The offending value, as the user would write it.
        expected: The rule it breaks.
        mend: The smallest change that makes the call succeed.
    """

    def __init__(self, problem: str, *, got: object, expected: str, mend: str) -> None:
        self.problem, self.got, self.expected, self.mend = problem, got, expected, mend
        lines = (problem, f"  got:      {got}", f"  expected: {expected}", f"  mend:     {mend}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        fields = {"got": self.got, "expected": self.expected, "mend": self.mend}
        return _rebuild, (type(self), self.problem, fields)


def _rebuild(cls: type[ComeraError], problem: str, fields: dict[str, str]) -> ComeraError:
    return cls(problem, **fields)


class ConfigError(ComeraError):
    """A setting that has no meaning, or that names nothing in the model."""


class SpecError(ComeraError):
    """A tensor-train shape that cannot hold the weight it is for."""


class WeightError(ComeraError):
    """A weight that cannot be decomposed, such as one with NaN in it."""


class CaptureError(ComeraError):
    """A model or example inputs that cannot be captured or copied."""


class InputError(ComeraError):
    """A tensor given to a layer or operator in the wrong shape, dtype or range."""


class PlanError(ComeraError):
    """A contraction for which no plan meets the limits asked for."""


class RankError(ComeraError):
    """Rank adaptation that cannot work on the model or optimizer it was given."""
