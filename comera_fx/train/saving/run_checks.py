"""What is checked of a checkpoint and of the parts that are to take it, before any is changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from comera_fx.errors import RankError
from comera_fx.modules import TTModule
from comera_fx.train.adaptable import missing_entries
from comera_fx.train.ranks import RankAdapter

FORMAT, VERSION = "comera_fx run", 1
"""What a file says of itself; another version is refused."""
SHOWN = 3
"""Names given in a message, of all that are wrong."""

Saved = dict[str, Any]


def checked_path(path: object) -> Path:
    """Return the path of a checkpoint or of a folder of them.

    Raises:
        RankError: If it is none.
    """
    if isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str):
        return Path(os.fspath(path))
    raise RankError(
        "a checkpoint needs a path",
        got=type(path).__name__,
        expected="a file or a folder, as text or pathlib.Path",
        mend="write save_run('runs/first.pt', step=n, model=model, optimizer=optimizer)",
    )


def check_request(path: Path, step: int, keep: int | None) -> None:
    """Raise where ``save_run`` was called with settings that have no meaning.

    Raises:
        RankError: Naming the one.
    """
    if not isinstance(step, int) or step < 0:
        raise RankError(
            "save_run counts steps",
            got=f"step={step!r}",
            expected="a whole number from 0 on",
            mend="give the number of steps taken so far",
        )
    if keep is not None and keep < 1:
        raise RankError(
            "save_run would keep nothing",
            got=f"keep={keep}",
            expected="1 or more, or None for a single file",
            mend="give keep=3, say",
        )
    if path.is_dir() if keep is None else path.is_file():
        raise RankError(
            "save_run writes a file, or with keep into a folder",
            got=f"{path}, a {'folder' if keep is None else 'file'}",
            expected="a file" if keep is None else "a folder, or a path where one can be made",
            mend="add keep=3, or name a file in it" if keep is None else "leave out keep",
        )


def check_format(path: Path, state: Any) -> Saved:
    """Return what was read from ``path`` if ``save_run`` of this version wrote it.

    Raises:
        RankError: If not.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RankError(
            f"{path} was not written by save_run",
            got=f"a {type(state).__name__} without its mark",
            expected="a checkpoint of a whole run",
            mend="load states that you saved yourself with torch.load and load_state_dict",
        )
    if state["version"] != VERSION:
        raise RankError(
            f"{path} is of another version of comera_fx",
            got=f"format {state['version']}",
            expected=f"format {VERSION}",
            mend="load it with the version that the run was started with",
        )
    return state


def check_names(held: Mapping[str, Any], saved: Mapping[str, Any], strict: bool) -> None:
    """Raise unless the parts given are those of the file, or if not ``strict`` among them.

    Raises:
        RankError: Naming those that are not.
    """
    absent = [name for name in held if name not in saved]
    left_out = [name for name in saved if name not in held] if strict else []
    if absent or left_out:
        raise RankError(
            "the checkpoint has other parts than were given",
            got=_some("not in the file:", absent) or _some("not given:", left_out),
            expected=f"the parts {', '.join(saved)}",
            mend="give the same parts, by the same names, as to save_run"
            + ("" if absent else "; with strict=False those given are loaded"),
        )


def check_part(name: str, part: Any, saved: Saved, names: Mapping[int, str], strict: bool) -> None:
    """Raise unless a part can take its state from the file; nothing is changed.

    Args:
        name: As given to ``load_run``.
        part: The part.
        saved: What the file has of it.
        names: Of the models' parameters, by their identity.
        strict: Whether dtypes must be the same.

    Raises:
        RankError: If it is of another class, or of another model.
    """
    kind = type(part).__name__
    if not isinstance(part, nn.Module) and kind != saved["kind"]:
        raise RankError(
            f"{name!r} is of another kind in the checkpoint",
            got=f"a {kind}",
            expected=f"a {saved['kind']}",
            mend="make it as the saved run did",
        )
    if isinstance(part, nn.Module):
        _check_model(name, part, saved["state"], strict)
    elif isinstance(part, torch.optim.Optimizer):
        _check_optimizer(name, part, saved, names)
    elif isinstance(part, RankAdapter):
        layers = list(saved["state"].get("ranks", {}))
        if layers != list(part.ranks):
            raise _another(name, _differing(list(part.ranks), layers, "layer"), "exclude the same")
        method, saved_method = part.config.method, saved["state"].get("method")
        if saved_method not in (method, None):
            mend = "make it with the RankConfig of the saved run"
            raise _another(name, f"method {method!r}", mend, repr(saved_method))
    if isinstance(part, (RankAdapter, torch.amp.GradScaler)):
        missing = missing_entries(saved["state"], part.state_dict())
        if missing:
            raise _another(name, _some("no entry", missing), "make it as the saved run did")


