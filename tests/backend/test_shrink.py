"""Ranks that shrink under ``torch.compile``: one compile a cut, never eager, equal to eager."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from comera_fx.backend.tokens import MOST_INTERVALS
from comera_fx.compiled_code import forget_code
from comera_fx.config import RankConfig
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups
from tests.backend.models import num_graphs

SPEC = TTSpec("tt", (8, 8), (8, 8), (1, 8, 60, 8, 1))
OPTIONS = {"inner": "aot_eager"}
BROKEN = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo reads it of what the first part of a broken graph hands to the second."""
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = TTLinear(SPEC, 64, 64), TTLinear(SPEC, 64, 64)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Broken(Net):
    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.tanh(x))


class Nested(nn.Module):
    """A model that runs another one, with a layer of its own that is not compiled."""

    def __init__(self):
        super().__init__()
        self.body = Net()
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.body(x))


class Training:
    """A model with its optimizer and adapter; ``run`` may be a compiled form of the model."""

    def __init__(self, model, **config):
        self.model = self.run = model
        self.optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
        config = {"prune_every": 1, "gamma": 0.0, "patience": 1, "balance": False, **config}
        self.adapter = RankAdapter(
            model, self.optimizer, RankConfig(**{"method": "comera", **config})
        )

    def compile(self, **settings):
        settings = {"backend": "comera", "fullgraph": True, "options": OPTIONS, **settings}
        self.run = torch.compile(self.model, **settings)
        return self

    def loss(self, seed):
        x, y = batch(seed)
        return nn.functional.mse_loss(self.run(x), y)

    def step(self, seed):
        loss = self.adapter.loss(self.loss(seed))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.adapter.step()
        return loss.item()

    def shrink(self):
        kill_a_rank(self.model)
        self.adapter.step()


def batch(seed, size=16):
    x = torch.randn(size, 64, generator=torch.Generator().manual_seed(seed))
    return x, x.roll(1, 1).tanh()


def kill_a_rank(model):
    """Let the last rank of the middle bond of every layer die, whatever the optimizer remembers."""
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, TTLinear):
                layer.rank_weight_2[-1] = -1.0


@pytest.mark.parametrize(
    ("num_shrinks", "limits"),
    [
        (4, {"recompile_limit": 1, "accumulated_recompile_limit": 2}),
        pytest.param(50, {}, marks=pytest.mark.slow),
    ],
)
def test_every_shrink_is_one_compile_however_many_there_are(num_shrinks, limits):
    training = Training(Net()).compile()
    with torch._dynamo.config.patch(limits):
        for seed in range(num_shrinks + 1):
            training.loss(seed).backward()
            training.loss(seed).backward()
            assert num_graphs() == seed + 1
            assert counters["comera_fx"]["forward_graphs"] == seed + 1
            assert counters["comera_fx"]["backward_graphs"] == seed + 1
            training.shrink()
    ranks = [1, 8, 60 - num_shrinks - 1, 8, 1]
    assert training.adapter.ranks == {"first": ranks[1:-1], "second": ranks[1:-1]}


def test_losses_are_those_of_an_eager_twin_with_shrinks_in_between():
    compiled, eager = Training(Net(), prune_every=5).compile(), Training(Net(), prune_every=5)
    losses = []
    for seed in range(20):
        if seed in (4, 12):
            kill_a_rank(compiled.model)
            kill_a_rank(eager.model)
        losses.append((compiled.step(seed), eager.step(seed)))
    assert compiled.adapter.ranks == eager.adapter.ranks
    assert compiled.adapter.ranks["first"] == [8, 58, 8]
    assert num_graphs() == 3
    torch.testing.assert_close(*torch.tensor(losses).unbind(1), rtol=1e-4, atol=1e-4)
    assert losses[-1][0] < losses[0][0]


def test_a_pruning_that_cuts_nothing_compiles_nothing():
    training = Training(Net()).compile()
    for seed in range(3):
        training.step(seed)
    assert num_graphs() == 1


def test_a_layer_that_stays_as_it_is_makes_no_difference():
    training = Training(Net(), exclude=("second",)).compile()
    for seed in range(3):
        training.loss(seed).backward()
        with torch.no_grad():
            training.model.first.rank_weight_2[-1] = 0.0
        training.adapter.step()
    assert num_graphs() == 3


@BROKEN
def test_every_part_of_a_broken_graph_compiles_once_a_shrink():
    training = Training(Broken()).compile(fullgraph=False)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for seed in range(4):
            training.loss(seed).backward()
            assert num_graphs() == 2 * (seed + 1)
            training.shrink()


def test_a_compiled_function_of_model_and_loss():
    training = Training(Net())

    @torch.compile(backend="comera", fullgraph=True, options=OPTIONS)
    def loss_of(x, y):
        return nn.functional.mse_loss(training.model(x), y)

    with torch._dynamo.config.patch(recompile_limit=1):
        for seed in range(3):
            loss = loss_of(*batch(seed))
            torch.testing.assert_close(loss, training.loss(seed), **CLOSE)
            loss.backward()
            assert num_graphs() == seed + 1
            training.shrink()


def test_a_whole_step_in_a_compiled_function_stays_compiled():
    training = Training(Net())
    graphs = []

    @torch.compile(backend="comera", options=OPTIONS)
    def loss_of(x, y):
        return training.adapter.loss(nn.functional.mse_loss(training.model(x), y))

    @torch.compile(backend="comera", options=OPTIONS)
    def finish():
        training.adapter.step()

    for seed in range(10):
        loss = loss_of(*batch(seed))
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        finish()
        graphs.append(num_graphs())
    assert graphs == [1] * 10
    kill_a_rank(training.model)
    finish()
    loss_of(*batch(0)).backward()
    assert num_graphs() == 2


