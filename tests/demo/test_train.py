import math
from dataclasses import replace

import pytest
import torch

from comera_fx.demo.data import load_corpus
from comera_fx.demo.train import HELD_UP, Race, Side, layer_ranks, tt_params
from comera_fx.errors import ConfigError


def run(race: Race, steps: int | None = None) -> Race:
    """Advance a race by pairs of steps, or to its end."""
    while race.phase != "done" if steps is None else len(race.dense.losses) < steps:
        race.advance()
    return race


@pytest.fixture(scope="module")
def finished(tiny, corpus) -> Race:
    return run(Race(tiny, corpus))


def test_both_sides_start_alike_where_nothing_is_compressed(tiny, corpus):
    race = Race(tiny, corpus)
    dense = dict(race.dense.model.named_parameters())
    same = [name for name, p in race.optimised.model.named_parameters() if name in dense]
    assert "token_embedding.weight" in same
    assert "head.weight" in same
    assert "blocks.0.qkv.weight" not in same
    for name in same:
        optimised = race.optimised.model.get_parameter(name)
        assert torch.equal(optimised, dense[name])
        assert optimised is not dense[name]


def test_the_seed_decides_the_weights_and_leaves_the_generator_alone(tiny, corpus):
    state = torch.get_rng_state()
    races = [Race(replace(tiny, seed=seed), corpus) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    heads = [race.dense.model.get_parameter("head.weight") for race in races]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_finished_race_has_equal_steps_then_equal_time(finished, tiny):
    dense, optimised = finished.dense, finished.optimised
    assert len(dense.losses) == len(dense.step_seconds) == tiny.steps
    assert len(optimised.losses) == len(optimised.step_seconds) >= tiny.steps
    if len(optimised.losses) > tiny.steps:
        assert optimised.seconds <= 1.5 * dense.seconds
    assert set(finished.held_out) == {
        "dense",
        "optimised, equal steps",
        "optimised, equal time",
    }


def test_both_sides_learn(finished):
    for side in (finished.dense, finished.optimised):
        assert sum(side.losses[-5:]) < sum(side.losses[:5]) - 1
    assert all(0 < loss < math.log(256) for loss in finished.held_out.values())


def test_ranks_shrink_and_their_history_is_kept(finished, tiny):
    model = finished.optimised.model
    assert finished.sizes[-1] == tt_params(model) < finished.sizes[0]
    assert len(finished.sizes) == len(finished.optimised.losses) + 1
    steps = [step for step, _ in finished.ranks]
    assert steps == sorted(steps)
    assert finished.ranks[-1][1] == layer_ranks(model) != finished.ranks[0][1]
    assert max(max(ranks) for ranks in finished.ranks[0][1].values()) <= tiny.rank


@pytest.mark.parametrize("stop_after", [1, 9, 20])
def test_a_resumed_race_gives_the_numbers_of_one_that_was_not_stopped(
    tiny, corpus, finished, stop_after, tmp_path
):
    path = tmp_path / "race.pt"
    torch.save(run(Race(tiny, corpus), stop_after).state_dict(), path)
    resumed = Race(tiny, corpus)
    resumed.load_state_dict(torch.load(path, weights_only=True))
    run(resumed, tiny.steps).advance()
    for name in ("dense", "optimised, equal steps"):
        assert resumed.held_out[name] == finished.held_out[name]
    assert resumed.dense.losses == finished.dense.losses
    assert resumed.optimised.losses == finished.optimised.losses[: tiny.steps]
    assert resumed.sizes == finished.sizes[: tiny.steps + 1]
    assert resumed.ranks == [entry for entry in finished.ranks if entry[0] <= tiny.steps]


def test_a_race_saved_at_the_end_is_at_the_end_when_resumed(tiny, corpus, finished):
    resumed = Race(tiny, corpus)
    resumed.load_state_dict(finished.state_dict())
    assert resumed.phase == "done"
    assert resumed.held_out == finished.held_out
    assert layer_ranks(resumed.optimised.model) == layer_ranks(finished.optimised.model)


def test_a_step_that_took_far_too_long_counts_for_a_few_medians():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = Side(model, optimizer, 1.0, step_seconds=[1.0] * 9 + [100.0])
    assert side.counted_seconds == [1.0] * 9 + [HELD_UP]
    assert side.seconds == 9 + HELD_UP


def test_other_text_is_not_resumed_on(tiny, corpus):
    state = Race(tiny, corpus).state_dict()
    other = load_corpus(replace(tiny, max_files=30))
    with pytest.raises(ConfigError, match="the run to resume was trained on other text"):
        Race(tiny, other).load_state_dict(state)


def test_a_device_that_is_not_there_is_an_error(tiny, corpus):
    with pytest.raises(ConfigError) as caught:
        Race(replace(tiny, device="abacus"), corpus)
    assert str(caught.value) == (
        "the device to train on is not there\n"
        "  got:      abacus\n"
        "  expected: cpu, or cuda where PyTorch finds a GPU\n"
        "  mend:     use --device cpu"
    )
