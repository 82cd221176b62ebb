"""Where the parts of a drawn contraction tree go.

The way from x to dy is a horizontal *spine*. What its nodes take in besides hangs above and below
it in turn. A node has its two parts to its left and right, and what it makes leaves towards the
spine; an edge starts straight up or down from its part, beside which its labels stand.

Widths are those of a monospace font. Branches are pushed apart until no level of one reaches into
the same level of another, so no two texts overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from math import inf
from typing import Literal

from comera_fx.plan.plan import Plan
from comera_fx.plan.steps import Message

Kind = Literal["leaf", "node"]
Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]
Span = tuple[float, float]

FONT_SIZES = {"title": 18, "text": 12, "leaf": 13, "node": 11, "label": 11}
CHARACTER_WIDTH = 0.61
"""Width of a monospace character, in font sizes."""
BOX_HEIGHT, BOX_PADDING = 26, 9
LEVEL_HEIGHT = 120
"""From a node up or down to its parts."""
LANE = 6
"""How far the two messages of an edge keep from its middle."""
LABEL_GAP, LINE_HEIGHT = 14, 13
"""From the middle of an edge to its labels; from line to line."""
GAP, RUN = 20, 28
"""Between neighbouring branches; the least length of an arrow."""
TIMES, TO = "\N{MULTIPLICATION SIGN}", "\N{RIGHTWARDS ARROW}"


@dataclass(frozen=True)
class Label:
    """What stands beside the arrow of a message: its name above its shape."""

    message: Message
    name: str
    shape: str

    @property
    def width(self) -> float:
        """In px."""
        return text_width("label", max(self.name, self.shape, key=len))


@dataclass(frozen=True)
class Branch:
    """A tensor on its way to dy: a leaf, or what a node makes of two branches.

    Args:
        inward: The message to dy.
        outward: The message back; ``None`` where no gradient is wanted.
        first: Lowest number of its leaves; parts are sorted by it.
        text: Name of the leaf, or what each message of the node costs.
        parts: What its node takes in; empty for a leaf.
    """

    inward: Label
    outward: Label | None
    first: int
    text: str
    parts: tuple[Branch, ...] = ()

    @property
    def kind(self) -> Kind:
        """Whether it is a leaf or comes from a node."""
        return "node" if self.parts else "leaf"

    @property
    def width(self) -> float:
        """Of its box, in px."""
        return box_width(self.kind, self.text)


@dataclass(frozen=True)
class Box:
    """A leaf or a node; ``x`` and ``y`` are its middle."""

    kind: Kind
    text: str
    x: float
    y: float

    @property
    def width(self) -> float:
        """In px."""
        return box_width(self.kind, self.text)


@dataclass(frozen=True)
class Arrow:
    """One message of an edge.

    Args:
        label: What it carries.
        points: Its line, tail first.
        dot: The point of the line beside its label.
        at: Where its label is fixed, half way between its two lines.
        anchor: Which end of the label is there.
    """

    label: Label
    points: tuple[Point, ...]
    dot: Point
    at: Point
    anchor: Anchor


@dataclass(frozen=True)
class Picture:
    """Boxes and arrows, and the spans that hold them."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    x_span: Span
    y_span: Span


def text_width(font: str, text: str) -> float:
    """Return the width of a text in px."""
    return len(text) * FONT_SIZES[font] * CHARACTER_WIDTH


def box_width(kind: Kind, text: str) -> float:
    """Return the width of the box around a text in px."""
    return text_width(kind, text) + 2 * BOX_PADDING


def direction(a: Point, b: Point) -> Point:
    """Return the unit step from ``a`` to ``b`` along a level or upright line; y grows downwards."""
    return float((b[0] > a[0]) - (b[0] < a[0])), float((b[1] > a[1]) - (b[1] < a[1]))


def short_number(number: float) -> str:
    """Return about three digits and a unit.

    Example:
        >>> [short_number(n) for n in (0, 999, 69_120, 999_999, 188_743_680)]
        ['0', '999', '69.1K', '1M', '189M']
    """
    units = ["", "K", "M", "G", "T", "P"]
    while number >= 999.5 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.0f}{units[0]}" if number >= 100 else f"{number:.3g}{units[0]}"


def short_name(name: str) -> str:
    """Return the name of a message with runs of three cores and more shortened.

    Example:
        >>> [short_name(name) for name in ("xG1G2", "dyxG1G2G3G5G6", "dG1")]
        ['xG1G2', 'dyxG1..G3G5G6', 'dG1']
    """
    head, *cores = name.split("G")
    numbers = list(map(int, cores))
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return head + "".join(
        f"G{run[0]}..G{run[-1]}" if len(run) > 2 else "".join(f"G{number}" for number in run)
        for run in runs
    )


