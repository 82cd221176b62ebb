"""The picture of a plan: one arrow a message, coloured and marked; nothing covers anything else."""

import os
import re
import subprocess
import sys
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from comera_fx.plan import plan_linear
from comera_fx.plan.draw import plan_svg
from comera_fx.spec import TTSpec

SVG = "{http://www.w3.org/2000/svg}"
SPEC = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
TTM = TTSpec("ttm", (12, 8, 8), (12, 16, 16), (1, 5, 5, 1))
SMALL = TTSpec("tt", (4,), (6,), (1, 2, 1))
TIMES = "\N{MULTIPLICATION SIGN}"
LETTER_WIDTH = 0.6  # of a monospace font, in font sizes

Box = tuple[float, float, float, float]


def tt_spec(num_cores: int, mode: int, rank: int) -> TTSpec:
    num_in = num_cores // 2
    ranks = (1, *(rank,) * (num_cores - 1), 1)
    return TTSpec("tt", (mode,) * num_in, (mode,) * (num_cores - num_in), ranks).clipped()


def ttm_spec(num_cores: int, mode: int, rank: int) -> TTSpec:
    ranks = (1, *(rank,) * (num_cores - 1), 1)
    return TTSpec("ttm", (mode,) * num_cores, (mode,) * num_cores, ranks).clipped()


def parsed(plan) -> ElementTree.Element:
    return ElementTree.fromstring(plan_svg(plan))


def messages(root) -> dict[str, ElementTree.Element]:
    """The groups of all messages by name; each is drawn once."""
    groups = [g for g in root.iter(f"{SVG}g") if "message" in g.get("class").split()]
    named = {group.get("data-name"): group for group in groups}
    assert len(named) == len(groups)
    return named


def classes(group) -> set[str]:
    return set(group.get("class").split()) - {"message"}


def points(path) -> list[tuple[float, float]]:
    """The ends and corners of a line; of a rounded corner, the point that it rounds."""
    found = re.findall(r"([MLQ])([-\d.]+),([-\d.]+)", path.get("d"))
    given = [(letter, float(x), float(y)) for letter, x, y in found]
    corners = [i for i, (letter, _, _) in enumerate(given) if letter == "Q"]
    return [point[1:] for i, point in enumerate(given) if i + 1 not in corners]


def ends(group) -> tuple[tuple[float, float], tuple[float, float]]:
    """Tail and tip of an arrow."""
    lane, head = group.findall(f"{SVG}path")
    return points(lane)[0], points(head)[0]


def plain(text) -> str:
    return text.text.replace(TIMES, "x")


def text_box(text) -> Box:
    size = float(text.get("font-size"))
    width = len(text.text) * size * LETTER_WIDTH
    x, y = float(text.get("x")), float(text.get("y"))
    left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
    return left, y - 0.8 * size, left + width, y + 0.25 * size


def rect_box(rect) -> Box:
    x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def boxes_by_text(root) -> dict[str, Box]:
    """Boxes of the leaves; the legend's sample comes last."""
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "leaf"][:-1]
    return {g.find(f"{SVG}text").text: rect_box(g.find(f"{SVG}rect")) for g in groups}


def touches(box: Box, point: tuple[float, float]) -> bool:
    x, y = point
    grown = (box[0] - 0.2, box[1] - 0.2, box[2] + 0.2, box[3] + 0.2)
    return grown[0] <= x <= grown[2] and grown[1] <= y <= grown[3]


@pytest.mark.parametrize("spec", [SPEC, TTM, SMALL, ttm_spec(1, 4, 1), tt_spec(9, 3, 1)])
@pytest.mark.parametrize("needs_input_grad", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 512])
def test_every_message_is_one_arrow_in_the_colour_of_its_phase(spec, needs_input_grad, num_tokens):
    plan = plan_linear(spec, num_tokens, "flops", needs_input_grad)
    drawn = {
        name: classes(group) & {"forward", "backward"}
        for name, group in messages(parsed(plan)).items()
    }
    steps = plan.steps
    expected = {leaf.name: {"forward"} for leaf in steps.leaves}
    expected |= {step.out.name: {"forward"} for step in steps.forward}
    expected |= {steps.target.name: {"backward"}}
    expected |= {step.out.name: {"backward"} for step in steps.backward}
    assert drawn == expected
    assert ("dx" in drawn) == needs_input_grad


