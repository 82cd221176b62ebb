"""Which nodes of a graph may write to what another one holds; in doubt they may."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

IN_PLACE = (
    operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
    operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub,
    operator.itruediv, operator.ixor, operator.setitem,
)  # fmt: skip
_STATISTICS = ("running_mean", "running_var")
"""Arguments that normalisations write to while they train."""
_BODIES = ("wrap", "tag_activation_checkpoint", "checkpoint")
"""Higher-order operators that hand what follows their first argument, a graph, to that graph."""
_COMPUTES = frozenset(
    ["linear", "matmul", "mm", "addmm", "bmm", "embedding", "add", "mul", "sub", "div", "tanh"]
)
"""Functions and methods whose results are memory of their own."""


def is_written(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether some node may change in place what ``node`` holds, by it or by its views.

    A reader that is rewritten to read the cores would miss such a change.
    """
    return any(True for _ in writers_of(gm, node))


def writers_of(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Return the nodes that may change in place what ``node`` holds, by it or by its views."""
    seen, waiting = {node}, [node]
    while waiting:
        held = waiting.pop()
        for user in held.users:
            if writes_to(gm, user, held):
                yield user
            if user not in seen and may_return_view(user):
                seen.add(user)
                waiting.append(user)


def is_writer(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node may change in place something that it reads."""
    return any(writes_to(gm, node, held) for held in node.all_input_nodes)


def changes_between(gm: fx.GraphModule, node: fx.Node, first: fx.Node, last: fx.Node) -> bool:
    """Whether something from ``first`` to ``last`` may write to what ``node`` holds.

    By the node itself, by what it may be a view of, or, where that is an input of the graph, by
    another input, since two of them may share memory.
    """
    writers = set()
    while (first := first.next) is not last:
        if is_writer(gm, first):
            writers.add(first)
    if not writers:
        return False
    sources = _sources(node)
    if any(not writers.isdisjoint(writers_of(gm, source)) for source in sources):
        return True
    if not any(map(_is_input, sources)):
        return False
    written = (held for w in writers for held in w.all_input_nodes if writes_to(gm, w, held))
    return any(_is_input(source) for held in written for source in _sources(held))


def _sources(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it may be a view of."""
    seen, waiting = {node}, [node]
    while waiting:
        held = waiting.pop()
        if held.op not in ("placeholder", "get_attr") and may_return_view(held):
            new = [inner for inner in held.all_input_nodes if inner not in seen]
            seen.update(new)
            waiting += new
    return seen


def _is_input(node: fx.Node) -> bool:
    """Whether a node is an input of the graph that may share memory with others."""
    return node.op == "placeholder"


def writes_to(gm: fx.GraphModule, user: fx.Node, held: fx.Node) -> bool:
    """Whether ``user`` may change in place what ``held``, which it reads, holds."""
    if user.op == "call_module":
        return bool(getattr(gm.get_submodule(str(user.target)), "inplace", False))
    if isinstance(user.target, torch._ops.OpOverload):
        return any(held is written for written in _written_arguments(user, user.target))
    if isinstance(user.target, torch._ops.HigherOrderOperator):
        return _body_writes(gm, user, held)
    if user.op not in ("call_function", "call_method"):
        return False
    given = _named_arguments(user)
    if given.get("training", True) and any(given.get(name) is held for name in _STATISTICS):
        return True
    first = user.args[0] if user.args else given.get("input")
    is_first = first is held or (isinstance(first, (list, tuple)) and held in first)
    return user.kwargs.get("out") is held or (is_first and works_in_place(user))


def works_in_place(node: fx.Node) -> bool:
    """Whether a call of a function or method changes its first argument."""
    if node.target in IN_PLACE or _named_arguments(node).get("inplace"):
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).endswith("_") and not str(name).endswith("__")


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, as far as the function tells its parameters."""
    names = _parameters(node.target) if node.op == "call_function" else ()
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


@lru_cache(maxsize=1024)
def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return ()


def _written_arguments(user: fx.Node, target: torch._ops.OpOverload) -> Iterator[Any]:
    for k, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = user.args[k] if k < len(user.args) else user.kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def _body_writes(gm: fx.GraphModule, call: fx.Node, held: fx.Node) -> bool:
    """Whether the graph that a higher-order operator runs may write to what it is handed."""
    body = call.args[0] if call.args else None
    graph = None
    if isinstance(body, fx.Node) and body.op == "get_attr" and str(call.target) in _BODIES:
        graph = getattr(gm, str(body.target), None)
    if not isinstance(graph, fx.GraphModule):
        return held is not body and held.op != "get_attr"
    inner = graph.graph.find_nodes(op="placeholder")
    pairs = zip(inner, call.args[1:], strict=False)
    return any(is_written(graph, node) for node, operand in pairs if operand is held)


def may_return_view(user: fx.Node) -> bool:
    """Whether what ``user`` returns may share the memory of what it reads."""
    if isinstance(user.target, torch._ops.OpOverload):
        return any(result.alias_info is not None for result in user.target._schema.returns)
    name = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
    return user.op == "call_module" or name not in _COMPUTES
