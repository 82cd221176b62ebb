"""Studies of text classification: an encoder of small sizes, measured by accuracy.

Shape legend: B examples, T tokens, C classes.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.data.tokens import Dataset
from bench.data.tokens import Part as Examples
from bench.models.classifier import ClassifierSizes, accuracy, build_classifier, check_fits
from bench.study_task import Part, Task
from comera_fx import OptimizeConfig, PlanConfig

MOST_EXAMPLES = 4096
"""Quality is measured on at most so many, spread evenly over a part of the data."""
TARGETS = ("word_embedding", "encoders.*", "pooler")


def classification(
    name: str,
    data: Dataset,
    *,
    steps: int,
    batch_size: int,
    sizes: ClassifierSizes,
    device: str = "cpu",
    dropout: float = 0.1,
) -> Task:
    """Return the task of telling the classes of texts; layers, pooler and table are compressed.

    Args:
        name: Its name in file names, tables and CSV rows.
        data: Texts as tokens.
        steps: Steps to take.
        batch_size: Examples of a step.
        sizes: Sizes of the encoder.
        device: Where it trains.
        dropout: Share of the stream that is dropped in training.

    Raises:
        ConfigError: If the encoder is too small for the data.
    """
    check_fits(sizes, data)
    data = data.to(device)
    measured = {"validation": _spread(data.validation), "test": _spread(data.test)}

    def evaluate(model: nn.Module, part: Part, share: float) -> float:
        examples = _spread(measured[part], max(1, round(share * len(measured[part]))))
        # As many at a time as in training, or the peak of memory would be in here.
        return accuracy(model, examples, batch_size)

    return Task(
        name=name,
        quality="test accuracy",
        better="higher",
        steps=steps,
        build=lambda: build_classifier(sizes, data.num_classes, dropout),
        batch=lambda seed, step: data.batch(seed, step, batch_size),
        loss=class_loss,
        evaluate=evaluate,
        config=OptimizeConfig(
            targets=TARGETS,
            min_params=0,
            # In "ttm" tokens share so much that accuracy falls.
            layouts={"word_embedding": "tt"},
            plan=PlanConfig(objective="time"),
        ),
        inputs=data.train.rows(slice(0, batch_size)).inputs,
        settings={
            "data": data.digest,
            "batch_size": batch_size,
            "dropout": dropout,
            "most": MOST_EXAMPLES,
            **asdict(sizes),
        },
        device=device,
        warmup_steps=max(1, steps // 12),
    )


def class_loss(model: nn.Module, batch: Examples) -> Tensor:
    """Return the mean cross-entropy over a batch."""
    logits_BC: Tensor = model(*batch.inputs)
    return F.cross_entropy(logits_BC, batch.labels)


def _spread(examples: Examples, most: int = MOST_EXAMPLES) -> Examples:
    count = min(most, len(examples))
    places = torch.arange(count, device=examples.labels.device)
    return examples.rows(places * len(examples) // count)
