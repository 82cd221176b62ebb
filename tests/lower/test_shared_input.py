"""Factors applied to an input that several layers read: one product, one node as one a layer."""

import pytest
import torch

from comera_fx.lower import shared_input
from comera_fx.lower.shared_input import apply_factors

IN, RANKS, OUT = 6, (2, 3, 1), (4, 4, 6)
SHAPES = [(IN,), (5, IN), (2, 3, IN)]


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


class Layers:
    """Three layers that read one input; one without a bias."""

    def __init__(self, *, split=False):
        torch.manual_seed(0)
        self.lefts = [numbers(IN, rank) for rank in RANKS]
        self.biases = [None, numbers(4), numbers(6)]
        self.heads = [numbers(rank, 2, 3) if split else None for rank in RANKS]
        self.rights = [
            numbers(3, out // 2) if split else numbers(rank, out)
            for rank, out in zip(RANKS, OUT, strict=True)
        ]

    @property
    def leaves(self):
        every = (*self.lefts, *self.rights, *self.biases, *self.heads)
        return [leaf for leaf in every if leaf is not None]

    def outputs(self, x):
        return apply_factors(x, self.lefts, self.rights, self.biases, self.heads)

    def expected(self, x):
        """The same, one layer after the other."""
        ys = []
        for left, right, bias, head in zip(
            self.lefts, self.rights, self.biases, self.heads, strict=True
        ):
            if head is not None:
                right = (head.flatten(0, 1) @ right).reshape(left.shape[1], -1)
            y = x @ left @ right
            ys.append(y if bias is None else y + bias)
        return ys


@pytest.fixture(params=["whole", "split", "by columns"])
def layers(request, monkeypatch):
    if request.param == "by columns":
        monkeypatch.setattr(shared_input, "BY_COLUMNS_FROM", 1)
    return Layers(split=request.param == "split")


def assert_same_gradients(found, wanted, leaves):
    got = torch.autograd.grad(found, leaves, allow_unused=True)
    expected = torch.autograd.grad(wanted, leaves, allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients(layers, shape):
    x = numbers(*shape)
    found, wanted = layers.outputs(x), layers.expected(x)
    torch.testing.assert_close(found, wanted)
    loss, other = (sum(y.sin().sum() for y in ys) for ys in (found, wanted))
    assert_same_gradients(loss, other, [x, *layers.leaves])


@pytest.mark.parametrize("shape", SHAPES)
def test_second_derivatives(shape):
    layers, x = Layers(), numbers(*shape)

    def run(x, *leaves):
        return apply_factors(x, leaves[:3], leaves[3:6], (None, *leaves[6:]))

    torch.autograd.gradcheck(run, (x, *layers.leaves), fast_mode=True)
    torch.autograd.gradgradcheck(run, (x, *layers.leaves), fast_mode=True)


@pytest.mark.parametrize("number", range(3))
def test_a_layer_whose_output_is_not_used_gets_no_gradient(layers, number):
    x = numbers(5, IN)
    used = [k for k in range(3) if k != number]
    found, wanted = layers.outputs(x), layers.expected(x)
    assert_same_gradients(
        sum(found[k].sum() for k in used), sum(wanted[k].sum() for k in used), [x, *layers.leaves]
    )


def test_outputs_go_backward_one_by_one_without_keeping_the_graph(layers):
    x = numbers(5, IN)
    outputs = layers.outputs(x)
    for y in outputs:
        y.sin().sum().backward()
    (wanted,) = torch.autograd.grad(sum(y.sin().sum() for y in layers.expected(x)), x)
    torch.testing.assert_close(x.grad, wanted)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        outputs[1].sum().backward()


def test_an_input_changed_between_two_backward_passes_is_an_error(layers):
    x = numbers(5, IN)
    outputs = layers.outputs(x)
    outputs[0].sum().backward()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[1].sum().backward()


def test_a_factor_changed_before_second_derivatives_is_an_error():
    layers, x = Layers(), numbers(5, IN)
    outputs = layers.outputs(x)
    with torch.no_grad():
        layers.lefts[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outputs[1].square().sum(), x, create_graph=True)


def test_outputs_may_be_changed_in_place(layers):
    x = numbers(2, 3, IN)
    found, wanted = layers.outputs(x), layers.expected(x)
    found = [y.relu_() for y in found]
    assert_same_gradients(sum(y.sum() for y in found), sum(y.relu().sum() for y in wanted), [x])


def test_frozen_factors_leave_the_gradient_of_the_input():
    layers, x = Layers(), numbers(5, IN)
    for leaf in layers.leaves:
        leaf.requires_grad_(False)
    assert_same_gradients(
        sum(y.sin().sum() for y in layers.outputs(x)),
        sum(y.sin().sum() for y in layers.expected(x)),
        [x],
    )


def test_complex_numbers():
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, dtype=torch.complex128, generator=generator).requires_grad_()
        for shape in ((5, 6), (6, 2), (6, 3), (2, 4), (3, 4))
    ]

    def run(x, *given):
        return apply_factors(x, given[:2], given[2:], (None, None))

    torch.autograd.gradcheck(run, leaves, fast_mode=True)
