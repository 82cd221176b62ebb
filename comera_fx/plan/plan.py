"""Plans of TT linear layers: the tree chosen, its steps and what they cost."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comera_fx.plan.cost import CostModel, shipped_model
from comera_fx.plan.networks import Network
from comera_fx.plan.program import Program, Recompute, make_program
from comera_fx.plan.search import SsaPath
from comera_fx.plan.steps import Message, Step, Steps, make_steps
from comera_fx.spec import TTSpec

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class Plan:
    """How one TT linear layer is contracted, forward and backward.

    Its ``repr`` is a table of the steps with totals, and the dense layer's cost beside them.

    Args:
        spec: Shape of the layer.
        num_tokens: Rows of input planned for.
        itemsize: Bytes of one number.
        needs_input_grad: Whether the gradient of the input is wanted.
        network: The closed network.
        path: Its contraction tree.
        pads: Pairs of bond index and the rank to which it is padded.
        recompute: Which weight-only messages the backward pass makes again.
        costs: Speeds of the device planned for.
        needs_core_grad: Whether the gradients of the cores are wanted.
    """

    spec: TTSpec
    num_tokens: int
    itemsize: int
    needs_input_grad: bool
    network: Network = field(repr=False)
    path: SsaPath = field(repr=False)
    pads: tuple[tuple[str, int], ...] = ()
    recompute: Recompute = "none"
    costs: CostModel = field(default_factory=lambda: shipped_model("cpu"), repr=False)
    needs_core_grad: bool = True

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Per leaf, whether its gradient is wanted: the input, then the cores."""
        return (self.needs_input_grad, *(self.needs_core_grad for _ in range(self.spec.num_cores)))

    @cached_property
    def steps(self) -> Steps:
        """The steps of forward and backward."""
        return make_steps(self.network, self.path, self.wanted)

    @property
    def program(self) -> Program:
        """The matrix products that run the steps."""
        return self.program_for(self.wanted)

    def program_for(self, wanted: tuple[bool, ...]) -> Program:
        """Return the matrix products that run the steps for the wanted gradients."""
        return make_program(
            self.network,
            self.path,
            wanted,
            self.itemsize,
            self.costs,
            self.pads,
            self.recompute,
        )

    @property
    def flops_forward(self) -> int:
        """Floating-point operations forward; 2 a multiply-add; no padding, no recomputation."""
        return self.steps.flops_forward

    @property
    def flops_backward(self) -> int:
        """Floating-point operations backward for every wanted gradient."""
        return self.steps.flops_backward

    @cached_property
    def flops_padding(self) -> int:
        """Operations spent on padded ranks, forward and backward."""
        if not self.pads:
            return 0
        padded = make_steps(self.network.resized(dict(self.pads)), self.path, self.wanted)
        flops = padded.flops_forward + padded.flops_backward
        return flops - self.flops_forward - self.flops_backward

    @cached_property
    def flops_recomputed(self) -> int:
        """Operations by which the backward pass repeats what the forward pass did, unpadded."""
        program = self.program
        again = {program.names[op.out] for op in program.backward[: program.recomputed]}
        return sum(step.flops for step in self.steps.forward if step.out.name in again)

    @property
    def seconds(self) -> float:
        """Predicted time of forward and backward."""
        return self.costs.call_seconds + self.program.seconds

    @property
    def dense_seconds(self) -> float:
        """Predicted time of the dense layer's forward and backward."""
        return self.costs.dense_seconds(
            self.num_tokens,
            (self.spec.in_size, self.spec.out_size),
            self.itemsize,
            needs_input_grad=self.needs_input_grad,
            needs_weight_grad=self.needs_core_grad,
        )

    @cached_property
    def saved_names(self) -> frozenset[str]:
        """Names of the messages and leaves that are kept from forward to backward."""
        program = self.program
        return frozenset(program.names[slot].removesuffix("padded") for slot in program.kept)

    @property
    def peak_bytes(self) -> int:
        """Largest sum of bytes alive at once, cores left out."""
        return self.program.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward, the input counted, the cores left out."""
        return self.program.saved_bytes

    @property
    def dense_flops_forward(self) -> int:
        """The operations forward of a dense layer of the modes' sizes, padding counted."""
        return 2 * self.num_tokens * self.spec.in_size * self.spec.out_size

    @property
    def dense_flops_backward(self) -> int:
        """The dense layer's operations backward."""
        return self.dense_flops_forward * (self.needs_input_grad + self.needs_core_grad)

    def to_networkx(self) -> networkx.DiGraph:
        """Return the messages as a graph: operands point to what is made of them.

        Node attributes: ``kind`` ("leaf", "target", "message", "result" or "gradient"),
        ``phase`` (``None`` for what is given), ``size`` (numbers held), ``bytes``, ``flops``
        (to make it) and ``saved``.
        """
        import networkx

        graph = networkx.DiGraph()
        steps = self.steps
        for message in steps.leaves:
            graph.add_node(message.name, **self._attributes(message, "leaf", None))
        graph.add_node(steps.target.name, **self._attributes(steps.target, "target", None))
        gradients = {message.name for _, message in steps.gradients}
        for step in (*steps.forward, *steps.backward):
            name = step.out.name
            kind = "gradient" if name in gradients else "message"
            kind = "result" if name == steps.result.name else kind
            graph.add_node(name, **self._attributes(step.out, kind, step))
            graph.add_edge(step.left.name, name)
            graph.add_edge(step.right.name, name)
        return graph

    def to_svg(self, path: str | os.PathLike[str]) -> None:
        """Draw the tree with its messages, forward and backward, the saved ones marked.

        Args:
            path: File to write.
        """
        from comera_fx.plan.draw import plan_svg

        Path(path).write_text(plan_svg(self), encoding="utf-8")

    def _attributes(self, message: Message, kind: str, step: Step | None) -> dict[str, Any]:
        size = self._size(message)
        return {
            "kind": kind,
            "phase": step.phase if step else None,
            "size": size,
            "bytes": size * self.itemsize,
            "flops": step.flops if step else 0,
            "saved": message.name in self.saved_names,
        }

    def _size(self, message: Message) -> int:
        return prod(self.network.size_of[i] for i in message.indices)

    def __repr__(self) -> str:
        steps = self.steps
        rows: list[tuple[str, ...]] = [
            ("", "step", "equation", "m x n x k", "FLOPs", "bytes", "kept")
        ]
        rows += [self._row(step) for step in (*steps.forward, *steps.backward)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if k > 2 else cell.ljust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self._title(), *lines, *self._totals()])

    def _title(self) -> str:
        modes = f"{_join(self.spec.in_modes)} -> {_join(self.spec.out_modes)}"
        padded = ", ".join(f"{rank} as {to}" for rank, to in self._padded_ranks())
        return (
            f"Plan of a {self.spec.layout} layer {modes}, ranks {_join(self.spec.ranks)}"
            f"{f' (padded: {padded})' if padded else ''}, {self.num_tokens} tokens"
        )

    def _padded_ranks(self) -> list[tuple[int, int]]:
        size_of = self.network.size_of
        return [(size_of[index], to) for index, to in self.pads]

    def _row(self, step: Step) -> tuple[str, ...]:
        shared = step.left.indices & step.right.indices
        size_of = self.network.size_of
        m, n, k = (
            prod(size_of[i] for i in group)
            for group in (step.left.indices - shared, step.right.indices - shared, shared)
        )
        return (
            step.phase,
            f"{step.out.name} = {step.left.name} * {step.right.name}",
            ",".join(map(_sorted, (step.left, step.right))) + "->" + _sorted(step.out),
            f"{m} x {n} x {k}",
            f"{step.flops:,}",
            f"{self._size(step.out) * self.itemsize:,}",
            "saved" if step.out.name in self.saved_names else "",
        )

    def _totals(self) -> list[str]:
        forward, backward = self.flops_forward, self.flops_backward
        dense = self.dense_flops_forward + self.dense_flops_backward
        ratio = dense / max(forward + backward, 1)
        return [
            f"FLOPs  forward {forward:,}  backward {backward:,}  "
            f"(padding {self.flops_padding:,}, recomputed {self.flops_recomputed:,})",
            f"dense  forward {self.dense_flops_forward:,}  backward "
            f"{self.dense_flops_backward:,}  = {ratio:.1f} x the plan",
            f"bytes  peak {self.peak_bytes:,}  saved for backward {self.saved_bytes:,}  "
            f"copied {self.program.copied_bytes:,}",
            f"time   {1e3 * self.seconds:.3f} ms predicted, "
            f"dense {1e3 * self.dense_seconds:.3f} ms",
        ]


def _join(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def _sorted(message: Message) -> str:
    return "".join(sorted(message.indices))
