"""stages: every graph on the way runs, computes the same and says which pass made it."""

import pytest
import torch
from torch import fx, nn

import comera_fx
from comera_fx import lowering
from tests.inspect.models import ids, optimised
from tests.lossless import LOSSLESS, RANDOM, Branching


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "no-inputs"])
def test_every_stage_runs_and_gives_what_the_model_gives(given, monkeypatch):
    monkeypatch.setattr(
        lowering, "worth_sharing", lambda spec, nodes: "factors" if len(nodes) > 1 else "own"
    )
    model = optimised(2)
    found = comera_fx.stages(model, ids() if given else None)
    names = [type(graph_pass).__name__ for graph_pass in lowering.lowering_passes()]
    assert [name for name, _ in found] == ["capture", *names]
    for _, graph in found:
        torch.testing.assert_close(graph(ids()), model(ids()))
    assert found[-1].graph.get_parameter("blocks.0.q.core_0") is model.blocks[0].q.core_0
    shared = targets(dict(found)["ShareInput"])
    assert shared.count("comera_fx.tt_factors.default") == 1
    assert shared.count("comera_fx.tt_apply.default") == 4
    left = [target for target in targets(found[-1].graph) if target.startswith("comera_fx.")]
    assert bool(left) is not given
    assert given == (found.notes == ())
    assert given or found.notes[-1].startswith(
        f"{len(left)} operators on cores are not taken apart"
    )


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_attention_of_torch_runs_in_every_stage(training):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    model, x = nn.Sequential(block, nn.Linear(64, 64)).train(training), torch.randn(2, 5, 64)
    model = comera_fx.optimize(model, x, config=RANDOM)
    found = comera_fx.stages(model, x)
    for _, graph in found:
        torch.testing.assert_close(graph(x), model(x))


def test_gradients_of_the_last_stage_are_the_model_s():
    model = optimised(1)
    last = comera_fx.stages(model, ids())[-1].graph
    found = []
    for module in (model, last):
        model.zero_grad()
        module(ids()).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, msg=name)


def test_the_table_says_what_each_pass_did():
    text = repr(comera_fx.stages(optimised(1), ids()))
    lines = text.splitlines()
    assert lines[0].startswith("0  capture ")
    assert lines[0].endswith("captured by export")
    assert lines[1].startswith("1  ExpandAttention ")
    assert lines[1].endswith("nothing to do")
    assert lines[-2].endswith("numerics kept")
    assert lines[-1].startswith("7  BatchProducts ")
    assert len(lines) == 1 + len(lowering.lowering_passes())


def test_a_dense_model_is_told_apart():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    found = comera_fx.stages(model, x)
    assert "no layer is in TT form" in repr(found)
    assert "comera_fx.optimize first" in found.notes[-1]
    for _, graph in found:
        torch.testing.assert_close(graph(x), model(x))


def test_stages_that_cannot_be_run_say_so():
    found = comera_fx.stages(comera_fx.optimize(Branching(), config=LOSSLESS))
    assert "these graphs have no data flow and cannot be run" in found.notes


def test_stages_of_something_else():
    with pytest.raises(comera_fx.ConfigError, match="stages works on modules") as caught:
        comera_fx.stages([nn.Linear(8, 8)])
    assert len(str(caught.value).splitlines()) == 4


def test_watchers_see_the_passes(tmp_path):
    model = optimised(1)
    with comera_fx.dump_to(tmp_path):
        comera_fx.stages(model)
    assert (tmp_path / "00_TTModuleToOp.diff").exists()
