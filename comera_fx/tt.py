"""Tensor-train matrices: dense conversion, random cores and TT-SVD.

Shape legend, used in the names of this file:
    O, I  = out and in size of the matrix, padding included: the products of the modes
    N, M  = in and out mode of one core
    R, S  = left and right rank of one core
    X, Y  = rows and columns of an unfolding: X = (R, modes of one core), Y = all modes after it

The matrix has the shape ``(O, I)`` of ``nn.Linear.weight``. Sizes are row-major in their modes:
in index ``i`` is ``(i_1 * in_modes[1] + i_2) * in_modes[2] + i_3``, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comera_fx.balance import balanced_cores
from comera_fx.errors import SpecError, WeightError
from comera_fx.spec import TTSpec

__all__ = ["TTSpec", "decompose", "random_cores", "to_dense"]

BLOCK_NUMEL = 1 << 22
"""Entries of the weight worked on at once: bounds the extra memory (16 MiB in float32) while
each block is large enough for the QR to run at full speed."""

KRYLOV_SIDE, KRYLOV_DEPTH, KRYLOV_EXTRA = 1024, 6, 8
"""From this side on, and for ranks far below it, a block Krylov basis of this depth and with so
many columns over the rank goes before the SVD: on a matrix without decay, the worst case, what it
loses is within 1e-3 of the best; a full SVD of side 2,560 takes some twenty times as long."""


def to_dense(cores: Sequence[Tensor], spec: TTSpec) -> Tensor:
    """Contract cores into the matrix they stand for.

    Args:
        cores: One tensor per entry of ``spec.core_shapes``, in those shapes.
        spec: Layout, modes and ranks.

    Returns:
        The matrix ``(O, I)``, padding included, in the dtype and on the device of the cores;
        differentiable.

    Raises:
        SpecError: If the cores do not have the shapes of ``spec``.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011, eq. (1.3); from memory.

    Example:
        >>> spec = TTSpec("ttm", (2, 3), (4, 5), (1, 2, 1))
        >>> to_dense(random_cores(spec, std=0.1), spec).shape
        torch.Size([20, 6])
    """
    shapes = tuple(tuple(core.shape) for core in cores)
    if shapes != spec.core_shapes:
        raise SpecError(
            "cores do not have the shapes of their TTSpec",
            got=shapes,
            expected=str(spec.core_shapes),
            mend="pass the cores in order, with the spec they were made for",
        )
    if spec.transposed:
        return to_dense(cores, spec.turned()).T
    if spec.layout == "tt":
        num_in, middle = len(spec.in_modes), spec.middle_rank
        left_IR = _chain(cores[:num_in]).reshape(spec.in_size, middle)
        right_RO = _chain(cores[num_in:]).reshape(middle, spec.out_size)
        return right_RO.T @ left_IR.T
    pairs = zip(spec.in_modes, spec.out_modes, strict=True)
    split = _chain(cores).reshape([mode for pair in pairs for mode in pair])
    num_axes = 2 * spec.num_cores
    ordered = split.permute(*range(1, num_axes, 2), *range(0, num_axes, 2))
    return ordered.reshape(spec.out_size, spec.in_size)


def _chain(cores: Sequence[Tensor]) -> Tensor:
    """Multiply neighbouring cores: ``(R * all modes, S)``, modes in core order."""
    # Sizes are spelt out: -1 is ambiguous where a rank is 0.
    product = cores[0].reshape(math.prod(cores[0].shape[:-1]), cores[0].shape[-1])
    for core in cores[1:]:
        size, right = math.prod(core.shape[1:-1]), core.shape[-1]
        grown = product @ core.reshape(core.shape[0], size * right)
        product = grown.reshape(product.shape[0] * size, right)
    return product


def random_cores(
    spec: TTSpec,
    std: float,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Draw cores of a random matrix whose entries have standard deviation ``std``.

    An entry of the matrix is a sum over all paths through the inner ranks of products with one
    factor per core, so ``std ** 2 = prod(inner ranks) * prod(variances of the cores)``; all cores
    are drawn with the same variance. The norm of a product of small cores still strays far from
    its mean: the cores are then scaled together until the root mean square of the matrix is
    ``std``. In the end they are brought into balanced form, which keeps the matrix and from which
    they train better (``comera_fx/train/README.md``).

    Args:
        spec: Layout, modes and ranks; inner ranks of 0 give empty cores.
        std: Standard deviation of the entries of the matrix.
        generator: Source of the random numbers. The draw is made on its device, so one seed
            gives the same cores on every device.
        dtype: dtype of the cores; torch's default if ``None``.
        device: Device of the cores; torch's default if ``None``.

    Returns:
        One tensor per entry of ``spec.core_shapes``.

    Example:
        >>> spec = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))
        >>> cores = random_cores(spec, std=0.02)
        >>> round(float(to_dense(cores, spec).square().mean().sqrt()), 4)
        0.02
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    # Half precision is drawn in float32, so that it starts from the numbers float32 starts from.
    drawn_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    drawn_on = device if generator is None else generator.device
    cores = [
        torch.randn(shape, generator=generator, dtype=drawn_dtype, device=drawn_on)
        for shape in spec.core_shapes
    ]
    mean_square = float(_inner(cores, cores)) / (spec.in_size * spec.out_size)
    factor = (std / math.sqrt(mean_square)) ** (1 / spec.num_cores) if mean_square else 0.0
    return [
        core.to(dtype=dtype, device=device)
        for core in balanced_cores([core * factor for core in cores])
    ]


def _inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Inner product of two matrices in TT form, in float64, without building either."""
    gram_RR = torch.ones(1, 1, dtype=torch.float64, device=a[0].device)
    for core_a, core_b in zip(a, b, strict=True):
        a_RXS, b_RXS = core_a.double().flatten(1, -2), core_b.double().flatten(1, -2)
        half_RXS = torch.einsum("ab,bxd->axd", gram_RR, b_RXS)
        gram_RR = torch.einsum("axc,axd->cd", a_RXS, half_RXS)
    return gram_RR.squeeze()


