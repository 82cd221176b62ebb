"""FuseReconstruction: layers on a reconstructed weight read its cores and compute the same."""

from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

import comera_fx
from comera_fx.modules import TTEmbedding
from comera_fx.passes.fuse_reconstruction import FuseReconstruction
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec
from comera_fx.tt import decompose, random_cores, to_dense
from tests.reconstructed import (
    DENSE,
    EMBEDDING,
    LINEAR,
    LOOKUPS,
    ON_COLUMNS,
    ON_ROWS,
    PRODUCTS,
    SHORT,
    SPECS,
    Reconstructed,
    assert_same_results,
    exported,
    floats,
    fuse,
    numbers_below,
    symbolic,
    targets,
)
from tests.tolerances import EXACT

modes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
layouts = st.sampled_from(["tt", "ttm"])


def spec_with(layout: str, in_modes: tuple[int, ...], out_modes: tuple[int, ...], rank: int):
    if layout == "ttm":
        out_modes = (out_modes * 3)[: len(in_modes)]
    num_cores = len(in_modes) + len(out_modes) * (layout == "tt")
    return TTSpec(layout, in_modes, out_modes, (1, *(rank,) * (num_cores - 1), 1))


# ---- numerics ----


@settings(deadline=None, derandomize=True, max_examples=150)
@given(layouts, modes, modes, st.integers(0, 3), st.sampled_from(sorted(PRODUCTS)), st.booleans())
def test_product_equals_that_with_the_dense_weight(
    layout, in_modes, out_modes, rank, product, padded
):
    spec = spec_with(layout, in_modes, out_modes, rank)
    by_columns, read = PRODUCTS[product]
    sizes = max(spec.in_size - padded, 1), max(spec.out_size - padded, 1)
    before = symbolic(Reconstructed(read, spec, *sizes))

    after = fuse(before)

    assert targets(after) == [LINEAR]
    if rank:
        assert_same_results(after, before, floats(3, sizes[not by_columns]))
    else:  # no core has an entry, and autograd sees none
        x = floats(3, sizes[not by_columns])
        torch.testing.assert_close(after(x), before(x), **EXACT)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(layouts, modes, modes, st.integers(1, 3), st.sampled_from(sorted(LOOKUPS)), st.booleans())
def test_lookup_equals_that_in_the_dense_table(layout, in_modes, out_modes, rank, lookup, padded):
    spec = spec_with(layout, in_modes, (4, *out_modes[:2]), rank)
    by_columns, read = LOOKUPS[lookup]
    sizes = max(spec.in_size - padded, 1), max(spec.out_size - padded, 3)
    before = symbolic(Reconstructed(read, spec, *sizes))

    after = fuse(before)

    assert targets(after) == [EMBEDDING]
    assert_same_results(after, before, numbers_below(sizes[not by_columns]))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_in_an_exported_graph(product, spec):
    by_columns, read = PRODUCTS[product]
    model = Reconstructed(read, spec, 5, 9)
    x = floats(3, 5 if by_columns else 9)
    before = exported(model, x)

    after = fuse(before)

    assert targets(after) == [LINEAR]
    assert_same_results(after, before, x)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_lookups_in_an_exported_graph(lookup, spec):
    by_columns, read = LOOKUPS[lookup]
    model = Reconstructed(read, spec, 5, 9)
    ids = numbers_below(5 if by_columns else 9)
    before = exported(model, ids)

    after = fuse(before)

    assert targets(after) == [EMBEDDING]
    assert_same_results(after, before, ids)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", ["columns-linear", "rows-matmul"])
def test_any_leading_shape(name, shape, spec):
    by_columns, read = PRODUCTS[name]
    before = symbolic(Reconstructed(read, spec, 5, 9))
    after = fuse(before)
    x = floats(*shape, 5 if by_columns else 9)
    assert_same_results(after, before, x)
    assert after(x).is_contiguous()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("bad", [-1, 9], ids=["negative", "padding"])
def test_an_id_out_of_range_is_an_error_still(bad, spec):
    after = fuse(symbolic(Reconstructed(LOOKUPS["rows"][1], spec, 5, 9)))
    with pytest.raises((IndexError, comera_fx.ComeraError), match="out of range"):
        after(torch.tensor([bad]))


def test_int32_ids():
    before = symbolic(Reconstructed(LOOKUPS["rows"][1]))
    assert_same_results(fuse(before), before, torch.arange(10, dtype=torch.int32))


# ---- the form of the rewrite ----


def test_nothing_to_do():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)))
    assert FuseReconstruction()(gm) == 0


def test_one_match_is_counted_and_the_dense_weight_is_gone():
    gm = symbolic(Reconstructed(ON_COLUMNS["T"]))
    assert FuseReconstruction()(gm) == 1
    assert [node.op for node in gm.graph.nodes] == [
        "placeholder", "get_attr", "get_attr", "get_attr", "get_attr", "call_function", "output",
    ]  # fmt: skip


