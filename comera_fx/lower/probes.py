"""Run what plans are made of, over and over, and keep the fastest call of each thing.

Other processes stall a product for milliseconds at a time, so all things are gone over in rounds
of few calls each, for as long as there is time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_fx.config import PlanConfig
from comera_fx.lower import choose
from comera_fx.lower.fit import ANCHORS, COLUMNS, SIDES, Shape, ascending, shorter
from comera_fx.lower.ready import ReadyCalls, is_unobserved
from comera_fx.lower.timing import Run, fastest
from comera_fx.spec import TTSpec

LONGEST = 1 / 400
"""Share of the time given that one product may take; larger ones are left out."""

CALLS = {"cpu": 5, "cuda": 20}
"""Most calls of one thing in a round."""

TALL = ((1024, 768), (4096, 256))
"""Rows of the result, and length of the sums, of the products whose columns vary."""

COPIED = (
    ((512, 96, 8), (0, 2, 1)),
    ((512, 12, 64), (0, 2, 1)),
    ((768, 512), (1, 0)),
    ((12, 8, 8, 512), (3, 0, 1, 2)),
)
"""Shapes of activations, and how axes are permuted: within a token, or the tokens to the front."""

TINY_TOKENS = 8
TINY = (
    TTSpec("tt", (4, 4), (4, 4), (1, 4, 4, 4, 1)),
    TTSpec("tt", (4, 4, 4), (4, 4, 4), (1, 4, 8, 8, 8, 4, 1)),
)
"""Layers whose products take next to no time."""

Key = tuple[str | int, ...]
"""What was run: a shape of a product, or a word and what tells it from others."""


class Rounds:
    """Runs each thing in turns until the time is up, and keeps its fastest call."""

    def __init__(self, runs: Mapping[Key, Run], device: str, seconds: float) -> None:
        self.runs, self.device = runs, device
        self.end = time.perf_counter() + seconds
        self.longest = seconds * LONGEST
        self.times: dict[Key, float] = {}

    def go(self) -> None:
        """Go over everything once, then for as long as there is time."""
        for turn in count():
            for key, run in self.runs.items():
                if turn and time.perf_counter() >= self.end:
                    return
                self._time(key, run)

    def _time(self, key: Key, run: Run) -> None:
        if key not in self.times:
            if self._expected(key) > self.longest:
                return  # a later turn may find that the smaller one was only held up
            run()
        known = self.times.get(key, self.longest)
        calls = max(1, min(CALLS[self.device], int(self.longest / known)))
        taken = fastest(run, calls, self.device)
        self.times[key] = min(self.times.get(key, taken), taken)

    def _expected(self, key: Key) -> float:
        """Return the seconds that a product may take by those of the next smaller one."""
        shape = shape_of(key)
        if shape is None or shape == (1, 1, 1):
            return 0.0
        if time.perf_counter() >= self.end:
            return float("inf")
        smaller = shorter(shape)
        return self.times.get(smaller, float("inf")) * prod(shape) / prod(smaller)


def make_runs(device: str) -> dict[Key, Run]:
    """Return everything to run: ``launch``, ``stream``, layers, copies, products."""
    runs: dict[Key, Run] = {}
    size = SIDES[-1] ** 2
    left, right = (_halves((size,), device) for _ in range(2))
    small = _halves((16,), device)
    runs["launch",] = lambda: torch.mm(small.view(4, 4), small.view(4, 4))
    runs["stream",] = lambda: right.copy_(left)
    for number, spec in enumerate(TINY):
        runs["layer", number] = _layer(spec, device)
        runs["dense", number] = _dense(spec, device)
    for number, (sizes, axes) in enumerate(COPIED):
        runs["copy", number] = _copy(left, sizes, axes)
    for m, k in TALL:
        for n in (*ANCHORS, *COLUMNS):
            runs["tall", m, n, k] = _product(left, right, (m, n, k))
    for shape in ascending():
        runs[shape] = _product(left, right, shape)
    return runs


def shape_of(key: Key) -> Shape | None:
    """Return the shape of the product that a key names, if it is one of the table."""
    match key:
        case (int(m), int(n), int(k)):
            return m, n, k
    return None


def _halves(shape: tuple[int, ...], device: str) -> Tensor:
    """Rates are kept as those of float32, whatever the caller's default."""
    return torch.full(shape, 0.5, device=device, dtype=torch.float32)


def _product(left: Tensor, right: Tensor, shape: Shape) -> Callable[[], Tensor]:
    m, n, k = shape
    a, b = left[: m * k].view(m, k), right[: k * n].view(k, n)
    return lambda: torch.mm(a, b)


def _copy(source: Tensor, sizes: tuple[int, ...], axes: tuple[int, ...]) -> Callable[[], Tensor]:
    return source[: prod(sizes)].view(sizes).permute(axes).contiguous


class _TinyLayer(nn.Module):
    """Does what a TT layer does in ordinary training, below the operator."""

    def __init__(self, spec: TTSpec, device: str) -> None:
        super().__init__()
        self.spec = spec
        full = (_halves(shape, device) for shape in spec.core_shapes)
        self.cores = [core.requires_grad_() for core in full]
        self.bias = _halves((spec.out_size,), device).requires_grad_()
        self.ready, self.config = ReadyCalls(), PlanConfig()

    def forward(self, x: Tensor) -> Tensor:
        held = x, list(self.cores), self.bias
        result = self.ready.run(*held, self.config) if is_unobserved(x) else None
        if result is not None:
            return result
        self.ready.add(x, self.cores, self.spec, self.config)
        settings = {"num_tokens_hint": TINY_TOKENS, **vars(self.config)}
        return choose.linear(*held, self.spec, **settings)


def _layer(spec: TTSpec, device: str) -> Callable[[], object]:
    layer = _TinyLayer(spec, device)
    return _both_ways(layer, [*layer.cores, layer.bias], spec, device)


def _dense(spec: TTSpec, device: str) -> Callable[[], object]:
    shapes = (spec.out_size, spec.in_size), (spec.out_size,)
    weight, bias = (_halves(shape, device).requires_grad_() for shape in shapes)
    return _both_ways(lambda x: F.linear(x, weight, bias), [weight, bias], spec, device)


def _both_ways(
    layer: Callable[[Tensor], Tensor], params: Iterable[Tensor], spec: TTSpec, device: str
) -> Callable[[], object]:
    """Forward and backward of a layer, every gradient wanted."""
    x, grad = (_halves((TINY_TOKENS, size), device) for size in (spec.in_size, spec.out_size))
    wanted = [x.requires_grad_(), *params]

    def run() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(layer(x), wanted, grad)

    return run
