"""What the page shows, as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from comera_fx.inspect import figures
from comera_fx.inspect.inspection import Inspection
from comera_fx.inspect.page import kernels_note
from comera_fx.inspect.tree import Part


def show(found: Inspection, name: str, console: Console) -> None:
    """Print what the page shows, with tables in place of the pictures.

    Args:
        found: What is shown.
        name: What the model is called.
        console: Where to.
    """
    console.rule(escape(name))
    for note in found.stages.notes:
        console.print(escape(note), highlight=False)
    console.print(_table("", ("", ""), figures.summary(found)))
    console.print(_tree(found.tree), highlight=False)
    dense = figures.dense_rows(found)
    if dense:
        console.print(_table("Dense layers", ("layer", "kind", "why", "parameters"), dense, 1))
    console.print(_table("Graphs", figures.STAGES, figures.stage_rows(found), 1))
    last = found.stages[-1].name
    console.print(
        _table(f"Rewritten graph, after {last}", figures.GRAPH, figures.graph_rows(found))
    )
    for number, shared in enumerate(found.plans, start=1):
        console.print(f"\n[bold]Plan {number}[/]: {escape(figures.names_of(shared))}")
        console.print(escape(repr(shared.plan)), highlight=False, soft_wrap=True)
    console.print(f"\n[bold]Kernels[/]\n{escape(kernels_note(found))}", highlight=False)
    for number, shared in enumerate(found.plans, start=1):
        rows = figures.kernel_rows(shared)
        console.print(_table(f"Plan {number}", figures.KERNELS, rows, 2))
    lookups = figures.lookup_rows(found)
    if lookups:
        console.print(_table("Look-ups", figures.LOOKUPS, lookups))
    times = figures.time_rows(found)
    if times:
        console.print(_table("Predicted times, forward and backward", figures.TIMES, times, 6))


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0
) -> Table:
    found = Table(title=title or None, title_justify="left", show_header=any(columns))
    for place, column in enumerate(columns):
        found.add_column(column, justify="right" if place >= len(columns) - numbers else "left")
    for row in rows:
        found.add_row(*map(escape, row))
    return found


def _tree(part: Part) -> Tree:
    now, dense, ratio = figures.sizes(part)
    text = f"[bold]{escape(part.name)}[/] {now}"
    if ratio:
        text += f" (dense {dense}, {ratio})"
    if part.kind != part.name:
        text += f"  {escape(part.kind)}"
    found = Tree(text)
    for inner in part.parts:
        found.children.append(_tree(inner))
    return found
