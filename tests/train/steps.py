"""A small model, and steps of it of which some are not finite."""

import pytest
import torch
from torch import nn

from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec

SPEC = TTSpec("tt", (4, 8), (8, 4), (1, 4, 8, 4, 1))
NAN, INF = float("nan"), float("inf")


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(TTLinear(SPEC, 32, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(step):
    """A batch; numbers that are not finite stand for their own step."""
    seed = int(step) if abs(step) < INF else 0
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    return x * (1.0 if abs(step) < INF else step), x[:, :4].clone()


def train(model, optimizers, finite, steps, accumulate=1):
    """Train on ``steps``, each a batch or several; return which of the steps were skipped."""
    skipped = []
    for number in range(0, len(steps), accumulate):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for step in steps[number : number + accumulate]:
            x, y = batch(step)
            loss = nn.functional.mse_loss(model(x), y)
            finite.note(loss)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        skipped.append(finite.ended_step())
    return skipped


def everything(model, *optimizers):
    """All numbers of a model and its optimizers, the step counts too, as text that is exact."""
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    listed = {name: p.tolist() for name, p in model.state_dict().items()}
    entries = [
        {i: {k: torch.as_tensor(v).tolist() for k, v in entry.items() if v is not None}}
        for state in states
        for i, entry in state.items()
    ]
    return repr((listed, entries))


def quiet():
    return pytest.warns(UserWarning, match="is not finite: the step is skipped")
