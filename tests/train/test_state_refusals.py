"""Optimizer state that cannot follow a change of ranks is refused, and nothing has changed."""

import copy

import pytest
import torch
from torch import nn

from comera_fx.errors import RankError
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train.state.resize import change_basis, check_state, cut_ranks, grow_ranks

SPEC = TTSpec("tt", (4, 4), (4, 5), (1, 4, 4, 4, 1))
KEPT = [torch.tensor([0, 2])] * 3
EYE = torch.eye(4, dtype=torch.float64)


class Own(torch.optim.SGD):
    """An optimizer of somebody else's, whose state tests fill."""


Own.__module__ = "theirs"


class EightBit(torch.Tensor):
    """As torchao keeps state: a subclass of Tensor."""


class BufferList(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        held = self.param_groups[0]["params"]
        self.buffers = {"slow": [torch.zeros_like(p) for p in held]}


class Wrapper(torch.optim.Optimizer):
    """Around another optimizer, as SAM is: its own state beside the inner one's."""

    def __init__(self, params, lr):
        self.base = torch.optim.Adam(params, lr)
        super().__init__(self.base.param_groups, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.detach().clone()
        self.base.step()


class Sharing(torch.optim.Optimizer):
    """Around another optimizer, as Accelerate's is: the state is the inner one's."""

    def __init__(self, params, lr):
        self.optimizer = torch.optim.Adagrad(params, lr)

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


def make(optimizer_class=Own, **options):
    torch.manual_seed(0)
    layer = TTLinear(SPEC, 16, 20)
    layer.attach_rank_weights(0.01)
    return layer, optimizer_class(layer.parameters(), lr=1e-2, **options)


def step(layer, optimizer):
    def loss():
        optimizer.zero_grad()
        value = layer(torch.randn(8, 16)).square().mean()
        value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(loss)
    loss()
    return optimizer.step()


CHANGES = {
    "cut": lambda layer, optimizers: cut_ranks(layer, KEPT, optimizers),
    "grow": lambda layer, optimizers: grow_ranks(layer, [0, 2, 0], optimizers),
    "turn": lambda layer, optimizers: change_basis(layer, [(EYE, EYE)] * 3, optimizers),
}
change = pytest.mark.parametrize("change", CHANGES)


def assert_refused(layer, optimizer, change, match):
    """The last core is the one at fault, so that a check too late would show on the others."""
    inner = getattr(optimizer, "base", optimizer)
    before = copy.deepcopy(([*layer.parameters()], [p.grad for p in layer.parameters()]))
    states = [dict(state) for state in inner.state.values()]
    copies = [{k: torch.as_tensor(v).clone() for k, v in s.items() if k != "odd"} for s in states]
    with pytest.raises(RankError, match=match):
        CHANGES[change](layer, [optimizer])
    after = [*layer.parameters()], [p.grad for p in layer.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    for now, then, copied in zip(inner.state.values(), states, copies, strict=True):
        assert now.keys() == then.keys()
        assert all(value is then[key] for key, value in now.items())
        assert all(torch.equal(torch.as_tensor(now[key]), v) for key, v in copied.items())


ODD = {
    "another shape": (torch.zeros(3, 2), r"'odd' of layer 'TTLinear' cannot follow.*\n.*\(3, 2\)"),
    "two axes gone": (torch.zeros(5), r"shape \(5,\)"),
    "a list": ([torch.zeros(4, 5, 1)], "'odd': a list"),
    "a text": ("fp8", "'odd': a str"),
    "quantized": (torch.zeros(4, 5, 1, dtype=torch.uint8), "uint8 of shape .*quantized"),
    "a subclass": (torch.zeros(4, 5, 1).as_subclass(EightBit), "tensor of class EightBit"),
    "blocks": (torch.zeros(20, dtype=torch.uint8), "quantized"),
}


@change
@pytest.mark.parametrize("kind", ODD)
def test_entries_that_cannot_be_read_are_refused(kind, change):
    layer, optimizer = make()
    step(layer, optimizer)
    value, match = ODD[kind]
    optimizer.state[layer.core_3]["odd"] = value
    assert_refused(layer, optimizer, change, match)


@change
def test_an_axis_that_may_be_either_is_refused_in_an_unknown_optimizer(change):
    layer, optimizer = make()
    optimizer.state[layer.core_1]["odd"] = torch.zeros(4, 4)
    assert_refused(layer, optimizer, change, "of which axes cannot be told")


def test_an_axis_that_can_only_be_one_is_cut_in_an_unknown_optimizer():
    layer, optimizer = make()
    means = torch.rand(4, 5), torch.rand(4, 1, 1), torch.rand(1, 5, 1)
    optimizer.state[layer.core_3].update(zip(("a", "b", "c"), means, strict=True))
    cut_ranks(layer, KEPT, [optimizer])
    state = optimizer.state[layer.core_3]
    for key, expected in (("a", means[0][[0, 2]]), ("b", means[1][[0, 2]]), ("c", means[2])):
        assert torch.equal(state[key], expected)


def test_a_square_core_of_a_known_optimizer_is_cut_by_the_entry_s_name():
    # Rows (4, 4), columns (4, 4) and the core's modes: shapes alone would not tell them apart.
    transformers = pytest.importorskip("transformers")
    layer, optimizer = make(transformers.Adafactor, relative_step=False)
    step(layer, optimizer)
    rows, columns = (optimizer.state[layer.core_1][f"exp_avg_sq_{k}"] for k in ("row", "col"))
    kept = [torch.tensor([0, 1, 3]), torch.tensor([2]), torch.tensor([0])]
    cut_ranks(layer, kept, [optimizer])
    state = optimizer.state[layer.core_1]
    assert torch.equal(state["exp_avg_sq_row"], rows[kept[0]])
    assert torch.equal(state["exp_avg_sq_col"], columns[kept[0]][:, kept[1]])


@change
def test_state_from_before_an_earlier_cut_is_refused_in_a_known_optimizer(change):
    layer, optimizer = make(torch.optim.Adam)
    step(layer, optimizer)
    optimizer.state[layer.core_3]["exp_avg"] = torch.zeros(1, 5, 1)
    assert_refused(layer, optimizer, change, r"'exp_avg' of layer .*\n.*shape \(1, 5, 1\)")


@change
def test_buffers_outside_the_state_are_refused(change):
    layer, optimizer = make(BufferList)
    step(layer, optimizer)
    assert_refused(layer, optimizer, change, "tensors outside its state, in buffers")


@pytest.mark.parametrize("place", ["group", "shared state", "attribute"])
def test_buffers_are_found_wherever_they_lie(place):
    layer, optimizer = make()
    if place == "group":
        optimizer.param_groups[0]["slow"] = [torch.zeros(4, 5, 1)]
    elif place == "shared state":
        optimizer.state["all"]["flat"] = torch.zeros(100)
    else:
        optimizer.flat = torch.zeros(100)
    with pytest.raises(RankError, match="outside its state"):
        check_state([optimizer], [("0", layer)])


def test_numbers_and_parameters_outside_the_state_are_no_buffers():
    layer, optimizer = make()
    optimizer.params = list(layer.parameters())
    optimizer.gain = torch.zeros(1)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    step(layer, optimizer)
    cut_ranks(layer, KEPT, [optimizer])
    step(layer, optimizer)


@change
def test_a_wrapper_is_refused_without_the_optimizer_it_wraps(change):
    layer, optimizer = make(Wrapper)
    step(layer, optimizer)
    assert_refused(layer, optimizer, change, r"wraps another.*\(base\)\n.*Wrapper around Adam")


def test_a_wrapper_and_what_it_wraps_change_together():
    layer, optimizer = make(Wrapper)
    step(layer, optimizer)
    moments = optimizer.base.state[layer.core_3]["exp_avg"]
    cut_ranks(layer, KEPT, [optimizer, optimizer.base])
    assert torch.equal(optimizer.base.state[layer.core_3]["exp_avg"], moments[KEPT[0]])
    assert optimizer.state[layer.core_3]["old_p"].shape == (2, 5, 1)
    step(layer, optimizer)


def test_a_wrapper_of_one_state_is_read_as_what_it_wraps():
    layer, optimizer = make(Sharing)
    step(layer, optimizer.optimizer)
    grow_ranks(layer, [0, 2, 0], [optimizer.optimizer, optimizer])
    state = optimizer.state[layer.core_2]
    assert state["sum"].shape == (6, 4, 4)
    expected = state["sum"][:4].mean().expand(2, 4, 4)
    torch.testing.assert_close(state["sum"][4:], expected)


@change
def test_lbfgs_is_refused_once_it_has_stepped(change):
    layer, optimizer = make(torch.optim.LBFGS)
    check_state([optimizer], [("0", layer)])
    step(layer, optimizer)
    with pytest.raises(RankError, match="the state of LBFGS cannot follow"):
        CHANGES[change](layer, [optimizer])
    assert layer.spec == SPEC


def test_what_is_no_optimizer_is_refused():
    layer, _ = make()
    with pytest.raises(RankError, match=r"cannot follow a change of ranks\n.*a dict"):
        check_state([{}], [("0", layer)])


def test_muon_takes_no_cores_and_is_left_alone_beside_an_optimizer_of_them():
    layer, optimizer = make(torch.optim.Adam)
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        torch.optim.Muon(layer.parameters())
    model = nn.Sequential(layer, nn.Linear(20, 8, bias=False))
    muon = torch.optim.Muon(model[1].parameters())
    for change_ranks in CHANGES.values():
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        muon.step()
        momentum = muon.state[model[1].weight]["momentum_buffer"].clone()
        if layer.spec == SPEC:
            change_ranks(layer, [optimizer, muon])
            assert torch.equal(muon.state[model[1].weight]["momentum_buffer"], momentum)


@pytest.mark.parametrize("key", ["hessian", "slow"])
def test_state_of_unknown_meaning_starts_anew_and_says_so_once(key):
    layer, optimizer = make(momentum=0.9)
    step(layer, optimizer)
    for core in layer.cores:
        optimizer.state[core][key] = torch.rand_like(core)
    with pytest.warns(UserWarning, match=f"what '{key}' of Own become.*starts anew") as caught:
        grow_ranks(layer, [2, 2, 0], [optimizer])
    assert [warning.filename for warning in caught] == [__file__]
    assert layer.spec.ranks == (1, 4, 6, 4, 1)
    assert layer.core_1 not in optimizer.state
    assert key in optimizer.state[layer.core_3]  # whose ranks have not changed
    step(layer, optimizer)
    optimizer.state[layer.core_1][key] = torch.rand_like(layer.core_1)
    grow_ranks(layer, [0, 1, 0], [optimizer])
    assert layer.core_1 not in optimizer.state


def test_two_optimizers_of_one_core_and_one_that_has_not_stepped():
    layer, first = make(torch.optim.Adam)
    second = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    third = torch.optim.Adam(layer.parameters())
    for optimizer in (first, second):
        step(layer, optimizer)
    moments = first.state[layer.core_3]["exp_avg"], second.state[layer.core_3]["momentum_buffer"]
    cut_ranks(layer, KEPT, [first, second, third, first])
    assert torch.equal(first.state[layer.core_3]["exp_avg"], moments[0][KEPT[0]])
    assert torch.equal(second.state[layer.core_3]["momentum_buffer"], moments[1][KEPT[0]])
    assert not third.state
    for optimizer in (first, second, third):
        step(layer, optimizer)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, Own])
def test_a_rank_of_one_is_no_number(optimizer_class):
    layer, optimizer = make(optimizer_class)
    cut_ranks(layer, [torch.tensor([1])] * 3, [optimizer])
    step(layer, optimizer)
    weight = layer.rank_weight_1
    if optimizer_class is Own:
        optimizer.state[weight].update(exp_avg=torch.ones(1), step=torch.ones(1))
    steps = optimizer.state[weight]["step"].shape
    grow_ranks(layer, [2, 2, 2], [optimizer])
    assert optimizer.state[weight]["exp_avg"].shape == (3,)
    assert optimizer.state[weight]["step"].shape == steps
    step(layer, optimizer)
