"""The documentation: links lead somewhere, pictures are shown, figures say where they are from.

Guides and pages of kernels are short and say what is; dated tables and what was tried are in
measurements/.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
MEASUREMENTS = sorted((ROOT / "measurements").glob("*.md"))
PAGES = [README, *DOCS, *MEASUREMENTS, *sorted((ROOT / "src").rglob("*.md"))]

# Of a page: what a renderer breaks at. A screen has some 55 of them.
COLUMNS, TWO_SCREENS = 100, 110

DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
PLACE = re.compile(r"\b(H200|H100|A100|B200|L4|CPU)\b")
# A command, or the page of its table.
SOURCE = re.compile(r"`(splitkv|make|pytest|python) [^`]*`|^ {4}splitkv |measurements/", re.M)
FIGURE = re.compile(
    r"\d ?(us|µs|ms|s|TFLOP/s|GB/s|TB/s)\b|\d (micro|milli)?seconds"
    r"|\d(\.\d+)? ?(times|x|%) (as |less |more )?(fast|slow|long)|\d tokens? a second"
)
UNIT_OF_COLUMN = re.compile(r"\b(us|ms|microseconds|TFLOP/s|TB/s|tokens a second)\b")
LOG = re.compile(r"\bone-off\b|\btried and\b|\bTried\b|\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7}\b")

# Numbers of a protocol or a rule, which nobody measured.
CHOSEN = {
    "about 1.5 ms each",
    "in bursts of 15 ms",
    "with 2 s of processor time",
    "takes more than 50 us to answer a call",
    "is more than 1 % slower than the default",
    "where it promises to be 5 % faster",
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def every(pages: list[Path]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return pytest.mark.parametrize("page", pages, ids=name_of)


def prose(page: Path) -> str:
    """What is no block of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def paragraphs(page: Path) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", prose(page)) if part.strip()]


def anchor(heading: str) -> str:
    """What a renderer calls it."""
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return words.replace(" ", "-")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor or nothing) of the links that stay here, those in code left out."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            name, _, part = target.partition("#")
            yield (page.parent / name if name else page), part


@every(PAGES)
def test_links(page: Path) -> None:
    for path, part in links(page):
        assert path.exists(), f"{page.name}: {path.name}"
        if part:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert part in map(anchor, headings), f"{page.name}: {path.name}#{part}"


def test_pictures_are_shown() -> None:
    shown = {path.resolve() for page in PAGES for path, _ in links(page)}
    assert shown >= {
        path.resolve()
        for folder in ("docs", "measurements")
        for path in ROOT.glob(f"{folder}/plots/*")
    }


# --- figures -----------------------------------------------------------------------------------


def test_what_a_figure_is() -> None:
    for text in ("3.8 us", "a rate of 574 TFLOP/s", "1.32 times as fast", "12 % slower", "33 ms."):
        assert FIGURE.search(text), text
    for text in ("64 keys", "2 MiB", "sm_90", "3.10 or newer", "128 heads", "at most 65535"):
        assert not FIGURE.search(text), text
    assert UNIT_OF_COLUMN.search("| floor us | ours |")
    assert LOG.search("at 71633b7, by a script") and not LOG.search("1048576 elements")


def bare_figures(page: Path) -> Iterator[str]:
    """Paragraphs and tables with a measured number, but without date, machine and command."""
    before = ""
    for part in paragraphs(page):
        text = part if part.lstrip().startswith("|") else " ".join(part.split())
        for chosen in CHOSEN:
            text = text.replace(chosen, "")
        said = re.sub(r"`[^`]*`", "", text)
        table = part.lstrip().startswith("|")
        measured = FIGURE.search(said)
        if table:
            measured = measured or UNIT_OF_COLUMN.search(said.partition("\n")[0])
        beside = before + part if table else part
        if measured and not all(wanted.search(beside) for wanted in (DATE, PLACE, SOURCE)):
            yield part.strip().split("\n")[0]
        before = part


@every([README, *DOCS])
def test_figures_say_where_they_are_from(page: Path) -> None:
    assert list(bare_figures(page)) == []


def test_chosen_numbers_are_on_a_page() -> None:
    text = " ".join(" ".join(page.read_text().split()) for page in DOCS)
    assert [chosen for chosen in CHOSEN if chosen not in text] == []


@every(DOCS)
def test_docs_are_no_log(page: Path) -> None:
    """Commits, and what was tried, are in measurements/."""
    assert [match[0] for match in LOG.finditer(prose(page))] == []


