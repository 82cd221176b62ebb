"""The demo's text: the source files of Python's own standard library, read as bytes.

Shape legend: B sequences in a batch, T bytes in a sequence.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from comera_fx.demo.config import DemoConfig
from comera_fx.errors import InputError

# Tests repeat the text that they test; installed packages differ from machine to machine.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Corpus:
    """Text for training and text held out from it, which share no file.

    Args:
        train: Bytes to train on, one after the other, of dtype uint8.
        held_out: Bytes to measure on.
        train_files: Names of the files in ``train``, relative to the standard library.
        held_out_files: Names of the files in ``held_out``.
        digest: Changes when any of the text does.
    """

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    digest: str


def load_corpus(config: DemoConfig, root: Path | None = None) -> Corpus:
    """Read the corpus; nothing is downloaded.

    Args:
        config: Says how much is held out, and how many files are read.
        root: Folder to read; the standard library of the running Python if ``None``.

    Raises:
        InputError: If there is too little text for one sequence on either side of the split.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = source_files(root)[: config.max_files]
    train_files, held_out_files = split_files(names, config.held_out_every)
    train, held_out = (
        b"".join((root / name).read_bytes() for name in part)
        for part in (train_files, held_out_files)
    )
    least = min(len(train), len(held_out))
    if least <= config.context:
        raise InputError(
            f"there is too little Python source in {root} to train on",
            got=f"{len(names)} files; {len(train)} bytes to train on, {len(held_out)} held out",
            expected=f"more than {config.context} bytes on each side",
            mend="install the standard library's source files, or read more of them",
        )
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()
    return Corpus(_to_tensor(train), _to_tensor(held_out), train_files, held_out_files, digest)


def source_files(root: Path) -> list[str]:
    """Return the names of all ``.py`` files under ``root`` in sorted order, without tests."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if _LEFT_OUT.isdisjoint(path.parts))


def split_files(names: Iterable[str], every: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split files into training and held-out ones by a hash of their names.

    A file's side depends on its own name only: more files, or another order, moves none.
    """
    train: list[str] = []
    held_out: list[str] = []
    for name in names:
        (held_out if _hash(name) % every == 0 else train).append(name)
    return tuple(train), tuple(held_out)


def train_batch(corpus: Corpus, step: int, config: DemoConfig) -> Tensor:
    """Return the batch of a step as int64 of shape (B, T + 1): inputs, and targets one further.

    It is a function of seed and step alone, so a resumed run needs no state of a generator.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    last = len(corpus.train) - config.context
    starts = torch.randint(last, (config.batch_size,), generator=generator)
    return _windows(corpus.train, starts, config.context)


def held_out_batches(corpus: Corpus, config: DemoConfig) -> list[Tensor]:
    """Return the same evenly spread batches of held-out text every time, (B, T + 1) each."""
    last = len(corpus.held_out) - config.context
    count = config.held_out_batches * config.held_out_batch_size
    starts = torch.arange(count) * last // count
    # Neighbours in the text go to different batches, so that a single batch is a fair sample too.
    order = starts.view(config.held_out_batch_size, config.held_out_batches).T
    return [_windows(corpus.held_out, row, config.context) for row in order]


def _windows(text: Tensor, starts_B: Tensor, context: int) -> Tensor:
    return text[starts_B[:, None] + torch.arange(context + 1)].long()


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
