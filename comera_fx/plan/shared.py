"""Predict when layers are faster through factors that were made for many of them at once.

A plan contracts one layer by itself, in the order that is best for its tokens. Through its factors
``W^T = L R`` a layer takes two products with the tokens, and its weight-only chains take a share of
batched products. Whether that wins depends on the tokens, the layers and the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from comera_fx.plan.cost import CostModel, cost_model
from comera_fx.plan.linear import plan_linear
from comera_fx.spec import TTSpec

APPLY_CALL = 0.5
"""Time that applying factors costs beside its products, as a share of that of a planned layer."""
CHAINS_CALL = 3.0
"""Time that making factors costs beside its products, however many, likewise."""
CHAINS_CALL_OF_LAYER = 0.25
"""What each layer adds to it."""
JOINT_CALL = 0.4
"""Time that one call for several layers costs beside its products, a layer, likewise."""
FORWARD_CALL = 0.4
"""Share of all these that falls to the forward pass."""
MOST_PADDING = 1.15
"""How much larger padding may make a bond inside the chains."""
TRANSPOSED_FROM = 64
"""Rows of input from which a ragged middle is stored with the tokens as its columns."""


def stores_transposed(num_tokens: int, rank: int, device_type: str) -> bool:
    """Whether the middle ``x L`` is better stored as ``(rank, tokens)``.

    A rank that fills no whole tile is slow as the number of columns of a product, not as that of
    its rows. With few tokens these are the ragged columns.
    """
    return num_tokens >= TRANSPOSED_FROM and rank % cost_model(device_type).tile != 0


def chain_ranks(spec: TTSpec, middle: int, device_type: str) -> tuple[int, ...]:
    """Return the ranks to which cores are padded for their factors.

    Args:
        spec: Shape of the layers, in layout "tt".
        middle: The middle rank, which is the width of the factors.
        device_type: Where the products run.
    """
    costs, cut = cost_model(device_type), len(spec.in_modes)
    ranks = [_padded_if_little(rank, costs) for rank in spec.ranks]
    return (*ranks[:cut], middle, *ranks[cut + 1 :])


def _padded_if_little(rank: int, costs: CostModel) -> int:
    padded = costs.padded(rank)
    return padded if padded <= MOST_PADDING * rank else rank


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
    def call_seconds(self) -> float:
        """What a planned layer costs beside its products."""
        trains = self.needs_input_grad or self.needs_core_grad
        return self.costs.call_seconds * (1.0 if trains else FORWARD_CALL)

    @property
    def repeats(self) -> int:
        """How often a weight-only product is made: forward, and for two gradients."""
        return 3 if self.needs_core_grad else 1


@dataclass(frozen=True)
class Shared:
    """What layers cost through their factors, and without.

    Args:
        ranks: Ranks to which the cores are padded for the factors.
        chains_seconds: Predicted time of making the factors of all layers.
        apply_seconds: Predicted time of applying them, a layer.
        own_seconds: Predicted time of a layer's own plan.
    """

    ranks: tuple[int, ...]
    chains_seconds: float
    apply_seconds: float
    own_seconds: float

    def wins(self, num_layers: int, joint_seconds: float = 0.0) -> bool:
        """Whether making the factors pays.

        Args:
            num_layers: Layers that use them.
            joint_seconds: Time that layers save by reading their input in one product.
        """
        saved = num_layers * (self.own_seconds - self.apply_seconds) + joint_seconds
        return self.chains_seconds < saved


@lru_cache(maxsize=4096)
def plan_shared(sizes: Sizes, num_layers: int) -> Shared:
    """Predict the times of layers with factors that are made at once, and of each by itself.

    Args:
        sizes: What the times depend on; equal token buckets give equal predictions.
        num_layers: Number of layers whose factors are made at once.

    Example:
        >>> spec = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
        >>> plan_shared(Sizes(spec, 128), 24).wins(24)
        True
    """
    times = {
        ranks: (_chains_seconds(sizes, num_layers, ranks), _apply_seconds(sizes, ranks))
        for ranks in _options(sizes)
    }
    ranks = min(times, key=lambda each: times[each][0] + num_layers * times[each][1])
    plan = plan_linear(
        sizes.spec,
        sizes.num_tokens,
        "time",
        sizes.needs_input_grad,
        needs_core_grad=sizes.needs_core_grad,
        itemsize=sizes.itemsize,
        device_type=sizes.device_type,
    )
    return Shared(ranks, *times[ranks], sizes.call_seconds + plan.program.seconds)


@lru_cache(maxsize=4096)
def joint_saving(sizes: tuple[Sizes, ...], ranks: tuple[tuple[int, ...], ...]) -> float:
    """Return the time that layers save by reading their input in one product; below 0, none.

    Args:
        sizes: Of each layer; the input is the same.
        ranks: The padded ranks of each.
    """
    first, num = sizes[0], len(sizes)
    costs, itemsize = first.costs, first.itemsize
    apart = sum(_apply_seconds(each, padded) for each, padded in zip(sizes, ranks, strict=True))
    if first.needs_input_grad:  # which are added up
        moved = 3 * first.num_tokens * first.spec.in_size * itemsize
        apart += (num - 1) * (costs.launch_seconds + moved / costs.bytes_per_second)
    middles = [padded[len(each.spec.in_modes)] for each, padded in zip(sizes, ranks, strict=True)]
    transposed = any(
        stores_transposed(each.num_tokens, middle, each.device_type)
        for each, middle in zip(sizes, middles, strict=True)
    )
    together = _left_seconds(first, sum(middles), transposed)
    for each, middle in zip(sizes, middles, strict=True):
        together += _right_seconds(each, middle, transposed)
    together += costs.copy_seconds(first.spec.in_size * sum(middles) * itemsize)
    return apart - together - JOINT_CALL * num * first.call_seconds


def check_seconds(sizes: Sizes) -> float:
    """Return the time of comparing a layer's cores with a copy."""
    num_bytes = 2 * sizes.spec.num_params * sizes.itemsize
    calls = sizes.spec.num_cores * sizes.costs.launch_seconds
    return calls + num_bytes / sizes.costs.bytes_per_second


