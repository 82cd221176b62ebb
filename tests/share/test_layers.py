"""Which layers share, and that they notice what they no longer have in common."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn

from comera_fx import PlanConfig, TTLinear, TTSpec
from comera_fx.share import forward as share_forward
from comera_fx.share import layers as share_layers
from comera_fx.share.layers import Layers, signature_of
from comera_fx.sharing import install, uninstall

SPEC = TTSpec("tt", (4, 6), (6, 4), (1, 4, 8, 4, 1))
OTHER = TTSpec("tt", (4, 6), (6, 4), (1, 4, 5, 4, 1))
PAIRS = TTSpec("ttm", (4, 6), (6, 4), (1, 8, 1))


@pytest.fixture(autouse=True)
def _everything_is_worth_sharing(monkeypatch):
    decide = share_layers.Layers._decide

    def always(self, group, sizes, cast):
        decision = decide(self, group, sizes, cast)
        trains = sizes.needs_input_grad or sizes.needs_core_grad
        return dataclasses.replace(decision, makes=True, uses=True, keeps=not trains)

    monkeypatch.setattr(share_layers.Layers, "_decide", always)
    monkeypatch.setattr(share_forward, "joint_saving", lambda *args: 1.0)


@pytest.fixture
def made(monkeypatch):
    """How many layers' factors were made each time."""
    counts = []
    original = share_forward.make_factors

    def watched(chains, *args):
        counts.append(chains.num_layers)
        return original(chains, *args)

    monkeypatch.setattr(share_forward, "make_factors", watched)
    return counts


def layer(spec=SPEC, **settings):
    return TTLinear(spec, 24, 24, **settings).double()


def stack(*layers):
    """A model of layers that share, and a copy that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    alone = copy.deepcopy(model)
    install(model, [name for name, _ in model.named_children()])
    return model, alone


def x_of(rows=5, dtype=torch.float64):
    return torch.randn(rows, 24, dtype=dtype, generator=torch.Generator().manual_seed(1))


def assert_same(model, alone, x=None):
    x = x_of() if x is None else x
    for each in (model, alone):
        each.zero_grad()
        each(x).sin().sum().backward()
    torch.testing.assert_close(model(x), alone(x))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def groups(model):
    (hook,) = model._forward_pre_hooks.values()
    return sorted(len(group.layers) for group in set(hook._layers.groups.values()))


def test_layers_of_one_shape_make_a_group():
    model, alone = stack(layer(), layer(OTHER), layer(), layer(OTHER), layer())
    assert_same(model, alone)
    assert groups(model) == [2, 3]


@pytest.mark.parametrize(
    "odd",
    [
        lambda: layer(PAIRS),
        lambda: layer(plan=PlanConfig(objective="memory")),
        lambda: layer(plan=PlanConfig(objective="flops")),
        lambda: layer(plan=PlanConfig(memory_limit_bytes=1 << 30)),
    ],
)
def test_a_layer_for_which_factors_are_no_choice_goes_its_own_way(odd, made):
    model, alone = stack(layer(), odd(), layer())
    assert_same(model, alone)
    assert groups(model) == [2]
    assert set(made) == {2}


def test_padded_layers_share():
    padded = [TTLinear(SPEC, 22, 21) for _ in range(2)]
    model, alone = stack(*(each.double() for each in padded))
    for each in (model, alone):
        each.insert(1, nn.ConstantPad1d((0, 1), 0.0))
    install(model, ["0", "2"])
    x = torch.randn(5, 22, dtype=torch.float64)
    assert_same(model, alone, x)
    assert groups(model) == [2]


def test_a_frozen_layer_is_not_grouped_with_trained_ones():
    frozen = layer()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    model, alone = stack(layer(), frozen, layer())
    assert_same(model, alone)
    assert groups(model) == [1, 2]
    assert all(parameter.grad is None for parameter in model[1].parameters())


def test_a_dead_layer_goes_its_own_way():
    dead = layer(TTSpec("tt", (4, 6), (6, 4), (1, 0, 0, 0, 1)))
    model, alone = stack(layer(), dead, layer())
    assert_same(model, alone)
    assert groups(model) == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_dtype_is_noticed(dtype, made):
    model, alone = stack(layer(), layer())
    assert_same(model, alone)
    made.clear()
    model.to(dtype)
    for _ in range(2):
        model(x_of(dtype=dtype))
    assert made[-1] == 2


def test_ranks_that_were_cut_are_noticed(made):
    model, alone = stack(layer(), layer(), layer())
    assert_same(model, alone)
    with torch.no_grad():
        for each in (model, alone):
            cores = [core.detach().clone() for core in each[1].cores]
            cores[1], cores[2] = cores[1][..., :5].contiguous(), cores[2][:5].contiguous()
            each[1].set_cores(cores)
    assert_same(model, alone)
    assert_same(model, alone)
    assert groups(model) == [1, 2]


def test_rank_weights_that_come_later_are_noticed():
    model, alone = stack(layer(), layer())
    assert_same(model, alone)
    model.eval(), alone.eval()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x_of()), alone(x_of()))
        for each in (model, alone):
            for module in each:
                module.attach_rank_weights(0.5)
                module.rank_weights[1][:3] = 0.4  # below the threshold: counts as 0
        for _ in range(4):
            torch.testing.assert_close(model(x_of()), alone(x_of()))
    assert_same(model.train(), alone.train())


def test_a_layer_put_in_anothers_place_is_not_mistaken_for_it():
    model, alone = stack(layer(), layer(), layer())
    assert_same(model, alone)
    other = layer()
    model[1], alone[1] = other, copy.deepcopy(other)
    assert_same(model, alone)


def test_sharded_models_do_not_share(made):
    class FSDPModule:
        """Stands for torch's, by its name."""

    class Sharded(FSDPModule, nn.Sequential):
        pass

    model, alone = stack(layer(), layer())
    outer = Sharded(model)
    install(outer, ["0.0", "0.1"])
    uninstall(model)
    assert_same(outer, alone)
    assert made == []


