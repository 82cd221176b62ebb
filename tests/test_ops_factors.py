"""Operators on factors and on cores read by their other side: equal to the dense layer."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comera_fx.spec import TTSpec
from comera_fx.tt import random_cores, to_dense
from tests.tolerances import EXACT

ops = torch.ops.comera_fx
modes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
LAYER = TTSpec("tt", (3, 4), (2, 5), (1, 3, 7, 5, 1))


def cores_of(spec: TTSpec, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cores = random_cores(spec, 1.0, generator=generator, dtype=torch.float64)
    return [core.requires_grad_() for core in cores]


def assert_same(mine: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(mine, theirs, **EXACT)
    grad = torch.randn_like(mine)
    pairs = zip(
        torch.autograd.grad(mine, inputs, grad),
        torch.autograd.grad(theirs, inputs, grad, retain_graph=True),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, **EXACT)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    layout=st.sampled_from(["tt", "ttm"]),
    in_modes=modes,
    out_modes=modes,
    rank=st.integers(1, 5),
    num_tokens=st.sampled_from([0, 1, 3, 70]),
    padded=st.booleans(),
)
def test_a_weight_read_by_its_other_side(layout, in_modes, out_modes, rank, num_tokens, padded):
    if layout == "ttm":
        out_modes = (out_modes * 3)[: len(in_modes)]
    num_cores = len(in_modes) + len(out_modes) if layout == "tt" else len(in_modes)
    spec = TTSpec(layout, in_modes, out_modes, (1, *(rank,) * (num_cores - 1), 1))
    in_size, out_size = max(spec.in_size - padded, 1), max(spec.out_size - padded, 1)
    cores = cores_of(spec)
    weight = to_dense(cores, spec)[:out_size, :in_size]
    x = torch.randn(num_tokens, out_size, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(in_size, dtype=torch.float64, requires_grad=True)

    sizes = (layout, len(out_modes), out_size, in_size)
    mine = ops.tt_linear(x, cores, bias, *sizes, transposed=True)
    assert_same(mine, x @ weight + bias, [x, bias, *cores])

    ids = torch.arange(out_size).repeat(2)
    rows = ops.tt_embedding(ids, cores, None, *sizes, transposed=True)
    assert_same(rows, weight[ids], cores)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_factors_without_their_heads(num_tokens, with_bias):
    layers = [cores_of(LAYER, seed) for seed in range(3)]
    given = [core for cores in layers for k, core in enumerate(cores) if k != 2]
    heads = [cores[2] for cores in layers]
    biases = [torch.randn(10, dtype=torch.float64) if with_bias else None for _ in layers]
    x = torch.randn(num_tokens, 12, dtype=torch.float64, requires_grad=True)

    made = ops.tt_factors(given, 3, "tt", 2, 12, 10, head_mode=2)
    assert [tuple(f.shape) for f in made] == [(12, 7)] * 3 + [(5, 5)] * 3
    results = ops.tt_apply(x, made[:3], made[3:], biases, heads)

    for cores, bias, result in zip(layers, biases, results, strict=True):
        expected = F.linear(x, to_dense(cores, LAYER), bias)
        torch.testing.assert_close(result, expected, **EXACT)
    total = sum(result.square().sum() for result in results)
    expected = sum(
        F.linear(x, to_dense(cores, LAYER), bias).square().sum()
        for cores, bias in zip(layers, biases, strict=True)
    )
    assert_same(total, expected, [x, *(core for cores in layers for core in cores)])


@pytest.mark.parametrize("shape", [(), (5,), (2, 0), (2, 3)])
def test_rows_of_factors(shape):
    left = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    right = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 8, shape)
    assert_same(ops.tt_rows(ids, left, right, None), (left @ right)[ids], [left, right])


def test_a_padding_row_of_factors_gets_no_gradient():
    left, right = torch.randn(4, 2, requires_grad=True), torch.randn(2, 3)
    rows = ops.tt_rows(torch.tensor([1, 2]), left, right, torch.ones(3), padding_idx=2)
    assert rows[1].tolist() == [1.0, 1.0, 1.0]
    rows.sum().backward()
    assert not left.grad[2].any()
    assert left.grad[1].any()


def test_opcheck_of_operators_on_factors():
    cores = [core.detach().float() for core in cores_of(LAYER)]
    torch.library.opcheck(ops.tt_factors.default, (cores * 2, 2, "tt", 2, 12, 10))
    few = [core for k, core in enumerate(cores) if k != 2]
    torch.library.opcheck(ops.tt_factors.default, (few, 1, "tt", 2, 12, 10), {"head_mode": 2})
    left, right = torch.randn(12, 7), torch.randn(7, 10)
    x = torch.randn(6, 12, requires_grad=True)
    torch.library.opcheck(ops.tt_apply.default, (x, [left], [right], [None]))
    headless = (x, [left], [torch.randn(5, 5)], [torch.randn(10)], [cores[2]])
    torch.library.opcheck(ops.tt_apply.default, headless)
    torch.library.opcheck(ops.tt_rows.default, (torch.tensor([1, 2]), left, right, None))


def test_vmap_over_operators_on_factors():
    left, right = torch.randn(12, 7), torch.randn(7, 10)
    ids = torch.randint(0, 12, (4, 3))
    many = torch.vmap(lambda i: ops.tt_rows(i, left, right, None))(ids)
    torch.testing.assert_close(many, ops.tt_rows(ids, left, right, None))
    x = torch.randn(4, 3, 12)
    (each,) = torch.vmap(lambda rows: ops.tt_apply(rows, [left], [right], [None]))(x)
    torch.testing.assert_close(each, ops.tt_apply(x, [left], [right], [None])[0])
