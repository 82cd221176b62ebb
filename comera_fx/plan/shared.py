"""Predict when layers are faster through factors that were made for many of them at once.

A plan contracts one layer by itself, in the order that is best for its tokens. Through its factors
``W^T = L R`` a layer takes two products with the tokens, and its weight-only chains take a share of
batched products. Whether that wins depends on the tokens, the layers and the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from comera_fx.plan.cost import CostModel, cost_model
from comera_fx.plan.linear import plan_linear
from comera_fx.spec import TTSpec

Form = Literal["own", "factors", "heads"]
"""How layers run: each by its own plan; through factors made at once; or through such without the
first cores of the right factors, which are applied by themselves."""

# Times of calls beside their products, forward and backward, as multiples of that of a dense layer.
APPLY_CALL = 1.4
"""Applying a layer's factors."""
CHAINS_CALL = 7.0
"""Making factors, of however many layers."""
CHAINS_CALL_OF_LAYER = 0.8
"""What each layer adds to it."""
JOINT_CALL = 0.3
"""What each layer adds to reading an input with others."""
CACHE_BYTES = 4 << 20
"""Bytes up to which what is written is read from a cache."""
WORTHWHILE = 0.98
"""Share of the layers' own time below which sharing is predicted to be worth it."""
FORWARD_CALL = 0.4
"""Share of all these that falls to the forward pass."""


@dataclass(frozen=True)
class Sizes:
    """What the times of equal-shaped layers depend on.

    Args:
        spec: Shape of each, in layout "tt"; no rank is 0.
        num_tokens: Rows of each one's input.
        needs_input_grad: Whether the gradient of the input is wanted.
        needs_core_grad: Whether those of the cores are.
        itemsize: Bytes of one number.
        device_type: Whose speeds the times are predicted by, "cpu" or "cuda".
    """

    spec: TTSpec
    num_tokens: int
    needs_input_grad: bool = True
    needs_core_grad: bool = True
    itemsize: int = 4
    device_type: str = "cpu"

    @property
    def costs(self) -> CostModel:
        """The device's speeds."""
        return cost_model(self.device_type)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.needs_input_grad or self.needs_core_grad

    def call_seconds(self, share: float) -> float:
        """Return the time of a call beside its products."""
        return self.costs.dense_call_seconds * share * (1.0 if self.trains else FORWARD_CALL)


@dataclass(frozen=True)
class Shared:
    """What layers cost through their factors, and without.

    Args:
        width: Columns of the left factors: the middle rank, or more, filled up with zeros.
        without_head: Whether the first core of the right factor is left out of it, and applied by
            itself: with few tokens that takes less than multiplying it in.
        chains_seconds: Predicted time of making the factors of all layers.
        apply_seconds: Predicted time of applying them, a layer.
        joint_seconds: Predicted time that layers save by reading their input in one product.
        own_seconds: Predicted time of a layer's own plan.
    """

    width: int
    without_head: bool
    chains_seconds: float
    apply_seconds: float
    joint_seconds: float
    own_seconds: float

    def wins(self, num_layers: int) -> bool:
        """Whether making the factors pays if so many layers use them."""
        together = self.chains_seconds + num_layers * self.apply_seconds - self.joint_seconds
        return together < WORTHWHILE * num_layers * self.own_seconds

    def form(self, num_layers: int) -> Form:
        """Return how so many layers run fastest."""
        if not self.wins(num_layers):
            return "own"
        return "heads" if self.without_head else "factors"


@lru_cache(maxsize=4096)
def plan_shared(
    sizes: Sizes, num_layers: int, *, can_split: bool = True, joint: tuple[int, ...] = ()
) -> Shared:
    """Predict the times of layers with factors that are made at once, and of each by itself.

    Args:
        sizes: What the times depend on; equal token buckets give equal predictions.
        num_layers: Number of layers whose factors are made at once.
        can_split: Whether the first core of right factors may be left out.
        joint: How many of the layers read one input, for each such input.

    Example:
        >>> spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
        >>> plan_shared(Sizes(spec, 128), 24).wins(24)
        True
    """
    forms = [(width, False) for width in _widths(sizes)]
    if can_split and len(sizes.spec.out_modes) > 1:
        forms.append((sizes.spec.middle_rank, True))
    times = {
        form: (
            _chains_seconds(sizes, num_layers, *form),
            _apply_seconds(sizes, *form),
            sum(max(0.0, joint_saving((sizes,) * num, form[:1] * num)) for num in joint),
        )
        for form in forms
    }

    def seconds(form: tuple[int, bool]) -> float:
        chains, apply, saved = times[form]
        return chains + num_layers * apply - saved

    best = min(forms, key=seconds)
    plan = plan_linear(
        sizes.spec,
        sizes.num_tokens,
        "time",
        sizes.needs_input_grad,
        needs_core_grad=sizes.needs_core_grad,
        itemsize=sizes.itemsize,
        device_type=sizes.device_type,
    )
    call = sizes.costs.call_seconds * (1.0 if sizes.trains else FORWARD_CALL)
    return Shared(*best, *times[best], call + plan.program.seconds)


