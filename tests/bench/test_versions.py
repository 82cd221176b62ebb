import importlib.util

import pytest
import torch

from bench.steps import Version, check, make_data
from bench.versions import (
    MAKERS,
    NEEDS,
    available,
    dense_weight,
    draw_cores,
    factors,
    make,
    optimised,
    paired_spec,
)
from bench.workloads import HUGE, SQUARE, WIDE
from comera_fx import TTLinear
from comera_fx.tt import to_dense
from tests.bench.sizes import TINY_SQUARE, TINY_WIDE

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def needs_package(name):
    package = NEEDS.get(name, "torch")
    missing = importlib.util.find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{package} is missing"))


@pytest.mark.parametrize("spec", [TINY_SQUARE, TINY_WIDE], ids=["square", "wide"])
@pytest.mark.parametrize("name", [needs_package(name) for name in MAKERS])
def test_a_version_agrees_with_dense(name, spec):
    cores = draw_cores(spec)
    layers = {key: make(key, spec, cores) for key in ("dense", name)}
    versions = {key: Version(layer, [layer]) for key, layer in layers.items()}
    data = make_data(8, spec.in_size, [spec.out_size], trains=True)
    check(versions, lambda layers: layers[0], data)
    if name != "tltorch":
        torch.testing.assert_close(dense_weight(layers[name]), to_dense(cores, spec), **TOLERANCE)


@pytest.mark.parametrize("spec", [SQUARE, WIDE, HUGE], ids=["square", "wide", "huge"])
def test_factors_have_the_middle_rank(spec):
    left, right = factors(draw_cores(spec), len(spec.in_modes))
    rank = spec.ranks[len(spec.in_modes)]
    assert left.shape == (spec.in_size, rank)
    assert right.shape == (rank, spec.out_size)


def test_the_large_layer_has_ranks_that_its_bonds_can_use():
    assert HUGE.ranks == (1, 8, 64, 100, 100, 100, 64, 8, 1)


@pytest.mark.parametrize("spec", [SQUARE, WIDE, HUGE], ids=["square", "wide", "huge"])
def test_paired_modes_hold_about_as_many_numbers(spec):
    assert 0.9 * spec.num_params < paired_spec(spec).num_params <= spec.num_params


def test_the_einsum_names_every_mode_and_bond_once():
    layer = make("einsum_in_order", TINY_WIDE, draw_cores(TINY_WIDE))
    assert layer.equation == "bcde,ci,idj,jek,kfl,lgm,mh->bfgh"


def test_optimised_models_take_the_cores():
    cores = [draw_cores(TINY_SQUARE, seed) for seed in range(2)]
    dense = torch.nn.Sequential(*(make("dense", TINY_SQUARE, numbers) for numbers in cores))
    x = torch.randn(8, 16)
    model, layers = optimised(dense, x, TINY_SQUARE, cores)
    assert [type(layer) for layer in model] == [TTLinear, TTLinear]
    assert list(model) == layers
    torch.testing.assert_close(model(x), dense(x), **TOLERANCE)


def test_what_is_not_installed_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert available(["dense", "tltorch", "ours"]) == ["dense", "ours"]
    said = "tltorch is left out: tltorch is not installed (pip install -e '.[bench]')\n"
    assert capsys.readouterr().out == said


def test_what_is_installed_is_kept_without_a_word(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert available(list(MAKERS)) == list(MAKERS)
    assert capsys.readouterr().out == ""
