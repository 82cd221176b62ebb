"""``report.html``: one self-contained page with the tables and pictures of a finished run.

Pictures are inline SVG whose text and axes take the page's own colour, so that they read well on
a light and on a dark background. There is no script, and nothing is fetched.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from comera_fx import LayerReport, explain
from comera_fx.demo.results import COLUMNS, Results, headline, inner_ranks
from comera_fx.demo.train import HELD_UP, Race, Side

_INK = "#010203"  # stands for the page's text colour until the picture is in the page
_DENSE, _OPTIMISED = "#d97706", "#2b8a9e"
_SMOOTH = 15  # steps that a shown training loss is the mean of
_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2.5rem auto;
       padding: 0 1.25rem; background: light-dark(#fcfcfa, #16181b);
       color: light-dark(#1d2126, #d9dcdf); }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p { max-width: 44rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .32rem .9rem .32rem 0; text-align: right; white-space: nowrap;
         border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td:first-child, th:first-child { text-align: left; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; }
figcaption { font-size: .88rem; opacity: .75; }
"""


def write_page(race: Race, results: Results, path: Path) -> None:
    """Write the page of a finished run to ``path``."""
    path.write_text(build_page(race, results), encoding="utf-8")


def build_page(race: Race, results: Results) -> str:
    """Return the page as HTML."""
    settings = race.config.to_dict().items()
    body = "\n".join(
        (
            "<h1>A language model on Python's standard library, dense and optimised</h1>",
            f"<p>{escape(_introduction(race, results))}</p>",
            _table(COLUMNS, headline(results)),
            "<h2>Loss</h2>",
            _pair(
                (_loss_by_step(race), "Training loss by step, and held-out loss (marks)."),
                (_loss_by_time(race), "The same by seconds spent in training steps."),
            ),
            "<h2>Size and ranks</h2>",
            _pair(
                (_size_by_step(race), "Parameters in the cores of all compressed layers."),
                (_ranks_by_step(race), "Mean rank of each compressed layer's bonds."),
            ),
            "<h2>Time of a step</h2>",
            _pair((_step_times(race), "Every training step; the steps of both were interleaved.")),
            f"<p>{escape(_timing(results))}</p>",
            "<h2>Layer by layer, at the end</h2>",
            _layer_table(race),
            "<h2>Settings</h2>",
            _table(("setting", "value"), [(key, str(value)) for key, value in settings]),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>comera_fx demo</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _introduction(race: Race, results: Results) -> str:
    config = race.config
    return (
        f"A decoder transformer of {config.num_layers} blocks, {config.width} features and "
        f"{results.dense_params:,} parameters, trained from scratch on the bytes of "
        f"{len(race.corpus.train_files)} source files, {config.batch_size} sequences of "
        f"{config.context} bytes a step. Its optimised twin holds the weights of its blocks as "
        f"tensor trains. Both started from one seed, {config.seed}, and took {config.steps} steps "
        f"on the same batches, each at its own learning rate ({config.dense_lr:g} dense, "
        f"{config.tt_lr:g} optimised), which falls to {config.final_lr:.0%} of its peak. In the "
        "time that the optimised model then had left it trained on through a second, shorter "
        "cycle with the same end. Losses are in nats a byte, held-out ones measured on files that "
        "neither was trained on; lower is better. One seed is one seed: other seeds differ."
    )


def _timing(results: Results) -> str:
    return (
        f"Equal time is {results.seconds:.0f} s of training, counted with no step above "
        f"{HELD_UP} times its model's median, so that other programs on the machine do not decide "
        f"the race. By the clock the dense model trained for {results.clock_seconds:.0f} s and "
        f"the optimised one, with all of its {results.optimised_steps} steps, for "
        f"{results.optimised_clock_seconds:.0f} s."
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _pair(*pictures: tuple[str, str]) -> str:
    figures = "\n".join(
        f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        for svg, caption in pictures
    )
    return f'<div class="pair">{figures}</div>'


def _loss_by_step(race: Race) -> str:
    def draw(axes: Any) -> None:
        for side, label, colour in _sides(race):
            steps = range(1, len(side.losses) + 1)
            axes.plot(steps, _smooth(side.losses), color=colour, label=label)
        _mark_held_out(axes, race, results_at=_held_out_steps(race))

    return _picture("loss-step", "step", "loss", draw)


def _loss_by_time(race: Race) -> str:
    def draw(axes: Any) -> None:
        for side, label, colour in _sides(race):
            seconds = list(accumulate(side.counted_seconds))
            axes.plot(seconds, _smooth(side.losses), color=colour, label=label)
        _mark_held_out(axes, race, results_at=_held_out_seconds(race))

    return _picture("loss-time", "seconds of training", "loss", draw)


def _size_by_step(race: Race) -> str:
    def draw(axes: Any) -> None:
        axes.plot(race.sizes, color=_OPTIMISED, label="optimised")
        target = race.config.target_ratio * race.sizes[0]
        axes.axhline(target, color=_INK, linestyle=":", linewidth=1, label="target")
        axes.set_ylim(bottom=0)

    return _picture("size", "step", "parameters in cores", draw)


def _ranks_by_step(race: Race) -> str:
    def draw(axes: Any) -> None:
        last = len(race.optimised.losses)
        for name in race.ranks[0][1]:
            points = [(step, fmean(inner_ranks({name: at[name]}))) for step, at in race.ranks]
            points.append((last, points[-1][1]))
            steps, means = zip(*points, strict=True)
            axes.step(steps, means, where="post", linewidth=1, color=_OPTIMISED, alpha=0.6)
        axes.set_ylim(bottom=0)

    return _picture("ranks", "step", "mean rank", draw)


def _step_times(race: Race) -> str:
    def draw(axes: Any) -> None:
        for side, label, colour in _sides(race):
            times = [1000 * seconds for seconds in side.step_seconds]
            axes.plot(range(1, len(times) + 1), times, ".", ms=3, color=colour, label=label)
        axes.set_ylim(0, 3000 * median(race.dense.step_seconds))  # the held-up ones stay outside

    return _picture("times", "step", "milliseconds", draw)


def _picture(name: str, x_label: str, y_label: str, draw: Any) -> str:
    """Return an inline SVG; ``name`` keeps its identifiers apart from other pictures'."""
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _INK,
        "grid.alpha": 0.12,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "font.size": 11,
    }
    with rc_context(settings):
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def _sides(race: Race) -> tuple[tuple[Side, str, str], ...]:
    return (race.dense, "dense", _DENSE), (race.optimised, "optimised", _OPTIMISED)


def _mark_held_out(axes: Any, race: Race, results_at: dict[str, float]) -> None:
    for name, place in results_at.items():
        colour = _DENSE if name == "dense" else _OPTIMISED
        axes.plot([place], [race.held_out[name]], "o", color=colour, mec=_INK, ms=6)
    everything = _smooth(race.dense.losses) + _smooth(race.optimised.losses)
    low = min(*everything, *race.held_out.values())
    # The first steps fall so fast that showing all of them would flatten what matters.
    high = sorted(everything)[int(0.95 * (len(everything) - 1))]
    axes.set_ylim(low - 0.05, high + 0.05)


def _held_out_steps(race: Race) -> dict[str, float]:
    steps = race.config.steps
    return {
        "dense": steps,
        "optimised, equal steps": steps,
        "optimised, equal time": len(race.optimised.losses),
    }


def _held_out_seconds(race: Race) -> dict[str, float]:
    return {
        "dense": race.dense.seconds,
        "optimised, equal steps": sum(race.optimised.counted_seconds[: race.config.steps]),
        "optimised, equal time": race.optimised.seconds,
    }


def _smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[max(0, i + 1 - _SMOOTH) : i + 1]) for i in range(len(values))]


