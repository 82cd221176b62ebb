"""Predict how long matrix products and copies take on a device.

A product ``(m, k) @ (k, n)`` takes ``launch + max(FLOPs / rate(m, n, k), bytes / bandwidth)``. The
rate is interpolated in a table measured on the device: it falls where any side is small, and not
alike for each side. Columns that do not fill a whole tile of the device's vector registers are
worked on in halves, quarters and so on of a tile, each nearly as slow as a whole one: 30 columns
take longer than 32, which is why ranks are padded inside plans.

A table that ``comera-fx calibrate`` measured on this machine is found in the user's cache folder;
without one, that which comes with the package is used.
"""

from __future__ import annotations

import json
import platform
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from itertools import product as cartesian
from math import log2
from pathlib import Path
from typing import Any

from comera_fx.config import cache_folder

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
        ragged_tile: Cost, in tiles, of each half, quarter and so on that a last tile is made of.
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
        self,
        num_tokens: int,
        sizes: tuple[int, int],
        itemsize: int,
        *,
        needs_input_grad: bool,
        needs_weight_grad: bool = True,
    ) -> float:
        """Return the time of forward and backward of a dense layer of ``sizes`` (in, out)."""
        in_size, out_size = sizes
        shapes = [(num_tokens, out_size, in_size)]
        if needs_weight_grad:
            shapes.append((out_size, in_size, num_tokens))
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
        return n - rest + rest.bit_count() * self.ragged_tile * self.tile

    def padded(self, rank: int) -> int:
        """Return the next rank that fills whole tiles; ranks below one tile stay."""
        return rank if rank < self.tile else -(-rank // self.tile) * self.tile

    def summary(self) -> str:
        """Return the figures that say most, one a line."""
        peak = max(rate for plane in self.rates for row in plane for rate in row)
        rows = [
            ("fastest product", f"{peak / 1e9:,.1f} GFLOP/s"),
            ("(4096, 256) @ (256, 16)", f"{self.rate(4096, 16, 256) / 1e9:,.1f} GFLOP/s"),
            ("(4096, 16) @ (16, 256)", f"{self.rate(4096, 256, 16) / 1e9:,.1f} GFLOP/s"),
            ("(256, 4096) @ (4096, 16)", f"{self.rate(256, 16, 4096) / 1e9:,.1f} GFLOP/s"),
            ("columns of a tile", f"{self.tile}, parts of one cost {self.ragged_tile:.2f} of it"),
            ("launch of a product", f"{1e6 * self.launch_seconds:.2f} us"),
            ("call of a TT layer, both ways", f"{1e6 * self.call_seconds:.1f} us"),
            ("call of a dense layer, both ways", f"{1e6 * self.dense_call_seconds:.1f} us"),
            ("bandwidth", f"{self.bytes_per_second / 1e9:,.1f} GB/s"),
            ("bandwidth of permuting copies", f"{self.copied_bytes_per_second / 1e9:,.1f} GB/s"),
        ]
        return "\n".join([self.device, *(f"  {name:<33} {value}" for name, value in rows)])

    def to_dict(self) -> dict[str, Any]:
        """Return the model in types that ``json`` writes; ``from_dict`` reads them."""
        return asdict(self)


def from_dict(values: Mapping[str, Any]) -> CostModel:
    """Return the model that ``CostModel.to_dict`` wrote.

    Raises:
        KeyError, TypeError, ValueError: If ``values`` is no such dictionary.
    """
    rates = tuple(tuple(tuple(map(float, row)) for row in plane) for plane in values["rates"])
    sides = tuple(map(_count, values["sides"]))
    lengths = {len(rates), *(len(plane) for plane in rates)}
    lengths |= {len(row) for plane in rates for row in plane}
    if lengths != {len(sides)} or len(sides) < 2 or list(sides) != sorted(set(sides)):
        raise ValueError("the table of rates does not fit its sides")
    if not all(type(values[name]) in (int, float) for name in _SPEEDS):
        raise TypeError("speeds are numbers")
    speeds = {name: float(values[name]) for name in _SPEEDS}
    every = (*speeds.values(), *(rate for plane in rates for row in plane for rate in row))
    if not all(_LEAST_SPEED < speed < 1 / _LEAST_SPEED for speed in every):
        raise ValueError("speeds are positive, and not beyond all measure")
    if max(*sides, _count(values["tile"])) > _MOST_SIDE:
        raise ValueError("no product has such sides")
    return CostModel(
        device=str(values["device"]),
        sides=sides,
        rates=rates,
        tile=_count(values["tile"]),
        **speeds,
    )


_LEAST_SPEED, _MOST_SIDE = 1e-30, 1 << 40


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no positive int")
    return value


# ---- where models come from ----


@lru_cache
def shipped_model(device_type: str) -> CostModel:
    """Return the model that comes with the package; an unknown type is taken for a CPU."""
    name = device_type if device_type == "cuda" else "cpu"
    text = resources.files(__package__).joinpath(f"costs_{name}.json").read_text(encoding="utf-8")
    return from_dict(json.loads(text))


@lru_cache
def cost_model(device_type: str) -> CostModel:
    """Return the model that plans for a device type are made by.

    It is looked for once a process, for the device and the number of threads of that moment: equal
    plans of a process are the same object. ``calibrate`` alone has it looked for anew.
    """
    return measured_model(device_type) or shipped_model(device_type)


def measured_model(device_type: str) -> CostModel | None:
    """Return the model that was measured on this machine, ``None`` without one.

    A file that cannot be used is left alone, with a warning.
    """
    device, path = device_name(device_type), costs_path(device_type)
    if device is None or path is None:
        return None
    try:
        if not path.exists():
            return None
        model = from_dict(json.loads(path.read_text(encoding="utf-8")))
        if model.device != device:
            raise ValueError(f"it is of {model.device!r}, this is {device!r}")
    except (OSError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        kind = "cuda" if device_type == "cuda" else "cpu"
        warnings.warn(
            f"the speeds measured in {path} are not used: {type(error).__name__}, {error}. Measure "
            f"anew with `comera-fx calibrate --device {kind}`, or delete the file.",
            UserWarning,
            stacklevel=2,
        )
        return None
    return model


def write_model(model: CostModel, path: Path) -> None:
    """Write a model where ``measured_model`` finds it: whole, or not at all.

    Raises:
        OSError: If that cannot be done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        written = Path(file.name)
        try:
            file.write(to_text(model))
            file.close()  # an open file cannot be renamed everywhere
            written.replace(path)
        except BaseException:
            file.close()
            written.unlink(missing_ok=True)
            raise


def to_text(model: CostModel) -> str:
    """Return a model as JSON with three significant digits, one row of rates a line."""
    values = {name: _rounded(value) for name, value in model.to_dict().items()}
    del values["rates"]
    planes = (",\n   ".join(map(_row, plane)) for plane in model.rates)
    rates = ",\n".join(f"  [{plane}]" for plane in planes)
    head = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in values.items())
    return f'{{\n{head} "rates": [\n{rates}\n ]\n}}\n'


def _row(rates: tuple[float, ...]) -> str:
    return f"[{', '.join(f'{rate:.3g}' for rate in rates)}]"


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def costs_path(device_type: str) -> Path | None:
    """Return the file of the model measured on this device; ``None`` if there can be none."""
    folder, device = cache_folder(), device_name(device_type)
    if folder is None or device is None:
        return None
    slug = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / "comera_fx" / f"costs-{slug}.json"


def device_name(device_type: str) -> str | None:
    """Return what tells a device from others that run at other speeds; ``None`` if it is not here.

    Types other than "cuda" are taken for a CPU, whose speeds depend on the number of threads.
    """
    import torch  # not above: what a plan is made of needs no tensors

    if device_type == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else None
    threads = torch.get_num_threads()
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {vectors}, {threads} thread{'s' * (threads > 1)}"


@lru_cache
def _processor() -> str:
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"
