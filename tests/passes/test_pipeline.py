"""run_pipeline: copies, lints, recompiles, logs and shows; passes do none of these."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx, nn

from comera_fx.passes.pipeline import Pass, copy_graph_module, run_pipeline


@dataclass(frozen=True)
class ReluToTanh:
    """Replaces every call of an nn.ReLU by torch.tanh."""

    keeps_numerics: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> int:
        calls = [n for n in gm.graph.nodes if n.op == "call_module"]
        relus = [n for n in calls if isinstance(gm.get_submodule(n.target), nn.ReLU)]
        for node in relus:
            with gm.graph.inserting_before(node):
                new = gm.graph.call_function(torch.tanh, node.args)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
        return len(relus)


def make_graph() -> fx.GraphModule:
    torch.manual_seed(0)
    return fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def test_the_copy_is_recompiled_and_the_input_graph_untouched():
    gm = make_graph()
    code, x = gm.code, torch.randn(2, 4)

    rewritten = run_pipeline(gm, [ReluToTanh()])

    torch.testing.assert_close(rewritten(x), torch.tanh(gm.get_submodule("0")(x)))
    assert gm.code == code
    assert type(gm.get_submodule("1")) is nn.ReLU


def test_modules_and_weights_are_shared_and_containers_are_new():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    gm = fx.symbolic_trace(model)

    copied = copy_graph_module(gm)

    assert copied.get_submodule("0.0") is gm.get_submodule("0.0") is model[0][0]
    assert copied.get_submodule("0") is not gm.get_submodule("0")
    copied.set_submodule("0.0", nn.Identity())
    assert gm.get_submodule("0.0") is model[0][0]


def test_names_signature_and_metadata_survive_the_copy():
    gm = make_graph()
    next(iter(gm.graph.nodes)).meta["note"] = 1

    copied = copy_graph_module(gm)

    assert [n.name for n in copied.graph.nodes] == [n.name for n in gm.graph.nodes]
    assert next(iter(copied.graph.nodes)).meta == {"note": 1}
    assert copied.training == gm.training


def test_watchers_see_passes_that_changed_something():
    seen = []

    def watch(graph_pass: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        seen.append((graph_pass, len(before.graph.nodes), before.code != after.code))

    run_pipeline(make_graph(), [ReluToTanh(), ReluToTanh()], watchers=[watch])

    assert seen == [(ReluToTanh(), 4, True)]


def test_a_pass_that_changes_nothing_leaves_the_code_as_it_is():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    assert run_pipeline(gm, [ReluToTanh()]).code == gm.code


@dataclass(frozen=True)
class Nothing:
    """Finds nothing to rewrite."""

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        return 0


def test_each_pass_is_logged_with_its_count_and_numerics(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="comera_fx.passes.pipeline"):
        run_pipeline(make_graph(), [ReluToTanh(), Nothing()])
    assert [message.rpartition(", ")[0] for message in caplog.messages] == [
        "ReluToTanh: 1 rewrites, nodes 4 -> 4, numerics changed",
        "Nothing: 0 rewrites, nodes 4 -> 4, numerics kept",
    ]
