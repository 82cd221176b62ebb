"""Freezing for inference: messages of weights are made once, and anew when a weight changed."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from comera_fx.errors import ConfigError
from tests.backend.models import WIDTH, Language, Stack, compiled, counted, floats, layer
from tests.tolerances import BY_DTYPE

X = floats(200, WIDTH)
"""Tokens enough that plans multiply the cores first."""


def frozen(model: nn.Module, **options):
    model.requires_grad_(False)
    return compiled(model, freeze=True, **options)


def products(function, *args) -> int:
    with torch.profiler.profile() as found:
        function(*args)
    return sum(event.name in ("aten::mm", "aten::bmm") for event in found.events())


def test_products_of_weights_are_made_once():
    model = Stack(3).requires_grad_(False)
    plain, fast = compiled(model), frozen(model)
    wanted = model(X)
    for function in (plain, fast):
        torch.testing.assert_close(function(X), wanted)
    assert counted("tt_layers", "expanded", "inference_graphs") == [6, 6, 2]


def test_the_number_of_products_falls():
    model = Stack(3).requires_grad_(False)
    plain = compiled(model)
    plain(X)
    before = products(plain, X)
    torch._dynamo.reset()
    fast = frozen(model)
    fast(X)
    assert products(fast, X) < before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outputs_and_gradients_of_inputs(mode):
    model = Stack()
    fast = frozen(model)
    with mode():
        torch.testing.assert_close(fast(X), model(X))
    x = [X.clone().requires_grad_() for _ in range(2)]
    for function, each in zip((fast, model), x, strict=True):
        function(each).square().sum().backward()
    torch.testing.assert_close(x[0].grad, x[1].grad)


def test_tables():
    model, ids = Language(tied=False), torch.tensor([[0, 1, 29]])
    torch.testing.assert_close(frozen(model)(ids), model(ids))


def test_weights_that_are_trained_are_refused():
    fast = compiled(Stack(), freeze=True)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(BackendCompilerFailed) as caught:
            fast(X)
        fault = caught.value.inner_exception
        assert isinstance(fault, ConfigError)
        assert fault.got.startswith("9 parameters that require gradients")
        assert fault.mend == "call model.requires_grad_(False), or leave freeze out"


def test_one_weight_that_is_trained_is_enough():
    model = Stack().requires_grad_(False)
    fast = compiled(model, freeze=True)
    fast(X)
    model.layers[0].core_1.requires_grad_(True)
    with pytest.raises(BackendCompilerFailed, match="1 parameters that require gradients"):
        fast(X)


def test_weights_of_inference_mode_are_refused():
    with torch.inference_mode():
        model = Stack()
        with pytest.raises(BackendCompilerFailed) as caught:
            frozen(model)(X)
    assert isinstance(caught.value.inner_exception, ConfigError)
    assert "made in inference mode" in caught.value.inner_exception.problem


def in_place(model):
    with torch.no_grad():
        model.layers[0].core_1.mul_(2)


def loaded(model):
    other = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(other)


def assigned(model):
    other = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    model.requires_grad_(False)


def replaced(model):
    first = model.layers[0]
    value = 2 * first.core_1
    del first.core_1
    gc.collect()
    first.core_1 = nn.Parameter(value, requires_grad=False)


def given_data(model):
    model.layers[0].core_1.data = 2 * model.layers[0].core_1.data


CHANGES = [in_place, loaded, assigned, replaced, given_data]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_a_weight_is_noticed(change):
    model = Stack()
    fast = frozen(model)
    before = fast(X)
    change(model)
    after = fast(X)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, model(X))
    torch.testing.assert_close(fast(X), after)


def test_train_and_eval():
    model = nn.Sequential(layer(), nn.Dropout(0.5))
    fast = frozen(model)
    for training in (True, False, True):
        model.train(training)
        torch.manual_seed(0)
        mine = fast(X)
        torch.manual_seed(0)
        torch.testing.assert_close(mine, model(X))
    assert counted("graphs") == [2]


class Returned(nn.Module):
    """Returns what it makes of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return x * 2, self.scale * 3


def test_a_write_to_what_is_returned_changes_no_later_call():
    fast = frozen(Returned())
    for _ in range(2):
        out = fast(X)[1]
        assert out.tolist() == [3, 3, 3]
        out.zero_()


class Writing(nn.Module):
    """Writes to a weight between two reads of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = layer()

    def forward(self, x):
        before = self.inner(x)
        with torch.no_grad():
            self.inner.core_1.mul_(1.5)
        return before + self.inner(x)


def test_a_model_that_writes_to_its_weights():
    model, alone = Writing(), Writing()
    fast = frozen(model)
    for _ in range(3):
        torch.testing.assert_close(fast(X), alone(X))
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


def test_autocast_inside():
    model, x = Stack().float(), X.float()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            low = model(x)
        return low, model(x)

    model.requires_grad_(False)
    fast = compiled(function, freeze=True)
    for mine, theirs in zip(fast(x), function(x), strict=True):
        torch.testing.assert_close(mine, theirs, **BY_DTYPE[theirs.dtype])


@pytest.mark.parametrize("freeze", [False, True])
def test_weights_are_not_kept_alive(freeze):
    model = Stack().requires_grad_(False)
    fast = compiled(model, freeze=freeze)
    fast(X)
    held = weakref.ref(model.layers[0].core_1)
    model.layers[0].core_1 = nn.Parameter(torch.zeros_like(model.layers[0].core_1), False)
    fast(X)
    gc.collect()
    assert held() is None


def test_a_dynamic_number_of_tokens():
    model = Stack().requires_grad_(False)
    fast = torch.compile(
        model,
        backend="comera",
        fullgraph=True,
        dynamic=True,
        options={"freeze": True, "inner": "aot_eager"},
    )
    for tokens in (200, 210, 220):
        x = floats(tokens, WIDTH)
        torch.testing.assert_close(fast(x), model(x))
    assert counted("graphs") == [1]
    in_place(model)
    torch.testing.assert_close(fast(x), model(x))