def twice(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    return F.linear(x, weight) + F.linear(torch.tanh(x), weight, m.bias)


def test_a_weight_used_twice():
    before = symbolic(Reconstructed(twice))
    after = fuse(before)
    assert targets(after) == [LINEAR] * 2
    assert_same_results(after, before, floats(3, 6))


def tied(m: Reconstructed, ids: Tensor) -> Tensor:
    table = m.weight
    return F.linear(torch.tanh(F.embedding(ids, table)), table, m.bias)


def tied_other_way(m: Reconstructed, ids: Tensor) -> Tensor:
    table = m.weight.t()
    return F.linear(torch.tanh(F.embedding(ids, table)), table, m.column_bias)


@pytest.mark.parametrize("make", [symbolic, exported])
@pytest.mark.parametrize("spec", [*SPECS.values(), SHORT], ids=[*SPECS, "short"])
@pytest.mark.parametrize("read", [tied, tied_other_way])
def test_embedding_tied_to_the_output_head(read, spec, make):
    ids = torch.tensor([[0, 3, 5], [1, 1, 2]])
    before = make(Reconstructed(read, spec), ids)
    after = fuse(before)
    assert targets(after) == [EMBEDDING, LINEAR]
    assert_same_results(after, before, ids)


def both_sides(m: Reconstructed, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = m.weight
    return x @ weight, F.linear(torch.tanh(x @ weight), weight)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_all_readers_read_the_same_cores(spec):
    before = symbolic(Reconstructed(both_sides, spec))
    after = fuse(before)
    cores = [node.args[1] for node in after.graph.nodes if str(node.target) == LINEAR]
    assert cores == [cores[0]] * 3
    assert_same_results(after, before, floats(3, 10))


def shown(m: Reconstructed, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = m.weight
    return F.linear(x, weight), weight.square().sum()


def test_a_weight_with_another_reader_stays_for_it():
    before = symbolic(Reconstructed(shown))
    after = fuse(before)
    assert targets(after) == [DENSE, LINEAR]
    assert_same_results(after, before, floats(3, 6))


def many_users(m: Reconstructed, x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, m.weight)
    return y + 1, y.relu_()


def test_several_users_all_read_the_new_node():
    before = symbolic(Reconstructed(many_users))
    after = fuse(before)
    assert targets(after) == [LINEAR]
    assert_same_results(after, before, floats(3, 6))


def test_a_frozen_core_stays_frozen():
    model = Reconstructed(ON_COLUMNS["linear"])
    model.core_1.requires_grad_(False)
    before = symbolic(model)
    after = fuse(before)
    assert after.core_1 is model.core_1
    assert not after.core_1.requires_grad
    assert_same_results(after, before, floats(3, 6))


def back_and_forth(m: Reconstructed, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.weight) @ m.weight, m.weight)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_back_to_back_products_are_all_rewritten(spec):
    before = symbolic(Reconstructed(back_and_forth, spec))
    after = fuse(before)
    assert targets(after) == [LINEAR] * 3
    assert_same_results(after, before, floats(3, 6))


def gram(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    return weight @ weight.t() + x.sum()


def test_a_weight_times_itself_stays_on_the_left():
    before = symbolic(Reconstructed(gram))
    after = fuse(before)
    assert targets(after) == [DENSE, LINEAR]
    assert_same_results(after, before, floats(3, 6))


def test_the_input_graph_is_untouched():
    model = Reconstructed(ON_ROWS["linear-of-t"])
    before = symbolic(model)
    code, core = before.code, model.core_0.clone()
    fuse(before)
    assert before.code == code
    assert torch.equal(model.core_0, core)


# ---- whole models ----


class FromCores(nn.Module):
    """A parametrization that keeps cores in the place of a matrix of the ranks of ``spec``."""

    def __init__(self, spec: TTSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *cores: Tensor) -> Tensor:
        spec = self.spec
        sizes = (len(spec.in_modes), spec.in_size, spec.out_size)
        return torch.ops.comera_fx.tt_dense.default(list(cores), spec.layout, *sizes)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(decompose(weight, self.spec)[0])


class Parametrized(nn.Module):
    def __init__(self, spec: TTSpec) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        cores = random_cores(spec, 1.0, generator=generator, dtype=torch.float64)
        self.W = nn.Parameter(to_dense(cores, spec))
        parametrize.register_parametrization(self, "W", FromCores(spec))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.W)) @ self.W, self.W)


@pytest.mark.parametrize("make", [symbolic, exported])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_parametrized_weight(spec, make):
    model, x = Parametrized(spec), floats(3, 6)
    before = make(model, x)
    after = fuse(before)
    assert targets(after) == [LINEAR] * 3
    assert_same_results(after, before, x)
    torch.testing.assert_close(after(x), model(x), **EXACT)


