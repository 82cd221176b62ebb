"""Runs that go on from saved states: the same numbers, the saved target, no ranks of others."""

import io

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTLinear
from comera_fx.train import RankAdapter, param_groups
from tests.train.students import STUDENT, make, saved, train


@pytest.mark.parametrize("stop", [13, 35, 47, 120])  # early, late, after a cut, target met
def test_a_resumed_run_gives_the_same_numbers(stop):
    config = {"target_ratio": 0.5, "early_steps": 20, "rho": 0.5}
    model, optimizer, adapter = make(**config)
    train(model, optimizer, adapter, range(stop))
    stored = io.BytesIO()
    state = [part.state_dict() for part in (model, optimizer, adapter)]
    torch.save(state, stored)
    straight = train(model, optimizer, adapter, range(stop, stop + 60))

    model2, optimizer2, adapter2 = make(**config)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    for part, values in zip((model2, optimizer2, adapter2), loaded, strict=True):
        part.load_state_dict(values)
    assert train(model2, optimizer2, adapter2, range(stop, stop + 60)) == straight
    assert adapter2.history == adapter.history
    for a, b in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["comera", "proximal", "rounding"])
@pytest.mark.parametrize("stop", [4, 23])  # before the first cut, on the way
@pytest.mark.parametrize(
    ("other", "told"),
    [({"target_ratio": 0.9}, "the config 1,900"), ({}, "the config none")],
    ids=["another", "none"],
)
def test_a_resumed_run_has_the_target_that_was_saved_and_says_so(method, stop, other, told):
    """Whatever the ranks and the target that the resumed one was made with."""
    config = {"method": method, "rank_lr": 0.1, "prune_every": 2}
    model, optimizer, adapter = make(target_ratio=0.4, **config)
    train(model, optimizer, adapter, range(stop))
    stored = saved([part.state_dict() for part in (model, optimizer, adapter)])
    train(model, optimizer, adapter, range(stop, 160))
    assert adapter.size <= adapter.target_size

    parts = make(**other, **config)
    with pytest.warns(UserWarning, match=f"has a target of {adapter.target_size:,}.*{told}"):
        load(parts, stored)
    train(*parts, range(stop, 160))
    assert parts[2].target_size == adapter.target_size
    assert parts[2].ranks == adapter.ranks
    assert parts[2].history == adapter.history


def load(parts, stored):
    states = torch.load(io.BytesIO(stored), weights_only=True)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)


def test_a_saved_target_that_the_config_lacks_is_said_at_the_users_line():
    model, optimizer, adapter = make(target_ratio=0.8)
    stored = saved([part.state_dict() for part in make()])
    with pytest.warns(UserWarning, match=r"has no target.*config 1,689: it goes on") as caught:
        load((model, optimizer, adapter), stored)
    assert [warning.filename for warning in caught] == [__file__]
    assert adapter.target_size is None


@pytest.mark.parametrize("target", [{"target_ratio": 0.3}, {"target_bytes": 3333}, {}])
def test_the_same_config_on_a_model_that_is_smaller_already_has_the_same_target(target):
    model, optimizer, adapter = make(method="rounding", **target)
    train(model, optimizer, adapter, range(60))
    other = nn.Sequential(TTLinear(STUDENT, 32, 32), nn.Tanh(), TTLinear(STUDENT, 32, 32))
    other.load_state_dict(model.state_dict())
    own = torch.optim.AdamW(param_groups(other, lr=3e-3))
    resumed = RankAdapter(other, own, adapter.config)
    assert resumed.target_size != adapter.target_size or "target_ratio" not in target
    resumed.load_state_dict(adapter.state_dict())
    resumed.load_state_dict(adapter.state_dict())
    assert resumed.target_size == adapter.target_size


def test_loading_an_earlier_state_goes_back():
    model, optimizer, adapter = make(target_ratio=0.5, early_steps=5, rho=0.5)
    early = [part.state_dict() for part in (model, optimizer, adapter)]
    early = torch.load(io.BytesIO(saved(early)), weights_only=True)
    train(model, optimizer, adapter, range(120))
    assert adapter.stage == "late"
    for part, values in zip((model, optimizer, adapter), early, strict=True):
        part.load_state_dict(values)
    assert adapter.stage == "early"
    assert all(weight.requires_grad for weight in model[0].rank_weights)
    assert adapter.size == adapter.initial_size


