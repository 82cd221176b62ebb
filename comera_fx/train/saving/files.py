"""Files that are whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import contextlib
import glob
import io
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from comera_fx.errors import RankError

_READABLE = frozenset({dict, list, tuple, Tensor, str, int, float, bool, type(None)})
_NUMBERED = re.compile(r"step-(\d+)\.pt")


def write_atomically(path: Path, state: Any) -> None:
    """Write ``state`` with ``torch.save``; a stop at any moment leaves the old file or the new.

    The draft lies beside ``path`` and is renamed once it is on the disk and can be read back.
    Drafts of writes that were killed are removed.

    Args:
        path: The file; its folder is there.
        state: What ``torch.load(weights_only=True)`` reads: tensors, numbers, text, lists, dicts.

    Raises:
        RankError: If it could not be read back. The old file stays.
    """
    remove_drafts(path.parent, glob.escape(path.name))
    draft = path.with_name(f"{path.name}.{uuid4().hex[:12]}.tmp")
    try:
        _save(state, draft)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read_state(path: Path, map_location: Any = "cpu") -> Any:
    """Return what ``write_atomically`` wrote; the file's checksums are compared.

    Raises:
        RankError: If there is no such file, or it is cut short, damaged or of another kind.
    """
    if not path.is_file():
        raise RankError(
            "there is no checkpoint",
            got=f"no file {path}",
            expected="a file that save_run wrote",
            mend="correct the path, or leave out load_run where a run begins",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            return torch.load(path, map_location=map_location, weights_only=True)
        fault = f"its record {damaged!r} has changed since it was written"
    except OSError:
        raise
    except Exception as error:  # a damaged file makes readers raise anything
        fault = f"{type(error).__name__}, {_first_line(error)}"
    raise RankError(
        f"{path} cannot be read as a checkpoint",
        got=fault,
        expected="a whole file that save_run wrote",
        mend="load another one, such as an earlier one of its folder",
    )


def numbered(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in a folder of several."""
    return folder / f"step-{step:09d}.pt"


def numbered_in(folder: Path) -> dict[int, Path]:
    """Return step to path for the checkpoints of a folder, in rising order."""
    found = ((_NUMBERED.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def remove_drafts(folder: Path, pattern: str) -> None:
    """Remove what killed writes of files of this pattern have left."""
    for draft in folder.glob(f"{pattern}.{'[0-9a-f]' * 12}.tmp"):
        draft.unlink(missing_ok=True)


def _save(state: Any, draft: Path) -> None:
    try:
        torch.save(state, draft)
        torch.load(draft, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise RankError(
            "the run holds something that torch.load(weights_only=True) would refuse to read",
            got=f"{_unreadable(state)}: {_first_line(error)}",
            expected="tensors, numbers, text, None, and lists and dicts of them",
            mend="give it a state_dict of such values, or leave it out of the checkpoint",
        ) from error


def _unreadable(state: Any, place: str = "") -> str | None:
    """Name the innermost entry that cannot be written and read back, and its type."""
    entries: Any = ()
    if isinstance(state, dict):
        entries = state.items()
    elif isinstance(state, (list, tuple)):
        entries = enumerate(state)
    for key, value in entries:
        found = _unreadable(value, f"{place}[{key!r}]" if place else str(key))
        if found is not None:
            return found
    if type(state) in _READABLE or _reads_back(state):
        return None
    return f"{place}, a {type(state).__name__}"


def _reads_back(value: Any) -> bool:
    stored = io.BytesIO()
    try:
        torch.save(value, stored)
        stored.seek(0)
        torch.load(stored, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk too, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with contextlib.suppress(OSError):  # some network file systems refuse; the rename is done
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
