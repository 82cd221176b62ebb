"""capture: which method is used, what the graph says, and that the model is left as it was."""

import random
import re
import sys
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comera_fx.capture import Captured, capture
from comera_fx.errors import CaptureError, ConfigError
from comera_fx.report import format_graph


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))


class Reader(nn.Module):
    """One layer that is called, one whose weight is read, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.idle = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.called(x), self.read.weight, self.read.bias)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return y if y.sum().item() > 0 else -y


class Stateful(nn.Module):
    """Writes to everything that a forward pass can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, max_norm=0.5)
        self.norm, self.drop, self.fc = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))
        self.num_calls, self.cache = 0, None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.count.add_(1)
        y = self.fc(self.drop(self.norm(self.embed(ids)))) * random.random()
        self.last, self.cache = y.detach()[0], y
        return y


def calls(captured: Captured) -> list[str]:
    return [str(n.target) for n in captured.gm.graph.nodes if n.op == "call_module"]


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# ---- methods ----


def test_with_inputs_the_graph_is_exported_and_names_every_layer():
    model, x = mlp(), torch.randn(4, 8)
    captured = capture(model, x)
    assert (captured.kind, captured.notes) == ("export", ())
    assert calls(captured) == ["0", "2"]
    assert captured.called == {"0", "2"}
    assert captured.gm.get_submodule("0") is model[0]
    assert torch.equal(captured.gm(x), model(x))


def test_exported_graph_as_text():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
    lines = _lines(capture(model, torch.tensor([[1, 2, 3]])))
    # The names of symbolic sizes are torch's own.
    assert [re.sub(r"\bs\d+", "s", line) for line in lines] == [
        "%input_1: [1, s] = placeholder[input]()",
        "%_0: [1, s, 4] = call_module[0](%input_1)",
        "%_1: [1, s, 2] = call_module[1](%_0)",
        "return [%_1]",
    ]


def _lines(captured: Captured) -> list[str]:
    return format_graph(captured.gm.graph).splitlines()


def test_exported_graph_takes_other_batch_and_sequence_lengths():
    captured = capture(mlp(), torch.randn(4, 3, 8))
    assert captured.gm(torch.randn(2, 7, 8)).shape == (2, 7, 8)


def test_without_inputs_the_graph_is_traced_symbolically():
    model, x = mlp(), torch.randn(4, 8)
    captured = capture(model)
    assert captured.kind == "symbolic_trace"
    assert captured.notes == ("not checked by a replay: there were no example_inputs",)
    assert captured.num_tokens == {}
    assert calls(captured) == ["0", "1", "2"]
    assert torch.equal(captured.gm(x), model(x))


@pytest.mark.parametrize("example", [None, torch.randn(4, 8)], ids=["no-inputs", "inputs"])
def test_control_flow_falls_to_the_module_graph_and_says_so(example):
    captured = capture(Branching(), example)
    assert captured.kind == "module_graph"
    assert calls(captured) == ["fc"]
    assert captured.num_tokens == ({} if example is None else {"fc": 4})
    notes = "\n".join(captured.notes)
    assert "symbolic_trace was not used: symbolically traced variables cannot be used" in notes
    assert ("export was not used: " in notes) == (example is not None)
    assert notes.endswith("module graph: no data flow, and direct reads of weights are not seen")


def test_export_that_fails_prints_nothing(capfd: pytest.CaptureFixture[str]):
    capture(Branching(), torch.randn(4, 8))
    assert capfd.readouterr() == ("", "")


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = Branching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def test_module_graph_has_a_node_per_layer_and_per_loose_weight():
    model = Owner()
    captured = capture(model)
    assert _lines(captured) == [
        "%unknown = placeholder[unknown]()",
        "%scale = get_attr[scale]()",
        "%inner_fc = call_module[inner.fc](%unknown)",
        "return [%scale, %inner_fc]",
    ]
    assert captured.gm.get_submodule("inner.fc") is model.inner.fc
    assert captured.gm.get_submodule("inner") is not model.inner


