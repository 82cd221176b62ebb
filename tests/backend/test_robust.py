"""What models do around the backend: breaks, modes, autocast, checkpoints, copies."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.backend.models import (
    WIDTH,
    Broken,
    Stack,
    assert_as_eager,
    assert_expanded,
    compiled,
    counted,
    floats,
    graph_breaks,
    layer,
)
from tests.tolerances import BY_DTYPE, EXACT

X = floats(5, WIDTH)
LOW = BY_DTYPE[torch.bfloat16]

# ---- graph breaks ----


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x):
        y = self.first(x)
        return self.second(y) * 2 if x.sum() > 0 else self.second(y) - 1


@graph_breaks
def test_a_print_between_layers(capsys):
    model = Broken(stop=lambda x: print("between"))  # noqa: T201
    assert_as_eager(compiled(model, fullgraph=False), model, X)
    assert_expanded(2, graphs=2)
    assert capsys.readouterr().out == "between\n" * 2


@graph_breaks
def test_a_branch_on_data():
    model = Branching()
    fast = compiled(model, fullgraph=False)
    for x in (X, -X):
        assert_as_eager(fast, model, x)
    found = counted("tt_layers", "expanded", "forward_graphs", "backward_graphs")
    assert found == [3, 3, 3, 3]


def test_a_whole_graph_is_refused_by_torch_where_there_is_a_break():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        compiled(Broken())(X)


def test_a_function_of_several_models():
    first, second = Stack(1), Stack(2)

    def both(x):
        return first(x) + second(x)

    assert_as_eager(compiled(both), nn.ModuleList([first, second]), X, slow=both)
    assert_expanded(3)


# ---- train, eval, gradients on and off ----


def test_train_and_eval_take_turns():
    model = nn.Sequential(layer(), nn.Dropout(0.5), layer())
    fast = compiled(model)
    for training in (True, False, True, False):
        model.train(training)
        assert_as_eager(fast, model, X)
    assert_expanded(4, graphs=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_on_and_off(mode):
    model = Stack()
    fast = compiled(model)
    for _ in range(2):
        with mode():
            torch.testing.assert_close(fast(X), model(X))
        assert_as_eager(fast, model, X)
    assert counted("graphs", "inference_graphs", "forward_graphs") == [2, 1, 1]


def test_a_part_without_gradients():
    model = Stack()

    def function(x):
        with torch.no_grad():
            x = model(x)
        return model(x)

    assert_as_eager(compiled(function), model, X, slow=function)
    assert_expanded(4)


def test_gradients_add_up_over_calls():
    model, alone = Stack(), Stack()
    fast = compiled(model)
    for function in (fast, alone):
        for seed in range(3):
            function(floats(5, WIDTH, seed=seed)).square().sum().backward()
    mine, theirs = ([p.grad for p in each.parameters()] for each in (model, alone))
    torch.testing.assert_close(mine, theirs, **EXACT)


def test_two_backward_calls_of_a_graph_that_is_kept():
    model, alone = Stack(), Stack()
    out = compiled(model)(X).square().sum()
    out.backward(retain_graph=True)
    out.backward()
    alone(X).square().sum().backward()
    mine, theirs = ([p.grad for p in each.parameters()] for each in (model, alone))
    torch.testing.assert_close(mine, [2 * grad for grad in theirs], **EXACT)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_second_derivatives_are_refused_by_torch():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(compiled(Stack())(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


def test_second_derivatives_by_autograd():
    model = Stack()
    found = []
    for function in (compiled(model, inner="eager"), model):
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(*found, **EXACT)


def test_training_follows_eager():
    model, alone = Stack(), Stack()
    fast = compiled(model)
    for each, function in ((model, fast), (alone, alone)):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.01)
        for seed in range(4):
            optimizer.zero_grad()
            function(floats(5, WIDTH, seed=seed)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), **EXACT)
    assert_expanded(2)


# ---- autocast ----


def test_autocast_around_the_call():
    model, x = Stack().float(), X.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_eager(compiled(model), model, x, tolerances=LOW)
    assert_expanded(2)


def test_autocast_on_and_off():
    model, x = Stack().float(), X.float()
    fast = compiled(model)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            dtype = torch.bfloat16 if enabled else torch.float32
            assert_as_eager(fast, model, x, tolerances=BY_DTYPE[dtype])
    assert_expanded(4, graphs=2)


def test_autocast_inside():
    model, x = Stack().float(), X.float()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            low = model(x)
        return low.float() + model(x)

    assert_as_eager(compiled(function), model, x, slow=function, tolerances=LOW)
    assert_expanded(4)


def test_low_precision_parameters():
    model, x = Stack().bfloat16(), X.bfloat16()
    assert_as_eager(compiled(model), model, x, tolerances=LOW)
    assert_expanded(2)


# ---- checkpoints ----


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Stack(3)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def saved_bytes(function, x) -> int:
    """Bytes that the backward pass holds, parameters and inputs aside."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(x)
    known = [x, out, *(p for p in getattr(function, "_orig_mod", function).parameters())]
    for tensor in known:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(held.values())


def test_a_checkpointed_block_is_computed_again():
    model, x = Checkpointed(), floats(64, WIDTH).requires_grad_()
    assert_as_eager(compiled(model), model, x)
    torch._dynamo.reset()
    plain = saved_bytes(compiled(model.block), x)
    assert plain > 3 * 64 * WIDTH * 8
    assert saved_bytes(compiled(model), x) < 64 * WIDTH * 8


def test_a_checkpoint_around_a_compiled_block():
    model = Stack()
    fast = compiled(model)
    assert_as_eager(
        lambda x: checkpoint(fast, x, use_reentrant=False),
        model,
        X,
        slow=lambda x: checkpoint(model, x, use_reentrant=False),
    )
    assert counted("tt_layers", "expanded")[0] >= 2


# ---- copies and files ----


def test_a_copy_of_a_compiled_module_has_its_own_weights():
    model = Stack()
    fast = compiled(model)
    before = fast(X)
    other = copy.deepcopy(fast)
    with torch.no_grad():
        other._orig_mod.layers[0].core_1.mul_(2)
    torch.testing.assert_close(fast(X), before)
    assert not torch.allclose(other(X), before)
    assert_as_eager(other, other._orig_mod, X)


def test_the_state_of_a_compiled_module_loads_into_another():
    fast, other = (compiled(nn.Sequential(Stack(), layer())) for _ in range(2))
    with torch.no_grad():
        fast._orig_mod[1].bias.add_(1)
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    assert not torch.allclose(fast(X), other(X))
    other.load_state_dict(torch.load(file))
    torch.testing.assert_close(fast(X), other(X))


def test_the_call_of_a_module_compiled_in_place():
    model = Stack()
    wanted = model(X)
    model.compile(backend="comera", options={"inner": "aot_eager"})
    torch.testing.assert_close(model(X), wanted)
    assert counted("tt_layers", "expanded") == [2, 2]


def test_hooks_of_modules_run():
    model = Stack()
    model.layers[0].register_forward_hook(lambda module, args, out: out * 2)
    assert_as_eager(compiled(model), model, X)
    assert_expanded(2)


def test_branches_of_a_graph():
    model = Stack(1)

    def function(x):
        return torch.cond(x.sum() > 0, lambda y: model(y) * 2, lambda y: model(y) - 1, (x,))

    with torch.no_grad():
        fast = compiled(function)
        for x in (X, -X):
            torch.testing.assert_close(fast(x), function(x))
    assert counted("tt_layers", "expanded") == [2, 2]