def test_phases_differ_in_colour_on_light_and_on_dark_ground():
    style = parsed(plan_linear(SMALL, 8)).find(f"{SVG}style").text
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    assert ".forward { color: #0969da }" in light
    assert ".backward { color: #bc4c00 }" in light
    assert ".forward { color: #58a6ff }" in dark
    assert ".backward { color: #f0883e }" in dark
    assert ".card { fill: #ffffff" in light
    assert ".card { fill: #0d1117" in dark


@pytest.mark.parametrize("spec", [SPEC, TTM])
@pytest.mark.parametrize("objective", ["flops", "memory"])
def test_saved_messages_have_a_dot(spec, objective):
    plan = plan_linear(spec, 512, objective)
    groups = messages(parsed(plan))
    saved = {name for name, group in groups.items() if "saved" in classes(group)}
    dotted = {name for name, group in groups.items() if group.find(f"{SVG}circle") is not None}
    assert saved == dotted == plan.saved_names
    again = {name for name, group in groups.items() if "again" in classes(group)}
    assert again == {message.name for message in plan.steps.saved} - saved


def test_what_backward_makes_again_is_dashed():
    text = plan_svg(plan_linear(SPEC, 4096, "memory"))
    assert '<g class="message forward again" data-name="G5G6">' in text
    assert ".again .lane { stroke-dasharray: 5 3 }" in text
    assert "not saved: the backward pass makes it again" in text
    assert "makes it again" not in plan_svg(plan_linear(SPEC, 4096, "flops"))


def test_arrows_are_labelled_with_name_and_shape():
    groups = messages(parsed(plan_linear(SPEC, 4096, "flops")))
    labels = {name: [plain(text) for text in g.findall(f"{SVG}text")] for name, g in groups.items()}
    assert labels["x"] == ["x", "4096x12x8x8"]
    assert labels["xG1G2G3"] == ["xG1..G3", "4096x30"]
    assert labels["G1G2"] == ["G1G2", "12x8x30"]
    assert labels["dyxG3G4G5G6"] == ["dyxG3..G6", "12x8x30"]
    assert labels["dG6"] == ["dG6", "12x12"]


def test_a_tooltip_tells_bytes_and_flops():
    groups = messages(parsed(plan_linear(SPEC, 4096, "flops")))
    assert plain(groups["xG1G2G3"].find(f"{SVG}title")) == (
        "xG1G2G3: 4096x30, 491,520 bytes, 188,743,680 FLOPs, saved for backward"
    )
    assert plain(groups["dy"].find(f"{SVG}title")) == "dy: 4096x8x8x12, 12,582,912 bytes, 0 FLOPs"


def test_the_head_says_what_is_planned_and_what_it_costs():
    plan = plan_linear(SPEC, 4096, "flops")
    texts = [plain(text) for text in parsed(plan).findall(f"{SVG}text")]
    assert texts[:5] == [
        "tt layer 768 → 768, 4,096 tokens",
        "modes  12x8x8 → 8x8x12  ranks 1x12x30x30x30x12x1",
        "FLOPs  forward 380,390,400  backward 760,780,800",
        "dense  forward 4,831,838,208  backward 9,663,676,416",
        f"bytes  peak {plan.peak_bytes:,}  saved for backward {plan.saved_bytes:,}",
    ]


def test_padding_and_recomputation_are_told():
    plan = plan_linear(SPEC, 4096, "memory")
    assert f"  recomputed {plan.flops_recomputed:,}</text>" in plan_svg(plan)
    padded = plan_linear(SPEC, 4096, "time")
    assert padded.pads
    assert "  padded 30 as 32</text>" in plan_svg(padded)
    assert f"  padding {padded.flops_padding:,}" in plan_svg(padded)


