"""What runs a plan, call by call, and why in this form; all of it read off the plan's program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from comera_fx.plan.layout import BATCHED_SLOWDOWN
from comera_fx.plan.lookup import LookupPlan
from comera_fx.plan.operations import Op, Pad, Product, Read
from comera_fx.plan.plan import Plan

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Kernel:
    """One call.

    Args:
        phase: "forward" or "backward".
        makes: Name of the message, with what it is made of.
        call: What is called: ``mm`` and ``bmm`` are matrix products of BLAS.
        sizes: ``m x n x k``, with the number of products in front where there are many.
        why: Why the call has this form.
        seconds: Predicted time, copies of its operands counted.
    """

    phase: str
    makes: str
    call: str
    sizes: str
    why: str
    seconds: float


def kernels_of(plan: Plan) -> list[Kernel]:
    """Return the calls that run a plan, in order; ``plan.seconds`` holds handing out as well.

    Example:
        >>> from comera_fx import TTSpec, plan_linear
        >>> kernels = kernels_of(plan_linear(TTSpec("tt", (4,), (6,), (1, 2, 1)), 8))
        >>> [(kernel.phase, kernel.call) for kernel in kernels][:3]
        [('forward', 'mm'), ('forward', 'mm'), ('backward', 'mm')]
    """
    program = plan.program
    again = len(program.forward), len(program.forward) + program.recomputed
    found = []
    for number, op in enumerate((*program.forward, *program.backward)):
        phase = "forward" if number < again[0] else "backward"
        reasons = list(_reasons(op, plan))
        if again[0] <= number < again[1]:
            reasons.append("made again: cheaper than to keep it")
        if op is program.forward[-1] and number == again[0] - 1 and program.bias_fits:
            reasons.append(
                "a bias costs nothing: it fills up padding"
                if program.folded_bias
                else "a bias is added in the same call"
            )
        names = [program.names[slot] for slot in op.reads]
        made = f"{program.names[op.out]} = {' * '.join(names)}"
        found.append(
            Kernel(phase, made, _call(op), _sizes(op, plan), "; ".join(reasons), _seconds(op, plan))
        )
    return found


def library_of(device_type: str) -> str:
    """Return whose matrix products run plans on a type of device."""
    return "cuBLAS" if device_type == "cuda" else "the BLAS that torch was built with"


def lookup_lines(plan: LookupPlan, num_ids: int) -> list[tuple[str, str]]:
    """Return pairs of call and reason for the look-up of rows of a TT table.

    Args:
        plan: How rows are looked up.
        num_ids: Rows that are looked up.
    """
    if plan.right is None:
        rows, columns, _ = plan.left_shape
        return [
            ("mm", f"the dense table {rows:,} {TIMES} {columns:,} is built: "
             f"{num_ids:,} rows are wanted of it"),
            ("embedding", "picks the rows"),
        ]  # fmt: skip
    left = f" {TIMES} ".join(f"{size:,}" for size in plan.left_shape)
    right = f" {TIMES} ".join(f"{size:,}" for size in plan.right_shape)
    one = plan.right_shape[0] == 1
    return [
        ("mm", f"left pair table (rows, columns, rank) {left}, of the first {plan.cut} cores"),
        ("mm", f"right pair table (rows, rank, columns) {right}, of the others"),
        ("index_select", "picks an entry of each for every id"),
        ("mm" if one else "bmm", f"multiplies them, {num_ids:,} at once: rows of the table "
         "that nobody asked for are not built"),
    ]  # fmt: skip


def _call(op: Op) -> str:
    if isinstance(op, Pad):
        return "pad"
    return "bmm" if op.batched else "mm"


def _matrix(read: Read, tokens: int) -> tuple[int, ...]:
    """Return the shape that a product sees; a negative size stands for a multiple of tokens."""
    shape = tuple(-size * tokens if size < 0 else size for size in read.final)
    return (*shape[:-2], shape[-1], shape[-2]) if read.transposed else shape


def _dims(op: Product, tokens: int) -> tuple[int, int, int, int]:
    """Return the number of products, and m, n and k of each."""
    left, right = _matrix(op.left, tokens), _matrix(op.right, tokens)
    batch = max(prod(left[:-2]), prod(right[:-2])) if op.batched else 1
    return batch, left[-2], right[-1], left[-1]


def _sizes(op: Op, plan: Plan) -> str:
    if isinstance(op, Pad):
        return f"{_shown(op.shape, plan)} to {_shown(op.final, plan)}"
    batch, m, n, k = _dims(op, plan.num_tokens)
    return f"{f'{batch} of ' if batch > 1 else ''}{m} {TIMES} {n} {TIMES} {k}"


def _shown(shape: tuple[int, ...], plan: Plan) -> str:
    return TIMES.join(str(-size * plan.num_tokens if size < 0 else size) for size in shape)


def _reasons(op: Op, plan: Plan) -> Iterator[str]:
    names = plan.program.names
    if isinstance(op, Pad):
        tile = plan.costs.tile
        yield f"products over whole tiles of {tile} columns take less time, padding counted"
        return
    many = next((read for read in (op.left, op.right) if op.batched and not read.repeated), None)
    if many is not None:
        yield (
            f"the summed modes lie in the middle of {names[many.slot]}: one product for each entry "
            "of the leading ones reads it without a copy"
        )
    copied = [names[slot] for slot in op.copied_slots]
    if copied:
        yield f"{' and '.join(copied)} copied into order first: no faster way without was found"
    elif many is None:
        turned = [names[read.slot] for read in (op.left, op.right) if read.transposed]
        how = f", {' and '.join(turned)} by the other side" if turned else ""
        yield f"both are matrices as they lie{how}: no copy"


def _seconds(op: Op, plan: Plan) -> float:
    tokens, itemsize, costs = plan.num_tokens, plan.itemsize, plan.costs
    if isinstance(op, Pad):
        return costs.copy_seconds(itemsize * prod(op.final))
    batch, m, n, k = _dims(op, tokens)
    slowdown = BATCHED_SLOWDOWN if op.batched else 1.0
    seconds = slowdown * costs.product_seconds(batch * m, n, k, itemsize)
    copies = (read for read in (op.left, op.right) if read.axes is not None)
    return seconds + sum(
        costs.copy_seconds(itemsize * prod(_matrix(read, tokens))) for read in copies
    )
