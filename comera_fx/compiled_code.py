"""Which compiled code reads a parameter, so that it can be dropped when the parameter shrinks.

Dynamo keeps a bounded number of compiled versions of a function and then runs it eagerly, or fails
under ``fullgraph=True``. A version for ranks that are gone is of no use, so it makes room.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterable

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_codes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_code(parameters: Iterable[nn.Parameter]) -> None:
    """Remember that the function which dynamo compiles at the moment reads these parameters."""
    code = _code_being_compiled()
    if code is None:
        return
    for parameter in parameters:
        if parameter not in _codes:
            _codes[parameter] = weakref.WeakSet()
        _codes[parameter].add(code)


def _code_being_compiled() -> types.CodeType | None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code: types.CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    except AttributeError:  # called by hand, or by another version of dynamo
        return None
    return code


def forget_code(parameters: Iterable[nn.Parameter], modules: Iterable[nn.Module] = ()) -> None:
    """Drop the compiled versions of all functions that read one of these parameters.

    Args:
        parameters: Those whose shapes have changed.
        modules: Modules whose own ``forward`` may have been compiled by another backend, which
            notes nothing.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        return
    from torch._dynamo.eval_frame import reset_code  # type: ignore[attr-defined]

    codes: set[types.CodeType] = set()
    for parameter in parameters:
        if parameter in _codes:
            codes.update(_codes[parameter])
            del _codes[parameter]
    for module in modules:
        forward = getattr(type(module), "forward", None)
        code = getattr(forward, "__code__", None)
        if code is not None:
            codes.add(code)
    for code in codes:
        reset_code(code)
