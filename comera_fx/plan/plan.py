"""Plans of TT linear layers: the tree chosen, its steps and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from comera_fx.config import Objective, PlanConfig
from comera_fx.errors import PlanError
from comera_fx.plan.cost import cost_model
from comera_fx.plan.networks import Network, linear_network
from comera_fx.plan.program import Program, cached_program
from comera_fx.plan.search import SsaPath, find_path, two_sided_path
from comera_fx.plan.steps import Message, Step, Steps, make_steps
from comera_fx.spec import TTSpec

if TYPE_CHECKING:
    import networkx

MEMORY_OBJECTIVES = ("size", "write", "combo")
"""What other trees minimise that are tried when the one of fewest FLOPs breaks the limit."""


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
    """

    spec: TTSpec
    num_tokens: int
    itemsize: int
    needs_input_grad: bool
    network: Network = field(repr=False)
    path: SsaPath = field(repr=False)

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Per leaf, whether its gradient is wanted: the input, then the cores."""
        return (self.needs_input_grad, *(True for _ in range(self.spec.num_cores)))

    @cached_property
    def steps(self) -> Steps:
        """The steps of forward and backward."""
        return make_steps(self.network, self.path, self.wanted)

    @property
    def program(self) -> Program:
        """The matrix products that run the steps."""
        return cached_program(self.network, self.path, self.wanted, self.itemsize)

    @property
    def flops_forward(self) -> int:
        """Floating-point operations forward; 2 a multiply-add; no padding, no recomputation."""
        return self.steps.flops_forward

    @property
    def flops_backward(self) -> int:
        """Floating-point operations backward for every wanted gradient."""
        return self.steps.flops_backward

    @property
    def flops_padding(self) -> int:
        """Operations spent on padded ranks: none, ranks are not padded."""
        return 0

    @property
    def flops_recomputed(self) -> int:
        """Operations that repeat what the forward pass did: none, messages are saved."""
        return 0

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
        """The dense layer's operations forward."""
        return 2 * self.num_tokens * self.spec.in_size * self.spec.out_size

    @property
    def dense_flops_backward(self) -> int:
        """The dense layer's operations backward."""
        return self.dense_flops_forward * (2 if self.needs_input_grad else 1)

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

    def _attributes(self, message: Message, kind: str, step: Step | None) -> dict[str, Any]:
        size = self._size(message)
        return {
            "kind": kind,
            "phase": step.phase if step else None,
            "size": size,
            "bytes": size * self.itemsize,
            "flops": step.flops if step else 0,
            "saved": message in self.steps.saved,
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
        return (
            f"Plan of a {self.spec.layout} layer {modes}, ranks {_join(self.spec.ranks)}, "
            f"{self.num_tokens} tokens"
        )

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
            "saved" if step.out in self.steps.saved else "",
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
        ]


def bucket_tokens(num_tokens: int) -> int:
    """Return the number of tokens that is planned for: the next power of two.

    Few plans then serve all batch sizes.

    Example:
        >>> [bucket_tokens(n) for n in (0, 1, 5, 4096)]
        [1, 1, 8, 4096]
    """
    return 1 << max(num_tokens - 1, 0).bit_length()


def _join(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def _sorted(message: Message) -> str:
    return "".join(sorted(message.indices))


@lru_cache(maxsize=4096)
def plan_linear(
    spec: TTSpec,
    num_tokens: int,
    objective: Objective = "flops",
    needs_input_grad: bool = True,
    *,
    memory_limit_bytes: int | None = None,
    itemsize: int = 4,
    device_type: str = "cpu",
) -> Plan:
    """Plan ``y = x W^T`` and its gradients for a weight in TT form.

    Args:
        spec: Shape of the weight.
        num_tokens: Rows of ``x``.
        objective: What the contraction tree minimises: "flops", or the predicted "time".
        needs_input_grad: Whether the gradient of ``x`` is wanted; those of the cores are.
        memory_limit_bytes: Plans whose peak is above this are refused.
        itemsize: Bytes of one number, 4 for float32.
        device_type: Whose speeds the time is predicted by, "cpu" or "cuda".

    Returns:
        The plan; equal arguments give the same object.

    Raises:
        PlanError: If no plan stays below the limit.

    Example:
        >>> spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
        >>> plan_linear(spec, 4096).flops_forward // 2
        190195200
    """
    config = PlanConfig(objective=objective, memory_limit_bytes=memory_limit_bytes)
    if num_tokens < 1:
        raise PlanError(
            "a plan needs at least one token",
            got=f"num_tokens={num_tokens}",
            expected="num_tokens >= 1",
            mend="give the number of rows of the layer's input",
        )
    network = linear_network(spec, num_tokens)

    def searched(minimize: str) -> Plan:
        path = find_path(network, minimize)
        return Plan(spec, num_tokens, itemsize, needs_input_grad, network, path)

    def cost(plan: Plan) -> float:
        if objective == "flops":
            return plan.flops_forward + plan.flops_backward
        return cost_model(device_type).seconds(plan.program, num_tokens, itemsize)

    plans = [searched("flops")]
    if objective == "time" and spec.layout == "tt":
        path = two_sided_path(len(spec.in_modes), len(spec.out_modes))
        plans.append(Plan(spec, num_tokens, itemsize, needs_input_grad, network, path))
    limit = config.memory_limit_bytes
    if limit is None:
        return min(plans, key=cost)
    if all(plan.peak_bytes > limit for plan in plans):
        plans += [searched(minimize) for minimize in MEMORY_OBJECTIVES]
    fitting = [plan for plan in plans if plan.peak_bytes <= limit]
    if not fitting:
        least = min(plan.peak_bytes for plan in plans)
        raise PlanError(
            f"no plan of {spec} at {num_tokens} tokens stays below the memory limit",
            got=f"memory_limit_bytes={limit}",
            expected=f"at least {least}, the smallest peak found",
            mend="raise the limit, or use smaller batches or ranks",
        )
    return min(fitting, key=cost)