class Baked(nn.Module):
    """A trace cannot know the value that is counted up on each call."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Baked.calls += 1
        return self.fc(x) * Baked.calls


def test_a_trace_whose_replay_differs_is_not_used():
    captured = capture(Baked(), torch.randn(2, 8))
    assert captured.kind == "module_graph"
    assert captured.notes[:2] == (
        "export was not used: its replay differs from the model's own output",
        "symbolic_trace was not used: its replay differs from the model's own output",
    )


class NoGradPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.frozen(x)
        return self.head(h)


def test_layers_in_a_no_grad_block_are_found():
    captured = capture(NoGradPart(), torch.randn(2, 8))
    assert captured.kind == "symbolic_trace"
    assert captured.called == {"frozen", "head"}
    assert "nested graph" in captured.notes[0]


class Cache:
    def __init__(self, state: torch.Tensor) -> None:
        self.state = state


class ReturnsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.fc(x)
        return {"y": y, "cache": Cache(y)}


def test_results_that_export_does_not_know_are_left_out_and_said():
    model = ReturnsCache()
    captured = capture(model, {"x": torch.randn(2, 8)})
    assert captured.kind == "export"
    assert captured.notes == ("the graph leaves out results of type Cache",)
    assert "forward" not in vars(model)


# ---- what the graph says about layers ----


def test_rows_of_the_largest_call_are_counted():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    captured = capture(model, torch.zeros(3, 5, dtype=torch.long))
    assert captured.num_tokens == {"0": 15, "1": 15}


def test_weight_that_is_read_without_a_call_is_functional():
    by_export, by_trace = capture(Reader(), torch.randn(2, 8)), capture(Reader())
    assert by_export.functional == {"read.weight": "%linear_1 = call_function[linear.default]"}
    assert by_trace.functional == {"read.weight": "%linear = call_function[linear]"}
    for captured in (by_export, by_trace):
        assert captured.called == {"called"}
    assert by_export.num_tokens == {"called": 2}


class ReadsProperties(nn.Module):
    """Looks at its weights, at their numbers only through calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unused = self.second.weight
        x = x.to(dtype=self.first.weight.dtype).reshape(-1, self.first.weight.shape[1])
        return self.second(self.first(x)) if unused is not None else x


@pytest.mark.parametrize("example", [None, torch.randn(2, 8)], ids=["no-inputs", "inputs"])
def test_reading_a_property_of_a_weight_is_no_functional_use(example):
    captured = capture(ReadsProperties(), example)
    assert captured.kind == ("symbolic_trace" if example is None else "export")
    assert captured.functional == {}
    assert captured.called == {"first", "second"}
    assert not any(node.op == "get_attr" for node in captured.gm.graph.nodes)
    assert captured.gm(torch.randn(3, 8)).shape == (3, 8)


class CalledAndRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.fc(x), self.fc.weight, self.fc.bias)


def test_layer_that_is_called_and_read_is_functional():
    captured = capture(CalledAndRead(), torch.randn(2, 8))
    assert list(captured.functional) == ["fc.weight"]


def test_shared_layer_has_its_first_name_and_all_its_calls():
    layer = nn.Linear(8, 8)
    captured = capture(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(2, 8))
    assert calls(captured) == ["0", "0"]


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=2)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_tied_layers_are_told_apart():
    captured = capture(TiedModel(), torch.tensor([[1, 2, 3]]))
    assert captured.kind == "export"
    assert calls(captured) == ["embed", "head"]
    assert captured.functional == {}


@pytest.mark.parametrize("example", [None, torch.randn(3, 8)], ids=["no-inputs", "inputs"])
def test_a_model_that_is_itself_one_layer(example):
    layer = nn.Linear(8, 8)
    captured = capture(layer, example)
    assert captured.called == {""}
    assert captured.gm.get_submodule("root") is layer
    assert captured.num_tokens == ({} if example is None else {"": 3})


# ---- arguments ----


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float, shift: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * scale + shift


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (mlp(), torch.randn(2, 8)),
        (mlp(), (torch.randn(2, 8),)),
        (mlp(), [torch.randn(2, 8)]),
        (mlp(), {"input": torch.randn(2, 8)}),
        (TwoArguments(), {"x": torch.randn(2, 8), "scale": 2.0, "shift": torch.ones(())}),
    ],
    ids=["tensor", "tuple", "list", "mapping", "keywords"],
)
def test_forms_of_example_inputs(model, example):
    assert capture(model, example).kind == "export"


def test_example_inputs_of_another_type_are_refused():
    with pytest.raises(ConfigError) as error:
        capture(mlp(), "text")
    assert str(error.value).splitlines() == [
        "example_inputs cannot be turned into the arguments of a call",
        "  got:      str",
        "  expected: a tensor, a tuple or list of arguments, or a mapping of keyword arguments",
        "  mend:     write example_inputs=(x,) for model(x)",
    ]


def test_inputs_that_the_model_refuses():
    model = mlp()
    before = snapshot(model)
    with pytest.raises(CaptureError) as error:
        capture(model, torch.randn(2, 9))
    lines = str(error.value).splitlines()
    assert lines[0] == "Sequential fails on the example_inputs"
    assert lines[1].startswith("  got:      RuntimeError: mat1 and mat2 shapes")
    assert len(lines) == 4
    assert isinstance(error.value.__cause__, RuntimeError)
    assert_unchanged(model, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


# ---- the model is left as it was ----


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
