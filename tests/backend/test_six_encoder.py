"""The paper's six-encoder at its own sizes: compiled and eager training are the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import comera_fx
from bench.models.six_encoder import PAPER_CONFIG, SixEncoder
from comera_fx.modules import TTLinear

pytestmark = pytest.mark.slow
NUM_STEPS, CUT_AT = 20, 10


def train(model: torch.nn.Module, run) -> list[float]:
    """Losses of some steps on one sequence a step; ranks are cut half-way."""
    optimizer = torch.optim.AdamW(comera_fx.param_groups(model, lr=1e-4))
    config = comera_fx.RankConfig(
        method="comera", prune_every=CUT_AT, gamma=0.0, patience=1, balance=False
    )
    adapter = comera_fx.RankAdapter(model, optimizer, config)
    losses = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 30522, (1, 128), generator=generator)
        label = torch.randint(0, 3, (1,), generator=generator)
        loss = F.cross_entropy(run(ids, torch.zeros_like(ids)), label)
        optimizer.zero_grad()
        adapter.loss(loss).backward()
        optimizer.step()
        if step == CUT_AT - 1:
            with torch.no_grad():
                for layer in model.modules():
                    if isinstance(layer, TTLinear):
                        layer.rank_weights[len(layer.spec.in_modes) - 1][-2:] = 0.0
        adapter.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_eager_training_with_a_cut_in_between():
    torch.manual_seed(0)
    eager = comera_fx.optimize(SixEncoder(), config=PAPER_CONFIG)
    compiled = copy.deepcopy(eager)
    fast = torch.compile(compiled, backend="comera", fullgraph=True, options={"inner": "aot_eager"})
    mine, theirs = train(compiled, fast), train(eager, eager)
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
    assert compiled.encoders[0].up.spec == eager.encoders[0].up.spec
    assert compiled.encoders[0].up.spec.middle_rank == 28
    seen = counters["comera_fx"]
    assert seen["graphs"] == 2
    assert seen["expanded"] == seen["tt_layers"] == 2 * 38
