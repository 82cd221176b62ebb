"""The whole demo: race, checkpoints on the way, and what is left in the output folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape

from comera_fx.demo.config import DemoConfig, conflict
from comera_fx.demo.data import Corpus, load_corpus
from comera_fx.demo.page import write_page
from comera_fx.demo.results import RESULTS_FILE, collect, headline, write_json
from comera_fx.demo.show import Progress, headline_table
from comera_fx.demo.train import Race
from comera_fx.errors import ConfigError, RankError
from comera_fx.train.saving import read_state, write_atomically

CHECKPOINT_FILE, PAGE_FILE = "checkpoint.pt", "report.html"
_FORMAT = 1


def run_demo(
    settings: Mapping[str, Any], out: Path, *, resume: bool = False, console: Console
) -> int:
    """Run the demo, or the rest of it.

    Args:
        settings: Fields of ``DemoConfig``; those left out have their defaults. A resumed run
            keeps the settings it was started with.
        out: Folder for the checkpoint, both models' weights, the results and the page.
        resume: Go on from the checkpoint in ``out``.
        console: Where to show progress and the table.

    Returns:
        The exit status: 0, or 128 and the number of the signal that stopped the run.

    Raises:
        ConfigError: If a setting is out of range, there is nothing to resume, or a stopped run
            would be overwritten.
    """
    path = out / CHECKPOINT_FILE
    if resume:
        state = read_checkpoint(path)
        config = DemoConfig(**state["config"])
        notice = conflict(settings, config)
        if notice is not None:
            console.print(f"[yellow]Note:[/] {escape(str(notice))}", highlight=False)
    else:
        state, config = None, DemoConfig(**settings)
        _refuse_to_overwrite(path)
    _make_folder(out)
    corpus = load_corpus(config)
    console.print(_describe(corpus), highlight=False)
    race = Race(config, corpus)
    if state is not None:
        race.load_state_dict(state)
    stopped_by = _race_to_the_end(race, path, console)
    if stopped_by is not None:
        console.print(
            f"Stopped. It goes on with: comera-fx demo --resume --out {out}",
            markup=False,
            soft_wrap=True,
        )
        return 128 + stopped_by
    results = collect(race, out)
    write_json(results, config, out / RESULTS_FILE)
    write_page(race, results, out / PAGE_FILE)
    console.print(headline_table(headline(results), config))
    if results.end_layer_params > config.target_ratio * results.start_layer_params:
        console.print(
            f"The size target, {config.target_ratio:.2f} of the start, was not met: it takes more "
            f"than {config.steps} steps.",
            highlight=False,
        )
    console.print(
        f"Pictures, and a table by layer: {out / PAGE_FILE}", markup=False, soft_wrap=True
    )
    return 0


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "the output folder cannot be made",
            got=f"{out}: {error.strerror}",
            expected="a folder, or a path where one can be made",
            mend="name another with --out",
        ) from error


def _refuse_to_overwrite(path: Path) -> None:
    """Raise where a new run would replace one that was stopped and can go on.

    Raises:
        ConfigError: If there is such a run.
    """
    if not path.exists():
        return
    try:
        phase = read_checkpoint(path)["phase"]
    except ConfigError:
        return
    if phase != "done":
        raise ConfigError(
            "there is a stopped run in the output folder",
            got=f"{path}, in its phase of {phase}",
            expected="an empty folder, or one of a finished run",
            mend="add --resume to go on with it, name another --out, or delete that file",
        )


def write_checkpoint(race: Race, path: Path) -> None:
    """Write the run to ``path``; a stop half-way leaves the old file, never half of a new one."""
    write_atomically(path, {"format": _FORMAT, **race.state_dict()})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what ``write_checkpoint`` wrote.

    Raises:
        ConfigError: If there is no checkpoint, or it is not one of this demo.
    """
    if not path.exists():
        raise ConfigError(
            "there is no run to resume",
            got=f"no file {path}",
            expected="the checkpoint of a run that was started and stopped",
            mend="leave out --resume, or name that run's folder with --out",
        )
    try:
        state = read_state(path)
    except RankError as error:
        state = {"format": f"of a file that cannot be read ({error.got})"}
    if state.get("format") != _FORMAT:
        raise ConfigError(
            f"{path} is not a checkpoint that this version of the demo can read",
            got=f"format {state.get('format')}",
            expected=f"format {_FORMAT}",
            mend="leave out --resume to start anew",
        )
    return dict(state)


class StopRequest:
    """Within it Ctrl-C and SIGTERM are noted, to be obeyed between two steps.

    A step half done could not be resumed from. A second signal stops the process at once; the
    last checkpoint is then what a resumed run starts from.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


def _race_to_the_end(race: Race, path: Path, console: Console) -> int | None:
    """Return the signal that stopped the race, if one did; the race is saved in either case."""
    saved_at = time.monotonic()
    with StopRequest() as stop, Progress(race, console) as progress:
        while race.phase != "done" and stop.signal is None:
            race.advance()
            progress.update()
            if time.monotonic() - saved_at > race.config.checkpoint_seconds:
                write_checkpoint(race, path)
                saved_at = time.monotonic()
        write_checkpoint(race, path)
    return stop.signal


def _describe(corpus: Corpus) -> str:
    return (
        f"Python's standard library: {len(corpus.train_files)} files "
        f"({len(corpus.train) / 1e6:.1f} MB) to train on, "
        f"{len(corpus.held_out_files)} files ({len(corpus.held_out) / 1e6:.1f} MB) held out"
    )
