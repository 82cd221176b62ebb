"""From steps to a program of matrix products on views.

Sizes in a program are ints in which a negative size ``-f`` stands for ``f * num_tokens``: one
program serves every number of tokens of its bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from comera_fx.plan.cost import CostModel
from comera_fx.plan.layout import Arrangement, Layout, Order, best_layout, drop
from comera_fx.plan.liveness import needed_for, peak_bytes, with_frees
from comera_fx.plan.networks import TOKENS, Network
from comera_fx.plan.operations import FoldedBias, Op, Pad, Product, Read, Slice
from comera_fx.plan.search import SsaPath
from comera_fx.plan.steps import Message, Step, Steps, make_steps

Recompute = Literal["none", "cheap", "all"]
"""Which weight-only messages the backward pass makes again, instead of having them saved."""

CHEAP = 0.01
"""Share of a program's time up to which making its weight-only messages again is cheap."""


@dataclass(frozen=True, eq=False)
class Program:
    """Forward and backward of one network as matrix products.

    Slots ``0 .. n - 1`` hold the leaves, slot ``n`` the target. Programs compare by identity,
    so that looking one up costs no walk through its products.

    Args:
        names: Name of what each slot holds.
        forward: What the forward pass runs.
        result: How its result is read.
        bias_fits: Whether the last forward product can add a bias over its columns.
        folded_bias: How padding takes up a bias, where it can; its gradient is then made as well.
        backward: What the backward pass runs; it may begin by making messages again.
        gradients: Per leaf how its gradient is read, ``None`` where it is not wanted.
        kept: Slots kept from forward to backward: the messages that backward reads, and the
            leaves that it reads or that these messages are made of.
        recompute: What makes the kept messages from the kept leaves.
        num_leaves: Number of leaves.
        peak_bytes: Largest sum of the bytes alive at once, cores left out, at the tokens
            planned for: inputs, messages, results and what a copying read makes.
        saved_bytes: Bytes kept from forward to backward, cores left out.
        copied_bytes: Bytes moved by reads that are no views.
        recomputed: Number of operations that ``backward`` begins with to make messages again.
        seconds: Predicted time of forward and backward.
    """

    names: tuple[str, ...]
    forward: tuple[Op, ...]
    result: Read
    bias_fits: bool
    folded_bias: FoldedBias | None
    backward: tuple[Op, ...]
    gradients: tuple[Read | None, ...]
    kept: tuple[int, ...]
    recompute: tuple[Op, ...]
    num_leaves: int
    peak_bytes: int
    saved_bytes: int
    copied_bytes: int
    recomputed: int
    seconds: float


@lru_cache(maxsize=4096)
def make_program(
    network: Network,
    path: SsaPath,
    wanted: tuple[bool, ...],
    itemsize: int,
    costs: CostModel,
    pads: tuple[tuple[str, int], ...] = (),
    recompute: Recompute = "none",
) -> Program:
    """Return the program of ``network`` along ``path`` for the wanted gradients.

    Args:
        network: The closed network.
        path: A tree of it.
        wanted: Per leaf, whether its gradient is wanted.
        itemsize: Bytes of one number.
        costs: What the storage orders are chosen by.
        pads: Pairs of index and the size to which it is padded; both of its tensors are leaves.
        recompute: Which weight-only messages are made again; "cheap" where that takes little time.
    """
    padded = network.resized(dict(pads))
    steps = make_steps(padded, path, wanted)
    layout = best_layout(padded, steps, itemsize, costs)
    return _Assembler(network, padded, steps, layout, itemsize, costs).program(recompute)