def _layer_table(race: Race) -> str:
    """Lay out ``comera_fx.explain`` as a table, with the ranks at the start beside those now."""
    columns = (
        "layer",
        "modes",
        "ranks at the start",
        "at the end",
        "dense",
        "TT",
        "ratio",
        "MFLOPs",
    )
    start = race.ranks[0][1]
    rows = []
    for name, layer in explain(race.optimised.model).layers.items():
        if layer.tt_params is None:
            rows.append((name, layer.reason, "", "", f"{layer.dense_params:,}", "", "", ""))
            continue
        rows.append(
            (
                name,
                f"{_product(layer.in_modes)} to {_product(layer.out_modes)}",
                _inner(start[name]),
                _inner(layer.ranks),
                f"{layer.dense_params:,}",
                f"{layer.tt_params:,}",
                "" if layer.ratio is None else f"{layer.ratio:.1f}",
                _flops(layer),
            )
        )
    return _table(columns, rows)


def _product(modes: Sequence[int] | None) -> str:
    return "\u00d7".join(map(str, modes or ()))


def _inner(ranks: Sequence[int] | None) -> str:
    return " ".join(map(str, (ranks or ())[1:-1]))


def _flops(layer: LayerReport) -> str:
    """Forward and backward of a step, TT against dense."""
    tt = (layer.flops_forward or 0) + (layer.flops_backward or 0)
    dense = (layer.dense_flops_forward or 0) + (layer.dense_flops_backward or 0)
    return f"{tt / 1e6:,.0f} of {dense / 1e6:,.0f}"
