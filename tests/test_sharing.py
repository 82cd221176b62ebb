"""Layers that share compute what they would alone, whatever else happens."""

import copy
import dataclasses
import io
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import comera_fx
from comera_fx import OptimizeConfig, RankAdapter, RankConfig, TTLinear
from comera_fx.share import forward as share_forward
from comera_fx.share import layers as share_layers
from comera_fx.sharing import EndForward, ShareForward, install, uninstall

SIZE = 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x):
        return x + self.out(torch.tanh(self.q(x) * self.k(x)) + self.v(x))


class Stack(nn.Module):
    """Blocks of equal layers; one may be checkpointed, one left out, one interrupted."""

    def __init__(self, num_blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.checkpoints: str | None = None
        self.skips = None
        self.between = None

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number == self.skips:
                continue
            if self.checkpoints is not None and number == 1:
                reentrant = self.checkpoints == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = block(x)
            if self.between is not None:
                self.between(number, self)
        return x


@pytest.fixture(autouse=True)
def _everything_is_worth_sharing(monkeypatch):
    """At these sizes prediction would say no: the machinery is to be tried, not the choice."""
    decide = share_layers.Layers._decide

    def always(self, group, sizes, cast):
        decision = decide(self, group, sizes, cast)
        trains = sizes.needs_input_grad or sizes.needs_core_grad
        return dataclasses.replace(decision, makes=True, uses=True, keeps=not trains)

    monkeypatch.setattr(share_layers.Layers, "_decide", always)
    monkeypatch.setattr(share_forward, "joint_saving", lambda *args: 1.0)
    yield
    assert share_forward._thread.forwards == [], "a forward pass was left open"


def make(num_blocks=3, *, dtype=torch.float64, seed=0):
    """The optimised model, and a copy of it that does not share."""
    torch.manual_seed(seed)
    config = OptimizeConfig(
        init="random",
        max_rank=6,
        modes={"*": ((6, 8), (8, 6))},
        min_params=0,
        only_if_faster=False,
    )
    x = torch.randn(5, SIZE)
    model = comera_fx.optimize(Stack(num_blocks), x, config=config).to(dtype)
    alone = copy.deepcopy(model)
    uninstall(alone)
    return model, alone


def made_factors(monkeypatch):
    """Counts how often factors are made, and for how many layers."""
    calls = []
    original = share_forward.make_factors

    def watched(chains, cores, weights=()):
        calls.append(chains.num_layers)
        return original(chains, cores, weights)

    monkeypatch.setattr(share_forward, "make_factors", watched)
    return calls


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


def zero(model):
    for parameter in model.parameters():
        parameter.grad = None


def assert_same(model, alone, x, *, run=None):
    """Output and all gradients equal those of the copy that does not share."""
    run = run or (lambda m, x: m(x))
    results = []
    for each in (model, alone):
        zero(each)
        given = x.clone().requires_grad_()
        y = run(each, given)
        y.sin().sum().backward()
        results.append((y, given.grad, grads(each)))
    (y, dx, found), (y2, dx2, wanted) = results
    torch.testing.assert_close(y, y2)
    torch.testing.assert_close(dx, dx2)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        if grad is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], grad, msg=name)


def x_of(rows=5, dtype=torch.float64, seed=1):
    return torch.randn(rows, SIZE, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_factors_of_all_layers_are_made_once(monkeypatch):
    model, alone = make()
    calls = made_factors(monkeypatch)
    assert_same(model, alone, x_of())
    assert calls == [12]


def test_the_first_of_several_readers_makes_the_outputs_of_all(monkeypatch):
    model, alone = make(1)
    applied = []
    original = share_forward.apply_factors

    def watched(x, lefts, *rest):
        applied.append(len(lefts))
        return original(x, lefts, *rest)

    monkeypatch.setattr(share_forward, "apply_factors", watched)
    assert_same(model, alone, x_of())
    assert applied == [3, 1]  # q, k, v; out


def test_share_false_installs_nothing():
    config = OptimizeConfig(init="random", share=False, only_if_faster=False)
    model = comera_fx.optimize(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96)), config=config)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_submodule_called_alone_shares_nothing(monkeypatch):
    model, alone = make()
    calls = made_factors(monkeypatch)
    assert_same(model.blocks[0], alone.blocks[0], x_of())
    assert_same(model.blocks[1].q, alone.blocks[1].q, x_of())
    assert calls == []


def test_a_layer_that_did_not_run_keeps_no_gradient():
    model, alone = make()
    model.skips = alone.skips = 1
    assert_same(model, alone, x_of())
    assert all(p.grad is None for p in model.blocks[1].parameters())
    assert all(p.grad is not None for p in model.blocks[2].parameters())


