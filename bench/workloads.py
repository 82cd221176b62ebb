"""Sizes that the benchmarks run at."""

from __future__ import annotations

from dataclasses import dataclass

from comera_fx import TTSpec


@dataclass(frozen=True)
class Workload:
    """One linear layer at one batch.

    Args:
        name: The layer's name in tables and CSV rows.
        spec: Its shape in TT form.
        num_tokens: Rows of input.
        trains: Whether gradients are computed; if not, the layer runs forward only.
    """

    name: str
    spec: TTSpec
    num_tokens: int
    trains: bool = True


@dataclass(frozen=True)
class Decoding:
    """A decoder that writes one token at a time.

    Args:
        width: Size of the stream.
        num_layers: Number of blocks.
        num_heads: Attention heads of a block.
        vocabulary: Number of tokens; small, so that the blocks are what takes the time.
        context: Most tokens that the decoder can hold.
        num_new: Tokens to write after a prompt of one.
        max_rank: Largest rank of the optimised decoder.
    """

    width: int = 768
    num_layers: int = 4
    num_heads: int = 12
    vocabulary: int = 256
    context: int = 128
    num_new: int = 64
    max_rank: int = 30


# The paper's layers: an encoder's square ones, its feed-forward part, a large one in decoding.
SQUARE = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
WIDE = TTSpec("tt", (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
HUGE = TTSpec("tt", (8, 8, 8, 8), (8, 8, 8, 8), (1, *[100] * 7, 1)).clipped()

TOKENS = (32, 512, 4096)
LAYERS = (
    *(Workload("768x768", SQUARE, tokens) for tokens in TOKENS),
    *(Workload("768x3072", WIDE, tokens) for tokens in TOKENS),
    Workload("4096x4096 forward", HUGE, 1, trains=False),
)

STACK_DEPTH = 24
STACK = tuple(Workload(f"{STACK_DEPTH} x 768x768", SQUARE, tokens) for tokens in (16, 128, 1024))

SHARE = tuple(Workload("q, k, v 768x768", SQUARE, tokens) for tokens in TOKENS)

DECODING = Decoding()

DEMO_TOKENS = 2048
_DEMO_SHAPES = {
    # Layers of the demo's decoder; the pruned ranks are those that a run of it left.
    "qkv": ((8, 8, 4), (8, 12, 8), (1, 8, 32, 32, 32, 8, 1)),
    "qkv pruned": ((8, 8, 4), (8, 12, 8), (1, 5, 32, 22, 28, 4, 1)),
    "up": ((8, 8, 4), (8, 16, 8), (1, 8, 32, 32, 32, 8, 1)),
    "up pruned": ((8, 8, 4), (8, 16, 8), (1, 7, 25, 20, 23, 6, 1)),
    "down": ((8, 16, 8), (4, 8, 8), (1, 8, 32, 32, 32, 8, 1)),
    "down pruned": ((8, 16, 8), (4, 8, 8), (1, 5, 17, 17, 25, 5, 1)),
}
DEMO = tuple(
    Workload(name, TTSpec("tt", in_modes, out_modes, ranks), DEMO_TOKENS)
    for name, (in_modes, out_modes, ranks) in _DEMO_SHAPES.items()
)
