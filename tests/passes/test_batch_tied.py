"""BatchChains on tables that are tied to a head: both take the factors of one set of cores."""

from textwrap import dedent

import pytest
import torch
from torch import Tensor

import comera_fx
from comera_fx.report import format_graph
from tests.chained import KINDS, Cores, batch, operators_of
from tests.reconstructed import assert_same_results, numbers_below, symbolic, targets
from tests.tolerances import BY_DTYPE

FACTORS, APPLY, ROWS = (f"comera_fx.tt_{name}.default" for name in ("factors", "apply", "rows"))
kinds = pytest.mark.parametrize("kind", KINDS)


class Table(Cores):
    """A table and the head that reads its cores, by this side or the other."""

    def __init__(self, by_other_side: bool, padding_idx: int = -1) -> None:
        super().__init__(None)
        self.by_other_side, self.padding_idx = by_other_side, padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        cores = [getattr(self, f"core_{k}") for k in range(4)]
        padding_row = self.core_0.new_ones(6) if self.padding_idx >= 0 else None
        rows = torch.ops.comera_fx.tt_embedding.default(
            ids, cores, padding_row, "tt", 2, 6, 6, padding_idx=self.padding_idx
        )
        return torch.ops.comera_fx.tt_linear.default(
            torch.tanh(rows), cores, None, "tt", 2, 6, 6, transposed=self.by_other_side
        )


@kinds
@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("by_other_side", [False, True])
def test_a_table_tied_to_a_head_shares_its_factors(by_other_side, padding_idx, kind):
    before = operators_of(Table(by_other_side, padding_idx), kind, numbers_below(6))
    after = batch(before)
    assert targets(after) == [FACTORS, ROWS, APPLY]
    assert_same_results(after, before, numbers_below(6))


def test_rows_of_shared_factors_keep_their_dtype_under_autocast():
    model = Table(by_other_side=True).float()
    before = symbolic(model)
    after = batch(before)
    factors = next(node for node in after.graph.nodes if str(node.target) == FACTORS)
    assert factors.kwargs == {"autocast": False}
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = after(numbers_below(6)), before(numbers_below(6))
        ids, cores = numbers_below(6), [getattr(model, f"core_{k}") for k in range(4)]
        left, right = torch.ops.comera_fx.tt_factors.default(
            cores, 1, "tt", 2, 6, 6, **factors.kwargs
        )
        table = torch.ops.comera_fx.tt_rows.default(ids, left, right, None)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert table.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, **BY_DTYPE[torch.bfloat16])


def test_an_id_out_of_range_of_shared_factors_is_an_error_still():
    after = batch(symbolic(Table(by_other_side=True)))
    with pytest.raises(comera_fx.ComeraError, match="out of range"):
        after(torch.tensor([6]))


def test_a_table_of_its_own_cores_is_left_alone():
    class TwoTrains(Cores):
        def forward(self, ids: Tensor) -> Tensor:
            cores = [getattr(self, f"core_{k}") for k in range(4)]
            own = [core * 2 for core in cores]
            rows = torch.ops.comera_fx.tt_embedding.default(ids, own, None, "tt", 2, 6, 6)
            return torch.ops.comera_fx.tt_linear.default(rows, cores, None, "tt", 2, 6, 6)

    before = symbolic(TwoTrains(None))
    after = batch(before)
    assert targets(after) == ["comera_fx.tt_embedding.default", FACTORS, APPLY]
    assert_same_results(after, before, numbers_below(6))


def test_a_tied_table_as_text():
    after = batch(symbolic(Table(by_other_side=True)))
    assert format_graph(after.graph) == dedent("""\
        %ids = placeholder[ids]()
        %core_0 = get_attr[core_0]()
        %core_1 = get_attr[core_1]()
        %core_2 = get_attr[core_2]()
        %core_3 = get_attr[core_3]()
        %tt_factors_default = call_function[comera_fx.tt_factors.default]\
([%core_0, %core_1, %core_2, %core_3], 1, 'tt', 2, 6, 6, autocast=False)
        %getitem = call_function[getitem](%tt_factors_default, 0)
        %getitem_1 = call_function[getitem](%tt_factors_default, 1)
        %tt_rows_default = call_function[comera_fx.tt_rows.default]\
(%ids, %getitem, %getitem_1, None, padding_idx=-1)
        %tanh = call_function[tanh](%tt_rows_default)
        %t = call_method[t](%getitem_1)
        %t_1 = call_method[t](%getitem)
        %tt_apply_default = call_function[comera_fx.tt_apply.default](%tanh, [%t], [%t_1], [None])
        %getitem_2 = call_function[getitem](%tt_apply_default, 0)
        return %getitem_2""")
