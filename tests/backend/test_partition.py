"""What the forward pass saves, and what the backward pass makes again."""

import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from comera_fx.backend import inner
from comera_fx.backend.partition import PartitionByMemory, mark_recomputed, partition_in_order
from comera_fx.modules import TTLinear
from comera_fx.passes.expand_plan import is_weight_only
from comera_fx.plan.linear import plan_linear
from comera_fx.spec import TTSpec
from tests.backend.models import Broken, assert_as_eager, compiled, floats, graph_breaks

SPEC = TTSpec("tt", (4, 4, 4), (4, 4, 4), (1, 4, 6, 6, 6, 4, 1))
WIDTH = 64
MANY, FEW = 16384, 64
BYTES = 8


@dataclass
class Splits:
    """The graphs that were split, and those they were split into."""

    partition: Any
    marked: list[int] = field(default_factory=list)
    forward: list[fx.GraphModule] = field(default_factory=list)
    backward: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        self.marked.append(mark_recomputed(joint))
        parts = self.partition(joint, *args, **kwargs)
        self.forward.append(parts[0])
        self.backward.append(parts[1])
        return parts


@pytest.fixture(params=[partition_in_order, PartitionByMemory()], ids=["in-order", "by-memory"])
def splits(request, monkeypatch) -> Splits:
    made = Splits(request.param)
    monkeypatch.setattr(inner, "partition_in_order", made)
    return made


def layer(tokens: int) -> TTLinear:
    torch.manual_seed(0)
    return TTLinear(SPEC, WIDTH, WIDTH, bias=False, dtype=torch.float64, num_tokens_hint=tokens)


def saved_bytes(function: Any, model: nn.Module, x: Tensor) -> int:
    """Bytes of the storages saved for the backward pass, beside those of parameters."""
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert function(x).requires_grad
    for parameter in model.parameters():
        held.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def products(gm: fx.GraphModule) -> int:
    return sum("mm" in str(node.target) for node in gm.graph.nodes)


def test_messages_of_weights_are_made_again_at_many_tokens(splits):
    model, x = layer(MANY), floats(MANY, WIDTH).requires_grad_()
    plan = plan_linear(SPEC, MANY, itemsize=BYTES)
    fast = compiled(model)
    assert_as_eager(fast, model, x)
    num_messages = len(plan.steps.forward) - 2  # all but those that read x
    assert splits.marked[0] >= num_messages
    assert products(splits.forward[0]) == num_messages + 2
    assert products(splits.backward[0]) == num_messages + len(plan.steps.backward)
    assert saved_bytes(fast, model, x) <= plan.saved_bytes


def test_messages_of_weights_are_saved_at_few_tokens(splits):
    model, x = layer(FEW), floats(FEW, WIDTH).requires_grad_()
    plan = plan_linear(SPEC, FEW, itemsize=BYTES)
    fast = compiled(model)
    assert_as_eager(fast, model, x)
    assert splits.marked == [0]
    assert products(splits.forward[0]) == len(plan.steps.forward)
    assert products(splits.backward[0]) == len(plan.steps.backward)
    assert saved_bytes(fast, model, x) <= plan.saved_bytes


def test_nothing_is_marked_where_nothing_is_planned():
    joint = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert mark_recomputed(joint) == 0


@graph_breaks
def test_graphs_are_split_one_by_one(splits):
    model = Broken()
    assert_as_eager(compiled(model, fullgraph=False), model, floats(5, 12))
    assert len(splits.forward) == len(splits.backward) == 2


def test_no_mark_stays_on_what_the_backward_pass_computes(splits):
    model, x = layer(MANY), floats(MANY, WIDTH).requires_grad_()
    compiled(model)(x).sum().backward()
    nodes = [node for gm in (splits.forward[0], splits.backward[0]) for node in gm.graph.nodes]
    marked = [node for node in nodes if is_weight_only(node)]
    assert marked
    assert not [node for node in marked if MANY in getattr(node.meta.get("val"), "shape", ())]


def test_caches_tell_the_partitioner_by_its_source():
    same = pickle.loads(pickle.dumps(PartitionByMemory()))
    assert same.uuid() == PartitionByMemory().uuid()
