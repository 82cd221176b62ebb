"""The balanced form: the same weight, with singular directions for bond indices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera_fx import tt
from comera_fx.balance import balanced_bonds, balanced_cores
from comera_fx.spec import TTSpec


def random_train(modes, ranks, seed=0):
    half = len(modes) // 2
    spec = TTSpec("tt", tuple(modes[:half]), tuple(modes[half:]), (1, *ranks, 1))
    generator = torch.Generator().manual_seed(seed)
    return tt.random_cores(spec, 0.3, generator=generator, dtype=torch.float64), spec


def turned(cores, bonds):
    new = []
    for k, core in enumerate(cores):
        if k > 0:
            core = torch.tensordot(bonds[k - 1].out_of, core, dims=1)
        if k < len(cores) - 1:
            core = torch.tensordot(core, bonds[k].into, dims=1)
        new.append(core)
    return new


def unfolding(weight_OI, spec, bond):
    """The weight as a matrix: modes left of the bond against those right of it."""
    tensor = weight_OI.T.reshape(*spec.in_modes, *spec.out_modes)
    return tensor.flatten(bond).flatten(0, bond - 1)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    modes=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    ranks=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    seed=st.integers(0, 3),
)
def test_the_weight_stays_and_the_values_are_singular_values(modes, ranks, seed):
    cores, spec = random_train(modes, ranks, seed)
    weight = tt.to_dense(cores, spec)
    bonds = balanced_bonds(cores)
    new = turned(cores, bonds)
    inner = tuple(len(bond.values) for bond in bonds)
    same = TTSpec("tt", spec.in_modes, spec.out_modes, (1, *inner, 1))
    torch.testing.assert_close(tt.to_dense(new, same), weight)
    for k, bond in enumerate(bonds, start=1):
        exact = torch.linalg.svdvals(unfolding(weight, spec, k))
        torch.testing.assert_close(bond.values, exact[: len(bond.values)])
        assert (exact[len(bond.values) :] < 1e-12).all()
        torch.testing.assert_close(
            bond.out_of @ bond.into, torch.eye(len(bond.values), dtype=torch.float64)
        )


def test_either_side_of_a_bond_has_the_singular_values_for_gram_matrix():
    cores, _ = random_train((3, 4, 4, 3), (3, 5, 3))
    new = turned(cores, balanced_bonds(cores))
    values = [bond.values for bond in balanced_bonds(new)]
    left = new[0].flatten(0, -2)
    torch.testing.assert_close(left.T @ left, values[0].diag())
    right = torch.tensordot(new[2], new[3], dims=1).flatten(1)
    torch.testing.assert_close(right @ right.T, values[1].diag())


def test_balanced_cores_keep_shapes_dtypes_and_what_a_bond_has_too_much():
    cores, spec = random_train((3, 4, 4, 3), (3, 5, 7))  # 7: more than the 3 that the end can use
    new = balanced_cores([core.float() for core in cores])
    assert [core.shape for core in new] == [core.shape for core in cores]
    assert {core.dtype for core in new} == {torch.float32}
    torch.testing.assert_close(tt.to_dense(new, spec), tt.to_dense(cores, spec).float())
    left = new[0].flatten(0, -2)
    values = torch.linalg.svdvals(unfolding(tt.to_dense(cores, spec), spec, 1)).float()
    torch.testing.assert_close(left.T @ left, values.diag(), rtol=1e-4, atol=1e-5)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(kept=st.lists(st.integers(1, 6), min_size=3, max_size=3), seed=st.integers(0, 3))
def test_cutting_all_bonds_at_once_loses_no_more_than_the_dropped_values(kept, seed):
    cores, spec = random_train((4, 5, 5, 4), (4, 6, 4), seed)
    weight = tt.to_dense(cores, spec)
    bonds = balanced_bonds(cores)
    small = [bond.first(n) for bond, n in zip(bonds, kept, strict=True)]
    inner = tuple(len(bond.values) for bond in small)
    rounded = TTSpec("tt", spec.in_modes, spec.out_modes, (1, *inner, 1))
    lost = (tt.to_dense(turned(cores, small), rounded) - weight).square().sum()
    dropped = [bond.values[len(few.values) :] for bond, few in zip(bonds, small, strict=True)]
    bound = sum(values.square().sum() for values in dropped)
    assert lost <= bound + 1e-12
    assert lost >= max(values.square().sum() for values in dropped) - 1e-12


def test_directions_that_hold_nothing_are_left_out():
    cores, _ = random_train((3, 4, 4, 3), (3, 5, 3))
    cores[1][..., 2:] = 0.0
    cores[2][1] = cores[2][0]  # two indices that say the same
    assert [len(bond.values) for bond in balanced_bonds(cores)] == [3, 1, 3]


def test_a_weight_of_zeros_has_no_directions():
    cores, _ = random_train((3, 4, 4, 3), (3, 5, 3))
    cores[0].zero_()
    assert [len(bond.values) for bond in balanced_bonds(cores)] == [0, 0, 0]


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_does_not_matter(factor):
    cores, _ = random_train((3, 4, 4, 3), (3, 5, 3))
    bonds = balanced_bonds([core * factor for core in cores[:1]] + cores[1:])
    for found, wanted in zip(bonds, balanced_bonds(cores), strict=True):
        torch.testing.assert_close(found.values / factor, wanted.values)


def test_scaled_directions_carry_so_much_more():
    cores, spec = random_train((3, 4, 4, 3), (3, 5, 3))
    bonds = balanced_bonds(cores)
    factors = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    changed = [bonds[0].scaled(factors), *bonds[1:]]
    torch.testing.assert_close(changed[0].out_of @ changed[0].into, factors.diag())
    new = turned(cores, changed)
    torch.testing.assert_close(balanced_bonds(new)[0].values, bonds[0].values * factors)
    same = TTSpec("tt", spec.in_modes, spec.out_modes, (1, 3, 5, 3, 1))
    assert not torch.allclose(tt.to_dense(new, same), tt.to_dense(cores, spec))