def _options(sizes: Sizes) -> list[tuple[int, ...]]:
    middle = sizes.spec.ranks[len(sizes.spec.in_modes)]
    choices = dict.fromkeys((middle, sizes.costs.padded(middle)))
    return [chain_ranks(sizes.spec, choice, sizes.device_type) for choice in choices]


def _chains_seconds(sizes: Sizes, num_layers: int, ranks: tuple[int, ...]) -> float:
    spec, costs, itemsize = sizes.spec, sizes.costs, sizes.itemsize
    shapes = _chain_shapes(spec, ranks, sizes.needs_core_grad)
    launch = costs.launch_seconds
    seconds = (CHAINS_CALL + CHAINS_CALL_OF_LAYER * num_layers) * sizes.call_seconds
    for shape in shapes:
        seconds += launch + num_layers * (costs.product_seconds(*shape, itemsize) - launch)
    copied = sum(map(prod, spec.core_shapes))
    if sizes.needs_core_grad:
        copied += (spec.in_size + spec.out_size) * ranks[len(spec.in_modes)]
    moved = 2 * copied * num_layers * itemsize / costs.bytes_per_second
    return seconds + moved


def _chain_shapes(
    spec: TTSpec, ranks: tuple[int, ...], with_gradients: bool
) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of the products that make the factors of one layer."""
    num_in = len(spec.in_modes)
    shapes = []
    rows = spec.in_modes[0]
    for k in range(1, num_in):
        shapes.append((rows, spec.in_modes[k] * ranks[k + 1], ranks[k]))
        rows *= spec.in_modes[k]
    columns = spec.out_modes[-1]
    for k in range(spec.num_cores - 2, num_in - 1, -1):
        shapes.append((ranks[k] * spec.out_modes[k - num_in], columns, ranks[k + 1]))
        columns *= spec.out_modes[k - num_in]
    if with_gradients:
        shapes += [shape for m, n, k in shapes for shape in ((k, n, m), (m, k, n))]
    return shapes


def _apply_seconds(sizes: Sizes, ranks: tuple[int, ...]) -> float:
    middle = ranks[len(sizes.spec.in_modes)]
    transposed = stores_transposed(sizes.num_tokens, middle, sizes.device_type)
    products = _left_seconds(sizes, middle, transposed) + _right_seconds(sizes, middle, transposed)
    return APPLY_CALL * sizes.call_seconds + products


def _left_seconds(sizes: Sizes, middle: int, transposed: bool) -> float:
    """Return the time of the products with left factors of ``middle`` columns."""
    tokens, in_size = sizes.num_tokens, sizes.spec.in_size
    seconds = _product_seconds(sizes, tokens, middle, in_size, transposed)
    if sizes.needs_input_grad:
        seconds += _product_seconds(sizes, tokens, in_size, middle)
    if sizes.needs_core_grad:
        seconds += _product_seconds(sizes, in_size, middle, tokens, transposed)
        if transposed:  # the gradient is put back into the factor's order
            seconds += sizes.costs.copy_seconds(in_size * middle * sizes.itemsize)
    return seconds


def _right_seconds(sizes: Sizes, middle: int, transposed: bool) -> float:
    """Return the time of the products with a right factor of ``middle`` rows."""
    tokens, out_size = sizes.num_tokens, sizes.spec.out_size
    seconds = _product_seconds(sizes, tokens, out_size, middle)
    if sizes.needs_input_grad or sizes.needs_core_grad:
        seconds += _product_seconds(sizes, tokens, middle, out_size, transposed)
    if sizes.needs_core_grad:
        seconds += _product_seconds(sizes, middle, out_size, tokens)
    return seconds


def _product_seconds(sizes: Sizes, m: int, n: int, k: int, transposed: bool | None = None) -> float:
    """Return the time of a product, by rows or by columns, as is faster if it is not told."""
    by_rows = sizes.costs.product_seconds(m, n, k, sizes.itemsize)
    if transposed is False:
        return by_rows
    by_columns = sizes.costs.product_seconds(n, m, k, sizes.itemsize)
    return by_columns if transposed else min(by_rows, by_columns)
