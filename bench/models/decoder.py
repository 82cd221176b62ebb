"""A GPT-like decoder that writes greedily, one token at a time, in plain PyTorch.

Shape legend: B sequences, T positions, D features, V size of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Cache:
    """Keys and values of the positions read so far, per block.

    Args:
        num_layers: Number of blocks.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._held: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values (B, heads, T, size) of new positions; return all there are."""
        held = self._held[layer]
        if held is not None:
            key, value = torch.cat([held[0], key], dim=2), torch.cat([held[1], value], dim=2)
        self._held[layer] = key, value
        return key, value


class Decoder(nn.Module):
    """Pre-norm decoder with learned positions; ``forward`` gives logits (B, T, V).

    Args:
        vocabulary: Number of tokens.
        context: Most positions.
        width: Size of the stream.
        num_layers: Number of blocks.
        num_heads: Attention heads of a block.
    """

    def __init__(
        self, vocabulary: int, context: int, width: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, k) for k in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of each next token.

        Args:
            ids_BT: The tokens; with a cache that holds some, the one that follows them.
            cache: What was read before; takes up what is read now.
        """
        cache = Cache(len(self.blocks)) if cache is None else cache
        end = cache.length + ids_BT.shape[1]
        positions_T = torch.arange(cache.length, end, device=ids_BT.device)
        x_BTD = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD, cache)
        cache.length = end
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    @torch.no_grad()
    def generate(self, prompt_BT: Tensor, num_new: int) -> Tensor:
        """Return the prompt with ``num_new`` tokens after it, each the likeliest one."""
        cache, ids_BT, new_BT = Cache(len(self.blocks)), prompt_BT, prompt_BT
        for _ in range(num_new):
            new_BT = self(new_BT, cache)[:, -1].argmax(-1, keepdim=True)
            ids_BT = torch.cat([ids_BT, new_BT], dim=1)
        return ids_BT


class Block(nn.Module):
    """Causal self-attention, then a feed-forward part, each added to the stream.

    Args:
        width: Size of the stream.
        num_heads: Attention heads.
        index: Which block it is: the cache's entry.
    """

    def __init__(self, width: int, num_heads: int, index: int) -> None:
        super().__init__()
        self.num_heads, self.index = num_heads, index
        self.norm_1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Return the stream (B, T, D) with what this block adds."""
        x_BTD = x_BTD + self._attend(self.norm_1(x_BTD), cache)
        added_BTD: Tensor = self.down(F.gelu(self.up(self.norm_2(x_BTD))))
        return x_BTD + added_BTD

    def _attend(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        query, key, value = (
            layer(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        is_first = cache.length == 0
        assert is_first or query.shape[2] == 1, "after the prompt, tokens come one at a time"
        key, value = cache.extend(self.index, key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_first)
        added_BTD: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return added_BTD
