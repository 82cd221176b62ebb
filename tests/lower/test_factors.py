"""Factors of many layers at once: values, gradients, and one node that acts as one a layer."""

import gc
import weakref
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx import TTSpec
from comera_fx.lower import chunk as chunk_module
from comera_fx.lower.chunk import Chains
from comera_fx.lower.factors import make_factors
from comera_fx.tt import random_cores, to_dense
from comera_fx.tt_module import TTModule

DEEP = TTSpec("tt", (3, 2, 2), (2, 2, 3), (1, 3, 4, 3, 4, 3, 1))
FLAT = TTSpec("tt", (6,), (5,), (1, 3, 1))
UNEVEN = TTSpec("tt", (2, 3), (2, 2, 2, 2), (1, 2, 4, 5, 3, 2, 1))
SPECS = [DEEP, FLAT, UNEVEN]

modes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def chains_of(spec, num_layers, *, filling=0, cut=0, **settings):
    width = spec.ranks[len(spec.in_modes)] + filling
    return Chains(spec, num_layers, spec.in_size - cut, spec.out_size - cut, width, **settings)


def draw(spec, num_layers, *, seed=0):
    """Cores of some layers, one layer after another."""
    generator = torch.Generator().manual_seed(seed)
    return [
        core.double().requires_grad_()
        for _ in range(num_layers)
        for core in random_cores(spec, 1.0, generator=generator)
    ]


def matrices(spec, cores):
    """The transposed weights that the cores are of."""
    num = spec.num_cores
    trains = [cores[first : first + num] for first in range(0, len(cores), num)]
    return [to_dense(train, spec).t() for train in trains]


def products(chains, given):
    count = chains.num_layers * chains.num_cores
    lefts, rights = make_factors(chains, given[:count], given[count:])
    return [left @ right for left, right in zip(lefts, rights, strict=True)]


@settings(deadline=None, derandomize=True, max_examples=30)
@given(modes, modes, st.integers(1, 3), st.data())
def test_the_factors_multiply_to_the_weight(in_modes, out_modes, num_layers, data):
    inner = len(in_modes) + len(out_modes) - 1
    ranks = data.draw(st.lists(st.integers(1, 3), min_size=inner, max_size=inner))
    spec = TTSpec("tt", in_modes, out_modes, (1, *ranks, 1))
    cores = draw(spec, num_layers)
    chains = chains_of(spec, num_layers, filling=data.draw(st.integers(0, 2)))
    lefts, rights = make_factors(chains, cores)
    assert {left.shape for left in lefts} == {(spec.in_size, chains.width)}
    assert {right.shape for right in rights} == {(chains.width, spec.out_size)}
    for left, right, matrix in zip(lefts, rights, matrices(spec, cores), strict=True):
        torch.testing.assert_close(left @ right, matrix)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("filling", "cut"), [(0, 0), (2, 1)])
def test_gradients(spec, filling, cut):
    chains, cores = chains_of(spec, 2, filling=filling, cut=cut), draw(spec, 2)
    torch.autograd.gradcheck(lambda *given: products(chains, given), cores, fast_mode=True)
    torch.autograd.gradgradcheck(lambda *given: products(chains, given), cores, fast_mode=True)


@pytest.mark.parametrize("spec", [DEEP, UNEVEN])
def test_without_its_first_core_the_right_factor_lacks_just_that(spec):
    cores, num_in = draw(spec, 2), len(spec.in_modes)
    chains = chains_of(spec, 2, without_head=True)
    heads = cores[num_in :: spec.num_cores]
    others = [core for core in cores if not any(core is head for head in heads)]

    def run(*others):
        lefts, rights = make_factors(chains, others)
        rows = [left @ head.flatten(1) for left, head in zip(lefts, heads, strict=True)]
        return [
            (row.reshape(-1, head.shape[2]) @ right).reshape(spec.in_size, spec.out_size)
            for row, head, right in zip(rows, heads, rights, strict=True)
        ]

    torch.testing.assert_close(run(*others), matrices(spec, cores))
    torch.autograd.gradcheck(run, others, fast_mode=True)


