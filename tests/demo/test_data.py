from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comera_fx.demo.config import DemoConfig
from comera_fx.demo.data import (
    held_out_batches,
    load_corpus,
    source_files,
    split_files,
    train_batch,
)
from comera_fx.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.py", "a.py", "pkg/c.py", "test/t.py", "pkg/tests/u.py", "site-packages/v.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "notes.txt").write_text("no source\n")
    return tmp_path


def test_source_files_are_sorted_and_without_tests_and_installed_packages(folder):
    assert source_files(folder) == ["a.py", "b.py", "pkg/c.py"]


def test_the_split_is_by_file_disjoint_and_complete():
    names = [f"pkg/{i}.py" for i in range(1000)]
    train, held_out = split_files(names, every=20)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(names)
    assert 25 <= len(held_out) <= 75
    assert (train, held_out) == split_files(names, every=20)


def test_a_file_keeps_its_side_when_others_come_and_go():
    names = [f"pkg/{i}.py" for i in range(200)]
    _, held_out = split_files(names, every=20)
    _, fewer = split_files(names[::-2], every=20)
    assert set(fewer) == set(held_out) & set(names[::-2])


def test_the_corpus_holds_the_text_of_its_files(folder):
    config = DemoConfig(context=4, held_out_every=3)
    corpus = load_corpus(config, folder)
    for text, names in (
        (corpus.train, corpus.train_files),
        (corpus.held_out, corpus.held_out_files),
    ):
        assert bytes(text.tolist()).decode() == "".join(f"# {name}\n" for name in names)
    assert load_corpus(config, folder).digest == corpus.digest
    (folder / "a.py").write_text("# changed\n")
    assert load_corpus(config, folder).digest != corpus.digest


def test_the_standard_library_is_enough_text():
    corpus = load_corpus(DemoConfig())
    assert len(corpus.train) > 5_000_000
    assert len(corpus.held_out) > 100_000
    assert "argparse.py" in corpus.train_files + corpus.held_out_files


def test_too_little_text_is_an_error(folder):
    with pytest.raises(InputError, match=r"too little Python source in .*\n  got:      3 files"):
        load_corpus(DemoConfig(context=128), folder)


def test_a_batch_depends_on_seed_and_step_alone(tiny, corpus):
    batch = train_batch(corpus, 5, tiny)
    assert batch.shape == (tiny.batch_size, tiny.context + 1)
    torch.manual_seed(99)
    assert torch.equal(batch, train_batch(corpus, 5, tiny))
    assert not torch.equal(batch, train_batch(corpus, 6, tiny))
    assert not torch.equal(batch, train_batch(corpus, 5, replace(tiny, seed=1)))


def test_rows_of_a_batch_are_pieces_of_the_text(tiny, corpus):
    text = bytes(corpus.train.tolist())
    for row in train_batch(corpus, 0, tiny):
        assert bytes(row.tolist()) in text


def test_held_out_batches_are_pieces_of_the_held_out_text(tiny, corpus):
    first, second = held_out_batches(corpus, tiny), held_out_batches(corpus, tiny)
    assert len(first) == tiny.held_out_batches
    text = bytes(corpus.held_out.tolist())
    for one, other in zip(first, second, strict=True):
        assert one.shape == (tiny.held_out_batch_size, tiny.context + 1)
        assert torch.equal(one, other)
        assert all(bytes(row.tolist()) in text for row in one)
