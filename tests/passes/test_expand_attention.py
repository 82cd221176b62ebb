"""ExpandAttention: an opaque attention call becomes what it computes, and computes the same."""

from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from comera_fx.passes.expand_attention import ExpandAttention
from comera_fx.passes.expand_plan import ExpandPlan
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec
from tests.dynamo_graphs import Rewriting, assert_as_eager, names_of, results_of
from tests.reconstructed import Reconstructed, floats
from tests.tolerances import BY_DTYPE, EXACT

OPAQUE = "multi_head_attention_forward"
BATCH, LENGTH, WIDTH, HEADS = 3, 5, 8, 2


class Attention(nn.Module):
    """Attention as a model calls it; ``call`` is what the call is given beside the inputs."""

    def __init__(self, *, call: dict | None = None, **settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **settings)
        for name, param in self.inner.named_parameters():
            if "bias" in name:
                nn.init.normal_(param)
        self.call = {} if call is None else call

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None):
        key = query if key is None else key
        return self.inner(query, key, key if value is None else value, **self.call)


def expanded(model: nn.Module, *inputs: Tensor, **options) -> fx.GraphModule:
    backend = Rewriting(ExpandAttention())
    after = assert_as_eager(backend, model, *inputs, **options)
    assert OPAQUE in names_of(backend.before[-1])
    assert OPAQUE not in names_of(after)
    return after


def seqs(*lengths: int, width: int = WIDTH) -> list[Tensor]:
    return [floats(length, BATCH, width) for length in lengths]


# ---- numerics ----

