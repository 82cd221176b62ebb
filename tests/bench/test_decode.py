import pytest
import torch

from bench.decode import check, measure, models
from bench.models.decoder import Cache
from bench.workloads import Decoding

SIZES = Decoding(
    width=32, num_layers=2, num_heads=4, vocabulary=16, context=16, num_new=6, max_rank=4
)


@pytest.fixture
def pair():
    return models(SIZES)


def test_a_row_holds_both_and_the_ratio_of_their_medians():
    row = measure(SIZES, repeats=2)
    ratio = row["dense_ms_per_token"] / row["ours_ms_per_token"]
    assert row["dense_over_ours"] == pytest.approx(ratio, rel=0.02, abs=2e-3)
    assert row["ours_params"] < row["dense_params"]
    assert (row["new_tokens"], row["repeats"]) == (6, 2)


def test_generation_is_greedy_and_the_same_for_both(pair):
    dense, optimised = pair
    prompt = torch.tensor([[3, 1], [0, 7]])
    ids = prompt
    with torch.no_grad():
        for _ in range(5):
            ids = torch.cat([ids, dense(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(dense.generate(prompt, 5), ids)
    assert torch.equal(optimised.generate(prompt, 5), ids)


def test_no_position_sees_a_later_one(pair):
    dense, _ = pair
    ids = torch.arange(12).unsqueeze(0)
    changed = ids.clone()
    changed[:, 6:] = 0
    torch.testing.assert_close(dense(ids)[:, :6], dense(changed)[:, :6])
    assert not torch.allclose(dense(ids)[:, 6:], dense(changed)[:, 6:])


def test_two_tokens_after_the_prompt_are_refused(pair):
    dense, _ = pair
    cache = Cache(SIZES.num_layers)
    dense(torch.zeros(1, 2, dtype=torch.long), cache)
    with pytest.raises(AssertionError, match="one at a time"):
        dense(torch.zeros(1, 2, dtype=torch.long), cache)


def test_other_weights_are_refused(pair):
    dense, optimised = pair
    with torch.no_grad():
        optimised.blocks[1].up.core_0.mul_(1.1)
    with pytest.raises(AssertionError, match="optimised at once differs"):
        check(dense, optimised, torch.zeros(1, 4, dtype=torch.long))


def test_a_cache_that_is_not_read_is_refused(pair, monkeypatch):
    monkeypatch.setattr(Cache, "extend", lambda self, layer, key, value: (key, value))
    dense, optimised = pair
    with pytest.raises(AssertionError, match="dense with a cache differs"):
        check(dense, optimised, torch.arange(4).unsqueeze(0))
