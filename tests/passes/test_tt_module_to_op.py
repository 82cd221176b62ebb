"""TTModuleToOp: calls of TT modules become operators that compute the same."""

import copy
from textwrap import dedent

import torch
from torch import fx, nn

from comera_fx.modules import TTEmbedding, TTLinear, TTModule
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.passes.tt_module_to_op import TTModuleToOp
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec

LINEAR = TTSpec("tt", (2, 2), (2, 2), (1, 2, 3, 2, 1))
TABLE = TTSpec("ttm", (2, 3), (2, 2), (1, 3, 1))


class Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TTModule) or super().is_leaf_module(m, module_qualified_name)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layer = TTLinear(LINEAR, 4, 4, bias=False)
    return nn.Sequential(TTEmbedding(TABLE, 6, 4, padding_idx=1), layer, nn.ReLU(), layer)


def trace(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, Tracer().trace(model))


def test_nothing_to_do():
    assert TTModuleToOp()(trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == 0


def test_every_call_becomes_an_operator_and_numerics_are_kept():
    model, ids = make_model(), torch.tensor([0, 1, 5])
    before = trace(model)

    after = run_pipeline(before, [TTModuleToOp()])

    assert TTModuleToOp.keeps_numerics
    assert torch.equal(after(ids), model(ids))
    assert not any(isinstance(before.get_submodule(n), nn.ReLU) for n in ("0", "1"))
    targets = [str(node.target) for node in after.graph.nodes if node.op == "call_function"]
    assert targets == [
        "comera_fx.tt_embedding.default",
        "comera_fx.tt_linear.default",
        "comera_fx.tt_linear.default",
    ]


def test_rank_weights_are_multiplied_in():
    model, ids = make_model(), torch.tensor([0, 1, 5])
    for layer in (model[0], model[1]):
        layer.attach_rank_weights(0.01)
        for weight in layer.rank_weights:
            weight.data.uniform_(0.5, 1.5)
            weight.data[0] = 0.001  # below the threshold: counts as zero

    after = run_pipeline(trace(model), [TTModuleToOp()])

    torch.testing.assert_close(after(ids), model(ids))
    after(ids).sum().backward()
    assert model[1].rank_weights[0].grad is not None


def test_the_input_graph_is_untouched():
    gm = trace(make_model())
    code = copy.copy(gm.code)
    run_pipeline(gm, [TTModuleToOp()])
    assert gm.code == code


def test_rewrite_as_text():
    after = run_pipeline(trace(nn.Sequential(TTLinear(LINEAR, 4, 4))), [TTModuleToOp()])
    assert format_graph(after.graph) == dedent("""\
        %input_1 = placeholder[input]()
        %_0_core_0 = get_attr[0.core_0]()
        %_0_core_1 = get_attr[0.core_1]()
        %_0_core_2 = get_attr[0.core_2]()
        %_0_core_3 = get_attr[0.core_3]()
        %_0_bias = get_attr[0.bias]()
        %tt_linear_default = call_function[comera_fx.tt_linear.default]\
(%input_1, [%_0_core_0, %_0_core_1, %_0_core_2, %_0_core_3], %_0_bias, 'tt', 2, 4, 4)
        return %tt_linear_default""")
