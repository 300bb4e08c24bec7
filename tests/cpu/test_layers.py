"""Imports point one way: from the values up to the calls, the integrations and the command line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

# From the ground up; a module imports only from lines above its own, or its own package.
LAYERS = (
    "device errors kv masks rounding scores",
    "scales",
    "problem",
    "plans reference",
    "policies kernels",
    "registry",
    "arguments explanation legality testing",
    "launch",
    "decoding sequences",
    "autograd append",
    "api",
    "append_decode",
    "ahead cache flash_attn",
    "integrations",
    "terminal",
    "demo lab",
    "cli",
    "__main__",
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
PURE = "device errors kv masks plans policies problem scales scores"


def modules() -> dict[str, Path]:
    """Every module of the package, `policies.waves` for splitkv/policies/waves.py."""
    root = SRC / "splitkv"
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def top(name: str) -> str:
    return name.split(".")[0]


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that import statements anywhere in the tree bring in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """The first-level modules of the package that a file imports."""
    names = (name.split(".") for name in imported_names(ast.parse(path.read_text())))
    return {name[1] for name in names if name[0] == "splitkv" and len(name) > 1}


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_module_imports_only_from_lower_layers(name: str) -> None:
    assert top(name) in RANK, f"{name} has no layer: give it one in LAYERS"
    public = {other for other in own_imports(MODULES[name]) if other not in RANK}
    for other in own_imports(MODULES[name]) - public - {top(name)}:
        assert RANK[other] < RANK[top(name)], f"{name} imports {other}, which is not below it"
    if public:  # names of splitkv/__init__.py, which stands for the public API
        assert RANK[top(name)] > RANK["api"], f"{name} imports the public names {sorted(public)}"


def test_pure_layer_runs_without_torch_and_triton() -> None:
    pure = [f"splitkv.{name}" for name in MODULES if top(name) in PURE.split()]
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
        "from splitkv.device import GPUS\n"
        "from splitkv.policies.flash_attention_2 import dispatch\n"
        "from splitkv.problem import Problem\n"
        "problem = Problem('decode', 1, 28, 4, 128, 128, 1, 600)\n"
        "print(dispatch(problem, GPUS['h200']).num_splits)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "5", done.stderr
