"""Tensor-train matrices: full rank against dense, tolerances met, hard weights, random cores."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from comera_fx import tt
from comera_fx.errors import SpecError, WeightError
from comera_fx.spec import TTSpec
from tests.tolerances import BY_DTYPE, EXACT

LIMIT = settings(deadline=None, derandomize=True, max_examples=60)
PAPER = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
FULL = 10**6


def spec_of(layout, in_modes, out_modes, rank=FULL):
    num_cores = len(in_modes) + len(out_modes) if layout == "tt" else len(in_modes)
    ranks = (1, *[rank] * (num_cores - 1), 1)
    return TTSpec(layout, tuple(in_modes), tuple(out_modes), ranks).clipped()


sides = st.lists(st.integers(1, 4), min_size=1, max_size=3)
pairs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)
mode_pairs = st.one_of(
    st.tuples(st.just("tt"), sides, sides),
    pairs.map(lambda both: ("ttm", *map(list, zip(*both, strict=True)))),
)


def random_weight(spec, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(spec.out_size, spec.in_size, dtype=dtype, generator=generator)


def measured(cores, spec, weight):
    """Relative Frobenius error, in float64 and over the padded matrix."""
    padded = torch.zeros(spec.out_size, spec.in_size, dtype=torch.float64)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    distance = tt.to_dense([core.double() for core in cores], spec) - padded
    return float(distance.norm() / padded.norm())


def test_index_order_of_both_layouts():
    """One core per mode (or pair of modes) and row-major sizes, as nested loops spell it out."""
    spec = TTSpec("tt", (2, 3), (2, 2), (1, 2, 3, 2, 1))
    cores = tt.random_cores(spec, 1.0, dtype=torch.float64)
    dense = tt.to_dense(cores, spec)
    a, b, c, d = (0, 1), (1, 2), (0, 1), (1, 0)
    for i, o in ((a, c), (b, d), (a, d), (b, c)):
        product = cores[0][:, i[0]] @ cores[1][:, i[1]] @ cores[2][:, o[0]] @ cores[3][:, o[1]]
        torch.testing.assert_close(dense[o[0] * 2 + o[1], i[0] * 3 + i[1]], product[0, 0])

    spec = TTSpec("ttm", (2, 3), (3, 2), (1, 4, 1))
    cores = tt.random_cores(spec, 1.0, dtype=torch.float64)
    product = cores[0][:, 1, 2] @ cores[1][:, 0, 1]
    torch.testing.assert_close(tt.to_dense(cores, spec)[2 * 2 + 1, 1 * 3 + 0], product[0, 0])


@given(mode_pairs)
@example(("tt", [1], [1]))
@example(("ttm", [1], [1]))
@example(("ttm", [6], [5]))
@example(("tt", [1, 4, 1], [1, 1, 3]))
@LIMIT
def test_full_rank_equals_dense(choice):
    spec = spec_of(*choice)
    weight = random_weight(spec)
    cores, met, error = tt.decompose(weight, spec)
    assert met == spec
    assert tuple(tuple(core.shape) for core in cores) == spec.core_shapes
    torch.testing.assert_close(tt.to_dense(cores, met), weight, **EXACT)
    assert error < 1e-12


@given(mode_pairs, st.integers(0, 3), st.integers(0, 3))
@LIMIT
def test_smaller_weights_are_padded_with_zeros(choice, less_out, less_in):
    spec = spec_of(*choice)
    weight = random_weight(spec)[less_out:, less_in:]
    cores, met, _ = tt.decompose(weight, spec)
    dense = tt.to_dense(cores, met)
    torch.testing.assert_close(dense[: weight.shape[0], : weight.shape[1]], weight, **EXACT)
    assert dense[weight.shape[0] :].abs().sum() < 1e-10
    assert dense[:, weight.shape[1] :].abs().sum() < 1e-10


@given(mode_pairs, st.floats(0, 0.9), st.integers(1, 6))
@LIMIT
def test_tol_is_met_unless_the_ranks_are_too_small(choice, tol, rank):
    spec = spec_of(*choice)
    weight = random_weight(spec) @ torch.diag(0.5 ** torch.arange(spec.in_size).double())
    cores, met, error = tt.decompose(weight, spec, tol=tol)
    assert measured(cores, met, weight) == pytest.approx(error, abs=1e-10)
    assert error <= tol + 1e-12

    capped = spec_of(*choice, rank)
    cores, met, error = tt.decompose(weight, capped, tol=tol)
    assert all(r <= cap for r, cap in zip(met.ranks, capped.ranks, strict=True))
    assert measured(cores, met, weight) == pytest.approx(error, abs=1e-10)


@pytest.mark.parametrize("layout", ["tt", "ttm"])
def test_tol_finds_the_rank_a_weight_has(layout):
    spec = spec_of(layout, (4, 4, 4), (4, 4, 4))
    low = TTSpec(layout, spec.in_modes, spec.out_modes, (1, *[3] * (spec.num_cores - 1), 1))
    weight = tt.to_dense(tt.random_cores(low, 1.0, dtype=torch.float64), low)
    _, met, error = tt.decompose(weight, spec, tol=1e-8)
    assert met.ranks == low.ranks
    assert error < 1e-8


def test_truncation_is_the_best_one_where_there_is_only_one_bond():
    spec = TTSpec("tt", (20,), (30,), (1, 7, 1))
    weight = random_weight(spec)
    values = torch.linalg.svdvals(weight)
    _, _, error = tt.decompose(weight, spec)
    assert error == pytest.approx(float(values[7:].norm() / values.norm()), rel=1e-10)


@pytest.mark.parametrize("layout", ["tt", "ttm"])
@pytest.mark.parametrize("tol", [None, 0.3])
@pytest.mark.parametrize("side", [24, 30])
def test_blocks_give_the_same_as_one_pass(monkeypatch, layout, tol, side):
    spec = spec_of(layout, (5, 3, 2), (2, 5, 3), rank=9)
    weight = random_weight(spec)[:side, :side]
    whole = tt.decompose(weight, spec, tol=tol)
    monkeypatch.setattr(tt, "BLOCK_NUMEL", 150)
    pieces = tt.decompose(weight, spec, tol=tol)
    assert pieces[1] == whole[1]
    torch.testing.assert_close(tt.to_dense(*pieces[:2]), tt.to_dense(*whole[:2]), **EXACT)


@pytest.mark.parametrize("kind", ["low rank and noise", "no decay", "low rank"])
def test_a_krylov_basis_loses_next_to_nothing(monkeypatch, kind):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(300, 320, dtype=torch.float64, generator=generator)
    low = noise[:, :4] @ noise[:4]
    weight = {"low rank and noise": low + 1e-3 * noise, "no decay": noise, "low rank": low}[kind]
    spec = TTSpec("tt", (320,), (300,), (1, 8, 1))
    _, _, best = tt.decompose(weight, spec)
    monkeypatch.setattr(tt, "KRYLOV_SIDE", 100)
    before = torch.get_rng_state()
    cores, met, error = tt.decompose(weight, spec)
    assert torch.equal(torch.get_rng_state(), before)
    assert error <= best * 1.001 + 1e-12
    assert error > best or kind != "no decay"  # else the basis was not used
    assert measured(cores, met, weight) == pytest.approx(error, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_reports_the_error_of_the_cores_it_returns(dtype):
    spec = spec_of("tt", (6, 5), (5, 6))
    weight = random_weight(spec, torch.float32).to(dtype)
    for asked in (spec, spec_of("tt", (6, 5), (5, 6), rank=4)):
        cores, met, error = tt.decompose(weight, asked)
        assert {core.dtype for core in cores} == {dtype}
        assert error == pytest.approx(measured(cores, met, weight), rel=0.3, abs=2e-6)
    assert error > 0.1


@pytest.mark.parametrize("layout", ["tt", "ttm"])
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-42, 0.0])
def test_extreme_weights(layout, scale):
    spec = spec_of(layout, (4, 3), (3, 4))
    weight = torch.ones(12, 12) * scale
    weight[:6] *= -1
    cores, met, error = tt.decompose(weight, spec)
    dense = tt.to_dense(cores, met)
    assert torch.isfinite(dense).all()
    assert error < 1e-5
    torch.testing.assert_close(dense, weight, rtol=1e-4, atol=1e-44)


@pytest.mark.parametrize("weight", [torch.ones(12, 12).cumsum(1), torch.zeros(12, 12)])
def test_repeated_rows_and_zeros_need_no_rank(weight):
    cores, met, error = tt.decompose(weight, spec_of("tt", (3, 4), (4, 3)), tol=1e-5)
    assert met.ranks[2:] == (1, 1, 1)
    assert error <= 1e-5
    torch.testing.assert_close(tt.to_dense(cores, met), weight, **BY_DTYPE[torch.float32])


def test_half_precision_does_not_overflow_where_the_norm_does():
    weight = torch.full((64, 64), 3e4, dtype=torch.float16)
    cores, met, error = tt.decompose(weight, spec_of("tt", (8, 8), (8, 8), rank=4))
    torch.testing.assert_close(tt.to_dense(cores, met), weight, rtol=1e-2, atol=0)
    assert error < 1e-2


def test_the_norm_is_spread_evenly_over_the_cores():
    weight = random_weight(PAPER, torch.float32)
    cores, _, _ = tt.decompose(weight, PAPER)
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    assert max(sizes) == pytest.approx(min(sizes), rel=1e-4)


def test_a_weight_of_rank_0_is_zero():
    spec = TTSpec("ttm", (2, 3), (3, 2), (1, 0, 1))
    cores, met, error = tt.decompose(torch.ones(6, 6), spec)
    assert (met, error) == (spec, 1.0)
    assert torch.equal(tt.to_dense(cores, met), torch.zeros(6, 6))
    assert tt.decompose(torch.zeros(6, 6), spec)[2] == 0.0


def test_a_pretrained_table_meets_an_error_of_one_percent():
    """An embedding of rank 12 and a little noise: what cannot be kept would be seen."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3000, 12, generator=generator) @ torch.randn(12, 64, generator=generator)
    table += 1e-3 * torch.randn(3000, 64, generator=generator)
    spec = spec_of("tt", (15, 14, 15), (8, 8))
    cores, met, error = tt.decompose(table.T, spec, tol=0.01)
    assert error <= 0.01
    assert measured(cores, met, table.T) == pytest.approx(error, rel=1e-3)
    assert met.ranks[3] == 12


