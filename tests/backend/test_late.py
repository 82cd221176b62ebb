"""Products of a backward graph that nothing waits for are made together."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import comera_fx
from comera_fx.backend.late import batch_late_products
from tests.lossless import RANDOM

aten = torch.ops.aten
FEW = [torch.randn(4, 32) for _ in range(6)]


def batched(function, *inputs: Tensor) -> tuple[list[str], int]:
    """What a graph calls after the pass, and how many products were batched."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    number = batch_late_products(gm.graph)
    gm.graph.lint()
    gm.recompile()
    copies = [[x.clone() for x in inputs] for _ in range(2)]
    mine, theirs = gm(*copies[0]), function(*copies[1])
    torch.testing.assert_close(mine, theirs, check_stride=True)
    torch.testing.assert_close(copies[0], copies[1])
    for node in gm.graph.nodes:  # what the graph says of its values holds
        value = node.meta.get("val")
        told = all("val" in given.meta for given in node.all_input_nodes)
        if isinstance(value, Tensor) and node.op == "call_function" and told:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with value.fake_mode:
                again = node.target(*args, **kwargs)
            assert (again.shape, again.stride()) == (value.shape, value.stride())
    return _calls(gm), number


def _calls(gm: fx.GraphModule) -> list[str]:
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [str(node.target).removeprefix("aten.") for node in nodes]


def test_stacked_products_are_one():
    def function(a, b, c, d, e, f):
        return torch.stack([a.t() @ b, c.t() @ d, e.t() @ f]).sum(0)

    calls, number = batched(function, *FEW)
    assert number == 3
    assert calls == [
        "stack.default", "transpose.int", "stack.default", "bmm.default", "sum.dim_IntList",
    ]  # fmt: skip


def test_views_of_products_are_views_of_the_batch():
    def function(a, b, c, d, e, f):
        return torch.stack([(a.t() @ b).view(16, 64), (c.t() @ d).view(16, 64)]) * 2

    calls, number = batched(function, *FEW)
    assert number == 2
    assert calls.count("mm.default") == 0


def test_products_that_are_returned_come_out_of_one():
    def function(a, b, c, d, e, f):
        return a.t() @ b, (c.t() @ d).t(), e.t() @ f

    calls, number = batched(function, *FEW)
    assert number == 2  # the one that is turned is of another form
    assert calls.count("mm.default") == 1
    assert calls.count("unbind.int") == 1


def test_an_operand_of_two_batches_is_stacked_once():
    def function(a, b, c, d, e, f):
        return torch.stack([a.t() @ b, c.t() @ d]), torch.stack([a.t() @ e, c.t() @ f])

    calls, number = batched(function, *FEW)
    assert number == 4
    assert calls.count("stack.default") == 3


def test_a_view_of_a_batch_is_read_as_that_of_a_stack():
    def function(a, b, c, d, e, f):
        return torch.stack([a.t() @ b, c.t() @ d]).view(2, -1) * 2

    assert batched(function, *FEW)[1] == 2


def test_operands_that_are_turned_views():
    def function(a, b, c, d, e, f):
        return torch.stack([a.relu().t().view(32, 4) @ b, c.relu().t().view(32, 4) @ d])

    turned = [x.t().contiguous().t() for x in FEW]
    assert batched(function, *turned)[1] == 2


def test_views_of_other_tensors_are_stacked_as_they_are():
    def function(a, b, c, d, e, f):
        x, y = (a * 2).view(2, 2, 32), (c * 2).view(4, 1, 32)
        return torch.stack([x.view(4, 32).t() @ b, y.view(4, 32).t() @ d])

    assert batched(function, *FEW)[1] == 2


def test_a_graph_that_writes_to_its_inputs_is_left_alone():
    def function(a, b, c, d, e, f):
        products = a.t() @ b, c.t() @ d
        a.add_(1)
        return torch.stack(products)

    assert batched(function, *FEW)[1] == 0


def test_devices_are_not_mixed():
    def function(a, b, c, d):
        return torch.stack([(a.t() @ b).to("meta"), c.t() @ d])

    few = [*FEW[:2], *(x.to("meta") for x in FEW[2:4])]
    gm = make_fx(function, tracing_mode="fake")(*few)
    assert batch_late_products(gm.graph) == 0


class TwoShapes(nn.Module):
    """Two layers on as many tokens in two shapes, and a buffer that a forward pass counts."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("seen", torch.ones(2, 64))

    def forward(self, x):
        h = torch.tanh(self.one(x))
        y = torch.tanh(self.other(h.view(4, 1, 64))) + self.seen.sum()
        self.seen.add_(1)
        return y


def test_training_on_tokens_of_two_shapes():
    torch.manual_seed(0)
    config = dataclasses.replace(RANDOM, min_params=1)
    eager = comera_fx.optimize(TwoShapes(), config=config)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="comera", options={"inner": "aot_eager"})
    for _ in range(2):
        x = torch.randn(2, 2, 64)
        compiled(x).square().sum().backward()
        eager(x).square().sum().backward()
        grads = [[p.grad for p in each.parameters()] for each in (model, eager)]
        torch.testing.assert_close(*grads)
        torch.testing.assert_close(model.seen, eager.seen)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, d, e, f: torch.stack([(a.t() @ b).t(), (c.t() @ d).t()]),
        lambda a, b, c, d, e, f: torch.stack([a @ b.t(), c @ d.t()]),  # operands hold more
        lambda a, b, c, d, e, f: torch.stack([a.t() @ b, c[:2].t() @ d[:2]]),
        lambda a, b, c, d, e, f: torch.stack([a.t() @ b, a.t() @ b * 2]),
        lambda a, b, c, d, e, f: torch.stack([a.t() @ b, c.t() @ d], 1),
    ],
    ids=["turned", "small-results", "other-shapes", "no-products", "other-axis"],
)
def test_nothing_else_is_batched(function):
    assert batched(function, *FEW)[1] == 0


def test_a_product_that_is_read_before_stays():
    def function(a, b, c, d, e, f):
        first = a.t() @ b
        return torch.stack([first, c.t() @ d]), first @ first

    assert batched(function, *FEW)[1] == 0
