"""stages: every graph on the way runs, computes the same and says which pass made it."""

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx.inspect import stages as room
from tests.inspect.models import ids, optimised
from tests.lossless import LOSSLESS, Branching


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "no-inputs"])
def test_every_stage_runs_and_gives_what_the_model_gives(given, monkeypatch):
    monkeypatch.setattr(room, "worth_sharing", lambda spec, nodes: len(nodes) > 1)
    model = optimised(2)
    found = comera_fx.stages(model, ids() if given else None)
    names = [type(graph_pass).__name__ for graph_pass in room.lowering_passes()]
    assert [name for name, _ in found] == ["capture", *names]
    for _, graph in found:
        torch.testing.assert_close(graph(ids()), model(ids()))
    targets = [str(node.target) for node in found[-1].graph.graph.nodes]
    assert targets.count("comera_fx.tt_factors.default") == 1
    assert targets.count("comera_fx.tt_apply.default") == 4
    assert found[-1].graph.get_parameter("blocks.0.q.core_0") is model.blocks[0].q.core_0
    assert found.notes == (
        () if given else ("not checked by a replay: there were no example_inputs",)
    )


def test_the_table_says_what_each_pass_did():
    text = repr(comera_fx.stages(optimised(1), ids()))
    lines = text.splitlines()
    assert lines[0].startswith("0  capture ")
    assert lines[0].endswith("captured by export")
    assert "TTModuleToOp" in lines[1]
    assert "nothing to do" in lines[2]


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
