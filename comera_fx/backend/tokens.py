"""Tell TT operators how many tokens to plan for, where their number is a symbol."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from comera_fx.backend.graph import VALUE
from comera_fx.ops import spec_of
from comera_fx.plan.linear import bucket_tokens
from comera_fx.plan.thresholds import token_intervals
from comera_fx.spec import TTSpec

MOST_INTERVALS = 3
"""Graphs that dynamo compiles for different numbers of tokens; a single token has one more."""


@dataclass(frozen=True)
class _Call:
    node: fx.Node
    num_tokens: Any
    spec: TTSpec | None


def choose_tokens(gm: fx.GraphModule, memory_limit_bytes: int | None = None) -> int:
    """Set what TT operators plan for; return how many have a symbol of tokens.

    The range of tokens in which the plans are good becomes a condition of the graph, so that dynamo
    compiles another one outside of it.

    Args:
        gm: A prepared graph, changed in place.
        memory_limit_bytes: Limit of each plan's peak, for all operators that have one.
    """
    calls = [call for module in gm.modules() for call in _calls(module)]
    if memory_limit_bytes is not None:
        for call in calls:
            if _name(call.node) == "tt_linear":
                call.node.kwargs = {**call.node.kwargs, "memory_limit_bytes": memory_limit_bytes}
    symbolic = [call for call in calls if isinstance(call.num_tokens, torch.SymInt)]
    known = [call for call in symbolic if call.spec is not None]
    if known:
        _bind(known)
    for call in symbolic:
        if "num_tokens_hint" not in call.node.kwargs or call not in known:
            _set_hint(call.node, bucket_tokens(max(_hint(call.num_tokens), 2)))
    return len(symbolic)


def _bind(calls: list[_Call]) -> None:
    """Plan the calls on the most frequent number of tokens for the range in which it is."""
    expression = Counter(str(call.num_tokens) for call in calls).most_common(1)[0][0]
    mine = [call for call in calls if str(call.num_tokens) == expression]
    num_tokens = mine[0].num_tokens
    first = mine[0].node.all_input_nodes[0].meta[VALUE]
    specs = tuple(call.spec for call in mine if call.spec is not None)
    intervals = token_intervals(specs, MOST_INTERVALS, first.element_size(), first.device.type)
    hint = _hint(num_tokens)
    chosen = next(each for each in intervals if max(hint, 2) in each)
    # Each comparison becomes a guard, so that another range is another graph.
    if chosen.first > 2:
        assert bool(num_tokens >= chosen.first)
    if chosen.last is not None:
        assert bool(num_tokens <= chosen.last)
    for call in mine:
        _set_hint(call.node, chosen.planned)


def _set_hint(node: fx.Node, num_tokens: int) -> None:
    node.kwargs = {**node.kwargs, "num_tokens_hint": num_tokens}


def _hint(num_tokens: Any) -> int:
    """Return the number that a symbol has in the example."""
    hint = num_tokens.node.hint if isinstance(num_tokens, torch.SymInt) else num_tokens
    return int(hint) if hint is not None else 4096


def _calls(module: torch.nn.Module) -> list[_Call]:
    if not isinstance(module, fx.GraphModule):
        return []
    found = []
    for node in module.graph.nodes:
        name = _name(node)
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


def _name(node: fx.Node) -> str:
    namespace, _, name = str(node.target).partition(".")
    return name.split(".")[0] if namespace == "comera_fx" else ""


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
