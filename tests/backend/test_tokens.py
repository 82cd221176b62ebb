"""One compiled model for many batches: few graphs, none bound to a batch, equal to eager."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from comera_fx.backend.tokens import MOST_INTERVALS
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.plan.thresholds import token_intervals
from comera_fx.spec import TTSpec
from tests.backend.models import num_graphs

SPEC = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))
TABLE = TTSpec("ttm", (5, 4), (4, 8), (1, 6, 1))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
BATCHES = sorted(
    {batch for k in range(13) for batch in (2**k - 1, 2**k, 2**k + 1) if 1 <= batch <= 4096}
)
SHUFFLED = random.Random(0).sample(BATCHES, len(BATCHES))
ORDERS = {"rising": BATCHES, "falling": BATCHES[::-1], "shuffled": SHUFFLED}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(TTLinear(SPEC, 32, 32), nn.Tanh(), TTLinear(SPEC, 32, 32))


class Pooled(nn.Module):
    """Ids to a table, a layer on all tokens, the mean, and a layer on one row a sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = TTEmbedding(TABLE, 20, 32)
        self.body = mlp()
        self.head = TTLinear(SPEC, 32, 32)

    def forward(self, ids):
        return self.head(self.body(self.table(ids)).mean(1))


class TwoSources(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x, y):
        return self.first(x).mean(1) + self.second(y).mean(1)


class Selected(nn.Module):
    """A number of tokens that depends on the data."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x[x[:, 0] > 0])


def compiled(model, **settings):
    settings = {"fullgraph": True, "options": {"inner": "aot_eager"}, **settings}
    return torch.compile(model, backend="comera", **settings)


def results(function, model, *inputs):
    given = [x.requires_grad_(x.is_floating_point()) for x in inputs]  # marks of sizes stay
    out = function(*given)
    wanted = [*model.parameters(), *(x for x in given if x.requires_grad)]
    return [out, *torch.autograd.grad(out.square().sum() / max(len(out), 1), wanted)]


def assert_as_eager(function, model, *inputs):
    given = results(function, model, *inputs)
    torch.testing.assert_close(given, results(model, model, *inputs), **CLOSE)


@pytest.mark.parametrize(
    ("order", "dynamic"),
    [("rising", True), ("falling", True), ("shuffled", True), ("rising", None), ("falling", None)],
)
def test_batches_up_to_4096_make_few_graphs(order, dynamic):
    model = mlp()
    function = compiled(model, dynamic=dynamic)
    for batch in ORDERS[order]:
        assert_as_eager(function, model, torch.randn(batch, 32))
    # Without being told, dynamo first takes the size for a constant.
    assert 2 <= num_graphs() <= MOST_INTERVALS + (1 if dynamic else 2)


def test_a_marked_batch_makes_few_graphs():
    model = mlp()
    function = compiled(model)
    for batch in SHUFFLED:
        x = torch.randn(batch, 32)
        if batch > 1:  # dynamo refuses to generalise a marked size from 1
            torch._dynamo.mark_dynamic(x, 0)
        assert_as_eager(function, model, x)
    assert num_graphs() <= MOST_INTERVALS + 1


def test_tokens_are_the_product_of_batch_and_time():
    model = Pooled()
    function = compiled(model, dynamic=True)
    for batch in SHUFFLED:
        if batch > 1:
            assert_as_eager(function, model, torch.randint(20, (batch, 3)))
    assert num_graphs() <= MOST_INTERVALS


def test_two_dynamic_sizes():
    model = Pooled()
    function = compiled(model)
    for batch in (256, 2, 16, 3, 100):
        for time in (2, 9, 5, 40):
            ids = torch.randint(20, (batch, time))
            torch._dynamo.mark_dynamic(ids, 0)
            torch._dynamo.mark_dynamic(ids, 1)
            assert_as_eager(function, model, ids)
    assert num_graphs() <= MOST_INTERVALS


def test_a_second_number_of_tokens_adds_no_graphs():
    model = TwoSources()
    function = compiled(model, dynamic=True)
    for batch in (2, 200):
        for here, there in ((2, 9), (40, 3)):
            assert_as_eager(
                function, model, torch.randn(batch, here, 32), torch.randn(batch, there, 32)
            )
    assert num_graphs() <= MOST_INTERVALS


def test_graphs_change_where_the_planner_says():
    model = mlp()
    intervals = token_intervals((SPEC, SPEC), MOST_INTERVALS)
    assert len(intervals) > 1
    for before, after in pairwise(intervals):
        torch._dynamo.reset()
        counters.clear()
        function = compiled(model, dynamic=True)
        for tokens in (before.first, before.planned, before.last):
            function(torch.randn(tokens, 32))
            assert num_graphs() == 1
        function(torch.randn(after.first, 32))
        assert num_graphs() == 2


def test_no_tokens_and_a_single_one():
    model = mlp()
    function = compiled(model, dynamic=True)
    for batch in (0, 1, 7, 0, 1):
        x = torch.randn(batch, 32)
        torch.testing.assert_close(function(x), model(x), **CLOSE)
    assert num_graphs() == 3


def test_a_range_told_by_the_user_is_one_graph():
    model = mlp()
    function = compiled(model)
    for batch in (2, 3, 500, 4096):
        x = torch.randn(batch, 32)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
        torch.testing.assert_close(function(x), model(x), **CLOSE)
    assert num_graphs() == 1


def test_a_number_that_depends_on_data_is_one_graph():
    model = Selected()
    function = compiled(model)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for seed in range(3):
            x = torch.randn(50, 32, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(function(x), model(x), **CLOSE)
    assert num_graphs() == 1


def test_a_batch_marked_as_unbacked_is_one_graph():
    model = mlp()
    function = compiled(model)
    for batch in (0, 1, 2, 33, 4096):
        x = torch.randn(batch, 32)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(function(x), model(x), **CLOSE)
    assert num_graphs() == 1


def test_inference_under_no_grad_has_graphs_of_its_own():
    model = mlp()
    function = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch in SHUFFLED:
            x = torch.randn(batch, 32)
            torch.testing.assert_close(function(x), model(x), **CLOSE)
    assert num_graphs() <= MOST_INTERVALS + 1
    assert counters["comera_fx"]["inference_graphs"] == num_graphs()