def make_tree(plan: Plan) -> Branch:
    """Return the tree of a plan, hung up at dy: its messages are the forward result and dy."""
    steps = plan.steps
    made_by = {step.out.name: step for step in steps.forward}
    made_of = {frozenset((s.left.name, s.right.name)): s.out for s in steps.backward}
    number_of = {leaf.name: number for number, leaf in enumerate(steps.leaves)}

    def label(message: Message) -> Label:
        sizes = [str(size) for index, size in plan.network.sizes if index in message.indices]
        return Label(message, short_name(message.name), TIMES.join(sizes) or "1")

    def branch(inward: Message, outward: Message | None) -> Branch:
        labels = label(inward), label(outward) if outward else None
        step = made_by.get(inward.name)
        if step is None:
            return Branch(*labels, number_of[inward.name], inward.name)

        def part(own: Message, other: Message) -> Branch:
            operands = frozenset((outward.name, other.name)) if outward else frozenset()
            return branch(own, made_of.get(operands))

        parts = [part(step.left, step.right), part(step.right, step.left)]
        parts.sort(key=lambda part: part.first)
        return Branch(*labels, parts[0].first, short_number(step.flops), tuple(parts))

    return branch(steps.result, steps.target)


def make_picture(plan: Plan) -> Picture:
    """Return where everything of a plan's picture goes, with the spine at ``y = 0``."""
    spine = _spine(make_tree(plan))
    blocks = [
        _block(node.parts[1], ABOVE if number % 2 == 0 else BELOW)
        for number, node in enumerate(spine[1:])
    ]
    target = plan.network.target
    widths = [*(branch.width for branch in spine), box_width("leaf", target)]
    xs = _spine_places(spine, blocks, widths)

    boxes = [Box(b.kind, b.text, x, 0.0) for b, x in zip(spine, xs[:-1], strict=True)]
    boxes.append(Box("leaf", target, xs[-1], 0.0))
    arrows = [
        arrow
        for branch, (one, other) in zip(spine, pairwise(boxes), strict=True)
        for arrow in _spine_arrows(branch, one, other)
    ]
    lefts, rights = [xs[0] - widths[0] / 2], [xs[-1] + widths[-1] / 2]
    for block, x in zip(blocks, xs[1:-1], strict=True):
        boxes += [place.box(x, block.side) for place in block.places]
        arrows += [arrow for place in block.places for arrow in place.arrows(x, block.side)]
        lefts += [x + left for left, _ in block.spans]
        rights += [x + right for _, right in block.spans]
    ys = [box.y for box in boxes]
    # Where nothing hangs below, the labels of the spine reach furthest.
    deepest = max(max(ys) + BOX_HEIGHT / 2, LABEL_GAP + 2 * LINE_HEIGHT)
    x_span = min(lefts), max(rights)
    return Picture(tuple(boxes), tuple(arrows), x_span, (min(ys) - BOX_HEIGHT / 2, deepest))


ABOVE, BELOW = -1, 1
EMPTY: Span = (inf, -inf)


@dataclass(frozen=True)
class _Place:
    """A branch that hangs from the spine; ``x`` counts from where it hangs, levels from 1.

    ``parent`` is the span of the box that it leads to, ``None`` for the spine's.
    """

    branch: Branch
    x: float
    level: int
    parent: Span | None = None

    def moved(self, by: float, parent: Span) -> _Place:
        """One level further out."""
        old = self.parent
        shifted = (old[0] + by, old[1] + by) if old else parent
        return _Place(self.branch, self.x + by, self.level + 1, shifted)

    def box(self, x: float, side: int) -> Box:
        return Box(self.branch.kind, self.branch.text, x + self.x, side * self.level * LEVEL_HEIGHT)

    def arrows(self, x: float, side: int) -> Iterator[Arrow]:
        box = self.box(x, side)
        node_y, half = box.y - side * LEVEL_HEIGHT, side * BOX_HEIGHT / 2
        points: list[Point] = [(box.x, box.y - half)]
        if self.parent is None:
            points.append((box.x, node_y + half))
        else:
            end = self.parent[0] if self.x < self.parent[0] else self.parent[1]
            points += [(box.x, node_y), (x + end, node_y)]
        return _arrows(self.branch, points, (box.x, box.y - side * LEVEL_HEIGHT / 2))


