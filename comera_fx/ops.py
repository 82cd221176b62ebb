"""The IR vocabulary: operators that a graph holds as single nodes until plans are expanded.

They are CompositeImplicitAutograd: one node in symbolic, exported and dynamo graphs, and
decomposed by itself for autograd, compilers and transforms. The body runs the plan.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_fx import lower
from comera_fx.config import Objective
from comera_fx.op_inputs import (
    autocasted,
    can_look_at,
    check_ids,
    check_linear_input,
    no_autocast,
)
from comera_fx.spec import TTSpec

_library: Any = torch.library.Library("comera_fx", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "tt_linear(Tensor x, Tensor[] cores, Tensor? bias, str layout, int num_in_modes, "
    "int in_features, int out_features, *, bool transposed=False, int num_tokens_hint=4096, "
    "str objective='time', int? memory_limit_bytes=None, bool pad_ranks=True, "
    "bool autotune=False) -> Tensor"
)
_library.define(
    "tt_embedding(Tensor ids, Tensor[] cores, Tensor? padding_row, str layout, "
    "int num_in_modes, int num_embeddings, int embedding_dim, *, bool transposed=False, "
    "int padding_idx=-1, int num_tokens_hint=4096) -> Tensor"
)
_library.define(
    "tt_rows(Tensor ids, Tensor left, Tensor right, Tensor? padding_row, *, int padding_idx=-1) "
    "-> Tensor"
)
_library.define(
    "tt_dense(Tensor[] cores, str layout, int num_in_modes, int in_features, int out_features) "
    "-> Tensor"
)
_library.define(
    "tt_factors(Tensor[] cores, int num_layers, str layout, int num_in_modes, int in_features, "
    "int out_features, *, int head_mode=0, bool autocast=True) -> Tensor[]"
)
_library.define(
    "tt_apply(Tensor x, Tensor[] lefts, Tensor[] rights, Tensor?[] biases, Tensor[]? heads=None) "
    "-> Tensor[]"
)


@lru_cache(maxsize=4096)
def spec_of(
    layout: str,
    num_in_modes: int,
    shapes: tuple[tuple[int, ...], ...],
    transposed: bool = False,
) -> TTSpec:
    """Return the spec of cores with these shapes.

    Args:
        layout: "tt" or "ttm".
        num_in_modes: Number of input modes; layout "ttm" has one a core.
        shapes: ``(R, mode, S)`` or ``(R, N, M, S)`` of each core.
        transposed: Whether the cores of layout "tt" have the output modes first.
    """
    ranks = (*(shape[0] for shape in shapes), shapes[-1][-1])
    if layout == "ttm":
        in_modes, out_modes = (tuple(shape[side] for shape in shapes) for side in (1, 2))
        return TTSpec("ttm", in_modes, out_modes, ranks)
    sizes = tuple(shape[1] for shape in shapes)
    cut = len(sizes) - num_in_modes if transposed else num_in_modes
    spec = TTSpec("tt", sizes[:cut], sizes[cut:], ranks)
    return spec.turned() if transposed else spec


def operator_name(target: object) -> str | None:
    """Return the name of the operator of ours that a graph's node calls, ``None`` for all else.

    Example:
        >>> operator_name(torch.ops.comera_fx.tt_linear.default)
        'tt_linear'
    """
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "comera_fx":
        return None
    return target._schema.name.removeprefix("comera_fx::")


def _spec(
    layout: str, num_in_modes: int, cores: list[Tensor], transposed: bool = False
) -> tuple[TTSpec, list[Tensor]]:
    """Return the spec of cores, and the cores in its form."""
    if transposed and layout == "ttm":
        cores, transposed = [core.transpose(1, 2) for core in cores], False
    shapes: tuple[tuple[int, ...], ...] = tuple(core.shape for core in cores)
    if type(cores[0]) not in (Tensor, torch.nn.Parameter):
        # A tracer may hold sizes as symbols; modes and ranks are never dynamic.
        shapes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    return spec_of(layout, num_in_modes, shapes, transposed), cores


def _is_dead(spec: TTSpec) -> bool:
    """Whether all ranks have been cut to 0, which leaves the weight zero."""
    return 0 in spec.ranks


def tt_linear(
    x: Tensor,
    cores: list[Tensor],
    bias: Tensor | None,
    layout: str,
    num_in_modes: int,
    in_features: int,
    out_features: int,
    *,
    transposed: bool = False,
    num_tokens_hint: int = 4096,
    objective: str = "time",
    memory_limit_bytes: int | None = None,
    pad_ranks: bool = True,
    autotune: bool = False,
) -> Tensor:
    """Return ``x W^T + bias`` for a weight W held as tensor-train cores.

    Args:
        x: ``(..., in_features)``, of the cores' dtype.
        cores: Cores of W, ``(R, mode, S)`` each in layout "tt", ``(R, N, M, S)`` in "ttm".
        bias: ``(out_features,)`` or ``None``.
        layout: "tt" or "ttm".
        num_in_modes: How many of the modes are input modes.
        in_features: Columns of W; less than the product of the input modes where padded.
        out_features: Rows of W; likewise.
        transposed: Whether the cores have the output modes first: those of a weight that is read
            by its other side.
        num_tokens_hint: Rows of x to plan for where their number is symbolic.
        objective: What the plan minimises.
        memory_limit_bytes: Limit of the plan's peak.
        pad_ranks: Whether the plan may pad ranks.
        autotune: Whether the best plans are timed at the first call of a shape.

    Returns:
        ``(..., out_features)``.

    Raises:
        InputError: If the last axis of ``x`` or its dtype does not fit.

    Source:
        Novikov, Podoprikhin, Osokin and Vetrov, "Tensorizing Neural Networks", NeurIPS 2015.
    """
    x, cores, bias = autocasted(x, cores, bias)
    check_linear_input(x, cores, in_features)
    spec, cores = _spec(layout, num_in_modes, cores, transposed)
    if _is_dead(spec):
        # Products with an empty middle: zero, and differentiable in x.
        y = x @ x.new_zeros(in_features, 0) @ x.new_zeros(0, out_features)
        return y if bias is None else y + bias
    if spec.in_size != in_features:
        x = F.pad(x, (0, spec.in_size - in_features))
    padded = spec.out_size != out_features
    y = lower.linear(
        x,
        cores,
        None if padded else bias,
        spec,
        num_tokens_hint=num_tokens_hint,
        objective=cast("Objective", objective),
        memory_limit_bytes=memory_limit_bytes,
        pad_ranks=pad_ranks,
        autotune=autotune,
    )
    if not padded:
        return y
    y = y.narrow(-1, 0, out_features)
    return y.contiguous() if bias is None else y + bias


def tt_embedding(
    ids: Tensor,
    cores: list[Tensor],
    padding_row: Tensor | None,
    layout: str,
    num_in_modes: int,
    num_embeddings: int,
    embedding_dim: int,
    *,
    transposed: bool = False,
    padding_idx: int = -1,
    num_tokens_hint: int = 4096,
) -> Tensor:
    """Return rows of an embedding table held as tensor-train cores.

    Args:
        ids: Row numbers of any shape, int32 or int64.
        cores: Cores of the table; the input modes are the row modes.
        padding_row: ``(embedding_dim,)``, what ``padding_idx`` reads; ``None`` without one. It
            gets no gradient, as in ``F.embedding``.
        layout: "tt" or "ttm".
        num_in_modes: How many of the modes are row modes.
        num_embeddings: Rows of the table, padding left out.
        embedding_dim: Its columns.
        transposed: Whether the cores have the column modes first.
        padding_idx: The row that stays as it is; -1 for none.
        num_tokens_hint: Number of ids to plan for where it is symbolic.

    Returns:
        ``(*ids.shape, embedding_dim)``, of the cores' dtype.

    Raises:
        InputError: If ids are not integers, or out of range. Where looking at once would cost
            a wait (CUDA, compiled graphs), the look-up itself fails later.

    Source:
        Hrinchuk et al., "Tensorized Embedding Layers", Findings of EMNLP 2020.
    """
    check_ids(ids, num_embeddings)
    spec, cores = _spec(layout, num_in_modes, cores, transposed)
    if _is_dead(spec):
        rows = cores[0].new_zeros(*ids.shape, embedding_dim)
    else:
        if spec.in_size > num_embeddings and not can_look_at(ids):
            # A row of the padding would be no error: send such ids off the end of the table.
            ids = torch.where(ids < num_embeddings, ids, spec.in_size)
        with no_autocast(cores[0]):
            rows = lower.embedding(ids, cores, spec, num_tokens_hint=num_tokens_hint)
        if spec.out_size != embedding_dim:
            rows = rows.narrow(-1, 0, embedding_dim).contiguous()
    return _with_padding_row(rows, ids, padding_row, padding_idx)


def _with_padding_row(
    rows: Tensor, ids: Tensor, padding_row: Tensor | None, padding_idx: int
) -> Tensor:
    if padding_row is None:
        return rows
    return torch.where((ids == padding_idx).unsqueeze(-1), padding_row, rows)


def tt_dense(
    cores: list[Tensor], layout: str, num_in_modes: int, in_features: int, out_features: int
) -> Tensor:
    """Return the dense matrix ``(out_features, in_features)`` of tensor-train cores.

    An embedding's table is its transpose.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011, eq. (1.3).
    """
    spec, cores = _spec(layout, num_in_modes, cores)
    if _is_dead(spec):
        return cores[0].new_zeros(out_features, in_features)
    with no_autocast(cores[0]):
        weight = lower.dense(cores, spec)
    if (spec.out_size, spec.in_size) == (out_features, in_features):
        return weight
    return weight[:out_features, :in_features].contiguous()


def tt_factors(
    cores: list[Tensor],
    num_layers: int,
    layout: str,
    num_in_modes: int,
    in_features: int,
    out_features: int,
    *,
    head_mode: int = 0,
    autocast: bool = True,
) -> list[Tensor]:
    """Return the factors ``W^T = L R`` of equal-shaped weights, cut at their middle bond.

    The chains of all layers run as one batched product a step.

    Args:
        cores: Cores of the weights, one layer after another; without the first output cores,
            where the right factors are made without.
        num_layers: Number of layers.
        layout: "tt".
        num_in_modes: How many of the modes of a weight are input modes.
        in_features: Rows of L; less than the product of the input modes where padded.
        out_features: Columns of R; likewise.
        head_mode: Mode of the first output cores, where R is made without them, as
            ``(s, out_features / head_mode)``; 0 where they are in it.
        autocast: Whether an active autocast takes the factors to its dtype. They keep the cores'
            where a table's rows are made of them.

    Returns:
        All L, ``(in_features, r)``, then all R, ``(r, out_features)``.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011: an unfolding of the tensor at a bond.
    """
    assert layout == "tt", "only a weight in layout tt is cut at one bond"
    if autocast:
        _, cores, _ = autocasted(cores[0], cores, None)
    shapes = [core.shape for core in cores[: len(cores) // num_layers]]
    if head_mode:
        head = torch.Size((shapes[num_in_modes - 1][-1], head_mode, shapes[num_in_modes][0]))
        shapes.insert(num_in_modes, head)
    spec = spec_of(layout, num_in_modes, tuple(tuple(map(int, shape)) for shape in shapes))
    features = (in_features, out_features)
    with nullcontext() if autocast else no_autocast(cores[0]):
        lefts, rights = lower.factors(cores, spec, num_layers, features, without_head=head_mode > 0)
    return [*lefts, *rights]


def tt_apply(
    x: Tensor,
    lefts: list[Tensor],
    rights: list[Tensor],
    biases: list[Tensor | None],
    heads: list[Tensor] | None = None,
) -> list[Tensor]:
    """Return ``(x L) R + b`` of each layer that reads ``x``.

    The left factors stand side by side in one product.

    Args:
        x: ``(..., in_features)``, of the factors' dtype.
        lefts: ``(in_features, r)`` of each layer.
        rights: ``(r, out_features)`` of each layer.
        biases: ``(out_features,)`` of each layer, or ``None``.
        heads: The first core ``(r, mode, s)`` of each R, where R is ``(s, out_features / mode)``:
            with few tokens it takes less to apply it by itself.

    Returns:
        ``(..., out_features)`` of each layer.

    Raises:
        InputError: If the last axis of ``x`` or its dtype does not fit.
    """
    num = len(lefts)
    x, factors, _ = autocasted(x, [*lefts, *rights, *(heads or ())], None)
    lefts, rights, held = factors[:num], factors[num : 2 * num], factors[2 * num :]
    biases = [bias if bias is None else bias.to(x.dtype) for bias in biases]
    check_linear_input(x, lefts, lefts[0].shape[0])
    return lower.apply_factors(x, lefts, rights, biases, held or None)


def tt_rows(
    ids: Tensor,
    left: Tensor,
    right: Tensor,
    padding_row: Tensor | None,
    *,
    padding_idx: int = -1,
) -> Tensor:
    """Return rows of an embedding table ``left @ right``.

    Args:
        ids: Row numbers of any shape, int32 or int64.
        left: ``(num_embeddings, r)``.
        right: ``(r, embedding_dim)``.
        padding_row: As in ``tt_embedding``.
        padding_idx: As in ``tt_embedding``.

    Returns:
        ``(*ids.shape, embedding_dim)``, of the factors' dtype.

    Raises:
        InputError: As ``tt_embedding`` does.
    """
    check_ids(ids, left.shape[0])
    with no_autocast(left):
        rows = F.embedding(ids, left) @ right
    return _with_padding_row(rows, ids, padding_row, padding_idx)


def _register(name: str, body: Any) -> None:
    _library.impl(name, body, "CompositeImplicitAutograd")
    # vmap does not decompose a composite operator of a library by itself.
    _library.impl(name, body, "FuncTorchBatchedDecomposition")


_register("tt_linear", tt_linear)
_register("tt_embedding", tt_embedding)
_register("tt_dense", tt_dense)
_register("tt_factors", tt_factors)
_register("tt_apply", tt_apply)
_register("tt_rows", tt_rows)
