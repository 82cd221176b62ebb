"""Put the traced body of a function in the place of the node that calls it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from comera_fx.replay import value_of

_SET_GRAD = torch._C._set_grad_enabled
_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
_SWITCHES = (_SET_GRAD, _ENTER_AUTOCAST, _EXIT_AUTOCAST, _ENTER_INFERENCE, _EXIT_INFERENCE)
_VALUE_KEYS = ("example_value", "val")
_OF_THE_CALL = {*_VALUE_KEYS, "tensor_meta", "tt_spec"}


@dataclass(frozen=True)
class _State:
    """What nodes of a graph switch on and off, over what is on where the graph is called.

    Args:
        grad: Whether gradients are on; ``None`` for as the caller has it.
        autocasts: Arguments of the autocast regions that are open, outermost first.
        inference: Number of inference regions that are open.
        opened: The state before a node that opened a region, for the one that closes it.
    """

    grad: bool | None = None
    autocasts: tuple[tuple[Any, ...], ...] = ()
    inference: int = 0

    def after(self, node: fx.Node, opened: dict[fx.Node, _State]) -> _State:
        """Return the state after ``node``; ``opened`` holds the one before each opening node."""
        if node.op != "call_function" or node.target not in _SWITCHES:
            return self
        if node.target is _SET_GRAD:
            return replace(self, grad=bool(node.args[0]))
        if node.target is _ENTER_AUTOCAST:
            opened[node] = self
            return replace(self, autocasts=(*self.autocasts, node.args))
        if node.target is _ENTER_INFERENCE:
            opened[node] = self
            return replace(self, inference=self.inference + bool(node.args[0]))
        before = opened[node.all_input_nodes[0]]
        if node.target is _EXIT_AUTOCAST:
            return replace(self, autocasts=before.autocasts)
        return replace(self, inference=before.inference)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Bring torch into this state, without a cache that would keep fake tensors."""
        cached = torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            for device, dtype, enabled, *_ in self.autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.inference:
                stack.enter_context(torch.no_grad())
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(cached)


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
        kept = [node.meta[key] for node in nodes for key in _VALUE_KEYS if key in node.meta]
        modes = [value.fake_mode for value in kept if isinstance(value, FakeTensor)]
        self._mode: FakeTensorMode | None = modes[0] if modes else None
        uses_first = any(_VALUE_KEYS[0] in node.meta for node in nodes)
        self._key = _VALUE_KEYS[0] if uses_first else _VALUE_KEYS[1]
        self._values: dict[fx.Node, Any] = {}
        self._states: dict[fx.Node, _State] = {}
        self._opened: dict[fx.Node, _State] = {}
        self._enter(nodes, _State())

    def _enter(self, nodes: list[fx.Node], state: _State) -> None:
        for node in nodes:
            self._states[node] = state
            state = state.after(node, self._opened)

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
        self._enter(made, self._states[call])
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
        for key in _VALUE_KEYS:
            if key in node.meta:
                return node.meta[key]
        if self._mode is None:
            return None
        if node.op == "get_attr":
            held = value_of(self._gm, node)
            if not isinstance(held, Tensor):
                return None
            return self._mode.from_tensor(held, static_shapes=True)
        if node.op not in ("call_function", "call_method") or node.target in _SWITCHES:
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
