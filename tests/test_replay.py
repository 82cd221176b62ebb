"""Capture leaves the model, its containers, the generators and the inputs as they were."""

import random
import sys
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from comera_fx.capture import capture
from tests.capture_models import Stateful, assert_unchanged, mlp, snapshot


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("with_inputs", [True, False], ids=["inputs", "no-inputs"])
def test_the_model_and_the_generators_are_left_as_they_were(training, with_inputs):
    model, ids = Stateful().train(training), torch.arange(10).reshape(5, 2)[:, 0]
    model.drop.eval()
    model.fc.weight.grad = grad = torch.ones(8, 8)
    before, attributes = snapshot(model), dict(vars(model))
    flags = [module.training for module in model.modules()]
    numbers, python_numbers = torch.get_rng_state(), random.getstate()
    last = model.last

    captured = capture(model, ids if with_inputs else None)

    assert_unchanged(model, before)
    assert vars(model) == attributes
    assert model.last is last
    assert model.fc.weight.grad is grad
    assert torch.equal(grad, torch.ones(8, 8))
    assert [module.training for module in model.modules()] == flags
    assert captured.gm.training == training
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == python_numbers
    assert not any(module._forward_pre_hooks for module in model.modules())


class Remembers(nn.Module):
    """Fills containers of many kinds, nested and shared, and writes into a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.cache, self.losses, self.seen = {"old": [1]}, [0.5], {1}
        self.recent, self.by_name = deque([1, 2], maxlen=2), defaultdict(list, {"a": [1]})
        self.order, self.pair = OrderedDict(a=1, b=2), ([], {})
        self.alias, self.steps = self.losses, torch.zeros(())
        self.losses.append(self.losses)  # a list may hold itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        self.cache["y"] = y
        self.cache["old"].append(y)
        self.losses[0] = y
        self.losses.append(y)
        self.seen.add(len(self.losses) + 10)
        self.recent.append(y)
        self.by_name["b"].append(y)
        self.order.move_to_end("a")
        self.pair[0].append(y)
        self.pair[1]["y"] = y
        self.steps.add_(1)
        return y


@pytest.mark.parametrize("example", [None, torch.randn(2, 8)], ids=["no-inputs", "inputs"])
def test_containers_get_their_old_contents_back(example):
    model = Remembers()
    attributes = dict(vars(model))
    losses, old = model.losses, model.cache["old"]

    capture(model, example)

    assert all(vars(model)[key] is value for key, value in attributes.items())
    assert (model.cache, model.cache["old"] is old) == ({"old": [1]}, True)
    assert model.alias is losses
    assert len(losses) == 2
    assert (losses[0], losses[1] is losses) == (0.5, True)
    assert (model.seen, model.recent, model.recent.maxlen) == ({1}, deque([1, 2]), 2)
    assert (model.by_name, list(model.order), model.pair) == ({"a": [1]}, ["a", "b"], ([], {}))
    assert model.steps == 0


def test_models_are_captured_in_several_threads():
    stdout, stderr = sys.stdout, sys.stderr
    with ThreadPoolExecutor(4) as pool:
        kinds = list(pool.map(lambda _: capture(mlp(), torch.ones(2, 8)).kind, range(12)))
    assert kinds == ["export"] * 12
    assert (sys.stdout is stdout, sys.stderr is stderr) == (True, True)
    assert not torch.compiler.is_exporting()


def test_a_child_is_not_asked_for_its_truth_value():
    model = nn.Sequential(torch.compile(mlp(), backend="eager"), nn.Linear(8, 8))
    captured = capture(model)
    assert captured.kind == "module_graph"
    assert captured.called == {"0._orig_mod.0", "0._orig_mod.2", "1"}


def test_dropout_is_compared_with_equal_random_numbers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    assert capture(model, torch.randn(4, 8)).kind == "export"


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.fc(x)


def test_the_example_inputs_are_left_as_they_were():
    x = torch.ones(2, 8)
    capture(WritesInput(), x)
    assert torch.equal(x, torch.ones(2, 8))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8, device="meta")),
    ],
    ids=["lazy", "meta"],
)
def test_weights_without_values_are_not_run(model):
    captured = capture(model, torch.randn(2, 8))
    assert captured.kind == "module_graph"
    assert captured.notes[0].startswith("not run or traced: the model has weights without values")
    assert type(model[0]) in (nn.LazyLinear, nn.Linear)
