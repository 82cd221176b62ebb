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
    """Post-norm encoder with a pooled classifier; ``forward`` gives logits (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(MAX_TOKENS, WIDTH)
        self.type_embedding = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.encoders = nn.ModuleList(Encoder() for _ in range(NUM_LAYERS))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, ids_BT: Tensor, types_BT: Tensor) -> Tensor:
        """Return the logits of each class."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.word_embedding(ids_BT) + self.position_embedding(positions_T)
        x_BTD = self.norm(x_BTD + self.type_embedding(types_BT))
        for encoder in self.encoders:
            x_BTD = encoder(x_BTD)
        pooled_BD = torch.tanh(self.pooler(x_BTD[:, 0]))
        logits_BC: Tensor = self.head(pooled_BD)
        return logits_BC


class Encoder(nn.Module):
    """Self-attention and a feed-forward part, a norm after each."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, FFN_WIDTH)
        self.down = nn.Linear(FFN_WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream (B, T, D)."""
        x_BTD = self.norm_1(x_BTD + self._attend(x_BTD))
        mixed_BTD: Tensor = self.norm_2(x_BTD + self.down(F.gelu(self.up(x_BTD))))
        return mixed_BTD

    def _attend(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (
            layer(x_BTD).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        attended_BTD: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return attended_BTD
