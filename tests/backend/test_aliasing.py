"""What models write to, return and freeze is as in eager mode, also where layers share."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from comera_fx import lowering
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec

DENSE = torch.ops.comera_fx.tt_dense
INNERS = pytest.mark.parametrize("inner", ["aot_eager", "eager"])


@pytest.fixture(autouse=True)
def layers_share(monkeypatch):
    monkeypatch.setattr(lowering, "worth_sharing", lambda spec, nodes: "factors")


class Layers(nn.Module):
    """Layers of one shape, cores of a matrix as parameters and as buffers, and what runs them."""

    def __init__(self, run, in_features=16):
        super().__init__()
        torch.manual_seed(0)
        spec = TTSpec("tt", (4, 4 if in_features == 16 else 5), (4, 4), (1, 4, 4, 4, 1))
        self.q = nn.ModuleList([TTLinear(spec, in_features, 16) for _ in range(3)])
        self.a, self.b = nn.Parameter(torch.randn(1, 16, 5)), nn.Parameter(torch.randn(5, 16, 1))
        self.register_buffer("p", torch.randn(80))
        self.register_buffer("r", torch.randn(80))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))
        self.elu = nn.ELU(inplace=True)
        self.run = run

    def weight(self, *cores):
        return DENSE(list(cores or (self.a, self.b)), "tt", 1, 16, 16)

    def forward(self, x):
        return self.run(self, x)


def results(function, model, x):
    """Outputs, whether they require gradients, gradients and buffers after one step."""
    x = x.clone().requires_grad_()
    out = function(x)
    outputs = list(out) if isinstance(out, (tuple, list)) else [out]
    needs = [y.requires_grad for y in outputs]
    loss = sum(y.square().sum() for y in outputs if y.requires_grad)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return (
        outputs,
        needs,
        [None if g is None else g.clone() for g in grads],
        dict(model.named_buffers()),
    )


def assert_as_eager(run, inner, in_features=16, prepare=lambda model: None):
    mine, theirs = Layers(run, in_features), Layers(run, in_features)
    prepare(mine)
    prepare(theirs)
    compiled = torch.compile(mine, backend="comera", options={"inner": inner})
    x = torch.randn(8, in_features)
    found, expected = results(compiled, mine, x), results(theirs, theirs, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def made_without_gradients(m, x):
    with torch.no_grad():
        w = m.weight()
    return F.linear(x, w) + m.q[0](x)


def turned_without_gradients(m, x):
    w = m.weight()
    with torch.no_grad():
        v = w.t()
    return x @ v + m.q[0](x)


def cut_without_gradients(m, x):
    w = m.weight()
    with torch.no_grad():
        v = w[:8]
    return F.linear(x, w), F.linear(x, v)


def cores_of_a_written_buffer(m, x):
    w = m.weight(m.p.view(1, 16, 5), m.r.view(5, 16, 1))
    m.p.mul_(2)
    return F.linear(x, w)


def cores_written_together(m, x):
    first, second = m.p.view(1, 16, 5), m.r.view(5, 16, 1)
    w = m.weight(first, second)
    torch._foreach_mul_([first, second], 0.5)
    return F.linear(x, w)


def cores_written_in_a_checkpoint(m, x):
    w = m.weight(m.p.view(1, 16, 5), m.r.view(5, 16, 1))
    z = checkpoint(lambda p: p.mul_(0.5).sum(), m.p, use_reentrant=False)
    return F.linear(x, w) + z


def statistics_as_input(m, x):
    h = m.mean
    first = m.q[0](h)
    F.batch_norm(x, m.mean, m.var, training=True)
    return [first, *(layer(h) for layer in list(m.q)[1:])]


def one_result_twice(m, x):
    return [m.q[0](x), m.q[0](x), m.q[1](x)]


@INNERS
@pytest.mark.parametrize(
    "run",
    [
        made_without_gradients,
        turned_without_gradients,
        cut_without_gradients,
        cores_of_a_written_buffer,
        cores_written_together,
        cores_written_in_a_checkpoint,
        statistics_as_input,
    ],
)
def test_as_eager(run, inner):
    assert_as_eager(run, inner)


@INNERS
@pytest.mark.parametrize("write", ["elu", "foreach"])
def test_an_input_that_is_written_to_between_its_readers(write, inner):
    def run(m, x):
        h = x * 1
        first = m.q[0](h)
        m.elu(h) if write == "elu" else torch._foreach_mul_([h], 0.5)
        return [first, *(layer(h) for layer in list(m.q)[1:])]

    model = Layers(run)
    compiled = torch.compile(model, backend="comera", options={"inner": inner})
    x = torch.randn(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@INNERS
def test_two_inputs_that_share_memory(inner):
    model = Layers(None)

    def run(x, y):
        first = model.q[0](x)
        y.add_(1.0)
        return [first, *(layer(x) for layer in list(model.q)[1:])]

    compiled = torch.compile(run, backend="comera", options={"inner": inner})
    b = torch.randn(8, 16)
    mine, theirs = b.clone(), b.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(mine, mine[0]), run(theirs, theirs[0]))


@INNERS
def test_a_result_that_is_returned_twice_may_be_written_to(inner):
    model = Layers(one_result_twice)
    compiled = torch.compile(model, backend="comera", options={"inner": inner})
    with torch.no_grad():
        first, second, _ = compiled(torch.randn(8, 16))
        before = second.clone()
        first.add_(100.0)
    torch.testing.assert_close(second, before)


@INNERS
def test_outputs_may_be_written_to(inner):
    a, b = nn.Linear(2, 16, bias=False), nn.Linear(2, 16, bias=False)
    compiled = torch.compile(lambda x: (a(x), b(x)), backend="comera", options={"inner": inner})
    first, second = compiled(torch.randn(16, 2))
    first.add_(1)
    second.mul_(2)


@INNERS
def test_a_frozen_layer_needs_no_gradient(inner):
    model = Layers(lambda m, x: [layer(x) for layer in m.q])
    model.q[0].requires_grad_(False)
    compiled = torch.compile(model, backend="comera", options={"inner": inner})
    assert [y.requires_grad for y in compiled(torch.randn(8, 16))] == [False, True, True]


@INNERS
@pytest.mark.parametrize("in_features", [16, 17])
def test_an_input_that_a_frozen_or_padded_layer_lets_one_write_to(in_features, inner):
    def run(m, x):
        h = x * 2
        gate = m.q[0](h).sigmoid()
        h.add_(gate.sum(1, keepdim=True))
        return m.q[1](h) + m.q[2](h)

    def freeze(model):
        if in_features == 16:
            model.q[0].requires_grad_(False)

    assert_as_eager(run, inner, in_features, freeze)
