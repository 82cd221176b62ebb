"""EmbeddingToTTM: shape of the rewrite, numerics, and the cases it must leave alone."""

from collections.abc import Callable
from math import prod
from textwrap import dedent

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from comera_fx.modules import TTEmbedding
from comera_fx.passes.embedding_to_ttm import EmbeddingToTTM
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.report import format_graph
from comera_fx.spec import TTSpec
from tests.tolerances import EXACT

mode_pairs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3)
Choose = Callable[[str, nn.Embedding], TTEmbedding | None]
IDS = torch.tensor([[0, 3, 5], [1, 1, 2]])


def full_rank_spec(row_modes: tuple[int, ...], column_modes: tuple[int, ...]) -> TTSpec:
    """Ranks at which TT-SVD loses nothing."""
    sizes = [n * m for n, m in zip(row_modes, column_modes, strict=True)]
    ranks = [min(prod(sizes[:k]), prod(sizes[k:])) for k in range(len(sizes) + 1)]
    return TTSpec("ttm", row_modes, column_modes, tuple(ranks))


def decompose(
    row_modes: tuple[int, ...] = (2, 3), column_modes: tuple[int, ...] = (2, 2)
) -> Choose:
    spec = full_rank_spec(row_modes, column_modes)
    return lambda name, table: TTEmbedding.from_embedding(table, spec)


def table(rows: int = 6, columns: int = 4, **kwargs: object) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(rows, columns, **kwargs)


def trace(model: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(model.double())


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, **EXACT)


def num_tt_nodes(gm: fx.GraphModule) -> int:
    op = torch.ops.comera_fx.tt_embedding.default
    return sum(node.target is op for node in gm.graph.nodes)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(mode_pairs)
def test_full_rank_rewrite_equals_dense(pairs):
    row_modes, column_modes = zip(*pairs, strict=True)
    dense = trace(nn.Sequential(table(prod(row_modes), prod(column_modes))))
    ids = torch.arange(prod(row_modes))

    rewritten = run_pipeline(dense, [EmbeddingToTTM(decompose(row_modes, column_modes))])

    assert_same(rewritten(ids), dense(ids))


def test_nothing_to_do():
    gm = trace(nn.Sequential(nn.Linear(4, 4)))
    assert EmbeddingToTTM(decompose())(gm) == 0


def test_a_table_that_is_not_chosen_stays():
    gm = trace(nn.Sequential(table()))
    code = gm.code
    assert EmbeddingToTTM(lambda name, layer: None)(gm) == 0
    assert gm.code == code


def test_padding_row_is_kept():
    dense = trace(nn.Sequential(table(padding_idx=3)))
    rewritten = run_pipeline(dense, [EmbeddingToTTM(decompose())])
    assert_same(rewritten(IDS), dense(IDS))
    assert rewritten.get_submodule("0").padding_idx == 3


class TwoLookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = table()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.embed(a) - self.embed(b)


def test_table_called_twice_is_replaced_once():
    dense = trace(TwoLookups())

    rewritten = run_pipeline(dense, [EmbeddingToTTM(decompose())])

    assert EmbeddingToTTM(decompose())(trace(TwoLookups())) == 1
    assert num_tt_nodes(rewritten) == 2
    assert_same(rewritten(IDS, IDS.flip(0)), dense(IDS, IDS.flip(0)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = table()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


class ReadsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = table()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) @ self.embed.weight.t()


@pytest.mark.parametrize("model", [Tied(), ReadsWeight()], ids=["tied", "functional"])
def test_weight_with_a_second_reader_is_left_alone(model):
    assert EmbeddingToTTM(decompose())(trace(model)) == 0


class ManyUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = table()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.embed(ids)
        return rows + 1, rows.sum()


def test_several_users_all_read_the_new_node():
    dense = trace(ManyUsers())
    rewritten = run_pipeline(dense, [EmbeddingToTTM(decompose())])
    for new, old in zip(rewritten(IDS), dense(IDS), strict=True):
        assert_same(new, old)


def test_frozen_table_stays_frozen():
    model = nn.Sequential(table())
    model[0].weight.requires_grad_(False)
    rewritten = run_pipeline(trace(model), [EmbeddingToTTM(decompose())])
    assert not any(core.requires_grad for core in rewritten.get_submodule("0").cores)


def test_back_to_back_tables_are_both_replaced():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = table(), table()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(ids).argmax(-1))

    dense = trace(Chain())
    rewritten = run_pipeline(dense, [EmbeddingToTTM(decompose())])
    assert num_tt_nodes(rewritten) == 2
    assert_same(rewritten(IDS), dense(IDS))


def test_the_input_graph_is_untouched():
    model = nn.Sequential(table())
    dense = trace(model)
    code = dense.code
    run_pipeline(dense, [EmbeddingToTTM(decompose())])
    assert dense.code == code
    assert type(model[0]) is nn.Embedding


def test_rewrite_as_text():
    dense = trace(nn.Sequential(table(padding_idx=0)))
    rewritten = run_pipeline(dense, [EmbeddingToTTM(decompose())])
    assert format_graph(rewritten.graph) == dedent("""\
        %input_1 = placeholder[input]()
        %_0_core_0 = get_attr[0.core_0]()
        %_0_core_1 = get_attr[0.core_1]()
        %_0_padding_row = get_attr[0.padding_row]()
        %tt_embedding_default = call_function[comera_fx.tt_embedding.default]\
(%input_1, [%_0_core_0, %_0_core_1], %_0_padding_row, 'ttm', 2, 6, 4, padding_idx=0)
        return %tt_embedding_default""")
