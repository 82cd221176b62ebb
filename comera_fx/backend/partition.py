"""Split a joint graph into forward and backward as the plans want it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from comera_fx.passes.expand_plan import is_weight_only

CHEAP = 0.01
"""Share of a graph's products below which those of weights alone are made again for the backward
pass, as a plan does for its layer."""
Graphs = tuple[fx.GraphModule, fx.GraphModule]
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def partition_in_order(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Graphs:
    """Split a joint graph; what the forward pass makes and the backward reads is saved.

    Messages of weights alone are made again where that is cheap.

    Args:
        joint: The joint graph.
        joint_inputs: Its inputs.
        kwargs: What AOTAutograd tells a partitioner besides.
    """
    mark_recomputed(joint)
    return partitioners.default_partition(joint, joint_inputs, **kwargs)


class PartitionByMemory(CustomPartitionerFn):
    """Split a joint graph so that elementwise operators are made again where that saves memory.

    For inductor, which fuses them, and keeps what it compiled by ``uuid``.
    """

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Graphs:
        """Split; arguments as of ``partition_in_order``."""
        mark_recomputed(gm)
        return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Return what is another one where this file is another one."""
        return get_hash_for_files((__file__,))


def mark_recomputed(joint: fx.GraphModule) -> int:
    """Mark the messages of weights alone that the backward pass makes again; return how many."""
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    chosen = [node for node in nodes if is_weight_only(node)]
    if not chosen or sum(map(_multiply_adds, chosen)) > CHEAP * sum(map(_multiply_adds, nodes)):
        return 0
    writer, _ = partitioners._is_functional_graph(joint.graph)  # type: ignore[attr-defined]
    if writer is not None:  # torch makes nothing again in a graph that writes
        return 0
    for node in chosen:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return len(chosen)


def _multiply_adds(node: fx.Node) -> int:
    """Return multiply-adds of a product of matrices, 0 for all else; unknown sizes count as 1."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name not in _PRODUCTS:
        return 0
    result = node.meta.get("val")
    left = node.args[1 if name in ("addmm", "baddbmm") else 0]
    inner = left.meta.get("val") if isinstance(left, fx.Node) else None
    if not isinstance(result, torch.Tensor) or not isinstance(inner, torch.Tensor):
        return 0
    sizes = [*result.shape, inner.shape[-1]]
    return prod(size if isinstance(size, int) else size.node.hint or 1 for size in sizes)
