"""Gradients that are not finite leave no trace, and a ``GradScaler`` goes on looking at its own."""

import warnings

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.finite import FiniteSteps
from tests.train.steps import NAN, batch, everything, quiet, small_model, train


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_scaler_halves_its_scale_and_the_next_step_is_taken(fused, unscale, gradients):
    ends = []
    for steps in ([0, 1, NAN, 2, 3], [0, 1, 2, 3]):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        finite = FiniteSteps(optimizer, gradients=gradients)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with quiet() if NAN in steps else warnings.catch_warnings():
            for step in steps:
                x, y = batch(step)
                loss = nn.functional.mse_loss(model(x), y)
                finite.note(loss)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert finite.ended_step() == (step is NAN)
        assert scaler.get_scale() == (4.0 if NAN in steps else 8.0)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_that_a_scaler_made_infinite_are_its_own_affair(fused, unscale):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    finite = FiniteSteps(optimizer, gradients=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    before = everything(model)
    loss = nn.functional.mse_loss(model(batch(0)[0]), 100 * batch(0)[1])
    finite.note(loss)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not finite.ended_step()
    assert scaler.get_scale() == pytest.approx(1.5e38)
    assert everything(model) == before


def test_gradients_that_are_not_finite_are_dropped_where_asked_for():
    for gradients in (False, True):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        finite = FiniteSteps(optimizer, gradients=gradients)
        before = everything(model)
        loss = model(torch.zeros(1, 2)).sum().clamp(max=1.0)
        finite.note(loss)
        loss.backward()
        model.weight.grad[0, 1] = NAN
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert finite.ended_step() is gradients
        assert (everything(model) == before) is gradients
        told = [str(warning.message) for warning in caught]
        assert told == ["a gradient of step 1 is not finite: the step is skipped."] * gradients


@pytest.mark.parametrize("method", ["comera", "proximal"])
def test_a_finite_loss_whose_gradient_is_not_leaves_no_trace_in_a_run(method):
    """The root of 0: every step that follows would have had cores of NaN to cut."""
    ends = []
    for bad in (True, False):
        model = small_model()
        optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3))
        adapter = RankAdapter(model, optimizer, RankConfig(method=method, prune_every=4))
        with quiet() if bad else warnings.catch_warnings():
            for step in (0, 1, 2, 3, None, 4, 5, 6, 7) if bad else range(8):
                x, y = batch(step or 0)
                task = nn.functional.mse_loss(model(x), y)
                if step is None:
                    task = (0.0 * task).sqrt()
                optimizer.zero_grad()
                adapter.loss(task).backward()
                optimizer.step()
                adapter.step()
        assert adapter.num_skipped == bad
        ends.append(everything(model, optimizer) + repr(adapter.ranks))
    assert ends[0] == ends[1]


def test_a_loss_and_gradients_are_asked_for_in_one_wait(monkeypatch):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite, waits = FiniteSteps(optimizer), []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.append(self) or read(self))
    train(model, [optimizer], finite, [0, 1, 2])
    assert len(waits) == 3


def test_an_optimizer_that_holds_nothing_yet_takes_its_steps():
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    finite = FiniteSteps(optimizer)
    finite.note(torch.tensor(1.0))
    optimizer.step()
    assert not finite.ended_step()


@pytest.mark.parametrize("value", [1.0, 3e38, NAN])
def test_a_gradient_without_entries_is_left_out(value):
    """As of the rank weights of a layer that has died."""
    held = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD(held, lr=1e-30)
    finite = FiniteSteps(optimizer)
    for parameter in held:
        parameter.grad = torch.full_like(parameter, value)
    with quiet() if value is NAN else warnings.catch_warnings():
        optimizer.step()
    assert finite.ended_step() is (value is NAN)


def test_large_and_sparse_gradients_are_finite():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1e-30)
    finite = FiniteSteps(optimizer)
    (table(torch.tensor([1, 1])).sum() * 3e38 / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert not finite.ended_step()
