"""Reports, graphs as text, and diffs per pass."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import fx, nn

import comera_fx
from comera_fx import measure
from comera_fx.config import OptimizeConfig, PlanConfig
from comera_fx.modules import TTLinear
from comera_fx.plan.cost import shipped_model
from comera_fx.plan.linear import plan_linear
from comera_fx.report import explain_model, format_graph
from comera_fx.spec import TTSpec

MODES = {"fc1": ((4, 5, 5), (5, 4, 5)), "embed": ((5, 4), (10, 10))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 100)
        self.fc1, self.act, self.fc2 = nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 4)
        self.fc3 = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc3(self.fc2(self.act(self.fc1(self.embed(ids)))))


class Classifier(nn.Module):
    """Bihaqo/t3f#222: a net for MNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def optimized(ids: torch.Tensor | None = None, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"init": "random", "max_rank": 3, "min_params": 1000, "modes": MODES, **config}
    ids = torch.zeros(4, 8, dtype=torch.long) if ids is None else ids
    return comera_fx.optimize(Net(), ids, config=OptimizeConfig(**settings))


def test_table():
    lines = [line.split() for line in repr(comera_fx.explain(optimized())).splitlines()]
    assert lines[0][:8] == ["layer", "kind", "modes", "ranks", "balance", "dense", "TT", "ratio"]
    assert lines[1][:9] == ["embed", "embedding", "ttm", "5x4", "->", "10x10", "3", "2.5", "2,000"]
    assert lines[2][:10] == [
        "fc1",
        "linear",
        "tt",
        "4x5x5",
        "->",
        "5x4x5",
        "3,3,3,3,3",
        "1.2",
        "10,000",
        "198",
    ]
    text = repr(comera_fx.explain(optimized()))
    assert text.splitlines()[3:] == [
        "left dense:",
        "  2 layers (fc2, ...): fewer than min_params=1,000 weights",
        "compressed layers: 12,000 -> 468 parameters (25.6x)",
        "whole model:       12,524 -> 992 parameters (12.6x)",
        "captured by export",
    ]


def test_columns_are_aligned():
    header, *rows = repr(comera_fx.explain(optimized())).splitlines()[:3]
    end = header.index("ratio") + len("ratio")
    assert all(row[end - 1] == "x" and row[end] == " " for row in rows)


def test_figures_of_a_linear_layer_equal_a_hand_count():
    """CoMERA's chains: left cores to L, right cores to R, then (x L) R, at 32 tokens."""
    layer = comera_fx.explain(optimized()).layers["fc1"]
    left = 4 * 3 * 5 * 3 + 20 * 3 * 5 * 3  # multiply-adds of G1 G2, then of that by G3
    right = 3 * 4 * 3 * 5 + 3 * 5 * 3 * 20  # of G5 G6, then of G4 by that
    product = 32 * 100 * 3 + 32 * 3 * 100
    assert layer.flops_forward == 2 * (left + right + product)
    assert layer.flops_backward == 2 * layer.flops_forward
    assert layer.dense_flops_forward == 2 * 32 * 100 * 100
    assert layer.dense_flops_backward == 2 * layer.dense_flops_forward
    assert layer.num_tokens == 32
    assert layer.ranks == (1, 3, 3, 3, 3, 3, 1)
    assert layer.tt_params == 4 * 3 + 3 * 5 * 3 + 3 * 5 * 3 + 3 * 5 * 3 + 3 * 4 * 3 + 3 * 5 == 198
    assert layer.bytes == 4 * 198


def test_op_counts_per_layer_equal_a_hand_count():
    """Bihaqo/t3f#219: modes 4x5x5 -> 5x4x5 at rank 3, where G4 G5 G6 is cheapest right to left."""
    plan = PlanConfig(objective="flops")
    layer = comera_fx.explain(optimized(plan=plan)).layers["fc1"]
    left = 4 * 3 * 5 * 3 + 20 * 3 * 5 * 3
    right = 4 * 3 * 5 * 3 + 20 * 3 * 5 * 3
    assert layer.flops_forward == 2 * (left + right + 2 * 32 * 100 * 3)
    assert layer.flops_backward == 2 * layer.flops_forward
    assert layer.bytes == 4 * 198


