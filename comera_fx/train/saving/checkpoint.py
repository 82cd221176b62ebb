"""Runs that go on after a kill: everything a training loop holds, in one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from comera_fx.errors import RankError
from comera_fx.train.caller import warn
from comera_fx.train.processes import unwrapped
from comera_fx.train.ranks import RankAdapter
from comera_fx.train.saving.files import (
    numbered,
    numbered_in,
    read_state,
    remove_drafts,
    write_atomically,
)
from comera_fx.train.saving.random_states import random_states, restore_random_states
from comera_fx.train.saving.run_checks import (
    FORMAT,
    VERSION,
    Saved,
    check_format,
    check_names,
    check_part,
    check_request,
    checked_path,
    held_names,
)


class Stateful(Protocol):
    """Anything that can be saved and resumed, such as a sampler."""

    def state_dict(self) -> Any:
        """Return values that ``torch.load(weights_only=True)`` reads."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from ``state_dict``."""


ORDER = (nn.Module, torch.optim.Optimizer, RankAdapter)
"""What is loaded first, next and then, before everything else."""
ALIKE = 2
"""So many kinds of ``ORDER`` are the same in all processes."""
Part = nn.Module | torch.optim.Optimizer | torch.Generator | Stateful


@dataclass(frozen=True)
class SavedRun:
    """Where a run that was loaded stands.

    Attributes:
        step: As given to ``save_run``.
        extra: As given to ``save_run``.
        path: The file it was read from.
    """

    step: int
    extra: Any
    path: Path


def save_run(
    path: str | os.PathLike[str],
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    **parts: Part | Sequence[Part] | None,
) -> Path:
    """Save a run between two steps, so that a kill at any moment leaves a whole checkpoint.

    Random states are saved too: of PyTorch on the CPU and on CUDA devices, of Python's
    ``random``, and of NumPy where it is loaded. Gradients are not. Under ``torch.distributed`` all
    processes call it; the first one writes and all wait for it. Models, optimizers and ``extra``
    are those of the first; of everything else each process has its own, and gets it back.

    Args:
        path: The file to write or replace; with ``keep``, the folder of numbered files. A folder
            that is missing is made.
        step: Steps taken so far.
        extra: More to remember, such as an epoch; numbers, text, tensors, and lists and dicts.
        keep: Keep so many checkpoints in the folder, this one and those of the last steps before.
        parts: What has a ``state_dict``, by names of your choice; also ``torch.Generator``, and
            lists of such. Those that are ``None`` are left out. Compiled models and models in
            ``DistributedDataParallel`` are saved as the model within.

    Returns:
        The file that was written.

    Raises:
        RankError: If a part has no state, nothing is given, the path is of the wrong kind, or
            something could not be read back. What was saved before stays.

    Example:
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
        >>> adapter = RankAdapter(model, optimizer)
        >>> parts = {"model": model, "optimizer": optimizer, "adapter": adapter}
        >>> save_run("runs/first", step=100, keep=3, **parts).name
        'step-000000100.pt'
        >>> load_run("runs/first", **parts).step
        100
    """
    path = checked_path(path)
    held = _flat(parts)
    check_request(path, step, keep)
    state = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "extra": extra,
        "random": _of_all_processes(random_states()),
        "parts": _saved(held),
    }
    _by_the_first(lambda: _write(path, state, keep))
    return path if keep is None else numbered(path, step)


def load_run(
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    strict: bool = True,
    **parts: Part | Sequence[Part] | None,
) -> SavedRun:
    """Go on from ``save_run``: make the parts as for a new run, then call this.

    The model may have other ranks than at the save, as one just optimised has: it takes those of
    the file. Parts are loaded in the order they need, whatever the order given. Gradients are
    dropped. Everything is checked first, so that what is refused has changed nothing; only a
    part of a class of your own could still fail half-way.

    Args:
        path: A file, or a folder of numbered ones, of which the one of the last step is taken.
        map_location: As in ``torch.load``. States go to the devices of their parts anyway.
        strict: Whether all parts of the file must be given, in their dtypes. If not, those given
            are loaded and random states stay as they are, as for an evaluation.
        parts: By the names given to ``save_run``.

    Returns:
        The step, ``extra`` and the file.

    Raises:
        RankError: If there is no such file, it is damaged or of another kind or version, or its
            parts are not those given: missing ones, another model or optimizer.
    """
    path = checked_path(path)
    if path.is_dir():
        path = latest_run(path) or path / "step-*.pt"
    held = _flat(parts)
    state = check_format(path, read_state(path, map_location))
    check_names(held, state["parts"], strict)
    place = _place(len(state["random"]))
    saved = {name: _of_place(state["parts"][name], place) for name in held}
    names = _parameter_names(held)
    # Adapters first: one of another method has given the model and the optimizer other parameters.
    for name, part in sorted(held.items(), key=lambda item: not isinstance(item[1], RankAdapter)):
        check_part(name, part, saved[name], names, strict)
    for name, part in sorted(held.items(), key=lambda item: _turn(item[1])):
        _load(part, saved[name]["state"])
    if strict and place is None:
        warn(
            f"{path} was saved by {len(state['random'])} processes and the run goes on with "
            "another number: random states stay as they are, and what differs by process, such as "
            "a sampler, is that of the first."
        )
    elif strict:
        restore_random_states(state["random"][place])
    return SavedRun(state["step"], state["extra"], path)


