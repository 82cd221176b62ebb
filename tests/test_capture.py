"""capture: which method is used, what the graph says, and that the model is left as it was."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comera_fx.capture import Captured, capture
from comera_fx.errors import CaptureError, ConfigError
from comera_fx.report import format_graph
from tests.capture_models import Branching, Reader, assert_unchanged, calls, mlp, snapshot

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
