"""Which compiled code reads a parameter, so that it can be dropped when the parameter shrinks.

Dynamo keeps a bounded number of compiled versions of a function and then runs it eagerly, or fails
under ``fullgraph=True``. A version for ranks that are gone is of no use, so it makes room.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

CORE = "core_0"
"""What every TT module names its first core; guards of code that reads one say so."""

# Code is compared by identity: equal code of two functions is compiled twice.
_codes: WeakIdKeyDictionary = WeakIdKeyDictionary()
_noted: WeakIdKeyDictionary = WeakIdKeyDictionary()
_optimised: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_code(parameters: Iterable[nn.Parameter]) -> None:
    """Remember that the function which dynamo compiles at the moment reads these parameters."""
    root = function_being_compiled()
    if root is None:
        return
    code = root[0]
    _noted[code] = True
    for parameter in parameters:
        if parameter not in _codes:
            _codes[parameter] = WeakIdKeyDictionary()
        _codes[parameter][code] = True


def note_optimised(parameters: Iterable[nn.Parameter]) -> None:
    """Remember that parameters belong to a model with layers in TT form, dense ones too."""
    for parameter in parameters:
        _optimised[parameter] = True


def is_of_optimised(parameter: nn.Parameter) -> bool:
    """Whether ``note_optimised`` was told of a parameter."""
    return parameter in _optimised


def function_being_compiled() -> tuple[types.CodeType, dict[str, Any], dict[str, Any]] | None:
    """Return code, local and global names of what dynamo compiles at the moment; ``None`` if not.

    Dynamo tells a backend nothing of this but by its translator.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        root = InstructionTranslator.current_tx().output.root_tx
        return root.f_code, root.f_locals, root.f_globals
    except AttributeError:  # called by hand, or by another version of dynamo
        return None


def forget_code(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the compiled versions of all functions that read one of these parameters.

    What another backend has compiled is not noted: there every function is dropped whose guards
    name a core. A function that several models share loses the versions of all of them, which
    compile again when they are called.

    Args:
        parameters: Those whose shapes have changed.
    """
    parameters = list(parameters)
    if not parameters or "torch._dynamo" not in sys.modules:  # nothing was compiled
        return
    from torch._dynamo.eval_frame import reset_code  # type: ignore[attr-defined]

    known = [parameter for parameter in parameters if parameter in _codes]
    codes = {id(code): code for parameter in known for code in _codes[parameter]}
    for parameter in known:
        del _codes[parameter]
    for code in _compiled_codes():
        if code in _noted and len(known) == len(parameters):
            continue
        if id(code) not in codes and _reads_cores(code):
            codes[id(code)] = code
    for code in codes.values():
        reset_code(code)


def _compiled_codes() -> Iterator[types.CodeType]:
    from torch._dynamo.convert_frame import input_codes

    for reference in list(input_codes.seen):
        code = reference()
        if code is not None:
            yield code


def _reads_cores(code: types.CodeType) -> bool:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    entries: list[Any] = _debug_get_cache_entry_list(code)
    return any(CORE in str(entry.guard_manager) for entry in entries)