class LargestResult(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operator makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in inputs:
                    self.bytes = max(self.bytes, storage.nbytes())
        return result


def test_a_large_table_is_never_copied(monkeypatch):
    monkeypatch.setattr(tt, "BLOCK_NUMEL", 1 << 14)
    table = torch.randn(20_000, 64)
    spec = TTSpec("ttm", (25, 32, 25), (4, 4, 4), (1, 8, 8, 1))
    with LargestResult() as made:
        tt.decompose(table.T, spec)
    assert 0 < made.bytes < table.numel() * table.element_size() / 4


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (torch.full((6, 6), math.nan), "encoder.fc1 holds NaN"),
        (torch.tensor([[1.0, math.inf]]), "encoder.fc1 holds infinity"),
        (torch.tensor([[1.0, -math.inf]]), "encoder.fc1 holds infinity"),
        (torch.tensor([[math.inf, math.nan]]), "encoder.fc1 holds NaN"),
        (torch.ones(6, 6, dtype=torch.int64), "encoder.fc1 cannot be decomposed"),
        (torch.ones(6, 6, dtype=torch.complex64), "encoder.fc1 cannot be decomposed"),
        (torch.ones(6), "encoder.fc1 cannot be decomposed"),
    ],
)
def test_a_weight_that_cannot_be_split_is_named(weight, problem):
    with pytest.raises(WeightError) as caught:
        tt.decompose(weight, spec_of("tt", (6,), (6,)), name="encoder.fc1")
    assert str(caught.value).splitlines()[0] == problem


