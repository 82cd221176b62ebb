"""Which reads of a reconstructed weight are left alone: others, and those a write may reach."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_fx.passes.fuse_reconstruction import FuseReconstruction
from comera_fx.spec import TTSpec
from tests.reconstructed import (
    DENSE,
    LINEAR,
    ON_COLUMNS,
    ON_ROWS,
    SPECS,
    Read,
    Reconstructed,
    assert_same_results,
    exported,
    floats,
    fuse,
    symbolic,
    targets,
)


class Scaled(nn.Module):
    """Cores that a tracer cannot know the shapes of."""

    def __init__(self, read: Read, spec: TTSpec) -> None:
        super().__init__()
        self.inner, self.spec = Reconstructed(read, spec), spec
        self.read = read

    @property
    def weight(self) -> Tensor:
        cores = [2.0 * getattr(self.inner, f"core_{k}") for k in range(self.inner.num_cores)]
        return torch.ops.comera_fx.tt_dense.default(
            cores, self.spec.layout, 2, self.spec.in_size, self.spec.out_size
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


@pytest.mark.parametrize(
    ("layout", "read", "make"),
    [
        ("tt", "no-bias", symbolic),
        ("tt", "matmul", symbolic),
        ("tt", "matmul", exported),
        ("ttm", "matmul", symbolic),
    ],
)
def test_computed_cores(layout, read, make):
    x = floats(3, 6 if read == "no-bias" else 10)
    before = make(Scaled({**ON_COLUMNS, **ON_ROWS}[read], SPECS[layout]), x)
    after = fuse(before)
    assert targets(after) == [LINEAR]
    assert_same_results(after, before, x)


def written(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    weight.mul_(2)
    return F.linear(x, weight)


def written_through_a_view(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    weight.t()[0].zero_()
    return F.linear(x, weight)


def written_by_function(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    return F.linear(x, weight) + F.relu(weight, inplace=True).sum()


@pytest.mark.parametrize("make", [symbolic, exported])
@pytest.mark.parametrize("read", [written, written_through_a_view, written_by_function])
def test_a_weight_that_is_written_to(read, make):
    assert FuseReconstruction()(make(Reconstructed(read), floats(3, 6))) == 0


@pytest.mark.parametrize(("target", "fused"), [(operator.imul, 0), (operator.mul, 1)])
def test_a_weight_that_an_operator_writes_to(target, fused):
    gm = symbolic(Reconstructed(lambda m, x: F.linear(x, w := m.weight) + (w * 2).sum()))
    (product,) = (node for node in gm.graph.nodes if node.target is operator.mul)
    product.target = target
    assert FuseReconstruction()(gm) == fused


class Activation(Reconstructed):
    def __init__(self, inplace: bool) -> None:
        super().__init__(lambda m, x: m.activation(w := m.weight).sum() + F.linear(x, w))
        self.activation = nn.ReLU(inplace)


@pytest.mark.parametrize("inplace", [True, False])
def test_a_weight_that_a_module_writes_to(inplace):
    assert FuseReconstruction()(symbolic(Activation(inplace))) == (not inplace)


def operand_of_a_write(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    return F.linear(x, weight).add_(weight.sum())


@pytest.mark.parametrize("make", [symbolic, exported])
def test_a_weight_that_a_write_only_reads(make):
    x = floats(3, 6)
    before = make(Reconstructed(operand_of_a_write), x)
    after = fuse(before)
    assert targets(after) == [DENSE, LINEAR]
    assert_same_results(after, before, x)


def core_written(m: Reconstructed, x: Tensor) -> Tensor:
    weight = m.weight
    m.core_0.detach().mul_(2)
    return F.linear(x, weight)


@pytest.mark.parametrize("make", [symbolic, exported])
def test_a_core_that_is_written_to(make):
    assert FuseReconstruction()(make(Reconstructed(core_written), floats(3, 6))) == 0


OTHER_READS: dict[str, Read] = {
    "left": lambda m, x: m.weight @ x.t(),
    "every-second-row": lambda m, x: F.linear(x, m.weight[::2]),
    "chosen-rows": lambda m, x: F.linear(x, m.weight[[0, 1]]),
    "one-row": lambda m, x: F.linear(x, m.weight[2]),
    "no-rows": lambda m, x: F.linear(x, m.weight[4:4]),
    "rows-that-are-not-there": lambda m, x: F.linear(x, m.weight.narrow(0, 8, 4)),
    "rows-by-activations": lambda m, x: F.linear(x, m.weight.narrow(0, x.shape[0], 2)),
    "factor": lambda m, x: torch.addmm(m.bias, x, m.weight.t(), alpha=2),
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.weight),
    "detached": lambda m, x: F.linear(x, m.weight.detach()),
    "sum": lambda m, x: m.weight.sum() + x,
}
OTHER_LOOKUPS: dict[str, Read] = {
    "max-norm": lambda m, x: F.embedding(x.long(), m.weight, max_norm=1.0),
    "frequency": lambda m, x: F.embedding(x.long(), m.weight, scale_grad_by_freq=True),
    "sparse": lambda m, x: torch.embedding(m.weight, x.long(), -1, False, True),
}


@pytest.mark.parametrize("name", [*OTHER_READS, *OTHER_LOOKUPS])
def test_other_readers_are_left_alone(name):
    gm = symbolic(Reconstructed({**OTHER_READS, **OTHER_LOOKUPS}[name]))
    code = gm.code
    assert FuseReconstruction()(gm) == 0
    assert gm.code == code


def test_a_padding_idx_beyond_the_table_is_left_alone():
    gm = symbolic(Reconstructed(lambda m, ids: torch.embedding(m.weight, ids, 10)))
    assert FuseReconstruction()(gm) == 0
