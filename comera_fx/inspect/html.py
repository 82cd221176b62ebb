"""Pieces of a page that stands on its own: no script, and nothing is fetched."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 76rem; margin: 2.5rem auto;
       padding: 0 1.25rem; background: light-dark(#fcfcfa, #16181b);
       color: light-dark(#1d2126, #d9dcdf); }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.8rem 0 .4rem; }
p { max-width: 48rem; }
nav a { margin-right: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .28rem 1.1rem .28rem 0; text-align: left; vertical-align: top;
         border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0; overflow-x: auto; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { font-size: .88rem; opacity: .75; }
details { margin: .4rem 0; }
summary { cursor: pointer; }
.tree details { margin: 0 0 0 1.3rem; }
.tree summary, .tree div { display: flex; gap: 1rem; border-bottom: 1px solid var(--line); }
.tree summary::before { content: "\\25B8"; width: .3rem; }
.tree details[open] > summary::before { content: "\\25BE"; }
.tree div { margin-left: 2.6rem; }
.tree b { font-weight: 600; }
.tree .kind { opacity: .75; flex: 1; overflow-wrap: anywhere; font-size: .9rem; }
.tree .size { font-variant-numeric: tabular-nums; text-align: right; min-width: 6.5rem; }
.bar { display: block; height: .7rem; min-width: 1px; }
.bars { width: 22rem; }
pre { font-size: .8rem; overflow-x: auto; line-height: 1.4; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Browsers then refuse whatever would be fetched."""


def document(title: str, body: Iterable[str]) -> str:
    """Return a page.

    Args:
        title: Plain text.
        body: HTML.
    """
    inner = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{inner}\n</body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """Return a table of plain text, its last columns standing right.

    Args:
        columns: Headings.
        rows: One cell a column.
        numbers: How many of the last columns hold numbers.

    Example:
        >>> table(["name", "size"], [["a<b", "3"]], numbers=1).count("a&lt;b")
        1
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        left = len(cells) - numbers
        starts = [f'<{tag} class="number">' if k >= left else f"<{tag}>" for k in range(len(cells))]
        return "".join(
            f"{start}{escape(cell)}</{tag}>" for start, cell in zip(starts, cells, strict=True)
        )

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{line('th', columns)}</tr></thead>"
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table></div>'


def picture(svg: str, caption: str) -> str:
    """Return a figure that holds an SVG, apart from the page so that no style leaks.

    Args:
        svg: Text of an SVG that stands on its own.
        caption: Plain text; also what is read out in place of the picture.
    """
    data = base64.b64encode(svg.encode()).decode()
    shown = escape(caption)
    return (
        f'<figure><img alt="{shown}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{shown}</figcaption></figure>"
    )


def folded(summary: str, inner: str) -> str:
    """Return HTML that shows once its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>"


def preformatted(text: str) -> str:
    """Return text as it is, in columns."""
    return f"<pre>{escape(text)}</pre>"
