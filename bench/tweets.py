"""Small encoders of tweets: ways to train them compared, by accuracy of the sentiment told.

Appends to ``bench/results/studies/tweets.csv`` and writes a table and a figure beside it. Needs
the data of ``bench.data.tweets``. Run: ``python -m bench.tweets [--quick]``.
"""

from __future__ import annotations

from bench.data.tweets import load_tweets
from bench.models.classifier import CPU_SIZES, ClassifierSizes
from bench.study import main
from bench.study_classes import classification
from bench.study_task import Task

QUICK = ClassifierSizes(64, 128, 2, 1, vocabulary_size=1024, length=16)


def make_task(quick: bool = False, device: str = "cpu") -> Task:
    """Return the task, its tweets read."""
    sizes = QUICK if quick else CPU_SIZES
    data = load_tweets(vocabulary_size=sizes.vocabulary_size, length=sizes.length)
    steps, batch_size = (12, 8) if quick else (480, 32)
    return classification(
        "tweets", data, steps=steps, batch_size=batch_size, sizes=sizes, device=device
    )


if __name__ == "__main__":
    main("bench.tweets", __doc__)
