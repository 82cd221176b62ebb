"""The six-encoder at the sizes of the classification studies.

Shape legend: B examples, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from bench.data.tokens import NUM_TYPES, PADDING, Dataset, Part
from bench.models.six_encoder import SixEncoder
from comera_fx.errors import ConfigError

# Of BERT: the tables then turn within some hundred steps, those of N(0, 1) would hardly move.
TABLE_STD = 0.02


@dataclass(frozen=True)
class ClassifierSizes:
    """Sizes of a classifier and of the data that it reads.

    Args:
        width: Size of the stream.
        ffn_width: Hidden size of the feed-forward parts.
        num_heads: Attention heads of an encoder.
        num_layers: Number of encoders.
        vocabulary_size: Rows of the table of tokens.
        length: Tokens of an example.
    """

    width: int = 256
    ffn_width: int = 768
    num_heads: int = 4
    num_layers: int = 3
    vocabulary_size: int = 4096
    length: int = 40


QUICK_SIZES = ClassifierSizes(64, 128, 2, 1, vocabulary_size=1024, length=16)
CPU_SIZES = ClassifierSizes()
"""Small enough that 300 training steps of 32 examples take about a minute on one core."""
GPU_SIZES = ClassifierSizes(768, 3072, 12, 6, 30522, 64)
"""The paper's width, depth and vocabulary."""


def sizes_for(
    quick: bool, device: str, width: int | None = None, cpu_sizes: ClassifierSizes = CPU_SIZES
) -> ClassifierSizes:
    """Return the sizes of a study: the paper's on a GPU, unless it is to take seconds.

    Args:
        quick: Whether it is to take seconds, on any device.
        device: Where it trains.
        width: Instead of the usual one; the feed-forward parts follow.
        cpu_sizes: Those on a CPU.
    """
    sizes = cpu_sizes if torch.device(device).type == "cpu" else GPU_SIZES
    sizes = QUICK_SIZES if quick else sizes
    if width is None:
        return sizes
    return replace(sizes, width=width, ffn_width=sizes.ffn_width * width // sizes.width)


def build_classifier(sizes: ClassifierSizes, num_classes: int, dropout: float = 0.0) -> SixEncoder:
    """Return a dense classifier with random weights from torch's generator; seed it before.

    Raises:
        ConfigError: If the width does not split into the heads.

    Example:
        >>> sizes = ClassifierSizes(8, 16, num_heads=2, num_layers=1, vocabulary_size=300, length=6)
        >>> model = build_classifier(sizes, num_classes=3)
        >>> model(torch.ones(4, 6, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long)).shape
        torch.Size([4, 3])
    """
    if sizes.width % sizes.num_heads:
        raise ConfigError(
            "the classifier's stream does not split into its heads",
            got=f"width {sizes.width}, num_heads {sizes.num_heads}",
            expected="a width that num_heads divides",
            mend="choose another width or number of heads",
        )
    model = SixEncoder(
        dropout,
        width=sizes.width,
        ffn_width=sizes.ffn_width,
        num_heads=sizes.num_heads,
        num_layers=sizes.num_layers,
        vocabulary=sizes.vocabulary_size,
        max_tokens=sizes.length,
        num_classes=num_classes,
        padding=PADDING,
    )
    model.type_embedding = nn.Embedding(NUM_TYPES, sizes.width)
    for table in (model.word_embedding, model.position_embedding, model.type_embedding):
        nn.init.normal_(table.weight, std=TABLE_STD)
    return model


def check_fits(sizes: ClassifierSizes, data: Dataset) -> None:
    """Check that a classifier of these sizes can read a data set.

    Raises:
        ConfigError: If the data has other tokens or longer examples.
    """
    if data.vocabulary_size > sizes.vocabulary_size or data.length > sizes.length:
        raise ConfigError(
            f"{data.name} does not fit the classifier",
            got=f"ids below {data.vocabulary_size}, {data.length} tokens an example",
            expected=f"at most {sizes.vocabulary_size} ids and {sizes.length} tokens",
            mend="load the data with the classifier's vocabulary_size and length",
        )


@torch.no_grad()
def accuracy(model: nn.Module, part: Part, batch_size: int = 256) -> float:
    """Return the share of examples that a model gets right, without dropout.

    Args:
        model: Called with ids and types (B, T); its mode of training is put back.
        part: The examples, on the model's device.
        batch_size: Examples at a time.
    """
    was_training = model.training
    model.eval()
    try:
        right = sum(
            (model(*batch.inputs).argmax(-1) == batch.labels).sum()
            for batch in part.batches(batch_size)
        )
    finally:
        model.train(was_training)
    return float(right) / len(part)
