"""Pictures of graphs: what has a box, and where boxes and lines go."""

from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx.inspect.blocks import MOST_BLOCKS, blocks_of
from comera_fx.inspect.draw import graph_svg
from comera_fx.inspect.layered import place
from comera_fx.lowering import lowering_passes
from comera_fx.passes.pipeline import run_pipeline
from tests.inspect.models import ids, optimised


def test_a_small_graph_has_a_box_an_operator():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    blocks = blocks_of(comera_fx.graph(model))
    assert [block.title for block in blocks] == ["input_1", "Linear", "ReLU", "Linear", "output"]
    assert [block.reads for block in blocks] == [(), (0,), (1,), (2,), (3,)]
    assert [block.kind for block in blocks] == ["input", "plain", "plain", "plain", "output"]


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "no-inputs"])
def test_a_large_graph_has_a_box_a_module(given):
    gm = comera_fx.graph(optimised(), ids() if given else None)
    blocks = blocks_of(gm)
    assert len(blocks) <= MOST_BLOCKS < len(gm.graph.nodes)
    blocks_by_title = {block.title: block for block in blocks if block.kind == "tt"}
    for number in range(6):
        assert "4 \N{MULTIPLICATION SIGN} tt_linear" in blocks_by_title[f"blocks.{number}"].lines
    assert all(read < number for number, block in enumerate(blocks) for read in block.reads)


def test_what_is_made_of_weights_alone_is_one_box(monkeypatch):
    monkeypatch.setattr(
        comera_fx.lowering,
        "worth_sharing",
        lambda spec, nodes: "factors" if len(nodes) > 1 else "own",
    )
    blocks = blocks_of(comera_fx.graph(optimised(), ids(), share=True), most=20)
    assert [block.title for block in blocks if block.kind == "weights"] == ["made of weights alone"]
    marked = [block.title for block in blocks if block.on_weights]
    assert marked == [f"blocks.{number}" for number in range(6)]


@pytest.mark.parametrize("expanded", [False, True], ids=["operators", "products"])
def test_a_dynamo_graph_is_drawn_without_the_weights_it_is_given(expanded):
    found = []

    def look(gm, example_inputs):
        made = run_pipeline(gm, lowering_passes() if expanded else [])
        found.extend(blocks_of(made, most=20))
        return gm.forward

    torch.compile(optimised(), backend=look, dynamic=False)(ids())
    assert [block.title for block in found if block.kind == "input"] == ["l_ids_"]
    on_cores = [block.title for block in found if block.kind == "tt"]
    assert on_cores[-7:] == [*(f"blocks.{number}" for number in range(6)), on_cores[-1]]


def test_an_empty_and_a_bare_graph_are_drawn():
    for model in (nn.Identity(), nn.Linear(3, 3)):
        ElementTree.fromstring(graph_svg(comera_fx.graph(model), "<bare> & short"))


def test_the_picture_is_the_same_every_time_and_names_the_parts():
    texts = [graph_svg(comera_fx.graph(optimised(), ids()), "six") for _ in range(2)]
    assert texts[0] == texts[1]
    tree = ElementTree.fromstring(texts[0])
    assert tree.tag.endswith("svg")
    assert "blocks.5" in texts[0]
    assert texts[0].count('class="tt"') >= 6


def test_boxes_do_not_overlap_and_lines_pass_between_them():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        num = int(torch.randint(2, 25, (), generator=generator))
        sizes = [
            (float(w), float(h)) for w, h in torch.randint(10, 120, (num, 2), generator=generator)
        ]
        reads = [
            sorted({int(torch.randint(number, (), generator=generator)) for _ in range(2)})
            if number
            else []
            for number in range(num)
        ]
        placed = place(sizes, reads)
        boxes = [
            (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
            for (x, y), (w, h) in zip(placed.centers, sizes, strict=True)
        ]
        for a, b in combinations(boxes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        for left, top, right, bottom in boxes:
            assert -0.01 <= left <= right <= placed.width + 0.01
            assert -0.01 <= top <= bottom <= placed.height + 0.01
        assert len(placed.lines) == sum(map(len, reads))
        for line in placed.lines:
            for x, y in line[1:-1]:
                inside = [b for b in boxes if b[0] < x < b[2] and b[1] < y < b[3]]
                assert not inside
