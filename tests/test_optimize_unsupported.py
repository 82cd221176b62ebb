"""optimize: layers and models that it does not rewrite keep working."""

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx import TTLinear
from tests.lossless import LOSSLESS, RANDOM, Branching, exact_linear
from tests.tolerances import EXACT


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer_encoder_is_untouched_and_works(training):
    torch.manual_seed(0)
    model, ids = Classifier().train(training), torch.randint(200, (2, 5))

    result = comera_fx.optimize(model, ids, config=RANDOM)

    report = comera_fx.explain(result)
    assert [layer.name for layer in report.compressed] == ["embed", "head"]
    assert report.layers["encoder.layers.0.linear1"].reason == (
        "inside nn.TransformerEncoderLayer, which reads its weight directly: not supported yet"
    )
    assert "  4 layers (encoder.layers.0.linear1, ...): inside nn.Tr" in repr(report)
    x = torch.randn(2, 5, 32)
    for mode in (training, True, False):  # in eval without gradients: the fast path
        for net in (model, result):
            net.train(mode)
        with torch.set_grad_enabled(mode):
            torch.manual_seed(1)
            expected = model.encoder(x)
            torch.manual_seed(1)
            torch.testing.assert_close(result.encoder(x), expected)
            assert result(ids).shape == (2, 5, 128)


@pytest.mark.parametrize("with_inputs", [True, False], ids=["inputs", "no-inputs"])
def test_transformer_encoder_alone_has_nothing_to_compress(with_inputs):
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with pytest.raises(comera_fx.ConfigError, match="which reads its weight directly"):
        comera_fx.optimize(model, torch.randn(2, 5, 32) if with_inputs else None, config=RANDOM)


def test_tied_hugging_face_gpt2_works_in_train_and_eval():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=200, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(200, (2, 8))

    result = comera_fx.optimize(model, {"input_ids": ids, "labels": ids}, config=RANDOM)

    report = comera_fx.explain(result)
    assert report.capture == "export"
    assert [layer.name for layer in report.compressed] == ["transformer.wpe"]
    tied = "its weight is tied to another layer: not supported yet"
    assert report.layers["transformer.wte"].reason == report.layers["lm_head"].reason == tied
    conv1d = [layer for layer in report.layers.values() if layer.kind == "conv1d"]
    assert len(conv1d) == 8
    assert {layer.reason for layer in conv1d} == {"Hugging Face Conv1D is not supported yet"}
    assert isinstance(result, transformers.GPT2LMHeadModel)
    assert result.lm_head.weight is result.transformer.wte.weight

    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = result.train()(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        assert result.eval()(ids).logits.shape == (2, 8, 200)
        assert result.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 11)


def test_direct_reads_of_a_weight_still_work():
    class Reads(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x.to(self.fc.weight.dtype))
            return y @ self.fc.weight

    model, x = Reads(), torch.randn(3, 64)
    result = comera_fx.optimize(model, config=LOSSLESS)
    torch.testing.assert_close(result(x), model(x), **EXACT)


def test_model_that_is_a_graph_module():
    gm = torch.fx.symbolic_trace(nn.Sequential(exact_linear(), nn.Tanh()))
    x = torch.randn(3, 64, dtype=torch.float64)
    result = comera_fx.optimize(gm, x, config=LOSSLESS)
    assert isinstance(result, torch.fx.GraphModule)
    assert isinstance(result.get_submodule("0"), TTLinear)
    torch.testing.assert_close(result(x), gm(x), **EXACT)


def test_lazy_layers_are_left_to_be_filled():
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64))
    x = torch.randn(3, 64)
    result = comera_fx.optimize(model, x, config=RANDOM)
    report = comera_fx.explain(result)
    assert report.layers["0"].reason == "a lazy layer that has no weight yet"
    assert isinstance(result[1], TTLinear)
    assert result(x).shape == (3, 64)
    assert type(model[0]) is nn.LazyLinear
