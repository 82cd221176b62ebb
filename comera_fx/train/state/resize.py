"""Change the ranks of a layer in training: cut, grow, or turn its bonds into another basis.

Cores, rank weights, their gradients and the state of any number of optimizers change together.
The parameter objects stay the same, so optimizers, hooks and names go on holding them.

A copy of the model, such as an average of its weights, is changed likewise with no optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_fx.errors import RankError
from comera_fx.modules import TTModule, replace_data
from comera_fx.spec import clip_ranks
from comera_fx.train.state import optimizer_state
from comera_fx.train.state.optimizer_state import Axes, Basis, along


def check_state(optimizers: Sequence[Optimizer], modules: Iterable[tuple[str, TTModule]]) -> None:
    """Raise unless the optimizers' state of every TT parameter can follow a change of ranks.

    The functions below check it of their own layer; where several layers change together, check
    all of them first.

    Args:
        optimizers: Any of them may hold any of the parameters.
        modules: Names and modules.

    Raises:
        RankError: On state that is neither shaped like its parameter, nor such with one axis
            averaged, nor a number; on tensors that an optimizer keeps outside its state; and on
            a wrapped optimizer that is not given itself.
    """
    optimizer_state.check(
        optimizers,
        [
            (name, parameter)
            for name, module in modules
            for parameter in (*module.cores, *module.rank_weights)
        ],
    )


# ---- cut ----


def cut_ranks(module: TTModule, kept: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Keep only the given indices of every inner bond of a module.

    Args:
        module: The module, with rank weights or without.
        kept: One tensor of indices per inner bond, left to right, in rising order. If any is
            empty the whole weight is zero, and all of them become empty.
        optimizers: All that hold its parameters.

    Raises:
        RankError: If ``kept`` does not fit the bonds, or as ``check_state``; nothing has changed.

    Example:
        >>> from comera_fx.modules import TTLinear
        >>> from comera_fx.spec import TTSpec
        >>> layer = TTLinear(TTSpec("tt", (4, 4), (4, 4), (1, 4, 8, 4, 1)), 16, 16)
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> kept = [torch.arange(4), torch.tensor([0, 2, 5]), torch.tensor([1, 2])]
        >>> cut_ranks(layer, kept, [optimizer])
        >>> layer.spec.ranks
        (1, 4, 3, 2, 1)
    """
    _check_kept(module, kept)
    check_state(optimizers, [(_name(module), module)])
    if any(indices.numel() == 0 for indices in kept):
        kept = [indices[:0] for indices in kept]
    for parameter, axes in _axes_of(module, kept):
        if any(parameter.shape[axis] != indices.numel() for axis, indices in axes):
            optimizer_state.select(optimizers, parameter, axes)
            grad = None if parameter.grad is None else _select(parameter.grad, axes)
            _replace(parameter, _select(parameter.detach(), axes), grad)


def _check_kept(module: TTModule, kept: Sequence[Tensor]) -> None:
    _check_number(module, "kept", len(kept))
    for bond, (rank, indices) in enumerate(zip(module.spec.ranks[1:-1], kept, strict=True), 1):
        is_whole = indices.ndim == 1 and not indices.is_floating_point()
        values = [-1, *indices.tolist(), rank] if is_whole and indices.dtype != torch.bool else []
        if not values or any(a >= b for a, b in pairwise(values)):
            raise RankError(
                f"the indices to keep of bond {bond} do not fit it",
                got=f"{indices.dtype} {indices.tolist()}",
                expected=f"whole numbers from 0 to {rank - 1} in rising order, each once",
                mend="give what torch.nonzero(mask).flatten() returns",
            )


def _axes_of(module: TTModule, kept: Sequence[Tensor]) -> Iterator[tuple[nn.Parameter, Axes]]:
    last = module.num_cores - 1
    for k, core in enumerate(module.cores):
        left = () if k == 0 else ((0, kept[k - 1]),)
        right = () if k == last else ((core.ndim - 1, kept[k]),)
        yield core, (*left, *right)
    for weight, indices in zip(module.rank_weights, kept, strict=bool(module.rank_weights)):
        yield weight, ((0, indices),)


def _select(tensor: Tensor, axes: Axes) -> Tensor:
    for axis, indices in axes:
        tensor = tensor.index_select(axis, indices.to(tensor.device))
    return tensor.contiguous()


# ---- grow ----


