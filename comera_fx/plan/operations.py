"""What a program is made of: matrix products and padding, on tensors held in numbered slots.

Sizes are ints in which a negative size ``-f`` stands for ``f * num_tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Read:
    """How a stored tensor is read, as a matrix, a batch of matrices, or in its final shape.

    Args:
        slot: Which tensor.
        shape: Shape to read it in; with ``axes``, the shape before permuting.
        axes: Permutation that costs a copy, or ``None`` for a view.
        final: Shape after the permutation; equals ``shape`` for a view.
        transposed: Whether the last two axes are then swapped, which costs nothing.
        repeated: Size of a batch that reads this one matrix; 0 where there is none.
        narrowed: Shape that is left of ``final`` once padding is cut off; ``None`` for all.
    """

    slot: int
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None
    final: tuple[int, ...]
    transposed: bool = False
    repeated: int = 0
    narrowed: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Product:
    """``out = left @ right``; afterwards the tensors in ``free`` are read no more."""

    out: int
    left: Read
    right: Read
    batched: bool = False
    free: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """Slots that are read."""
        return self.left.slot, self.right.slot

    @property
    def copied_slots(self) -> tuple[int, ...]:
        """Slots whose reads make a copy."""
        return tuple(read.slot for read in (self.left, self.right) if read.axes is not None)


@dataclass(frozen=True)
class Pad:
    """``out = source``, read in ``shape`` and padded with zeros to ``final``."""

    out: int
    source: int
    shape: tuple[int, ...]
    final: tuple[int, ...]
    free: tuple[int, ...] = ()
    copied_slots: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """Slots that are read."""
        return (self.source,)


Op = Product | Pad


@dataclass(frozen=True)
class Slice:
    """One entry along an axis of a matrix: slot, the shape to read it in, and which."""

    slot: int
    shape: tuple[int, int]
    axis: int
    entry: int


@dataclass(frozen=True)
class FoldedBias:
    """A bias that padding leaves room for in the last forward product.

    With ones in an unused column of its left operand and the bias in that row of its right one,
    the product adds the bias, and the right operand's gradient holds the bias' in that row. Both
    cost nothing; what they leave elsewhere meets zeros of the padding, and is cut off with it.

    Args:
        ones: The column of the left operand.
        bias: The row of the right operand.
        gradient: The row of the right operand's gradient.
    """

    ones: Slice
    bias: Slice
    gradient: Slice
