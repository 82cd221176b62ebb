"""What the first of many processes finds holds for all, and what is wrong in one is told in all.

The processes run this file as a script, with the name of one of ``SCENARIOS``.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from comera_fx.errors import RankError
from comera_fx.train import adapted
from tests.train.process_runs import Run, model_of, run_processes, run_scenario


def directions_of_the_first(rank):
    """The other process would find fewer of them, and rounds otherwise; parameters stay equal."""
    find = adapted.balanced_bonds
    if rank == 1:
        adapted.balanced_bonds = lambda cores: [bond.first(2) for bond in find(cores)]
    for dtype, method in itertools.product((torch.float32, torch.float64), ("comera", "proximal")):
        run = Run(model_of(dtype), rank, check_processes=True, method=method, prune_every=2)
        layers = run.adapter._layers
        weights = [layer.dense_weight().detach() for layer in run.model.layers]
        layers.turn(layers.balanced())
        for layer, weight in zip(run.model.layers, weights, strict=True):
            torch.testing.assert_close(layer.dense_weight().detach(), weight)
        for number in range(6):
            run.step(number)
        assert run.adapter.ranks["layers.0"] == [4, 8, 4]
        for parameter in run.model.parameters():
            theirs = parameter.detach().clone()
            dist.broadcast(theirs, 0)
            assert torch.equal(theirs, parameter)


def bytes_sent(rank):
    """Bases go in the precision of the cores."""
    sent, send = [], dist.broadcast
    dist.broadcast = lambda tensor, **where: sent.append(tensor.dtype) or send(tensor, **where)
    for dtype in (torch.float32, torch.float64):
        run = Run(model_of(dtype), rank, method="proximal")
        sent.clear()
        run.adapter._layers.balanced()
        assert sent == [torch.float64, dtype]


def not_finite_in_one(rank):
    """Cores that are not finite in one process are refused in all, and none waits for another."""
    for method in ("comera", "proximal"):
        run = Run(model_of(), rank, method=method, prune_every=1)
        run.step(0)
        if rank == 1:
            with torch.no_grad():
                run.model.layers[1].cores[1][0, 1, 2] = float("nan")
        ranks = run.adapter.ranks
        run.adapter.loss(torch.tensor(1.0))
        with pytest.raises(RankError, match=r"layer 'layers.1' has numbers that are not finite"):
            run.adapter.step()
        assert run.adapter.ranks == ranks


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (directions_of_the_first, bytes_sent, not_finite_in_one)
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes(tmp_path, scenario):
    run_processes(__file__, tmp_path, scenario)


if __name__ == "__main__":
    run_scenario(SCENARIOS)
