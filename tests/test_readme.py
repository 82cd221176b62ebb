"""Every snippet of the README runs, and every path it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_no_placeholder_is_left():
    assert not re.findall(r"^[A-Z_]+$", README, flags=re.MULTILINE)


def test_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "compressed layers:" in printed
    assert "comera_fx.tt_linear" in printed
    assert list((tmp_path / "build" / "passes").glob("*.diff"))
    assert names["adapter"].size <= names["adapter"].target_size
    assert "stage late, size" in printed


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(path):
    assert path.startswith("http") or (ROOT / path).exists()