@pytest.mark.parametrize("whole", [True, False])
def test_two_models_of_one_class(whole):
    # Both run one compiled version until one shrinks; then the other compiles again, and is right.
    one, other = Training(Net(seed=1)), Training(Net(seed=2))
    for training in (one, other):
        if whole:
            training.compile()
        else:
            training.model.compile(backend="comera", fullgraph=True, options=OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(3):
            for training in (one, other):
                eager = copy.deepcopy(training.model)
                x, _ = batch(seed)
                torch.testing.assert_close(training.run(x), Net.forward(eager, x), **CLOSE)
            assert num_graphs() == 1 + 2 * seed
            one.shrink()
    assert other.adapter.ranks["first"] == [8, 60, 8]


def test_containers_share_the_code_that_dynamo_wraps_around_them():
    models = [nn.Sequential(TTLinear(SPEC, 64, 64), nn.Tanh()) for _ in range(2)]
    one, other = (Training(model).compile() for model in models)
    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(3):
            for training in (one, other):
                x, _ = batch(seed)
                expected = training.model(x)
                torch.testing.assert_close(training.run(x), expected, **CLOSE)
            assert num_graphs() == 1 + 2 * seed
            one.shrink()


@pytest.mark.parametrize(
    ("backend", "form"),
    [("aot_eager", "module"), ("eager", "container"), ("eager", "function")],
)
def test_other_backends_stay_compiled_too(backend, form):
    model = nn.Sequential(*Net().children()) if form == "container" else Net()
    training = Training(model)
    training.run = torch.compile(
        (lambda x: model(x)) if form == "function" else model, backend=backend, fullgraph=True
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        for seed in range(3):
            training.loss(seed).backward()
            assert counters["stats"]["unique_graphs"] == seed + 1
            training.shrink()


def test_a_model_compiled_by_two_backends():
    training = Training(Net()).compile()
    other = torch.compile(lambda x: training.model(x), backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        for seed in range(3):
            x, _ = batch(seed)
            torch.testing.assert_close(training.run(x), other(x), **CLOSE)
            assert counters["stats"]["unique_graphs"] == 2 * (seed + 1)
            training.shrink()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_part_of_a_model(in_place):
    model = Nested()
    training = Training(model)
    settings = {"backend": "comera", "fullgraph": True, "options": OPTIONS}
    if in_place:
        model.body.compile(**settings)
    else:
        model.body = torch.compile(model.body, **settings)
    with torch._dynamo.config.patch(recompile_limit=1):
        for seed in range(3):
            training.loss(seed).backward()
            assert num_graphs() == seed + 1
            training.shrink()


def test_a_copied_model_shrinks_by_itself():
    first = Training(Net()).compile()
    first.loss(0).backward()
    second = Training(copy.deepcopy(first.model)).compile()
    second.shrink()
    for seed in range(3):
        for training in (first, second):
            x, _ = batch(seed)
            eager = Net.forward(copy.deepcopy(training.model), x)
            torch.testing.assert_close(training.run(x), eager, **CLOSE)
        second.shrink()
    assert first.adapter.ranks["first"] == [8, 60, 8]
    assert second.adapter.ranks["first"] == [8, 56, 8]


def test_a_shrink_between_accumulated_gradients():
    compiled, eager = Training(Net()).compile(), Training(Net())
    for training in (compiled, eager):
        training.loss(0).backward()
        training.shrink()
        training.loss(1).backward()
    grads = [[p.grad for p in training.model.parameters()] for training in (compiled, eager)]
    torch.testing.assert_close(*grads, **CLOSE)
    assert num_graphs() == 2


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=BROKEN)])
def test_code_may_be_forgotten_between_forward_and_backward(fullgraph):
    training = Training(Net() if fullgraph else Broken()).compile(fullgraph=fullgraph)
    expected = torch.autograd.grad(training.loss(0), list(training.model.parameters()))
    before = num_graphs()
    loss = training.loss(0)
    forget_code(training.model.parameters())
    grads = torch.autograd.grad(loss, list(training.model.parameters()))
    torch.testing.assert_close(grads, expected)
    training.loss(0)
    assert num_graphs() == 2 * before


def test_a_model_that_runs_the_code_of_its_twin_shrinks_too():
    # Dynamo has compiled for the first: the second one's parameters were never seen.
    one, other = Training(Net(seed=1)).compile(), Training(Net(seed=2)).compile()
    one.loss(0)
    with torch._dynamo.config.patch(recompile_limit=1):
        for seed in range(3):
            other.loss(seed).backward()
            assert num_graphs() == 1 + seed
            other.shrink()


def test_many_batches_make_few_graphs_after_a_shrink_too():
    training = Training(Net()).compile(dynamic=True)
    for seed in range(2):
        counters.clear()
        for size in (64, 1, 7, 4096, 300, 2):
            x, _ = batch(seed, size)
            torch.testing.assert_close(training.run(x), Net.forward(training.model, x), **CLOSE)
        assert 2 <= counters["stats"]["unique_graphs"] <= MOST_INTERVALS + 1
        training.shrink()


def test_warnings_point_at_who_calls_the_adapter():
    training = Training(Net(), gamma=1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(100):
            training.adapter.step()
        for _ in range(100):
            training.adapter.loss(torch.tensor(1.0))
        with torch.no_grad():
            training.model.first.rank_weight_2.zero_()
        training.adapter.step()
    texts = ["step was called 100 times", "loss was called 100 times", "have died"]
    for warning, text in zip(seen, texts, strict=True):
        assert text in str(warning.message)
        assert warning.filename == __file__
