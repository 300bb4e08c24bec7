"""One HTML page that needs no other file: Markdown as elements, pictures as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from splitkv.lab.report.markdown import cells as cells_of
from splitkv.lab.report.plots import NO_DATE, SVG

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
div { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; }
th { text-align: left; }
.number { text-align: right; white-space: nowrap; }
svg { max-width: 100%; height: auto; background: white; }
"""


class Section(NamedTuple):
    """A part of a page: its heading, its text, and pictures by name below it."""

    heading: str
    markdown: str
    pictures: Mapping[str, Figure]


def html(title: str, sections: Iterable[Section]) -> str:
    """The page, its sections in their order."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
    ]
    for heading, markdown, pictures in sections:
        parts += [f"<h2>{escape(heading)}</h2>", *tags(markdown)]
        parts += [f"<div>{svg(figure)}</div>" for figure in pictures.values()]
    return "\n".join(parts) + "\n</html>\n"


def tags(markdown: str) -> Iterator[str]:
    """The Markdown that reports are made of: headings, tables, lists and paragraphs."""
    for block in markdown.strip().split("\n\n"):
        lines = block.strip().splitlines()
        if block.startswith("|"):
            yield table(lines)
        elif block.startswith("#"):
            level = min(6, block.index(" ") + 1)  # the page's own title is above
            yield f"<h{level}>{escape(block.lstrip('# '))}</h{level}>"
        elif block.startswith("* "):
            items = (f"<li>{escape(line.removeprefix('* '))}</li>" for line in lines)
            yield f"<ul>{''.join(items)}</ul>"
        elif lines:
            yield f"<p>{escape(block)}</p>"


def table(lines: Sequence[str]) -> str:
    """A Markdown table; what its rule aligns to the right is a number."""
    header, rule, *rows = map(cells_of, lines)
    kinds = [' class="number"' if mark.endswith(":") else "" for mark in rule]

    def row(tag: str, cells: Sequence[str]) -> str:
        given = zip(kinds, cells, strict=True)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in given)

    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    head = f"<thead><tr>{row('th', header)}</tr></thead>"
    return f"<div><table>{head}\n<tbody>\n{body}\n</tbody></table></div>"


def svg(figure: Figure) -> str:
    """The picture as an element: without a prolog, and without names of groups, which would be
    there twice on a page of several."""
    text = io.StringIO()
    with matplotlib.rc_context(SVG):
        figure.savefig(text, format="svg", metadata=NO_DATE)
    drawn = text.getvalue()
    return re.sub(r'<g id="[^"]*"', "<g", drawn[drawn.index("<svg") :])