class Two(nn.Module):
    """Two outputs that have no layer in common."""

    def __init__(self, stack):
        super().__init__()
        self.blocks = stack.blocks

    def forward(self, x):
        return self.blocks[0](x), self.blocks[1](x)


class Half(Two):
    """The first block without gradients."""

    def forward(self, x):
        with torch.no_grad():
            x = self.blocks[0](x)
        return self.blocks[1](x)


def shared(model):
    install(model, [name for name, m in model.named_modules() if isinstance(m, TTLinear)])
    return model


def assert_same_gradients(model, alone):
    for name, grad in grads(alone).items():
        if grad is None:
            assert grads(model)[name] is None, name
        else:
            torch.testing.assert_close(grads(model)[name], grad, msg=name)


def test_two_losses_go_backward_on_their_own():
    model, alone = make()
    for run in (shared(Two(model)), Two(alone)):
        first, second = run(x_of())
        first.sum().backward()  # no retain_graph: nothing of the other's graph may go with it
        second.sum().backward()
    assert_same_gradients(model, alone)


def test_gradients_accumulate_over_passes():
    model, alone = make()

    def run(each, x):
        each(x).sum().backward()
        return each(2 * x)

    assert_same(model, alone, x_of(), run=run)


def test_a_graph_kept_goes_backward_twice():
    model, alone = make()

    def run(each, x):
        y = each(x)
        y.sum().backward(retain_graph=True)
        return y

    assert_same(model, alone, x_of(), run=run)


def test_second_derivatives():
    model, alone = make(1)

    def run(each, x):
        y = each(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return dx

    assert_same(model, alone, x_of(), run=run)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_checkpointing(kind):
    model, alone = make()
    model.checkpoints = alone.checkpoints = kind
    assert_same(model, alone, x_of())


def test_a_part_without_gradients():
    model, alone = make()
    for run in (shared(Half(model)), Half(alone)):
        run(x_of()).sum().backward()
    assert_same_gradients(model, alone)


def test_a_weight_changed_between_layers_is_seen():
    model, alone = make()

    def change(number, each):
        if number == 0:
            with torch.no_grad():
                each.blocks[1].q.core_0.mul_(1.5)

    for each in (model, alone):
        each.between = change
        with torch.no_grad():
            each(x_of())
    torch.testing.assert_close(model.blocks[1].q.core_0, alone.blocks[1].q.core_0)
    assert_same(model, alone, x_of(), run=lambda each, x: each(x.detach()).detach() + x)


def test_a_weight_changed_before_backward_never_gives_a_gradient_of_both():
    """Alone a layer says that it cannot; factors were made of copies, which are as they were."""
    model, alone = make()
    wanted = copy.deepcopy(alone)
    wanted(x_of()).sum().backward()
    for each in (model, alone):
        y = each(x_of())
        with torch.no_grad():
            each.blocks[1].q.core_0.mul_(1.5)
        if each is alone:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()
            for name, grad in grads(wanted).items():
                torch.testing.assert_close(grads(model)[name], grad, msg=name)


def test_an_input_changed_between_readers_is_seen():
    class Readers(Block):
        def forward(self, x):
            q = self.q(x)
            with torch.no_grad():
                x.mul_(2)
            return q + self.k(x)

    torch.manual_seed(0)
    config = OptimizeConfig(init="random", max_rank=6, min_params=0, only_if_faster=False)
    model = comera_fx.optimize(Readers(), config=config)
    alone = copy.deepcopy(model)
    uninstall(alone)
    with torch.no_grad():
        torch.testing.assert_close(model(x_of().float()), alone(x_of().float()))


def test_an_exception_leaves_nothing_open(monkeypatch):
    model, alone = make()

    def fail(number, each):
        raise ValueError("stop")

    model.between = fail
    with pytest.raises(ValueError, match="stop"):
        model(x_of())
    assert share_forward._thread.forwards == []
    model.between = None
    assert_same(model, alone, x_of())


def test_an_interrupt_leaves_nothing_that_is_used():
    model, alone = make()

    def interrupt(number, each):
        raise KeyboardInterrupt

    model.between = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(x_of())
    model.between = None
    with torch.no_grad():
        for each in (model, alone):
            each.blocks[0].q.core_1.mul_(0.5)
    assert_same(model.blocks[0], alone.blocks[0], x_of())
    assert_same(model, alone, x_of())


def test_two_threads():
    model, alone = make()
    errors = []

    def work(seed):
        try:
            for step in range(5):
                x = x_of(rows=3 + seed, seed=10 * seed + step)
                given = x.clone().requires_grad_()
                found = torch.autograd.grad(model(given).sum(), given)[0]
                other = x.clone().requires_grad_()
                wanted = torch.autograd.grad(alone(other).sum(), other)[0]
                torch.testing.assert_close(found, wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_copy_between_two_steps():
    model, alone = make()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-4) for each in (model, alone)]
    for step in range(3):
        assert_same(model, alone, x_of(seed=step))
        for optimizer in optimizers:
            optimizer.step()
        other = copy.deepcopy(model)
        assert_same(other, alone, x_of(seed=9))
        with torch.no_grad():
            other.blocks[0].q.core_0.zero_()  # is of the copy alone
        assert_same(model, alone, x_of(seed=step))


