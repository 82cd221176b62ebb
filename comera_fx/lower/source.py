"""Write a program as Python source, one line a matrix product, and compile it.

Straight-line code spends nothing on looking up what comes next, which counts where products take
a few microseconds each; and it can be read: ``print(source(program))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from comera_fx.plan.program import Op, Pad, Program, Read


class Compiled(NamedTuple):
    """The functions of a program; ``t`` is the number of tokens.

    Args:
        forward: ``(t, *leaves) -> (result, *kept messages)``.
        forward_bias: ``(t, bias, *leaves)``, the bias added by the last product; ``None`` where
            that cannot be.
        backward: ``(t, target, *kept) -> gradients``, ``None`` where not wanted.
        recompute: ``(t, *kept leaves) -> kept messages``.
    """

    forward: Callable[..., Any]
    forward_bias: Callable[..., Any] | None
    backward: Callable[..., Any]
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
    return Compiled(
        space["forward"], space.get("forward_bias"), space["backward"], space["recompute"]
    )


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
        assert not num_layers or not any(
            getattr(op, "batched", False) for op in (*program.forward, *program.backward)
        ), "a batch of contractions runs plain products only"

    def lines(self) -> Iterable[str]:
        program = self.program
        leaves = range(program.num_leaves)
        yield self._head("forward", "t", *map(self._name, leaves))
        yield from self._body(program.forward)
        yield self._return(self._final(program.result), *self._kept_messages())
        if program.bias_fits and not self.num_layers:
            yield self._head("forward_bias", "t", "bias", *map(self._name, leaves))
            yield from self._body(program.forward[:-1])
            last = program.forward[-1]
            assert not isinstance(last, Pad), "pads come first"
            yield f"    y = addmm(bias, {self._read(last.left)}, {self._read(last.right)})"
            yield self._return("y", *self._kept_messages())
        target = self._name(program.num_leaves)
        yield self._head("backward", "t", target, *map(self._name, program.kept))
        yield from self._body(program.backward)
        yield self._return(*(self._final(g) if g else "None" for g in program.gradients))
        kept_leaves = [slot for slot in program.kept if slot < program.num_leaves]
        yield self._head("recompute", "t", *map(self._name, kept_leaves))
        yield from self._body(program.recompute, free=False)
        yield self._return(*self._kept_messages())

    def _head(self, name: str, *arguments: str) -> str:
        return f"def {name}({', '.join(arguments)}):"

    def _return(self, *values: str) -> str:
        return f"    return ({''.join(f'{value}, ' for value in values)})"

    def _kept_messages(self) -> list[str]:
        return [self._name(slot) for slot in self.program.kept if slot >= self.program.num_leaves]

    def _name(self, slot: int) -> str:
        return self.program.names[slot]

    def _body(self, ops: Iterable[Op], *, free: bool = True) -> Iterable[str]:
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
            return f"pad({self._name(op.source)}.reshape({self._shape(op.shape)}), {amounts})"
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
        # Messages are contiguous, so that reshape never copies; what is given may not be.
        verb = "view" if read.slot > self.program.num_leaves else "reshape"
        text = f"{self._name(read.slot)}.{verb}({self._shape(read.shape)})"
        if read.axes is None:
            return text
        axes = [0, *(axis + 1 for axis in read.axes)] if self.num_layers else list(read.axes)
        return f"{text}.permute({', '.join(map(str, axes))}).reshape({self._shape(read.final)})"

    def _final(self, read: Read) -> str:
        text = self._view(read)
        for axis, (size, left) in enumerate(
            zip(read.final, read.narrowed or read.final, strict=True), start=bool(self.num_layers)
        ):
            if left != size:
                text += f".narrow({axis}, 0, {left})"
        return text

    def _shape(self, shape: tuple[int, ...]) -> str:
        return self._sizes((self.num_layers, *shape) if self.num_layers else shape)

    def _sizes(self, sizes: tuple[int, ...]) -> str:
        """Write a tuple, which may be empty: a tensor without indices is a number."""
        return f"({''.join(f'{-s}*t, ' if s < 0 else f'{s}, ' for s in sizes)})"
