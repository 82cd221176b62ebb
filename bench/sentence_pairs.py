"""Small encoders of sentence pairs: ways to train them compared, by accuracy.

Pairs of definitions from WordNet, and whether the first follows from the second, as in the
CoMERA paper's MNLI. Appends to ``bench/results/studies/sentence_pairs.csv`` and writes a table
and a figure beside it. Needs the data of ``bench.data.wordnet``. Run:
``python -m bench.sentence_pairs [--quick]``.
"""

from __future__ import annotations

from bench.data.wordnet import PAIRS_A_LABEL, load_wordnet_pairs
from bench.models.classifier import CPU_SIZES, ClassifierSizes
from bench.study import main
from bench.study_classes import classification
from bench.study_task import Task

QUICK = ClassifierSizes(64, 128, 2, 1, vocabulary_size=1024, length=16)


def make_task(quick: bool = False, device: str = "cpu") -> Task:
    """Return the task, its pairs made."""
    sizes = QUICK if quick else CPU_SIZES
    data = load_wordnet_pairs(
        vocabulary_size=sizes.vocabulary_size,
        length=sizes.length,
        pairs_a_label=1 if quick else PAIRS_A_LABEL,
    )
    steps, batch_size = (12, 8) if quick else (960, 32)
    return classification(
        "sentence_pairs", data, steps=steps, batch_size=batch_size, sizes=sizes, device=device
    )


if __name__ == "__main__":
    main("bench.sentence_pairs", __doc__)
