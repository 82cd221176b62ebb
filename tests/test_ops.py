"""Operators: equal to the dense layer in every derivative, and whole under every transform."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from comera_fx.errors import InputError
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.spec import TTSpec
from tests.tolerances import BY_DTYPE, EXACT

SPEC = TTSpec("tt", (3, 4), (2, 5), (1, 3, 7, 5, 1))
modes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def make_layer(in_features=12, out_features=10, spec=SPEC, dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    return TTLinear(spec, in_features, out_features, dtype=dtype, bias=bias)


def gradients(function, inputs, grad):
    return torch.autograd.grad(function(*inputs), inputs, grad)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    layout=st.sampled_from(["tt", "ttm"]),
    in_modes=modes,
    out_modes=modes,
    rank=st.integers(1, 5),
    num_tokens=st.sampled_from([0, 1, 3, 70]),
    padded=st.booleans(),
    bias=st.booleans(),
)
def test_linear_equals_dense_in_output_and_all_gradients(
    layout, in_modes, out_modes, rank, num_tokens, padded, bias
):
    if layout == "ttm":
        out_modes = (out_modes * 3)[: len(in_modes)]
    num_cores = len(in_modes) + len(out_modes) if layout == "tt" else len(in_modes)
    spec = TTSpec(layout, tuple(in_modes), tuple(out_modes), (1, *(rank,) * (num_cores - 1), 1))
    in_features = max(spec.in_size - padded, 1)
    out_features = max(spec.out_size - padded, 1)
    layer = make_layer(in_features, out_features, spec, bias=bias)
    x = torch.randn(num_tokens, in_features, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(num_tokens, out_features, dtype=torch.float64)
    inputs = (x, *layer.parameters())

    def ours(x, *_):
        return layer(x)

    def dense(x, *_):
        return F.linear(x, layer.dense_weight(), layer.bias)

    torch.testing.assert_close(ours(x), dense(x), **EXACT)
    for mine, theirs in zip(
        gradients(ours, inputs, grad), gradients(dense, inputs, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 3, 12), (0, 12), (2, 0, 12)])
def test_any_leading_shape(shape):
    layer = make_layer()
    x = torch.randn(shape, dtype=torch.float64)
    expected = F.linear(x, layer.dense_weight(), layer.bias)
    torch.testing.assert_close(layer(x), expected, **EXACT)
    assert layer(x).is_contiguous()


def test_strided_inputs_and_expanded_gradients():
    layer = make_layer()
    x = torch.randn(12, 5, dtype=torch.float64).t().requires_grad_()
    (ours,) = torch.autograd.grad(layer(x).sum(), x)
    (dense,) = torch.autograd.grad(F.linear(x, layer.dense_weight(), layer.bias).sum(), x)
    torch.testing.assert_close(ours, dense, **EXACT)


def test_first_and_second_derivatives():
    layer = make_layer()
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    cores = tuple(core.detach().requires_grad_() for core in layer.cores)

    def run(x, bias, *cores):
        return torch.ops.comera_fx.tt_linear(x, list(cores), bias, "tt", 2, 12, 10)

    inputs = (x, layer.bias.detach().requires_grad_(), *cores)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, check_backward_ad=False)


def test_transforms():
    layer = make_layer()
    x = torch.randn(4, 3, 12, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x), **EXACT)
    _, tangent = torch.func.jvp(layer, (x,), (x,))
    torch.testing.assert_close(tangent, layer(x) - layer.bias, **EXACT)
    jacobian = torch.func.jacrev(layer)(x[0, 0])
    torch.testing.assert_close(jacobian, layer.dense_weight(), **EXACT)
    per_sample = torch.vmap(torch.func.grad(lambda x: layer(x).square().sum()))(x[0])
    assert per_sample.shape == (3, 12)


def test_frozen_cores_get_no_gradient_and_keep_no_input():
    layer = make_layer()
    for core in layer.cores:
        core.requires_grad_(False)
    x = torch.randn(64, 12, dtype=torch.float64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        y = layer(x)
    y.sum().backward()
    assert x.data_ptr() not in kept
    assert all(core.grad is None for core in layer.cores)
    torch.testing.assert_close(x.grad, layer.dense_weight().sum(0).expand(64, 12), **EXACT)


def test_output_may_be_changed_in_place():
    layer = make_layer()
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(F.relu_(layer(x)).sum(), x)
    (dense,) = torch.autograd.grad(F.relu(layer(x)).sum(), x)
    torch.testing.assert_close(ours, dense, **EXACT)


def test_checkpointing_gives_the_same_gradients():
    layer = make_layer()
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    plain = torch.autograd.grad(layer(x).sum(), layer.cores)
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), layer.cores)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("dtype", BY_DTYPE)
def test_dtypes(dtype):
    layer = make_layer()
    x = torch.randn(6, 12, dtype=torch.float64)
    expected = layer(x)
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, **BY_DTYPE[dtype])


def test_autocast_casts_as_a_dense_layer_does():
    layer = make_layer(dtype=torch.float32)
    dense = nn.Linear(12, 10)
    x = torch.randn(6, 12)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == dense(x).dtype == torch.bfloat16
        y.float().sum().backward()
    assert all(core.grad.dtype == torch.float32 for core in layer.cores)


def test_autocast_leaves_tables_and_weights_in_their_dtype():
    ids = torch.tensor([1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        assert table()(ids).dtype == nn.Embedding(30, 32)(ids).dtype == torch.float32
        assert make_layer(dtype=torch.float32).dense_weight().dtype == torch.float32


@pytest.mark.parametrize("bad", [31, -1])
def test_ids_in_the_padding_fail_in_compiled_graphs_too(bad):
    torch._dynamo.reset()
    compiled = torch.compile(table(), backend="aot_eager", fullgraph=True)
    good = torch.tensor([29, 0])
    assert compiled(good).shape == (2, 32)
    with pytest.raises(IndexError):
        compiled(torch.tensor([0, bad]))


def test_export_is_one_node_for_any_batch():
    layer = make_layer(dtype=torch.float32)
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(
        layer, (torch.randn(16, 12),), dynamic_shapes=({0: auto, 1: auto},), strict=False
    )
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [torch.ops.comera_fx.tt_linear.default]
    for num_tokens in (1, 16, 5000):
        x = torch.randn(num_tokens, 12)
        torch.testing.assert_close(exported.module()(x), layer(x), **BY_DTYPE[torch.float32])


def test_one_node_in_symbolic_and_dynamo_graphs():
    layer = make_layer(dtype=torch.float32)
    seen = []

    def backend(gm, example_inputs):
        seen.append(gm)
        return gm

    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(3, 12))
    for gm in (torch.fx.symbolic_trace(layer), seen[0]):
        calls = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        assert calls == [torch.ops.comera_fx.tt_linear.default]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_equal_eager_ones(dynamic):
    torch._dynamo.reset()
    layer = make_layer(dtype=torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for num_tokens in (3, 17):
        x = torch.randn(num_tokens, 12)
        mine = torch.autograd.grad(compiled(x).square().sum(), layer.cores)
        eager = torch.autograd.grad(layer(x).square().sum(), layer.cores)
        for a, b in zip(mine, eager, strict=True):
            torch.testing.assert_close(a, b, **BY_DTYPE[torch.float32])


def cores_of(layer):
    return [core.detach().clone().requires_grad_() for core in layer.cores]


def test_opcheck_linear():
    layer = make_layer(dtype=torch.float32)
    x = torch.randn(6, 12, requires_grad=True)
    args = (x, cores_of(layer), layer.bias, "tt", 2, 12, 10)
    torch.library.opcheck(torch.ops.comera_fx.tt_linear.default, args)


def test_opcheck_dense_and_embedding():
    table = TTEmbedding(TTSpec("ttm", (4, 8), (8, 4), (1, 5, 1)), 30, 31)
    dense = (cores_of(table), "ttm", 2, 30, 31)
    torch.library.opcheck(torch.ops.comera_fx.tt_dense.default, dense)
    lookup = (torch.tensor([1, 2, 3]), cores_of(table), None, "ttm", 2, 30, 31)
    torch.library.opcheck(torch.ops.comera_fx.tt_embedding.default, lookup)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    layout=st.sampled_from(["tt", "ttm"]),
    row_modes=modes,
    column_modes=modes,
    rank=st.integers(1, 4),
    num_ids=st.sampled_from([0, 1, 5, 200]),
)
def test_embedding_equals_dense_in_output_and_gradients(
    layout, row_modes, column_modes, rank, num_ids
):
    if layout == "ttm":
        column_modes = (column_modes * 3)[: len(row_modes)]
    num_cores = len(row_modes) + len(column_modes) if layout == "tt" else len(row_modes)
    spec = TTSpec(layout, tuple(row_modes), tuple(column_modes), (1, *(rank,) * (num_cores - 1), 1))
    torch.manual_seed(0)
    rows = max(spec.in_size - 1, 1)
    table = TTEmbedding(spec, rows, spec.out_size, dtype=torch.float64)
    ids = torch.randint(0, rows, (num_ids,))
    grad = torch.randn(num_ids, spec.out_size, dtype=torch.float64)
    expected = F.embedding(ids, table.dense_weight().t())
    torch.testing.assert_close(table(ids), expected, **EXACT)
    ours = torch.autograd.grad(table(ids), table.cores, grad)
    dense = torch.autograd.grad(expected, table.cores, grad)
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_embedding_takes_ids_of_any_shape_and_integer_dtype():
    table = TTEmbedding(TTSpec("ttm", (4, 8), (8, 4), (1, 5, 1)), 30, 32)
    ids = torch.randint(0, 30, (3, 2, 4)).transpose(0, 1)
    assert not ids.is_contiguous()
    expected = F.embedding(ids, table.dense_weight().t())
    for dtype in (torch.int32, torch.int64):
        torch.testing.assert_close(table(ids.to(dtype)), expected, **BY_DTYPE[torch.float32])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: make_layer()(torch.zeros(2, 11).double()), "input does not fit"),
        (lambda: make_layer()(torch.zeros(2, 12)), "different dtypes"),
        (lambda: table()(torch.tensor([1.0])), "not int32 or int64"),
        (lambda: table()(torch.tensor([30])), "out of range"),
        (lambda: table()(torch.tensor([-1])), "out of range"),
    ],
)
def test_bad_input_is_an_error_of_four_lines(call, problem):
    with pytest.raises(InputError, match=problem) as caught:
        call()
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "got",
        "expected",
        "mend",
    ]


def table():
    return TTEmbedding(TTSpec("ttm", (4, 8), (8, 4), (1, 5, 1)), 30, 32)


def test_few_plans_serve_all_batch_sizes():
    from comera_fx.lower import choose

    layer = make_layer(spec=TTSpec("tt", (3, 4), (2, 5), (1, 2, 2, 2, 1)))
    before = choose._linear_program.cache_info().misses
    for num_tokens in range(1, 51):
        layer(torch.randn(num_tokens, 12, dtype=torch.float64))
    assert choose._linear_program.cache_info().misses - before <= 7