def test_sharding_after_the_first_pass_is_noticed(made):
    class FSDPModule:
        """Stands for torch's, by its name."""

    class Sharded(FSDPModule, nn.Sequential):
        pass

    model, alone = stack(layer(), layer())
    assert_same(model, alone)
    made.clear()
    model.__class__ = Sharded
    for module in model:
        for k, core in enumerate(module.cores):
            module._parameters[f"core_{k}"] = nn.Parameter(core.detach())
    assert_same(model, alone)
    assert made == []


def test_signatures_of_what_cannot_share():
    assert signature_of(layer().to("meta")) is None
    with torch.inference_mode():
        assert signature_of(layer()) is None
    odd = layer()
    for k, core in enumerate(odd.cores):
        odd._parameters[f"core_{k}"] = nn.Parameter(core.detach().to(torch.complex128))
    assert signature_of(odd) is None


def test_only_the_model_holds_its_layers():
    model, _ = stack(layer(), layer())
    layers = Layers(model, list(model), [])
    assert layers.root() is model
    del model
    assert layers.root() is None


class Recursive(nn.Module):
    """Calls itself once more."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x, depth=1):
        x = self.second(torch.tanh(self.first(x)))
        return self(x, depth - 1) + self.first(x) if depth else x


def test_a_model_that_calls_itself():
    torch.manual_seed(0)
    model = Recursive()
    alone = copy.deepcopy(model)
    install(model, ["first", "second"])
    assert_same(model, alone)
    assert share_forward._thread.forwards == []


class Offloaded(nn.Module):
    """Keeps what one of its layers saves for backward elsewhere."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = layer(), layer(), layer()

    def forward(self, x):
        x = self.first(x)
        with torch.autograd.graph.save_on_cpu():
            x = self.second(x)
        return self.third(x)


def test_a_part_with_hooks_on_saved_tensors_goes_its_own_way(made):
    torch.manual_seed(0)
    model = Offloaded()
    alone = copy.deepcopy(model)
    install(model, ["first", "second", "third"])
    assert_same(model, alone)
    with torch.autograd.graph.save_on_cpu():  # all of it: the same for every layer
        assert_same(model, alone)


class Readers(nn.Module):
    """Layers that read one input, of which one may be left out."""

    def __init__(self):
        super().__init__()
        self.q, self.k = layer(), layer()
        self.with_k = True

    def forward(self, x):
        return self.q(x) * (self.k(x) if self.with_k else 1)


@pytest.mark.parametrize("with_k", [True, False])
def test_a_reader_that_is_not_called_keeps_no_gradient(with_k):
    torch.manual_seed(0)
    model = Readers()
    model.with_k = with_k
    alone = copy.deepcopy(model)
    install(model, ["q", "k"], [["q", "k"]])
    for each in (model, alone):
        each(x_of()).sum().backward()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert (found.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad)


def test_readers_with_a_backward_hook_are_not_run_together():
    torch.manual_seed(0)
    model = Readers()
    alone = copy.deepcopy(model)
    install(model, ["q", "k"], [["q", "k"]])
    seen = []
    for each in (model, alone):
        each.q.register_full_backward_hook(lambda module, grads, outputs: seen.append(grads[0]))
        each(x_of().requires_grad_()).sum().backward()
    torch.testing.assert_close(*seen)


def test_traced_by_jit():
    model, alone = stack(layer(), layer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model.eval(), x_of())
    torch.testing.assert_close(traced(2 * x_of()), alone(2 * x_of()))


def test_a_batch_of_models():
    model, _ = stack(layer(), layer())
    params = {name: torch.stack([p, 2 * p]) for name, p in model.named_parameters()}

    def run(params, x):
        return torch.func.functional_call(model, params, (x,))

    found = torch.func.vmap(run, in_dims=(0, None))(params, x_of())
    for k in range(2):
        wanted = run({name: p[k] for name, p in params.items()}, x_of())
        torch.testing.assert_close(found[k], wanted)


def test_forward_mode_differentiation():
    model, alone = stack(layer(), layer())
    x, direction = x_of(), 2 * x_of()
    found = torch.func.jvp(model, (x,), (direction,))
    torch.testing.assert_close(found, torch.func.jvp(alone, (x,), (direction,)))
