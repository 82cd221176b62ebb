"""A small decoder transformer in plain PyTorch, as a user would write it.

Shape legend: B sequences, T positions, D features, H heads, V size of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_fx.demo.config import VOCABULARY, DemoConfig


class Decoder(nn.Module):
    """Pre-norm decoder over bytes, with learned positions; ``forward`` gives logits (B, T, V)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._reset(config.num_layers)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits of each next byte."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def _reset(self, num_layers: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # What is added to the stream is drawn smaller, so that depth does not widen it.
                adds = name.endswith(("proj", "down"))
                nn.init.normal_(module.weight, std=0.02 / (2 * num_layers) ** (0.5 * adds))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Causal self-attention, then a feed-forward part, each added to the stream."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream (B, T, D) with what this block adds."""
        x_BTD = x_BTD + self._attend(self.norm_1(x_BTD))
        added_BTD: Tensor = self.down(F.gelu(self.up(self.norm_2(x_BTD))))
        return x_BTD + added_BTD

    def _attend(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.movedim(2, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        added_BTD: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return added_BTD


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats a byte, over a batch of shape (B, T + 1)."""
    logits_BTV: Tensor = model(batch[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch[:, 1:].flatten())
