"""What every setting is checked by."""

from __future__ import annotations

from collections.abc import Collection

from comera_fx.errors import ConfigError


def check(holds: bool, name: str, got: object, expected: str, mend: str) -> None:
    """Raise ``ConfigError`` that the setting ``name`` is out of range, unless ``holds``."""
    if not holds:
        raise ConfigError(f"{name} is out of range", got=repr(got), expected=expected, mend=mend)


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object, least: int) -> bool:
    """Return whether a value is an int of at least ``least``, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_names(name: str, value: object) -> None:
    """Check for patterns that outlast one reading, which an iterator does not."""
    is_some = isinstance(value, Collection) and not isinstance(value, str)
    field = name.rpartition(".")[2]
    check(
        is_some and all(isinstance(pattern, str) for pattern in value),  # type: ignore[attr-defined]
        name,
        value,
        "a sequence of patterns",
        f"write {field}=[{value!r}]" if isinstance(value, str) else f"write {field}=['*.fc1']",
    )
