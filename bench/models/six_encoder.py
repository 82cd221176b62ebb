"""The CoMERA paper's six-encoder sentence-pair classifier, in plain PyTorch.

Shape legend: B sentences pairs, T tokens, D features, C classes.

Source:
    Yang et al., "CoMERA", NeurIPS 2024, section 5.1 and appendix (sizes as listed there).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_fx import OptimizeConfig

WIDTH, FFN_WIDTH, NUM_HEADS, NUM_LAYERS = 768, 3072, 12, 6
VOCABULARY, MAX_TOKENS, NUM_CLASSES = 30522, 512, 3

PAPER_CONFIG = OptimizeConfig(
    init="random",
    max_rank=30,
    ranks={"word_embedding": 32},
    modes={
        "word_embedding": ((16, 20, 10, 10), (4, 4, 8, 6)),
        "encoders.*.up": ((12, 8, 8), (12, 16, 16)),
        "encoders.*.down": ((16, 16, 12), (8, 8, 12)),
        "encoders.*": ((12, 8, 8), (8, 8, 12)),
        "pooler": ((12, 8, 8), (8, 8, 12)),
    },
    exclude=("position_embedding",),
)
"""The paper's modes and ranks; positions, token types and the head stay dense there."""


class SixEncoder(nn.Module):
    """Post-norm encoder with a pooled classifier; ``forward`` gives logits (B, C).

    The paper's sizes, unless others are given.

    Args:
        dropout: Share of the stream that is dropped after the embeddings, after attention and
            after each feed-forward part; attention itself has none, so that it stays fused.
        width: Size of the stream.
        ffn_width: Hidden size of the feed-forward parts.
        num_heads: Attention heads of an encoder.
        num_layers: Number of encoders.
        vocabulary: Number of tokens.
        max_tokens: Most positions.
        num_classes: Number of classes.
        padding: The token that no other one attends to; without one, all are attended to.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        width: int = WIDTH,
        ffn_width: int = FFN_WIDTH,
        num_heads: int = NUM_HEADS,
        num_layers: int = NUM_LAYERS,
        vocabulary: int = VOCABULARY,
        max_tokens: int = MAX_TOKENS,
        num_classes: int = NUM_CLASSES,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.padding = padding
        self.word_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(max_tokens, width)
        self.type_embedding = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.encoders = nn.ModuleList(
            Encoder(width, ffn_width, num_heads, dropout) for _ in range(num_layers)
        )
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, ids_BT: Tensor, types_BT: Tensor) -> Tensor:
        """Return the logits of each class."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.word_embedding(ids_BT) + self.position_embedding(positions_T)
        x_BTD = self.dropout(self.norm(x_BTD + self.type_embedding(types_BT)))
        is_read = None if self.padding is None else (ids_BT != self.padding)[:, None, None, :]
        for encoder in self.encoders:
            x_BTD = encoder(x_BTD, is_read)
        pooled_BD = torch.tanh(self.pooler(x_BTD[:, 0]))
        logits_BC: Tensor = self.head(pooled_BD)
        return logits_BC


class Encoder(nn.Module):
    """Self-attention and a feed-forward part, a norm after each.

    Args:
        width: Size of the stream.
        ffn_width: Hidden size of the feed-forward part.
        num_heads: Attention heads.
        dropout: Share that is dropped of what each of the two adds.
    """

    def __init__(self, width: int, ffn_width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.norm_1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, ffn_width)
        self.down = nn.Linear(ffn_width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, is_read: Tensor | None = None) -> Tensor:
        """Return the stream (B, T, D).

        Args:
            x_BTD: The stream.
            is_read: Which tokens are attended to (B, 1, 1, T); all of them, if ``None``.
        """
        x_BTD = self.norm_1(x_BTD + self.dropout(self._attend(x_BTD, is_read)))
        fed_BTD = self.down(F.gelu(self.up(x_BTD)))
        mixed_BTD: Tensor = self.norm_2(x_BTD + self.dropout(fed_BTD))
        return mixed_BTD

    def _attend(self, x_BTD: Tensor, is_read: Tensor | None) -> Tensor:
        query, key, value = (
            layer(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=is_read)
        attended_BTD: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return attended_BTD