def test_a_layer_that_saves_less_than_dense_says_so():
    """KhrulkovV/tt-pytorch#6: activations kept for backward."""
    config = OptimizeConfig(init="random", num_tokens_hint=8192)
    report = comera_fx.explain(
        comera_fx.optimize(nn.Sequential(nn.Linear(1024, 1024)), config=config)
    )
    layer = report.layers["0"]
    assert layer.dense_saved_bytes == 4 * (8192 * 1024 + 1024 * 1024)
    assert layer.saved_bytes + layer.bytes <= layer.dense_saved_bytes
    cells = repr(report).splitlines()[1].split()
    assert cells[cells.index("(37.75)") - 1] == f"{(layer.saved_bytes + layer.bytes) / 1e6:.2f}"


def test_predicted_times_are_those_of_the_plan_and_of_a_dense_layer_without_padding():
    model = optimized()
    layer = comera_fx.explain(model).layers["fc1"]
    plan = plan_linear(model.fc1.spec, 32)
    assert layer.predicted_seconds == plan.seconds
    assert layer.dense_predicted_seconds == plan.dense_seconds
    assert layer.measured_seconds is layer.prediction_error is None
    dense = comera_fx.explain(model).layers["fc2"]
    costs = shipped_model("cpu")
    assert dense.dense_predicted_seconds == costs.dense_seconds(
        32, (100, 4), 4, needs_input_grad=True
    )
    assert dense.predicted_seconds is None
    padded = TTLinear(TTSpec("tt", (16, 8), (8, 8), (1, 4, 4, 4, 1)), 97, 64, num_tokens_hint=16)
    figures = comera_fx.explain(padded).layers[""]
    assert figures.dense_predicted_seconds == costs.dense_seconds(
        16, (97, 64), 4, needs_input_grad=True
    )
    assert comera_fx.explain(model).layers["embed"].predicted_seconds is None


def test_costs_are_for_the_tokens_that_the_example_inputs_bring():
    model = optimized()
    report = comera_fx.explain(model, torch.zeros(2, 5, dtype=torch.long))
    assert [layer.num_tokens for layer in report.layers.values()] == [10, 10, 10, 10]
    layer = report.layers["fc1"]
    assert layer.predicted_seconds == plan_linear(model.fc1.spec, 10).seconds
    assert layer.dense_flops_forward == 2 * 10 * 100 * 100
    assert report.layers["fc2"].dense_flops_forward == 2 * 10 * 100 * 4
    assert comera_fx.explain(model).layers["fc1"].num_tokens == 32


def test_layers_that_the_example_inputs_do_not_reach_keep_their_tokens():
    class Half(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids) if ids.shape[0] == 1 else super().forward(ids)

    torch.manual_seed(0)
    config = OptimizeConfig(init="random", max_rank=3, min_params=1000, modes=MODES)
    model = comera_fx.optimize(Half(), torch.zeros(4, 8, dtype=torch.long), config=config)
    report = comera_fx.explain(model, torch.zeros(1, 3, dtype=torch.long))
    assert [layer.num_tokens for layer in report.layers.values()] == [3, 32, 32, 32]


def test_predicted_against_measured_time_per_layer():
    """Bihaqo/t3f#222: fewer FLOPs are no speed-up; the report shows both times of each layer."""
    torch.manual_seed(0)
    config = OptimizeConfig(init="random", max_rank=8, only_if_faster=False)
    x = torch.randn(64, 784)
    model = comera_fx.optimize(Classifier(), x, config=config)
    report = comera_fx.explain(model, x, measure=True)
    assert [layer.name for layer in report.compressed] == ["fc1", "fc2"]
    for layer in report.compressed:
        assert layer.num_tokens == 64
        assert min(layer.measured_seconds, layer.dense_measured_seconds) > 0
        assert layer.prediction_error == layer.predicted_seconds / layer.measured_seconds - 1
        assert layer.dense_prediction_error == (
            layer.dense_predicted_seconds / layer.dense_measured_seconds - 1
        )
    assert report.layers["fc3"].measured_seconds is None
    header, first = repr(report).splitlines()[:2]
    assert " ".join(header.split()).endswith(
        "ms (dense) measured ms (dense) predicted off (dense) tokens error"
    )
    layer = report.layers["fc1"]
    shown = [f"{1e3 * layer.measured_seconds:,.3f}", f"({1e3 * layer.dense_measured_seconds:,.3f})"]
    shown += [f"{100 * layer.prediction_error:+.0f}%"]
    assert [cell for cell in first.split() if cell in shown] == shown
    assert json.loads(json.dumps(report.to_dict()))["layers"]["fc1"]["measured_seconds"] > 0
    assert "measured" not in repr(comera_fx.explain(model, x))


