"""The states of gradients, autocast and inference that nodes of a graph switch on and off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

_SET_GRAD = torch._C._set_grad_enabled
_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
SWITCHES = (_SET_GRAD, _ENTER_AUTOCAST, _EXIT_AUTOCAST, _ENTER_INFERENCE, _EXIT_INFERENCE)


@dataclass(frozen=True)
class State:
    """What is switched on and off at a node, over what is on where the graph is called.

    Args:
        grad: Whether gradients are on; ``None`` for as the caller has it.
        autocasts: Arguments of the autocast regions that are open, outermost first.
        inference: Number of inference regions that are open.
        opened: The state before a node that opened a region, for the one that closes it.
    """

    grad: bool | None = None
    autocasts: tuple[tuple[Any, ...], ...] = ()
    inference: int = 0

    def after(self, node: fx.Node, opened: dict[fx.Node, State]) -> State:
        """Return the state after ``node``; ``opened`` holds the one before each opening node."""
        if node.op != "call_function" or node.target not in SWITCHES:
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


START = "comera_fx_start"
"""Key of a graph module's metadata that holds the state in which the graph always starts."""


def states_of(gm: fx.GraphModule) -> dict[fx.Node, State]:
    """Return the state in which each node runs."""
    return states_from(gm.meta.get(START, State()), gm.graph.nodes)


def states_from(state: State, nodes: Iterable[fx.Node]) -> dict[fx.Node, State]:
    """Return the state in which each of some nodes runs, given that before the first."""
    states: dict[fx.Node, State] = {}
    opened: dict[fx.Node, State] = {}
    for node in nodes:
        states[node] = state
        state = state.after(node, opened)
    return states
