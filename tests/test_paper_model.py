"""The paper's six-encoder classifier: exact sizes, dense and in TT form."""

import torch

import comera_fx
from bench.models.six_encoder import PAPER_CONFIG, SixEncoder


def num_params(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_paper_recipe_has_the_paper_size():
    model = SixEncoder()
    assert num_params(model) == 66_957_315
    optimised = comera_fx.optimize(model, config=PAPER_CONFIG)
    assert num_params(optimised) == 1_485_795
    assert num_params(model) == 66_957_315
    report = comera_fx.explain(optimised)
    assert report.layers["encoders.0.query"].ranks == (1, 12, 30, 30, 30, 12, 1)
    assert report.layers["encoders.5.down"].tt_params == 28_960
    assert report.layers["word_embedding"].tt_params == 167_808
    assert report.layers["position_embedding"].reason == "excluded"
    ids = torch.randint(0, 30522, (2, 16))
    logits = optimised(ids, torch.zeros_like(ids))
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in optimised.parameters())