def decompose(
    weight_OI: Tensor, spec: TTSpec, *, tol: float | None = None, name: str = "weight"
) -> tuple[list[Tensor], TTSpec, float]:
    """Split a dense matrix into cores by successive truncated SVDs (TT-SVD).

    Works on blocks of the weight, so the extra memory is that of the truncated weight, not of a
    second copy. Computes in float32, or in float64 if the weight is. The norm of the weight is
    spread evenly over the cores: one learning rate then suits all of them, and none overflows in
    half precision.

    Args:
        weight_OI: Dense weight, at most ``(spec.out_size, spec.in_size)``; the rest is zeros.
        spec: Wanted modes and the largest ranks allowed.
        tol: Relative Frobenius error allowed: the ranks are the smallest that meet it, within
            those of ``spec``. ``None``: the ranks of ``spec``, cut to what the bonds can use.
        name: Name of the layer, for messages.

    Returns:
        The cores, in the weight's dtype and on its device; their spec; and the relative Frobenius
        error of the matrix they stand for. In half precision the error includes the rounding of
        the cores, taken as independent of the truncation.

    Raises:
        SpecError: If the weight is larger than ``spec``.
        WeightError: If the weight is not a real matrix of finite numbers, or if an SVD of it
            does not converge.

    Source:
        Oseledets, "Tensor-Train Decomposition", SISC 2011, Algorithm 1; from memory.

    Example:
        >>> wanted = TTSpec("tt", (4, 2), (2, 3), (1, 4, 6, 3, 1))
        >>> cores, spec, error = decompose(torch.ones(6, 8), wanted, tol=0.01)
        >>> spec.ranks, error < 0.01
        ((1, 1, 1, 1, 1), True)
    """
    _check_fits(weight_OI, spec, name)
    if spec.transposed:
        cores, found, error = decompose(weight_OI.T, spec.turned(), tol=tol, name=name)
        return cores, found.turned(), error
    largest = _largest_magnitude(weight_OI, name)
    if 0 in spec.ranks:
        dead = [weight_OI.new_zeros(shape) for shape in spec.core_shapes]
        return dead, spec, 1.0 if largest else 0.0
    # Dividing by a power of two is exact, and near the largest entry it keeps squares in range.
    # The bound keeps the power and its inverse within the normal numbers of the dtype.
    bound = 1000 if weight_OI.dtype == torch.float64 else 126
    exponent = max(-bound, min(bound, math.frexp(largest)[1]))
    try:
        with torch.no_grad(), torch.autocast(weight_OI.device.type, enabled=False):
            unfolding = _FirstUnfolding(weight_OI.detach(), spec, 2.0**-exponent)
            exact, ranks, error = _truncate(unfolding, spec.clipped(), tol)
            exact = _spread(exact, exponent)
            cores = [core.to(weight_OI.dtype) for core in exact]
            if weight_OI.dtype in (torch.float16, torch.bfloat16):
                error = math.hypot(error, _relative_distance(exact, cores))
    except torch.linalg.LinAlgError as fault:  # type: ignore[attr-defined]
        raise WeightError(
            f"{name}: the SVD of the weight does not converge",
            got=str(fault).splitlines()[0],
            expected="a weight whose singular values can be computed",
            mend="leave this layer out with exclude=, or use init='random'",
        ) from fault
    return cores, replace(spec, ranks=ranks), error


