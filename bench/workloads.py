"""Sizes that the benchmarks run at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Training:
    """A network of which training steps are timed.

    Args:
        name: Its name on the command line, in tables and CSV rows.
        network: Which network it is, by the name that ``bench.tasks`` knows it by.
        batch: Samples of a step.
        length: Tokens of a sample, where it has tokens.
        rounds: Least number of measured turns; more are made where they take little time.
        dropout: Share that is dropped while steps are timed; none while losses are compared.
        twice: Whether each turn runs a step untimed before the one that counts.
        sizes: The network's sizes, where they are not its own defaults.
    """

    name: str
    network: str
    batch: int
    length: int = 1
    rounds: int = 5
    dropout: float = 0.0
    twice: bool = True
    sizes: Mapping[str, Any] = field(default_factory=dict)


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

TRAINING = (
    Training("six-32", "six_encoder", 32, 128, rounds=3, dropout=0.1, twice=False),
    Training("six-1", "six_encoder", 1, 128, dropout=0.1),
    Training(
        "decoder",
        "decoder",
        8,
        128,
        sizes={
            "vocabulary": 8192,
            "context": 128,
            "width": 512,
            "num_layers": 6,
            "num_heads": 8,
        },
    ),
    Training(
        "dlrm",
        "dlrm",
        2048,
        sizes={
            "num_dense": 13,
            "tables": (40_000, 20_000, 10_000, 4_000, 1_000, 200, 50, 10),
            "width": 64,
        },
    ),
    Training("stack", "stack", 16, sizes={"spec": SQUARE, "depth": STACK_DEPTH}),
)

SMALL_TRAINING = (
    Training(
        "six-32",
        "six_encoder",
        3,
        8,
        rounds=2,
        dropout=0.1,
        twice=False,
        sizes={
            "width": 32,
            "ffn_width": 64,
            "num_heads": 2,
            "num_layers": 2,
            "vocabulary": 64,
            "max_tokens": 16,
        },
    ),
    Training(
        "decoder",
        "decoder",
        2,
        8,
        rounds=2,
        sizes={"vocabulary": 64, "context": 8, "width": 32, "num_layers": 2, "num_heads": 2},
    ),
    Training(
        "dlrm",
        "dlrm",
        16,
        rounds=2,
        sizes={
            "num_dense": 4,
            "tables": (64, 32, 8),
            "width": 16,
            "bottom": (32,),
            "top": (32,),
        },
    ),
    Training(
        "stack",
        "stack",
        4,
        rounds=2,
        sizes={"spec": TTSpec("tt", (4, 4), (4, 4), (1, 3, 4, 3, 1)), "depth": 3},
    ),
)
"""The same networks at sizes that take no time, to see that everything runs."""