@lru_cache(maxsize=4096)
def joint_saving(sizes: tuple[Sizes, ...], widths: tuple[int, ...]) -> float:
    """Return the time that layers save by reading their input in one product; below 0, none.

    Args:
        sizes: Of each layer; the input is the same.
        widths: Columns of each one's left factor.
    """
    first, num = sizes[0], len(sizes)
    costs, itemsize = first.costs, first.itemsize
    saved = sum(_left_seconds(each, width) for each, width in zip(sizes, widths, strict=True))
    if first.needs_input_grad:  # which are added up
        moved = 3 * first.num_tokens * first.spec.in_size * itemsize
        saved += (num - 1) * (costs.launch_seconds + moved / costs.bytes_per_second)
    moved = 2 * (first.spec.in_size + first.num_tokens) * sum(widths) * itemsize
    together = 2 * costs.launch_seconds + moved / costs.bytes_per_second
    together += _left_seconds(first, sum(widths)) + first.call_seconds(JOINT_CALL * num)
    return saved - together


def _widths(sizes: Sizes) -> list[int]:
    return list(dict.fromkeys((sizes.spec.middle_rank, sizes.costs.padded(sizes.spec.middle_rank))))


def check_seconds(sizes: Sizes) -> float:
    """Return the time of comparing a layer's cores with a copy."""
    num_bytes = 2 * sizes.spec.num_params * sizes.itemsize
    calls = sizes.spec.num_cores * sizes.costs.launch_seconds
    return calls + num_bytes / sizes.costs.bytes_per_second


def _chains_seconds(sizes: Sizes, num_layers: int, width: int, without_head: bool) -> float:
    spec = sizes.spec
    cut, launch = len(spec.in_modes), sizes.costs.launch_seconds
    shapes = [*_left_chain(spec), *_right_chain(spec, cut + without_head)]
    if sizes.needs_core_grad:
        shapes += [shape for m, n, k in shapes for shape in ((k, n, m), (m, k, n))]
    seconds = sizes.call_seconds(CHAINS_CALL + CHAINS_CALL_OF_LAYER * num_layers)
    for shape in shapes:
        seconds += launch + num_layers * (_product_seconds(sizes, *shape) - launch)
    return seconds + _moved_seconds(sizes, num_layers, width, without_head)


def _moved_seconds(sizes: Sizes, num_layers: int, width: int, without_head: bool) -> float:
    """Return the time of writing stacks and factors, and in training their gradients."""
    spec, cut = sizes.spec, len(sizes.spec.in_modes)
    cores, right = spec.num_params, width * spec.out_size
    if without_head:
        cores -= prod(spec.core_shapes[cut])
        right = spec.ranks[cut + 1] * spec.out_size // spec.out_modes[0]
    moved = (cores + spec.in_size * width + right) * num_layers * sizes.itemsize
    moved *= 2 if sizes.needs_core_grad else 1
    costs = sizes.costs
    fits = moved <= CACHE_BYTES
    return moved / (costs.bytes_per_second if fits else costs.copied_bytes_per_second)


def _left_chain(spec: TTSpec) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of the products that make the left factor of one layer."""
    shapes = []
    rows = spec.in_modes[0]
    for k in range(1, len(spec.in_modes)):
        shapes.append((rows, spec.in_modes[k] * spec.ranks[k + 1], spec.ranks[k]))
        rows *= spec.in_modes[k]
    return shapes


def _right_chain(spec: TTSpec, first: int) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of the products of the cores from ``first`` on."""
    num_in = len(spec.in_modes)
    shapes = []
    columns = spec.out_modes[-1]
    for k in range(spec.num_cores - 2, first - 1, -1):
        shapes.append((spec.ranks[k] * spec.out_modes[k - num_in], columns, spec.ranks[k + 1]))
        columns *= spec.out_modes[k - num_in]
    return shapes


def _apply_seconds(sizes: Sizes, width: int, without_head: bool = False) -> float:
    spec = sizes.spec
    seconds = sizes.call_seconds(APPLY_CALL) + _left_seconds(sizes, width)
    if not without_head:
        return seconds + _right_seconds(sizes, sizes.num_tokens, (width, spec.out_size))
    mode, last = spec.out_modes[0], spec.ranks[len(spec.in_modes) + 1]
    seconds += _right_seconds(sizes, sizes.num_tokens, (width, mode * last))
    return seconds + _right_seconds(sizes, sizes.num_tokens * mode, (last, spec.out_size // mode))


def _left_seconds(sizes: Sizes, width: int) -> float:
    """Return the time of the products with left factors of ``width`` columns."""
    tokens, in_size = sizes.num_tokens, sizes.spec.in_size
    seconds = sizes.costs.product_seconds(tokens, width, in_size, sizes.itemsize)
    if sizes.needs_input_grad:
        seconds += _product_seconds(sizes, tokens, in_size, width)
    if sizes.needs_core_grad:
        seconds += sizes.costs.product_seconds(in_size, width, tokens, sizes.itemsize)
    return seconds


def _right_seconds(sizes: Sizes, rows: int, shape: tuple[int, int]) -> float:
    """Return the time of the products of some rows with a factor of this shape."""
    width, out_size = shape
    seconds = _product_seconds(sizes, rows, out_size, width)
    if sizes.trains:
        seconds += sizes.costs.product_seconds(rows, width, out_size, sizes.itemsize)
    if sizes.needs_core_grad:
        seconds += _product_seconds(sizes, width, out_size, rows)
    return seconds


def _product_seconds(sizes: Sizes, m: int, n: int, k: int) -> float:
    """Return the time of a product whose sides are not ragged, by the better of its measures."""
    costs, itemsize = sizes.costs, sizes.itemsize
    return min(costs.product_seconds(m, n, k, itemsize), costs.product_seconds(n, m, k, itemsize))