def _check_fits(weight_OI: Tensor, spec: TTSpec, name: str) -> None:
    if weight_OI.ndim != 2 or not weight_OI.is_floating_point():
        raise WeightError(
            f"{name} cannot be decomposed",
            got=f"{weight_OI.dtype} of shape {tuple(weight_OI.shape)}",
            expected="a matrix of real floating point numbers",
            mend="pass the weight as a float matrix (out_features, in_features)",
        )
    out, in_ = weight_OI.shape
    if out > spec.out_size or in_ > spec.in_size:
        raise SpecError(
            f"{name} does not fit its modes",
            got=f"weight {(out, in_)}, in_modes {spec.in_modes}, out_modes {spec.out_modes}",
            expected=f"at most {(spec.out_size, spec.in_size)}, the products of the modes",
            mend="choose modes whose products are at least the layer's two sizes",
        )


def _largest_magnitude(weight_OI: Tensor, name: str) -> float:
    """Largest absolute entry; refuses NaN and infinity, without a copy of the weight."""
    if not weight_OI.numel():
        return 0.0
    # In memory order: aminmax copies a tensor that is not contiguous, such as a transposed table.
    in_order = weight_OI.T if weight_OI.T.is_contiguous() else weight_OI
    low, high = (float(end) for end in torch.aminmax(in_order.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise WeightError(
            f"{name} holds {'NaN' if math.isnan(low) else 'infinity'}",
            got=f"entries from {low} to {high}",
            expected="finite numbers only",
            mend="repair or initialise the weight, or leave this layer out with exclude=",
        )
    return max(abs(low), abs(high))


@dataclass(frozen=True)
class _FirstUnfolding:
    """The first unfolding of a weight, scaled and padded, read in blocks of columns.

    Its rows are the modes of the first core, its columns (rest of in, rest of out): in this order
    a block is a range of in indices, which needs no copy of the whole weight.
    """

    weight: Tensor
    spec: TTSpec
    scale: float

    @property
    def rest_in(self) -> int:
        return self.spec.in_size // self.spec.in_modes[0]

    @property
    def rest_out(self) -> int:
        return self.spec.out_size * self.spec.in_modes[0] // self.spec.mode_sizes[0]

    def blocks(self) -> Iterator[Tensor]:
        """Yield ``(X, columns of the block)``, left to right."""
        width = max(1, BLOCK_NUMEL // (self.spec.in_modes[0] * self.spec.out_size))
        for start in range(0, self.rest_in, width):
            yield self._block(start, min(start + width, self.rest_in))

    def _block(self, start: int, stop: int) -> Tensor:
        weight, (out, in_) = self.weight, self.weight.shape
        num_slabs, width = self.spec.in_modes[0], stop - start
        dtype = torch.promote_types(weight.dtype, torch.float32)
        block_NYO = weight.new_zeros((num_slabs, width, self.spec.out_size), dtype=dtype)
        for n in range(num_slabs):
            low, high = n * self.rest_in + start, min(n * self.rest_in + stop, in_)
            if low < high:
                block_NYO[n, : high - low, :out] = weight[:, low:high].T
        block_NYO.mul_(self.scale)
        split_NYMO = block_NYO.reshape(num_slabs, width, -1, self.rest_out)
        return split_NYMO.transpose(1, 2).reshape(-1, width * self.rest_out)

    def in_core_order(self, rest_RY: Tensor) -> Tensor:
        """Reorder columns from (rest of in, rest of out) to the modes of the cores after it."""
        if self.spec.layout == "tt":
            return rest_RY
        num = self.spec.num_cores - 1
        split = rest_RY.reshape(-1, *self.spec.in_modes[1:], *self.spec.out_modes[1:])
        axes = [1 + k + side for k in range(num) for side in (0, num)]
        return split.permute(0, *axes).reshape(rest_RY.shape)


def _truncate(
    first: _FirstUnfolding, spec: TTSpec, tol: float | None
) -> tuple[list[Tensor], tuple[int, ...], float]:
    """TT-SVD of the scaled weight: cores (left-orthogonal but for the last), ranks, error."""
    sizes, shapes = spec.mode_sizes, spec.core_shapes
    if spec.num_cores == 1:
        return [torch.cat(list(first.blocks()), dim=1).reshape(shapes[0])], spec.ranks, 0.0
    cores: list[Tensor] = []
    rest_XY, rank, norm, dropped = torch.empty(0), 1, 0.0, 0.0
    for k in range(spec.num_cores - 1):
        blocks = first.blocks() if k == 0 else _blocks(rest_XY)
        vectors_XR, tails = _left_singular(blocks, spec.ranks[k + 1])
        norm = norm or tails[0]
        kept = min(spec.ranks[k + 1], vectors_XR.shape[1])
        if tol is not None:
            allowed = tol * norm / math.sqrt(spec.num_cores - 1)
            kept = min(kept, max(1, sum(tail > allowed for tail in tails)))
        dropped = math.hypot(dropped, tails[kept])
        basis_XR = vectors_XR[:, :kept]
        cores.append(basis_XR.reshape(rank, *shapes[k][1:-1], kept))
        if k == 0:
            parts = [basis_XR.T @ block for block in first.blocks()]
            rest_RY = first.in_core_order(torch.cat(parts, dim=1))
        else:
            rest_RY = basis_XR.T @ rest_XY
        rank = kept
        rest_XY = rest_RY.reshape(rank * sizes[k + 1], rest_RY.shape[1] // sizes[k + 1])
    cores.append(rest_XY.reshape(rank, *shapes[-1][1:-1], 1))
    # Each truncation is an orthogonal projection within the space that those before it kept, so
    # the squares of what they drop add up exactly.
    ranks = (*(core.shape[0] for core in cores), 1)
    return cores, ranks, dropped / norm if norm else 0.0


def _blocks(matrix_XY: Tensor) -> Iterator[Tensor]:
    yield from torch.split(matrix_XY, max(1, BLOCK_NUMEL // matrix_XY.shape[0]), dim=1)


def _left_singular(blocks: Iterable[Tensor], most: int) -> tuple[Tensor, list[float]]:
    """Leading left singular vectors, at least ``most`` where there are that many, and tail norms.

    Tail ``k`` is the norm of what is lost by keeping k vectors. The matrix comes in blocks of
    columns; the triangle in a QR of its transpose has the same vectors, is updated block by block
    and, unlike the Gram matrix, does not square the condition number.
    """
    triangle = None
    for block in blocks:
        stacked = block.T if triangle is None else torch.cat([triangle, block.T])
        tall = stacked.shape[0] > stacked.shape[1]
        triangle = torch.linalg.qr(stacked, mode="r").R if tall else stacked
    assert triangle is not None, "a matrix has at least one block"
    matrix_XY, outside = triangle.T, 0.0
    basis_XB = _krylov_basis(matrix_XY, most)
    if basis_XB is not None:
        inside_BY = basis_XB.T @ matrix_XY
        lost_XY = matrix_XY - basis_XB @ inside_BY
        outside = float(torch.linalg.vector_norm(lost_XY, dtype=torch.float64))
        matrix_XY = inside_BY
    vectors_XR, values, _ = torch.linalg.svd(matrix_XY, full_matrices=False)
    squares = values.double().square().flip(0).cumsum(0).flip(0)
    tails = [math.hypot(tail, outside) for tail in (*squares.sqrt().tolist(), 0.0)]
    return vectors_XR if basis_XB is None else basis_XB @ vectors_XR, tails


def _krylov_basis(matrix_XY: Tensor, most: int) -> Tensor | None:
    """Orthonormal basis that holds the ``most`` leading left singular vectors, if that pays.

    Source:
        Musco and Musco, "Randomized Block Krylov Methods for Stronger and Faster Approximate
        Singular Value Decomposition", NeurIPS 2015, Algorithm 2; from memory.
    """
    width = most + KRYLOV_EXTRA
    if min(matrix_XY.shape) < max(KRYLOV_SIDE, 2 * KRYLOV_DEPTH * width):
        return None
    # A generator of its own: the result must not depend on, nor change, the user's random state.
    own, shape = torch.Generator().manual_seed(0), (matrix_XY.shape[1], width)
    start_YW = torch.randn(shape, generator=own, dtype=torch.float32, device="cpu")
    newest_XW = torch.linalg.qr(matrix_XY @ start_YW.to(matrix_XY)).Q
    basis_XB = newest_XW
    for _ in range(KRYLOV_DEPTH - 1):
        grown_XW = matrix_XY @ (matrix_XY.T @ newest_XW)
        newest_XW = torch.linalg.qr(grown_XW - basis_XB @ (basis_XB.T @ grown_XW)).Q
        basis_XB = torch.cat([basis_XB, newest_XW], dim=1)
    # Where the matrix has lower rank than the basis, the last blocks are noise: a QR of them all
    # is orthonormal whatever they hold.
    orthonormal_XB: Tensor = torch.linalg.qr(basis_XB).Q
    return orthonormal_XB


def _spread(cores: list[Tensor], exponent: int) -> list[Tensor]:
    """Multiply by ``2 ** exponent`` in all, so that all cores get the same root mean square."""
    sizes = [float(core.double().square().mean().sqrt()) for core in cores]
    if not all(sizes):  # the matrix is zero: there is no norm to spread
        return cores
    logs = [math.log2(size) for size in sizes]
    target = (sum(logs) + exponent) / len(logs)
    return [core * 2.0 ** (target - log) for core, log in zip(cores, logs, strict=True)]


def _relative_distance(exact: list[Tensor], rounded: list[Tensor]) -> float:
    """Frobenius distance between two matrices in TT form, relative to the first."""
    square = float(_inner(exact, exact))
    distance = square - 2 * float(_inner(exact, rounded)) + float(_inner(rounded, rounded))
    return math.sqrt(max(0.0, distance) / square) if square else 0.0
