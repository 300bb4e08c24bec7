"""What `make docs` does beside MkDocs: links to files of the project, and docstrings as they are.

MkDocs loads this file as a hook (`on_page_markdown`), Griffe as an extension (`Docstrings`).
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

import griffe

FILES = "https://github.com/splitkv/splitkv/blob/HEAD/"
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
TABLE = re.compile(r"^ *\S.*? {2,}\S", re.M)  # two columns, the second of which is aligned


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/, made links to the project's files; others stay."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def outside(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[1]))
        return match[0] if target.startswith("docs/") else f"]({FILES}{target})"

    return LINK.sub(outside, markdown)


def as_markdown(docstring: str) -> str:
    """A docstring whose prose is Markdown, and whose columns and indented parts stay as they are.

    A part is what stands between two empty lines. An indented one that follows columns or another
    indented one goes on with it.
    """
    blocks: list[tuple[bool, str]] = []
    for part in re.split(r"\n\s*\n", docstring.strip("\n")):
        kept = part.startswith(" ") or bool(TABLE.search(part))
        if kept and blocks and blocks[-1][0]:
            part = f"{blocks.pop()[1]}\n\n{part}"
        blocks.append((kept, part))
    return "\n\n".join(
        f"```text\n{part}\n```" if kept else re.sub(r"::$", ":", part) for kept, part in blocks
    )


class Docstrings(griffe.Extension):
    """`as_markdown` of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
