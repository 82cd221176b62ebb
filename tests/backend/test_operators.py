"""Graphs run operator by operator call torch's own functions only where these do the same."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from comera_fx.backend.operators import call_directly, join_selects, simplify_views


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


def forms(gm: fx.GraphModule) -> list[str]:
    """What a graph calls, in order."""
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def test_views_that_undo_one_another_go():
    x = torch.randn(3, 4)
    gm = make_fx(lambda a: a.t().t().view(12).view(4, 3).transpose(0, 1).transpose(1, 0) * 2)(x)
    assert simplify_views(gm.graph) > 0
    assert forms(gm) == ["view.default", "mul.Tensor"]
    gm.recompile()
    torch.testing.assert_close(gm(x), x.view(4, 3) * 2)


def test_equal_views_are_one():
    x = torch.randn(3, 4)
    gm = make_fx(lambda a: a.t() @ a.view(3, 4) + a.t() @ a)(x)
    simplify_views(gm.graph)
    assert forms(gm).count("t.default") == 1
    gm.recompile()
    torch.testing.assert_close(gm(x), 2 * x.t() @ x)


def test_a_view_that_is_returned_stays_a_tensor_of_its_own():
    x = torch.randn(3, 4)
    gm = make_fx(lambda a: (a.t().t(), a.t()))(x)
    simplify_views(gm.graph)
    gm.recompile()
    back, turned = gm(x)
    assert back is not x
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(turned, x.t())


def test_parts_of_a_stack_are_taken_in_one_call():
    x = torch.randn(4, 3)
    gm = make_fx(lambda a: (a[0] + a[1], a[2] * a[3]))(x)
    assert join_selects(gm.graph) == 4
    assert forms(gm).count("unbind.int") == 1
    gm.recompile()
    torch.testing.assert_close(gm(x), (x[0] + x[1], x[2] * x[3]))


def test_a_few_parts_of_many_stay_single_views():
    x = torch.randn(9, 3)
    gm = make_fx(lambda a: a[0] + a[8])(x)
    assert join_selects(gm.graph) == 0
