"""Rewrite equal-shaped TT layers so that their factors are made together, once a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from comera_fx.ops import spec_of
from comera_fx.passes.match import replace_call
from comera_fx.passes.weight_only import WeightOnly, erase_unused, may_reorder, move_before
from comera_fx.spec import TTSpec

_SETTINGS = {
    "num_tokens_hint", "objective", "memory_limit_bytes", "pad_ranks", "autotune",
}  # fmt: skip


@dataclass(frozen=True)
class BatchChains:
    """Make the factors ``W^T = L R`` of equal-shaped layers in one batched chain.

    Before::

        %a = call_function[comera_fx.tt_linear.default](
            %x, [%a_core_0, %a_core_1], %a_bias, 'tt', 1, 768, 768)
        %b = call_function[comera_fx.tt_linear.default](
            %a, [%b_core_0, %b_core_1], None, 'tt', 1, 768, 768)

    After::

        %factors = call_function[comera_fx.tt_factors.default](
            [%a_core_0, %a_core_1, %b_core_0, %b_core_1], 2, 'tt', 1, 768, 768)
        %a_left = call_function[getitem](%factors, 0)
        %b_left = call_function[getitem](%factors, 1)
        %a_right = call_function[getitem](%factors, 2)
        %b_right = call_function[getitem](%factors, 3)
        %a_results = call_function[comera_fx.tt_apply.default](
            %x, [%a_left], [%a_right], [%a_bias])
        %a = call_function[getitem](%a_results, 0)
        %b_results = call_function[comera_fx.tt_apply.default](
            %a, [%b_left], [%b_right], [None])
        %b = call_function[getitem](%b_results, 0)

    Layers of one group have the same spec, features, dtype and devices. Cores that several calls
    read, by one node, by a tied weight's other name or by an equal computation, are in it once.
    The factors stand before their first reader, and cores that came later move up with them.

    Numerics: keeps them, up to rounding.
    Leaves alone: groups that ``choose`` turns down; layout "ttm"; ranks cut to 0; cores that
    depend on more than weights, are random, or may be written to; cores whose shapes the graph
    does not tell; graphs that switch gradients or autocast on the way, and module graphs; and
    ``tt_embedding``, also where it reads a head's cores. Its rows keep the cores' dtype under
    autocast, which factors do not, and where ``FuseReconstruction`` reversed the cores, ids and
    features are numbered in another order than the head's.

    Args:
        choose: Whether the calls of a group are rewritten, given its spec, in the graph's order.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011: an unfolding of the tensor at a bond.
    """

    choose: Callable[[TTSpec, Sequence[fx.Node]], bool]
    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of calls that now apply factors."""
        if not may_reorder(gm):
            return 0
        weights = WeightOnly(gm)
        groups: dict[_Group, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            call = _call_of(node)
            group = None if call is None else _group_of(weights, call)
            if call is not None and group is not None:
                groups.setdefault(group, []).append(node)
        num_rewrites = 0
        for group, nodes in groups.items():
            if self.choose(group.spec, nodes):
                _rewrite(weights, group, nodes)
                num_rewrites += len(nodes)
        return num_rewrites


class _Call(NamedTuple):
    """A ``tt_linear`` node with its arguments by name."""

    node: fx.Node
    x: fx.Node
    cores: tuple[fx.Node, ...]
    bias: fx.Node | None
    layout: str
    num_in_modes: int
    in_features: int
    out_features: int


class _Group(NamedTuple):
    """What calls of one group have in common."""

    spec: TTSpec
    in_features: int
    out_features: int
    dtype: torch.dtype
    devices: tuple[str, ...]


def _call_of(node: fx.Node) -> _Call | None:
    tt_linear = torch.ops.comera_fx.tt_linear
    if node.op != "call_function" or node.target not in (tt_linear, tt_linear.default):
        return None
    names = ("x", *_Call._fields[2:])
    given: dict[str, Any] = dict(zip(names, node.args, strict=False))
    given.update((key, value) for key, value in node.kwargs.items() if key not in _SETTINGS)
    call = _Call(node, given.pop("x"), tuple(given.pop("cores")), **given)
    is_known = all(isinstance(part, fx.Node) for part in (call.x, *call.cores))
    is_fixed = all(isinstance(size, int) for size in call[5:])
    return call if is_known and is_fixed and call.layout == "tt" else None


def _group_of(weights: WeightOnly, call: _Call) -> _Group | None:
    """Return what a call shares with those of its group, where the graph tells."""
    values = [weights.value(core) for core in call.cores]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len({value.dtype for value in known}) > 1:
        return None
    spec = spec_of(call.layout, call.num_in_modes, tuple(tuple(value.shape) for value in known))
    devices = {device for core in call.cores for device in weights.devices(core)}
    if 0 in spec.ranks:
        return None
    sizes = (call.in_features, call.out_features)
    return _Group(spec, *sizes, known[0].dtype, tuple(sorted(devices)))


def _rewrite(weights: WeightOnly, group: _Group, nodes: Sequence[fx.Node]) -> None:
    calls = [call for node in nodes if (call := _call_of(node)) is not None]
    trains: dict[Hashable, tuple[fx.Node, ...]] = {}
    keys = [tuple(map(weights.key, call.cores)) for call in calls]
    for key, call in zip(keys, calls, strict=True):
        trains.setdefault(key, call.cores)
    lefts, rights = _insert_factors(group, list(trains.values()), calls[0])
    places = {key: place for place, key in enumerate(trains)}
    for key, call in zip(keys, calls, strict=True):
        result = _insert_apply(call.node, lefts[places[key]], rights[places[key]])
        replace_call(call.node, result)
    erase_unused(core for call in calls for core in call.cores)


def _insert_factors(
    group: _Group, trains: Sequence[tuple[fx.Node, ...]], first: _Call
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Insert the factors of all cores before the first call, and return one node a factor."""
    cores = [core for train in trains for core in train]
    for core in cores:
        move_before(core, first.node)
    graph, num_layers = first.node.graph, len(trains)
    sizes = (first.num_in_modes, group.in_features, group.out_features)
    with graph.inserting_before(first.node):
        factors = graph.call_function(
            torch.ops.comera_fx.tt_factors.default, (cores, num_layers, "tt", *sizes)
        )
        factors.meta["tt_spec"] = group.spec
        made = [
            graph.call_function(operator.getitem, (factors, place))
            for place in range(2 * num_layers)
        ]
    return made[:num_layers], made[num_layers:]


def _insert_apply(node: fx.Node, left: fx.Node, right: fx.Node) -> fx.Node:
    call = _call_of(node)  # read anew: its input may be the result of one rewritten before
    assert call is not None
    graph, args = node.graph, (call.x, [left], [right], [call.bias])
    with graph.inserting_before(node):
        results = graph.call_function(torch.ops.comera_fx.tt_apply.default, args)
        result = graph.call_function(operator.getitem, (results, 0))
    meta = {key: value for key, value in node.meta.items() if key != "tt_spec"}
    results.meta = {key: value for key, value in meta.items() if key != "val"}
    result.meta = meta
    return result