def latest_run(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint of the last step in a folder of ``save_run(..., keep=n)``, if any."""
    folder = checked_path(folder)
    found = numbered_in(folder) if folder.is_dir() else {}
    return found[max(found)] if found else None


# ---- parts ----


def _flat(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return name to part, ``name[0]``, ``name[1]`` for those of a list, each bare."""
    held: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, (list, tuple)):
            held |= {f"{name}[{k}]": _bare(each) for k, each in enumerate(part)}
        elif part is not None:
            held[name] = _bare(part)
    for name, part in held.items():
        if not isinstance(part, torch.Generator) and not (
            hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        ):
            raise RankError(
                f"{name!r} is nothing that could be saved and loaded",
                got=type(part).__name__,
                expected="a part with state_dict and load_state_dict, or a list of such",
                mend=f"put plain values into extra: save_run(..., extra={{{name!r}: ...}})",
            )
    if not held:
        raise RankError(
            "there is no part to save or load",
            got="no model, no optimizer",
            expected="at least one",
            mend="write save_run(path, step=n, model=model, optimizer=optimizer)",
        )
    return held


def _bare(part: Any) -> Any:
    """Return the model in wrappers that put a prefix before its names."""
    return unwrapped(part) if isinstance(part, nn.Module) else part


def _turn(part: Any) -> int:
    """When a part is loaded: an adapter needs its model's ranks and its optimizer's state."""
    return next((k for k, kind in enumerate(ORDER) if isinstance(part, kind)), len(ORDER))


def _saved(held: Mapping[str, Any]) -> dict[str, Saved]:
    """Return what the file is to have of every part: its class, and its states by process."""
    names = _parameter_names(held)
    states = {name: _state(part) for name, part in held.items()}
    alike = {name for name, part in held.items() if _turn(part) < ALIKE}
    gathered = _of_all_processes({name: states[name] for name in held if name not in alike})
    saved: dict[str, Saved] = {}
    for name, part in held.items():
        by_process = [states[name]] if name in alike else [each[name] for each in gathered]
        saved[name] = {"kind": type(part).__name__, "states": by_process}
        if isinstance(part, torch.optim.Optimizer):
            saved[name]["names"] = held_names(part, names)
    return saved


def _of_place(saved: Saved, place: int | None) -> Saved:
    """Return what the file has of a part, with the state of one process."""
    states = saved["states"]
    return {**saved, "state": states[0 if len(states) == 1 or place is None else place]}


def _state(part: Any) -> Any:
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def _load(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state.cpu())
        return
    part.load_state_dict(state)
    if isinstance(part, (nn.Module, torch.optim.Optimizer)):
        part.zero_grad()


def _parameter_names(held: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of every parameter of the models among the parts, by its identity."""
    models = ((name, part) for name, part in held.items() if isinstance(part, nn.Module))
    return {
        id(p): f"{part}.{name}" for part, model in models for name, p in model.named_parameters()
    }


# ---- many processes ----


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _of_all_processes(value: Any) -> list[Any]:
    if not _are_several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _place(count: int) -> int | None:
    """Return this process's place among those that saved; ``None`` if they were not as many."""
    if count != (dist.get_world_size() if _are_several() else 1):
        return None
    return dist.get_rank() if _are_several() else 0


def _by_the_first(write: Callable[[], None]) -> None:
    """Have one process write; the others wait, and raise too where it fails."""
    if not _are_several():
        write()
        return
    fault: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except Exception as caught:
            error, fault = caught, [f"{type(caught).__name__}: {caught}"]
    dist.broadcast_object_list(fault, src=0)
    if error is not None:
        raise error
    if fault[0] is not None:
        raise RankError(
            "process 0 could not write the checkpoint",
            got=str(fault[0]).partition("\n")[0],
            expected="a checkpoint for all processes",
            mend="see what process 0 says",
        )


def _write(path: Path, state: Saved, keep: int | None) -> None:
    if keep is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, state)
        return
    path.mkdir(parents=True, exist_ok=True)
    remove_drafts(path, "step-*.pt")
    step = state["step"]
    write_atomically(numbered(path, step), state)
    found = numbered_in(path)
    for old in [number for number in found if number <= step][:-keep]:
        found[old].unlink(missing_ok=True)
    later = max(found)
    if later > step:
        warn(
            f"{path} has a checkpoint of step {later}, later than step {step} just saved: "
            "load_run of the folder takes that one. Remove it, or save elsewhere."
        )