def test_an_svd_that_does_not_converge_names_the_layer(monkeypatch):
    def diverge(*args, **kwargs):
        raise torch.linalg.LinAlgError("linalg.svd: failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", diverge)
    with pytest.raises(WeightError, match=r"^encoder.fc1: the SVD .* does not converge\n"):
        tt.decompose(torch.ones(6, 6), spec_of("tt", (6,), (6,)), name="encoder.fc1")


def test_modes_too_small_for_the_weight_are_refused():
    with pytest.raises(SpecError) as caught:
        tt.decompose(torch.ones(7, 6), spec_of("tt", (2, 3), (6,)), name="encoder.fc1")
    assert str(caught.value) == (
        "encoder.fc1 does not fit its modes\n"
        "  got:      weight (7, 6), in_modes (2, 3), out_modes (6,)\n"
        "  expected: at most (6, 6), the products of the modes\n"
        "  mend:     choose modes whose products are at least the layer's two sizes"
    )


def test_cores_of_another_spec_are_refused():
    cores = tt.random_cores(PAPER, 1.0)
    with pytest.raises(SpecError, match="cores do not have the shapes of their TTSpec"):
        tt.to_dense(cores[:-1], PAPER)
    with pytest.raises(SpecError, match="cores do not have the shapes of their TTSpec"):
        tt.to_dense(cores[::-1], PAPER)