@every(DOCS)
def test_tables_of_results_are_elsewhere(page: Path) -> None:
    for part in paragraphs(page):
        if part.lstrip().startswith("|"):
            assert not UNIT_OF_COLUMN.search(re.sub(r"`[^`]*`", "", part.partition("\n")[0]))


@every([page for page in MEASUREMENTS if page.name != "README.md"])
def test_measurements_have_a_date_and_a_machine_and_are_listed(page: Path) -> None:
    text = page.read_text()
    assert DATE.search(text) and PLACE.search(text)
    assert SOURCE.search(text) or "one-off script" in text
    assert f"]({page.name})" in (ROOT / "measurements" / "README.md").read_text()


# --- the README and the pages ------------------------------------------------------------------


def test_the_readme_in_order() -> None:
    text = README.read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == ["Install", "Use", "How fast", "What works", "GPUs", "Links"]
    tables = [part for part in paragraphs(README) if part.lstrip().startswith("|")]
    assert len(tables) == 1
    assert len(text.split()) < 900


def test_commands_of_the_readme() -> None:
    """`make demo` and `make test` are what it tells to run; what it names besides is there."""
    text, makefile = README.read_text(), (ROOT / "Makefile").read_text()
    blocks = "".join(re.findall(r"```console\n(.*?)```", text, re.S))
    assert re.findall(r"^\$ make (\S+)", blocks, re.M) == ["demo", "test"]
    for target in re.findall(r"`?make ([\w-]+)`", text):
        assert re.search(rf"^([\w $()-]+ )?{target}( [\w $()-]+)?:", makefile, re.M), target


@every([page for page in DOCS if page.parent.name in ("kernels", "guides")])
def test_guides_and_pages_of_kernels_are_two_screens(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert sum(max(1, -(-len(line) // COLUMNS)) for line in lines) <= TWO_SCREENS


def test_the_reading_guide_has_eight_files() -> None:
    text = (ROOT / "docs" / "guides" / "reading.md").read_text()
    files = re.findall(r"^\| \d \| `([^`]+)` \|", text, re.M)
    assert len(files) == 8 and all((ROOT / file).is_file() for file in files)


@every([page for page in DOCS if page.parent.name == "guides"])
def test_files_that_a_guide_names(page: Path) -> None:
    """Those whose whole path is given."""
    for name in re.findall(r"`((?:src|tests|docs)/[\w/.-]+\.(?:py|md|json))`", page.read_text()):
        assert (ROOT / name).is_file(), name


# --- the site ----------------------------------------------------------------------------------


def test_the_site_has_every_page() -> None:
    named = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)
    assert len(set(named)) == len(named)


def test_the_reference_has_every_public_name() -> None:
    import splitkv
    from splitkv import cache, flash_attn, testing

    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for name in splitkv.__all__:
        assert re.search(rf"^::: splitkv\.{name}$", text, re.M), name
    for name in (*flash_attn.__all__, *set(cache.__all__) - {"quantize_kv"}):
        assert re.search(rf"^        - {name}$", text, re.M), name
    for name in testing.__all__:
        if getattr(testing, name).__module__ != testing.__name__:
            continue  # a value that it hands on
        assert re.search(rf"^        - {name}$", text, re.M), name


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/building.py, where Griffe need not be installed."""
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    spec = importlib.util.spec_from_file_location("building", ROOT / "docs" / "building.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_site(building: ModuleType) -> None:
    """Into docs/ they stay; elsewhere they lead to the project's files."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/reading.md"))

    def made(link: str) -> str:
        return building.on_page_markdown(f"[a]({link})", page=page)

    for link in ("../numerics.md#the-tolerance-rule", "#rooms", "https://a.b/c", "add-a-gpu.md"):
        assert made(link) == f"[a]({link})"
    for name in ("measurements/a.md#b", "src/splitkv/kernels/README.md"):
        assert made(f"../../{name}") == f"[a](https://github.com/splitkv/splitkv/blob/HEAD/{name})"


def test_docstrings_of_the_site(building: ModuleType) -> None:
    """Columns and what is indented stay as they are; prose is prose."""
    columns = "q    [batch]\nlong_name\n     of two lines"
    text = f"Adds.\n\n{columns}\n\nAs PyTorch::\n\n    a = b\n\n    c"
    assert building.as_markdown(text) == (
        f"Adds.\n\n```text\n{columns}\n```\n\nAs PyTorch:\n\n```text\n    a = b\n\n    c\n```"
    )
