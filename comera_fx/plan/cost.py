"""Predict how long a program takes.

A product takes ``launch + max(FLOPs / rate(m, n, k), bytes / bandwidth)``, and a read that is no
view the time to copy it. Products run the further below peak the smaller their smallest side is:
``rate = peak * s / (s + s_half)`` for ``s = min(m, n, k)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from comera_fx.plan.program import Product, Program, Read


@dataclass(frozen=True)
class CostModel:
    """Speeds of a device; ratios between programs count, not seconds.

    Args:
        launch_seconds: What any product costs, however small.
        flops_per_second: Rate of large products.
        half_rate_size: Smallest side at which a product runs at half that rate.
        bytes_per_second: Rate at which operands and results are moved.
        copied_bytes_per_second: Rate at which a tensor is permuted into another.
    """

    launch_seconds: float
    flops_per_second: float
    half_rate_size: float
    bytes_per_second: float
    copied_bytes_per_second: float

    def seconds(self, program: Program, num_tokens: int, itemsize: int) -> float:
        """Return the predicted time of forward and backward."""
        reads = [program.result, *(read for read in program.gradients if read is not None)]
        copies = sum(self._copy_seconds(read, num_tokens, itemsize) for read in reads)
        products = (*program.forward, *program.backward)
        return copies + sum(self._seconds(p, num_tokens, itemsize) for p in products)

    def _seconds(self, product: Product, num_tokens: int, itemsize: int) -> float:
        m, k = _matrix_shape(product.left, num_tokens)
        _, n = _matrix_shape(product.right, num_tokens)
        smallest = min(m, k, n)
        rate = self.flops_per_second * smallest / (smallest + self.half_rate_size)
        moved = (m * k + k * n + m * n) * itemsize
        copies = sum(
            self._copy_seconds(read, num_tokens, itemsize) for read in (product.left, product.right)
        )
        busy = max(2 * m * k * n / max(rate, 1.0), moved / self.bytes_per_second)
        return self.launch_seconds + busy + copies

    def _copy_seconds(self, read: Read, num_tokens: int, itemsize: int) -> float:
        if read.axes is None:
            return 0.0
        return _count(read.shape, num_tokens) * itemsize / self.copied_bytes_per_second


DEFAULT_COSTS = {
    # Two cores: products of rank 16, 32, 64, 96 at 4,096 x 768 ran at 0.43, 0.66, 0.87, 0.98 of
    # the dense product's 99 GFLOP/s; a permuting copy moves a fraction of a plain one's 16 GB/s.
    "cpu": CostModel(5e-6, 110e9, 16.0, 12e9, 2e9),
    # Not yet measured on a GPU: figures of the order that vendors state.
    "cuda": CostModel(5e-6, 50e12, 64.0, 1.5e12, 0.7e12),
}
"""Shipped speeds by device type; an unknown type is taken for a CPU."""


def cost_model(device_type: str) -> CostModel:
    """Return the shipped model of a device type."""
    return DEFAULT_COSTS.get(device_type, DEFAULT_COSTS["cpu"])


def _matrix_shape(read: Read, num_tokens: int) -> tuple[int, int]:
    rows, columns = (_count((size,), num_tokens) for size in read.final)
    return (columns, rows) if read.transposed else (rows, columns)


def _count(shape: tuple[int, ...], num_tokens: int) -> int:
    return prod(-size * num_tokens if size < 0 else size for size in shape)
