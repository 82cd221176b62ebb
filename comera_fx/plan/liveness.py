"""When the tensors of a program are alive: what must be made, what may go, the most held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from comera_fx.plan.operations import Op


def needed_for(slots: Iterable[int], ops: Sequence[Op]) -> tuple[Op, ...]:
    """Return the operations, in order, that make ``slots`` and all that these are made of."""
    wanted, needed = set(slots), []
    for op in reversed(ops):
        if op.out in wanted:
            needed.append(op)
            wanted.update(op.reads)
    return tuple(reversed(needed))


def with_frees(ops: Sequence[Op], keep: set[int]) -> tuple[Op, ...]:
    """Note on each operation which tensors nothing after it reads."""
    freed: list[Op] = []
    read_later = set(keep)
    for op in reversed(ops):
        reads = set(op.reads)
        freed.append(replace(op, free=tuple(sorted(reads - read_later))))
        read_later |= reads
    return tuple(reversed(freed))


def peak_bytes(
    forward: Sequence[Op],
    backward: Sequence[Op],
    kept: Sequence[int],
    bytes_of: Sequence[int],
    num_leaves: int,
) -> int:
    """Return the largest sum of bytes alive at once.

    Args:
        forward: What the forward pass runs.
        backward: What the backward pass runs.
        kept: Slots that autograd holds from the one to the other.
        bytes_of: Bytes of what each slot holds.
        num_leaves: Number of leaves; the target's slot comes after theirs.
    """
    peak = 0
    # What is given and what autograd holds stays alive to the end of its phase.
    for phase, held in ((forward, set(range(num_leaves))), (backward, {*kept, num_leaves})):
        alive = set(held)
        peak = max(peak, sum(bytes_of[slot] for slot in alive))
        for op in phase:
            alive.add(op.out)
            copies = sum(bytes_of[slot] for slot in op.copied_slots)
            peak = max(peak, copies + sum(bytes_of[slot] for slot in alive))
            alive -= set(op.free) - held
    return peak
