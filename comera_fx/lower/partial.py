"""One autograd node for several layers, whose backward passes may come one by one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class PartialBackward:
    """What a node with several outputs keeps, so that it can be treated as one node per output.

    Two losses that reach different outputs may be differentiated one after the other, without
    ``retain_graph``, if each output has a node of its own. With one node for all, the first
    backward pass frees what forward saved. What the other outputs need is then kept here, until
    each of them has had its turn.

    Args:
        num_outputs: Outputs that may get a gradient.
    """

    def __init__(self, num_outputs: int) -> None:
        self.num_outputs = num_outputs
        self.done: set[int] = set()
        self.kept: tuple[Tensor, ...] = ()
        self.versions: list[int] = []

    def saved(self, ctx: Any, outputs: set[int]) -> tuple[Tensor, ...]:
        """Return what forward saved.

        Args:
            ctx: The node's context.
            outputs: The outputs that got a gradient this time.

        Raises:
            RuntimeError: If the graph was freed, as for a node that is used a second time.
        """
        try:
            saved: tuple[Tensor, ...] = ctx.saved_tensors
        except RuntimeError:
            if not self.kept or outputs & self.done:
                raise
            saved = self.kept
            if [tensor._version for tensor in saved] != self.versions:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    "inplace operation since the first backward pass through this graph"
                ) from None
        self.done |= outputs
        self.kept = () if len(self.done) == self.num_outputs else saved
        self.versions = [tensor._version for tensor in self.kept]
        return saved
