import pytest
import torch

from bench.share import SHOWN, Projections, measure
from bench.versions import draw_cores, optimised
from comera_fx import TTLinear
from tests.bench.sizes import TINY_SQUARE, TINY_WIDE, tiny


@pytest.mark.parametrize("spec", [TINY_SQUARE, TINY_WIDE], ids=["square", "wide"])
def test_a_row_holds_all_versions_and_ratios_of_their_medians(spec):
    row = measure(tiny(spec), repeats=2)
    assert set(SHOWN) <= set(row)
    shared = row["ours_shared_ms"]
    assert row["shared_over_ours"] == pytest.approx(shared / row["ours_ms"], rel=0.02, abs=2e-3)
    assert row["shared_over_low_rank"] == pytest.approx(
        shared / row["low_rank_ms"], rel=0.02, abs=2e-3
    )


def test_the_projections_are_tt_layers_under_their_names():
    dense = Projections(*(torch.nn.Linear(16, 16, bias=False) for _ in range(3)))
    cores = [draw_cores(TINY_SQUARE, seed) for seed in range(3)]
    model, layers = optimised(dense, torch.randn(8, 16), TINY_SQUARE, cores)
    assert layers == [model.q, model.k, model.v]
    assert all(isinstance(layer, TTLinear) for layer in layers)
