"""ExpandPlan: TT operators become the products of their plans, and compute the same."""

from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.passes.expand_plan import WEIGHT_ONLY, ExpandPlan, is_weight_only
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec
from tests.chained import SPEC, TTM, layer
from tests.dynamo_graphs import Rewriting, assert_as_eager, results_of
from tests.reconstructed import SPECS, Reconstructed, floats, numbers_below, targets
from tests.tolerances import BY_DTYPE, EXACT

WIDE = TTSpec("tt", (16, 16), (16, 16), (1, 8, 8, 8, 1))


def expanded(model: nn.Module, *inputs: Tensor, **options) -> fx.GraphModule:
    backend = Rewriting(ExpandPlan())
    after = assert_as_eager(backend, model, *inputs, **options)
    assert targets(backend.before[-1])
    assert not targets(after)
    return after


def back_to_back() -> nn.Sequential:
    return nn.Sequential(layer(), nn.Tanh(), layer(TTM, bias=False, seed=1), layer(seed=2))


# ---- numerics ----


@pytest.mark.parametrize("size", [6, 5])
@pytest.mark.parametrize("spec", [SPEC, TTM], ids=["tt", "ttm"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer(spec, size, bias):
    expanded(layer(spec, size, bias=bias), floats(2, 3, size))
    assert ExpandPlan.keeps_numerics


def test_layers_back_to_back():
    expanded(back_to_back(), floats(4, 6))


def test_a_layer_called_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()
            self.inner.attach_rank_weights(0.01)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(self.inner(x)))

    expanded(Twice(), floats(4, 6))


def test_ranks_that_were_cut_to_0():
    dead = TTSpec("tt", (2, 3), (3, 2), (1, 0, 0, 0, 1))
    expanded(layer(dead), floats(4, 6))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_a_table(spec, padding_idx):
    torch.manual_seed(0)
    expanded(TTEmbedding(spec, 5, 9, padding_idx, dtype=torch.float64), numbers_below(5))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_reconstructed_weight(spec):
    after = expanded(
        Reconstructed(lambda m, x: F.linear(x, m.weight) * 2, spec, 5, 9), floats(4, 5)
    )
    made = [node for node in after.graph.nodes if is_weight_only(node)]
    assert made
    assert tuple(made[-1].meta["example_value"].shape) == (9, 5)


class Shared(nn.Module):
    """Two layers that read one input, by factors made together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = layer(), layer(bias=False, seed=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        cores = [*self.one.cores, *self.other.cores]
        lefts_rights = torch.ops.comera_fx.tt_factors(cores, 2, "tt", 2, 6, 6)
        lefts, rights = lefts_rights[:2], lefts_rights[2:]
        y, z = torch.ops.comera_fx.tt_apply(x, lefts, rights, [self.one.bias, None])
        return [y, torch.tanh(z)]


def test_factors_and_what_applies_them():
    after = expanded(Shared(), floats(4, 6))
    marked = {node.name for node in after.graph.nodes if is_weight_only(node)}
    assert "cat" in marked
    assert not any(node.name in marked for node in after.graph.nodes if "addmm" in node.name)


@pytest.mark.parametrize("model", [layer(), Shared()], ids=["linear", "factors"])
def test_autocast(model):
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.float()

        def forward(self, x: Tensor) -> Tensor | list[Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    x = floats(4, 6).float()
    after = expanded(Region(), x, tolerances=BY_DTYPE[torch.bfloat16])
    products = [node for node in after.graph.nodes if "mm" in node.name]
    assert {node.meta["example_value"].dtype for node in products} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        expanded(model.float(), x, tolerances=BY_DTYPE[torch.bfloat16])
    expanded(model.double(), floats(4, 6))


def test_tables_keep_their_dtype_under_autocast():
    torch.manual_seed(0)
    table = TTEmbedding(SPECS["tt"], 6, 10, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        after = expanded(table, numbers_below(6), tolerances=BY_DTYPE[torch.float32])
    floating = [
        value.dtype
        for node in after.graph.nodes
        if isinstance(value := node.meta.get("example_value"), Tensor) and value.is_floating_point()
    ]
    assert set(floating) == {torch.float32}


# ---- which plan ----


def wide() -> TTLinear:
    torch.manual_seed(0)
    return TTLinear(WIDE, 256, 256, dtype=torch.float64)


def plan_of(num_tokens: int) -> str:
    after = expanded(wide(), floats(num_tokens, 256))
    # Sizes differ with the number of tokens; the products are the plan.
    return " ".join(
        f"{node.name}({', '.join(str(inner) for inner in node.all_input_nodes)})"
        for node in after.graph.nodes
        if node.op == "call_function"
    )


def test_the_plan_is_the_one_for_the_number_of_tokens():
    few, many = plan_of(1), plan_of(4096)
    assert few != many
    assert plan_of(4000) == many


def test_no_plan_for_gradients_in_a_no_grad_region():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wide()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                y = self.inner(x)
            return y, self.inner(x)

    after = expanded(Frozen(), floats(16, 256))
    (switch, back) = (n for n in after.graph.nodes if n.target is torch._C._set_grad_enabled)
    inside = [n for n in after.graph.nodes if switch < n < back and n.name.startswith("mm")]
    assert inside
    assert not any(node.meta["example_value"].requires_grad for node in inside)


def test_a_symbolic_number_of_tokens_takes_the_hint():
    class Hinted(nn.Module):
        def __init__(self, hint: int) -> None:
            super().__init__()
            self.inner, self.hint = wide(), hint

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.comera_fx.tt_linear(
                x, self.inner.cores, self.inner.bias, "tt", 2, 256, 256, num_tokens_hint=self.hint
            )

    texts = []
    for hint in (2, 4096):
        model, backend = Hinted(hint), Rewriting(ExpandPlan())
        compiled = backend.compile(model, dynamic=True)
        for batch in (3, 8, 200):
            x = floats(batch, 256)
            torch._dynamo.mark_dynamic(x, 0)
            mine, theirs = (results_of(f, model, [x]) for f in (compiled, model))
            torch.testing.assert_close(mine, theirs, **EXACT)
        (after,) = backend.after
        texts.append(format_graph(after.graph))
    assert texts[0] != texts[1]


@pytest.mark.parametrize("model", [back_to_back(), Shared()], ids=["linear", "factors"])
def test_a_dynamic_batch_stays_dynamic(model):
    backend = Rewriting(ExpandPlan())
    compiled = backend.compile(model, dynamic=True)
    for batch in (3, 5, 8, 64):
        x = floats(2, batch, 6)
        torch._dynamo.mark_dynamic(x, 1)
        mine, theirs = (results_of(f, model, [x]) for f in (compiled, model))
        torch.testing.assert_close(mine, theirs, **EXACT)
    assert len(backend.after) == 1
    assert not targets(backend.after[0])


def test_a_dynamic_number_of_ids():
    torch.manual_seed(0)
    model = TTEmbedding(SPECS["ttm"], 5, 9, 0, dtype=torch.float64)
    backend = Rewriting(ExpandPlan())
    compiled = backend.compile(model, dynamic=True)
    for count in (3, 4, 40):
        ids = torch.arange(count) % 5
        torch._dynamo.mark_dynamic(ids, 0)
        torch.testing.assert_close(compiled(ids), model(ids), **EXACT)
    assert len(backend.after) == 1
    assert not targets(backend.after[0])


# ---- marks ----


def test_what_reads_weights_alone_is_marked():
    after = expanded(layer(), floats(4096, 6))
    read: dict[fx.Node, bool] = {}
    for node in after.graph.nodes:
        inputs = node.all_input_nodes
        read[node] = node.name == "l_input_" or any(read[inner] for inner in inputs)
        if node.op == "call_function":
            assert is_weight_only(node) == (not read[node])
    assert any(is_weight_only(node) for node in after.graph.nodes)


def test_marks_reach_the_joint_graph():
    joints = []

    def keep(joint: fx.GraphModule, *args, **kwargs):
        joints.append(joint)
        return torch._functorch.partitioners.default_partition(joint, *args, **kwargs)

    def boxed(gm: fx.GraphModule, example_inputs):
        return make_boxed_func(gm.forward)

    class Compiling(Rewriting):
        def __call__(self, gm, example_inputs):
            super().__call__(gm, example_inputs)
            return aot_autograd(fw_compiler=boxed, partition_fn=keep)(
                self.after[-1], example_inputs
            )

    assert_as_eager(Compiling(ExpandPlan()), layer(), floats(4096, 6))
    (joint,) = joints
    marked = [node for node in joint.graph.nodes if is_weight_only(node)]
    assert any("mm" in node.name for node in marked)
    assert all(node.meta["partitioner_tag"] == "is_forward" for node in marked)
    # Nodes of the backward pass have a copy of the mark.
    assert len(marked) < sum(WEIGHT_ONLY in n.meta.get("custom", {}) for n in joint.graph.nodes)


# ---- the form of the rewrite ----


def operators(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    backend = Rewriting()
    backend.compile(model)(*inputs)
    return backend.before[0]


def test_nothing_to_do():
    assert ExpandPlan()(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == 0


def test_each_operator_is_counted():
    model = back_to_back()
    gm = operators(model, floats(4, 6))
    assert ExpandPlan()(gm) == 3
    assert ExpandPlan()(gm) == 0
    gm.graph.lint()


def test_exported_graphs_are_expanded():
    model = back_to_back()
    gm = torch.export.export(model, (floats(4, 6),), strict=False).module()
    assert ExpandPlan()(gm) == 3
    gm.recompile()
    torch.testing.assert_close(gm(floats(4, 6)), model(floats(4, 6)), **EXACT)
    assert all("val" in n.meta for n in gm.graph.nodes if n.op == "call_function" and n.args[1:])


def test_operators_whose_sizes_are_unknown_are_left_alone():
    model = back_to_back()
    gm = operators(model, floats(4, 6))
    for node in gm.graph.nodes:
        node.meta.clear()
    assert ExpandPlan()(gm) == 0
    assert len(targets(gm)) == 3


def test_operators_under_a_transform_are_left_alone():
    model = layer()
    backend = Rewriting(ExpandPlan())
    compiled = backend.compile(lambda x: torch.vmap(lambda row: model(row))(x))
    torch.testing.assert_close(compiled(floats(4, 6)), model(floats(4, 6)), **EXACT)
    assert len(targets(backend.after[0])) == 1


def test_the_input_graph_is_untouched():
    backend, model = Rewriting(ExpandPlan()), back_to_back()
    backend.compile(model)(floats(4, 6))
    assert len(targets(backend.before[0])) == 3


def test_a_frozen_weight_stays_frozen():
    model = back_to_back()
    for param in model[0].parameters():
        param.requires_grad_(False)
    expanded(model, floats(4, 6))
    assert not any(param.requires_grad for param in model[0].parameters())


def test_metadata_is_that_of_the_call():
    backend, model = Rewriting(ExpandPlan()), layer()
    backend.compile(model)(floats(4, 6))
    (call,) = (n for n in backend.before[0].graph.nodes if str(n.target).startswith("comera_fx"))
    new = [node for node in backend.after[0].graph.nodes if node.op == "call_function"]
    assert all(node.meta["stack_trace"] == call.meta["stack_trace"] for node in new)
    assert new[-1].meta["example_value"].shape == (4, 6)
    assert new[-1].meta["example_value"].requires_grad


def test_rewrite_as_text():
    model = layer(TTSpec("tt", (6,), (6,), (1, 2, 1)))
    text = format_graph(expanded(model, floats(4, 6)).graph)
    lines = [line for line in text.splitlines() if "placeholder" not in line]
    assert "\n".join(lines) == dedent("""\
        %reshape = call_function[aten.reshape.default](%l_input_, [4, 6])
        %reshape_1 = call_function[aten.reshape.default](%l_self_parameters_core_0_, [6, 2])
        %mm = call_function[aten.mm.default](%reshape, %reshape_1)
        %reshape_2 = call_function[aten.reshape.default](%l_self_parameters_core_1_, [2, 6])
        %addmm = call_function[aten.addmm.default](%l_self_parameters_bias_, %mm, %reshape_2)
        %view = call_function[aten.view.default](%addmm, [4, 6])
        return [%view]""")
