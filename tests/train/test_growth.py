"""``RankConfig.regrow``: ranks that the gradient asks for come back within the budget."""

import copy
import math

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.methods.growth import TRIALS

METHODS = ["proximal", "rounding"]


def spec_of(rank):
    return TTSpec("tt", (4, 8), (8, 4), (1, min(rank, 4), rank, min(rank, 4), 1))


class Pair(nn.Module):
    """Two layers side by side, which learn apart from one another."""

    def __init__(self, ranks, dtype=torch.float64):
        super().__init__()
        self.easy = TTLinear(spec_of(ranks[0]), 32, 32, bias=False, dtype=dtype)
        self.hard = TTLinear(spec_of(ranks[1]), 32, 32, bias=False, dtype=dtype)

    def forward(self, x):
        return torch.cat([self.easy(x), self.hard(x)], dim=-1)


class Run:
    """A pair that learns what one of ranks 1 and 8 says."""

    def __init__(
        self, method="rounding", seed=0, optimizer_class=torch.optim.AdamW, ranks=(8, 8), **config
    ):
        torch.manual_seed(seed)
        self.teacher = Pair((1, 8)).requires_grad_(False)
        self.model = Pair(ranks)
        self.optimizer = optimizer_class(param_groups(self.model, lr=1e-2))
        config = {"target_ratio": 0.6, "prune_every": 5, "shrink_steps": 50, **config}
        self.adapter = RankAdapter(self.model, self.optimizer, RankConfig(method=method, **config))
        self.step = 0

    def batch(self):
        draws = torch.Generator().manual_seed(self.step)
        x = torch.randn(64, 32, generator=draws, dtype=torch.float64)
        return x, self.teacher(x)

    def backward(self):
        x, y = self.batch()
        self.optimizer.zero_grad()
        self.adapter.loss(nn.functional.mse_loss(self.model(x), y)).backward()

    def train(self, steps):
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.adapter.step()
            self.step += 1
        return self

    @property
    def layers(self):
        return {"easy": self.model.easy, "hard": self.model.hard}