def grow_ranks(
    module: TTModule,
    counts: Sequence[int],
    optimizers: Sequence[Optimizer],
    generator: torch.Generator | None = None,
) -> list[int]:
    """Add directions to the inner bonds of a module, without a change of its weight.

    New columns of the core left of a bond are random, at the root mean square of the columns
    there; new rows of the core right of it are zero. They get a gradient at the first step, and
    the columns from the second on. Zeros are on the right of every bond, so that no core that
    grows on both sides is zero on both: a path through two bonds would have no gradient then.

    Args:
        module: The module; it has ranks.
        counts: How many per inner bond, left to right.
        optimizers: All that hold its parameters.
        generator: Source of the random numbers; the draw is made on its device.

    Returns:
        How many each bond got: no more than it can use (see ``TTSpec.clipped``).

    Raises:
        RankError: If ``counts`` does not fit the bonds, the module has no ranks, or as
            ``check_state``; nothing has changed.

    Example:
        >>> from comera_fx.modules import TTLinear
        >>> from comera_fx.spec import TTSpec
        >>> layer = TTLinear(TTSpec("tt", (4, 4), (4, 4), (1, 4, 8, 4, 1)), 16, 16)
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> grow_ranks(layer, [1, 2, 0], [optimizer])
        [0, 2, 0]
    """
    added = _usable(module, counts)
    check_state(optimizers, [(_name(module), module)])
    # All draws come before the first change: one that fails leaves all as it was.
    new = [
        _drawn(core.detach(), right, generator)
        for core, right in zip(module.cores, [*added, 0], strict=True)
    ]
    for core, columns, left, right in zip(module.cores, new, [0, *added], [*added, 0], strict=True):
        widened = torch.cat([core.detach(), columns], dim=-1)
        _pad(core, _padded(widened, {0: left}), {0: left, core.ndim - 1: right}, optimizers)
    for weight, count in zip(module.rank_weights, added, strict=bool(module.rank_weights)):
        _pad(weight, torch.cat([weight.detach(), weight.new_ones(count)]), {0: count}, optimizers)
    return added


def _usable(module: TTModule, counts: Sequence[int]) -> list[int]:
    """Check the counts, and cut them to what the bonds can use."""
    _check_number(module, "counts", len(counts))
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in counts):
        raise RankError(
            "a bond grows by a whole number of directions",
            got=f"counts {list(counts)}",
            expected="one int, 0 or more, per inner bond",
            mend="use cut_ranks to make a rank smaller",
        )
    spec = module.spec
    if 0 in spec.ranks:
        raise RankError(
            "a layer that has lost all its ranks cannot grow",
            got=f"ranks {spec.ranks}",
            expected="at least one rank on every bond, as a zero weight passes no gradient on",
            mend="set RankConfig.min_rank=1, which keeps one",
        )
    asked = [r + n for r, n in zip(spec.ranks, [0, *counts, 0], strict=True)]
    clipped = clip_ranks(asked, spec.mode_sizes)
    return [max(c - r, 0) for c, r in zip(clipped, spec.ranks, strict=True)][1:-1]


