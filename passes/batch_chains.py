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
from comera_fx.passes.regions import State
from comera_fx.passes.weight_only import WeightOnly, erase_unused, may_reorder, move_before
from comera_fx.plan.shared import Form
from comera_fx.replay import VALUE_KEYS
from comera_fx.spec import TTSpec

_tt_linear, _tt_embedding = torch.ops.comera_fx.tt_linear, torch.ops.comera_fx.tt_embedding


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

    Where ``choose`` says "heads", the factors are made without the first output cores, which
    ``tt_apply`` then applies by themselves: with few tokens that takes less.

    Layers of one group have the same spec, features, dtype and devices, and run in the same state
    of gradients and autocast. Cores that several calls read, by one node, by a tied weight's other
    name or by an equal computation, are in it once.
    The factors stand before their first reader, and cores that came later move up with them.
    Calls that read the cores by their other side take the factors transposed and in the other
    order. A ``tt_embedding`` whose cores a ``tt_linear`` of the group reads, as those of a tied
    head, becomes a ``tt_rows``; the factors then keep the cores' dtype under autocast.

    Numerics: keeps them, up to rounding.
    Leaves alone: groups that ``choose`` turns down; layout "ttm"; ranks cut to 0; cores that
    depend on more than weights, are random, or may be written to; cores whose shapes the graph
    does not tell, or that are made in another state of gradients or autocast; module graphs; and
    other calls of ``tt_embedding``.

    Args:
        choose: How a group is to run, given its spec and its calls of ``tt_linear`` in the
            graph's order.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011: an unfolding of the tensor at a bond.
    """

    choose: Callable[[TTSpec, Sequence[fx.Node]], Form]
    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of calls that now apply factors."""
        if not may_reorder(gm):
            return 0
        weights = WeightOnly(gm)
        groups: dict[_Group, list[_Call]] = {}
        for node in gm.graph.nodes:
            call = _call_of(node)
            group = None if call is None else _group_of(weights, call)
            if call is not None and group is not None:
                groups.setdefault(group, []).append(call)
        num_rewrites = 0
        for group, calls in groups.items():
            linear = [call for call in calls if not call.is_lookup]
            trains = {_key(weights, call) for call in linear}
            calls = [call for call in calls if _key(weights, call) in trains]
            form = self.choose(group.spec, [call.node for call in linear]) if linear else "own"
            if form != "own":
                with_heads = form == "heads" and _can_split(group, calls)
                _rewrite(weights, group, [call.node for call in calls], with_heads)
                num_rewrites += len(calls)
        return num_rewrites


class _Call(NamedTuple):
    """A ``tt_linear`` or ``tt_embedding`` node with its arguments by name.

    Args:
        offset: The bias, or the padding row.
    """

    node: fx.Node
    is_lookup: bool
    input: fx.Node
    cores: tuple[fx.Node, ...]
    offset: fx.Node | None
    layout: str
    num_in_modes: int
    in_features: int
    out_features: int
    transposed: bool


class _Group(NamedTuple):
    """What calls of one group have in common.

    Args:
        spec: Shape of the weight, its input modes being those of the first cores.
        in_features: Rows of the left factor.
        out_features: Columns of the right factor.
        dtype: Of the cores.
        devices: Where they are.
        state: The state of gradients and autocast in which the calls run.
        trained: Which cores require gradients.
    """

    spec: TTSpec
    in_features: int
    out_features: int
    dtype: torch.dtype
    devices: tuple[str, ...]
    state: State
    trained: tuple[bool, ...]


def _call_of(node: fx.Node) -> _Call | None:
    packet = getattr(node.target, "overloadpacket", node.target)
    if node.op != "call_function" or packet not in (_tt_linear, _tt_embedding):
        return None
    schema = packet.default._schema.arguments
    given: dict[str, Any] = {argument.name: argument.default_value for argument in schema}
    given.update(zip(given, node.args, strict=False))
    given.update(node.kwargs)
    x, cores, offset, layout, num_in, in_size, out_size = list(given.values())[:7]
    is_known = all(isinstance(part, fx.Node) for part in (x, *cores))
    is_fixed = all(isinstance(size, int) for size in (num_in, in_size, out_size))
    if not is_known or not is_fixed or layout != "tt":
        return None
    sizes = (num_in, in_size, out_size, given["transposed"])
    return _Call(node, packet is _tt_embedding, x, tuple(cores), offset, layout, *sizes)


