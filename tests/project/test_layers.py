"""Imports point one way: from the values up to the calls, the integrations and the command line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SRC = Path(__file__).parents[2] / "src"

# From the ground up; a module imports only from lines above its own, or its own line.
LAYERS = (
    "core rounding",
    "reference",
    "planner.policies",
    "kernels",
    "planner.registry",
    "planner.legality planner.explanation testing",
    "runtime.autocast runtime.call_cache",
    "runtime.dispatch",
    "runtime.arguments",
    "runtime.decode",
    "runtime.autograd runtime.append",
    "runtime.attention runtime.append_decode runtime.backward",
    "runtime.warmup",
    "api",
    "cache flash_attn distributed",
    "integrations",
    "demo lab",
    "cli",
    "__main__",
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
PURE = "core", "planner.policies"


def modules() -> dict[str, Path]:
    """Every module of the package, `policies.waves` for splitkv/policies/waves.py."""
    root = SRC / "splitkv"
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def layer(name: str) -> str | None:
    """The name in LAYERS that a module's dotted name begins with, the longest."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RANK), None)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that import statements anywhere in the tree bring in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Dotted names below the package that a file imports."""
    names = imported_names(ast.parse(path.read_text()))
    return {name.partition(".")[2] for name in names if name.startswith("splitkv.")}


def not_for_types(tree: ast.AST) -> ast.AST:
    """The tree without what only type checkers read."""

    class Run(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> Any:  # noqa: N802
            if ast.unparse(node.test).endswith("TYPE_CHECKING"):
                return [self.visit(other) for other in node.orelse]
            return self.generic_visit(node)

    return Run().visit(tree)


def module_of(name: str) -> str:
    """The module that a dotted name below the package is, or is of; `api` for public names."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix and prefix in MODULES), "api")


def graph() -> dict[str, set[str]]:
    """The modules that each module imports when it runs, at the top or inside functions."""
    found = {}
    for name, path in MODULES.items():
        names = imported_names(not_for_types(ast.parse(path.read_text())))
        own = (x.partition(".")[2] for x in names if x.split(".")[0] == "splitkv")
        found[name] = {module_of(x) for x in own} - {name}
    return found


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Modules that reach each other, of every circle all of them."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = imports[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reached(name) for name in imports}
    found: list[set[str]] = []
    for name in imports:
        if name in reach[name] and not any(name in circle for circle in found):
            found.append({other for other in reach[name] if name in reach[other]})
    return found


def test_circles_are_found() -> None:
    imports = {"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set[str]()}
    assert circles(imports) == []
    assert circles(imports | {"d": {"b"}}) == [{"b", "d"}]
    assert circles(imports | {"d": {"a"}}) == [{"a", "b", "c", "d"}]


def test_imports_inside_functions_count_and_those_of_types_do_not() -> None:
    source = """
if TYPE_CHECKING:
    from splitkv.core import plan
else:
    from splitkv.core import kv
def f():
    if True:
        from splitkv.core import masks
"""
    names = imported_names(not_for_types(ast.parse(source)))
    assert sorted(names) == ["splitkv.core.kv", "splitkv.core.masks"]


# Circles that are still there; none may be added, and a line goes with its circle.
PENDING: list[set[str]] = [
    {
        *("lab.bench", "lab.report", "lab.studies", "lab.tune", "lab.reproduce.claims"),
        *("lab.reproduce.results", "lab.reproduce.tables", "lab.reproduce.works"),
    },
    {"lab.evolve.guided", "lab.evolve.run"},
]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also none by imports inside functions, which only hide one."""
    found = circles(graph())
    new = [circle for circle in found if not any(circle <= pending for pending in PENDING)]
    assert new == [], "a circle of imports"
    gone = [pending for pending in PENDING if not any(circle <= pending for circle in found)]
    assert gone == [], "no circle any more: take it from PENDING"


@pytest.mark.parametrize("name", [name for name in MODULES if layer(name) or "." in name])
def test_module_imports_only_from_lower_layers(name: str) -> None:
    own = layer(name)
    if own is None:
        assert name in ("planner.__init__", "runtime.__init__"), f"{name} has no layer"
        return
    for other in own_imports(MODULES[name]):
        below = layer(other)
        if below is None:  # a name of splitkv/__init__.py, which stands for the public API
            assert RANK[own] > RANK["api"], f"{name} imports the public name {other}"
        else:
            lower = RANK[below] < RANK[own] or below == own
            assert lower, f"{name} imports {other}, which is not below it"


def test_pure_layer_runs_without_torch_and_triton() -> None:
    pure = [f"splitkv.{name}" for name in MODULES if name.startswith(PURE)]
    code = (
        "import importlib, sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None  # importing either raises\n"
        f"for name in {pure}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_policies_decide_without_torch_and_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from splitkv.core.device import GPUS\n"
        "from splitkv.planner.policies.flash_attention_2 import dispatch\n"
        "from splitkv.core.problem import Problem\n"
        "problem = Problem('decode', 1, 28, 4, 128, 128, 1, 600)\n"
        "print(dispatch(problem, GPUS['h200']).num_splits)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "5", done.stderr