def test_measuring_touches_nothing():
    model = optimized()
    model.fc1.attach_rank_weights(0.01)
    calls: list[object] = []
    model.fc1.register_forward_hook(lambda *args: calls.append(args))
    model.fc1.core_0.register_hook(lambda grad: calls.append(grad))
    model.eval().fc1.train()
    model.fc1.core_2.requires_grad_(False)
    ids = torch.zeros(4, 8, dtype=torch.long)
    model(ids).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    flags = [(module.training, p.requires_grad) for module in model.modules()
             for p in module.parameters()]  # fmt: skip
    num_calls, rng = len(calls), torch.get_rng_state()
    with torch.no_grad():
        report = comera_fx.explain(model, measure=True)
    assert report.layers["fc1"].measured_seconds > 0
    assert len(calls) == num_calls
    assert torch.equal(torch.get_rng_state(), rng)
    assert flags == [(module.training, p.requires_grad) for module in model.modules()
                     for p in module.parameters()]  # fmt: skip
    for param, value, grad in zip(model.parameters(), values, before, strict=True):
        assert torch.equal(param, value)
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(param.grad, grad)


def test_equal_layers_are_measured_once(monkeypatch):
    timed: list[Any] = []

    def medians(runs: Any, device_type: str, *, seconds: float) -> dict[str, float]:
        timed.append([len(run()) for run in runs.values()])
        return {"tt": 2.0, "dense": 1.0}

    monkeypatch.setattr(measure, "medians", medians)
    spec = TTSpec("tt", (8, 8), (8, 8), (1, 4, 4, 4, 1))
    layers = [TTLinear(spec, 64, 64, num_tokens_hint=5) for _ in range(3)]
    layers.append(TTLinear(spec, 64, 64, bias=False, num_tokens_hint=5))
    report = comera_fx.explain(nn.Sequential(*layers), measure=True)
    assert timed == [[6, 3], [5, 2]]  # gradients of cores, bias and input, and of the dense layer
    assert {layer.measured_seconds for layer in report.compressed} == {2.0}
    assert {layer.dense_measured_seconds for layer in report.compressed} == {1.0}
    # Other tokens are another measurement; the same layer under two names is one.
    shared = nn.ModuleDict({"a": layers[0], "b": layers[0]})
    assert list(comera_fx.explain(shared, measure=True).layers) == ["a"]
    measure.measure_layers(nn.ModuleDict({"a": layers[0], "b": layers[1]}), {"b": 7})
    assert len(timed) == 5


def test_layers_that_cannot_run_are_not_measured():
    spec = TTSpec("tt", (8, 8), (8, 8), (1, 4, 4, 4, 1))
    dead = replace(spec, ranks=(1, 0, 0, 0, 1))
    model = nn.ModuleDict(
        {
            "meta": TTLinear(spec, 64, 64, device="meta", num_tokens_hint=4),
            "dead": TTLinear(dead, 64, 64, num_tokens_hint=4),
        }
    )
    report = comera_fx.explain(model, torch.zeros(4, 64), measure=True)
    assert [layer.measured_seconds for layer in report.compressed] == [None, None]
    assert report.layers["meta"].predicted_seconds == plan_linear(spec, 4).seconds
    assert report.layers["dead"].predicted_seconds is None
    assert "measured" not in repr(report)


def test_a_model_that_fails_on_the_example_inputs():
    with pytest.raises(comera_fx.CaptureError, match="fails on the example_inputs"):
        comera_fx.explain(optimized(), torch.zeros(3, 3))
    with pytest.raises(comera_fx.ConfigError, match="cannot be turned into the arguments"):
        comera_fx.explain(optimized(), 3)


def test_figures_of_an_embedding_equal_a_hand_count():
    """At 32 ids of 20 rows the dense table is built, at 8 ids one product a row is cheaper."""
    layer = comera_fx.explain(optimized()).layers["embed"]
    assert layer.flops_forward == 2 * (5 * 10) * 3 * (4 * 10)
    assert layer.flops_backward == 2 * layer.flops_forward
    assert (layer.dense_flops_forward, layer.dense_flops_backward) == (0, 0)
    assert (layer.num_tokens, layer.peak_bytes, layer.saved_bytes) == (32, None, None)
    few = comera_fx.explain(optimized(ids=torch.zeros(8, dtype=torch.long))).layers["embed"]
    assert few.flops_forward == 2 * 8 * 10 * 3 * 10


def test_dense_tables_take_no_flops():
    layer = comera_fx.explain(optimized(exclude=["embed"])).layers["embed"]
    assert (layer.reason, layer.num_tokens) == ("excluded", 32)
    assert (layer.dense_flops_forward, layer.dense_flops_backward) == (0, 0)
    assert layer.flops_forward is None


