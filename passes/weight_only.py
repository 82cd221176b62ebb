"""Which nodes compute from weights alone: such a node may move, and equal ones be made one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from comera_fx import ops as ops  # registers the operators
from comera_fx.passes.regions import State, states_of
from comera_fx.passes.writes import is_written, works_in_place
from comera_fx.replay import value_of

_LAYERS: tuple[object, ...] = tuple(
    target
    for packet in (
        torch.ops.comera_fx.tt_linear,
        torch.ops.comera_fx.tt_embedding,
        torch.ops.comera_fx.tt_apply,
        torch.ops.comera_fx.tt_rows,
    )
    for target in (packet, packet.default)
)
_PACKAGES = ("torch", "_operator", "operator")
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "rrelu", "gumbel")


def may_reorder(gm: fx.GraphModule) -> bool:
    """Whether the place of a node says nothing but what it reads and the state it runs in.

    Not so in a module graph, whose calls all name one input.
    """
    return not type(gm).__name__.startswith("ModuleGraph")


def stands_before(node: fx.Node, place: fx.Node) -> bool:
    """Whether the graph runs ``node`` before ``place``."""
    return bool(node < place)


def move_before(node: fx.Node, place: fx.Node) -> None:
    """Move a node, and first what it reads, up before ``place`` where it stands later."""
    if stands_before(node, place):
        return
    for inner in node.all_input_nodes:
        move_before(inner, place)
    place.prepend(node)


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erase nodes that no node reads any more, and what only they have read."""
    waiting, erased = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node.users or node in erased or node.op == "placeholder":
            continue
        erased.add(node)
        waiting += node.all_input_nodes
        node.graph.erase_node(node)


class WeightOnly:
    """Tells nodes of a graph that compute from weights alone, and which of them are equal.

    Random numbers, writes, calls of modules and functions that are not torch's count as more than
    that; so do weights that a node may write to, and what a layer gives, since layers are what
    passes rewrite; and nodes that run in another state than a node they read, since they could not
    move with it. Answers hold until the nodes asked for change.

    Args:
        gm: The graph.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._keys: dict[fx.Node, int | None] = {}
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[fx.Node, Tensor | None] = {}
        self._states = states_of(gm)
        reads = [node for node in gm.graph.nodes if isinstance(value_of(gm, node), Tensor)]
        self._written = {id(value_of(gm, node)) for node in reads if is_written(gm, node)}

    def is_computed(self, node: fx.Node) -> bool:
        """Whether a node computes, and is not a weight itself."""
        return not isinstance(value_of(self._gm, node), Tensor)

    def state(self, node: fx.Node) -> State:
        """Return the state of gradients and autocast in which a node runs."""
        if node not in self._states:  # made since
            self._states = states_of(self._gm)
        return self._states[node]

    def are_made_in(self, state: State, nodes: Iterable[fx.Node]) -> bool:
        """Whether all of some nodes that are not weights themselves run in a state."""
        return all(self.state(node) == state for node in nodes if self.is_computed(node))

    def key(self, node: fx.Node) -> int | None:
        """Return a number that equal computations share; ``None`` if more than weights is read."""
        if node not in self._keys:
            form = self._form(node)
            self._keys[node] = (
                None if form is None else self._numbers.setdefault(form, len(self._numbers))
            )
        return self._keys[node]

    def _form(self, node: fx.Node) -> Hashable | None:
        if not self.is_computed(node):
            value = value_of(self._gm, node)
            is_plain = type(value) in (Tensor, torch.nn.Parameter)
            # By identity: a tied weight has several names.
            return ("weight", id(value)) if is_plain and id(value) not in self._written else None
        if not _is_pure(node) or any(self.key(inner) is None for inner in node.all_input_nodes):
            return None
        state = self.state(node)
        if not self.are_made_in(state, node.all_input_nodes):
            return None
        form = (node.op, node.target, self._frozen(node.args), self._frozen(node.kwargs), state)
        return None if is_written(self._gm, node) else form

    def _frozen(self, arg: Any) -> Hashable:
        if isinstance(arg, fx.Node):
            return ("node", self.key(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._frozen, arg))
        if isinstance(arg, dict):
            return tuple((key, self._frozen(value)) for key, value in arg.items())
        if isinstance(arg, slice):
            return ("slice", *map(self._frozen, (arg.start, arg.stop, arg.step)))
        return (type(arg), repr(arg))  # 1, 1.0 and True are equal, and not the same

    def value(self, node: fx.Node) -> Tensor | None:
        """Return a tensor without numbers, of the shape and dtype of what a node computes.

        ``None`` if more than weights is read, or if it is not one tensor.
        """
        if node not in self._values:
            self._values[node] = None if self.key(node) is None else self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Tensor | None:
        held = value_of(self._gm, node)
        if isinstance(held, Tensor):
            return torch.empty_like(held, device="meta", requires_grad=False)
        if any(self.value(inner) is None for inner in node.all_input_nodes):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
        if node.op == "call_method":
            function: Callable[..., Any] = getattr(torch.Tensor, str(node.target))
        else:
            assert callable(node.target)
            function = node.target
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):  # numbers or a device are needed
            return None
        return result if isinstance(result, Tensor) else None

    def devices(self, node: fx.Node) -> tuple[str, ...]:
        """Return the devices of the weights that a node computes from."""
        return tuple(sorted({str(weight.device) for weight in self._weights(node)}))

    def is_written(self, node: fx.Node) -> bool:
        """Whether some node may change in place what a node holds."""
        return is_written(self._gm, node)

    def train(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether some of the weights that nodes compute from require gradients."""
        return any(weight.requires_grad for node in nodes for weight in self._weights(node))

    def _weights(self, node: fx.Node) -> Iterator[Tensor]:
        held = value_of(self._gm, node)
        if isinstance(held, Tensor):
            yield held
        for inner in node.all_input_nodes:
            yield from self._weights(inner)


def _is_pure(node: fx.Node) -> bool:
    """Whether a node only computes, the same every time, by a function of torch."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in _LAYERS:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.is_impure()
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    package, _, name = _qualified_name(node).rpartition(".")
    if package.split(".")[0] not in _PACKAGES or node.is_impure():
        return False
    if node.kwargs.get("out") is not None or works_in_place(node):
        return False
    return not any(part in name for part in _RANDOM)


def _qualified_name(node: fx.Node) -> str:
    """Return the name of a function or method, with its package."""
    if node.op == "call_method":
        return f"torch.Tensor.{node.target}"
    assert callable(node.target)
    return fx.node._get_qualified_name(node.target)
