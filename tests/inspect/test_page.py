"""The page: what is on it, that it needs no network, and that a browser draws its pictures."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from comera_fx import cli
from comera_fx.inspect.inspection import inspect_model
from comera_fx.inspect.page import build_page
from comera_fx.inspect.show import show
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from tests.inspect.models import dense, ids, optimised

HERE = "tests.inspect.models"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURE = re.compile(r'src="data:image/svg\+xml;base64,([^"]*)"')
FORWARD, BACKWARD, ON_CORES = (9, 105, 218), (188, 76, 0), (130, 80, 223)
"""Colours of the messages of a plan, and of what runs on cores in a graph."""


@pytest.fixture(scope="module")
def page() -> str:
    return build_page(inspect_model(optimised(2), ids()), "two <blocks>")


class Elements(HTMLParser):
    """Checks that elements are closed in order, and collects what could be fetched."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open, self.references, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    assert not elements.open
    return elements


def test_nothing_is_fetched(page):
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page
    references = read(page).references
    assert {reference[:5] for reference in references} == {"data:", "#mode", "#grap", "#plan"} | {
        "#kern",
        "#time",
    }


def test_every_part_of_the_model_is_on_it(page):
    texts = read(page).texts
    shown = " ".join(texts)
    for heading in ("Model", "Rewritten graph", "Plans", "Kernels", "Predicted times"):
        assert heading in texts
    assert "two <blocks>" in texts
    assert texts.count("out") == 2
    for words in ("TTLinear", "ShareInput", "no copy", "ms predicted", "tt_linear", "index_select"):
        assert words in shown
    for name in ("blocks.0.q", "blocks.1.v", "head", "embedding"):
        assert name in shown


def test_sizes_of_the_tree_are_those_of_the_report():
    found = inspect_model(optimised(2), ids())
    assert found.tree.params == found.report.params_after
    assert found.tree.dense_params == found.report.params_before
    assert [part.name for part in found.tree.parts] == ["embedding", "blocks", "head"]
    blocks = found.tree.parts[1]
    assert sum(part.params for part in blocks.parts) == blocks.params


def test_its_pictures_are_whole_and_stand_alone(page):
    pictures = [base64.b64decode(found).decode() for found in PICTURE.findall(page)]
    for text in pictures:
        ElementTree.fromstring(text)
        assert not re.search(r"href|url\(|@import|<script", text)
    assert sum("message of the forward pass" in text for text in pictures) == 2
    assert sum('class="input"' in text for text in pictures) >= 2


def test_it_is_the_same_every_time(page):
    assert build_page(inspect_model(optimised(2), ids()), "two <blocks>") == page


@pytest.mark.parametrize("model", [dense(), nn.Identity(), nn.Linear(3, 3)])
def test_a_model_without_cores(model):
    found = inspect_model(model)
    text = build_page(found, "plain")
    read(text)
    assert "comera_fx.optimize first" in text
    assert "Nothing runs on cores." in text
    console = Console(record=True, width=150)
    show(found, "plain", console)
    assert "comera_fx.optimize first" in console.export_text()


def test_a_layer_by_itself():
    layer = optimised(1).head
    assert "(the model itself)" in build_page(inspect_model(layer, torch.randn(4, 96)), "layer")


def test_a_layer_without_ranks_left():
    layer = TTLinear(TTSpec("tt", (8, 8), (8, 8), (1, 0, 0, 0, 1)), 64, 64)
    text = build_page(inspect_model(layer, torch.randn(4, 64)), "dead")
    read(text)
    assert "No linear layer is in TT form with ranks left." in text


def test_the_same_as_tables(capsys):
    console = Console(record=True, width=170)
    show(inspect_model(optimised(2), ids()), "two [blocks]", console)
    text = console.export_text()
    assert "two [blocks]" in text
    for words in ("70", "blocks.0", "Plan 1", "no copy", "Predicted times", "Look-ups"):
        assert words in text
    assert "forward   " in text


# ---- from the command line ----


def invoke(*args: object):
    return CliRunner().invoke(cli.app, ["inspect", *map(str, args)], env={"COLUMNS": "170"})


def test_the_command_prints_tables_or_writes_a_page(tmp_path):
    result = invoke(f"{HERE}:with_inputs")
    assert result.exit_code == 0, result.output
    assert "Rewritten graph" in result.output
    result = invoke(f"{HERE}:with_inputs", "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert result.output == f"Page: {tmp_path / 'page.html'}\n"
    assert "<h2>Kernels</h2>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing"], "no factory is named"),
        ([f"{HERE}:missing"], "the factory is not there"),
        ([f"{HERE}:dense", "--html", "not/there/page.html"], "the page cannot be written"),
    ],
)
def test_a_fault_is_told_without_a_traceback(args, said):
    result = invoke(*args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "mend:" in result.stderr
    assert "Traceback" not in result.output + result.stderr


# ---- in a browser ----


def screenshot(page: str, folder: Path) -> np.ndarray:
    """Return what a browser shows of a page, ``(height, width, 3)``, 0 to 255."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--force-device-scale-factor=1", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *("--window-size=1300,5200", f"--user-data-dir={folder / 'profile'}"),
        *(f"--screenshot={folder / 'shot.png'}", (folder / "page.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (folder / "shot.png").exists(), done.stderr
    return np.round(255 * imread(folder / "shot.png")[..., :3]).astype(int)


def extent(shot: np.ndarray, colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many pixels have a colour, and the width and height that they span."""
    ys, xs = np.nonzero((shot == colour).all(-1))
    return (len(ys), int(np.ptp(xs)), int(np.ptp(ys))) if len(ys) else (0, 0, 0)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH")
def test_a_browser_draws_the_pictures(page, tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    shot = screenshot(page, tmp_path / "with")
    bare = screenshot(PICTURE.sub('src="data:,"', page), tmp_path / "without")
    for colour, width, height in (
        (FORWARD, 300, 300),
        (BACKWARD, 300, 300),
        (ON_CORES, 100, 400),
    ):
        count, across, down = extent(shot, colour)
        assert count > 500
        assert across > width
        assert down > height
        assert extent(bare, colour)[0] == 0
    # The graph stands above the plans.
    top_of = {
        colour: np.nonzero((shot == colour).all(-1))[0].min() for colour in (ON_CORES, FORWARD)
    }
    assert top_of[ON_CORES] < top_of[FORWARD]
