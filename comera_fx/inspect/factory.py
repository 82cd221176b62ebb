"""Find the model that ``MODULE:FACTORY`` names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from comera_fx.errors import ConfigError

EXPECTED = "MODULE:FACTORY, a module that can be imported and a callable in it"
MEND = "write comera-fx inspect my_package.my_module:make_model"
RETURNS = "a model, or a pair (model, example_inputs)"


def load(target: str) -> tuple[nn.Module, Any]:
    """Return the model and the example inputs that a factory returns.

    Modules are looked for in the working folder as well, as by ``python -m``.

    Args:
        target: ``"package.module:factory"``; the factory is called without arguments, and returns
            a model or a pair of model and example inputs. A dotted name leads into attributes.

    Returns:
        The model, and its example inputs or ``None``.

    Raises:
        ConfigError: If nothing is there under this name, or it fails, or returns no model.

    Example:
        >>> load("torch.nn:Identity")
        (Identity(), None)
    """
    module_name, colon, path = target.partition(":")
    if not (colon and module_name and path):
        raise ConfigError("no factory is named", got=target, expected=EXPECTED, mend=MEND)
    with _working_folder():
        found: Any = _import(module_name, target)
        for part in path.split("."):
            found = _attribute(found, part, target)
        if not callable(found):
            raise ConfigError(
                "what is named is no factory",
                got=f"{target}, of type {type(found).__name__}",
                expected="a callable that returns " + RETURNS,
                mend=f"write def {path}() in {module_name}, or name a function that is there",
            )
        made = _call(found, target)
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1]
    raise ConfigError(
        "the factory returns no model",
        got=f"{target} returned {_shown(made)}",
        expected=RETURNS + "; the model is a torch.nn.Module",
        mend="return model, (x,) at its end",
    )


@contextmanager
def _working_folder() -> Iterator[None]:
    """Look for modules in the working folder, as ``python -m`` does."""
    folder = str(Path.cwd())
    known = folder in sys.path
    if not known:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if not known and folder in sys.path:
            sys.path.remove(folder)


def _import(name: str, target: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):
            raise _failed(f"module {name} cannot be imported", error) from error
        raise ConfigError(
            "the module is not there",
            got=f"{target}: {error}",
            expected=EXPECTED,
            mend="run the command in the folder of the module, or install its package",
        ) from error
    except Exception as error:
        raise _failed(f"module {name} cannot be imported", error) from error


def _attribute(owner: Any, name: str, target: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        there = [n for n, value in vars(owner).items() if callable(value) and n[:1] != "_"]
        raise ConfigError(
            "the factory is not there",
            got=f"{target}: {error}",
            expected=EXPECTED,
            mend=f"name one of: {', '.join(there[:8])}" if there else MEND,
        ) from error


def _call(factory: Any, target: str) -> Any:
    try:
        return factory()
    except Exception as error:
        raise _failed(f"{target} fails", error) from error


def _failed(problem: str, error: Exception) -> ConfigError:
    first = str(error).strip().partition("\n")[0]
    return ConfigError(
        problem,
        got=f"{type(error).__name__}: {first}",
        expected="a factory that takes no arguments and returns " + RETURNS,
        mend="mend it until it runs by itself in Python",
    )


def _shown(made: object) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a {type(made).__name__}"
