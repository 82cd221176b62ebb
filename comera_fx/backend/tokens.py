"""Tell TT operators how many tokens to plan for, where their number is a symbol."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import (
    StrictMinMaxConstraint,
    free_symbols,
    free_unbacked_symbols,
)

from comera_fx.backend.graph import VALUE
from comera_fx.ops import operator_name, spec_of
from comera_fx.plan.linear import bucket_tokens
from comera_fx.plan.thresholds import token_intervals
from comera_fx.spec import TTSpec

MOST_INTERVALS = 3
"""Graphs that dynamo compiles for different numbers of tokens; a single token has one more."""
DEFAULT_TOKENS = 4096
"""What is planned for where nothing tells."""


@dataclass(frozen=True)
class _Call:
    node: fx.Node
    num_tokens: Any
    spec: TTSpec | None


def choose_tokens(gm: fx.GraphModule, memory_limit_bytes: int | None = None) -> int:
    """Set what TT operators plan for; return how many have a symbol of tokens.

    The range of tokens in which the plans are good becomes a condition of the graph, so that dynamo
    compiles another one outside of it. Operators on another number of tokens than most plan for
    the hint that their layer was given, or else for the example.

    Args:
        gm: A prepared graph, changed in place.
        memory_limit_bytes: Limit of each plan's peak, for all operators that have one.
    """
    calls = [call for module in gm.modules() for call in _calls(module)]
    if memory_limit_bytes is not None:
        for call in calls:
            if operator_name(call.node.target) == "tt_linear":
                call.node.kwargs = {**call.node.kwargs, "memory_limit_bytes": memory_limit_bytes}
    symbolic = [call for call in calls if isinstance(call.num_tokens, torch.SymInt)]
    bound = _most_frequent(call for call in symbolic if call.spec is not None)
    if bound:
        planned = _bind(bound)
        for call in bound:
            _set_hint(call.node, planned)
    nodes = {call.node for call in bound}
    for call in symbolic:
        if call.node not in nodes and "num_tokens_hint" not in call.node.kwargs:
            _set_hint(call.node, bucket_tokens(max(_hint(call.num_tokens), 2)))
    return len(symbolic)


def _most_frequent(calls: Iterable[_Call]) -> list[_Call]:
    """Return the calls on that number of tokens which most of them have.

    Ranges of a second number would multiply the graphs.
    """
    groups: dict[str, list[_Call]] = {}
    for call in calls:
        groups.setdefault(str(call.num_tokens), []).append(call)
    return max(groups.values(), key=len, default=[])


def _bind(calls: list[_Call]) -> int:
    """Bind the graph to the range in which the number of tokens is; return what to plan for."""
    num_tokens = calls[0].num_tokens
    first = calls[0].node.all_input_nodes[0].meta[VALUE]
    specs = tuple(call.spec for call in calls if call.spec is not None)
    most = MOST_INTERVALS if _may_guard(num_tokens) else 1
    intervals = token_intervals(specs, most, first.element_size(), first.device.type)
    hint = max(_hint(num_tokens), 2)
    chosen = next(each for each in intervals if hint in each)
    # A comparison with a symbol becomes a guard, so that another range is another graph. Within the
    # range both hold, whatever the example; 0 and 1 tokens are below it.
    holds = chosen.first <= 2 or bool(num_tokens >= chosen.first)
    holds = holds and (chosen.last is None or bool(num_tokens <= chosen.last))
    assert holds, "the example's number of tokens is in the range chosen for it"
    return chosen.planned


def _may_guard(num_tokens: torch.SymInt) -> bool:
    """Whether the number of tokens may be bound to a range.

    Not where it depends on data, nor where the user has told the range of one of its sizes: then
    one graph has to serve it all.
    """
    symbols = free_symbols(num_tokens)
    if free_unbacked_symbols(num_tokens):
        return False
    for tracked in num_tokens.node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(constraint, StrictMinMaxConstraint) and free_symbols(size) & symbols:
                return False
    return True


def _set_hint(node: fx.Node, num_tokens: int) -> None:
    node.kwargs = {**node.kwargs, "num_tokens_hint": num_tokens}


def _hint(num_tokens: torch.SymInt) -> int:
    """Return the number that a symbol has in the example; one that depends on data has none."""
    hint = num_tokens.node.hint
    return DEFAULT_TOKENS if hint is None else int(hint)


def _calls(module: torch.nn.Module) -> list[_Call]:
    if not isinstance(module, fx.GraphModule):
        return []
    found = []
    for node in module.graph.nodes:
        name = operator_name(node.target)
        if name not in ("tt_linear", "tt_embedding"):
            continue
        value = node.all_input_nodes[0].meta.get(VALUE)
        if isinstance(value, Tensor) and value.dim():
            sizes = value.shape[:-1] if name == "tt_linear" else value.shape
            num_tokens: Any = 1
            for size in sizes:
                num_tokens = num_tokens * size
            found.append(_Call(node, num_tokens, _spec(node) if name == "tt_linear" else None))
    return found


def _spec(node: fx.Node) -> TTSpec | None:
    """Return the shape of what a ``tt_linear`` applies, where the graph tells."""
    given: Any = node.args
    cores = [core.meta.get(VALUE) for core in given[1]]
    known = [core for core in cores if isinstance(core, Tensor)]
    if len(known) < len(cores):
        return None
    shapes = tuple(tuple(int(size) for size in core.shape) for core in known)
    spec = spec_of(given[3], given[4], shapes, bool(node.kwargs.get("transposed", False)))
    return None if 0 in spec.ranks else spec