def test_a_resumed_model_in_a_plain_optimizer_gets_its_own_group():
    saved = make()[0].state_dict()
    model = nn.Sequential(TTLinear(STUDENT, 32, 32), nn.Tanh(), TTLinear(STUDENT, 32, 32))
    model.load_state_dict(saved)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    RankAdapter(model, optimizer, RankConfig(method="comera"))
    ranks = [w for layer in (model[0], model[2]) for w in layer.rank_weights]
    assert [id(w) for w in optimizer.param_groups[1]["params"]] == [id(w) for w in ranks]
    assert not {id(p) for p in optimizer.param_groups[0]["params"]} & {id(w) for w in ranks}


def test_ranks_changed_from_outside_are_noticed():
    model, optimizer, adapter = make(target_ratio=0.5, early_steps=5, rho=0.5)
    best = torch.load(io.BytesIO(saved(model.state_dict())), weights_only=True)
    train(model, optimizer, adapter, range(120))
    model.load_state_dict(best)
    with pytest.raises(RankError, match="changed outside the adapter"):
        adapter.loss(torch.tensor(1.0))


# ---- states that are damaged ----

PACE = {
    "comera": {"rho": 0.5, "early_steps": 5},
    "proximal": {"shrink_steps": 40, "regrow": 0.1},
    "rounding": {"shrink_steps": 40},
}
PLACES = [
    ("history",),
    ("stages",),
    ("method_state",),
    ("finite", "in_a_row"),
    ("watch", "told"),
    ("stages", "best"),
    ("method_state", "met"),
    ("method_state", "deaths"),
    ("method_state", "deaths", "seen"),
]


def without(state, place):
    """The state without an entry, or with a number in place of a part."""
    outer, name = (state, place[0]) if len(place) == 1 else (state[place[0]], place[1])
    if len(place) == 3:
        outer, name = outer[name], place[2]
    if name in ("stages", "method_state"):
        return {**state, name: 3}
    del outer[name]
    return state


@pytest.mark.parametrize("place", PLACES, ids=".".join)
@pytest.mark.parametrize("method", PACE)
def test_a_damaged_state_is_refused_and_changes_nothing(method, place):
    settings = {"method": method, "prune_every": 5, **PACE[method]}
    _, _, adapter = make(target_ratio=0.4, **settings)
    _, _, other = make(target_ratio=0.8, **settings)
    before = other.state_dict()
    with pytest.raises(RankError) as caught:
        other.load_state_dict(without(adapter.state_dict(), place))
    assert str(caught.value) == (
        "the adapter's state is incomplete\n"
        f"  got:      no {'.'.join(place)}\n"
        "  expected: what RankAdapter.state_dict returned\n"
        "  mend:     load the checkpoint's adapter state, not the model's or the optimizer's"
    )
    assert other.state_dict() == before
    assert other.target_size != adapter.target_size


@pytest.mark.parametrize("wrong", [None, [], "state"])
def test_what_is_no_state_is_refused(wrong):
    _, _, adapter = make()
    with pytest.raises(RankError, match=f"incomplete\n  got:      a {type(wrong).__name__}\n"):
        adapter.load_state_dict(wrong)


def test_a_state_and_an_adapter_share_nothing():
    model, optimizer, adapter = make(method="rounding", target_ratio=0.5, **PACE["rounding"])
    train(model, optimizer, adapter, range(30))
    state = adapter.state_dict()
    kept = torch.load(io.BytesIO(saved(state)), weights_only=True)
    state["history"][-1]["ranks"]["0"][0] = 99
    assert adapter.state_dict() == kept
    adapter.load_state_dict(state | {"history": kept["history"]})
    adapter.history[-1]["ranks"]["0"][0] = 77
    assert kept["history"] == torch.load(io.BytesIO(saved(kept)), weights_only=True)["history"]
    assert kept["history"][-1]["ranks"]["0"][0] != 77
