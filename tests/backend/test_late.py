"""Products of a backward graph that nothing waits for are made together."""

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from comera_fx.backend.late import batch_late_products

aten = torch.ops.aten
FEW = [torch.randn(4, 32) for _ in range(6)]


def batched(function, *inputs: Tensor) -> tuple[list[str], int]:
    """What a graph calls after the pass, and how many products were batched."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    number = batch_late_products(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), function(*inputs))
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


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, d, e, f: torch.stack([a @ b.t(), c @ d.t()]),  # operands hold more
        lambda a, b, c, d, e, f: torch.stack([a.t() @ b, c[:2].t() @ d[:2]]),
        lambda a, b, c, d, e, f: torch.stack([a.t() @ b, a.t() @ b * 2]),
        lambda a, b, c, d, e, f: torch.stack([a.t() @ b, c.t() @ d], 1),
    ],
    ids=["small-results", "other-shapes", "no-products", "other-axis"],
)
def test_nothing_else_is_batched(function):
    assert batched(function, *FEW)[1] == 0


def test_a_product_that_is_read_before_stays():
    def function(a, b, c, d, e, f):
        first = a.t() @ b
        return torch.stack([first, c.t() @ d]), first @ first

    assert batched(function, *FEW)[1] == 0
