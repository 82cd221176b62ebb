import math

import pytest
import torch

from comera_fx.demo.config import VOCABULARY
from comera_fx.demo.data import train_batch
from comera_fx.demo.model import Decoder, next_byte_loss


@pytest.fixture
def model(tiny):
    torch.manual_seed(0)
    return Decoder(tiny)


def test_logits_have_one_value_a_byte(model, tiny):
    ids = torch.zeros(3, tiny.context, dtype=torch.long)
    assert model(ids).shape == (3, tiny.context, VOCABULARY)


def test_no_position_sees_a_later_one(model, tiny, corpus):
    ids = train_batch(corpus, 0, tiny)[:, :-1]
    changed = ids.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(ids)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(ids)[:, 10:], model(changed)[:, 10:])


def test_an_untrained_model_guesses(model, tiny, corpus):
    loss = next_byte_loss(model, train_batch(corpus, 0, tiny)).item()
    assert loss == pytest.approx(math.log(VOCABULARY), abs=0.05)


def test_the_loss_falls_in_training(model, tiny, corpus):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = train_batch(corpus, 0, tiny)
    before = next_byte_loss(model, batch).item()
    for _ in range(20):
        optimizer.zero_grad()
        next_byte_loss(model, batch).backward()
        optimizer.step()
    assert next_byte_loss(model, batch).item() < before - 1
