"""The pairs agree, and the ratio is that of the two times in the row."""

import pytest
import torch

from bench import products


def test_rows():
    rows = products.measure(8, repeats=2)
    assert len(rows) == len(products.ways(8))
    for row in rows:
        assert row["tokens"] == 8
        ratio = row["first_ms"] / row["second_ms"]
        assert row["first_over_second"] == pytest.approx(ratio, rel=0.05)


def test_ways_that_differ_are_refused(monkeypatch):
    pair = ("ones", lambda: torch.ones(2, 2), "zeros", lambda: torch.zeros(2, 2))
    monkeypatch.setattr(products, "ways", lambda num_tokens: [pair])
    with pytest.raises(AssertionError):
        products.measure(8, repeats=1)
