"""Run passes in order: copy, time, check and show. Passes do none of these."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import fx

log = logging.getLogger(__name__)


class Pass(Protocol):
    """A named rewrite with its settings as fields; see ``passes/README.md``."""

    @property
    def keeps_numerics(self) -> bool:
        """Whether the rewritten graph computes the same values, up to rounding."""

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of rewrites."""


Watcher = Callable[[Pass, fx.GraphModule, fx.GraphModule], None]
"""Called as ``watcher(graph_pass, before, after)`` when a pass changed the graph."""


def numerics_of(graph_pass: Pass) -> str:
    """Say what a pass does to the values a graph computes: "kept" or "changed"."""
    return "kept" if graph_pass.keeps_numerics else "changed"


def run_pipeline(
    gm: fx.GraphModule, passes: Sequence[Pass], *, watchers: Sequence[Watcher] = ()
) -> fx.GraphModule:
    """Apply ``passes`` to a copy of ``gm`` and return the copy.

    After each pass that changed something the graph is linted and recompiled, so every
    intermediate graph can be run. The copy shares its modules, and so its weights, with ``gm``;
    the containers that hold them are new, so that a pass may put another module in one's place.

    Args:
        gm: The graph to start from. It is not changed.
        passes: Rewrites, first to run first.
        watchers: Called after each pass that changed something.

    Returns:
        The rewritten copy.
    """
    gm = copy_graph_module(gm)
    for graph_pass in passes:
        before = copy_graph_module(gm) if watchers else gm
        num_nodes, start = len(gm.graph.nodes), time.perf_counter()
        num_rewrites = graph_pass(gm)
        if num_rewrites:
            gm.graph.lint()
            gm.recompile()
        elapsed_ms = 1e3 * (time.perf_counter() - start)
        log.info(
            "%s: %d rewrites, nodes %d -> %d, numerics %s, %.1f ms",
            type(graph_pass).__name__, num_rewrites, num_nodes, len(gm.graph.nodes),
            numerics_of(graph_pass), elapsed_ms,
        )  # fmt: skip
        if num_rewrites:
            for watcher in watchers:
                watcher(graph_pass, before, gm)
    return gm


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph and the containers; share the modules, parameters and buffers it names."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    # Not deepcopied: it holds the call signature only, which no pass may change.
    graph.set_codegen(gm.graph._codegen)
    copy = fx.GraphModule(gm, graph, type(gm).__name__.removesuffix("Impl"))
    copy.meta.update(gm.meta)
    return copy