class _Assembler:
    def __init__(
        self,
        network: Network,
        padded: Network,
        steps: Steps,
        layout: Layout,
        itemsize: int,
        costs: CostModel,
    ) -> None:
        self.network, self.padded, self.steps, self.layout = network, padded, steps, layout
        self.itemsize, self.costs = itemsize, costs
        messages = (*steps.forward, *steps.backward)
        self.names = [*network.names, network.target, *(step.out.name for step in messages)]
        self.raw_size_of, self.size_of = network.size_of, padded.size_of
        # What a step calls by the name of a padded leaf is the padded one.
        self.slots = {name: slot for slot, name in enumerate(self.names)}
        self.pads = list(self._pads())

    def _pads(self) -> Iterable[Pad]:
        changed = {i for i, size in self.size_of.items() if self.raw_size_of[i] != size}
        for leaf, indices in enumerate(self.network.indices):
            if changed.isdisjoint(indices):
                continue
            shape, final = (
                tuple(size_of[i] for i in indices) for size_of in (self.raw_size_of, self.size_of)
            )
            slot = len(self.names)
            self.names.append(f"{self.network.names[leaf]}padded")
            self.slots[self.network.names[leaf]] = slot
            yield Pad(slot, leaf, shape, final)

    def program(self, recompute: Recompute) -> Program:
        steps, num_forward = self.steps, len(self.steps.forward)
        num_leaves = len(self.network.names)
        products = [
            self._product(step, arrangement)
            for step, arrangement in zip(
                (*steps.forward, *steps.backward), self.layout.arrangements, strict=True
            )
        ]
        made: list[Op] = [*self.pads, *products[:num_forward]]
        result = self._final(steps.result, self.network.target_indices)
        gradients: list[Read | None] = [None] * num_leaves
        for leaf, message in steps.gradients:
            gradients[leaf] = self._gradient(leaf, message)
        read = tuple(sorted(self.slots[message.name] for message in steps.saved))
        again = self._made_again(read, made, recompute)
        saved = [slot for slot in read if slot not in {op.out for op in again}]
        kept = self._kept(saved, again, made)
        wanted = {g.slot for g in gradients if g is not None}
        forward = with_frees(made, keep={*kept, result.slot})
        backward = with_frees([*again, *products[num_forward:]], keep=wanted)
        return Program(
            names=tuple(self.names),
            forward=forward,
            result=result,
            bias_fits=self._bias_fits(),
            folded_bias=self._folded_bias(),
            backward=backward,
            gradients=tuple(gradients),
            kept=kept,
            recompute=needed_for({s for s in kept if s >= num_leaves}, made),
            num_leaves=num_leaves,
            peak_bytes=peak_bytes(forward, backward, kept, self._all_bytes(), num_leaves),
            saved_bytes=sum(self._bytes(slot) for slot in kept),
            copied_bytes=self.layout.copied * self.itemsize,
            recomputed=len(again),
            seconds=self._seconds() + self._seconds_of(again),
        )

    # ---- what is kept, and what is made again ----

    def _made_again(
        self, read: Sequence[int], made: Sequence[Op], recompute: Recompute
    ) -> tuple[Op, ...]:
        """Return what makes the weight-only messages that backward reads, if it is to."""
        weight_only = {
            slot
            for slot in read
            if slot > len(self.network.names) and TOKENS not in self._order(slot)
        }
        has_tokens = any(TOKENS in indices for indices in self.network.indices)
        if recompute == "none" or not weight_only or not has_tokens:
            return ()
        again = needed_for(weight_only, made)
        if recompute == "cheap" and self._seconds_of(again) > CHEAP * self._seconds():
            return ()
        return again

    def _kept(
        self, saved: Sequence[int], again: Sequence[Op], made: Sequence[Op]
    ) -> tuple[int, ...]:
        """Return leaves, then messages; the leaves are also those that messages are made of."""
        num_leaves = len(self.network.names)
        needed = (*again, *needed_for(set(saved), made))
        read = {*saved, *(slot for op in needed for slot in op.reads)}
        leaves = sorted(slot for slot in read if slot < num_leaves)
        return (*leaves, *(slot for slot in saved if slot >= num_leaves))

    def _seconds(self) -> float:
        return self.layout.seconds + self._seconds_of(self.pads)

    def _seconds_of(self, ops: Sequence[Op]) -> float:
        by_slot = {
            self.slots[step.out.name]: arrangement.seconds
            for step, arrangement in zip(
                (*self.steps.forward, *self.steps.backward), self.layout.arrangements, strict=True
            )
        }
        return sum(
            self.costs.copy_seconds(self._bytes_of(self._order(op.out)))
            if isinstance(op, Pad)
            else by_slot[op.out]
            for op in ops
        )

    # ---- products ----

    def _product(self, step: Step, arrangement: Arrangement) -> Product:
        swap = arrangement.swapped
        first, second = (step.right, step.left) if swap else (step.left, step.right)
        contracted = arrangement.contracted
        shared = frozenset(contracted)
        rows, columns = (drop(self.layout.orders[m.name], shared) for m in (first, second))
        out = self.slots[step.out.name]
        if arrangement.kind == "mm":
            left = self._matrix(first, rows, contracted)
            return Product(out, left, self._matrix(second, contracted, columns))
        stored = self.layout.orders[first.name]
        groups = stored[: stored.index(contracted)], contracted
        rest = stored[len(groups[0]) + len(contracted) :]
        shape = tuple(self._size(group) for group in (*groups, rest))
        many = Read(self.slots[first.name], shape, None, shape, transposed=not arrangement.flipped)
        order = (columns, contracted) if arrangement.flipped else (contracted, columns)
        one = replace(self._matrix(second, *order), repeated=shape[0])
        pair = (one, many) if arrangement.flipped else (many, one)
        return Product(out, *pair, batched=True)

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

    def _gradient(self, leaf: int, message: Message) -> Read:
        read = self._final(message, self.network.indices[leaf])
        if self.slots[self.network.names[leaf]] == leaf:
            return read
        raw = tuple(self.raw_size_of[i] for i in self.network.indices[leaf])
        return replace(read, narrowed=raw)

    def _size(self, indices: Order) -> int:
        """Product of the sizes, negative where the number of tokens is a factor."""
        factor = prod(self.size_of[i] for i in indices if i != TOKENS)
        return -factor if TOKENS in indices else factor

    def _last(self) -> tuple[Step, Arrangement, Message, Message]:
        """Return the last forward step, how it runs, and its operands in that order."""
        number = len(self.steps.forward) - 1
        step, arrangement = self.steps.forward[number], self.layout.arrangements[number]
        operands = (step.left, step.right)
        return step, arrangement, *(operands[::-1] if arrangement.swapped else operands)

    def _bias_fits(self) -> bool:
        """Whether the last product is (tokens, all output modes), as it is handed out."""
        if not self.steps.forward:
            return False
        step, arrangement, first, second = self._last()
        contracted = frozenset(arrangement.contracted)
        rows, columns = (drop(self.layout.orders[m.name], contracted) for m in (first, second))
        stored = self.layout.orders[step.out.name]
        in_order = stored == self.network.target_indices
        # Where only one operand has indices left, it may be that which holds the tokens.
        fits = rows == TOKENS or (rows == "" and TOKENS not in columns)
        return arrangement.kind == "mm" and in_order and fits

    def _folded_bias(self) -> FoldedBias | None:
        if not self._bias_fits():
            return None
        _, arrangement, left, right = self._last()
        bond = arrangement.contracted
        gradient = next(
            (s.out for s in self.steps.backward if {s.left, s.right} == {self.steps.target, left}),
            None,
        )
        entry = self.raw_size_of[bond] if len(bond) == 1 else 0
        if gradient is None or len(bond) != 1 or entry == self.size_of[bond]:
            return None
        rows, columns = (drop(self.layout.orders[m.name], frozenset(bond)) for m in (left, right))
        slices = (
            self._slice(left, rows, bond, entry),
            self._slice(right, columns, bond, entry),
            self._slice(gradient, columns, bond, entry),
        )
        return FoldedBias(*slices) if all(slices) else None  # type: ignore[arg-type]

    def _slice(self, message: Message, others: Order, bond: Order, entry: int) -> Slice | None:
        """Return what ``entry`` of ``bond`` is in a message read as a matrix without a copy."""
        slot, stored = self.slots[message.name], self.layout.orders[message.name]
        sizes = self._size(others), self._size(bond)
        if stored == others + bond:
            return Slice(slot, sizes, 1, entry)
        if stored == bond + others:
            return Slice(slot, sizes[::-1], 0, entry)
        return None

    # ---- bytes ----

    def _order(self, slot: int) -> Order:
        """Return the storage order of what a slot holds."""
        num_leaves = len(self.network.names)
        if slot < num_leaves:
            return self.network.indices[slot]
        for pad in self.pads:
            if pad.out == slot:
                return self.network.indices[pad.source]
        return self.layout.orders[self.names[slot]]

    def _bytes_of(self, order: Order) -> int:
        return self.itemsize * prod(self.size_of[i] for i in order)

    def _bytes(self, slot: int) -> int:
        """Bytes of a tensor; the cores are parameters, which are there anyway."""
        order = self._order(slot)
        is_core = slot < len(self.network.names) and TOKENS not in order
        # An input of one token has no index for it, and is no parameter either.
        if is_core and self.network.names[slot] != "x":
            return 0
        return self._bytes_of(order)

    def _all_bytes(self) -> list[int]:
        return [self._bytes(slot) for slot in range(len(self.names))]