def test_mode_balance():
    report = comera_fx.explain(optimized())
    assert report.layers["fc1"].mode_balance == 5 / 4
    assert report.layers["embed"].mode_balance == 10 / 4
    assert report.layers["fc2"].mode_balance is None
    assert report.to_dict()["layers"]["fc1"]["mode_balance"] == 5 / 4


def test_ranks_of_a_checkpoint_that_break_the_memory_limit_are_said():
    spec = TTSpec("tt", (8, 8), (8, 8), (1, 8, 64, 8, 1))
    small = replace(spec, ranks=(1, 1, 1, 1, 1))
    limit = plan_linear(small, 32).peak_bytes
    layer = TTLinear(small, 64, 64, num_tokens_hint=32, plan=PlanConfig(memory_limit_bytes=limit))
    model = nn.ModuleDict({"fc": layer})
    assert comera_fx.explain(model).layers["fc"].detail == ""
    model.load_state_dict(nn.ModuleDict({"fc": TTLinear(spec, 64, 64)}).state_dict())
    report = comera_fx.explain(model).layers["fc"]
    text = f"no plan for 32 tokens is within memory_limit_bytes={limit}: at least "
    assert report.detail.startswith(text)
    assert report.flops_forward == plan_linear(spec, 32).flops_forward


def test_dense_layers_have_their_reason_and_figures():
    report = comera_fx.explain(optimized())
    layer = report.layers["fc2"]
    assert layer.reason == "fewer than min_params=1,000 weights"
    assert layer.detail == "400"
    assert (layer.tt_params, layer.ranks, layer.flops_forward) == (None, None, None)
    assert layer.dense_flops_forward == 2 * 32 * 100 * 4
    assert [each.name for each in report.compressed] == ["embed", "fc1"]


def test_one_dense_layer_shows_its_figures():
    model = comera_fx.optimize(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8)),
        config=OptimizeConfig(init="random", max_rank=4, min_params=100),
    )
    assert "  1: fewer than min_params=100 weights (64)" in repr(comera_fx.explain(model))


def test_decomposition_error_is_shown():
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    nn.init.constant_(model[0].weight, 2.0)
    config = OptimizeConfig(max_rank=1, min_params=1, only_if_faster=False)
    result = comera_fx.optimize(model, config=config)
    assert comera_fx.explain(result).layers["0"].init_error < 1e-5
    assert repr(comera_fx.explain(result)).splitlines()[1].endswith(" 0.000")
    assert comera_fx.explain(optimized()).layers["fc1"].init_error is None


def test_to_dict_is_json():
    report = comera_fx.explain(optimized())
    read = json.loads(json.dumps(report.to_dict()))
    assert read["layers"]["fc1"]["in_modes"] == [4, 5, 5]
    assert read["layers"]["fc2"]["tt_params"] is None
    assert (read["params_before"], read["params_after"]) == (12524, 992)
    assert read["capture"] == "export"


def test_a_model_that_was_never_optimised():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 4, 1))
    report = comera_fx.explain(model)
    assert report.layers["0"].reason == "comera_fx.optimize has not been applied"
    assert report.layers["1"].reason == "convolutions are not supported"
    assert report.capture is None
    assert repr(report).splitlines()[-1] == "whole model:       92 -> 92 parameters (1.0x)"


def test_a_model_without_weights():
    assert repr(comera_fx.explain(nn.ReLU())) == dedent("""\
        compressed layers: 0 -> 0 parameters
        whole model:       0 -> 0 parameters""")


def test_it_follows_copies_pickles_and_bigger_models():
    model = optimized()
    text = repr(explain_model(model))
    assert repr(explain_model(copy.deepcopy(model))) == text
    assert repr(explain_model(pickle.loads(pickle.dumps(model)))) == text
    inside = explain_model(nn.ModuleDict({"body": model, "head": nn.Linear(4, 4)}))
    assert inside.layers["body.fc2"].reason == "fewer than min_params=1,000 weights"
    assert inside.layers["body.embed"].num_tokens == 32
    assert inside.layers["head"].reason == "comera_fx.optimize has not been applied"
    assert inside.capture == "export"