def with_rank_weights(spec, cores, weights, threshold):
    """The module that the cores and rank weights are of."""
    module = TTModule(
        spec, spec.in_size, spec.out_size, usual_std=1.0, device=None, dtype=torch.float64
    )
    module.attach_rank_weights(threshold)
    for k, core in enumerate(cores):
        module._parameters[f"core_{k}"] = core
    for k, weight in enumerate(weights, start=1):
        module._parameters[f"rank_weight_{k}"] = weight
    return module


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("filling", [0, 2])
def test_rank_weights_act_as_in_the_module(spec, filling):
    chains = chains_of(spec, 2, filling=filling, threshold=0.3)
    torch.manual_seed(0)
    cores, num = draw(spec, 2), spec.num_cores
    weights = [
        torch.rand(rank, dtype=torch.float64).requires_grad_()
        for _ in range(2)
        for rank in spec.ranks[1:-1]
    ]
    expected = [
        with_rank_weights(
            spec, cores[n * num : (n + 1) * num], weights[n * (num - 1) :][: num - 1], 0.3
        )
        .dense_weight()
        .t()
        for n in range(2)
    ]
    found = products(chains, [*cores, *weights])
    torch.testing.assert_close(found, expected)
    leaves = [*cores, *weights]
    for grads in (found, expected):
        assert len(grads) == 2
    got = torch.autograd.grad(sum(each.sin().sum() for each in found), leaves)
    wanted = torch.autograd.grad(sum(each.sin().sum() for each in expected), leaves)
    torch.testing.assert_close(got, wanted)
    torch.autograd.gradgradcheck(lambda *given: products(chains, given), leaves, fast_mode=True)


def test_layers_are_worked_on_in_chunks_that_fit_a_cache(monkeypatch):
    cores = draw(DEEP, 5)
    whole = products(chains_of(DEEP, 5), cores)
    grads = torch.autograd.grad(sum(each.sin().sum() for each in whole), cores)
    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 2 * DEEP.in_size * DEEP.ranks[3] * 4)
    chains = chains_of(DEEP, 5)
    assert chains.chunks == (range(2), range(2, 4), range(4, 5))
    assert chains.chunks_on("cuda") == (range(5),)
    parts = products(chains, cores)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(
        torch.autograd.grad(sum(each.sin().sum() for each in parts), cores), grads
    )


def test_a_layer_without_a_gradient_leaves_none_on_its_cores():
    cores = draw(DEEP, 3)
    found = products(chains_of(DEEP, 3), cores)
    (found[0].sum() + found[2].sum()).backward()
    num = DEEP.num_cores
    assert all(core.grad is None for core in cores[num : 2 * num])
    wanted = matrices(DEEP, cores)
    expected = torch.autograd.grad(
        wanted[0].sum() + wanted[2].sum(), cores[:num] + cores[2 * num :]
    )
    torch.testing.assert_close([core.grad for core in cores[:num] + cores[2 * num :]], [*expected])


def test_one_side_may_have_gradients_alone():
    cores = draw(DEEP, 2)
    lefts, rights = make_factors(chains_of(DEEP, 2), cores)
    rights[1].sum().backward()
    reached = [core.grad is not None for core in cores]
    assert reached == [False] * 6 + [False] * 3 + [True] * 3
    lefts[0].sum().backward()
    assert [core.grad is not None for core in cores] == [True] * 3 + [False] * 6 + [True] * 3


def test_layers_go_backward_one_by_one_without_keeping_the_graph():
    cores = draw(DEEP, 3)
    found = products(chains_of(DEEP, 3), cores)
    for each in found:
        each.sin().sum().backward()
    wanted = torch.autograd.grad(sum(each.sin().sum() for each in matrices(DEEP, cores)), cores)
    torch.testing.assert_close([core.grad for core in cores], [*wanted])


def test_a_layer_does_not_go_backward_twice_without_keeping_the_graph():
    cores = draw(DEEP, 2)
    lefts, _ = make_factors(chains_of(DEEP, 2), cores)
    lefts[0].sum().backward()
    lefts[1].sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        lefts[0].sum().backward()


