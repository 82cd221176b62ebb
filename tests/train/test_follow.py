"""``follow``: averages of a model's weights are cut as the model is, and stay averages."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups

SPEC = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))
METHODS = ["comera", "proximal", "rounding"]
DECAY = 0.9
AVERAGES = {"ema": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}, "swa": {}}


class Run:
    """A loop with an average of the model, which follows it.

    Args:
        method: Of the adapter.
        average: A name in ``AVERAGES``.
        settings: Of ``RankConfig``.
    """

    def __init__(self, method, average="ema", **settings):
        torch.manual_seed(1)
        layers = [TTLinear(SPEC, 32, 32, dtype=torch.float64) for _ in range(2)]
        self.model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        groups = param_groups(self.model, lr=3e-3, rank_lr=0.1, rest_lr=1.5e-2)
        self.optimizer = torch.optim.AdamW(groups)
        config = {"target_ratio": 0.5, "prune_every": 5, **settings}
        if config["target_ratio"] is not None:
            pace = {"early_steps": 5} | ({} if method == "comera" else {"shrink_steps": 30})
            config = {**pace, **config}
        self.adapter = RankAdapter(self.model, self.optimizer, RankConfig(method=method, **config))
        self.average = AveragedModel(self.model, **AVERAGES[average])
        self.adapter.follow(self.average)
        self.step = 0

    def batch(self):
        draws = torch.Generator().manual_seed(self.step)
        x = torch.randn(64, 32, generator=draws, dtype=torch.float64)
        return x, torch.tanh(x.roll(1, 1))

    def train(self, steps, after=None):
        for _ in range(steps):
            x, y = self.batch()
            self.optimizer.zero_grad()
            self.adapter.loss(nn.functional.mse_loss(self.model(x), y)).backward()
            self.optimizer.step()
            self.adapter.step()
            self.average.update_parameters(self.model)
            self.step += 1
            if after:
                after()
        return self


def weighted(average, count):
    """The share that each of ``count`` models has in an average."""
    if average == "swa":
        return [1 / count] * count
    shares = [(1 - DECAY) * DECAY ** (count - 1 - k) for k in range(count)]
    return [DECAY ** (count - 1), *shares[1:]]


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("method", METHODS)
def test_an_average_is_that_of_all_models_cut_alike(method, average):
    """Every past model is kept, and follows too: the average is the mean of their parameters."""
    run, past = Run(method, average), []

    def keep():
        past.append(copy.deepcopy(run.model))
        run.adapter.follow(past[-1])

    run.train(45, keep)
    assert run.adapter.size < run.adapter.initial_size
    shares = weighted(average, len(past))
    assert sum(shares) == pytest.approx(1.0)
    every = [dict(model.named_parameters()) for model in past]
    for name, parameter in run.average.module.named_parameters():
        mean = sum(share * own[name] for share, own in zip(shares, every, strict=True))
        torch.testing.assert_close(parameter, mean, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_of_the_model_is_cut_to_the_same_parameters(method):
    run = Run(method, prune_every=1000)  # cuts are made here
    changed = 0
    for _ in range(12):
        twin = copy.deepcopy(run.model)
        run.adapter.follow(twin)
        before = run.adapter.ranks
        run.adapter._method.prune("late", min(run.step / 30, 1))
        changed += run.adapter.ranks != before
        for ours, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
            if method == "comera" and ours.ndim == 1:
                continue  # a rank that is spared is lifted in the model alone
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        run.train(5)
    assert changed >= (1 if method == "comera" else 3)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("comera", {"target_ratio": None, "gamma": 0.03}),
        ("proximal", {}),
        ("rounding", {"regrow": 0.1}),
    ],
)
def test_an_average_has_the_ranks_of_the_model_and_is_as_good(method, settings):
    run = Run(method, **settings)

    def check():
        for k in (0, 2):
            assert run.average.module[k].spec == run.model[k].spec

    run.train(90, check)
    assert run.adapter.size < 0.9 * run.adapter.initial_size
    x, y = run.batch()
    own, averaged = (nn.functional.mse_loss(net(x), y).item() for net in (run.model, run.average))
    assert averaged < 1.1 * own


def test_a_change_of_basis_keeps_what_an_average_computes():
    """Where "comera" balances, with rank weights in both that are not 1."""
    run = Run("comera", target_ratio=None, gamma=0.1).train(9)
    x, _ = run.batch()
    spread = [weight.std().item() for weight in run.average.module[0].rank_weights]
    assert max(spread) > 0.0
    before = run.average(x).detach(), run.model(x).detach()
    run.adapter._method.prune("early", 0.0)
    assert run.adapter.ranks["0"] == [4, 16, 4]
    assert all((weight == 1).all() for weight in run.average.module[0].rank_weights)
    torch.testing.assert_close(run.average(x).detach(), before[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(run.model(x).detach(), before[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_compact_rounds_the_average_too(method):
    run = Run(method).train(20)
    run.adapter.compact(0.4)
    for k in (0, 2):
        assert run.average.module[k].spec == run.model[k].spec
    run.train(5)
    assert all(parameter.isfinite().all() for parameter in run.average.parameters())


def test_several_copies_follow_at_once():
    run = Run("rounding")
    others = [copy.deepcopy(run.model), AveragedModel(run.model)]
    for other in others:
        run.adapter.follow(other)
    run.train(40)
    assert run.adapter.size <= run.adapter.target_size
    assert others[0][0].spec == others[1].module[0].spec == run.model[0].spec


def test_a_layer_that_dies_is_empty_in_the_average_too():
    run = Run("rounding", target_ratio=None, patience=1).train(3)
    with torch.no_grad():
        run.model[0].cores[1].zero_()
    with pytest.warns(UserWarning, match="layer '0' have died"):
        run.adapter._method.prune("early", 0.0)
    x, _ = run.batch()
    assert run.average.module[0].tt_params == 0
    bias = run.average.module[0].bias.expand(len(x), 32)
    torch.testing.assert_close(run.average.module[0](x), bias)


# ---- resume ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [4, 22, 41])
def test_a_resumed_average_gives_the_same_numbers(method, stop):
    run, other = Run(method), Run(method)
    run.train(stop)
    stored = io.BytesIO()
    parts = ("model", "optimizer", "adapter", "average")
    torch.save({part: getattr(run, part).state_dict() for part in parts}, stored)
    stored.seek(0)
    for part, state in torch.load(stored, weights_only=True).items():
        getattr(other, part).load_state_dict(state)
    other.step = stop
    for each in (run, other):
        each.train(50 - stop)
    assert other.adapter.history == run.adapter.history
    pairs = zip(run.average.parameters(), other.average.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# ---- what is refused ----


def test_what_is_no_copy_is_refused():
    run = Run("rounding")
    other = nn.Sequential(TTLinear(TTSpec("tt", (4, 8), (8, 4), (1, 4, 8, 4, 1)), 32, 32))
    for wrong in (run.model, other, nn.Linear(32, 32), AveragedModel(other)):
        with pytest.raises(RankError, match="not a copy of it in layer '0'"):
            run.adapter.follow(wrong)
    run.train(40)
    assert other[0].spec.ranks == (1, 4, 8, 4, 1)


def test_a_copy_that_follows_already_is_refused_and_the_run_goes_on():
    run = Run("comera")
    for again in (run.average, run.average.module):
        with pytest.raises(RankError) as caught:
            run.adapter.follow(again)
        assert str(caught.value) == (
            "a copy that follows the model twice would be cut twice\n"
            f"  got:      {type(again).__name__}, of which layers follow already\n"
            "  expected: each copy once, wrapped or not\n"
            "  mend:     leave out the second call of follow"
        )
    run.train(60)
    assert run.average.module[0].spec == run.model[0].spec
    assert run.adapter.size < run.adapter.initial_size


def test_a_copy_made_before_a_cut_is_refused_after_it():
    run = Run("rounding")
    early = copy.deepcopy(run.model)
    run.train(30)
    assert run.adapter.size < run.adapter.initial_size
    with pytest.raises(RankError, match="not a copy of it"):
        run.adapter.follow(early)


def test_a_copy_whose_ranks_have_changed_stops_the_cut_and_nothing_has_changed():
    run = Run("rounding")
    old = {key: value.clone() for key, value in run.average.state_dict().items()}
    run.train(19)
    run.average.load_state_dict(old)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    with pytest.raises(RankError, match="a copy that follows the model has other ranks"):
        run.adapter._method.prune("late", 1.0)
    pairs = zip(before, run.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
