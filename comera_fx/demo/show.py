"""What the terminal shows: progress while the race runs, and the table at its end."""

from __future__ import annotations

from statistics import fmean, median
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from comera_fx.demo.config import DemoConfig
from comera_fx.demo.results import COLUMNS, Row
from comera_fx.demo.train import Race, Side

_RECENT = 10  # steps that shown losses and times are taken over


class Progress:
    """Live view of a race on a terminal; elsewhere, such as in a log, a line now and then."""

    def __init__(self, race: Race, console: Console) -> None:
        self._race, self._console = race, console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._line_every = max(1, race.config.steps // 8)
        self._lines = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self) -> None:
        """Show how far the race is."""
        if self._console.is_terminal:
            self._live.update(live_view(self._race))
            return
        lines = len(self._race.optimised.losses) // self._line_every
        if lines > self._lines:
            self._lines = lines
            self._console.print(progress_line(self._race), highlight=False, soft_wrap=True)


def live_view(race: Race) -> RenderableType:
    """Return a bar over the whole run, with a line for each model."""
    table = Table(box=None, padding=(0, 2))
    for column in ("", "steps", "loss", "step", "trained for", "TT size"):
        table.add_column(column, justify="left" if column == "" else "right")
    size = f"{race.sizes[-1]:,} ({race.sizes[-1] / max(1, race.sizes[0]):.0%})"
    for name, side, shown in (("dense", race.dense, ""), ("optimised", race.optimised, size)):
        steps = str(len(side.losses))
        table.add_row(name, steps, _loss(side), _step(side), f"{side.seconds:.0f} s", shown)
    done, total = _seconds_done_and_total(race)
    heading = f"{race.phase}, about {_minutes(total - done)} left"
    return Group(heading, ProgressBar(total=total, completed=done, width=60), table)


def progress_line(race: Race) -> str:
    """Return the same on one line."""
    dense, optimised = race.dense, race.optimised
    done, total = _seconds_done_and_total(race)
    share = race.sizes[-1] / max(1, race.sizes[0])
    return (
        f"{race.phase}, step {len(optimised.losses)}: "
        f"loss {_loss(dense)} dense, {_loss(optimised)} optimised; "
        f"step {_step(dense)}, {_step(optimised)}; TT size {share:.0%}; "
        f"about {_minutes(total - done)} left"
    )


def headline_table(rows: list[Row], config: DemoConfig) -> Table:
    """Return the table of a finished run."""
    title = f"Dense against optimised, seed {config.seed}, {config.device}"
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _seconds_done_and_total(race: Race) -> tuple[float, float]:
    """Both sides train for as long as the dense one needs for all of its steps."""
    dense, optimised = race.dense, race.optimised
    if not dense.step_seconds:
        return 0.0, 1.0
    left = race.config.steps - len(dense.step_seconds)
    dense_total = dense.seconds + left * median(dense.step_seconds)
    total = max(2 * dense_total, 1e-9)
    done = total if race.phase == "done" else dense.seconds + optimised.seconds
    return min(done, total), total


def _loss(side: Side) -> str:
    return f"{fmean(side.losses[-_RECENT:]):.3f}" if side.losses else "-"


def _step(side: Side) -> str:
    return f"{1000 * median(side.step_seconds[-_RECENT:]):.0f} ms" if side.step_seconds else "-"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