def test_copies_pickles_and_state_hold_no_factors():
    model, alone = make()
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(x_of(1))
    assert model.state_dict().keys() == alone.state_dict().keys()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        (hook,) = (h for h in other._forward_pre_hooks.values() if isinstance(h, ShareForward))
        assert hook._layers is None
        assert any(isinstance(h, EndForward) for h in other._forward_hooks.values())
        assert_same(other.train(), alone, x_of())


def test_decoding_keeps_factors_until_a_weight_changes():
    model, alone = make()
    for each in (model, alone):
        each.eval()
    with torch.no_grad():
        for step in range(4):
            torch.testing.assert_close(model(x_of(1, seed=step)), alone(x_of(1, seed=step)))
        for change in (
            lambda each: each.blocks[0].v.core_1.mul_(2.0),
            lambda each: each.blocks[0].v.core_1.data.mul_(2.0),  # no version counter sees it
            lambda each: each.load_state_dict({k: v * 1.1 for k, v in each.state_dict().items()}),
        ):
            for each in (model, alone):
                change(each)
            for step in range(3):
                torch.testing.assert_close(model(x_of(1, seed=step)), alone(x_of(1, seed=step)))
    with torch.inference_mode():
        torch.testing.assert_close(model(x_of(1)), alone(x_of(1)))
    assert_same(model.train(), alone.train(), x_of())


def test_a_model_in_a_model():
    model, alone = make(2)
    inner, inner_alone = make(2, seed=3)
    model.blocks.append(inner)
    alone.blocks.append(inner_alone)
    assert_same(model, alone, x_of())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, alone = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        found, wanted = model(x_of().float()), alone(x_of().float())
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.05, atol=0.05)


def test_functional_call_and_transforms():
    model, alone = make(1)
    params = {name: p.detach() * 1.1 for name, p in model.named_parameters()}

    def loss(params, each):
        return torch.func.functional_call(each, params, (x_of(),)).square().sum()

    torch.testing.assert_close(loss(params, model), loss(params, alone))
    found, wanted = (torch.func.grad(loss)(params, each) for each in (model, alone))
    torch.testing.assert_close(found, wanted)


def test_compiled_and_exported():
    model, alone = make(1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x_of()), alone(x_of()))
    exported = torch.export.export(model, (x_of(),), strict=False).module()
    torch.testing.assert_close(exported(x_of()), alone(x_of()))
    torch._dynamo.reset()


def test_hooks_on_a_layer_see_what_they_would_alone():
    model, alone = make(1)
    seen = []
    for each in (model, alone):
        each.blocks[0].k.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        each.blocks[0].v.register_forward_hook(lambda module, args, y: seen.append(y) or y + 1)
    assert_same(model, alone, x_of())
    assert len(seen) == 2
    torch.testing.assert_close(*seen)


def test_ranks_that_adapt():
    results = []
    for each in make(2, dtype=torch.float32):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(comera_fx.param_groups(each, lr=1e-3, rank_lr=5e-2))
        config = RankConfig(method="comera", target_ratio=0.6, early_steps=4, prune_every=2)
        adapter = RankAdapter(each, optimizer, config)
        x, y = torch.randn(16, SIZE), torch.randn(16, SIZE)
        for _ in range(24):
            loss = adapter.loss(nn.functional.mse_loss(each(x), y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            adapter.step()
        results.append((float(loss.detach()), adapter.size))
    (loss, size), (wanted_loss, wanted_size) = results
    assert size == wanted_size
    assert loss == pytest.approx(wanted_loss, rel=1e-3)


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
        return func(*args, **(kwargs or {}))


def test_fewer_products_are_launched():
    counts = []
    for each in make(6):
        with Products() as products:
            each(x_of()).sum().backward()
        counts.append(products.count)
    assert counts[0] < 0.7 * counts[1]


def test_a_model_that_shares_can_be_traced():
    model, alone = make(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (x_of(),), check_trace=False)
    torch.testing.assert_close(traced(x_of(7)), alone(x_of(7)))
