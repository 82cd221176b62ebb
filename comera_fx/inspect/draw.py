"""Draw an FX graph as the text of an SVG, in the manner of the pictures of plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from torch import fx

from comera_fx.inspect.blocks import Block, blocks_of
from comera_fx.inspect.layered import Point, place
from comera_fx.plan.picture import LINE_HEIGHT, text_width

MARGIN, PADDING, LINE = 24.0, 10.0, 20.0
SAMPLE = 26.0
LEGEND = (
    ("tt", "runs on cores"),
    ("plain", "anything else"),
    ("weights", "made of weights alone, once for all; read where there is a dot"),
)

STYLE = """
text { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.title, .head { font-weight: bold }
.more { fill: #59636e }
.card { fill: #ffffff; stroke: #d0d7de }
.box { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.2 }
.tt .box { fill: #fbefff; stroke: #8250df; stroke-width: 2 }
.weights .box { fill: #fff8c5; stroke: #9a6700 }
.dot { fill: #9a6700 }
.input .box, .output .box { fill: #1f2328; stroke: #1f2328 }
.input text, .output text { fill: #ffffff }
.line { fill: none; stroke: #8c959f; stroke-width: 1.3 }
.tip { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.more { fill: #9198a1 }
.card { fill: #0d1117; stroke: #3d444d }
.box { fill: #151b23; stroke: #656c76 }
.tt .box { fill: #271052; stroke: #ab7df8 }
.weights .box { fill: #341a00; stroke: #d29922 }
.dot { fill: #d29922 }
.input .box, .output .box { fill: #e6edf3; stroke: #e6edf3 }
.input text, .output text { fill: #0d1117 }
}
"""


def graph_svg(gm: fx.GraphModule, title: str = "") -> str:
    """Return the picture of a graph, an SVG that stands on its own.

    Values flow from top to bottom. Each operator has a box; where there are many, each part of
    the model has one, in which its operators are counted. Weights are not drawn. What runs on
    cores is purple. A viewer that is set to a dark scheme gets dark colours.

    Args:
        gm: Any graph; equal graphs give equal text.
        title: Stands above it.

    Example:
        >>> from comera_fx import graph
        >>> svg = graph_svg(graph(model, torch.randn(4, 256)))
        >>> svg.count('class="tt"'), svg.count('class="input"')
        (1, 1)
    """
    blocks = blocks_of(gm)
    placed = place([_size(block) for block in blocks], [block.reads for block in blocks])
    legend = [entry for entry in LEGEND if any(block.kind == entry[0] for block in blocks)]
    needed = [text_width("text", text) + 2 * SAMPLE for _, text in legend]
    width = max(placed.width, text_width("title", title), *needed, 0.0) + 2 * MARGIN
    x, y = (width - placed.width) / 2, MARGIN + (LINE + MARGIN if title else 0.0)
    below = y + placed.height + MARGIN
    height = below + LINE * len(legend) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.1f}" height="{height:.1f}" '
        f'viewBox="0 0 {width:.1f} {height:.1f}" role="img">',
        f"<title>{escape(title or 'graph')}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="{width:.1f}" height="{height:.1f}"/>',
    ]
    if title:
        lines.append(_text("title", title, 18, (width / 2, MARGIN + LINE)))
    lines += [_connection([(px + x, py + y) for px, py in points]) for points in placed.lines]
    lines += [
        _box(block, (cx + x, cy + y))
        for block, (cx, cy) in zip(blocks, placed.centers, strict=True)
    ]
    lines += _legend(legend, below)
    return "\n".join([*lines, "</svg>", ""])


def _size(block: Block) -> tuple[float, float]:
    widths = [text_width("leaf", block.title), *(text_width("label", t) for t in block.lines)]
    return max(widths) + 2 * PADDING, LINE + LINE_HEIGHT * len(block.lines) + PADDING


def _box(block: Block, center: Point) -> str:
    width, height = _size(block)
    left, top = center[0] - width / 2, center[1] - height / 2
    parts = [
        f'<g class="{block.kind}">',
        f'<rect class="box" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="5"/>',
        _text("head", block.title, 13, (center[0], top + LINE)),
    ]
    for number, text in enumerate(block.lines, start=1):
        parts.append(_text("more", text, 11, (center[0], top + LINE + number * LINE_HEIGHT)))
    if block.on_weights:
        parts.append(f'<circle class="dot" cx="{left:.1f}" cy="{center[1]:.1f}" r="4.5"/>')
    return "".join([*parts, "</g>"])


def _connection(points: Sequence[Point]) -> str:
    """A line that bends between rows, and is straight through each row that it passes."""
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for number, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        middle = (y0 + y1) / 2
        if number % 2:
            path += f"L{x1:.1f},{y1:.1f}"
        else:
            path += f"C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    x, y = points[-1]
    tip = f"M{x:.1f},{y:.1f}l-4,-8h8Z"
    return f'<path class="line" d="{path}"/><path class="tip" d="{tip}"/>'


def _legend(legend: Sequence[tuple[str, str]], top: float) -> Iterator[str]:
    for number, (kind, text) in enumerate(legend):
        y = top + number * LINE
        yield (
            f'<g class="{kind} sample"><rect class="box" x="{MARGIN}" y="{y:.1f}" '
            f'width="{SAMPLE}" height="13" rx="3"/></g>'
            f'<text class="more" x="{MARGIN + 1.5 * SAMPLE}" y="{y + 11:.1f}" '
            f'font-size="12">{escape(text)}</text>'
        )


def _text(style: str, text: str, size: int, at: Point) -> str:
    x, y = at
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" '
        f'text-anchor="middle">{escape(text)}</text>'
    )