def test_every_node_says_what_its_messages_cost():
    plan = plan_linear(SPEC, 4096, "flops")
    nodes = [g for g in parsed(plan).iter(f"{SVG}g") if g.get("class") == "node"][:-1]
    texts = sorted(node.find(f"{SVG}text").text for node in nodes)
    assert texts == ["1.38M", "1.38M", "189M", "189M", "69.1K", "69.1K"]


@pytest.mark.parametrize("spec", [SPEC, TTM, SMALL, tt_spec(12, 4, 9)])
def test_leaves_go_in_and_their_gradients_come_out(spec):
    root = parsed(plan_linear(spec, 64, "flops"))
    leaves, arrows = boxes_by_text(root), messages(root)
    assert set(leaves) == {"x", "dy", *(f"G{k + 1}" for k in range(spec.num_cores))}
    for name in set(leaves) - {"dy"}:
        assert touches(leaves[name], ends(arrows[name])[0])
        assert touches(leaves[name], ends(arrows[f"d{name}"])[1])
    assert touches(leaves["dy"], ends(arrows["dy"])[0])
    assert touches(leaves["dy"], ends(arrows["y"])[1])
    assert leaves["x"][2] < leaves["dy"][0]
    assert leaves["x"][1] == leaves["dy"][1]


WIDE = [
    *(tt_spec(num_cores, 4, 9) for num_cores in range(2, 13)),
    *(tt_spec(num_cores, 3, 1) for num_cores in (2, 5, 8)),
    *(ttm_spec(num_cores, 4, 5) for num_cores in range(1, 9)),
    TTSpec("tt", (100, 1, 20), (1, 1, 700), (1, 64, 64, 64, 64, 64, 1)).clipped(),
]


@pytest.mark.parametrize("spec", WIDE, ids=lambda spec: f"{spec.layout}-{spec.num_cores}")
@pytest.mark.parametrize(("num_tokens", "objective"), [(1, "flops"), (100_000, "memory")])
def test_nothing_covers_anything_else(spec, num_tokens, objective):
    root = parsed(plan_linear(spec, num_tokens, objective))
    texts = [(text.text, text_box(text)) for text in root.iter(f"{SVG}text")]
    assert not [(a, b) for (a, p), (b, q) in combinations(texts, 2) if overlap(p, q)]

    rects = [rect_box(rect) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "box"]
    assert not [pair for pair in combinations(rects, 2) if overlap(*pair)]

    lines = [
        (
            group.get("data-name"),
            (min(a[0], b[0]), min(a[1], b[1]), max(a[0], b[0]), max(a[1], b[1])),
        )
        for group in messages(root).values()
        for a, b in pairwise(points(group.find(f"{SVG}path")))
    ]
    assert not [(name, text) for name, line in lines for text, box in texts if overlap(line, box)]
    assert not [(a, b) for (a, p), (b, q) in combinations(lines, 2) if a != b and overlap(p, q)]

    x, y, width, height = map(float, root.get("viewBox").split())
    for left, top, right, bottom in [
        *rects,
        *(box for _, box in texts),
        *(box for _, box in lines),
    ]:
        assert x < left <= right < x + width
        assert y < top <= bottom < y + height


def test_the_text_is_the_same_from_run_to_run():
    code = (
        "from comera_fx.plan import plan_linear\n"
        "from comera_fx.plan.draw import plan_svg\n"
        "from comera_fx.spec import TTSpec\n"
        "import sys\n"
        "sys.stdout.buffer.write(plan_svg(plan_linear("
        f"{SPEC!r}, 512, 'flops')).encode())"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert done.stdout.decode() == plan_svg(plan_linear(SPEC, 512, "flops"))


def test_a_plan_is_written_to_a_file(tmp_path):
    plan = plan_linear(SMALL, 8)
    plan.to_svg(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") == plan_svg(plan)
