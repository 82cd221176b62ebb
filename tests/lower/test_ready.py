"""Calls that a layer keeps ready: never for another kind of call, never in a copy."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from comera_fx import PlanConfig, TTLinear, TTSpec
from comera_fx.errors import InputError, PlanError
from comera_fx.lower import ready

SPEC = TTSpec("tt", (4, 6), (6, 4), (1, 4, 8, 4, 1))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return TTLinear(SPEC, 24, 24, plan=PlanConfig(objective="flops")).double()


def check(layer, x):
    """Output and all wanted gradients equal those of the dense weight, twice."""
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    for _ in range(2):
        expected = torch.nn.functional.linear(x, layer.dense_weight(), layer.bias)
        found = layer(x)
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == expected.requires_grad
        if found.requires_grad:
            torch.testing.assert_close(
                torch.autograd.grad(found.sin().sum(), leaves),
                torch.autograd.grad(expected.sin().sum(), leaves),
            )


def calls(layer):
    return len(layer._ready._calls)


def test_a_second_call_of_a_kind_is_ready(layer, monkeypatch):
    x = torch.randn(5, 24, dtype=torch.float64)
    first = layer(x)
    monkeypatch.setattr(TTLinear, "_run", None)
    assert torch.equal(layer(x), first)


def test_shapes_and_grad_modes_are_told_apart(layer):
    for shape in [(5, 24), (2, 3, 24), (24,), (0, 24), (1, 24), (6, 24)]:
        for requires_grad in (True, False):
            x = torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)
            check(layer, x)
            with torch.no_grad():
                check(layer, x)
    with torch.inference_mode():
        check(layer, torch.randn(5, 24, dtype=torch.float64))


def test_frozen_and_thawed_cores_and_bias_are_noticed(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    layer.core_1.requires_grad_(False)
    check(layer, x)
    layer.core_1.requires_grad_(True)
    check(layer, x)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
        check(layer, x)
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
        check(layer, x)


def test_other_ranks_are_noticed(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    check(layer, x)
    smaller = TTLinear(TTSpec("tt", (4, 6), (6, 4), (1, 3, 5, 2, 1)), 24, 24).double()
    layer.load_state_dict(smaller.state_dict())
    check(layer, x)
    layer.set_cores([torch.zeros(s) for s in [(1, 4, 0), (0, 6, 0), (0, 6, 0), (0, 4, 1)]])
    assert torch.equal(layer.double()(x), layer.bias.expand(5, 24))


def test_another_dtype_is_noticed(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    check(layer, x)
    with pytest.raises(InputError, match="different dtypes"):
        layer(x.float())
    layer.float()
    with pytest.raises(InputError, match="different dtypes"):
        layer(x)
    check(layer, x.float())
    with pytest.raises(InputError, match="different dtypes"):
        layer(x)


def test_autocast_is_not_passed_by(layer):
    layer.float()
    x = torch.randn(5, 24)
    layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    assert layer(x).dtype is torch.float32


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operator_of_a_ready_call(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    layer(x)
    with Seen() as seen:
        layer(x)
    assert torch.ops.comera_fx.tt_linear.default in seen.calls
    with Dispatched() as dispatched:
        layer(x)
    assert torch.ops.aten.mm.default in dispatched.calls


def test_jit_tracing_records_products_for_any_batch(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, (x,))
    other = torch.randn(9, 24, dtype=torch.float64)
    torch.testing.assert_close(traced(other), layer(other))


def test_other_settings_of_a_plan_are_noticed(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    layer(x)
    layer.plan_config = PlanConfig(memory_limit_bytes=1)
    with pytest.raises(PlanError, match="memory limit"):
        layer(x)


def test_changed_numbers_are_used(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    check(layer, x)
    with torch.no_grad():
        layer.core_1.mul_(2)
        layer.bias.zero_()
    check(layer, x)


def test_copies_and_pickles_are_empty(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    layer(x)
    assert calls(layer) == 1
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ):
        assert calls(other) == 0
        assert torch.equal(other(x), layer(x))
        assert calls(other) == 1
    assert calls(layer) == 1


def test_a_shallow_copy_with_other_cores_computes_its_own(layer):
    x = torch.randn(5, 24, dtype=torch.float64)
    layer(x)
    other = copy.copy(layer)
    other._parameters = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    check(other, x)
    check(layer, x)


def test_not_more_than_so_many_are_kept(layer):
    for num_tokens in range(ready.MOST_CALLS + 5):
        layer(torch.zeros(num_tokens, 24, dtype=torch.float64))
        assert calls(layer) <= ready.MOST_CALLS


def test_padded_features_take_the_usual_way():
    layer = TTLinear(SPEC, 23, 22).double()
    for _ in range(2):
        check(layer, torch.randn(5, 23, dtype=torch.float64))
    assert calls(layer) == 0