def test_it_follows_ranks_that_shrink():
    model = optimized()
    model.fc1.set_cores([core[: 1 if k else None, :, :1] for k, core in enumerate(model.fc1.cores)])
    shrunk = comera_fx.explain(model)
    assert shrunk.layers["fc1"].ranks == (1, 1, 1, 1, 1, 1, 1)
    assert shrunk.layers["fc1"].tt_params == 28
    assert shrunk.params_before == 12524

    model.fc1.set_cores([core[: 0 if k else None, :, : 0 if k < 5 else None]
                         for k, core in enumerate(model.fc1.cores)])  # fmt: skip
    dead = comera_fx.explain(model).layers["fc1"]
    assert (dead.tt_params, dead.ratio, dead.flops_forward) == (0, None, 0)
    assert "fc1" in repr(comera_fx.explain(model))


def test_rank_weights_are_no_part_of_the_dense_model():
    model = optimized()
    model.fc1.attach_rank_weights(0.01)
    report = comera_fx.explain(model)
    assert (report.params_before, report.params_after) == (12524, 992 + 15)


def test_a_second_optimize_adds_to_the_record():
    first = optimized(targets=["embed"], modes={})
    second = comera_fx.optimize(
        first, config=OptimizeConfig(init="random", max_rank=3, min_params=1000)
    )
    report = comera_fx.explain(second)
    assert [layer.name for layer in report.compressed] == ["embed", "fc1"]
    assert report.capture == "symbolic_trace"


# ---- text of graphs ----


class Shapes(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, Any]:
        first = x[1:, None]
        return {"a": torch.cat([first, first], dim=0).to(torch.float64), "b": [x.size(0), None]}


def test_graph_as_text():
    gm = fx.symbolic_trace(Shapes())
    next(iter(gm.graph.nodes)).meta["val"] = torch.zeros(2, 3)
    assert format_graph(gm.graph) == dedent("""\
        %x: [2, 3] = placeholder[x]()
        %y = placeholder[y](None)
        %getitem = call_function[getitem](%x, [1::, None])
        %cat = call_function[cat]([%getitem, %getitem], dim=0)
        %to = call_method[to](%cat, torch.float64)
        %size = call_method[size](%x, 0)
        return {'a': %to, 'b': [%size, None]}""")


def test_text_holds_no_memory_addresses():
    graph = fx.Graph()
    graph.output(graph.call_function(test_graph_as_text, (graph.placeholder("x"), len)))
    assert format_graph(graph).splitlines()[1] == (
        "%test_graph_as_text = call_function[test_graph_as_text](%x, len)"
    )


def test_one_diff_per_pass_that_changes_something(tmp_path: Path):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Embedding(4, 4))
    config = OptimizeConfig(init="random", max_rank=2, min_params=64, modes={"0": ((8,), (8,))})
    folder = tmp_path / "some" / "passes"
    with comera_fx.dump_to(folder):
        comera_fx.optimize(model, config=config)
    assert [path.name for path in folder.iterdir()] == ["00_LinearToTT.diff"]
    assert (folder / "00_LinearToTT.diff").read_text() == dedent("""\
        --- before LinearToTT
        +++ after LinearToTT, numerics changed
        @@ -1,4 +1,6 @@
         %input_1 = placeholder[input]()
        -%_0 = call_module[0](%input_1)
        -%_1 = call_module[1](%_0)
        +%_0_core_0 = get_attr[0.core_0]()
        +%_0_core_1 = get_attr[0.core_1]()
        +%tt_linear_default = call_function[comera_fx.tt_linear.default]\
(%input_1, [%_0_core_0, %_0_core_1], None, 'tt', 1, 8, 8)
        +%_1 = call_module[1](%tt_linear_default)
         return %_1
        """)


def test_the_head_of_a_diff_says_that_a_pass_keeps_numerics(tmp_path: Path):
    model = comera_fx.optimize(
        nn.Sequential(nn.Linear(64, 64)), config=OptimizeConfig(init="random", max_rank=2)
    )
    with comera_fx.dump_to(tmp_path):
        comera_fx.graph(model)
    assert (tmp_path / "00_TTModuleToOp.diff").read_text().splitlines()[:2] == [
        "--- before TTModuleToOp",
        "+++ after TTModuleToOp, numerics kept",
    ]


def test_diffs_are_numbered_and_stop_with_the_block(tmp_path: Path):
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    config = OptimizeConfig(init="random", max_rank=2)
    with comera_fx.dump_to(str(tmp_path)):
        comera_fx.optimize(model, config=config)
        comera_fx.optimize(model, config=config)
    comera_fx.optimize(model, config=config)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00_LinearToTT.diff",
        "01_EmbeddingToTTM.diff",
        "02_LinearToTT.diff",
        "03_EmbeddingToTTM.diff",
    ]
    assert (tmp_path / "00_LinearToTT.diff").read_text() == (
        tmp_path / "02_LinearToTT.diff"
    ).read_text()
