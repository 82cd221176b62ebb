"""Texts and labels become tensors: a split by hash, byte-pair tokens, padding.

Shape legend: N examples of a part, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from comera_fx.errors import ConfigError, InputError

SPECIAL = ("[PAD]", "[CLS]", "[SEP]")
PADDING, START, SEPARATOR = range(3)
"""Ids that are no part of a text: ``PADDING`` fills up, ``START`` is what the classifier reads."""
VOCABULARY_SIZE, LENGTH = 8192, 64
NUM_TYPES = 4
"""Of a token: in which text it is, and whether the other text of a pair has it too."""
# START, two separators, and a token of each text; every byte.
LEAST_LENGTH, LEAST_VOCABULARY = 5, len(SPECIAL) + 256
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Example:
    """One or two texts and what they are.

    Args:
        texts: A text, or a pair of them.
        label: Index of its class.
        group: Examples of equal groups are put into the same part of the data.
    """

    texts: tuple[str, ...]
    label: int
    group: str


@dataclass(frozen=True)
class Part:
    """Examples of one part of the data.

    Args:
        ids: Tokens of each example (N, T), ``PADDING`` after its last one, int64.
        types: 1 at the tokens of a pair's second text, 0 at all others; 2 more where the token
            occurs in the other text of the pair as well (N, T), int64.
        labels: Index of each class (N,), int64.
    """

    ids: Tensor
    types: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """What a model is called with: ids and types."""
        return self.ids, self.types

    def rows(self, index: Tensor | slice) -> Part:
        """Return some of the examples."""
        return Part(self.ids[index], self.types[index], self.labels[index])

    def batches(self, batch_size: int) -> Iterator[Part]:
        """Return all examples in their order, ``batch_size`` at a time; the last may be fewer."""
        return (self.rows(slice(k, k + batch_size)) for k in range(0, len(self), batch_size))

    def to(self, device: torch.device | str) -> Part:
        """Return the examples on a device."""
        return Part(self.ids.to(device), self.types.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A text classification task as tensors.

    Args:
        name: Its name in tables.
        train: Examples to train on.
        validation: Examples to choose settings by.
        test: Examples to report.
        class_names: Names of the classes, in the order of their labels.
        vocabulary_size: Rows that a table of tokens needs: every id is below it.
        digest: Changes when any token, label or class name does.
    """

    name: str
    train: Part
    validation: Part
    test: Part
    class_names: tuple[str, ...]
    vocabulary_size: int
    digest: str

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def length(self) -> int:
        """Tokens of an example, with its padding."""
        return self.train.ids.shape[1]

    def to(self, device: torch.device | str) -> Dataset:
        """Return the data on a device; batches are then made there."""
        parts = {name: getattr(self, name).to(device) for name in PARTS}
        return replace(self, **parts)

    def batch(self, seed: int, step: int, batch_size: int) -> Part:
        """Return the training batch of a step.

        It is a function of the arguments alone, so a resumed run needs no state of a generator.
        Each pass over the data is in an order of its own and shows no example twice; what is left
        over at its end, fewer examples than a batch, is not shown in that pass.

        Raises:
            ConfigError: If the batch is empty or larger than the training part.
        """
        num = len(self.train)
        if not 1 <= batch_size <= num:
            raise ConfigError(
                f"a batch of {self.name} cannot be made",
                got=f"batch_size {batch_size}",
                expected=f"from 1 to the {num} training examples",
                mend="choose another batch size",
            )
        epoch, place = divmod(step, num // batch_size)
        chosen = _order(num, seed, epoch)[place * batch_size : (place + 1) * batch_size]
        return self.train.rows(chosen.to(self.train.labels.device))


def make_dataset(
    name: str,
    examples: Sequence[Example],
    class_names: tuple[str, ...],
    *,
    vocabulary_size: int = VOCABULARY_SIZE,
    length: int = LENGTH,
) -> Dataset:
    """Split examples, learn a vocabulary from the training part alone, and encode them all.

    A text becomes ``[CLS] text [SEP]``, a pair ``[CLS] first [SEP] second [SEP]``; the longer text
    of a pair is cut first. Texts are lower-cased and rid of accents; every text has tokens, since
    single bytes are such. The types of a pair's tokens tell an encoder without pre-training which
    words its two texts share.

    Source:
        The marks: Chen et al., "Reading Wikipedia to Answer Open-Domain Questions", ACL 2017,
        section 3.2 ("exact match"), from memory.

    Args:
        name: The task's name in tables and messages.
        examples: All of them, in an order that does not change from run to run.
        class_names: Names of the classes.
        vocabulary_size: Most tokens; the data's ``vocabulary_size``.
        length: Tokens of each example, cut or padded.

    Raises:
        ConfigError: If the length or the vocabulary is too small.
        InputError: If a part of the split has no example.
    """
    _check(name, vocabulary_size, length)
    parts = {part: [e for e in examples if part_of(e.group) == part] for part in PARTS}
    if not all(parts.values()):
        raise InputError(
            f"{name} has too few examples to split",
            got=", ".join(f"{len(parts[part])} for {part}" for part in PARTS),
            expected="at least one for each",
            mend="read a larger file",
        )
    tokenizer = learn_tokenizer(_distinct(parts["train"]), vocabulary_size)
    train, validation, test = (encode(tokenizer, parts[part], length) for part in PARTS)
    digest = _digest((train, validation, test), class_names)
    return Dataset(name, train, validation, test, class_names, vocabulary_size, digest)


def part_of(group: str) -> str:
    """Return the part that a group is in: a tenth is for validation, another one for test.

    It depends on the group's own text only: other examples, or another order, move none.
    """
    number = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") % 10
    return {0: "test", 1: "validation"}.get(number, "train")


def learn_tokenizer(texts: Sequence[str], vocabulary_size: int) -> Tokenizer:
    """Return a tokenizer whose tokens are the byte pairs that are frequent in texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    # Not WordPiece: the ids that its trainer gives differ from process to process.
    trainer = BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() <= vocabulary_size
    return tokenizer


def encode(tokenizer: Tokenizer, examples: Sequence[Example], length: int) -> Part:
    """Return examples as tensors, each cut or padded to ``length`` tokens."""
    texts = _distinct(examples)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    tokens = {text: encoding.ids for text, encoding in zip(texts, encodings, strict=True)}
    rows = [arrange([tokens[text] for text in example.texts], length) for example in examples]
    return Part(
        torch.tensor([ids for ids, _ in rows]),
        torch.tensor([types for _, types in rows]),
        torch.tensor([example.label for example in examples]),
    )


def arrange(texts: Sequence[Sequence[int]], length: int) -> tuple[list[int], list[int]]:
    """Return ids and types of an example of one or two texts, ``length`` of each.

    Only tokens that are kept count as occurring in the other text.

    Example:
        >>> arrange([[7, 8, 9], [8]], 8)
        ([1, 7, 8, 9, 2, 8, 2, 0], [0, 0, 2, 0, 0, 3, 1, 0])
    """
    room = length - 1 - len(texts)
    shortest = min(map(len, texts))
    each = max(room // len(texts), room - shortest if len(texts) > 1 else room)
    kept = [text[:each] for text in texts]
    shared = set.intersection(*map(set, kept)) if len(kept) > 1 else set()
    ids, types = [START], [0]
    for place, text in enumerate(kept):
        ids += [*text, SEPARATOR]
        types += [*(place + 2 * (token in shared) for token in text), place]
    missing = length - len(ids)
    return ids + [PADDING] * missing, types + [0] * missing


def _distinct(examples: Iterable[Example]) -> list[str]:
    return list(dict.fromkeys(text for example in examples for text in example.texts))


def _check(name: str, vocabulary_size: int, length: int) -> None:
    if length < LEAST_LENGTH:
        raise ConfigError(
            f"examples of {name} cannot be cut to so few tokens",
            got=f"length {length}",
            expected=f"at least {LEAST_LENGTH}: [CLS] a [SEP] b [SEP]",
            mend="choose a larger length",
        )
    if vocabulary_size < LEAST_VOCABULARY:
        raise ConfigError(
            f"the vocabulary of {name} is too small",
            got=f"vocabulary_size {vocabulary_size}",
            expected=f"at least {LEAST_VOCABULARY}: {', '.join(SPECIAL)} and every byte",
            mend="choose a larger vocabulary",
        )


# Consecutive steps are of one pass, whose order would otherwise be drawn anew in each.
@lru_cache(maxsize=2)
def _order(num: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num, generator=generator)


def _digest(parts: Sequence[Part], class_names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr(class_names).encode())
    for part in parts:
        for tensor in (*part.inputs, part.labels):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
