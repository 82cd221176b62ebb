"""LinearToTT: shape of the rewrite, numerics, and the cases it must leave alone."""

from collections.abc import Callable
from math import prod
from textwrap import dedent

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from comera_fx.config import PlanConfig
from comera_fx.modules import TTLinear
from comera_fx.passes.linear_to_tt import LinearToTT
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec
from tests.tolerances import EXACT

modes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
Choose = Callable[[str, nn.Linear], TTLinear | None]


def full_rank_spec(in_modes: tuple[int, ...], out_modes: tuple[int, ...]) -> TTSpec:
    """Ranks at which TT-SVD loses nothing."""
    sizes = in_modes + out_modes
    ranks = [min(prod(sizes[:k]), prod(sizes[k:])) for k in range(len(sizes) + 1)]
    return TTSpec("tt", in_modes, out_modes, tuple(ranks))


def decompose(in_modes: tuple[int, ...], out_modes: tuple[int, ...], **kwargs: object) -> Choose:
    spec = full_rank_spec(in_modes, out_modes)
    return lambda name, layer: TTLinear.from_linear(layer, spec, **kwargs)


def trace(model: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(model.double())


def linear(in_features: int = 4, out_features: int = 4, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, **EXACT)


def num_tt_nodes(gm: fx.GraphModule) -> int:
    op = torch.ops.comera_fx.tt_linear.default
    return sum(node.target is op for node in gm.graph.nodes)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(modes, modes, st.booleans())
def test_full_rank_rewrite_equals_dense(in_modes, out_modes, bias):
    dense = trace(nn.Sequential(linear(prod(in_modes), prod(out_modes), bias), nn.ReLU()))
    x = torch.randn(3, prod(in_modes), dtype=torch.float64)

    rewritten = run_pipeline(dense, [LinearToTT(decompose(in_modes, out_modes))])

    assert_same(rewritten(x), dense(x))


def test_nothing_to_do():
    gm = trace(nn.Sequential(nn.ReLU(), nn.Embedding(4, 4)))
    assert LinearToTT(decompose((2, 2), (2, 2)))(gm) == 0


def test_a_layer_that_is_not_chosen_stays():
    gm = trace(nn.Sequential(linear()))
    code = gm.code
    assert LinearToTT(lambda name, layer: None)(gm) == 0
    assert gm.code == code


def test_choose_is_given_the_qualified_name_and_the_layer():
    seen = []
    model = nn.Sequential(nn.Sequential(linear()), linear())
    LinearToTT(lambda name, layer: seen.append((name, layer)))(trace(model))
    assert seen == [("0.0", model[0][0]), ("1", model[1])]


def test_layer_called_twice_is_replaced_once():
    layer = linear()
    dense = trace(nn.Sequential(layer, nn.ReLU(), layer))
    x = torch.randn(3, 4, dtype=torch.float64)

    rewritten = run_pipeline(dense, [LinearToTT(decompose((2, 2), (2, 2)))])

    assert LinearToTT(decompose((2, 2), (2, 2)))(trace(nn.Sequential(layer, layer))) == 1
    assert num_tt_nodes(rewritten) == 2
    assert_same(rewritten(x), dense(x))


def test_tied_weight_is_left_alone():
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    assert LinearToTT(decompose((2, 2), (2, 2)))(trace(model)) == 0


class ReadsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.fc.weight.sum()


def test_weight_with_a_functional_reader_is_left_alone():
    assert LinearToTT(decompose((2, 2), (2, 2)))(trace(ReadsWeight())) == 0


class OneInManyOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        return y + x, y * 2


def test_several_users_all_read_the_new_node():
    dense = trace(OneInManyOut())
    x = torch.randn(3, 4, dtype=torch.float64)

    rewritten = run_pipeline(dense, [LinearToTT(decompose((2, 2), (2, 2)))])

    for new, old in zip(rewritten(x), dense(x), strict=True):
        assert_same(new, old)


def test_frozen_weight_stays_frozen():
    model = nn.Sequential(linear(), linear())
    model[0].weight.requires_grad_(False)

    rewritten = run_pipeline(trace(model), [LinearToTT(decompose((2, 2), (2, 2)))])

    frozen, live = rewritten.get_submodule("0"), rewritten.get_submodule("1")
    assert not any(core.requires_grad for core in frozen.cores)
    assert frozen.bias.requires_grad
    assert all(core.requires_grad for core in live.cores)


def test_back_to_back_layers_are_both_replaced():
    dense = trace(nn.Sequential(linear(), linear(4, 4, bias=False), linear()))
    x = torch.randn(3, 4, dtype=torch.float64)

    rewritten = run_pipeline(dense, [LinearToTT(decompose((2, 2), (2, 2)))])

    assert num_tt_nodes(rewritten) == 3
    assert_same(rewritten(x), dense(x))


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_is_left_alone():
    class Leaf(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    model = nn.Sequential(ScaledLinear(4, 4))
    gm = fx.GraphModule(model, Leaf().trace(model))
    assert LinearToTT(decompose((2, 2), (2, 2)))(gm) == 0


def test_keyword_input_is_read():
    graph = fx.Graph()
    graph.output(graph.call_module("0", (), {"input": graph.placeholder("x")}))
    model = nn.Sequential(linear().double())
    x = torch.randn(3, 4, dtype=torch.float64)

    rewritten = run_pipeline(fx.GraphModule(model, graph), [LinearToTT(decompose((2, 2), (2, 2)))])

    assert_same(rewritten(x), model[0](x))


def test_the_input_graph_is_untouched():
    model = nn.Sequential(linear())
    dense = trace(model)
    code, weight = dense.code, model[0].weight.clone()

    run_pipeline(dense, [LinearToTT(decompose((2, 2), (2, 2)))])

    assert dense.code == code
    assert type(model[0]) is nn.Linear
    assert dense.get_submodule("0") is model[0]
    assert torch.equal(model[0].weight, weight)


def test_rewrite_as_text():
    rewritten = run_pipeline(
        trace(nn.Sequential(linear(), nn.ReLU())), [LinearToTT(decompose((2, 2), (4,)))]
    )
    assert format_graph(rewritten.graph) == dedent("""\
        %input_1 = placeholder[input]()
        %_0_core_0 = get_attr[0.core_0]()
        %_0_core_1 = get_attr[0.core_1]()
        %_0_core_2 = get_attr[0.core_2]()
        %_0_bias = get_attr[0.bias]()
        %tt_linear_default = call_function[comera_fx.tt_linear.default]\
(%input_1, [%_0_core_0, %_0_core_1, %_0_core_2], %_0_bias, 'tt', 2, 4, 4)
        %_1 = call_module[1](%tt_linear_default)
        return %_1""")


def test_settings_off_their_default_are_keywords():
    choose = decompose(
        (2, 2), (4,), num_tokens_hint=16, plan=PlanConfig(memory_limit_bytes=1 << 20)
    )
    rewritten = run_pipeline(trace(nn.Sequential(linear(bias=False))), [LinearToTT(choose)])
    assert format_graph(rewritten.graph).splitlines()[4] == (
        "%tt_linear_default = call_function[comera_fx.tt_linear.default]"
        "(%input_1, [%_0_core_0, %_0_core_1, %_0_core_2], None, 'tt', 2, 4, 4, "
        "num_tokens_hint=16, memory_limit_bytes=1048576)"
    )
