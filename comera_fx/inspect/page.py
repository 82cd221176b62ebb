"""One self-contained page about a model: sizes, graphs, plans, kernels, predicted times."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from comera_fx.inspect import figures
from comera_fx.inspect.draw import graph_svg
from comera_fx.inspect.html import document, folded, picture, preformatted, table
from comera_fx.inspect.inspection import Inspection
from comera_fx.inspect.kernels import library_of
from comera_fx.inspect.plans import SharedPlan
from comera_fx.inspect.stages import NOTHING_TO_DO
from comera_fx.inspect.tree import Part
from comera_fx.passes.text import format_graph
from comera_fx.plan.draw import plan_svg

SECTIONS = {
    "model": "Model",
    "graph": "Rewritten graph",
    "plans": "Plans",
    "kernels": "Kernels",
    "times": "Predicted times",
}
OPEN_DEPTH = 2
"""Parts of the model are unfolded this deep."""
TT_COLOUR, DENSE_COLOUR = "#2b8a9e", "#d97706"


def build_page(found: Inspection, name: str) -> str:
    """Return the page as HTML; it opens without network.

    Args:
        found: What is shown.
        name: What the model is called in the title.
    """
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title in SECTIONS.items())
    body = [
        f"<h1>{escape(name)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in found.stages.notes),
        table(("", ""), figures.summary(found)),
        f"<nav>{links}</nav>",
        *_section("model", _model(found)),
        *_section("graph", _graph(found)),
        *_section("plans", _plans(found)),
        *_section("kernels", _kernels(found)),
        *_section("times", _times(found)),
    ]
    return document(f"{name}, comera_fx", body)


def _section(key: str, inner: Iterator[str]) -> Iterator[str]:
    yield f'<section id="{key}"><h2>{SECTIONS[key]}</h2>'
    yield from inner
    yield "</section>"


# ---- model ----


def _model(found: Inspection) -> Iterator[str]:
    yield "<p>Parameters now, and were every layer dense.</p>"
    yield f'<div class="wide"><section class="tree">{_part(found.tree, 0)}</section></div>'
    dense = figures.dense_rows(found)
    if dense:
        columns = ("layer", "kind", "why", "parameters")
        yield folded(f"Dense layers, {len(dense)}", table(columns, dense, numbers=1))


def _part(part: Part, depth: int) -> str:
    kind = "" if part.kind == part.name else part.kind
    cells = f'<b>{escape(part.name)}</b><span class="kind">{escape(kind)}</span>' + "".join(
        f'<span class="size">{escape(size)}</span>' for size in figures.sizes(part)
    )
    if not part.parts:
        return f"<div>{cells}</div>"
    inner = "".join(_part(child, depth + 1) for child in part.parts)
    opened = " open" if depth < OPEN_DEPTH else ""
    return f"<details{opened}><summary>{cells}</summary>{inner}</details>"


# ---- graph ----


def _graph(found: Inspection) -> Iterator[str]:
    yield table(figures.STAGES, figures.stage_rows(found), numbers=1)
    first, *_, last = found.stages
    yield picture(graph_svg(last.graph), f"The graph after the last pass, {last.name}.")
    before = picture(graph_svg(first.graph), "The graph that the passes start from.")
    yield folded("The graph before the first pass", before)
    for stage in found.stages[1:-1]:
        if stage.graph.meta["change"] != NOTHING_TO_DO:
            drawn = picture(graph_svg(stage.graph), f"The graph after {stage.name}.")
            yield folded(f"The graph after {stage.name}", drawn)
    for stage in (first, last):
        yield folded(
            f"Text of the graph, {stage.name}", preformatted(format_graph(stage.graph.graph))
        )


# ---- plans ----


def _plans(found: Inspection) -> Iterator[str]:
    if not found.plans:
        yield "<p>No linear layer is in TT form with ranks left.</p>"
    for number, shared in enumerate(found.plans, start=1):
        yield f"<h3>{number}. {escape(figures.title_of(shared))}</h3>"
        yield _layers(shared)
        yield picture(plan_svg(shared.plan), f"Plan {number}: {figures.names_of(shared)}.")
        yield folded("Table of the plan", preformatted(repr(shared.plan)))


def _layers(shared: SharedPlan) -> str:
    names = figures.names_of(shared)
    if len(shared.names) <= figures.MOST_NAMES:
        return f"<p>{escape(names)}</p>"
    return folded(names, f"<p>{escape(', '.join(shared.names))}</p>")


# ---- kernels ----


def _kernels(found: Inspection) -> Iterator[str]:
    yield f"<p>{escape(kernels_note(found))}</p>"
    for number, shared in enumerate(found.plans, start=1):
        rows = figures.kernel_rows(shared)
        yield f"<h3>Plan {number}: {escape(figures.names_of(shared))}</h3>"
        yield table(figures.KERNELS, rows, numbers=2)
    rows = figures.lookup_rows(found)
    if rows:
        yield "<h3>Look-ups</h3>"
        yield table(figures.LOOKUPS, rows)


def kernels_note(found: Inspection) -> str:
    """Return who runs the products, and by what speeds each form was chosen."""
    if not found.plans and not found.lookups:
        return "Nothing runs on cores."
    text = f"Every product is a call of {library_of(found.device_type)}."
    if found.plans:
        speeds = found.plans[0].plan.costs.device
        text += f" Forms are those of least predicted time, by the speeds of: {speeds}."
    return text


# ---- times ----


def _times(found: Inspection) -> Iterator[str]:
    yield (
        "<p>Forward and backward, every gradient wanted, each layer by itself: what layers share "
        "in the rewritten graph is not counted. <code>comera_fx.explain(model, x, measure=True)"
        "</code> measures.</p>"
    )
    rows = figures.time_rows(found)
    if not rows:
        yield "<p>No layer is in TT form.</p>"
        return
    yield table(figures.TIMES, rows, numbers=6)
    if found.timed:
        yield "<h3>Milliseconds, in TT form and dense</h3>"
        yield _bars(found)


def _bars(found: Inspection) -> str:
    longest = max(
        max(layer.predicted_seconds or 0.0, layer.dense_predicted_seconds or 0.0)
        for layer in found.timed
    )
    lines = []
    for layer in found.timed:
        bars = "".join(
            f'<span class="bar" style="width:{100 * (seconds or 0.0) / longest:.1f}%;'
            f'background:{colour}"></span>'
            for seconds, colour in (
                (layer.predicted_seconds, TT_COLOUR),
                (layer.dense_predicted_seconds, DENSE_COLOUR),
            )
        )
        shown = escape(layer.name or "(the model itself)")
        lines.append(f'<tr><td>{shown}</td><td class="bars">{bars}</td></tr>')
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