def _group_of(weights: WeightOnly, call: _Call) -> _Group | None:
    """Return what a call shares with those of its group, where the graph tells."""
    values = [weights.value(core) for core in call.cores]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len({value.dtype for value in known}) > 1:
        return None
    shapes = tuple(tuple(value.shape) for value in known)
    spec = spec_of(call.layout, call.num_in_modes, shapes, call.transposed)
    devices = {device for core in call.cores for device in weights.devices(core)}
    state = weights.state(call.node)
    if 0 in spec.ranks or not weights.are_made_in(state, call.cores):
        return None
    if spec.in_size != call.in_features and weights.is_written(call.input):
        return None  # the padded copy that its own plan keeps stays what it was
    trained = tuple(weights.train([core]) for core in call.cores)
    sizes = (call.in_features, call.out_features)
    if call.transposed:
        spec, sizes = spec.turned(), sizes[::-1]
    return _Group(spec, *sizes, known[0].dtype, tuple(sorted(devices)), state, trained)


def _key(weights: WeightOnly, call: _Call) -> tuple[Hashable, ...]:
    """Return what calls share that read equal cores."""
    return tuple(map(weights.key, call.cores))


def _can_split(group: _Group, calls: Sequence[_Call]) -> bool:
    """Whether all calls of a group can apply the first output core by itself."""
    spec = group.spec
    is_whole = spec.out_size == group.out_features and len(spec.out_modes) > 1
    return is_whole and not any(call.transposed or call.is_lookup for call in calls)


def _rewrite(
    weights: WeightOnly, group: _Group, nodes: Sequence[fx.Node], with_heads: bool
) -> None:
    calls = [call for node in nodes if (call := _call_of(node)) is not None]
    trains: dict[Hashable, tuple[fx.Node, ...]] = {}
    keys = [_key(weights, call) for call in calls]
    for key, call in zip(keys, calls, strict=True):
        trains.setdefault(key, call.cores)
    factors = _insert_factors(group, list(trains.values()), calls, with_heads)
    by_train = dict(zip(trains, factors, strict=True))
    for key, call in zip(keys, calls, strict=True):
        if call.is_lookup:
            new = _insert_rows(call.node, *by_train[key])
        else:
            new = _insert_apply(call.node, *by_train[key], with_heads)
        replace_call(call.node, new)
    erase_unused(core for call in calls for core in call.cores)


def _insert_factors(
    group: _Group,
    trains: Sequence[tuple[fx.Node, ...]],
    calls: Sequence[_Call],
    with_heads: bool,
) -> list[tuple[fx.Node, fx.Node]]:
    """Insert the factors of all cores before the first call, and return a left and right each."""
    first, num_in = calls[0].node, len(group.spec.in_modes)
    cores = [
        core
        for train in trains
        for place, core in enumerate(train)
        if not (with_heads and place == num_in)
    ]
    for core in cores:
        move_before(core, first)
    graph, num_layers = first.graph, len(trains)
    sizes = (num_in, group.in_features, group.out_features)
    settings: dict[str, Any] = {"autocast": False} if any(call.is_lookup for call in calls) else {}
    if with_heads:
        settings["head_mode"] = group.spec.out_modes[0]
    with graph.inserting_before(first):
        factors = graph.call_function(
            torch.ops.comera_fx.tt_factors.default, (cores, num_layers, "tt", *sizes), settings
        )
        factors.meta["tt_spec"] = group.spec
        made = [
            graph.call_function(operator.getitem, (factors, place))
            for place in range(2 * num_layers)
        ]
    return list(zip(made[:num_layers], made[num_layers:], strict=True))


def _insert_apply(node: fx.Node, left: fx.Node, right: fx.Node, with_heads: bool) -> fx.Node:
    call = _call_of(node)  # read anew: its input may be the result of one rewritten before
    assert call is not None
    graph = node.graph
    with graph.inserting_before(node):
        first, last = _by_side(call, left, right)
        heads = ([call.cores[call.num_in_modes]],) if with_heads else ()
        args = (call.input, [first], [last], [call.offset], *heads)
        results = graph.call_function(torch.ops.comera_fx.tt_apply.default, args)
        result = graph.call_function(operator.getitem, (results, 0))
    meta = {key: value for key, value in node.meta.items() if key != "tt_spec"}
    results.meta = {key: value for key, value in meta.items() if key not in VALUE_KEYS}
    result.meta = meta
    return result


def _insert_rows(node: fx.Node, left: fx.Node, right: fx.Node) -> fx.Node:
    call = _call_of(node)
    assert call is not None
    padding = {key: node.kwargs[key] for key in ("padding_idx",) if key in node.kwargs}
    with node.graph.inserting_before(node):
        args = (call.input, *_by_side(call, left, right), call.offset)
        rows = node.graph.call_function(torch.ops.comera_fx.tt_rows.default, args, padding)
    rows.meta = {key: value for key, value in node.meta.items() if key != "tt_spec"}
    return rows


def _by_side(call: _Call, left: fx.Node, right: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the factors in the order in which a call meets them."""
    if not call.transposed:
        return left, right
    return tuple(left.graph.call_method("t", (factor,)) for factor in (right, left))  # type: ignore[return-value]
