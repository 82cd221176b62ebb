"""Small models of many kinds, with inputs: what compilers are tried on.

Those of ``transformers`` need that package. Each takes keywords; weights are random, and nothing
drops out.

Shape legend: B samples, T tokens, D features, V size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bench.models.decoder import Decoder
from bench.models.dlrm import DLRM
from bench.models.six_encoder import SixEncoder
from comera_fx import OptimizeConfig, TTSpec
from comera_fx.tt import random_cores

VOCABULARY, NUM_TOKENS, WIDTH, FFN_WIDTH, NUM_HEADS = 96, 8, 32, 64, 2
CONFIG = OptimizeConfig(init="random", max_rank=4, min_params=256, only_if_faster=False)
"""Puts all that it can into TT form, however small."""
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A model and what it is called with.

    Args:
        name: The model's name in tables.
        make: Makes the model.
        inputs: Makes the keywords of a call, given the number of samples.
        optimised: Whether the model that is made has weights in TT form already.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    optimised: bool = False


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model gave, or the mean square of its output."""
    loss: Tensor | None = getattr(output, "loss", None)
    return cast(Tensor, output).square().mean() if loss is None else loss


def ids(num_samples: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    """Return random tokens (B, T)."""
    return torch.randint(VOCABULARY, (num_samples, num_tokens))


def bert(**settings: Any) -> nn.Module:
    """Return a BERT that classifies sequences."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FFN_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        max_position_embeddings=4 * NUM_TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **settings,
    )
    return BertForSequenceClassification(config)


def gpt2(**settings: Any) -> nn.Module:
    """Return a GPT-2 whose head is not tied to its table."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=4 * NUM_TOKENS,
        n_embd=WIDTH,
        n_layer=2,
        n_head=NUM_HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **settings},
    )
    return GPT2LMHeadModel(config)


def llama(**settings: Any) -> nn.Module:
    """Return a Llama with grouped keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FFN_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=1,
        max_position_embeddings=4 * NUM_TOKENS,
        pad_token_id=0,
        **settings,
    )
    return LlamaForCausalLM(config)


def vit(**settings: Any) -> nn.Module:
    """Return a ViT that classifies images of 16 x 16 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=FFN_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **settings,
    )
    return ViTForImageClassification(config)


class TokenEncoder(nn.Module):
    """A table, an ``nn.TransformerEncoder`` and a head; ``forward`` gives logits (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, FFN_WIDTH, dropout=0.0, batch_first=True
        )
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits of each token."""
        logits_BTV: Tensor = self.head(self.encoder(self.table(ids_BT)))
        return logits_BTV


class FromCores(nn.Module):
    """A parametrization that makes a matrix from cores.

    Args:
        spec: Shape of the cores.
    """

    def __init__(self, spec: TTSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *cores: Tensor) -> Tensor:
        """Return the matrix (out, in)."""
        spec = self.spec
        weight: Tensor = torch.ops.comera_fx.tt_dense.default(
            list(cores), spec.layout, len(spec.in_modes), spec.in_size, spec.out_size
        )
        return weight

    def right_inverse(self, weight: Tensor) -> list[Tensor]:
        """Return random cores, whatever the matrix was."""
        generator = torch.Generator().manual_seed(0)
        return random_cores(self.spec, float(weight.std()), generator=generator)


def encoder_from_cores() -> nn.Module:
    """Return a ``TokenEncoder`` whose encoder reads matrices that are made from cores."""
    model = TokenEncoder()
    modes = {WIDTH: (8, 4), FFN_WIDTH: (8, 8), 3 * WIDTH: (12, 8)}
    for layer in model.encoder.layers:
        for module, name in (
            (layer.self_attn, "in_proj_weight"),
            (layer.self_attn.out_proj, "weight"),
            (layer.linear1, "weight"),
            (layer.linear2, "weight"),
        ):
            num_rows, num_columns = getattr(module, name).shape
            spec = TTSpec("tt", modes[num_columns], modes[num_rows], (1, 4, 4, 4, 1))
            parametrize.register_parametrization(module, name, FromCores(spec), unsafe=True)
    return model


def _sequences(num_samples: int) -> Inputs:
    mask_BT = torch.ones(num_samples, NUM_TOKENS, dtype=torch.long)
    mask_BT[0, -2:] = 0
    return {
        "input_ids": ids(num_samples),
        "attention_mask": mask_BT,
        "labels": torch.randint(2, (num_samples,)),
    }


def _next_tokens(num_samples: int) -> Inputs:
    inputs = _sequences(num_samples)
    return {**inputs, "labels": inputs["input_ids"]}


def _images(num_samples: int) -> Inputs:
    return {
        "pixel_values": torch.randn(num_samples, 3, 16, 16),
        "labels": torch.randint(2, (num_samples,)),
    }


def _clicks(num_samples: int) -> Inputs:
    return {
        "dense_BN": torch.randn(num_samples, 4),
        "ids_BFH": torch.randint(30, (num_samples, 3, 2)),
    }


def _tokens(num_samples: int) -> Inputs:
    return {"ids_BT": ids(num_samples)}


def _pairs(num_samples: int) -> Inputs:
    ids_BT = ids(num_samples)
    return {"ids_BT": ids_BT, "types_BT": (ids_BT > VOCABULARY // 2).long()}


def _dlrm(*, bags: bool = False) -> nn.Module:
    return DLRM(4, [64, 100, 30], 16, (WIDTH,), (WIDTH,), bags=bags)


def _six_encoder() -> nn.Module:
    return SixEncoder(
        width=WIDTH,
        ffn_width=FFN_WIDTH,
        num_heads=NUM_HEADS,
        vocabulary=VOCABULARY,
        max_tokens=2 * NUM_TOKENS,
    )


ZOO = (
    Entry("BERT", bert, _sequences),
    Entry("GPT-2", gpt2, _next_tokens),
    Entry("Llama", llama, _next_tokens),
    Entry("ViT", vit, _images),
    Entry("DLRM", _dlrm, _clicks),
    Entry("DLRM, nn.EmbeddingBag", lambda: _dlrm(bags=True), _clicks),
    Entry("nn.TransformerEncoder", TokenEncoder, _tokens),
    Entry("nn.TransformerEncoder, weights from cores", encoder_from_cores, _tokens, optimised=True),
    Entry("nanoGPT-like", lambda: Decoder(VOCABULARY, 2 * NUM_TOKENS, WIDTH, 2, 2), _tokens),
    Entry("six-encoder", _six_encoder, _pairs),
)
