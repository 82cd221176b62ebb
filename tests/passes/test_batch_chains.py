"""BatchChains: equal-shaped layers make their factors in one batched chain and compute the same."""

import operator
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from comera_fx.passes.batch_chains import BatchChains
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.passes.regions import START, State
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec
from tests.chained import (
    KINDS,
    SPEC,
    TTM,
    UNEVEN,
    Cores,
    batch,
    every,
    layer,
    operators_of,
    products_of,
)
from tests.reconstructed import assert_same_results, floats, fuse, symbolic, targets
from tests.tolerances import BY_DTYPE, EXACT

LINEAR, FACTORS, APPLY, ROWS = (
    f"comera_fx.tt_{name}.default" for name in ("linear", "factors", "apply", "rows")
)
kinds = pytest.mark.parametrize("kind", KINDS)


def back_to_back() -> nn.Sequential:
    return nn.Sequential(layer(), nn.Tanh(), layer(bias=False, seed=1), layer(seed=2))


# ---- numerics ----


@kinds
def test_layers_of_one_shape_back_to_back(kind):
    before = operators_of(back_to_back(), kind, floats(4, 6))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, APPLY, APPLY]
    assert BatchChains.keeps_numerics
    assert_same_results(after, before, floats(4, 6))


@kinds
@pytest.mark.parametrize("size", [6, 5])
def test_any_leading_shape_and_padding(kind, size):
    model = nn.Sequential(layer(size=size), layer(size=size, seed=1))
    before = operators_of(model, kind, floats(2, 3, size))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, APPLY]
    assert_same_results(after, before, floats(2, 3, size))


class Twice(nn.Module):
    def __init__(self, adapts: bool = False) -> None:
        super().__init__()
        self.inner = layer()
        if adapts:
            self.inner.attach_rank_weights(0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


@kinds
def test_a_layer_called_twice_makes_its_chains_once(kind):
    before = operators_of(Twice(), kind, floats(4, 6))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, APPLY]
    assert next(n for n in after.graph.nodes if str(n.target) == FACTORS).args[1] == 1
    assert_same_results(after, before, floats(4, 6))
    once = products_of(
        batch(operators_of(nn.Sequential(layer()), kind, floats(4, 6))), floats(4, 6)
    )
    twice = products_of(after, floats(4, 6))
    assert twice.counts["bmm"] == once.counts["bmm"]
    assert twice.counts["mm"] + twice.counts["addmm"] == 2 * 2


@kinds
def test_rank_weights_of_a_layer_called_twice_are_multiplied_in_once(kind):
    model = Twice(adapts=True)
    before = operators_of(model, kind, floats(4, 6))
    after = batch(before)
    assert next(n for n in after.graph.nodes if str(n.target) == FACTORS).args[1] == 1
    assert sum(n.name.startswith("mul") for n in after.graph.nodes) == 3
    # Of each core and rank weight; the bias is read by each call where the graph has it so.
    reads = [n for n in after.graph.nodes if n.op == "get_attr" and n.target != "inner.bias"]
    assert len(reads) == 4 + 3
    assert_same_results(after, before, floats(4, 6))


