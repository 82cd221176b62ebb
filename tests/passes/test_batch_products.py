"""BatchProducts: equal products of weights run as one and compute the same."""

from itertools import pairwise
from textwrap import dedent

import torch
from torch import Tensor, fx, nn

from comera_fx.passes.batch_products import BatchProducts
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.policy import worth_batching
from comera_fx.report import format_graph
from tests.reconstructed import assert_same_results, floats

aten = torch.ops.aten


def always(count: int, shape: tuple[int, int, int], like: Tensor) -> bool:
    return True


class Chains(nn.Module):
    """Layers whose weight is a chain of three matrices."""

    def __init__(self, count: int = 3, sizes: tuple[int, ...] = (4, 2, 3, 4)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for layer in range(count):
            for k, shape in enumerate(pairwise(sizes)):
                core = torch.randn(shape, dtype=torch.float64, generator=generator)
                self.register_parameter(f"core_{layer}_{k}", nn.Parameter(core))
        self.count, self.num_cores = count, len(sizes) - 1

    def cores(self, layer: int) -> list[Tensor]:
        return [getattr(self, f"core_{layer}_{k}") for k in range(self.num_cores)]

    def weight(self, layer: int) -> Tensor:
        made, *rest = self.cores(layer)
        for core in rest:
            made = aten.mm.default(made, core)
        return made

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.count):
            x = torch.tanh(aten.mm.default(x, self.weight(layer)))
        return x


def traced(model: nn.Module) -> fx.GraphModule:
    """The graph with a tensor like its result at each node, as the backend has them."""
    gm = fx.symbolic_trace(model)
    values: dict[fx.Node, object] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        node.meta["val"] = values[node] = gm.get_parameter(str(node.target))
    for node in gm.graph.nodes:
        known = all(given in values for given in node.all_input_nodes)
        if node.op == "call_function" and known:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            node.meta["val"] = values[node] = node.target(*args, **kwargs)
    return gm


def batch(gm: fx.GraphModule, choose=always) -> fx.GraphModule:
    return run_pipeline(gm, [BatchProducts(choose)])


def calls(gm: fx.GraphModule, name: str) -> int:
    return sum(str(node.target) == f"aten.{name}" for node in gm.graph.nodes)


def test_products_of_equal_layers_are_one_a_step():
    before = traced(Chains())
    after = batch(before)
    assert BatchProducts(always)(traced(Chains())) == 6
    assert (calls(after, "bmm.default"), calls(after, "mm.default")) == (2, 3)
    assert calls(after, "stack.default") == 3  # between the steps there is none
    assert BatchProducts.keeps_numerics
    assert_same_results(after, before, floats(5, 4))


def test_nothing_to_do():
    assert BatchProducts(always)(fx.symbolic_trace(nn.Linear(4, 4))) == 0
    assert BatchProducts(always)(traced(Chains(count=1))) == 0


def test_groups_that_are_turned_down_stay():
    seen = []
    gm = traced(Chains())
    assert BatchProducts(lambda *given: bool(seen.append(given[:2])))(gm) == 0
    assert seen == [(3, (4, 3, 2)), (3, (4, 4, 3))]


def test_other_shapes_are_groups_of_their_own():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Chains(2), Chains(2, (4, 5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x))

    before = traced(Both())
    after = batch(before)
    assert calls(after, "bmm.default") == 3
    assert_same_results(after, before, floats(5, 4))


def test_views_between_products_stay_views_of_the_batch():
    class Views(Chains):
        def weight(self, layer: int) -> Tensor:
            first, second, third = self.cores(layer)
            made = aten.mm.default(first, second)
            made = aten.reshape.default(aten.permute.default(made, [1, 0]), [4, 3])
            turned = aten.t.default(aten.transpose.int(aten.t.default(made), 0, -1))
            return aten.mm.default(aten.t.default(turned), third)

    before = traced(Views())
    after = batch(before)
    assert calls(after, "stack.default") == 3
    assert calls(after, "mm.default") == 3
    assert_same_results(after, before, floats(5, 4))


def test_a_weight_used_twice_is_multiplied_once():
    class Twice(Chains):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    before = traced(Twice())
    after = batch(before)
    assert (calls(after, "bmm.default"), calls(after, "mm.default")) == (2, 6)
    assert_same_results(after, before, floats(5, 4))


def test_a_core_that_all_layers_share_is_not_copied():
    class Shared(Chains):
        def cores(self, layer: int) -> list[Tensor]:
            return [self.core_0_0, *super().cores(layer)[1:]]

    before = traced(Shared())
    after = batch(before)
    assert calls(after, "expand.default") == 1
    assert calls(after, "stack.default") == 2
    assert_same_results(after, before, floats(5, 4))


def test_a_frozen_core_stays_frozen():
    model = Chains()
    model.core_1_0.requires_grad_(False)
    before = traced(model)
    after = batch(before)
    assert calls(after, "bmm.default") == 2  # layers 0 and 2; what depends on the frozen one too
    assert not after.core_1_0.requires_grad
    assert_same_results(after, before, floats(5, 4))


def test_products_with_activations_and_written_weights_are_left_alone():
    class Written(Chains):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.core_0_0.mul_(2)
            self.core_1_0.mul_(2)
            return y

    gm = traced(Written())
    assert BatchProducts(always)(gm) == 0


def test_the_input_graph_is_untouched():
    before = traced(Chains())
    code = before.code
    batch(before)
    assert before.code == code


def test_small_products_are_worth_it_and_large_ones_are_not():
    like = torch.empty(0)
    assert worth_batching(24, (12, 240, 12), like)
    assert not worth_batching(2, (12, 240, 12), like)
    assert not worth_batching(24, (3072, 3072, 64), like)


def test_rewrite_as_text():
    after = batch(traced(Chains(count=2, sizes=(4, 2, 4))))
    assert format_graph(after.graph) == dedent("""\
        %x = placeholder[x]()
        %core_0_0: [4, 2] = get_attr[core_0_0]()
        %core_0_1: [2, 4] = get_attr[core_0_1]()
        %core_1_0: [4, 2] = get_attr[core_1_0]()
        %core_1_1: [2, 4] = get_attr[core_1_1]()
        %stack_default = call_function[aten.stack.default]([%core_0_0, %core_1_0])
        %stack_default_1 = call_function[aten.stack.default]([%core_0_1, %core_1_1])
        %bmm_default = call_function[aten.bmm.default](%stack_default, %stack_default_1)
        %unbind_int = call_function[aten.unbind.int](%bmm_default)
        %getitem: [4, 4] = call_function[getitem](%unbind_int, 0)
        %getitem_1: [4, 4] = call_function[getitem](%unbind_int, 1)
        %mm_default_1 = call_function[aten.mm.default](%x, %getitem)
        %tanh = call_function[tanh](%mm_default_1)
        %mm_default_3 = call_function[aten.mm.default](%tanh, %getitem_1)
        %tanh_1 = call_function[tanh](%mm_default_3)
        return %tanh_1""")