BAND = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
CALLS = {
    "plain": {},
    "mask": {"attn_mask": BAND},
    "float-mask": {"attn_mask": BAND.double() * -2},
    "mask-a-head": {"attn_mask": BAND.repeat(BATCH * HEADS, 1, 1)},
    "padding": {"key_padding_mask": PADDING},
    "mask-and-padding": {"attn_mask": BAND, "key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "weights-of-heads": {"average_attn_weights": False},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_masks_and_weights(call, need_weights):
    if need_weights and call.get("is_causal"):
        call = {**call, "is_causal": False}  # a hint that goes with need_weights=False
    expanded(Attention(call={**call, "need_weights": need_weights}), *seqs(LENGTH))
    assert ExpandAttention.keeps_numerics


SETTINGS = {
    "no-bias": {"bias": False},
    "bias-of-keys": {"add_bias_kv": True},
    "zero-attention": {"add_zero_attn": True},
    "batch-first": {"batch_first": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings):
    expanded(Attention(**settings), *seqs(LENGTH))


@pytest.mark.parametrize("lengths", [(5, 4), (5, 4, 4)], ids=["memory", "all-different"])
def test_cross_attention(lengths):
    expanded(Attention(), *seqs(*lengths))


@pytest.mark.parametrize("bias", [True, False])
def test_keys_and_values_of_other_widths(bias):
    model = Attention(kdim=6, vdim=4, bias=bias)
    query, key, value = *seqs(5), *seqs(4, width=6), *seqs(4, width=4)
    after = expanded(model, query, key, value)
    assert names_of(after).count("linear.default") == 4


def test_without_a_batch():
    expanded(Attention(), floats(LENGTH, WIDTH))


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_draws_the_same_numbers(need_weights):
    model = Attention(dropout=0.4, call={"need_weights": need_weights})
    expanded(model, *seqs(LENGTH))
    after = expanded(model.eval(), *seqs(LENGTH))
    assert "dropout.default" not in names_of(after)


def encoder(dropout: float = 0.0, **settings) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 16, dropout, batch_first=True, dtype=torch.float64, **settings
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_the_layers_of_an_encoder():
    backend = Rewriting(ExpandAttention())
    after = assert_as_eager(backend, encoder(0.3), floats(BATCH, LENGTH, WIDTH))
    assert names_of(backend.before[0]).count(OPAQUE) == 2
    assert OPAQUE not in names_of(after)
    assert names_of(after).count("scaled_dot_product_attention.default") == 2


def test_an_encoder_with_masks():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, CAUSAL, PADDING.double() * -3, is_causal=True)

    expanded(Masked(), floats(BATCH, LENGTH, WIDTH))


class Switching(nn.Module):
    """Runs attention in several states of autocast and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(call={"need_weights": False}, dropout=0.2).float()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            low = self.inner(x)[0]
            with torch.autocast("cpu", enabled=False):
                high = self.inner(x)[0]
        with torch.no_grad():
            frozen = self.inner(x)[0]
        return low, high, frozen, self.inner(x)[0]


def test_autocast_and_no_grad_regions():
    x = floats(LENGTH, BATCH, WIDTH).float()
    after = expanded(Switching(), x, tolerances=BY_DTYPE[torch.bfloat16])
    attended = [n for n in after.graph.nodes if "scaled_dot_product" in n.name]
    values = [node.meta["example_value"] for node in attended]
    assert [v.dtype for v in values] == [torch.bfloat16, *[torch.float32] * 3]
    assert [v.requires_grad for v in values] == [True, True, False, True]


def test_autocast_around_the_compiled_model():
    model, x = Attention(call={"need_weights": False}).float(), seqs(LENGTH)[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        after = expanded(model, x, tolerances=BY_DTYPE[torch.bfloat16])
    (linear, _) = (n for n in after.graph.nodes if str(n.target) == "aten.linear.default")
    assert linear.meta["example_value"].dtype == torch.bfloat16


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_dynamic_batch_stays_dynamic(need_weights):
    model = Attention(call={"need_weights": need_weights}, dropout=0.2, batch_first=True)
    backend = Rewriting(ExpandAttention())
    compiled = backend.compile(model, dynamic=True)
    for batch in (3, 5, 8, 64):
        x = floats(batch, LENGTH, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        mine, theirs = (results_of(f, model, [x]) for f in (compiled, model))
        torch.testing.assert_close(mine, theirs, **EXACT)
    assert len(backend.after) == 1
    assert OPAQUE not in names_of(backend.after[0])


# ---- which weights the body reads ----


class OnCores(nn.Module):
    """Attention whose packed weight is reconstructed from cores."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = Reconstructed(lambda m, x: x, TTSpec("tt", (2, 4), (4, 6), (1, 2, 3, 2, 1)))
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return F.multi_head_attention_forward(
            query, key, key, WIDTH, HEADS, self.packed.weight, self.packed.bias, None, None, False,
            0.0, self.out.weight, self.out.bias, need_weights=False,
        )[0]  # fmt: skip


class OnCoresOfSelf(OnCores):
    def forward(self, query: Tensor) -> Tensor:
        return super().forward(query, query)


def test_a_weight_that_is_a_node_is_read_by_the_body():
    after = expanded(OnCoresOfSelf(), *seqs(LENGTH))
    dense, linear = (
        next(n for n in after.graph.nodes if str(n.target) == name)
        for name in ("comera_fx.tt_dense.default", "aten.linear.default")
    )
    assert names_of(after).count("tt_dense.default") == 1
    assert linear.args[1] is dense


def test_parts_of_a_weight_are_split_off_it():
    after = expanded(OnCores(), *seqs(LENGTH, 4))
    (dense,) = (n for n in after.graph.nodes if str(n.target) == "comera_fx.tt_dense.default")
    assert [str(user.target) for user in dense.users] == ["aten.split_with_sizes.default"]


def test_plans_are_expanded_after_it():
    backend = Rewriting(ExpandAttention(), ExpandPlan())
    after = assert_as_eager(backend, OnCores(), *seqs(LENGTH, 4))
    assert not [n for n in after.graph.nodes if str(n.target).startswith("comera_fx")]


# ---- the form of the rewrite ----


def test_nothing_to_do():
    assert ExpandAttention()(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == 0


def attention_graph(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    backend = Rewriting()
    backend.compile(model)(*inputs)
    return backend.after[0]


def test_each_call_is_counted():
    gm = attention_graph(encoder(), floats(BATCH, LENGTH, WIDTH))
    assert ExpandAttention()(gm) == 2
    assert ExpandAttention()(gm) == 0
    gm.graph.lint()


def test_calls_whose_sizes_are_unknown_are_left_alone():
    gm = attention_graph(Attention(), *seqs(LENGTH))
    for node in gm.graph.nodes:
        node.meta.clear()
    assert ExpandAttention()(gm) == 0
    assert OPAQUE in names_of(gm)


def test_a_result_that_is_returned_whole():
    gm = attention_graph(Attention(), *seqs(LENGTH))
    (call,) = (node for node in gm.graph.nodes if node.name == OPAQUE)
    output = next(iter(reversed(gm.graph.nodes)))
    output.args = (call,)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert ExpandAttention()(gm) == 1
    gm.graph.lint()
    (results,) = output.args
    assert [tuple(node.meta["example_value"].shape) for node in results] == [
        (LENGTH, BATCH, WIDTH),
        (BATCH, LENGTH, LENGTH),
    ]


def test_the_input_graph_is_untouched():
    backend = Rewriting(ExpandAttention())
    backend.compile(Attention())(*seqs(LENGTH))
    assert OPAQUE in names_of(backend.before[0])
    assert OPAQUE in backend.before[0].code


def test_frozen_weights_stay_frozen():
    model = Attention()
    model.inner.in_proj_weight.requires_grad_(False)
    after = expanded(model, *seqs(LENGTH))
    assert not model.inner.in_proj_weight.requires_grad
    linear = next(n for n in after.graph.nodes if str(n.target) == "aten.linear.default")
    assert not linear.args[1].meta["example_value"].requires_grad


def test_metadata():
    backend = Rewriting(ExpandAttention())
    backend.compile(Attention())(*seqs(LENGTH).copy())
    before, after = backend.before[0], backend.after[0]
    (call,) = (node for node in before.graph.nodes if node.name == OPAQUE)
    old = {node.name for node in before.graph.nodes}
    new = [node for node in after.graph.nodes if node.name not in old]
    assert new
    assert all(node.meta["stack_trace"] == call.meta["stack_trace"] for node in new)
    assert all("example_value" in node.meta for node in new)


def test_rewrite_as_text():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(call={"need_weights": False}, dropout=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

    text = format_graph(expanded(Small(), *seqs(LENGTH)).graph)
    lines = [line for line in text.splitlines() if "placeholder" not in line]
    long = "l_self_modules_inner_modules_inner_"
    assert "\n".join(lines).replace(long, "") == dedent("""\
        %linear = call_function[aten.linear.default]\
(%l_x_, %parameters_in_proj_weight_, %parameters_in_proj_bias_)
        %unflatten = call_function[aten.unflatten.int](%linear, -1, [3, 8])
        %unsqueeze = call_function[aten.unsqueeze.default](%unflatten, 0)
        %transpose = call_function[aten.transpose.int](%unsqueeze, 0, -2)
        %squeeze = call_function[aten.squeeze.dim](%transpose, -2)
        %contiguous = call_function[aten.contiguous.default](%squeeze)
        %select = call_function[aten.select.int](%contiguous, 0, 0)
        %select_1 = call_function[aten.select.int](%contiguous, 0, 1)
        %select_2 = call_function[aten.select.int](%contiguous, 0, 2)
        %view = call_function[aten.view.default](%select, [5, 6, 4])
        %transpose_1 = call_function[aten.transpose.int](%view, 0, 1)
        %view_1 = call_function[aten.view.default](%select_1, [5, 6, 4])
        %transpose_2 = call_function[aten.transpose.int](%view_1, 0, 1)
        %view_2 = call_function[aten.view.default](%select_2, [5, 6, 4])
        %transpose_3 = call_function[aten.transpose.int](%view_2, 0, 1)
        %view_3 = call_function[aten.view.default](%transpose_1, [3, 2, 5, 4])
        %view_4 = call_function[aten.view.default](%transpose_2, [3, 2, 5, 4])
        %view_5 = call_function[aten.view.default](%transpose_3, [3, 2, 5, 4])
        %scaled_dot_product_attention = call_function[aten.scaled_dot_product_attention.default]\
(%view_3, %view_4, %view_5, None, 0.1)
        %permute = call_function[aten.permute.default](%scaled_dot_product_attention, [2, 0, 1, 3])
        %reshape = call_function[aten.reshape.default](%permute, [15, 8])
        %linear_1 = call_function[aten.linear.default]\
(%reshape, %modules_out_proj_parameters_weight_, %modules_out_proj_parameters_bias_)
        %view_6 = call_function[aten.view.default](%linear_1, [5, 3, 8])
        return [%view_6]""")