class TiedTable(nn.Module):
    """A model whose output head reads the table of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = TTEmbedding(SPECS["ttm"], 6, 10, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.embed(ids)), self.embed.weight)


@pytest.mark.parametrize("ranks_adapt", [False, True])
def test_graph_shows_the_fused_operator(ranks_adapt):
    model, ids = TiedTable(), torch.tensor([[0, 3, 5], [1, 1, 2]])
    if ranks_adapt:
        model.embed.attach_rank_weights(0.01)
    gm = comera_fx.graph(model, ids)
    assert targets(gm) == [EMBEDDING, LINEAR]
    torch.testing.assert_close(gm(ids), model(ids), **EXACT)
    assert gm.get_parameter("embed.core_0") is model.embed.core_0


# ---- the result ----


def hint_of(gm: fx.GraphModule) -> dict[str, object]:
    (node,) = (node for node in fuse(gm).graph.nodes if str(node.target) in (LINEAR, EMBEDDING))
    return node.kwargs


def test_tokens_that_the_graph_tells_are_planned_for():
    model, by_rows = Reconstructed(ON_COLUMNS["linear"]), Reconstructed(ON_ROWS["matmul"])
    table = Reconstructed(LOOKUPS["rows"][1])
    assert hint_of(exported(model, floats(3, 4, 6))) == {"num_tokens_hint": 12}
    assert hint_of(exported(by_rows, floats(3, 10))) == {"transposed": True, "num_tokens_hint": 3}
    ids = torch.zeros(5, 2, dtype=torch.long)
    assert hint_of(exported(table, ids)) == {"transposed": True, "num_tokens_hint": 10}


def test_tokens_that_are_the_default_or_not_known_are_not_named():
    model = Reconstructed(ON_COLUMNS["linear"])
    assert hint_of(exported(model, floats(4096, 6))) == {}
    assert hint_of(exported(model, floats(0, 6))) == {}
    assert hint_of(symbolic(model)) == {}
    dynamic = torch.export.export(
        model, (floats(3, 6),), strict=False, dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    assert hint_of(dynamic.module()) == {}


def test_metadata_is_that_of_the_node_replaced_and_the_spec():
    before = exported(Reconstructed(ON_ROWS["matmul"], SPECS["ttm"]), floats(3, 10))
    (old,) = (node for node in before.graph.nodes if node.target is torch.ops.aten.matmul.default)
    (new,) = (node for node in fuse(before).graph.nodes if str(node.target) in (LINEAR, EMBEDDING))
    assert new.meta["val"] is old.meta["val"]
    assert new.meta["tt_spec"] == TTSpec("ttm", (2, 5), (2, 3), (1, 3, 1))


def test_rewrite_as_text():
    after = fuse(symbolic(Reconstructed(ON_COLUMNS["addmm"])))
    assert format_graph(after.graph) == dedent("""\
        %x = placeholder[x]()
        %bias = get_attr[bias]()
        %core_0 = get_attr[core_0]()
        %core_1 = get_attr[core_1]()
        %core_2 = get_attr[core_2]()
        %core_3 = get_attr[core_3]()
        %tt_linear_default = call_function[comera_fx.tt_linear.default]\
(%x, [%core_0, %core_1, %core_2, %core_3], %bias, 'tt', 2, 6, 10)
        return %tt_linear_default""")


def test_a_table_with_padding_as_text():
    after = fuse(symbolic(Reconstructed(LOOKUPS["rows-last"][1], SPECS["ttm"])))
    assert format_graph(after.graph) == dedent("""\
        %x = placeholder[x]()
        %core_0 = get_attr[core_0]()
        %core_1 = get_attr[core_1]()
        %tt_embedding_default = call_function[comera_fx.tt_embedding.default]\
(%x, [%core_0, %core_1], None, 'ttm', 2, 10, 6, transposed=True)
        %eq = call_function[eq](%x, 9)
        %unsqueeze = call_method[unsqueeze](%eq, -1)
        %detach = call_method[detach](%tt_embedding_default)
        %where = call_function[where](%unsqueeze, %detach, %tt_embedding_default)
        return %where""")


def test_a_transposed_product_as_text():
    after = fuse(symbolic(Reconstructed(ON_ROWS["addmm"], SHORT, 5, 9)))
    assert format_graph(after.graph) == dedent("""\
        %x = placeholder[x]()
        %column_bias = get_attr[column_bias]()
        %core_0 = get_attr[core_0]()
        %core_1 = get_attr[core_1]()
        %tt_linear_default = call_function[comera_fx.tt_linear.default]\
(%x, [%core_0, %core_1], %column_bias, 'tt', 1, 9, 5, transposed=True)
        return %tt_linear_default""")
