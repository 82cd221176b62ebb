"""The options of the backend, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from comera_fx.errors import ConfigError
from comera_fx.lowering import lowering_passes

Inner = Literal["auto", "inductor", "eager", "aot_eager", "cudagraphs"]
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(model, backend="comera", options={...})`` takes.

    Args:
        inner: What compiles the planned graph: "inductor"; "aot_eager", which runs its operators
            one by one, forward and backward graph each as a whole; "eager", which leaves gradients
            to autograd; "cudagraphs". "auto" takes what was measured to be fastest on the device.
        memory_limit_bytes: Plans whose peak is above this are refused.
        dump: Folder for the graphs, pass by pass, and the plans of what is compiled.
        disable: Names of passes to leave out.
        freeze: Compute what depends on weights alone once, for inference.
        fallback_random: Draw the random numbers of eager mode, at its speed.

    Example:
        >>> Options.read({"inner": "aot_eager"}, None).inner
        'aot_eager'
    """

    inner: Inner = "auto"
    memory_limit_bytes: int | None = None
    dump: Path | None = None
    disable: tuple[str, ...] = ()
    freeze: bool = False
    fallback_random: bool = False
    mode: str = "default"

    @classmethod
    def read(cls, options: Mapping[str, Any] | None, mode: str | None) -> Options:
        """Return the options that ``torch.compile`` hands on.

        Args:
            options: Of ``torch.compile``.
            mode: Of ``torch.compile``.

        Raises:
            ConfigError: On an option that there is not, or a value that has no meaning.
        """
        given = dict(options or {})
        known = [field.name for field in fields(cls) if field.name != "mode"]
        unknown = sorted(set(given) - set(known))
        _check(
            not unknown,
            "the backend has no such option",
            ", ".join(unknown),
            f"options among {', '.join(known)}",
            "correct the name",
        )
        if isinstance(given.get("dump"), str):
            given["dump"] = Path(given["dump"])
        names = given.get("disable", ())
        _check(
            isinstance(names, Sequence)
            and not isinstance(names, str)
            and all(isinstance(name, str) for name in names),
            "option disable is no list of passes",
            names,
            "a list of names",
            f"write disable=[{names!r}]"
            if isinstance(names, str)
            else "write disable=['ShareInput']",
        )
        given["disable"] = tuple(names)
        made = cls(**given, mode=mode or "default")
        made._check_values()
        lowering_passes(made.disable)
        return made

    def _check_values(self) -> None:
        expected = get_args(Inner)
        _check(
            self.inner in expected,
            "option inner names no compiler",
            self.inner,
            f"one of {', '.join(expected)}",
            "leave it out for what is fastest on the device",
        )
        limit = self.memory_limit_bytes
        _check(
            limit is None or (type(limit) is int and limit > 0),
            "option memory_limit_bytes is no number of bytes",
            limit,
            "a positive int, or None",
            "give the bytes, such as 2**30",
        )
        _check(
            self.dump is None or isinstance(self.dump, Path),
            "option dump is no folder",
            self.dump,
            "a path",
            "write dump='graphs'",
        )
        for name in ("freeze", "fallback_random"):
            _check(
                type(getattr(self, name)) is bool,
                f"option {name} is neither true nor false",
                getattr(self, name),
                "True or False",
                "leave it out for training",
            )
        _check(
            self.mode in MODES,
            "the backend has no such mode",
            self.mode,
            f"one of {', '.join(MODES)}",
            "leave the mode out",
        )


def _check(good: bool, problem: str, got: object, expected: str, mend: str) -> None:
    if not good:
        raise ConfigError(problem, got=repr(got), expected=expected, mend=mend)
