"""Every link inside the documentation leads somewhere, and every picture is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchor(heading: str) -> str:
    """What a renderer calls it."""
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return words.replace(" ", "-")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor or nothing) of the links that stay here, those in code left out."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            name, _, part = target.partition("#")
            yield (page.parent / name if name else page), part


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for path, part in links(page):
        assert path.exists(), f"{page.name}: {path.name}"
        if part:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert part in map(anchor, headings), f"{page.name}: {path.name}#{part}"


def test_pictures_are_shown() -> None:
    shown = {path.resolve() for page in PAGES for path, _ in links(page)}
    assert shown >= {path.resolve() for path in (ROOT / "docs" / "plots").iterdir()}
