"""From steps to a program of matrix products on views.

Each step is one matrix product. A stored tensor is read as a matrix without a copy when its
indices lie as (kept, contracted) or as (contracted, kept); so the only freedom that matters is in
which of two orders each product stores its result, and the choice is made to copy as few bytes as
possible.

Sizes in a program are ints in which a negative size ``-f`` stands for ``f * num_tokens``: one
program serves every number of tokens of its bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from comera_fx.plan.networks import TOKENS, Network
from comera_fx.plan.search import SsaPath
from comera_fx.plan.steps import Message, Step, Steps, make_steps

Order = str
"""Indices in the order in which a tensor stores them, slowest first."""


@dataclass(frozen=True)
class Read:
    """How a stored tensor is read, as a matrix or in its final shape.

    Args:
        slot: Which tensor.
        shape: Shape to read it in; with ``axes``, the shape before permuting.
        axes: Permutation that costs a copy, or ``None`` for a view.
        final: Shape after the permutation; equals ``shape`` for a view.
        transposed: Whether the view is then transposed, which costs nothing.
    """

    slot: int
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None
    final: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Product:
    """``out = left @ right``; afterwards the tensors in ``free`` are read no more."""

    out: int
    left: Read
    right: Read
    free: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Program:
    """Forward and backward of one network as matrix products.

    Slots ``0 .. n - 1`` hold the leaves, slot ``n`` the target. Programs compare by identity,
    so that looking one up costs no walk through its products.

    Args:
        forward: Products of the forward pass.
        result: How its result is read.
        bias_fits: Whether the last forward product can add a bias over its columns.
        backward: Products of the backward pass.
        gradients: Per leaf how its gradient is read, ``None`` where it is not wanted.
        kept: Slots kept from forward to backward: the messages that backward reads, and the
            leaves that it reads or that these messages are made of.
        recompute: The forward products that make the kept messages from the kept leaves.
        num_leaves: Number of leaves.
        num_slots: Number of tensors, given or made.
        peak_bytes: Largest sum of the bytes alive at once, cores left out, at the tokens
            planned for: inputs, messages, results and what a copying read makes.
        saved_bytes: Bytes kept from forward to backward, cores left out.
        copied_bytes: Bytes moved by reads that are no views.
    """

    forward: tuple[Product, ...]
    result: Read
    bias_fits: bool
    backward: tuple[Product, ...]
    gradients: tuple[Read | None, ...]
    kept: tuple[int, ...]
    recompute: tuple[Product, ...]
    num_leaves: int
    num_slots: int
    peak_bytes: int
    saved_bytes: int
    copied_bytes: int


def make_program(
    network: Network, path: SsaPath, wanted: tuple[bool, ...], itemsize: int
) -> Program:
    """Return the program of ``network`` along ``path`` for the wanted gradients."""
    steps = make_steps(network, path, wanted)
    layout = _best_layout(network, steps)
    return _Assembler(network, steps, layout, itemsize).program()


# ---- layouts: which operand of each product comes first ----


@dataclass(frozen=True)
class _Layout:
    """Storage order of every message, and per step the order of its contracted indices."""

    orders: Mapping[str, Order]
    swapped: tuple[bool, ...]
    contracted: tuple[Order, ...]
    copied: int


def _best_layout(network: Network, steps: Steps) -> _Layout:
    """Flip one product at a time while that saves copies; starts from no flips."""
    all_steps = (*steps.forward, *steps.backward)
    best = _lay_out(network, steps, all_steps, (False,) * len(all_steps))
    improved = best.copied > 0
    while improved:
        improved = False
        for k in range(len(all_steps)):
            flips = (*best.swapped[:k], not best.swapped[k], *best.swapped[k + 1 :])
            other = _lay_out(network, steps, all_steps, flips)
            if other.copied < best.copied:
                best, improved = other, True
    return best


def _lay_out(
    network: Network, steps: Steps, all_steps: Sequence[Step], swapped: tuple[bool, ...]
) -> _Layout:
    size_of = network.size_of
    orders = dict(zip(network.names, network.indices, strict=True))
    orders[network.target] = network.target_indices
    contracted, copied = [], 0
    for step, swap in zip(all_steps, swapped, strict=True):
        first, second = (step.right, step.left) if swap else (step.left, step.right)
        shared = first.indices & second.indices
        by_first, by_second = (_only(orders[m.name], shared) for m in (first, second))
        keep_first, keep_second = (_drop(orders[m.name], shared) for m in (first, second))
        costs = [
            _copy_cost(orders[first.name], keep_first, order, size_of)
            + _copy_cost(orders[second.name], order, keep_second, size_of)
            for order in (by_first, by_second)
        ]
        contracted.append(by_first if costs[0] <= costs[1] else by_second)
        copied += min(costs)
        orders[step.out.name] = keep_first + keep_second
    for message, order in _results(network, steps):
        copied += _copy_cost(orders[message.name], order, "", size_of)
    return _Layout(orders, swapped, tuple(contracted), copied)


def _results(network: Network, steps: Steps) -> list[tuple[Message, Order]]:
    """Pairs of result message and the order in which it must be handed out."""
    gradients = [(message, network.indices[leaf]) for leaf, message in steps.gradients]
    return [(steps.result, network.target_indices), *gradients]


def _only(order: Order, kept: frozenset[str]) -> Order:
    return "".join(index for index in order if index in kept)


def _drop(order: Order, dropped: frozenset[str]) -> Order:
    return "".join(index for index in order if index not in dropped)


def _is_view(stored: Order, rows: Order, columns: Order) -> bool:
    return stored in (rows + columns, columns + rows)


def _copy_cost(stored: Order, rows: Order, columns: Order, size_of: Mapping[str, int]) -> int:
    moves = {i for i in stored if size_of[i] > 1}
    stored, rows, columns = (_only(order, frozenset(moves)) for order in (stored, rows, columns))
    return 0 if _is_view(stored, rows, columns) else prod(size_of[i] for i in stored)


# ---- assembly ----


class _Assembler:
    def __init__(self, network: Network, steps: Steps, layout: _Layout, itemsize: int) -> None:
        self.network, self.steps, self.layout, self.itemsize = network, steps, layout, itemsize
        names = (*network.names, network.target)
        names += tuple(step.out.name for step in (*steps.forward, *steps.backward))
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.size_of = network.size_of

    def program(self) -> Program:
        steps, num_forward = self.steps, len(self.steps.forward)
        saved = tuple(sorted(self.slots[message.name] for message in steps.saved))
        products = [
            self._product(step, swap, order)
            for step, swap, order in zip(
                (*steps.forward, *steps.backward),
                self.layout.swapped,
                self.layout.contracted,
                strict=True,
            )
        ]
        result = self._final(steps.result, self.network.target_indices)
        gradients: list[Read | None] = [None] * len(self.network.names)
        for leaf, message in steps.gradients:
            gradients[leaf] = self._final(message, self.network.indices[leaf])
        wanted = [read for read in gradients if read is not None]
        forward = _with_frees(products[:num_forward], keep={*saved, result.slot})
        backward = _with_frees(products[num_forward:], keep={read.slot for read in wanted})
        recompute = _needed_for(set(saved), products[:num_forward])
        read = {*saved, *(read.slot for p in recompute for read in (p.left, p.right))}
        num_leaves = len(self.network.names)
        leaves = tuple(sorted(slot for slot in read if slot < num_leaves))
        kept = (*leaves, *(slot for slot in saved if slot >= num_leaves))
        return Program(
            forward=forward,
            result=result,
            bias_fits=self._bias_fits(),
            backward=backward,
            gradients=tuple(gradients),
            kept=kept,
            recompute=recompute,
            num_leaves=num_leaves,
            num_slots=len(self.slots),
            peak_bytes=self._peak(forward, backward, kept),
            saved_bytes=sum(self._bytes(self._message(slot)) for slot in kept),
            copied_bytes=self.layout.copied * self.itemsize,
        )

    def _product(self, step: Step, swap: bool, contracted: Order) -> Product:
        first, second = (step.right, step.left) if swap else (step.left, step.right)
        shared = frozenset(contracted)
        keep_first, keep_second = (
            _drop(self.layout.orders[m.name], shared) for m in (first, second)
        )
        return Product(
            self.slots[step.out.name],
            self._matrix(first, keep_first, contracted),
            self._matrix(second, contracted, keep_second),
        )

    def _matrix(self, message: Message, rows: Order, columns: Order) -> Read:
        """Read ``message`` as the matrix (rows, columns)."""
        slot, stored = self.slots[message.name], self.layout.orders[message.name]
        shape = (self._size(rows), self._size(columns))
        if stored == rows + columns:
            return Read(slot, shape, None, shape)
        if stored == columns + rows:
            return Read(slot, shape[::-1], None, shape[::-1], transposed=True)
        axes = tuple(stored.index(i) for i in rows + columns)
        return Read(slot, tuple(self._size(i) for i in stored), axes, shape)

    def _final(self, message: Message, order: Order) -> Read:
        """Read ``message`` in the order in which results are handed out, one axis an index."""
        slot, stored = self.slots[message.name], self.layout.orders[message.name]
        shape = tuple(self._size(i) for i in order)
        if stored == order:
            return Read(slot, shape, None, shape)
        axes = tuple(stored.index(i) for i in order)
        return Read(slot, tuple(self._size(i) for i in stored), axes, shape)

    def _size(self, indices: Order) -> int:
        """Product of the sizes, negative where the number of tokens is a factor."""
        factor = prod(self.size_of[i] for i in indices if i != TOKENS)
        return -factor if TOKENS in indices else factor

    def _bias_fits(self) -> bool:
        """Whether the last product is (tokens, all output modes), as it is handed out."""
        if not self.steps.forward:
            return False
        number = len(self.steps.forward) - 1
        step, swap = self.steps.forward[number], self.layout.swapped[number]
        first = step.right if swap else step.left
        kept = _drop(self.layout.orders[first.name], frozenset(self.layout.contracted[number]))
        stored = self.layout.orders[step.out.name]
        return kept == TOKENS and stored == self.network.target_indices

    # ---- bytes ----

    def _message(self, slot: int) -> str:
        return next(name for name, number in self.slots.items() if number == slot)

    def _bytes(self, name: str) -> int:
        """Bytes of a tensor; the cores are parameters, which are there anyway."""
        if name in self.network.names and TOKENS not in self.layout.orders[name]:
            return 0
        return self.itemsize * prod(self.size_of[i] for i in self.layout.orders[name])

    def _peak(
        self, forward: Sequence[Product], backward: Sequence[Product], saved: Sequence[int]
    ) -> int:
        bytes_of = {slot: self._bytes(name) for name, slot in self.slots.items()}
        num_leaves = len(self.network.names)
        peak = 0
        # What is given and what autograd holds stays alive to the end of its phase.
        for phase, held in ((forward, set(range(num_leaves))), (backward, {*saved, num_leaves})):
            alive = set(held)
            peak = max(peak, sum(bytes_of[slot] for slot in alive))
            for product in phase:
                alive.add(product.out)
                copies = sum(
                    bytes_of[read.slot]
                    for read in (product.left, product.right)
                    if read.axes is not None
                )
                peak = max(peak, copies + sum(bytes_of[slot] for slot in alive))
                alive -= set(product.free) - held
        return peak


def _needed_for(slots: set[int], products: Sequence[Product]) -> tuple[Product, ...]:
    """The products, in order, that make ``slots`` and all that these are made of."""
    needed: list[Product] = []
    for product in reversed(products):
        if product.out in slots:
            needed.append(product)
            slots |= {product.left.slot, product.right.slot}
    return tuple(reversed(needed))


def _with_frees(products: Sequence[Product], keep: set[int]) -> tuple[Product, ...]:
    """Note on each product which tensors nothing after it reads."""
    freed: list[Product] = []
    read_later = set(keep)
    for product in reversed(products):
        reads = {product.left.slot, product.right.slot}
        free = tuple(sorted(reads - read_later))
        read_later |= reads
        freed.append(Product(product.out, product.left, product.right, free))
    return tuple(reversed(freed))


@lru_cache(maxsize=4096)
def cached_program(
    network: Network, path: SsaPath, wanted: tuple[bool, ...], itemsize: int
) -> Program:
    """``make_program``, once for equal arguments."""
    return make_program(network, path, wanted, itemsize)
