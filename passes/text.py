"""Graphs as text, the same on every run, so that it can be compared and tested."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def format_graph(graph: fx.Graph) -> str:
    """Return one line per node, ``%name: shape = op[target](args)``, in execution order."""
    return "\n".join(map(_format_node, graph.nodes))


def _format_node(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_format_arg(node.args[0])}"
    shape = getattr(node.meta.get("val"), "shape", None)
    shown = "" if shape is None else f": {list(shape)}"
    args = [_format_arg(arg) for arg in node.args]
    args += [f"{key}={_format_arg(value)}" for key, value in node.kwargs.items()]
    return f"%{node.name}{shown} = {node.op}[{_name_of(node.target)}]({', '.join(args)})"


def _format_arg(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_format_arg, arg))}]"
    if isinstance(arg, dict):
        return f"{{{', '.join(f'{key!r}: {_format_arg(v)}' for key, v in arg.items())}}}"
    if isinstance(arg, slice):
        return ":".join(
            "" if v is None else _format_arg(v) for v in (arg.start, arg.stop, arg.step)
        )
    return _name_of(arg) if callable(arg) else repr(arg)


def _name_of(target: Any) -> str:
    """Name a target without the memory address that a function's own text may hold."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return getattr(target, "__name__", type(target).__name__)
