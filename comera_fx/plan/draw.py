"""Draw a plan: its unrooted contraction tree as the text of an SVG.

Each edge of the tree carries two messages, one each way, drawn as two arrows. What flows to dy is
the forward pass, what flows away from it the backward pass; what arrives at a leaf is its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import prod

from comera_fx.plan.picture import (
    BOX_HEIGHT,
    FONT_SIZES,
    LINE_HEIGHT,
    TIMES,
    TO,
    Arrow,
    Box,
    Point,
    direction,
    make_picture,
    text_width,
)
from comera_fx.plan.plan import Plan
from comera_fx.plan.steps import Message

MARGIN, LINE, LEGEND_LINE = 28, 22, 32
CORNER, HEAD_LENGTH, HEAD_WIDTH, DOT = 9, 9, 4.5, 4.5

LEGEND_INDENT, SAMPLE_WIDTH = 56, 40
LEGEND = (
    ("forward", "message of the forward pass, on its way to dy"),
    ("backward", "message of the backward pass; what arrives at a leaf is its gradient"),
    ("forward saved", "saved for the backward pass; cores are there anyway"),
    ("forward again", "not saved: the backward pass makes it again"),
    ("leaf", "tensor that is given"),
    ("node", "node: two messages make the third; FLOPs of each"),
)

KEPT = {"saved": "saved for backward", "again": "made again in backward"}

STYLE = """
text { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.title, .leaf text, .name { font-weight: bold }
.shape { fill: #59636e }
.card { fill: #ffffff; stroke: #d0d7de }
.forward { color: #0969da }
.backward { color: #bc4c00 }
.lane { fill: none; stroke: currentColor; stroke-width: 1.5 }
.saved .lane { stroke-width: 3.5 }
.again .lane { stroke-dasharray: 5 3 }
.head, .dot, .name { fill: currentColor }
.box { fill: #ffffff; stroke: #1f2328; stroke-width: 1.5 }
.leaf .box { fill: #1f2328 }
.leaf text { fill: #ffffff }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.shape { fill: #9198a1 }
.card { fill: #0d1117; stroke: #3d444d }
.forward { color: #58a6ff }
.backward { color: #f0883e }
.head, .dot, .name { fill: currentColor }
.box { fill: #0d1117; stroke: #e6edf3 }
.leaf .box { fill: #e6edf3 }
.leaf text { fill: #0d1117 }
}
"""


def plan_svg(plan: Plan) -> str:
    """Return the picture of a plan, an SVG that stands on its own.

    Forward messages are blue and backward ones orange. Those saved for backward are thick and
    have a dot; those that backward makes again are dashed. A message that is not computed, such as
    the gradient of an input that needs none, is not drawn. Texts keep clear of one another
    whatever the number of cores. A viewer that is set to a dark scheme gets dark colours.

    Args:
        plan: The plan; equal plans give equal text.

    Example:
        >>> from comera_fx.plan import plan_linear
        >>> from comera_fx.spec import TTSpec
        >>> svg = plan_svg(plan_linear(TTSpec("tt", (4,), (6,), (1, 2, 1)), 8))
        >>> svg.count('"message forward'), svg.count('"message backward')
        (5, 5)
    """
    picture = make_picture(plan)
    titles, legend = list(_titles(plan)), _legend(plan)
    (left, right), (top, bottom) = picture.x_span, picture.y_span
    needed = [text_width(font, text) for font, text in titles]
    needed += [LEGEND_INDENT + text_width("text", text) for _, text in legend]
    margin = MARGIN + max(0.0, max(needed) - (right - left)) / 2
    title_height, legend_height = len(titles) * LINE + MARGIN, len(legend) * LEGEND_LINE + MARGIN
    x, y = left - margin, top - title_height - MARGIN
    width, height = right + margin - x, bottom + legend_height + MARGIN - y
    frame = [_number(value) for value in (x, y, width, height)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{frame[2]}" height="{frame[3]}" '
        f'viewBox="{" ".join(frame)}" role="img">',
        f"<title>{escape(titles[0][1])}</title>",
        f"<style>{STYLE}</style>",
        '<rect class="card" x="{}" y="{}" width="{}" height="{}"/>'.format(*frame),
    ]
    for number, (font, text) in enumerate(titles, start=1):
        lines.append(_text(font, font, text, (x + MARGIN, y + MARGIN / 2 + number * LINE)))
    lines += [_message(arrow, plan) for arrow in picture.arrows]
    lines += [_box(box) for box in picture.boxes]
    lines += _legend_lines(legend, x + MARGIN, bottom + MARGIN)
    return "\n".join([*lines, "</svg>", ""])


def _titles(plan: Plan) -> Iterator[tuple[str, str]]:
    """Font and text of each line above the tree."""
    spec = plan.spec
    sizes = f"{spec.in_size:,} {TO} {spec.out_size:,}"
    yield "title", f"{spec.layout} layer {sizes}, {plan.num_tokens:,} tokens"
    ins, outs, ranks = (
        TIMES.join(map(str, numbers)) for numbers in (spec.in_modes, spec.out_modes, spec.ranks)
    )
    size_of = plan.network.size_of
    pads = ", ".join(f"{size_of[index]} as {rank}" for index, rank in plan.pads)
    yield "text", f"modes  {ins} {TO} {outs}  ranks {ranks}{f'  padded {pads}' if pads else ''}"
    more = {"padding": plan.flops_padding, "recomputed": plan.flops_recomputed}
    added = "".join(f"  {name} {flops:,}" for name, flops in more.items() if flops)
    yield "text", f"FLOPs  forward {plan.flops_forward:,}  backward {plan.flops_backward:,}{added}"
    dense = plan.dense_flops_forward, plan.dense_flops_backward
    yield "text", f"dense  forward {dense[0]:,}  backward {dense[1]:,}"
    yield "text", f"bytes  peak {plan.peak_bytes:,}  saved for backward {plan.saved_bytes:,}"


def _legend(plan: Plan) -> list[tuple[str, str]]:
    """Samples and what they mean, of what the picture holds."""
    return [entry for entry in LEGEND if entry[0] != "forward again" or plan.flops_recomputed]


def _legend_lines(legend: Sequence[tuple[str, str]], x: float, y: float) -> Iterator[str]:
    for number, (sample, text) in enumerate(legend):
        middle = y + (number + 0.5) * LEGEND_LINE
        center = (x + SAMPLE_WIDTH / 2, middle)
        if sample == "leaf":
            yield _box(Box("leaf", "G1", *center))
        elif sample == "node":
            yield _box(Box("node", "8M", *center))
        else:
            line = _lane(((x, middle), (x + SAMPLE_WIDTH, middle)))
            yield f'<g class="{sample}">{line}{_dot(center) if "saved" in sample else ""}</g>'
        yield _text("text", "text", text, (x + LEGEND_INDENT, middle + 4))


def _message(arrow: Arrow, plan: Plan) -> str:
    """An arrow with its label; the tooltip says what would be too long to write."""
    label, (x, y) = arrow.label, arrow.at
    name = label.message.name
    phase, flops = _phase_and_flops(label.message, plan)
    kept = _kept(label.message, plan)
    size_of = plan.network.size_of
    num_bytes = plan.itemsize * prod(size_of[index] for index in label.message.indices)
    tooltip = f"{name}: {label.shape}, {num_bytes:,} bytes, {flops:,} FLOPs"
    parts = [
        f'<g class="{" ".join(filter(None, ("message", phase, kept)))}" data-name="{name}">',
        f"<title>{tooltip}{f', {KEPT[kept]}' if kept else ''}</title>",
        _lane(arrow.points),
        _dot(arrow.dot) if kept == "saved" else "",
        _text("name", "label", label.name, (x, y - 3), arrow.anchor),
        _text("shape", "label", label.shape, (x, y - 3 + LINE_HEIGHT), arrow.anchor),
        "</g>",
    ]
    return "".join(parts)


def _kept(message: Message, plan: Plan) -> str:
    if message.name in plan.saved_names:
        return "saved"
    return "again" if message in plan.steps.saved else ""


def _phase_and_flops(message: Message, plan: Plan) -> tuple[str, int]:
    """What is given costs nothing."""
    for step in (*plan.steps.forward, *plan.steps.backward):
        if step.out == message:
            return step.phase, step.flops
    return ("backward" if message == plan.steps.target else "forward"), 0


def _lane(points: Sequence[Point]) -> str:
    """A line with rounded corners and a head at its end."""
    tip, (along, down) = points[-1], direction(points[-2], points[-1])
    base = (tip[0] - HEAD_LENGTH * along, tip[1] - HEAD_LENGTH * down)
    line = [f"M{_point(points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        (x0, y0), (x1, y1) = direction(before, corner), direction(corner, after)
        start = (corner[0] - CORNER * x0, corner[1] - CORNER * y0)
        end = (corner[0] + CORNER * x1, corner[1] + CORNER * y1)
        line.append(f"L{_point(start)}Q{_point(corner)} {_point(end)}")
    line.append(f"L{_point(base)}")
    wings = [(base[0] + s * HEAD_WIDTH * down, base[1] + s * HEAD_WIDTH * along) for s in (1, -1)]
    head = f"M{_point(tip)}L{_point(wings[0])}L{_point(wings[1])}Z"
    return f'<path class="lane" d="{"".join(line)}"/><path class="head" d="{head}"/>'


def _dot(center: Point) -> str:
    x, y = map(_number, center)
    return f'<circle class="dot" cx="{x}" cy="{y}" r="{DOT}"/>'


def _box(box: Box) -> str:
    """A leaf with square corners, or a node with round ones."""
    x, y = _number(box.x - box.width / 2), _number(box.y - BOX_HEIGHT / 2)
    radius = 3 if box.kind == "leaf" else BOX_HEIGHT // 2
    return (
        f'<g class="{box.kind}">'
        f'<rect class="box" x="{x}" y="{y}" width="{_number(box.width)}" height="{BOX_HEIGHT}" '
        f'rx="{radius}"/>'
        + _text("inside", box.kind, box.text, (box.x, box.y + FONT_SIZES[box.kind] / 3), "middle")
        + "</g>"
    )


def _text(style: str, font: str, text: str, at: Point, anchor: str = "start") -> str:
    x, y = map(_number, at)
    return (
        f'<text class="{style}" x="{x}" y="{y}" font-size="{FONT_SIZES[font]}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(text)}</text>'
    )


def _point(point: Point) -> str:
    return f"{_number(point[0])},{_number(point[1])}"


def _number(value: float) -> str:
    """With at most one decimal; no negative zero."""
    return f"{round(value, 1) + 0.0:.10g}"
