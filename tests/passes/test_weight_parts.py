"""FuseReconstruction on parts of a reconstructed weight: they are read by the weight's factors."""

from collections.abc import Callable
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from comera_fx.lowering import lowering_passes
from comera_fx.passes.expand_attention import ExpandAttention
from comera_fx.passes.fuse_reconstruction import FuseReconstruction
from comera_fx.report import format_graph
from tests.backend.models import WIDTH, on_cores
from tests.dynamo_graphs import Rewriting, assert_as_eager
from tests.reconstructed import (
    DENSE,
    LINEAR,
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
from tests.tolerances import BY_DTYPE

aten = torch.ops.aten
FACTORS, APPLY = "comera_fx.tt_factors.default", "comera_fx.tt_apply.default"
ROWS = "comera_fx.tt_rows.default"


def expressed(view: Callable[[Tensor], Tensor], lookup: bool = False) -> Reconstructed:
    def read(m: Reconstructed, x: Tensor) -> Tensor:
        part = view(m.weight)
        return F.embedding(x, part) if lookup else F.linear(x, part)

    return Reconstructed(read)


# ---- numerics ----

# What names entries a to b of n on one axis.
RANGES: dict[str, Callable[[Tensor, int, int, int, int], Tensor]] = {
    "slice": lambda w, axis, a, b, n: w[:, a:b] if axis else w[a:b],
    "slice-from-the-end": lambda w, axis, a, b, n: w[..., a - n : b] if axis else w[a - n : b, :],
    "narrow": lambda w, axis, a, b, n: w.narrow(axis - 2, a, b - a),
    "torch-narrow": lambda w, axis, a, b, n: torch.narrow(w, axis, a, b - a),
    "split": lambda w, axis, a, b, n: w.split([a, b - a, n - b], axis)[1],
    "torch-split": lambda w, axis, a, b, n: torch.split(w, [a, b - a, n - b], dim=axis)[-2],
    "tensor-split": lambda w, axis, a, b, n: w.tensor_split((a, b), dim=axis)[1],
    "operator-slice": lambda w, axis, a, b, n: aten.slice.Tensor(w, axis, a, b, 1),
}
view_steps = st.tuples(
    st.sampled_from(sorted(RANGES)),
    st.integers(0, 1),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
)


def nested(steps: list[tuple[str, int, int, int, bool]]) -> tuple[Callable, tuple[int, int]]:
    """Views of views of a matrix of 10 rows and 6 columns, and the sizes of the last."""
    sizes, views = [10, 6], []
    for name, axis, first, more, is_turned in steps:
        n = sizes[axis]
        a = first % n
        b = a + 1 + more % (n - a)
        sizes[axis] = b - a
        views.append((RANGES[name], axis, a, b, n, is_turned))
        if is_turned:
            sizes.reverse()

    def view(w: Tensor) -> Tensor:
        for take, axis, a, b, n, is_turned in views:
            w = take(w, axis, a, b, n)
            w = w.t() if is_turned else w
        return w

    return view, tuple(sizes)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(view_steps, min_size=1, max_size=4),
    st.sampled_from(["columns", "rows", "lookup"]),
    st.sampled_from([(), (3,), (2, 3)]),
)
def test_nested_parts_equal_those_of_the_dense_weight(steps, kind, shape):
    view, sizes = nested(steps)
    reads = {
        "columns": lambda m, x: F.linear(x, view(m.weight), m.bias[: sizes[0]]),
        "rows": lambda m, x: x @ view(m.weight),
        "lookup": lambda m, x: F.embedding(x, view(m.weight), padding_idx=-1),
    }
    before = symbolic(Reconstructed(reads[kind]))

    after = fuse(before)

    found = targets(after)
    assert DENSE not in found
    assert len(found) == (1 if sorted(sizes) == [6, 10] else 2)
    x = numbers_below(sizes[0]) if kind == "lookup" else floats(*shape, sizes[kind == "columns"])
    assert_same_results(after, before, x)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda w: w.split(4)[2],
    "split-keyword": lambda w: torch.split(w, split_size_or_sections=4, dim=-1)[0],
    "split-with-sizes": lambda w: torch.split_with_sizes(w, [4, 6])[1],
    "split-with-sizes-method": lambda w: w.split_with_sizes([4, 2], 1)[0],
    "chunk": lambda w: w.chunk(3, dim=1)[1],
    "torch-chunk": lambda w: torch.chunk(w, 3)[2],
    "chunk-of-input": lambda w: torch.chunk(input=w, chunks=2)[0],
    "tensor-split": lambda w: torch.tensor_split(w, 3)[0],
    "some-of-a-split": lambda w: w.split(3)[1:][0],
    "split-of-split": lambda w: w.split(5)[1].split([1, 4])[1],
    "split-of-transpose": lambda w: w.t().split(2)[1],
    "transpose-of-split": lambda w: w.chunk(2)[1].T,
    "both": lambda w: w[2:5, ..., 1:],
    "operator-split": lambda w: aten.split.Tensor(w, 4)[0],
    "operator-split-sizes": lambda w: aten.split.sizes(w, [4, 6])[0],
    "operator-split-with-sizes": lambda w: aten.split_with_sizes.default(w, [2, 4], 1)[1],
    "operator-chunk": lambda w: aten.chunk.default(w, 2)[1],
    "operator-slice": lambda w: aten.slice.Tensor(w, 0, 2, 9223372036854775807),
    "operator-narrow": lambda w: aten.narrow.default(w, 1, 1, 3),
}