@dataclass(frozen=True)
class _Block:
    """What hangs from one node of the spine, and from where to where it reaches on each level."""

    side: int
    places: tuple[_Place, ...]
    spans: tuple[Span, ...]


def _spine(tree: Branch) -> list[Branch]:
    """From x to the result. x is the first leaf, so it is in the first part of every node."""
    return [*(_spine(tree.parts[0]) if tree.parts else []), tree]


def _block(branch: Branch, side: int) -> _Block:
    # An inward message keeps to the left as it travels, so down the right of its edge.
    inward = branch.inward.width
    outward = branch.outward.width if branch.outward else 0.0
    left, right = (outward, inward) if side == ABOVE else (inward, outward)
    own = (
        -max(branch.width / 2, LABEL_GAP + left),
        max(branch.width / 2, LABEL_GAP + right),
    )
    if not branch.parts:
        return _Block(side, (_Place(branch, 0.0, 1),), (own,))
    one, other = (_block(part, side) for part in branch.parts)
    apart = branch.width + 2 * RUN
    for (_, end), (start, _) in zip(one.spans, other.spans, strict=False):
        apart = max(apart, end + GAP - start)
    box = (-branch.width / 2, branch.width / 2)
    places = [place.moved(-apart / 2, box) for place in one.places]
    places += [place.moved(apart / 2, box) for place in other.places]
    corners = (-apart / 2 - LANE, apart / 2 + LANE)
    inner = [
        (min(a[0] - apart / 2, b[0] + apart / 2), max(a[1] - apart / 2, b[1] + apart / 2))
        for a, b in zip_longest(one.spans, other.spans, fillvalue=EMPTY)
    ]
    own = (min(own[0], corners[0]), max(own[1], corners[1]))
    return _Block(side, (_Place(branch, 0.0, 1), *places), (own, *inner))


def _spine_places(
    spine: Sequence[Branch], blocks: Sequence[_Block], widths: Sequence[float]
) -> list[float]:
    """Return the x of each box of the spine."""
    xs = [0.0]
    reached: dict[tuple[int, int], float] = {}
    for number, branch in enumerate(spine):
        outward = branch.outward.width if branch.outward else 0.0
        label = max(branch.inward.width, outward, 2 * RUN)
        x = xs[-1] + sum(widths[number : number + 2]) / 2 + label + GAP
        if number < len(blocks):
            block = blocks[number]
            for level, (left, _) in enumerate(block.spans):
                x = max(x, reached.get((block.side, level), -inf) + GAP - left)
            for level, (_, right) in enumerate(block.spans):
                reached[block.side, level] = x + right
        xs.append(x)
    return xs


def _spine_arrows(branch: Branch, one: Box, other: Box) -> Iterator[Arrow]:
    start, end = one.x + one.width / 2, other.x - other.width / 2
    return _arrows(branch, [(start, 0.0), (end, 0.0)], ((start + end) / 2, 0.0))


def _arrows(branch: Branch, points: Sequence[Point], middle: Point) -> Iterator[Arrow]:
    """The one or two messages of an edge, each on the left of the way it travels."""
    yield _arrow(branch.inward, points, _left_of(points[0], points[1]), middle)
    if branch.outward:
        x, y = _left_of(points[0], points[1])
        yield _arrow(branch.outward, points[::-1], (-x, -y), middle)


def _arrow(label: Label, points: Sequence[Point], side: Point, middle: Point) -> Arrow:
    lefts = [_left_of(a, b) for a, b in pairwise(points)]
    line = []
    for number, (x, y) in enumerate(points):
        around = lefts[max(number - 1, 0) : number + 1]  # at a corner both of its sides
        line.append((x + LANE * sum(s[0] for s in around), y + LANE * sum(s[1] for s in around)))
    # Beside an upright edge, above or below a level one.
    at = (middle[0] + side[0] * LABEL_GAP, middle[1] + side[1] * (LABEL_GAP + LINE_HEIGHT))
    anchor: Anchor = "middle"
    if side[0]:
        anchor = "start" if side[0] > 0 else "end"
    dot = (middle[0] + side[0] * LANE, middle[1] + side[1] * LANE)
    return Arrow(label, tuple(line), dot, at, anchor)


def _left_of(a: Point, b: Point) -> Point:
    """The side that is to the left of the way from ``a`` to ``b``."""
    x, y = direction(a, b)
    return y, -x
