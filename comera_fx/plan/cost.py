"""Predict how long matrix products and copies take on a device.

A product ``(m, k) @ (k, n)`` takes ``launch + max(FLOPs / rate(m, n, k), bytes / bandwidth)``. The
rate is interpolated in a table measured on the device: it falls where any side is small, and not
alike for each side. Columns that do not fill a whole tile of the device's vector registers cost
more than those they leave empty, which is why ranks are padded inside plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from itertools import product as cartesian
from math import log2
from typing import Any

FLOAT32_BYTES = 4
_SPEEDS = (
    "launch_seconds",
    "call_seconds",
    "dense_call_seconds",
    "ragged_tile",
    "bytes_per_second",
    "copied_bytes_per_second",
)


@dataclass(frozen=True, eq=False)
class CostModel:
    """Speeds of a device. Ratios between programs are what counts, not seconds.

    Models compare by identity, so that predictions are cached.

    Args:
        device: Name of the device that the figures are from.
        launch_seconds: What any product or copy costs, however small.
        call_seconds: What forward and backward of a planned layer cost beside its products.
        dense_call_seconds: What those of a dense layer cost beside its products.
        sides: Sides at which rates were measured, ascending.
        rates: FLOPs per second of float32 products, ``rates[m][n][k]`` at these sides.
        tile: Columns of a whole tile; 1 where columns need not be whole.
        ragged_tile: Cost of a last tile whose columns are no multiple of half a tile, in tiles.
        bytes_per_second: Rate at which operands and results are moved.
        copied_bytes_per_second: Rate at which a tensor is permuted into another.
    """

    device: str
    launch_seconds: float
    call_seconds: float
    dense_call_seconds: float
    sides: tuple[int, ...]
    rates: tuple[tuple[tuple[float, ...], ...], ...]
    tile: int
    ragged_tile: float
    bytes_per_second: float
    copied_bytes_per_second: float

    @lru_cache(maxsize=1 << 16)  # noqa: B019 (a process holds a handful of models, for ever)
    def product_seconds(self, m: int, n: int, k: int, itemsize: int) -> float:
        """Return the time of one product ``(m, k) @ (k, n)``.

        Args:
            m: Rows of the result.
            n: Columns of the result.
            k: Length of the sums.
            itemsize: Bytes of a number; rates of wider ones fall in proportion.
        """
        columns = self._whole_columns(n)
        wide = max(itemsize / FLOAT32_BYTES, 1.0)
        busy = 2 * m * columns * k * wide / self.rate(m, max(n, round(columns)), k)
        moved = (m * k + k * n + m * n) * itemsize / self.bytes_per_second
        return self.launch_seconds + max(busy, moved)

    def dense_seconds(
        self, num_tokens: int, sizes: tuple[int, int], itemsize: int, *, needs_input_grad: bool
    ) -> float:
        """Return the time of forward and backward of a dense layer of ``sizes`` (in, out)."""
        in_size, out_size = sizes
        shapes = [(num_tokens, out_size, in_size), (out_size, in_size, num_tokens)]
        if needs_input_grad:
            shapes.append((num_tokens, in_size, out_size))
        products = sum(self.product_seconds(*shape, itemsize) for shape in shapes)
        return self.dense_call_seconds + products

    def copy_seconds(self, num_bytes: int) -> float:
        """Return the time to permute, or to pad, a tensor of ``num_bytes`` into another."""
        return self.launch_seconds + num_bytes / self.copied_bytes_per_second

    def rate(self, m: int, n: int, k: int) -> float:
        """Return FLOPs per second of a product, interpolated between the logarithms of sides."""
        places = [self._place(side) for side in (m, n, k)]
        total = 0.0
        for corner in cartesian((0, 1), repeat=3):
            weight = 1.0
            index = []
            for (low, part), high in zip(places, corner, strict=True):
                weight *= part if high else 1 - part
                index.append(low + high)
            if weight:
                row, column, depth = index
                total += weight * log2(self.rates[row][column][depth])
        return float(2.0**total)

    def _place(self, side: int) -> tuple[int, float]:
        """Return the last measured side not above ``side``, and the part of the way to the next."""
        sides = self.sides
        if side >= sides[-1]:
            return len(sides) - 2, 1.0
        low = max(i for i, known in enumerate(sides) if known <= max(side, sides[0]))
        part = log2(max(side, sides[0]) / sides[low]) / log2(sides[low + 1] / sides[low])
        return low, part

    def _whole_columns(self, n: int) -> float:
        """Return the columns that ``n`` columns cost as much as."""
        rest = n % self.tile
        if n < self.tile or not rest:
            return n
        cost = 1.0 if rest * 2 == self.tile else self.ragged_tile
        return n - rest + cost * self.tile

    def padded(self, rank: int) -> int:
        """Return the next rank that fills whole tiles; ranks below one tile stay."""
        return rank if rank < self.tile else -(-rank // self.tile) * self.tile

    def to_dict(self) -> dict[str, Any]:
        """Return the model in types that ``json`` writes; ``from_dict`` reads them."""
        return asdict(self)


def from_dict(values: Mapping[str, Any]) -> CostModel:
    """Return the model that ``CostModel.to_dict`` wrote.

    Raises:
        KeyError, TypeError, ValueError: If ``values`` is no such dictionary.
    """
    rates = tuple(tuple(tuple(map(float, row)) for row in plane) for plane in values["rates"])
    sides = tuple(map(int, values["sides"]))
    lengths = {len(rates), *(len(plane) for plane in rates)}
    lengths |= {len(row) for plane in rates for row in plane}
    if lengths != {len(sides)} or len(sides) < 2 or list(sides) != sorted(set(sides)):
        raise ValueError("the table of rates does not fit its sides")
    speeds = {name: float(values[name]) for name in _SPEEDS}
    if min(*speeds.values(), *(r for plane in rates for row in plane for r in row)) <= 0:
        raise ValueError("speeds are positive")
    return CostModel(
        device=str(values["device"]), sides=sides, rates=rates, tile=int(values["tile"]), **speeds
    )


@lru_cache
def shipped_model(device_type: str) -> CostModel:
    """Return the model that comes with the package; an unknown type is taken for a CPU."""
    name = device_type if device_type == "cuda" else "cpu"
    text = resources.files(__package__).joinpath(f"costs_{name}.json").read_text(encoding="utf-8")
    return from_dict(json.loads(text))


@lru_cache
def cost_model(device_type: str) -> CostModel:
    """Return the model that plans for a device type are made by."""
    return shipped_model(device_type)
