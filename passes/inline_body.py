"""Put the traced body of a function in the place of the node that calls it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from comera_fx.passes.regions import SWITCHES, states_from, states_of
from comera_fx.replay import VALUE_KEYS, value_of

_OF_THE_CALL = {*VALUE_KEYS, "tensor_meta", "tt_spec"}


class BodyInliner:
    """Replaces calls in one graph by what they do, traced on the graph's own fake tensors.

    A body is traced above autograd and autocast: operators of torch stay whole (``linear``,
    ``dropout``, ``scaled_dot_product_attention``), the ones that draw random numbers draw the
    same, and gradients are what they were. It is traced in the state of gradients and
    autocast in which the node runs, and sizes that are symbols stay symbols.

    Values are read from ``node.meta["example_value"]`` or ``["val"]``. Where a node has none it is
    run on the values of its inputs. New nodes have theirs under the key that the graph uses, with
    ``requires_grad`` as it will be, and the other metadata of the call.

    Args:
        gm: The graph. It starts in the state of gradients and autocast that is on now.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        nodes = list(gm.graph.nodes)
        kept = [node.meta[key] for node in nodes for key in VALUE_KEYS if key in node.meta]
        modes = [value.fake_mode for value in kept if isinstance(value, FakeTensor)]
        self._mode: FakeTensorMode | None = modes[0] if modes else None
        uses_first = any(VALUE_KEYS[0] in node.meta for node in nodes)
        self._key = VALUE_KEYS[0] if uses_first else VALUE_KEYS[1]
        self._values: dict[fx.Node, Any] = {}
        self._states = states_of(gm)

    def inline(self, node: fx.Node, body: Callable[..., Any]) -> list[fx.Node] | None:
        """Replace a call by the traced ``body``.

        Args:
            node: The call.
            body: Takes the arguments of the node and returns what it returns.

        Returns:
            The new nodes in order; ``None``, with nothing changed, where the graph does not tell
            the sizes of the inputs, or they are other than plain tensors and numbers.
        """
        inputs = node.all_input_nodes
        values = [self.value(inner) for inner in inputs]
        if self._mode is None or not all(map(self._can_be_traced, values)):
            return None

        def call(*given: Any) -> Any:
            places = dict(zip(inputs, given, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), places.__getitem__)
            return body(*args, **kwargs)

        with self._mode, enable_python_dispatcher(), self._states[node].entered():
            traced = make_fx(call, pre_dispatch=True)(*values)
        return self._put(traced.graph, node)

    def _can_be_traced(self, value: Any) -> bool:
        if isinstance(value, Tensor):  # not those of a transform, nor of another mode
            return isinstance(value, FakeTensor) and value.fake_mode is self._mode
        return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))

    def _put(self, body: fx.Graph, call: fx.Node) -> list[fx.Node]:
        """Copy the nodes of ``body`` before ``call``, and give its users their results."""
        outer = iter(call.all_input_nodes)
        places: dict[fx.Node, fx.Node] = {}
        made: list[fx.Node] = []
        results: Any = None
        meta = {key: value for key, value in call.meta.items() if key not in _OF_THE_CALL}
        with call.graph.inserting_before(call):
            for node in body.nodes:
                if node.op == "placeholder":
                    places[node] = next(outer)
                elif node.op == "output":
                    results = map_arg(node.args[0], places.__getitem__)
                else:
                    assert node.op == "call_function", f"a body holds {node.op} {node.target}"
                    places[node] = call.graph.node_copy(node, places.__getitem__)
                    places[node].meta = dict(meta)
                    made.append(places[node])
        self._states.update(states_from(self._states[call], made))
        for node in made:
            value = self.value(node)
            if value is not None:
                node.meta[self._key] = value
        _replace(call, results)
        return made

    def value(self, node: fx.Node) -> Any:
        """Return the fake value of a node; ``None`` where the graph does not tell it."""
        if node not in self._values:
            self._values[node] = self._value(node)
        return self._values[node]

    def _value(self, node: fx.Node) -> Any:
        for key in VALUE_KEYS:
            if key in node.meta:
                return node.meta[key]
        if self._mode is None:
            return None
        if node.op == "get_attr":
            held = value_of(self._gm, node)
            if not isinstance(held, Tensor):
                return None
            return self._mode.from_tensor(held, static_shapes=True)
        if node.op not in ("call_function", "call_method") or node.target in SWITCHES:
            return None
        values = {inner: self.value(inner) for inner in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        with self._mode, enable_python_dispatcher(), self._states[node].entered():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)


def _replace(node: fx.Node, result: Any) -> None:
    """Give every user of ``node`` its result, a node or a tuple of them, and drop ``node``."""

    def replaced(inner: fx.Node) -> Any:
        return result if inner is node else inner

    for user in list(node.users):
        if isinstance(result, (list, tuple)) and _is_item(user):
            _replace(user, result[user.args[1]])  # type: ignore[index]
        else:
            user.args, user.kwargs = map_arg((user.args, user.kwargs), replaced)
    node.graph.erase_node(node)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
