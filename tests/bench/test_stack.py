import pytest

from bench.stack import SHOWN, measure
from tests.bench.sizes import tiny


def test_a_row_holds_all_versions_and_ratios_of_their_medians():
    row = measure(tiny(), depth=3, repeats=2)
    assert set(SHOWN) <= set(row)
    assert row["depth"] == 3
    shared = row["ours_shared_ms"]
    assert row["shared_over_ours"] == pytest.approx(shared / row["ours_ms"], rel=0.02, abs=2e-3)
    assert row["shared_over_low_rank"] == pytest.approx(
        shared / row["low_rank_ms"], rel=0.02, abs=2e-3
    )
    assert row["dense_over_shared"] == pytest.approx(row["dense_ms"] / shared, rel=0.02, abs=2e-3)
