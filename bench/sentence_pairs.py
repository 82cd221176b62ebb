"""Small encoders of sentence pairs: ways to train them compared, by accuracy.

Pairs of definitions from WordNet, and whether the first follows from the second, as in the
CoMERA paper's MNLI. Appends to ``bench/results/studies/sentence_pairs.csv`` and writes a table
and a figure beside it. Needs the data of ``bench.data.wordnet``. Run:
``python -m bench.sentence_pairs [--quick]``.
"""

from __future__ import annotations

from bench.data.wordnet import load_wordnet_pairs
from bench.study import main
from bench.study_classes import classification
from bench.study_task import Task

NAME = "sentence_pairs"
SIZES = {"width": 256, "ffn_width": 1024, "num_heads": 4, "num_layers": 6}
QUICK = {"width": 64, "ffn_width": 128, "num_heads": 2, "num_layers": 1}


def make_task(quick: bool = False, device: str = "cpu") -> Task:
    """Return the task, its pairs made."""
    if quick:
        data = load_wordnet_pairs(vocabulary_size=1024, length=16, pairs_a_label=1)
        return classification(NAME, data, steps=12, batch_size=8, sizes=QUICK, device=device)
    data = load_wordnet_pairs()
    return classification(NAME, data, steps=960, batch_size=32, sizes=SIZES, device=device)


if __name__ == "__main__":
    main("bench.sentence_pairs", __doc__)