def _drawn(core: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    dtype = torch.promote_types(core.dtype, torch.float32)
    device = core.device if generator is None else generator.device
    shape = (*core.shape[:-1], count)
    columns = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    scale = core.double().square().mean().sqrt()
    # Where the core is zero its columns would be too, and all gradients of the bond with them.
    scale = torch.where(scale == 0, core[..., 0].numel() ** -0.5, scale)
    return (columns.to(core.device) * scale).to(core.dtype)


def _pad(
    parameter: nn.Parameter,
    data: Tensor,
    counts: dict[int, int],
    optimizers: Sequence[Optimizer],
) -> None:
    if data.shape != parameter.shape:
        optimizer_state.pad(optimizers, parameter, counts)
        grad = None if parameter.grad is None else _padded(parameter.grad, counts)
        _replace(parameter, data, grad)


def _padded(tensor: Tensor, counts: dict[int, int]) -> Tensor:
    shape = [size + counts.get(axis, 0) for axis, size in enumerate(tensor.shape)]
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


# ---- change of basis ----


def change_basis(
    module: TTModule, bases: Sequence[tuple[Tensor, Tensor]], optimizers: Sequence[Optimizer]
) -> None:
    """Turn the bonds of a module into other bases, which may be smaller.

    Core k becomes ``Tinv_k G_k T_(k+1)``, with ``G_k`` of ``module.effective_cores()``: the rank
    weights are multiplied in and become 1. With ``T Tinv = 1`` the weight stays what it is. All
    is computed in float64. Gradients and what optimizers have averaged of them follow, those of
    rank weights excepted, whose directions are gone: their gradients are dropped, and momentum
    begins at 0.

    Args:
        module: The module, with rank weights or without.
        bases: Per inner bond of rank r a pair T ``(r, r')`` and Tinv ``(r', r)``. If any r' is 0
            the whole weight is zero, and all of them become 0.
        optimizers: All that hold its parameters.

    Raises:
        RankError: If ``bases`` does not fit the bonds or is not finite, or as ``check_state``;
            nothing has changed.

    Example:
        >>> from comera_fx.modules import TTLinear
        >>> from comera_fx.spec import TTSpec
        >>> layer = TTLinear(TTSpec("tt", (4, 4), (4, 4), (1, 4, 8, 4, 1)), 16, 16)
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> turns = [torch.linalg.qr(torch.randn(n, n)).Q for n in (4, 8, 4)]
        >>> change_basis(layer, [(turn, turn.T) for turn in turns], [optimizer])
    """
    _check_bases(module, bases)
    check_state(optimizers, [(_name(module), module)])
    if any(t.shape[1] == 0 for t, _ in bases):
        bases = [(t[:, :0], tinv[:0]) for t, tinv in bases]
    for core, axes in zip(module.cores, _turns_of(module, bases), strict=True):
        _turn(core, axes, optimizers)
    for weight, (t, _) in zip(module.rank_weights, bases, strict=bool(module.rank_weights)):
        optimizer_state.renew(optimizers, weight, t.shape[1])
        _replace(weight, weight.new_ones(t.shape[1]), None)


def _check_bases(module: TTModule, bases: Sequence[tuple[Tensor, Tensor]]) -> None:
    _check_number(module, "bases", len(bases))
    for bond, (rank, (t, tinv)) in enumerate(zip(module.spec.ranks[1:-1], bases, strict=True), 1):
        fits = t.ndim == 2 and t.shape[0] == rank and tinv.shape == t.shape[::-1]
        if not fits or not bool(t.isfinite().all() and tinv.isfinite().all()):
            raise RankError(
                f"the basis of bond {bond} does not fit it",
                got=f"T {tuple(t.shape)}, Tinv {tuple(tinv.shape)}"
                + (", not all of them finite" if fits else ""),
                expected=f"T of shape ({rank}, r') and Tinv of shape (r', {rank}), finite",
                mend="give one pair per inner bond, left to right",
            )


def _turns_of(module: TTModule, bases: Sequence[tuple[Tensor, Tensor]]) -> list[list[Basis]]:
    """Return the change of basis of every core as it is held, rank weights not multiplied in.

    A core whose axis has the rank weight d becomes ``Tinv d G``: d is a part of the change of
    basis. What d takes out of a gradient, its inverse puts back; where d acts as 0 there is none.
    """
    turns: list[list[Basis]] = [[] for _ in module.cores]
    weights = module.rank_weights or [None] * len(bases)
    for bond, ((t, tinv), weight) in enumerate(zip(bases, weights, strict=True), start=1):
        left, right = module.cores[bond - 1], module.cores[bond]
        t, tinv = (matrix.to(right.device, torch.float64) for matrix in (t, tinv))
        live = t.new_ones(t.shape[0])
        if weight is not None:
            live = F.threshold(weight.detach(), module.rank_threshold, 0.0).to(right.dtype).double()
        inverse = torch.where(live == 0, 0.0, 1 / live)
        if module.joins_left(bond):
            turns[bond - 1].append(Basis(left.ndim - 1, t.T * live, tinv * inverse))
            turns[bond].append(Basis(0, tinv, t.T))
        else:
            turns[bond - 1].append(Basis(left.ndim - 1, t.T, tinv))
            turns[bond].append(Basis(0, tinv * live, t.T * inverse))
    return turns


def _turn(core: nn.Parameter, axes: list[Basis], optimizers: Sequence[Optimizer]) -> None:
    data, grad = core.detach().double(), core.grad
    for basis in axes:
        data = along(data, basis.forward, basis.axis)
    if grad is not None:
        turned = grad.double()
        for basis in axes:
            turned = along(turned, basis.dual, basis.axis)
        grad = turned.to(grad.dtype).contiguous()
    optimizer_state.turn(optimizers, core, axes)
    _replace(core, data.to(core.dtype).contiguous(), grad)


# ---- all three ----


def _replace(parameter: nn.Parameter, data: Tensor, grad: Tensor | None) -> None:
    replace_data(parameter, data)
    # No gradient at all where nothing is left: Adafactor divides by the number of its entries.
    parameter.grad = grad if data.numel() else None


def _check_number(module: TTModule, what: str, number: int) -> None:
    if number != module.num_cores - 1:
        raise RankError(
            f"{what} does not fit the layer",
            got=f"{number} entries",
            expected=f"{module.num_cores - 1}, one per inner bond, left to right",
            mend="leave out the ranks of 1 at both ends",
        )


def _name(module: TTModule) -> str:
    return type(module).__name__
