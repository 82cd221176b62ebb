"""Small encoders of tweets: ways to train them compared, by accuracy of the sentiment told.

A tweet is negative, neutral or positive; an encoder trains from scratch on 29,620 of them and is
measured on 3,753 others, of which 0.44 are negative. With ``--device cuda`` it is the paper's
six-encoder. Compressed are the encoders, the pooler and the table of tokens.

Appends to ``bench/results/studies/tweets.csv`` and writes a table and a figure beside it. Needs
the data of ``bench.data.tweets``: ``make bench-data``. Run: ``python -m bench.tweets [--quick]``.
"""

from __future__ import annotations

from bench.data.tweets import load_tweets
from bench.models.classifier import CPU_SIZES, GPU_SIZES, QUICK_SIZES, sizes_for
from bench.study_classes import classification
from bench.study_command import main
from bench.study_task import Task

STEPS = {QUICK_SIZES: (12, 8), CPU_SIZES: (300, 32), GPU_SIZES: (900, 32)}
"""Steps of a run and examples of a step."""


def make_task(quick: bool = False, device: str = "cpu", width: int | None = None) -> Task:
    """Return the task, its tweets read."""
    sizes = sizes_for(quick, device, width)
    data = load_tweets(vocabulary_size=sizes.vocabulary_size, length=sizes.length)
    steps, batch_size = STEPS[sizes_for(quick, device)]
    return classification(
        "tweets", data, steps=steps, batch_size=batch_size, sizes=sizes, device=device
    )


if __name__ == "__main__":
    main("bench.tweets", __doc__)