def dynamo(model: nn.Module, x: Tensor) -> fx.GraphModule:
    """Check values and gradients under dynamo, and return the graph."""
    return assert_as_eager(Rewriting(FuseReconstruction()), model, x)


@pytest.mark.parametrize("lookup", [False, True], ids=["product", "lookup"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_in_every_kind_of_graph(name, lookup):
    model = expressed(SPELLINGS[name], lookup)
    num_rows, num_columns = SPELLINGS[name](model.weight).shape
    x = numbers_below(num_rows) if lookup else floats(3, num_columns)
    for make in (symbolic, exported):
        before = make(model, x)
        after = fuse(before)
        assert targets(after) == [FACTORS, ROWS if lookup else APPLY]
        assert_same_results(after, before, x)
    assert targets(dynamo(model, x)) == [FACTORS, ROWS if lookup else APPLY]


@pytest.mark.parametrize("make", [symbolic, exported])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_all_of_a_weight_is_no_part(spec, make):
    x = floats(3, 6)
    before = make(Reconstructed(lambda m, x: F.linear(x, m.weight[:][0:10].split(10)[0]), spec), x)
    after = fuse(before)
    assert targets(after) == [LINEAR]
    assert_same_results(after, before, x)


def test_a_padded_weight_and_one_of_few_cores():
    read = lambda m, x: F.linear(x, m.weight[5:, 2:])  # noqa: E731
    for spec, sizes in ((SPECS["tt"], (5, 9)), (SHORT, (6, 10))):
        before = symbolic(Reconstructed(read, spec, *sizes))
        after = fuse(before)
        assert targets(after) == [FACTORS, APPLY]
        assert_same_results(after, before, floats(3, sizes[0] - 2))


def test_an_id_beyond_the_part_is_an_error_still():
    after = fuse(symbolic(expressed(lambda w: w[:4], lookup=True)))
    with pytest.raises((IndexError, ValueError), match="out of range"):
        after(torch.tensor([4]))


# ---- several readers ----


def packed(m: Reconstructed, x: Tensor) -> tuple[Tensor, ...]:
    a, b, _ = m.weight.split([3, 4, 3])
    y = F.linear(x, a)
    return F.linear(x, b, m.bias[3:7]), y, y @ a, F.embedding(torch.tensor([1, 3]), b)


@pytest.mark.parametrize("make", [symbolic, exported])
def test_parts_share_the_factors_and_unread_ones_go(make):
    x = floats(3, 6)
    before = make(Reconstructed(packed), x)
    after = fuse(before)
    assert targets(after) == [FACTORS, APPLY, APPLY, APPLY, ROWS]
    names = [str(node.target) for node in after.graph.nodes]
    assert names.count("narrow") == 2
    assert not [name for name in names if "split" in name]
    assert_same_results(after, before, x)


def made_anew(m: Reconstructed, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.weight[:4]) @ m.weight[4:8], m.weight)


@pytest.mark.parametrize("make", [symbolic, exported])
def test_weights_on_equal_cores_share_the_factors(make):
    x = floats(3, 6)
    before = make(Reconstructed(made_anew), x)
    after = fuse(before)
    assert targets(after) == [FACTORS, APPLY, APPLY, LINEAR]
    assert_same_results(after, before, x)


def shown(m: Reconstructed, x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = m.weight.chunk(2)
    return F.linear(x, a), b.square().sum()


def test_a_part_with_another_reader_stays_for_it():
    before = symbolic(Reconstructed(shown))
    after = fuse(before)
    assert targets(after) == [FACTORS, DENSE, APPLY]
    assert_same_results(after, before, floats(3, 6))


def test_a_frozen_core_stays_frozen():
    model = expressed(lambda w: w[2:])
    model.core_1.requires_grad_(False)
    before = symbolic(model)
    after = fuse(before)
    assert after.core_1 is model.core_1
    assert not after.core_1.requires_grad
    assert_same_results(after, before, floats(3, 6))


def test_the_input_graph_is_untouched():
    before = symbolic(expressed(lambda w: w[2:]))
    code = before.code
    fuse(before)
    assert before.code == code


# ---- left alone ----


def written_whole(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    part = weight[:5]
    weight.mul_(2)
    return F.linear(x, part)


def written_part(m: Reconstructed, x: Tensor) -> Tensor:
    part = m.weight[2:]
    part.mul_(2)
    return F.linear(x, part)


def written_through_a_part(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    a, b = weight[:8][:4], weight[4:]
    b.t().narrow(0, 0, 2).zero_()
    return F.linear(x, a)


def core_written(m: Reconstructed, x: Tensor) -> Tensor:
    part = m.weight[2:]
    m.core_0.detach().mul_(2)
    return F.linear(x, part)


@pytest.mark.parametrize("make", [symbolic, exported])
@pytest.mark.parametrize(
    "read", [written_whole, written_part, written_through_a_part, core_written]
)
def test_weights_and_parts_that_are_written_to(read, make):
    assert FuseReconstruction()(make(Reconstructed(read), floats(3, 6))) == 0


def test_parts_in_layout_ttm():
    gm = symbolic(Reconstructed(lambda m, x: F.linear(x, m.weight[:4]), SPECS["ttm"]))
    code = gm.code
    assert FuseReconstruction()(gm) == 0
    assert gm.code == code


@pytest.mark.parametrize(("padding_idx", "fused"), [(3, 1), (4, 0), (-4, 1), (-5, 0)])
def test_a_padding_idx_beyond_the_part(padding_idx, fused):
    read = lambda m, ids: F.embedding(ids, m.weight[:4], padding_idx=padding_idx)  # noqa: E731
    assert FuseReconstruction()(symbolic(Reconstructed(read))) == fused


# ---- gradients and autocast that are switched ----


def settings_of_factors(gm: fx.GraphModule) -> list[dict]:
    return [dict(node.kwargs) for node in gm.graph.nodes if str(node.target) == FACTORS]


def inside(m: Reconstructed, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, m.weight[:4])


def inside_and_out(m: Reconstructed, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = m.weight
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight[:4])
    return y, F.linear(x, weight[4:])


def table_inside(m: Reconstructed, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        part = m.weight[:4]
        return F.linear(x, part), F.embedding(torch.tensor([1, 3]), part)


@pytest.mark.parametrize(
    ("read", "kept"),
    [(inside, {}), (inside_and_out, {"autocast": False}), (table_inside, {"autocast": False})],
)
def test_autocast_regions(read, kept):
    model, x = Reconstructed(read).float(), floats(3, 6).float()
    backend, tolerances = Rewriting(FuseReconstruction()), BY_DTYPE[torch.bfloat16]
    after = assert_as_eager(backend, model, x, tolerances=tolerances)
    assert settings_of_factors(after) == [kept]


def partly_frozen(m: Reconstructed, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        fixed = m.weight[:4]
    return F.linear(x, fixed), F.linear(x, m.weight[4:])


def test_a_weight_made_without_gradients_has_factors_of_its_own():
    after = dynamo(Reconstructed(partly_frozen), floats(3, 6))
    assert targets(after) == [FACTORS, APPLY, FACTORS, APPLY]


# ---- attention ----


class Crossed(nn.Module):
    """Attention to a memory; the packed weight of query, key and value is made from cores."""

    def __init__(self, **settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(WIDTH, 2, dtype=torch.float64, **settings)
        on_cores(self.inner, "in_proj_weight")
        on_cores(self.inner.out_proj, "weight")

    def forward(self, query: Tensor, key: Tensor, value: Tensor | None = None) -> Tensor:
        return self.inner(query, key, key if value is None else value, need_weights=False)[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lengths", [(5, 4), (5, 4, 4)], ids=["memory", "all-different"])
def test_cross_attention_reads_no_dense_weight(lengths, bias):
    inputs = [floats(length, 3, WIDTH) for length in lengths]
    backend = Rewriting(ExpandAttention(), FuseReconstruction())
    after = assert_as_eager(backend, Crossed(bias=bias), *inputs)
    assert targets(after) == [FACTORS, *[APPLY] * len(inputs), LINEAR]
    results = [node.args for node in after.graph.nodes if str(node.target) == APPLY]
    assert all((args[3] != [None]) == bias for args in results)  # biases are inside


def test_cross_attention_through_all_passes():
    query, memory = floats(5, 3, WIDTH), floats(4, 3, WIDTH)
    backend = Rewriting(*lowering_passes())
    after = assert_as_eager(backend, Crossed(), query, memory)
    assert targets(after) == []


# ---- the result ----


def test_metadata():
    before = exported(expressed(lambda w: w[2:]), floats(3, 6))
    (old,) = (node for node in before.graph.nodes if node.target is aten.linear.default)
    after = fuse(before)
    (apply,) = (node for node in after.graph.nodes if str(node.target) == APPLY)
    (new,) = apply.users
    assert new.meta["val"] is old.meta["val"]
    assert "val" not in apply.meta
    assert apply.meta["stack_trace"] == old.meta["stack_trace"]


def test_rewrite_as_text():
    def read(m: Reconstructed, x: Tensor) -> Tensor:
        a, b = m.weight.split([4, 6])
        return F.linear(F.linear(x, a) @ a[:, 1:], b[:, 1:], m.bias)

    after = fuse(symbolic(Reconstructed(read, SHORT)))
    assert format_graph(after.graph) == dedent("""\
        %x = placeholder[x]()
        %core_0 = get_attr[core_0]()
        %core_1 = get_attr[core_1]()
        %tt_factors_default = call_function[comera_fx.tt_factors.default]\
([%core_0, %core_1], 1, 'tt', 1, 6, 10)
        %getitem_4 = call_function[getitem](%tt_factors_default, 0)
        %getitem_5 = call_function[getitem](%tt_factors_default, 1)
        %narrow = call_method[narrow](%getitem_5, 1, 0, 4)
        %narrow_1 = call_method[narrow](%getitem_4, 0, 1, 5)
        %narrow_2 = call_method[narrow](%getitem_5, 1, 4, 6)
        %tt_apply_default = call_function[comera_fx.tt_apply.default]\
(%x, [%getitem_4], [%narrow], [None])
        %getitem_6 = call_function[getitem](%tt_apply_default, 0)
        %t = call_method[t](%narrow)
        %t_1 = call_method[t](%narrow_1)
        %tt_apply_default_1 = call_function[comera_fx.tt_apply.default]\
(%getitem_6, [%t], [%t_1], [None])
        %getitem_7 = call_function[getitem](%tt_apply_default_1, 0)
        %bias = get_attr[bias]()
        %tt_apply_default_2 = call_function[comera_fx.tt_apply.default]\
(%getitem_7, [%narrow_1], [%narrow_2], [None])
        %getitem_8 = call_function[getitem](%tt_apply_default_2, 0)
        %add = call_function[add](%getitem_8, %bias)
        return %add""")


def test_a_part_of_a_table_as_text():
    read = lambda m, ids: F.embedding(ids, m.weight[4:].t(), padding_idx=-1)  # noqa: E731
    after = fuse(symbolic(Reconstructed(read, SHORT)))
    assert format_graph(after.graph) == dedent("""\
        %x = placeholder[x]()
        %core_0 = get_attr[core_0]()
        %core_1 = get_attr[core_1]()
        %tt_factors_default = call_function[comera_fx.tt_factors.default]\
([%core_0, %core_1], 1, 'tt', 1, 6, 10, autocast=False)
        %getitem_1 = call_function[getitem](%tt_factors_default, 0)
        %getitem_2 = call_function[getitem](%tt_factors_default, 1)
        %narrow = call_method[narrow](%getitem_2, 1, 4, 6)
        %tt_rows_default = call_function[comera_fx.tt_rows.default]\
(%x, %getitem_1, %narrow, None)
        %eq = call_function[eq](%x, 5)
        %unsqueeze = call_method[unsqueeze](%eq, -1)
        %detach = call_method[detach](%tt_rows_default)
        %where = call_function[where](%unsqueeze, %detach, %tt_rows_default)
        return %where""")
