"""Elementwise operators write over what nothing reads any more, and over nothing else."""

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from comera_fx.backend.reuse import reuse_operands

aten = torch.ops.aten


def reused(function, *inputs: Tensor) -> tuple[fx.GraphModule, list[str]]:
    """The graph of a function with operands reused, and the operators in place, in order."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    number = reuse_operands(gm.graph)
    gm.graph.lint()
    gm.recompile()
    before = [x.clone() for x in inputs]
    torch.testing.assert_close(gm(*inputs), function(*inputs))
    torch.testing.assert_close(list(inputs), before)  # what is given stays as it is
    names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    written = [name for name in names if "_." in name]
    assert number == len(written)
    return gm, written


X, Y = torch.randn(3, 4), torch.randn(3, 4)


def test_a_chain_is_one_fresh_tensor():
    _, written = reused(lambda x, y: ((x * y - 1).clamp(0, 1) * 3).tanh(), X, Y)
    assert written == [
        "aten.sub_.Tensor",
        "aten.clamp_.default",
        "aten.mul_.Tensor",
        "aten.tanh_.default",
    ]


def test_the_other_operand_serves_where_order_does_not_matter():
    _, written = reused(lambda x, y: y + x @ y.t() @ x, X, Y)
    assert written == ["aten.add_.Tensor"]
    _, written = reused(lambda x, y: y - x @ y.t() @ x, X, Y)
    assert written == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,  # what is given
        lambda x, y: ((x * y).sum(), (x * y).t() + 1)[1] + (x * y).t(),
        lambda x, y: x.t() + 1,  # a view of what is given
    ],
    ids=["inputs", "views", "view-of-input"],
)
def test_inputs_and_what_is_read_later_stay(function):
    reused(function, X, Y)


def test_what_is_read_later_stays():
    def function(x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        more = product + 1
        return more / product

    _, written = reused(function, X, Y)
    assert written == ["aten.div_.Tensor"]


def test_what_is_returned_stays():
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        product = x * y
        return product, product + 1

    assert reused(function, X, Y)[1] == []


def test_what_a_view_shows_later_stays():
    def function(x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        view = product.t()
        more = product + 1
        return more.t() * view

    _, written = reused(function, X, Y)
    assert written == ["aten.mul_.Tensor"]


def test_a_view_may_be_written_over_with_all_it_shows():
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).view(12) + 1

    assert reused(function, X, Y)[1] == ["aten.add_.Tensor"]


def test_an_operand_that_is_read_twice_stays():
    def function(x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        return product * product

    assert reused(function, X, Y)[1] == []


def test_other_shapes_strides_and_dtypes_are_not_written_over():
    row = torch.randn(4)
    assert reused(lambda x, r: (r * 2) + x, X, row)[1] == []
    assert reused(lambda x, r: (x > 0) * x, X, row)[1] == []
    assert reused(lambda x, r: (x * 2).to(torch.float64) + (x * 2), X, row)[1] == [
        "aten.add_.Tensor"
    ]


def test_items_of_several_results_are_memory_of_their_own():
    def function(x: Tensor, y: Tensor) -> Tensor:
        normed, mean, _ = aten.native_layer_norm(x, [4], None, None, 1e-5)
        return (normed + y) * mean

    assert reused(function, X, Y)[1] == ["aten.add_.Tensor", "aten.mul_.Tensor"]


def test_parts_of_one_tensor_share_its_memory():
    def function(x: Tensor, y: Tensor) -> Tensor:
        first, second = (x * y).split(2, 1)
        return (first + 1) @ second.t()

    assert reused(function, X, Y)[1] == []


@pytest.mark.parametrize(
    "alias",
    [
        lambda y: y.unsafe_chunk(2)[0],
        lambda y: y.unsafe_split_with_sizes([1, 2])[1],
        lambda y: y.contiguous(),
        lambda y: y.expand(3, 4),
        lambda y: y.reshape(2, 6),
        lambda y: y[1:],
        lambda y: y.unbind(1)[2],
        lambda y: y.detach(),
        lambda y: aten._unsafe_view(y, [12]),
        lambda y: y.diagonal(),
        lambda y: y.as_strided([2], [1]),
        lambda y: y.to(torch.float32),
        lambda y: torch.view_as_real(torch.view_as_complex(y.view(3, 2, 2))),
        lambda y: y.swapaxes(0, 1),
        lambda y: y.squeeze(),
        lambda y: y.real,
    ],
)
def test_what_may_be_a_view_is_not_written_over(alias):
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        product = x * 2
        view = alias(product)
        return view, product + 1

    assert reused(function, X, Y)[1] == []


def test_memory_that_may_be_the_callers_is_not_written_over():
    def function(x: Tensor, y: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(x, y * 2)
        return (a + 1) * (b + 1)

    gm, _ = reused(function, X, Y)
    given = set(gm.graph.find_nodes(op="placeholder"))
    assert not any(n.args[0] in given for n in gm.graph.nodes if "_." in str(n.target))
