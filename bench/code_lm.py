"""Small language models of Python source: ways to train them compared, by held-out loss.

The demo's decoder reads the bytes of Python's own standard library. Compressed are the linear
layers of its blocks. Appends to ``bench/results/studies/code_lm.csv`` and writes a table and a
figure beside it. Run: ``python -m bench.code_lm [--quick]``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from bench.study_command import main
from bench.study_task import Part, Task
from comera_fx import OptimizeConfig, PlanConfig
from comera_fx.demo.config import DemoConfig
from comera_fx.demo.data import Corpus, held_out_batches, load_corpus, train_batch
from comera_fx.demo.model import Decoder, next_byte_loss

VALIDATION_SHARE = 20
"""One byte in so many of the training text, those at its end, is for choosing rates."""
QUICK = DemoConfig(
    steps=12,
    batch_size=4,
    context=32,
    width=64,
    num_layers=2,
    num_heads=2,
    ffn_width=128,
    warmup_steps=2,
    held_out_batches=2,
    held_out_batch_size=4,
    max_files=60,
)
SIZES = (
    *("batch_size", "context", "width", "num_layers", "num_heads", "ffn_width"),
    *("held_out_batches", "held_out_batch_size"),
)


def make_task(quick: bool = False, device: str = "cpu", width: int | None = None) -> Task:
    """Return the task, its text read."""
    config = QUICK if quick else DemoConfig()
    if width is not None:
        config = replace(config, width=width, ffn_width=4 * width)
    corpus, validation = split(load_corpus(config))
    held_out = {
        "validation": [batch.to(device) for batch in held_out_batches(validation, config)],
        "test": [batch.to(device) for batch in held_out_batches(corpus, config)],
    }

    def batch(seed: int, step: int) -> Tensor:
        return train_batch(corpus, step, replace(config, seed=seed)).to(device)

    def evaluate(model: nn.Module, part: Part, share: float) -> float:
        batches = held_out[part][: max(1, round(share * len(held_out[part])))]
        # As many sequences at a time as in training, or the peak of memory would be in here.
        pieces = [piece for each in batches for piece in each.split(config.batch_size)]
        return sum(next_byte_loss(model, each).item() * len(each) for each in pieces) / sum(
            map(len, pieces)
        )

    return Task(
        name="code_lm",
        quality="held-out loss, nats a byte",
        better="lower",
        steps=config.steps,
        build=lambda: Decoder(config),
        batch=batch,
        loss=next_byte_loss,
        evaluate=evaluate,
        config=OptimizeConfig(
            targets=("blocks.*",), min_params=0, plan=PlanConfig(objective="time")
        ),
        inputs=(torch.zeros(config.batch_size, config.context, dtype=torch.long, device=device),),
        settings={"corpus": corpus.digest, **{name: getattr(config, name) for name in SIZES}},
        device=device,
        clip_norm=config.clip_norm,
        warmup_steps=config.warmup_steps,
        final_rate=config.final_lr,
    )


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Return the corpus with less to train on, and one whose held-out text is what it lacks."""
    kept = len(corpus.train) - len(corpus.train) // VALIDATION_SHARE
    train, validation = corpus.train[:kept], corpus.train[kept:]
    return replace(corpus, train=train), replace(corpus, train=train, held_out=validation)


if __name__ == "__main__":
    main("bench.code_lm", __doc__)