def test_decompose_leaves_the_weight_and_its_graph_alone():
    weight = torch.nn.Parameter(torch.randn(6, 6))
    before = weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cores, met, _ = tt.decompose(weight, spec_of("tt", (2, 3), (3, 2)))
    assert torch.equal(weight, before)
    assert not any(core.requires_grad for core in cores)
    torch.testing.assert_close(tt.to_dense(cores, met), before, **BY_DTYPE[torch.float32])


@pytest.mark.parametrize("layout", ["tt", "ttm"])
def test_to_dense_is_differentiable(layout):
    spec = spec_of(layout, (2, 3), (3, 2), rank=2)
    cores = [c.requires_grad_() for c in tt.random_cores(spec, 1.0, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *inputs: tt.to_dense(inputs, spec), cores)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [
        PAPER,
        TTSpec("ttm", (16, 20, 10), (4, 4, 8), (1, 32, 32, 1)),
        TTSpec("tt", (1, 4), (3, 1), (1, 1, 1, 1, 1)),
    ],
)
def test_random_cores_have_the_standard_deviation_asked_for(spec, dtype):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        cores = tt.random_cores(spec, 0.02, generator=generator, dtype=dtype)
        dense = tt.to_dense([core.double() for core in cores], spec)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        assert float(dense.square().mean().sqrt()) == pytest.approx(0.02, rel=tolerance)
        assert {core.dtype for core in cores} == {dtype}


def test_random_cores_are_balanced_and_have_mean_0():
    generator = torch.Generator().manual_seed(0)
    spec = TTSpec("tt", (16, 16), (16, 16), (1, 16, 64, 16, 1))
    cores = tt.random_cores(spec, 0.02, generator=generator)
    for core in cores:
        spread = float(core.std()) / math.sqrt(core.numel())
        assert abs(float(core.mean())) < 4 * spread
    values = torch.linalg.svdvals(tt.to_dense(cores, spec).T.reshape(16 * 16, 16 * 16))[:64]
    left = torch.tensordot(cores[0], cores[1], dims=1).flatten(0, -2)
    right = torch.tensordot(cores[2], cores[3], dims=1).flatten(1)
    for gram in (left.T @ left, right @ right.T):
        torch.testing.assert_close(gram, values.diag(), rtol=1e-3, atol=1e-4 * float(values[0]))


def test_random_cores_follow_their_generator():
    def draw(seed):
        return tt.random_cores(PAPER, 0.02, generator=torch.Generator().manual_seed(seed))

    assert all(torch.equal(a, b) for a, b in zip(draw(1), draw(1), strict=True))
    assert not torch.equal(draw(1)[0], draw(2)[0])


def test_random_cores_of_rank_0_or_no_deviation_are_zero():
    spec = TTSpec("tt", (4, 2), (3,), (1, 0, 0, 1))
    cores = tt.random_cores(spec, 0.02)
    assert tuple(tuple(core.shape) for core in cores) == spec.core_shapes
    assert torch.equal(tt.to_dense(cores, spec), torch.zeros(3, 8))
    assert not any(core.any() for core in tt.random_cores(PAPER, 0.0))


def test_transposed_cores_stand_for_the_transpose():
    spec = spec_of("tt", (2, 3), (4, 2))
    weight = random_weight(spec)
    cores, found, error = tt.decompose(weight.T, spec.turned())
    assert found == spec.turned()
    assert error < 1e-10
    torch.testing.assert_close(tt.to_dense(cores, found), weight.T, **EXACT)
    torch.testing.assert_close(tt.to_dense(cores, spec), weight, **EXACT)