def settled(run):
    """Decide on trial directions, without a step: every rate is 0 for it."""
    rates = [group["lr"] for group in run.optimizer.param_groups]
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.optimizer.step()
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_equal_before_and_after_growth(method):
    run = Run(method, regrow=0.2).train(9)
    x, _ = run.batch()
    cut = run.adapter._method._growth.begin
    outputs = []

    def watched(room):
        outputs.append(run.model(x).detach())
        sizes.append(run.adapter.size)
        cut(room)
        outputs.append(run.model(x).detach())
        sizes.append(run.adapter.size)

    sizes = []
    run.adapter._method._growth.begin = watched
    run.train(1)
    assert sizes[1] > sizes[0]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-14)
    run.backward()
    settled(run)
    assert sizes[0] < run.adapter.size < sizes[1]
    torch.testing.assert_close(run.model(x).detach(), outputs[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("regrow", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("method", METHODS)
def test_new_ranks_hold_no_more_than_their_share_and_the_budget_is_kept(method, regrow):
    run = Run(method, regrow=regrow)
    target, start, num_grown = run.adapter.target_size, run.adapter.initial_size, 0
    for _ in range(12):
        run.train(4)
        growth = run.adapter._method._growth
        run.train(1)
        progress = min(run.step / 50, 1)
        budget = target + (start - target) * (1 - progress) ** 3
        before = growth._before
        if before is None:
            continue
        kept = sum(_params(run.layers[name].spec, inner) for name, inner in before.items())
        assert kept <= budget
        run.backward()
        settled(run)
        grown = run.adapter.size - kept
        num_grown += grown > 0
        # What each new rank holds is priced with all trials there: the sum is never more.
        assert grown <= regrow * budget
    assert num_grown >= 3
    run.train(10)
    assert run.adapter.size <= target


def _params(spec, inner):
    ranks = (1, *inner, 1)
    return sum(ranks[k] * mode * ranks[k + 1] for k, mode in enumerate(spec.mode_sizes))


@pytest.mark.parametrize("method", METHODS)
def test_ranks_move_to_the_layer_that_needs_them(method):
    """The hard layer begins at rank 4 and can have more only from the easy one, which has 16."""
    settings = {"ranks": (16, 4), "target_ratio": 0.6, "shrink_steps": 200}
    grown = Run(method, regrow=0.1, **settings).train(220)
    still = Run(method, regrow=0.0, **settings).train(220)
    assert grown.adapter.size <= grown.adapter.target_size
    assert still.adapter.ranks["hard"] == [4, 4, 4]
    hard, easy = grown.adapter.ranks["hard"], grown.adapter.ranks["easy"]
    assert hard[1] >= 6
    assert sum(easy) < sum(still.adapter.ranks["easy"])
    assert _error(grown) < 0.7 * _error(still)


def _error(run):
    x, y = run.batch()
    return (run.model(x) - y).square().mean().item()


def test_the_gradient_chooses_the_layer_that_gains():
    run = Run("rounding", regrow=0.1)
    with torch.no_grad():  # the easy layer has nothing to learn, and the hard one much
        for own, theirs in zip(run.model.easy.cores, run.teacher.easy.cores, strict=True):
            own.zero_()
            own[tuple(slice(size) for size in theirs.shape)] = theirs
    run.adapter._method._growth.begin(room=100)
    assert run.adapter.ranks["easy"][1] == run.adapter.ranks["hard"][1] == 8 + TRIALS
    run.backward()
    settled(run)
    assert run.adapter.ranks["easy"] == [4, 8, 4]
    assert run.adapter.ranks["hard"][1] > 8


@pytest.mark.parametrize(
    "optimizer_class",
    [
        torch.optim.AdamW,
        lambda groups: torch.optim.SGD(groups, momentum=0.9),
        lambda groups: torch.optim.Adam(groups, amsgrad=True),
    ],
    ids=["adamw", "momentum", "amsgrad"],
)
def test_the_optimizers_state_grows_along(optimizer_class):
    run = Run("rounding", optimizer_class=optimizer_class, regrow=0.3).train(10)
    assert run.adapter._method._growth._before is not None
    ranks = run.adapter._method._growth._before
    for name, layer in run.layers.items():
        for core in layer.cores:
            for entry in run.optimizer.state[core].values():
                if isinstance(entry, torch.Tensor) and entry.ndim:
                    assert entry.shape == core.shape
        new = run.optimizer.state[layer.cores[1]]
        entry = new.get("exp_avg", new.get("momentum_buffer"))
        assert not entry[..., ranks[name][1] :].any()
        assert entry[..., : ranks[name][1]].any()
    run.train(40)
    assert run.adapter.size <= run.adapter.target_size


def test_trials_that_get_no_gradient_go():
    run = Run("rounding", regrow=0.3).train(10)
    before = run.adapter._method._growth._before
    assert run.adapter.ranks != before
    run.optimizer.zero_grad()
    run.optimizer.step()
    assert run.adapter.ranks == before


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_trials_whose_gradient_is_nothing_or_not_finite_go(value):
    run = Run("rounding", regrow=0.3, skip_nonfinite=False).train(10)
    before = run.adapter._method._growth._before
    run.backward()
    for layer in run.layers.values():
        for core in layer.cores:
            core.grad.fill_(value)
    settled(run)
    assert run.adapter.ranks == before


def test_trials_that_no_step_has_met_go_at_the_next_cut():
    run = Run("rounding", regrow=0.3).train(10)
    before = run.adapter._method._growth._before
    run.adapter._method._growth.settle()
    assert run.adapter.ranks == before
    ranks = run.adapter.ranks
    run.adapter._method._growth.settle()  # a second time there is nothing to decide
    assert run.adapter.ranks == ranks


def test_without_regrow_nothing_is_tried():
    run = Run("rounding", regrow=0.0)
    sizes = [run.train(1).adapter.size for _ in range(60)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("method", METHODS)
def test_trials_are_no_ranks_to_the_history(method):
    run = Run(method, regrow=0.4)
    for _ in range(10):
        run.train(5)
        entry = run.adapter.history[-1]
        before = run.adapter._method._growth._before
        if before is not None:
            assert entry["ranks"] == before != run.adapter.ranks
    sizes = [entry["size"] for entry in run.adapter.history]
    assert max(sizes) <= run.adapter.initial_size
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("after_backward", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_compacted_with_trials_pending_goes_on(method, after_backward):
    run = Run(method, regrow=0.3).train(10)
    before = run.adapter._method._growth._before
    if after_backward:
        run.backward()
    with pytest.raises(RankError, match="tolerance of compact"):
        run.adapter.compact(2.0)
    assert run.adapter.ranks != before
    assert run.adapter.compact(1e-9) <= 1e-9
    if not after_backward:
        assert run.adapter.ranks == before
    assert run.adapter._method._growth._before is None
    size = run.adapter.size
    if after_backward:
        run.optimizer.step()
        run.adapter.step()
    run.train(3)
    assert run.adapter.size == size
    run.train(60)
    assert run.adapter.size <= run.adapter.target_size


@pytest.mark.parametrize("how", ["cut", "step", "compact"])
def test_trials_that_a_copy_cannot_follow_are_still_there_once_it_can(how):
    run = Run("rounding", regrow=0.3)
    twin = copy.deepcopy(run.model)
    run.adapter.follow(twin)
    run.train(10)
    ranks, kept = run.adapter.ranks, copy.deepcopy(twin.state_dict())
    twin.load_state_dict(Pair((4, 4)).state_dict())
    act = {
        "cut": lambda: run.adapter._method.prune("late", 0.2),
        "step": run.optimizer.step,
        "compact": lambda: run.adapter.compact(0.1),
    }[how]
    with pytest.raises(RankError, match="a copy that follows the model has other ranks"):
        act()
    assert run.adapter.ranks == ranks
    twin.load_state_dict(kept)
    run.train(60)
    assert twin.easy.spec == run.model.easy.spec
    assert run.adapter.size <= run.adapter.target_size


def test_copies_grow_alike():
    run = Run("rounding", regrow=0.2)
    twin = copy.deepcopy(run.model)
    run.adapter.follow(twin)
    for _ in range(60):
        run.train(1)
        assert twin.easy.spec == run.model.easy.spec
        assert twin.hard.spec == run.model.hard.spec


def test_an_adapter_that_is_gone_leaves_no_hook():
    run = Run("rounding", regrow=0.2)
    optimizer = run.optimizer
    num_hooks = len(optimizer._optimizer_step_pre_hooks)
    run.adapter = None
    assert len(optimizer._optimizer_step_pre_hooks) < num_hooks
