"""dump_graphs: diffs, plan tables and pictures of one run of passes."""

from xml.etree import ElementTree

import pytest
import torch

import comera_fx
from comera_fx.capture import capture
from comera_fx.inspect.dump import dump_graphs
from comera_fx.inspect.plans import distinct, plans_of_graph, plans_of_model
from comera_fx.lowering import lowering_passes
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.report import active_watchers
from tests.inspect.models import dense, ids, optimised


def test_a_run_of_passes_leaves_diffs_plans_and_pictures(tmp_path):
    gm = capture(optimised(2)).gm
    with dump_graphs(tmp_path / "new", gm):
        run_pipeline(gm, lowering_passes(), watchers=active_watchers())
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names[-3:] == ["after.svg", "before.svg", "plans.txt"]
    assert names[0] == "00_TTModuleToOp.diff"
    before, after = ((tmp_path / "new" / f"{name}.svg").read_text() for name in ("before", "after"))
    for text in (before, after):
        ElementTree.fromstring(text)
    assert "TTLinear" in before
    assert "tt_linear" in after
    tables = (tmp_path / "new" / "plans.txt").read_text()
    assert tables.count("Plan of a tt layer") == 2
    assert "blocks.0.q, blocks.0.k, blocks.0.v, blocks.0.out, blocks.1.q" in tables


def test_a_graph_without_cores_and_without_passes(tmp_path):
    gm = capture(dense()).gm
    with dump_graphs(tmp_path, gm):
        pass
    assert (tmp_path / "plans.txt").read_text() == "No linear layer in TT form.\n"
    assert not list(tmp_path.glob("*.diff"))


def test_an_error_leaves_what_was_seen_so_far(tmp_path):
    gm = capture(optimised(1)).gm

    def run() -> None:
        with dump_graphs(tmp_path, gm):
            run_pipeline(gm, lowering_passes()[:2], watchers=active_watchers())
            raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        run()
    assert "tt_linear" in (tmp_path / "after.svg").read_text()


def test_a_folder_that_is_none():
    with (
        pytest.raises(comera_fx.ConfigError, match="writes into a folder"),
        dump_graphs(3, capture(dense()).gm),
    ):
        pass


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "no-inputs"])
def test_plans_of_operators_are_those_of_their_layers(given):
    model = optimised(1)
    by_layer = dict(plans_of_model(model, {}))
    by_operator = dict(plans_of_graph(comera_fx.graph(model, ids() if given else None)))
    assert list(by_operator) == list(by_layer)
    assert [plan is by_layer[name] for name, plan in by_operator.items()] == [True] * 5
    assert [len(shared.names) for shared in distinct(by_layer.items())] == [4, 1]


def test_plans_of_a_dynamo_graph_are_those_of_its_fake_tensors():
    found = []

    def look(gm, example_inputs):
        found.extend(plans_of_graph(gm))
        return gm.forward

    torch.compile(optimised(1), backend=look, dynamic=False)(ids())
    assert [name for name, _ in found[1:]] == ["blocks.0.k", "blocks.0.v", "blocks.0.out", "head"]
    assert [plan.num_tokens for _, plan in found] == [14] * 5
    assert {repr(plan.spec) for _, plan in found} == {
        repr(plan.spec) for _, plan in plans_of_model(optimised(1), {})
    }
