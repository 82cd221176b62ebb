"""ShareInput: layers that read one input take one product with it and compute the same."""

from textwrap import dedent

import pytest
import torch
from torch import Tensor, fx, nn

from comera_fx.passes.pipeline import run_pipeline
from comera_fx.passes.share_input import ShareInput
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec
from tests.chained import KINDS, UNEVEN, batch, layer, operators_of, products_of, share
from tests.reconstructed import assert_same_results, floats, symbolic, targets

FACTORS, APPLY = "comera_fx.tt_factors.default", "comera_fx.tt_apply.default"
kinds = pytest.mark.parametrize("kind", KINDS)


class Attention(nn.Module):
    """Three layers of one input, the last of other ranks, and one of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = layer(), layer(bias=False, seed=1)
        self.v, self.out = layer(UNEVEN, seed=2), layer(seed=3)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        return self.out(weights @ self.v(x))


def applies(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if str(node.target) == APPLY]


def widths(gm: fx.GraphModule) -> list[int]:
    """How many layers each ``tt_apply`` has."""
    return [len(node.args[1]) for node in applies(gm)]


# ---- numerics ----


@kinds
@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (2, 0, 6)], ids=str)
def test_layers_of_one_input_are_merged(kind, shape):
    before = operators_of(Attention(), kind, floats(2, 4, 6) if len(shape) == 3 else floats(4, 6))
    after = share(before)
    assert ShareInput.keeps_numerics
    assert targets(after) == [FACTORS, FACTORS, APPLY, APPLY]
    assert widths(after) == [3, 1]
    assert_same_results(after, before, floats(*shape))


@kinds
def test_one_product_with_the_input_instead_of_three(kind):
    x = floats(5, 6)
    apart = batch(operators_of(Attention(), kind, x))
    together = run_pipeline(apart, [ShareInput()])

    def reads_of(gm: fx.GraphModule) -> list[int]:
        """Columns of the left factors that tokens are multiplied by."""
        return [b[1] for a, b in products_of(gm, x).shapes if a == (5, 6) and b[1] not in (5, 6)]

    assert reads_of(apart) == [4, 4, 3, 4]
    assert reads_of(together) == [11, 4]
    products = [products_of(gm, x).counts for gm in (apart, together)]
    assert products[0].total() - products[1].total() == 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.tanh(self.inner(x))


@kinds
def test_a_layer_called_twice_on_one_input_is_applied_once(kind):
    before = operators_of(Twice(), kind, floats(4, 6))
    after = share(before)
    assert widths(after) == [1]
    assert_same_results(after, before, floats(4, 6))


class Tied(nn.Module):
    """Layers on the same cores: the first two also have one bias, the third has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = layer(), layer(seed=1), layer(seed=2)
        for other in (self.two, self.three):
            for k in range(len(self.one.cores)):
                setattr(other, f"core_{k}", getattr(self.one, f"core_{k}"))
        self.two.bias = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + 2 * self.two(x) + 3 * self.three(x)


@kinds
def test_equal_results_of_a_tied_weight_are_one(kind):
    before = operators_of(Tied(), kind, floats(4, 6))
    after = share(before)
    assert widths(after) == [2]
    assert_same_results(after, before, floats(4, 6))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x).relu_() + self.inner(x)


def test_a_result_that_is_written_to_stays_its_own():
    before = operators_of(Written(), "symbolic_trace", floats(4, 6))
    after = share(before)
    assert widths(after) == [2]
    assert_same_results(after, before, floats(4, 6))


@kinds
def test_a_frozen_weight_stays_frozen(kind):
    model = Attention()
    for param in model.k.parameters():
        param.requires_grad_(False)
    before = operators_of(model, kind, floats(4, 6))
    after = share(before)
    assert not any(p.requires_grad for p in model.k.parameters())
    assert all(p.requires_grad for p in model.q.parameters())
    assert_same_results(after, before, floats(4, 6))


class ManyUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = layer(), layer(seed=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.one(x)
        return y + 1, self.other(x) * y, torch.tanh(y)


@kinds
def test_several_users_all_read_the_new_node(kind):
    before = operators_of(ManyUsers(), kind, floats(4, 6))
    after = share(before)
    assert widths(after) == [2]
    assert_same_results(after, before, floats(4, 6))


class Blocks(nn.Module):
    """Pairs of layers, each of which reads what the pair before gave."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = layer(), layer(seed=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.gate(x)) * self.up(x)
        return self.gate(self.up(x)) + self.up(self.up(x))


@kinds
def test_back_to_back_pairs_are_all_merged(kind):
    before = operators_of(Blocks(), kind, floats(4, 6))
    after = share(before)
    # The two equal calls at the end become one, and then what reads them has one input.
    assert widths(after) == [2, 2, 2, 1, 2]
    assert_same_results(after, before, floats(4, 6))


# ---- which nodes are merged ----


def test_nothing_to_do():
    assert ShareInput()(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == 0


@kinds
def test_layers_of_different_inputs_stay_apart(kind):
    gm = batch(operators_of(nn.Sequential(layer(), layer(seed=1)), kind, floats(4, 6)))
    assert ShareInput()(gm) == 0


@kinds
def test_one_match_is_counted(kind):
    gm = batch(operators_of(ManyUsers(), kind, floats(4, 6)))
    assert ShareInput()(gm) == 1


class Factors(nn.Module):
    """Applies factors that ``made`` makes of parameters and of what was there before."""

    def __init__(self, made) -> None:
        super().__init__()
        for name, sizes in (("left", (6, 2)), ("right", (2, 6)), ("bias", (6,))):
            self.register_parameter(name, nn.Parameter(floats(*sizes)))
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        apply = torch.ops.comera_fx.tt_apply.default
        y = apply(x, [self.left], [self.right], [self.bias])[0]
        return y + apply(x, *self.made(self, x, y))[0]


def test_factors_and_biases_of_weights_move_up():
    before = symbolic(Factors(lambda m, x, y: ([m.left * 2], [m.right + 1], [m.bias.sin()])))
    after = run_pipeline(before, [ShareInput()])
    assert widths(after) == [2]
    assert_same_results(after, before, floats(4, 6))


@pytest.mark.parametrize(
    "made",
    [
        lambda m, x, y: ([m.left * y.mean()], [m.right], [None]),
        lambda m, x, y: ([m.left], [m.right], [y.mean(0)]),
        lambda m, x, y: ([m.left], [m.right * x.mean()], [None]),
        lambda m, x, y: ([m.left], [m.right + torch.rand_like(m.right)], [None]),
    ],
    ids=["on-the-first", "bias-on-the-first", "on-the-input", "random"],
)
def test_factors_that_come_later_and_depend_on_more_than_weights_stay(made):
    gm = symbolic(Factors(made))
    assert ShareInput()(gm) == 0


def test_an_input_that_is_written_to_in_between_keeps_its_readers_apart():
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = layer(), layer(seed=1)

        def forward(self, x: Tensor) -> Tensor:
            base = x + 1
            row = base.view(-1, 6)
            y = self.one(row)
            base.mul_(2)
            return y + self.other(row)

    gm = batch(operators_of(Between(), "symbolic_trace", floats(4, 6)))
    assert widths(gm) == [1, 1]
    assert ShareInput()(gm) == 0


@pytest.mark.parametrize("is_written", [False, True])
def test_a_bias_of_the_input_that_stands_before_is_shared_unless_written_to(is_written):
    class Biased(Factors):
        def forward(self, x: Tensor) -> Tensor:
            apply = torch.ops.comera_fx.tt_apply.default
            base = x * 2
            row = base.select(0, 0)
            y = apply(x, [self.left], [self.right], [row])[0]
            if is_written:
                base.mul_(2)
            return y + apply(x, [self.left], [self.right + 1], [row])[0]

    before = symbolic(Biased(None))
    after = run_pipeline(before, [ShareInput()])
    assert widths(after) == ([1, 1] if is_written else [2])
    assert_same_results(after, before, floats(4, 6))


def test_an_input_that_was_written_to_before_is_shared():
    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = layer(), layer(seed=1)

        def forward(self, x: Tensor) -> Tensor:
            x = (x + 1).mul_(2)
            return torch.relu_(self.one(x)) * self.other(x)

    before = operators_of(Before(), "symbolic_trace", floats(4, 6))
    after = share(before)
    assert widths(after) == [2]
    assert_same_results(after, before, floats(4, 6))


def test_graphs_that_switch_gradients_off_are_left_alone():
    gm = batch(operators_of(ManyUsers(), "symbolic_trace", floats(4, 6)))
    with gm.graph.inserting_before(applies(gm)[1]):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    assert ShareInput()(gm) == 0


def test_module_graphs_are_left_alone():
    class Branches(ManyUsers):
        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if x.sum() > 0 else self.other(x)

    gm = operators_of(Branches(), "module_graph", floats(4, 6))
    for node in list(gm.graph.nodes):
        if str(node.target) == "comera_fx.tt_linear.default":
            with gm.graph.inserting_before(node):
                factors = [gm.graph.get_attr("one.core_0"), gm.graph.get_attr("one.core_3")]
                args = (node.args[0], factors[:1], factors[1:], [None])
                gm.graph.call_function(torch.ops.comera_fx.tt_apply.default, args)
    assert widths(gm) == [1, 1]
    assert ShareInput()(gm) == 0


# ---- the form of the rewrite ----


@kinds
def test_the_input_graph_is_untouched(kind):
    before = batch(operators_of(Attention(), kind, floats(4, 6)))
    code, state = before.code, {k: v.clone() for k, v in before.state_dict().items()}
    run_pipeline(before, [ShareInput()])
    assert before.code == code
    assert all(torch.equal(value, state[name]) for name, value in before.state_dict().items())


def test_metadata_is_that_of_the_results():
    before = batch(operators_of(ManyUsers(), "export", floats(4, 6)))
    values = [user.meta["val"] for node in applies(before) for user in node.users]
    (new,) = applies(run_pipeline(before, [ShareInput()]))
    results = sorted(new.users)
    assert all(r.meta["val"] is value for r, value in zip(results, values, strict=True))


def test_rewrite_as_text():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            spec = TTSpec("tt", (6,), (6,), (1, 2, 1))
            self.one, self.other = layer(spec), layer(spec, bias=False, seed=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.other(x) + self.one(x)

    after = share(operators_of(Pair(), "symbolic_trace", floats(4, 6)))
    _, _, text = format_graph(after.graph).partition(", 1, 6, 6)\n")
    assert text == dedent("""\
        %getitem = call_function[getitem](%tt_factors_default, 0)
        %getitem_1 = call_function[getitem](%tt_factors_default, 1)
        %getitem_2 = call_function[getitem](%tt_factors_default, 2)
        %getitem_3 = call_function[getitem](%tt_factors_default, 3)
        %tt_apply_default_3 = call_function[comera_fx.tt_apply.default]\
(%x, [%getitem, %getitem_1], [%getitem_2, %getitem_3], [%one_bias, None])
        %getitem_7 = call_function[getitem](%tt_apply_default_3, 0)
        %getitem_8 = call_function[getitem](%tt_apply_default_3, 1)
        %add = call_function[add](%getitem_7, %getitem_8)
        %add_1 = call_function[add](%add, %getitem_7)
        return %add_1""")
