"""The backend is found, takes options, and refuses those that have no meaning."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import comera_fx
from comera_fx.backend import inner as inner_compilers
from comera_fx.backend.inner import best_inner
from comera_fx.backend.options import MODES, Options
from comera_fx.errors import ConfigError, PlanError
from tests.backend.models import (
    WIDTH,
    Broken,
    SelfAttention,
    Stack,
    assert_as_eager,
    compiled,
    counted,
    floats,
    graph_breaks,
)
from tests.lossless import RANDOM

X = floats(5, WIDTH)


def fault_of(function, *args) -> BaseException:
    """The error of ours that made compiling fail."""
    with pytest.raises(BackendCompilerFailed) as caught:
        function(*args)
    return caught.value.inner_exception


def test_torch_finds_the_backend_by_itself():
    code = """
import sys, torch
assert "comera" in torch._dynamo.list_backends()
assert "comera_fx" not in sys.modules
torch.compile(torch.sin, backend="comera")(torch.zeros(2))
assert "comera_fx.backend" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_defaults():
    assert Options.read(None, None) == Options()
    assert Options.read({}, "max-autotune").mode == "max-autotune"


WRONG = {
    "unknown": ({"iner": "eager", "depth": 2}, "no such option", "'depth, iner'"),
    "inner": ({"inner": "triton"}, "inner names no compiler", "'triton'"),
    "memory-kind": ({"memory_limit_bytes": 1.5}, "no number of bytes", "1.5"),
    "memory-bool": ({"memory_limit_bytes": True}, "no number of bytes", "True"),
    "memory-size": ({"memory_limit_bytes": 0}, "no number of bytes", "0"),
    "dump": ({"dump": 3}, "dump is no folder", "3"),
    "disable-kind": ({"disable": "BatchChains"}, "disable is no list", "'BatchChains'"),
    "disable-name": ({"disable": ["BatchChain"]}, "no such pass", "BatchChain"),
    "disable-items": ({"disable": [3]}, "disable is no list", "[3]"),
    "freeze": ({"freeze": 1}, "freeze is neither true nor false", "1"),
}


@pytest.mark.parametrize(("options", "problem", "got"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(options, problem, got):
    with pytest.raises(ConfigError) as caught:
        Options.read(options, None)
    assert problem in caught.value.problem
    assert caught.value.got == got


def test_a_wrong_mode_is_refused():
    with pytest.raises(ConfigError, match="no such mode") as caught:
        Options.read(None, "fast")
    assert caught.value.expected == f"one of {', '.join(MODES)}"


def test_a_wrong_option_stops_torch_compile():
    fault = fault_of(compiled(Stack(), depth=2), X)
    assert isinstance(fault, ConfigError)
    assert "no such option" in fault.problem


# ---- inner compilers ----


@pytest.mark.parametrize("name", ["eager", "aot_eager", "auto"])
def test_inner_compilers(name):
    model = Stack()
    assert_as_eager(compiled(model, inner=name), model, X)
    backward = 0 if name == "eager" else 1
    found = counted("tt_layers", "expanded", "forward_graphs", "backward_graphs")
    assert found == [2, 2, 1, backward]


def test_cudagraphs_are_refused_on_a_cpu():
    fault = fault_of(compiled(Stack(), inner="cudagraphs"), X)
    assert isinstance(fault, ConfigError)
    assert fault.problem == "inner='cudagraphs' needs a CUDA device"
    assert fault.got == "inputs on cpu"


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setattr(inner_compilers, "TABLES", tmp_path)
    best_inner.cache_clear()
    yield tmp_path
    best_inner.cache_clear()


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_accepted(tables, mode):
    model = Stack(1)
    fast = torch.compile(model, backend="comera", mode=mode)
    torch.testing.assert_close(fast(X), model(X))
    assert counted("tt_layers", "expanded") == [1, 1]


def test_auto_without_a_table(tables):
    assert [best_inner(kind) for kind in ("cpu", "cuda", "xpu")] == [
        "aot_eager",
        "inductor",
        "aot_eager",
    ]


def test_auto_reads_the_table_of_the_device(tables):
    (tables / "inner_cpu.json").write_text(json.dumps({"device": "x", "inner": "eager"}))
    assert best_inner("cpu") == "eager"
    compiled(Stack(), inner="auto")(X).sum().backward()
    assert counted("forward_graphs", "backward_graphs") == [1, 0]


@pytest.mark.parametrize("table", [{}, {"inner": "auto"}, {"inner": "tvm"}, {"inner": None}])
def test_a_table_that_names_no_compiler_is_refused(tables, table):
    (tables / "inner_cpu.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"inner_cpu\.json names no inner compiler"):
        best_inner("cpu")


# ---- what options do ----


def test_a_memory_limit_that_no_plan_meets_is_refused():
    fault = fault_of(compiled(Stack(), memory_limit_bytes=1), X)
    assert isinstance(fault, PlanError)


def test_a_memory_limit_that_plans_meet_changes_nothing():
    model = Stack()
    assert_as_eager(compiled(model, memory_limit_bytes=1 << 30), model, X)


def passes_in(folder) -> list[str]:
    return [path.stem.split("_", 1)[1] for path in sorted(folder.glob("*.diff"))]


def test_passes_are_left_out_by_name(tmp_path):
    model, x = SelfAttention().eval(), floats(2, 4, WIDTH)
    without = {"some": (), "none": ["ExpandPlan"]}
    for name, disable in without.items():
        torch._dynamo.reset()
        fast = compiled(model, dump=tmp_path / name, disable=disable)
        assert_as_eager(fast, model, x)
    assert "ExpandPlan" in passes_in(tmp_path / "some" / "graph_0")
    assert "ExpandPlan" not in passes_in(tmp_path / "none" / "graph_0")
    assert counted("tt_layers", "expanded") == [6, 3]


@graph_breaks
def test_dump_has_a_folder_per_graph(tmp_path):
    model = Broken()
    folder = tmp_path / "new" / "graphs"
    assert_as_eager(compiled(model, fullgraph=False, dump=str(folder)), model, X)
    assert sorted(path.name for path in folder.iterdir()) == ["graph_0", "graph_1"]
    for graph in folder.iterdir():
        names = {path.name for path in graph.iterdir()}
        assert {"plans.txt", "before.svg", "after.svg"} <= names
        assert passes_in(graph) == ["ExpandPlan"]
        assert (graph / "plans.txt").read_text().split("\n")[0] in ("first", "second")
        assert "aten.mm.default" in (graph / "00_ExpandPlan.diff").read_text()


def test_dump_never_writes_over_an_older_graph(tmp_path):
    for _ in range(2):
        torch._dynamo.reset()
        compiled(nn.Sequential(Stack(1)), dump=tmp_path)(X)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph_0", "graph_1"]


def test_a_memory_limit_holds_for_equal_layers_too():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    model = comera_fx.optimize(model, config=RANDOM)
    compiled = torch.compile(model, backend="comera", options={"memory_limit_bytes": 1})
    with pytest.raises(BackendCompilerFailed, match="stays below the memory limit"):
        compiled(torch.randn(512, 64))


def test_nothing_counts_as_expanded_without_the_pass():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    model = comera_fx.optimize(model, config=RANDOM)
    options = {"disable": ["ExpandPlan"], "inner": "aot_eager"}
    x = torch.randn(512, 64)
    compiled = torch.compile(model, backend="comera", options=options)
    torch.testing.assert_close(compiled(x), model(x))
    assert counters["comera_fx"]["tt_layers"] == 6
    assert counters["comera_fx"]["expanded"] == 0