class Tied(nn.Module):
    """Two layers whose cores are the same parameters under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = layer(), layer(seed=1)
        for k in range(len(self.one.cores)):
            setattr(self.other, f"core_{k}", getattr(self.one, f"core_{k}"))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


@kinds
def test_a_tied_weight_is_in_the_group_once(kind):
    before = operators_of(Tied(), kind, floats(4, 6))
    after = batch(before)
    (factors,) = (n for n in after.graph.nodes if str(n.target) == FACTORS)
    assert factors.args[1] == 1
    assert len(factors.args[0]) == 4
    assert_same_results(after, before, floats(4, 6))


@kinds
def test_a_frozen_weight_stays_frozen(kind):
    model = back_to_back()
    for param in model[0].parameters():
        param.requires_grad_(False)
    before = operators_of(model, kind, floats(4, 6))
    after = batch(before)
    assert [p.requires_grad for p in after.parameters()] == [
        p.requires_grad for p in before.parameters()
    ]
    assert not any(p.requires_grad for p in model[0].parameters())
    assert_same_results(after, before, floats(4, 6))


class ManyUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = layer(), layer(seed=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.one(x)
        return y + 1, self.other(torch.tanh(y)), y.relu_()


@kinds
def test_several_users_all_read_the_new_node(kind):
    before = operators_of(ManyUsers(), kind, floats(4, 6))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, APPLY]
    assert_same_results(after, before, floats(4, 6))


def test_cores_that_a_head_reads_transposed():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for k, core in enumerate(layer().cores):
                self.register_parameter(f"core_{k}", nn.Parameter(core.detach().clone()))

        def forward(self, x: Tensor) -> Tensor:
            cores = [getattr(self, f"core_{k}") for k in range(4)]
            weight = torch.ops.comera_fx.tt_dense.default(cores, "tt", 2, 6, 6)
            return F.linear(torch.tanh(x @ weight), weight)

    before = fuse(symbolic(Head()))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, APPLY]
    assert_same_results(after, before, floats(4, 6))


# ---- which nodes are rewritten ----


def test_nothing_to_do():
    assert BatchChains(every)(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == 0


@kinds
def test_one_match_is_counted(kind):
    gm = operators_of(nn.Sequential(layer()), kind, floats(4, 6))
    assert BatchChains(every)(gm) == 1
    assert targets(gm) == [FACTORS, APPLY]


def test_groups_are_chosen_whole_and_in_order():
    seen = []

    def first_only(spec, calls):
        seen.append([str(call) for call in calls])
        return "factors" if len(seen) == 1 else "own"

    model = nn.Sequential(layer(), layer(UNEVEN, seed=1), layer(seed=2), layer(UNEVEN, seed=3))
    before = operators_of(model, "symbolic_trace", floats(4, 6))
    after = run_pipeline(before, [BatchChains(first_only)])
    names = [n.name for n in before.graph.nodes if str(n.target) == LINEAR]
    assert seen == [names[::2], names[1::2]]
    assert targets(after) == [FACTORS, APPLY, LINEAR, APPLY, LINEAR]
    assert_same_results(after, before, floats(4, 6))


@kinds
def test_irregular_ranks_fall_into_groups_of_their_own(kind):
    model = nn.Sequential(layer(), layer(UNEVEN, seed=1), layer(seed=2))
    before = operators_of(model, kind, floats(4, 6))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, FACTORS, APPLY, APPLY]
    assert_same_results(after, before, floats(4, 6))


DEAD = TTSpec("tt", (2, 3), (3, 2), (1, 0, 0, 0, 1))


@kinds
@pytest.mark.parametrize("spec", [TTM, DEAD], ids=["ttm", "dead"])
def test_other_layouts_and_dead_ranks_are_left_alone(kind, spec):
    model = nn.Sequential(layer(), layer(spec, seed=1), layer(seed=2))
    before = operators_of(model, kind, floats(4, 6))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, LINEAR, APPLY]
    torch.testing.assert_close(after(floats(4, 6)), before(floats(4, 6)), **EXACT)


def test_other_features_and_dtypes_are_groups_of_their_own():
    short = layer(size=5, seed=1)
    single = layer(seed=2).float()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.short, self.single = layer(), short, single

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.long(x), self.short(x[:, :5]), self.single(x.float())

    seen = []
    gm = operators_of(Mixed(), "symbolic_trace", floats(4, 6))
    assert BatchChains(lambda spec, calls: seen.append(len(calls)) or "own")(gm) == 0
    assert seen == [1, 1, 1]


def test_computed_cores_that_come_later_move_up():
    before = symbolic(Cores(lambda cores, x: [torch.tanh(core * 2) for core in cores]))
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, APPLY]
    assert_same_results(after, before, floats(4, 6))


@pytest.mark.parametrize(
    "made",
    [
        lambda cores, x: [core * x.mean() for core in cores],
        lambda cores, x: [F.dropout(core, 0.5) for core in cores],
        lambda cores, x: [core + torch.rand_like(core) for core in cores],
    ],
    ids=["activations", "dropout", "random"],
)
def test_cores_of_more_than_weights_are_left_alone(made):
    after = batch(symbolic(Cores(made)))
    assert targets(after) == [FACTORS, APPLY, LINEAR]


def ours(core: Tensor) -> Tensor:
    return core * 2


def test_cores_by_functions_that_are_not_torchs_are_left_alone():
    gm = symbolic(Cores(lambda cores, x: [core * 2 for core in cores]))
    for node in gm.graph.nodes:
        if node.target is operator.mul:
            node.target, node.args = ours, node.args[:1]
    gm.recompile()
    assert targets(batch(gm)) == [FACTORS, APPLY, LINEAR]


def test_a_copy_that_is_written_to_counts_as_its_core():
    gm = symbolic(Cores(lambda cores, x: [core.clone().mul_(2) for core in cores]))
    assert BatchChains(every)(gm) == 0


@kinds
def test_autocast_casts_as_before(kind):
    model, x = back_to_back().float(), floats(4, 6).float()
    before = operators_of(model, kind, x)
    after = batch(before)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = after(x), before(x)
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine, theirs, **BY_DTYPE[torch.bfloat16])


def test_cores_that_are_written_to_are_left_alone():
    class Written(Cores):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.core_0.mul_(2)
            return y

    gm = symbolic(Written(lambda cores, x: cores))
    assert BatchChains(every)(gm) == 0


def switch_gradients(gm: fx.GraphModule, before: fx.Node, on: bool) -> None:
    with gm.graph.inserting_before(before):
        gm.graph.call_function(torch._C._set_grad_enabled, (on,))


def three_layers() -> fx.GraphModule:
    model = nn.Sequential(layer(), nn.Tanh(), layer(seed=1), nn.Tanh(), layer(seed=2))
    gm = operators_of(model, "symbolic_trace", floats(4, 6))
    gm.meta[START] = State(grad=True)
    return gm


def test_layers_around_a_switch_of_gradients_are_a_group():
    before = three_layers()
    first, second, _ = (n for n in before.graph.nodes if str(n.target) == LINEAR)
    switch_gradients(before, first.next, False)
    switch_gradients(before, second, True)
    before.recompile()
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, APPLY, APPLY]
    assert_same_results(after, before, floats(4, 6))


def test_a_layer_without_gradients_is_in_no_group_of_those_with():
    before = three_layers()
    _, second, third = (n for n in before.graph.nodes if str(n.target) == LINEAR)
    switch_gradients(before, second, False)
    switch_gradients(before, third, True)
    before.recompile()
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, FACTORS, APPLY, APPLY]
    assert_same_results(after, before, floats(4, 6))


def test_a_switch_back_to_what_the_caller_may_not_have_had_counts():
    before = three_layers()
    del before.meta[START]
    _, second, _ = (n for n in before.graph.nodes if str(n.target) == LINEAR)
    switch_gradients(before, second, True)
    assert targets(batch(before)) == [FACTORS, APPLY, FACTORS, APPLY, APPLY]


def test_cores_made_without_gradients_are_left_alone():
    before = symbolic(Cores(lambda cores, x: [core * 2 for core in cores]))
    (product, *_) = (node for node in before.graph.nodes if node.target is operator.mul)
    switch_gradients(before, product, False)
    switch_gradients(before, product.next, True)
    before.recompile()
    after = batch(before)
    assert targets(after) == [FACTORS, APPLY, LINEAR]
    assert_same_results(after, before, floats(4, 6))


def test_module_graphs_are_left_alone():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if x.sum() > 0 else self.one(-x)

    gm = operators_of(Branches(), "module_graph", floats(4, 6))
    assert targets(gm) == [LINEAR]
    assert BatchChains(every)(gm) == 0


# ---- the form of the rewrite ----


@kinds
def test_the_input_graph_is_untouched(kind):
    before = operators_of(back_to_back(), kind, floats(4, 6))
    code, state = before.code, {k: v.clone() for k, v in before.state_dict().items()}
    batch(before)
    assert before.code == code
    assert all(torch.equal(value, state[name]) for name, value in before.state_dict().items())


def test_metadata_is_that_of_the_call():
    before = operators_of(nn.Sequential(layer()), "export", floats(4, 6))
    (call,) = (n for n in before.graph.nodes if str(n.target) == LINEAR)
    nodes = list(batch(before).graph.nodes)
    (factors,) = (n for n in nodes if str(n.target) == FACTORS)
    (apply,) = (n for n in nodes if str(n.target) == APPLY)
    (result,) = apply.users
    assert factors.meta["tt_spec"] == SPEC
    assert result.meta["val"] is call.meta["val"]
    assert "tt_spec" not in result.meta
    assert "val" not in apply.meta


def test_rewrite_as_text():
    model = nn.Sequential(layer(TTSpec("tt", (6,), (6,), (1, 2, 1))))
    model.append(layer(TTSpec("tt", (6,), (6,), (1, 2, 1)), bias=False))
    after = batch(operators_of(model, "symbolic_trace", floats(4, 6)))
    assert format_graph(after.graph) == dedent("""\
        %input_1 = placeholder[input]()
        %_0_core_0 = get_attr[0.core_0]()
        %_0_core_1 = get_attr[0.core_1]()
        %_0_bias = get_attr[0.bias]()
        %_1_core_0 = get_attr[1.core_0]()
        %_1_core_1 = get_attr[1.core_1]()
        %tt_factors_default = call_function[comera_fx.tt_factors.default]\
([%_0_core_0, %_0_core_1, %_1_core_0, %_1_core_1], 2, 'tt', 1, 6, 6)
        %getitem = call_function[getitem](%tt_factors_default, 0)
        %getitem_1 = call_function[getitem](%tt_factors_default, 1)
        %getitem_2 = call_function[getitem](%tt_factors_default, 2)
        %getitem_3 = call_function[getitem](%tt_factors_default, 3)
        %tt_apply_default = call_function[comera_fx.tt_apply.default]\
(%input_1, [%getitem], [%getitem_2], [%_0_bias])
        %getitem_4 = call_function[getitem](%tt_apply_default, 0)
        %tt_apply_default_1 = call_function[comera_fx.tt_apply.default]\
(%getitem_4, [%getitem_1], [%getitem_3], [None])
        %getitem_5 = call_function[getitem](%tt_apply_default_1, 0)
        return %getitem_5""")
