"""TTLinear and TTEmbedding as modules: dense view, copies, checkpoints of other ranks, no ranks."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comera_fx.errors import InputError, SpecError
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.spec import TTSpec
from tests.tolerances import EXACT

FULL = TTSpec("tt", (3, 4), (2, 5), (1, 3, 12, 5, 1))
SMALL = TTSpec("tt", (3, 4), (2, 5), (1, 3, 4, 2, 1))


def test_full_rank_equals_the_dense_layer():
    dense = nn.Linear(12, 10).double()
    layer = TTLinear.from_linear(dense, FULL)
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x), **EXACT)
    assert layer.init_error < 1e-12


@pytest.mark.parametrize("init", ["decompose", "random"])
def test_grad_flags_dtype_and_mode_are_the_dense_layers(init):
    dense = nn.Linear(12, 10).double().eval()
    dense.weight.requires_grad_(False)
    layer = TTLinear.from_linear(dense, SMALL, init=init)
    assert not any(core.requires_grad for core in layer.cores)
    assert layer.bias.requires_grad
    assert layer.cores[0].dtype == torch.float64
    assert not layer.training


def test_a_zero_weight_stays_zero_under_random_init_and_trains():
    dense = nn.Linear(12, 10)
    nn.init.zeros_(dense.weight)
    layer = TTLinear.from_linear(dense, SMALL, init="random")
    assert not layer.dense_weight().any()
    layer(torch.randn(3, 12)).square().sum().backward()
    assert layer.core_3.grad.any()


def test_reset_parameters_draws_anew():
    for layer in (TTLinear(SMALL, 12, 10), TTEmbedding(TTSpec("ttm", (4,), (8,), (1, 1)), 4, 8)):
        before = [p.clone() for p in layer.parameters()]
        layer.reset_parameters()
        assert not any(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_no_bias_stays_no_bias():
    layer = TTLinear.from_linear(nn.Linear(12, 10, bias=False), SMALL)
    assert layer.bias is None
    assert [name for name, _ in layer.named_parameters()] == [f"core_{k}" for k in range(4)]


def test_random_init_has_the_dense_scale_and_leaves_the_global_generator_alone():
    dense = nn.Linear(256, 256)
    spec = TTSpec("tt", (16, 16), (16, 16), (1, 16, 32, 16, 1))
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    layer = TTLinear.from_linear(dense, spec, init="random", generator=generator)
    assert torch.equal(torch.get_rng_state(), state)
    ratio = layer.dense_weight().std() / dense.weight.std()
    assert 0.9 < ratio < 1.1


def test_weight_builds_no_matrix_until_numbers_are_read(monkeypatch):
    layer = TTLinear(SMALL, 12, 10)
    built = []
    build = layer.dense_weight
    monkeypatch.setattr(layer, "dense_weight", lambda: built.append(1) or build(), raising=False)
    weight = layer.weight
    assert weight.dtype == torch.float32
    assert weight.device == torch.device("cpu")
    assert weight.shape == (10, 12)
    assert weight.size(0) == 10
    assert weight.ndim == weight.dim() == 2
    assert weight.numel() == 120
    assert weight.requires_grad
    assert not weight.is_cuda
    assert "LazyWeight" in repr(weight)
    assert weight.grad is None
    assert built == []
    x = torch.randn(3, 12)
    torch.testing.assert_close(F.linear(x, weight, layer.bias), layer(x))
    assert built == [1]


def test_a_copy_of_the_weight_is_the_dense_matrix():
    layer = TTLinear(SMALL, 12, 10)
    torch.testing.assert_close(copy.deepcopy(layer.weight), layer.dense_weight().detach())


def test_weight_is_differentiable_in_the_cores():
    layer = TTLinear(SMALL, 12, 10)
    F.linear(torch.randn(3, 12), layer.weight).sum().backward()
    assert all(core.grad is not None for core in layer.cores)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.normal_(),
        nn.init.xavier_uniform_,
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.detach().zero_(),
        nn.init.normal_,
        lambda weight: torch.add(torch.ones(10, 12), 1, out=weight),
        lambda weight: weight.register_hook(print),
    ],
)
def test_changing_the_dense_view_in_place_is_refused(change):
    layer = TTLinear(SMALL, 12, 10)
    before = [core.clone() for core in layer.cores]
    with pytest.raises(InputError, match="cannot be changed in place"), torch.no_grad():
        change(layer.weight)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.cores, strict=True))


def test_copies_and_pickles():
    layer = TTLinear(SMALL, 12, 10)
    x = torch.randn(3, 12)
    expected = layer(x)
    other = copy.deepcopy(layer)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for twin in (
        other,
        pickle.loads(pickle.dumps(layer)),
        torch.load(stored, weights_only=False),
    ):
        assert torch.equal(twin(x), expected)
    with torch.no_grad():
        other.core_0.zero_()
    assert torch.equal(layer(x), expected)


def test_a_checkpoint_of_other_ranks_resizes_the_cores():
    big, small = TTLinear(FULL, 12, 10), TTLinear(SMALL, 12, 10)
    x = torch.randn(3, 12)
    parameters = list(big.parameters())
    earlier = big(x).sum()  # its graph is alive while the cores change shape
    earlier.backward()
    big.load_state_dict(small.state_dict())
    assert big.spec == SMALL
    assert all(a is b for a, b in zip(parameters, big.parameters(), strict=True))
    assert torch.equal(big(x), small(x))
    big(x).sum().backward()
    assert big.core_1.grad.shape == big.core_1.shape


def test_a_checkpoint_of_other_modes_is_refused():
    layer = TTLinear(SMALL, 12, 10)
    other = TTLinear(TTSpec("tt", (4, 3), (2, 5), (1, 3, 4, 2, 1)), 12, 10)
    before = [core.clone() for core in layer.cores]
    with pytest.raises(SpecError, match="do not fit this layer"):
        layer.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, layer.cores, strict=True))


def test_rank_weights_start_without_effect_and_cut_at_the_threshold():
    layer = TTLinear(SMALL, 12, 10)
    x = torch.randn(3, 12)
    expected = layer(x)
    layer.attach_rank_weights(0.01)
    torch.testing.assert_close(layer(x), expected)
    assert [tuple(weight.shape) for weight in layer.rank_weights] == [(3,), (4,), (2,)]
    with torch.no_grad():
        layer.rank_weight_2.fill_(0.01)
    torch.testing.assert_close(layer(x), layer.bias.expand(3, 10))


@pytest.mark.parametrize("bias", [True, False])
def test_rank_zero_leaves_the_bias(bias):
    layer = TTLinear(TTSpec("tt", (3, 4), (2, 5), (1, 0, 0, 0, 1)), 12, 10, bias=bias)
    x = torch.randn(3, 12, requires_grad=True)
    y = layer(x)
    expected = layer.bias.expand(3, 10) if bias else torch.zeros(3, 10)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 12))
    assert layer.tt_params == 0
    torch.testing.assert_close(layer.dense_weight(), torch.zeros(10, 12))


def test_a_checkpoint_computes_the_same_without_its_adapter():
    layer = TTLinear(SMALL, 12, 10)
    layer.attach_rank_weights(0.01)
    with torch.no_grad():
        layer.rank_weight_2[:2] = 0.009
    fresh = TTLinear(FULL, 12, 10)
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(3, 12)
    assert torch.equal(fresh(x), layer(x))


def test_attributes_hung_on_the_dense_layer_are_carried_over():
    dense = nn.Linear(12, 10)
    dense.stats = [2.0]
    layer = TTLinear.from_linear(dense, SMALL)
    layer.stats.append(3.0)
    assert (layer.stats, dense.stats) == ([2.0, 3.0], [2.0])
    table = TTEmbedding.from_embedding(
        nn.Embedding(30, 32), TTSpec("ttm", (4, 8), (8, 4), (1, 3, 1))
    )
    assert table.max_norm is None
    assert not table.sparse


def test_the_input_may_be_named():
    layer, x = TTLinear(SMALL, 12, 10), torch.randn(3, 12)
    assert torch.equal(layer(input=x), layer(x))
    table = TTEmbedding(TTSpec("ttm", (4, 8), (8, 4), (1, 3, 1)), 30, 32)
    ids = torch.tensor([1, 2])
    assert torch.equal(table(input=ids), table(ids))


def test_the_dense_weight_is_never_the_core_itself():
    layer = TTLinear(TTSpec("ttm", (12,), (10,), (1, 1)), 12, 10)
    layer.dense_weight().detach().zero_()
    assert layer.core_0.any()


def test_rank_zero_embedding_is_zero():
    table = TTEmbedding(TTSpec("ttm", (4, 8), (8, 4), (1, 0, 1)), 30, 32)
    assert torch.equal(table(torch.tensor([3, 4])), torch.zeros(2, 32))


def test_a_checkpoint_without_rank_weights_leaves_a_layer_that_works():
    layer, fresh = TTLinear(SMALL, 12, 10), TTLinear(FULL, 12, 10)
    layer.attach_rank_weights(0.01)
    with pytest.raises(RuntimeError, match="rank_weight_1"):
        layer.load_state_dict(fresh.state_dict())
    x = torch.randn(3, 12)
    torch.testing.assert_close(layer(x), fresh(x))


def test_rank_weights_of_half_precision_cores_are_float32():
    layer = TTLinear(SMALL, 12, 10, dtype=torch.bfloat16)
    layer.attach_rank_weights(0.01)
    assert layer.rank_weight_1.dtype == torch.float32
    x = torch.randn(3, 12, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    layer(x).sum().backward()
    assert layer.rank_weight_1.grad.dtype == torch.float32


@pytest.mark.parametrize("ranks", [(1, 1, 1, 1, 1), (1, 1, 2, 1, 1), (1, 2, 1, 2, 1)])
def test_outputs_are_contiguous_at_low_ranks(ranks):
    layer = TTLinear(TTSpec("tt", (3, 4), (2, 5), ranks), 12, 10)
    for shape in ((12,), (1, 12), (2, 5, 12), (70, 12)):
        assert layer(torch.randn(shape)).is_contiguous()
        with torch.no_grad():
            assert layer(torch.randn(shape)).is_contiguous()


def test_shapes_on_the_meta_device():
    layer = TTLinear(SMALL, 12, 10, device="meta")
    assert layer(torch.empty(3, 12, device="meta")).shape == (3, 10)


def test_rank_one():
    layer = TTLinear(TTSpec("tt", (3, 4), (2, 5), (1, 1, 1, 1, 1)), 12, 10)
    x = torch.randn(3, 12)
    torch.testing.assert_close(layer(x), F.linear(x, layer.dense_weight(), layer.bias))
    layer(x).sum().backward()
    assert all(core.grad.shape == core.shape for core in layer.cores)


@pytest.mark.parametrize("padding_idx", [0, 29, -1])
def test_padding_row_is_kept_and_gets_no_gradient(padding_idx):
    dense = nn.Embedding(30, 32, padding_idx=padding_idx)
    spec = TTSpec("ttm", (4, 8), (8, 4), (1, 3, 1))
    table = TTEmbedding.from_embedding(dense, spec)
    assert table.padding_idx == dense.padding_idx
    pad = torch.full((4,), dense.padding_idx)
    assert torch.equal(table(pad), torch.zeros(4, 32))
    table(pad).sum().backward()
    assert all(core.grad is None or not core.grad.any() for core in table.cores)
    assert torch.equal(table.weight[dense.padding_idx].detach(), torch.zeros(32))


def test_repr_shows_modes_and_ranks():
    assert repr(TTLinear(SMALL, 12, 10)) == (
        "TTLinear(in_features=12, out_features=10, bias=True, "
        "tt, modes=3x4 -> 2x5, ranks=(1, 3, 4, 2, 1))"
    )


def test_modes_smaller_than_the_layer_are_refused():
    with pytest.raises(SpecError, match="modes are too small"):
        TTLinear(SMALL, 13, 10)


def test_transposed_cores_are_no_layers_own():
    with pytest.raises(SpecError, match="input modes first"):
        TTLinear(FULL.turned(), 10, 12)
