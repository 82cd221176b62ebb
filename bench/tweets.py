"""Small encoders of tweets: ways to train them compared, by accuracy of the sentiment told.

Appends to ``bench/results/studies/tweets.csv`` and writes a table and a figure beside it. Needs
the data of ``bench.data.tweets``. Run: ``python -m bench.tweets [--quick]``.
"""

from __future__ import annotations

from bench.data.tweets import load_tweets
from bench.study import main
from bench.study_classes import classification
from bench.study_task import Task

SIZES = {"width": 256, "ffn_width": 1024, "num_heads": 4, "num_layers": 4}
QUICK = {"width": 64, "ffn_width": 128, "num_heads": 2, "num_layers": 1}


def make_task(quick: bool = False, device: str = "cpu") -> Task:
    """Return the task, its tweets read."""
    if quick:
        data = load_tweets(vocabulary_size=1024, length=16)
        return classification("tweets", data, steps=12, batch_size=8, sizes=QUICK, device=device)
    data = load_tweets(length=48)
    return classification("tweets", data, steps=480, batch_size=32, sizes=SIZES, device=device)


if __name__ == "__main__":
    main("bench.tweets", __doc__)