def _check_model(name: str, model: nn.Module, saved: Mapping[str, Any], strict: bool) -> None:
    own = model.state_dict()
    cores, weights = _rank_dependent(model)
    missing = [key for key in own if key not in saved]
    surplus = [key for key in saved if key not in own and key not in weights]
    mend = "make the model, and optimize it, as the saved run did"
    if missing and all(key in weights for key in missing):
        mend = "the saved run had no RankAdapter for these layers: load before making one"
    if missing or surplus:
        raise _another(
            name, _some("not in the file:", missing) or _some("only in the file:", surplus), mend
        )
    for key, value in own.items():
        theirs = saved[key]
        if not isinstance(value, torch.Tensor) or is_lazy(value):
            continue
        if key not in cores and key not in weights and value.shape != theirs.shape:
            raise _another(name, f"{key} of shape {tuple(value.shape)}", mend, tuple(theirs.shape))
        if strict and value.dtype != theirs.dtype:
            raise _another(name, f"{key} of {value.dtype}", mend, theirs.dtype)
    for prefix, layer in _tt_layers(model):
        _check_cores(name, prefix, layer, saved, mend)


def _check_cores(
    name: str, prefix: str, layer: TTModule, saved: Mapping[str, Any], mend: str
) -> None:
    """Raise unless the modes are the same and the ranks go together."""
    keys = [f"{prefix}core_{k}" for k in range(layer.num_cores)]
    if any(key not in saved for key in keys):
        return  # held by a parametrization: compared by shape
    ranks = [1]
    for key, core in zip(keys, layer.cores, strict=True):
        theirs = saved[key].shape
        if len(theirs) != core.ndim or theirs[1:-1] != core.shape[1:-1] or theirs[0] != ranks[-1]:
            raise _another(name, f"{key} of shape {tuple(core.shape)}", mend, tuple(theirs))
        ranks.append(theirs[-1])
    for k in range(1, layer.num_cores):
        weight = saved.get(f"{prefix}rank_weight_{k}")
        if weight is not None and tuple(weight.shape) != (ranks[k],):
            raise _another(
                name, f"{prefix}rank_weight_{k} of {ranks[k]}", mend, tuple(weight.shape)
            )


def _rank_dependent(model: nn.Module) -> tuple[set[str], set[str]]:
    """Names of what follows the ranks: cores, and what an adapter adds."""
    cores, weights = set(), set()
    for prefix, layer in _tt_layers(model):
        cores |= {f"{prefix}core_{k}" for k in range(layer.num_cores)}
        weights |= {f"{prefix}rank_weight_{k}" for k in range(1, layer.num_cores)}
        weights.add(f"{prefix}rank_weight_threshold")
    return cores, weights


def _tt_layers(model: nn.Module) -> Iterator[tuple[str, TTModule]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TTModule):
            yield f"{name}." if name else "", module


def held_names(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[list[str | None]]:
    """Return what an optimizer holds, group by group: states are told apart by this order."""
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def _check_optimizer(
    name: str, optimizer: torch.optim.Optimizer, saved: Saved, names: Mapping[int, str]
) -> None:
    own, theirs = held_names(optimizer, names), saved["names"]
    mend = "build it from the same groups in the same order, and the RankAdapter before load_run"
    sizes, their_sizes = [len(group) for group in own], [len(group) for group in theirs]
    if sizes != their_sizes:
        raise _another(name, f"groups of {sizes} parameters", mend, f"of {their_sizes}")
    for ours, of_file in zip(chain(*own), chain(*theirs), strict=True):
        if None not in (ours, of_file) and ours != of_file:
            raise _another(name, f"{ours} in the place of {of_file}", mend)


def _another(name: str, got: str, mend: str, expected: object = None) -> RankError:
    text = "what the saved run had" if expected is None else f"{expected}, as in the file"
    return RankError(f"the checkpoint belongs to another {name}", got=got, expected=text, mend=mend)


def _differing(own: list[str], theirs: list[str], what: str) -> str:
    only = [name for name in own if name not in theirs]
    return _some(f"{what} not in the file:", only) or _some(
        f"{what} missing or in another place:", [name for name in theirs if name not in own]
    )


def _some(text: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{text} {', '.join(names[:SHOWN])}{more}" if names else ""