def test_a_graph_that_is_kept_goes_backward_again():
    cores = draw(DEEP, 2)
    found = products(chains_of(DEEP, 2), cores)
    loss = sum(each.sin().sum() for each in found)
    once = torch.autograd.grad(loss, cores, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, cores), once)


def test_what_is_kept_goes_with_the_graph():
    cores = draw(DEEP, 2)
    lefts, _ = make_factors(chains_of(DEEP, 2), cores)
    node = lefts[0].grad_fn
    lefts[0].sum().backward()
    (kept, *_) = node.partial.kept  # for the layer that has not had its turn
    seen = weakref.ref(kept)
    del kept, lefts, node, _
    gc.collect()
    assert seen() is None


def test_a_full_backward_pass_keeps_nothing():
    cores = draw(DEEP, 2)
    lefts, rights = make_factors(chains_of(DEEP, 2), cores)
    node = lefts[0].grad_fn
    sum(factor.sum() for factor in (*lefts, *rights)).backward()
    assert node.partial.kept == ()


def test_a_core_changed_before_second_derivatives_is_an_error():
    cores = draw(DEEP, 2)
    found = products(chains_of(DEEP, 2), cores)
    with torch.no_grad():
        cores[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found[0].square().sum(), cores[0], create_graph=True)


def test_frozen_sides_take_no_part():
    cores = draw(DEEP, 2)
    for k, core in enumerate(cores):
        core.requires_grad_(k % 6 >= 3)
    lefts, rights = make_factors(chains_of(DEEP, 2), cores)
    assert not any(left.requires_grad for left in lefts)
    assert all(right.requires_grad for right in rights)
    sum(right.sum() for right in rights).backward()
    assert [core.grad is not None for core in cores] == [False, False, False, True, True, True] * 2


def test_without_gradients_there_is_no_graph():
    cores = draw(DEEP, 2)
    with torch.no_grad():
        lefts, rights = make_factors(chains_of(DEEP, 2), cores)
    assert not any(factor.requires_grad for factor in (*lefts, *rights))


def test_cast_factors_give_gradients_of_the_cores_dtype():
    cores = [core.detach().float().requires_grad_() for core in draw(DEEP, 2)]
    lefts, rights = make_factors(chains_of(DEEP, 2, dtype=torch.bfloat16), cores)
    assert {factor.dtype for factor in (*lefts, *rights)} == {torch.bfloat16}
    sum((left @ right).float().sum() for left, right in zip(lefts, rights, strict=True)).backward()
    assert {core.grad.dtype for core in cores} == {torch.float32}


def test_complex_cores():
    generator = torch.Generator().manual_seed(0)
    cores = [
        torch.randn(shape, dtype=torch.complex128, generator=generator).requires_grad_()
        for shape in DEEP.core_shapes
    ]
    chains = chains_of(DEEP, 1)
    torch.autograd.gradcheck(lambda *given: products(chains, given), cores, fast_mode=True)


def test_ranks_of_0_give_a_weight_of_zeros():
    spec = TTSpec("tt", (2, 3), (4,), (1, 0, 0, 1))
    cores = draw(spec, 2)
    for product in products(chains_of(spec, 2), cores):
        assert product.shape == (6, 4)
        assert not product.any()


def test_ragged_gradients_are_made_by_columns():
    spec = TTSpec("tt", (4, 6), (6, 4), (1, 4, 17, 4, 1))
    wide = TTSpec("tt", (20, 2), (2, 20), (1, 18, 3, 18, 1))
    for each in (spec, wide):
        cores = draw(each, 2)
        chains = chains_of(each, 2)
        found = torch.autograd.grad(sum(p.sin().sum() for p in products(chains, cores)), cores)
        dense = sum(matrix.sin().sum() for matrix in matrices(each, cores))
        torch.testing.assert_close(found, torch.autograd.grad(dense, cores))
        assert prod(each.in_modes) == each.in_size
