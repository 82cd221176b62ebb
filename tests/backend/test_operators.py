"""Graphs run operator by operator call torch's own functions only where these do the same."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from comera_fx.backend.operators import call_directly


def direct(gm: fx.GraphModule) -> list[str]:
    """Call what a graph calls directly; return what is called as before."""
    call_directly(gm.graph)
    gm.recompile()
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [str(n.target) for n in nodes if isinstance(n.target, torch._ops.OpOverload)]


def test_products_are_called_directly():
    x, y = torch.randn(2, 3), torch.randn(3, 4)
    gm = make_fx(lambda a, b: torch.tanh(a @ b).t() + 1)(x, y)
    assert direct(gm) == []
    torch.testing.assert_close(gm(x, y), torch.tanh(x @ y).t() + 1)


def test_a_list_that_holds_no_tensor_for_a_dimension_stays_with_the_operator():
    ids, values = torch.tensor([0, 2, 0]), torch.ones(2, 3)

    def write(x):
        return torch.ops.aten.index_put(x, [None, ids], values, True)

    gm = make_fx(write)(torch.zeros(2, 4))
    assert direct(gm) == ["aten.index_put.default"]
    assert gm(torch.zeros(2, 4)).tolist() == [[2.0, 0.0, 1.0, 0.0]] * 2
