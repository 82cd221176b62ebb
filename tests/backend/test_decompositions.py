"""Dropout from fewer random numbers: the share, the scale, the gradient and the seed."""

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx.backend.decompositions import _dropout, faster_on_cpu
from tests.lossless import RANDOM


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_kept_and_its_scale(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(1000, 1001, dtype=dtype)
    y, mask = _dropout(x, p, True)
    assert y.dtype == mask.dtype == dtype
    kept = y != 0
    # Four standard deviations of a binomial share.
    assert float(kept.double().mean()) == pytest.approx(
        1 - p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5
    )
    expected = torch.full_like(y[kept], 1 / (1 - p))
    torch.testing.assert_close(y[kept], expected)
    torch.testing.assert_close(y, mask)
    rows, columns = kept.double().mean(1), kept.double().mean(0)
    assert float(rows.std()) == pytest.approx((p * (1 - p) / 1001) ** 0.5, rel=0.1)
    assert float(columns.std()) == pytest.approx((p * (1 - p) / 1000) ** 0.5, rel=0.1)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (0.5, False), (0.5, None)])
def test_what_has_no_chance_in_it_is_left_to_torch(p, train):
    assert _dropout(torch.ones(4), p, train) is NotImplemented


def test_other_dtypes_are_left_to_torch():
    assert _dropout(torch.ones(4, dtype=torch.float64), 0.5, True) is NotImplemented
    assert torch.ops.aten.native_dropout.default in faster_on_cpu()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.up(x))


def compiled(**options):
    torch.manual_seed(0)
    model = comera_fx.optimize(Dropping(), config=RANDOM)
    return model, torch.compile(model, backend="comera", options={"inner": "aot_eager", **options})


def test_gradients_are_dropped_where_values_are():
    model, fast = compiled()
    x = torch.randn(16, 64, requires_grad=True)
    y = fast(x)
    (kept,) = (torch.autograd.grad(y.sum(), y, retain_graph=True),)
    y.sum().backward()
    mask = (y != 0).float() * 2
    dense = model.up(x).detach()
    torch.testing.assert_close(y, dense * mask)
    torch.testing.assert_close(model.up.bias.grad, mask.sum(0))
    assert kept[0].shape == y.shape


def test_a_seed_means_the_same_every_time():
    _, fast = compiled()
    x = torch.randn(16, 64)
    torch.manual_seed(7)
    first, other = fast(x), fast(x)
    torch.manual_seed(7)
    assert torch.equal(fast(x), first)
    assert not torch.equal(first, other)


def test_fallback_random_draws_what_eager_mode_draws():
    model, fast = compiled(fallback_random=True)
    x = torch.randn(16, 64)
    torch.manual_seed(7)
    mine = fast(x)
    torch.manual_seed(7)
    torch.testing.assert_close(mine, model(x))
