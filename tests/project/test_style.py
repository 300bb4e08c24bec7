"""What the house style asks of the sources and can be read off them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "splitkv"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
KERNEL_FILES = [
    path
    for path in sorted((PACKAGE / "kernels").rglob("*.py"))
    if path.parent.name != "tile"
    and (re.search(r"^@triton\.jit", path.read_text(), re.M) or path.stem.startswith("torch_"))
]
SECTIONS = ("Computes", "Shapes", "Grid", "Traffic", "Numerics", "Limits")
BANNED = (r"# (TODO|FIXME|XXX)\b", r"# fmt: [o]ff", r"# [n]oqa(?!: )", r"type: [i]gnore(?!\[)")
MAX_PARAMETERS, MAX_RESULTS, MAX_NESTING = 10, 3, 4  # of a Python or device function
NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef)
FORBIDDEN_OPENINGS = ("Of ", "As ", "The same ", "What ", "Those ")
FORBIDDEN_MODULES = ("known", "again", "ahead", "effect", "halves", "numbered")
_PUBLIC = "public: its arguments are the interface, written out for readers and type checkers"
_FOREIGN = "a signature of FlashAttention or torch, written out as there; a test compares it"
_RELAUNCH = "called once a step: a record made for the call would cost more than the call"
# Functions that the limits are not for, by file under src/splitkv, each with why.
EXEMPT: dict[str, dict[str, str]] = {
    "cache/paged.py": {"__init__": _PUBLIC},
    "cache/sink_window.py": {"__init__": _PUBLIC},
    "flash_attn/attention.py": {
        "flash_attn_func": _FOREIGN,
        "flash_attn_kvpacked_func": _FOREIGN,
        "flash_attn_qkvpacked_func": _FOREIGN,
        "flash_attn_varlen_func": _FOREIGN,
        "flash_attn_varlen_kvpacked_func": _FOREIGN,
        "flash_attn_varlen_qkvpacked_func": _FOREIGN,
    },
    "flash_attn/kv_cache.py": {"flash_attn_with_kvcache": _FOREIGN},
    "flash_attn/scheduler.py": {"get_scheduler_metadata": _FOREIGN},
    "integrations/ring_flash_attn.py": {
        "flash_attn_forward": _FOREIGN,
        "flash_attn_varlen_forward": _FOREIGN,
        "flash_attn_backward": _FOREIGN,
        "flash_attn_varlen_backward": _FOREIGN,
    },
    "integrations/torch_sdpa.py": {
        "_flash": _FOREIGN,
        "_flash_backward": _FOREIGN,
        "_sdpa_backward": _FOREIGN,
    },
    "reference.py": {"attention": _PUBLIC, "attention_varlen": _PUBLIC, "decode": _PUBLIC},
    "kernels/host/decode_repeat.py": {"call": _RELAUNCH},
    "kernels/host/sequence_repeat.py": {"call": _RELAUNCH},
    "runtime/attention.py": {"attention": _PUBLIC, "attention_varlen": _PUBLIC},
    "runtime/call_cache.py": {
        "__call__": _RELAUNCH,
        "layout": "a key, which is compared and never taken apart",
    },
    "runtime/decode.py": {"decode": _PUBLIC},
    "runtime/growing_caches.py": {"repeat": _RELAUNCH},
    "runtime/warmup.py": {"warmup": _PUBLIC},
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "expected a module docstring"
    for banned in BANNED:
        assert not re.search(banned, text), f"{banned} found"


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


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_entry(function: ast.FunctionDef) -> bool:
    """Whether it is a jit function with options of a launch: a kernel."""
    return any(
        isinstance(by, ast.Call) and ast.unparse(by.func) in ("triton.jit", "gluon.jit")
        for by in function.decorator_list
    )


def is_command(function: ast.FunctionDef) -> bool:
    """Whether it is a command of typer's: its parameters are the options of a command line, each
    given by name and described, and nothing else calls it."""
    return any(
        isinstance(by, ast.Call) and ast.unparse(by.func) in ("app.command", "bench.command")
        for by in function.decorator_list
    )


def depth(node: ast.AST) -> int:
    """Statements with a body of their own, one in the other; `elif` is no deeper than `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        own = isinstance(child, NESTING) and not is_elif
        deepest = max(deepest, own + depth(child))
    return deepest


def results(function: ast.FunctionDef) -> int:
    """Items of the longest tuple that is returned."""
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return max((len(x.elts) for x in returned if isinstance(x, ast.Tuple)), default=0)


def unpacked(function: ast.FunctionDef) -> Iterator[ast.Tuple]:
    """What is unpacked by position from something that is not written out beside it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Tuple):
            yield from (target for target in node.targets if isinstance(target, ast.Tuple))


def shape_faults(path: Path) -> set[str]:
    """What of a file is over the limits, or a word that is not to be there."""
    tree, faults = ast.parse(path.read_text()), set()
    if path.stem in FORBIDDEN_MODULES:
        faults.add(f"module {path.stem}: named for nothing that it holds")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            opening = (ast.get_docstring(node) or "").split("\n")[0]
            if opening.startswith(FORBIDDEN_OPENINGS):
                faults.add(f"{getattr(node, 'name', 'module')}: {opening}")
    for function in functions(tree):
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        exempt = is_entry(function) or is_command(function)
        if not exempt and len(every) > MAX_PARAMETERS:
            faults.add(f"{function.name}: {len(every)} parameters")
        if results(function) > MAX_RESULTS:
            faults.add(f"{function.name}: {results(function)} positional results")
        if depth(function) > MAX_NESTING:
            faults.add(f"{function.name}: {depth(function)} statements one in the other")
        for target in unpacked(function):
            blank = any(isinstance(x, ast.Name) and x.id == "_" for x in target.elts)
            if len(target.elts) > MAX_RESULTS or blank:
                faults.add(f"{function.name}: unpacks {ast.unparse(target)}")
    return faults


# What every kernel has under one name: its limits, its records' functions, its roles.
OF_EVERY_KERNEL = {
    *("bind", "bind_split", "launch", "unfit", "unsupported", "refit", "fitting"),
    *("configs", "variants", "shared_bytes", "traffic", "mma_role", "load_role"),
}


def test_no_two_things_of_one_name_in_kernels() -> None:
    """Functions and classes of modules that others may import."""
    found: dict[str, list[str]] = {}
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert several.keys() == OF_EVERY_KERNEL, several


def exempt(path: Path) -> dict[str, str]:
    """The functions of a file that the limits are not for."""
    inside = path.is_relative_to(PACKAGE)
    return EXEMPT.get(path.relative_to(PACKAGE).as_posix(), {}) if inside else {}


def open_faults(path: Path) -> set[str]:
    """What is left to mend in a file."""
    spared = exempt(path)
    return {
        fault for fault in shape_faults(path) | flags(path) if fault.split(":")[0] not in spared
    }


def flags(path: Path) -> set[str]:
    """Compile-time parameters that say whether, and not which or what: they stand alone as a
    condition and are given as True or False."""
    text, found = path.read_text(), set()
    for function in functions(ast.parse(text)):
        for argument in function.args.args:
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            if kind not in ("tl.constexpr", "gl.constexpr"):
                continue
            name = argument.arg
            if re.search(rf"(?<![\w.=] )\b(if|not) {name}\b(?! *[\w.<>=!%+*/-])", text):
                found.add(f"{function.name}: {name}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=relative)
def test_functions_take_and_give_what_has_a_name(path: Path) -> None:
    assert open_faults(path) == set()


@pytest.mark.parametrize("name", EXEMPT)
def test_what_is_exempt_needs_to_be(name: str) -> None:
    over = {fault.split(":")[0] for fault in shape_faults(PACKAGE / name)}
    assert over >= EXEMPT[name].keys()


def test_kernel_files_are_found() -> None:
    assert {path.stem for path in KERNEL_FILES} >= {"combine", "decode_split"}
