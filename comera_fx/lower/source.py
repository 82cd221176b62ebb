"""Write a program as Python source, one line a matrix product, and compile it.

Straight-line code spends nothing on looking up what comes next, which counts where products take
a few microseconds each; and it can be read: ``print(source(program))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from comera_fx.plan.operations import Op, Pad, Product, Read, Slice
from comera_fx.plan.program import Program


class Compiled(NamedTuple):
    """The functions of a program; ``t`` is the number of tokens.

    Args:
        forward: ``(t, shape, *leaves) -> (result, *kept messages)``, the result in ``shape``.
        forward_bias: ``(t, shape, bias, *leaves)``, the bias added by the last product; ``None``
            where that cannot be.
        forward_folded: The same with the bias held in padding; ``None`` where that cannot be.
        backward: ``(t, shapes, target, *kept) -> gradients``, in the shapes of the leaves, ``None``
            where not wanted.
        backward_folded: The same after ``forward_folded``, the bias' gradient first.
        recompute: ``(t, *kept leaves) -> kept messages``.
    """

    forward: Callable[..., Any]
    forward_bias: Callable[..., Any] | None
    forward_folded: Callable[..., Any] | None
    backward: Callable[..., Any]
    backward_folded: Callable[..., Any] | None
    recompute: Callable[..., Any]


@lru_cache(maxsize=4096)
def compiled(program: Program, num_layers: int = 0) -> Compiled:
    """Return the functions of a program.

    Args:
        program: What to run.
        num_layers: Number of equal contractions that are run as one, each tensor then having
            a leading axis of this size; 0 for a single one without such an axis.
    """
    space: dict[str, Any] = {
        "mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "pad": torch.constant_pad_nd,
    }  # fmt: skip
    text = source(program, num_layers)
    exec(compile(text, "<comera_fx program>", "exec"), space)
    return Compiled(*(space.get(name) for name in Compiled._fields))  # type: ignore[arg-type]


def source(program: Program, num_layers: int = 0) -> str:
    """Return the functions of a program as text; arguments as of ``compiled``.

    Example:
        >>> from comera_fx import TTSpec, plan_linear
        >>> plan = plan_linear(TTSpec("tt", (64,), (64,), (1, 16, 1)), 512)
        >>> print(source(plan.program).splitlines()[1].strip())
        xG1 = mm(x.reshape((1*t, 64, )), G1.reshape((64, 16, )))
    """
    return "\n".join(_Writer(program, num_layers).lines()) + "\n"


class _Writer:
    def __init__(self, program: Program, num_layers: int) -> None:
        self.program, self.num_layers = program, num_layers
        ops = (*program.forward, *program.backward)
        assert not num_layers or not any(isinstance(op, Product) and op.batched for op in ops), (
            "a batch of contractions runs plain products only"
        )
        self.made_in = {op.out: shape for op in ops if (shape := _shape_made(op)) is not None}

    def lines(self) -> Iterator[str]:
        program = self.program
        leaves = [self._name(slot) for slot in range(program.num_leaves)]
        kept = [self._name(slot) for slot in program.kept]
        kept_messages = [self._name(s) for s in program.kept if s >= program.num_leaves]
        given = _listed("t", "shapes", self._name(program.num_leaves), *kept)
        result = self._final(program.result, "shape")
        gradients = [
            self._final(g, f"shapes[{k}]") if g else "None" for k, g in enumerate(program.gradients)
        ]
        yield f"def forward({_listed('t', 'shape', *leaves)}):"
        yield from self._body(program.forward)
        # Where a leaf is itself the result, this must not be it.
        yield _returned(result if program.forward else f"{result}.clone()", *kept_messages)
        if program.bias_fits and not self.num_layers:
            yield f"def forward_bias({_listed('t', 'shape', 'bias', *leaves)}):"
            *others, last = program.forward
            assert isinstance(last, Product), "pads come first"
            yield from self._body(others)
            yield f"    y = addmm(bias, {self._read(last.left)}, {self._read(last.right)})"
            yield _returned("y.view(shape)", *kept_messages)
        folded = program.folded_bias
        if folded is not None and not self.num_layers:
            yield f"def forward_folded({_listed('t', 'shape', 'bias', *leaves)}):"
            yield from self._body(program.forward[:-1])
            yield f"    {self._slice(folded.ones)}.fill_(1)"
            yield f"    {self._slice(folded.bias)}.copy_(bias)"
            yield from self._body(program.forward[-1:])
            yield _returned(result, *kept_messages)
            yield f"def backward_folded({given}):"
            for op in program.backward:
                yield from self._body([op])
                if op.out == folded.gradient.slot:
                    yield f"    dbias = {self._slice(folded.gradient)}"
            yield _returned("dbias", *gradients)
        yield f"def backward({given}):"
        yield from self._body(program.backward)
        yield _returned(*gradients)
        yield f"def recompute({_listed('t', *kept[: len(kept) - len(kept_messages)])}):"
        yield from self._body(program.recompute, free=False)
        yield _returned(*kept_messages)

    def _slice(self, place: Slice) -> str:
        text = f"{self._name(place.slot)}.view({self._sizes(place.shape)})"
        return f"{text}.select({place.axis}, {place.entry})"

    def _name(self, slot: int) -> str:
        return self.program.names[slot]

    def _body(self, ops: Iterable[Op], *, free: bool = True) -> Iterator[str]:
        for op in ops:
            yield f"    {self._name(op.out)} = {self._right_side(op)}"
            made = [self._name(slot) for slot in op.free if slot > self.program.num_leaves]
            if free and made:
                yield f"    del {', '.join(made)}"

    def _right_side(self, op: Op) -> str:
        if isinstance(op, Pad):
            amounts = [
                number
                for size, final in zip(reversed(op.shape), reversed(op.final), strict=True)
                for number in (0, final - size)
            ]
            return f"pad({self._name(op.source)}.reshape({self._sizes(op.shape)}), {amounts})"
        batched = op.batched or self.num_layers
        return f"{'bmm' if batched else 'mm'}({self._read(op.left)}, {self._read(op.right)})"

    def _read(self, read: Read) -> str:
        text = self._view(read)
        if read.transposed:
            text += ".mT" if len(read.final) == 3 or self.num_layers else ".t()"
        if read.repeated:
            shape = read.final[::-1] if read.transposed else read.final
            text += f".expand({self._sizes((read.repeated, *shape))})"
        return text

    def _view(self, read: Read) -> str:
        if self.made_in.get(read.slot) == read.shape:
            text = self._name(read.slot)
        else:
            # Messages are contiguous, so that reshape never copies; what is given may not be.
            verb = "view" if read.slot > self.program.num_leaves else "reshape"
            text = f"{self._name(read.slot)}.{verb}({self._sizes(read.shape)})"
        if read.axes is None:
            return text
        return f"{text}.{self._permuted(read.axes)}.reshape({self._sizes(read.final)})"

    def _permuted(self, axes: tuple[int, ...]) -> str:
        moved = [0, *(axis + 1 for axis in axes)] if self.num_layers else axes
        return f"permute({', '.join(map(str, moved))})"

    def _final(self, read: Read, shape: str) -> str:
        """Write a result in the shape that ``shape`` names at run time."""
        if read.narrowed is None:
            if read.axes is None:
                return f"{self._name(read.slot)}.reshape({shape})"
            # Contiguous, as results of dense layers are: to reshape may leave it permuted.
            permuted = f"{self._sizes(read.shape)}).{self._permuted(read.axes)}"
            return f"{self._name(read.slot)}.view({permuted}.contiguous().view({shape})"
        text = self._view(read)
        for axis, (size, left) in enumerate(
            zip(read.final, read.narrowed, strict=True), start=bool(self.num_layers)
        ):
            if left != size:
                text += f".narrow({axis}, 0, {left})"
        return f"{text}.reshape({shape})"

    def _sizes(self, sizes: tuple[int, ...]) -> str:
        """Write a tuple, which may be empty: a tensor without indices is a number."""
        if self.num_layers:
            sizes = (self.num_layers, *sizes)
        return f"({''.join(f'{-s}*t, ' if s < 0 else f'{s}, ' for s in sizes)})"


def _shape_made(op: Op) -> tuple[int, ...] | None:
    """Return the shape in which an operation makes its result, where it is known to be plain."""
    if isinstance(op, Pad):
        return op.final
    if op.batched:
        return None
    left, right = op.left, op.right
    rows = left.final[1] if left.transposed else left.final[0]
    columns = right.final[0] if right.transposed else right.final[1]
    return rows, columns


def _listed(*names: str) -> str:
    return ", ".join(names)


def _returned(*values: str) -> str:
    return f"    return ({''.join(f'{value}, ' for value in values)})"
