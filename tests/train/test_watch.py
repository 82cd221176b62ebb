"""What is said when a run goes wrong: once, to the caller's file, and again by ``diagnose()``."""

import inspect
import warnings

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, compact, param_groups
from comera_fx.train.watch import EXPLODED, FORGOTTEN_AFTER, NOTABLE, STUCK_AFTER, Watch

SPEC = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))
METHODS = ["comera", "proximal", "rounding"]


def make(**config):
    torch.manual_seed(1)
    model = nn.Sequential(TTLinear(SPEC, 32, 32), nn.Tanh(), TTLinear(SPEC, 32, 32))
    optimizer = torch.optim.SGD(param_groups(model, lr=1e-3), lr=1e-3)
    return model, RankAdapter(model, optimizer, RankConfig(prune_every=1, **config))


def steps(adapter, losses):
    """Steps of a loop whose losses are given; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in losses:
            adapter.loss(torch.tensor(float(loss)))
            adapter.step()
    return caught


def names_the_loop(warning, function=steps):
    """Whether a warning points into a function of this file: the loop that calls the adapter."""
    lines, first = inspect.getsourcelines(function)
    return warning.filename == __file__ and first <= warning.lineno < first + len(lines)


def look(watch, step, size, loss, *, awaits_cuts=False):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.look(step, size, loss, awaits_cuts=awaits_cuts)
    return caught


# ---- a size that does not move ----


def test_a_size_that_does_not_move_is_said_once():
    """Nobody pushes on the rank weights: the optimizer takes no step."""
    _, adapter = make(method="comera", target_ratio=0.5, early_steps=0)
    assert steps(adapter, [1.0] * (STUCK_AFTER - 1)) == []
    assert adapter.diagnose() == []
    (warning,) = steps(adapter, [1.0] * (3 * STUCK_AFTER))
    assert f"stood at {adapter.size:,} for {STUCK_AFTER} cuts" in str(warning.message)
    assert names_the_loop(warning)
    assert adapter.diagnose() == [str(warning.message)]


def test_it_counts_cuts_without_a_change_on_the_way_to_a_target():
    watch = Watch()
    for step in range(STUCK_AFTER - 1):
        assert look(watch, step, 100, 1.0, awaits_cuts=True) == []
    assert look(watch, 90, 99, 1.0, awaits_cuts=True) == []  # it moves
    for step in range(STUCK_AFTER - 1):
        assert look(watch, 100 + step, 99, 1.0, awaits_cuts=True) == []
    assert len(look(watch, 200, 99, 1.0, awaits_cuts=True)) == 1


def test_where_no_target_is_waited_for_nothing_is_said():
    watch = Watch()
    assert all(look(watch, step, 100, 1.0) == [] for step in range(3 * STUCK_AFTER))
    _, adapter = make(method="proximal", target_ratio=1.0)
    assert steps(adapter, [1.0] * (2 * STUCK_AFTER)) == []
    _, adapter = make(method="proximal", gamma=0.0, threshold=0.0)
    assert steps(adapter, [1.0] * (2 * STUCK_AFTER)) == []


def test_a_target_below_the_floors_does_not_move_either():
    with pytest.warns(UserWarning, match="out of reach") as caught:
        _, adapter = make(method="rounding", target_ratio=0.4, min_rank=9, shrink_steps=0)
    assert [names_the_loop(warning, make) for warning in caught] == [True]
    assert adapter.diagnose() == [str(caught[0].message)]
    (warning,) = steps(adapter, [1.0] * (2 * STUCK_AFTER))
    assert "Lower min_rank" in str(warning.message)
    assert names_the_loop(warning)
    assert adapter.diagnose() == [str(caught[0].message), str(warning.message)]


# ---- a loss that a cut has raised ----


@pytest.mark.parametrize("method", ["proximal", "rounding"])
def test_a_loss_that_explodes_after_a_cut_is_said_once(method):
    _, adapter = make(method=method, target_ratio=0.5, shrink_steps=0)
    assert steps(adapter, [1.0]) == []
    cut_at = 1
    assert adapter.size <= adapter.target_size
    (warning,) = steps(adapter, [9.0] * 8)
    assert f"since the cut of step {cut_at}" in str(warning.message)
    assert "from 1 to" in str(warning.message)
    assert names_the_loop(warning)
    assert adapter.diagnose() == [str(warning.message)]


def test_it_is_said_again_where_it_explodes_again():
    watch = Watch()
    assert look(watch, 1, 100, 1.0) == []
    assert look(watch, 2, 90, 1.0) == []
    assert len(look(watch, 3, 80, 2.0)) == 1
    assert look(watch, 4, 70, 2.0) == []
    assert len(look(watch, 5, 60, 4.0)) == 1
    assert "since the cut of step 4" in watch.notes[-1]
    assert len(watch.notes) == 2


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_loss_has_exploded_by_half_of_what_it_was(factor):
    watch = Watch()
    look(watch, 1, 100, 1.0)
    look(watch, 2, 90, 1.0)
    assert len(look(watch, 3, 90, 1.0 + factor * EXPLODED)) == (factor > 1)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_next_to_nothing_may_double(factor):
    watch = Watch()
    look(watch, 1, 100, 1.0)
    look(watch, 2, 90, 1e-4)
    assert len(look(watch, 3, 90, 1e-4 + factor * NOTABLE)) == (factor > 1)


def test_losses_below_zero_explode_by_their_size():
    watch = Watch()
    look(watch, 1, 100, -2.0)
    look(watch, 2, 90, -2.0)
    assert look(watch, 3, 90, -2.0 + 0.99) == []
    assert len(look(watch, 4, 90, -2.0 + 1.01)) == 1


def test_a_loss_that_is_not_known_is_passed_over():
    watch = Watch()
    for step, loss in enumerate([None, 1.0, None, 1.2, None, 1.0]):
        assert look(watch, step, 100 - step, loss) == []
    assert len(look(watch, 9, 90, 2.0)) == 1


def test_a_loss_that_falls_says_nothing():
    _, adapter = make(method="rounding", target_ratio=0.5, shrink_steps=10)
    assert steps(adapter, [0.9**step for step in range(30)]) == []
    assert adapter.diagnose() == []


# ---- layers that die ----


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_dies_is_said_once(method):
    model, adapter = make(method=method, patience=1, gamma=0.0, balance=False)
    with torch.no_grad():
        if method == "comera":
            model[2].rank_weights[1].zero_()
        else:
            model[2].cores[1].zero_()
    (warning,) = steps(adapter, [1.0] * 5)
    assert "bond of layer '2' have died" in str(warning.message)
    assert ("lower gamma" in str(warning.message)) == (method != "rounding")
    assert ("rank weights" in str(warning.message)) == (method == "comera")
    assert ("lower threshold" in str(warning.message)) == (method == "rounding")
    assert names_the_loop(warning)
    assert adapter.diagnose() == ["layer '2' has lost all its ranks and is its bias alone."]
    assert adapter.ranks["2"] == [0, 0, 0]


def test_a_layer_that_dies_in_the_balanced_form_is_said_to_the_caller():
    model, adapter = make(method="comera", patience=1, gamma=0.0)
    with torch.no_grad():
        model[2].cores[1].zero_()
    (warning,) = steps(adapter, [1.0] * 5)
    assert "bond of layer '2' have died" in str(warning.message)
    assert names_the_loop(warning)


@pytest.mark.parametrize("in_adaptation", [True, False])
def test_a_layer_that_compact_empties_is_said_to_the_caller(in_adaptation):
    model, adapter = make(method="rounding")
    with torch.no_grad():
        model[0].cores[0].zero_()
    optimizers, call = adapter.optimizers, adapter.compact
    if not in_adaptation:
        del adapter, call
    with pytest.warns(UserWarning, match="bond of layer '0' have died") as caught:
        call(0.1) if in_adaptation else compact(model, 0.1, optimizers)
    assert [warning.filename for warning in caught] == [__file__]
    assert str(caught[0].message).endswith("is its bias alone. Its weight was zero.")


# ---- all of it, and resume ----


def test_all_is_told_in_the_order_it_was_said():
    model, adapter = make(method="rounding", target_ratio=0.5, shrink_steps=0, patience=1)
    assert steps(adapter, [1.0]) == []
    (exploded,) = steps(adapter, [9.0] * 3)
    with torch.no_grad():
        model[0].cores[0].zero_()
    (died,) = steps(adapter, [3.0])
    assert "have died" in str(died.message)
    assert adapter.diagnose() == [
        str(exploded.message),
        "layer '0' has lost all its ranks and is its bias alone.",
    ]


def test_skipped_steps_are_told_by_their_number():
    _, adapter = make(method="rounding")
    assert len(steps(adapter, [1.0, *[float("nan")] * 12, 1.0])) == 2
    told = ["a loss or a gradient that was not finite has had 12 steps skipped."]
    assert adapter.diagnose() == told
    _, other = make(method="rounding")
    other.load_state_dict(adapter.state_dict())
    assert other.diagnose() == told


@pytest.mark.parametrize("call", ["loss", "step"])
def test_a_call_that_is_forgotten_is_told(call):
    _, adapter = make(method="rounding")
    forget = adapter.step if call == "loss" else lambda: adapter.loss(torch.tensor(1.0))
    for _ in range(FORGOTTEN_AFTER - 1):
        forget()
    with pytest.warns(UserWarning, match="without RankAdapter") as caught:
        forget()
    assert adapter.diagnose() == [str(warning.message) for warning in caught]
    assert f"without RankAdapter.{call}" in adapter.diagnose()[0]


def test_what_was_said_is_kept_over_a_resume_and_not_said_again():
    model, adapter = make(method="rounding", target_ratio=0.5, shrink_steps=0)
    steps(adapter, [1.0, 9.0, 9.0])
    twin, other = make(method="rounding", target_ratio=0.5, shrink_steps=0)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(adapter.state_dict())
    assert other.diagnose() == adapter.diagnose() != []
    assert steps(other, [9.0]) == steps(adapter, [9.0]) == []
    watch = Watch()
    for step in range(STUCK_AFTER - 1):
        look(watch, step, 100, 1.0, awaits_cuts=True)
    resumed = Watch()
    resumed.load_state_dict(watch.state_dict())
    assert len(look(resumed, 99, 100, 1.0, awaits_cuts=True)) == 1
