"""Small encoders of sentence pairs: ways to train them compared, by accuracy.

Pairs of nouns with their definitions from WordNet: is the first a kind of the second
(entailment), another kind beside it (contradiction), or neither (neutral)? Three classes, as in
the CoMERA paper's MNLI, a third of the pairs each. The encoder trains from scratch; token types
tell it which tokens the two texts share, without which a small one stays near chance in some
hundred steps. With ``--device cuda`` it is the paper's six-encoder.
Compressed are the encoders, the pooler and the table of tokens.

Appends to ``bench/results/studies/sentence_pairs.csv`` and writes a table and a figure beside it.
Needs the data of ``bench.data.wordnet``: ``make bench-data``. Run:
``python -m bench.sentence_pairs [--quick]``.
"""

from __future__ import annotations

from dataclasses import replace

from bench.data.wordnet import PAIRS_A_LABEL, load_wordnet_pairs
from bench.models.classifier import CPU_SIZES, GPU_SIZES, QUICK_SIZES, sizes_for
from bench.study_classes import classification
from bench.study_command import main
from bench.study_task import Task

SIZES = replace(CPU_SIZES, width=192, ffn_width=576, num_layers=6, length=32)
"""On a CPU: the paper's six encoders; a third of the pairs is cut to so few tokens."""
STEPS = {QUICK_SIZES: (12, 8), SIZES: (400, 32), GPU_SIZES: (2400, 32)}
"""Steps of a run and examples of a step."""


def make_task(quick: bool = False, device: str = "cpu", width: int | None = None) -> Task:
    """Return the task, its pairs made."""
    usual = sizes_for(quick, device, cpu_sizes=SIZES)
    sizes = sizes_for(quick, device, width, SIZES)
    data = load_wordnet_pairs(
        vocabulary_size=sizes.vocabulary_size,
        length=sizes.length,
        # No pair is met twice in three times the steps; more would only take longer to make.
        pairs_a_label=PAIRS_A_LABEL if usual == GPU_SIZES else 1,
    )
    steps, batch_size = STEPS[usual]
    return classification(
        "sentence_pairs", data, steps=steps, batch_size=batch_size, sizes=sizes, device=device
    )


if __name__ == "__main__":
    main("bench.sentence_pairs", __doc__)
