"""Rewrite layers that read one input so that they take one product with it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from comera_fx.passes.weight_only import (
    WeightOnly,
    erase_unused,
    may_reorder,
    move_before,
    stands_before,
)
from comera_fx.passes.writes import changes_between, is_written, may_return_view


@dataclass(frozen=True)
class ShareInput:
    """Merge the ``tt_apply`` nodes that read one input.

    Before::

        %q_results = call_function[comera_fx.tt_apply.default](%x, [%q_left], [%q_right], [None])
        %q = call_function[getitem](%q_results, 0)
        %k_results = call_function[comera_fx.tt_apply.default](%x, [%k_left], [%k_right], [None])
        %k = call_function[getitem](%k_results, 0)

    After::

        %results = call_function[comera_fx.tt_apply.default](
            %x, [%q_left, %k_left], [%q_right, %k_right], [None, None])
        %q = call_function[getitem](%results, 0)
        %k = call_function[getitem](%results, 1)

    The merged node stands at the first one's place; factors and biases that came later move up
    with it. Results of equal factors and bias are one, unless they are returned or something may
    write to them.

    Numerics: keeps them, up to rounding.
    Leaves alone: a node with factors or a bias that come later and depend on more than weights,
    be it on another reader of the input, or that are made in another state of gradients or
    autocast, or run in another one; an input that may be written to between its readers; module
    graphs.
    """

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of nodes merged into an earlier one."""
        if not may_reorder(gm):
            return 0
        weights, num_merged = WeightOnly(gm), 0
        # Again: where equal results became one, their readers have one input.
        while groups := _groups(gm, weights):
            for group in groups:
                # Read anew: an input may be a result of nodes merged before.
                again = [apply for old in group if (apply := _apply_of(old.node)) is not None]
                _merge(gm, weights, again)
            num_merged += sum(len(group) - 1 for group in groups)
        return num_merged


_Layer = tuple[fx.Node, fx.Node, fx.Node | None, fx.Node | None]


class _Apply(NamedTuple):
    """A ``tt_apply`` node with its arguments by name."""

    node: fx.Node
    x: fx.Node
    lefts: Sequence[fx.Node]
    rights: Sequence[fx.Node]
    biases: Sequence[fx.Node | None]
    heads: Sequence[fx.Node] | None = None

    def weights(self) -> list[fx.Node]:
        """Return the factors, biases and heads."""
        biases = [bias for bias in self.biases if bias is not None]
        return [*self.lefts, *self.rights, *biases, *(self.heads or ())]

    def layers(self) -> list[_Layer]:
        """Return the parts of each layer."""
        heads = [None] * len(self.lefts) if self.heads is None else self.heads
        return list(zip(self.lefts, self.rights, self.biases, heads, strict=True))


def _apply_of(node: fx.Node) -> _Apply | None:
    """Return what a node applies, if its results are read one by one."""
    tt_apply = torch.ops.comera_fx.tt_apply
    if node.op != "call_function" or node.target not in (tt_apply, tt_apply.default):
        return None
    given: dict[str, Any] = dict(zip(_Apply._fields[1:], node.args, strict=False)) | node.kwargs
    apply = _Apply(node, **given)
    if not all(isinstance(part, fx.Node) for part in (apply.x, *apply.weights())):
        return None
    return apply if all(_place_of(user) is not None for user in node.users) else None


def _place_of(user: fx.Node) -> int | None:
    """Return which result of a list a node takes out."""
    if user.op != "call_function" or user.target is not operator.getitem:
        return None
    place = user.args[1]
    return place if isinstance(place, int) and place >= 0 else None


def _groups(gm: fx.GraphModule, weights: WeightOnly) -> list[list[_Apply]]:
    """Return the nodes to merge, those of one group together."""
    by_input: dict[fx.Node, list[list[_Apply]]] = {}
    for node in gm.graph.nodes:
        apply = _apply_of(node)
        if apply is None:
            continue
        groups = by_input.setdefault(apply.x, [])
        joined = next((g for g in groups if _can_join(gm, weights, apply, g[0])), None)
        if joined is None:
            groups.append([apply])
        else:
            joined.append(apply)
    return [group for groups in by_input.values() for group in groups if len(group) > 1]


def _can_join(gm: fx.GraphModule, weights: WeightOnly, apply: _Apply, other: _Apply) -> bool:
    """Whether a node gives the same at the place of another, and is of its form."""
    first = other.node
    if (apply.heads is None) != (other.heads is None):
        return False
    if weights.train(apply.lefts) != weights.train(other.lefts):
        return False  # one product of both would require gradients where one layer needs none
    state = weights.state(first)
    if weights.state(apply.node) != state or not weights.are_made_in(state, apply.weights()):
        return False
    fixed = [node for node in apply.weights() if weights.key(node) is None]
    if not all(stands_before(node, first) for node in fixed):
        return False
    return not any(changes_between(gm, node, first, apply.node) for node in (apply.x, *fixed))


def _merge(gm: fx.GraphModule, weights: WeightOnly, group: Sequence[_Apply]) -> None:
    """Put one node in the place of all of a group, and give their users its results."""
    layers: list[_Layer] = []
    places: dict[tuple[fx.Node, int], int] = {}
    known: dict[object, int] = {}
    for apply in group:
        for number, layer in enumerate(apply.layers()):
            users = [user for user in apply.node.users if _place_of(user) == number]
            is_alone = any(is_written(gm, user) or _is_returned(user) for user in users)
            key = (apply.node, number) if is_alone else _key(weights, layer)
            if key not in known:
                known[key] = len(layers)
                layers.append(layer)
            places[apply.node, number] = known[key]
    _replace(group, layers, places)


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph may return a node's memory, which the caller may write to."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return True
            if user not in seen and may_return_view(user):
                seen.add(user)
                waiting.append(user)
    return False


def _key(weights: WeightOnly, layer: _Layer) -> object:
    """Return what equal layers share: numbers of what weights give, other nodes themselves."""
    keys = [None if part is None else weights.key(part) for part in layer]
    return tuple(part if key is None else key for key, part in zip(keys, layer, strict=True))


def _replace(
    group: Sequence[_Apply], layers: Sequence[_Layer], places: dict[tuple[fx.Node, int], int]
) -> None:
    first = group[0]
    graph = first.node.graph
    lefts, rights, biases, heads = map(list, zip(*layers, strict=True))
    for part in (*lefts, *rights, *biases, *heads):
        if part is not None:
            move_before(part, first.node)
    with graph.inserting_before(first.node):
        args: tuple[Any, ...] = (first.x, lefts, rights, biases)
        if first.heads is not None:
            args = (*args, heads)
        new = graph.call_function(torch.ops.comera_fx.tt_apply.default, args)
        new.meta = dict(first.node.meta)
        results = [graph.call_function(operator.getitem, (new, k)) for k in range(len(layers))]
    for apply in group:
        for user in list(apply.node.users):
            result = results[places[apply.node, _place_of(user) or 0]]
            result.meta = result.meta or dict(user.meta)
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        graph.erase_node(apply.node)
    erase_unused([*results, *(node for apply in group for node in apply.weights())])
