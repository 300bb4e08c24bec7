"""What the house style asks of the sources and can be read off them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "splitkv"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
KERNEL_FILES = [
    path
    for path in sorted((PACKAGE / "kernels").rglob("*.py"))
    if path.parent.name != "tile" and re.search(r"^@triton\.jit|^KERNEL = ", path.read_text(), re.M)
]
SECTIONS = ("Computes", "Shapes", "Grid", "Traffic", "Numerics", "Limits")
MAX_LINES = 550
BANNED = (r"# (TODO|FIXME|XXX)\b", r"# fmt: [o]ff", r"# [n]oqa(?!: )", r"type: [i]gnore(?!\[)")
MAX_JIT_LINES = 120  # the body: a signature has a line an argument


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "expected a module docstring"
    for banned in BANNED:
        assert not re.search(banned, text), f"{banned} found"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=relative)
def test_file_stays_small(path: Path) -> None:
    assert path.read_text().count("\n") <= MAX_LINES


@pytest.mark.parametrize("path", KERNEL_FILES, ids=relative)
def test_kernel_docstring_has_every_section_in_order(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = [
        line.split()[0].rstrip(",") for line in docstring.splitlines() if re.match(r"[A-Z]", line)
    ]
    assert tuple(word for word in found if word in SECTIONS) == SECTIONS


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=relative)
def test_kernel_file_decides_nothing(path: Path) -> None:
    text = path.read_text()
    for banned in ("autotune", "os.environ", "get_device_capability", "getenv"):
        assert banned not in text, f"{banned}: that is a policy's or a device's business"
    assert not re.search(r"\b(USE|IS|HAS)_\w+: tl\.constexpr", text), "pass None instead of a flag"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=relative)
def test_device_functions_stay_readable(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            length = (node.end_lineno or 0) - node.body[0].lineno + 1
            assert length <= MAX_JIT_LINES, f"{node.name} has {length} lines"


def test_kernel_files_are_found() -> None:
    assert {path.stem for path in KERNEL_FILES} >= {"combine", "decode_split"}
