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
    "core",
    "rounding",
    "reference",
    "planner.policies",
    "kernels.host.partition kernels.hopper.primitives.tma_limits",
    "kernels.limits",
    "kernels",
    "planner.registry",
    "planner.legality planner.explanation testing",
    "runtime.autocast runtime.call_cache",
    "runtime.growing",
    "runtime.growing_caches runtime.growing_sequences",
    "runtime.growing_gradients",
    "runtime.dispatch",
    "runtime.schedule",
    "runtime.arguments",
    "runtime.decode",
    "runtime.autograd runtime.append runtime.merge_states",
    "runtime.attention runtime.append_decode runtime.slot_mapping runtime.backward",
    "runtime.serving_shapes",
    "runtime.warmup",
    "runtime.compile_worker runtime.model_config runtime.warm_record",
    "runtime.compile_pool",
    "runtime.warm_model",
    "api",
    "cache flash_attn distributed",
    "integrations",
    "demo lab.harness",
    "lab.report",
    "lab.bench",
    "lab.tune",
    "lab.reproduce",
    "lab.evolve",
    "lab.overview",
    "lab",
    "cli",
    "__main__",
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
PURE = (
    *("core", "planner", "kernels.limits", "kernels.records"),
    *("kernels.host.partition", "kernels.hopper.primitives.tma_limits"),
)


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


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also none by imports inside functions, which only hide one."""
    assert circles(graph()) == [], "a circle of imports"


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


def test_plans_are_made_without_torch_and_triton() -> None:
    """Of a Problem and a Device given as data; plans are stored and explained."""
    code = """
import sys
sys.modules['torch'] = sys.modules['triton'] = None
from dataclasses import replace
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import plan_with_handle
from splitkv.core.problem import Problem
from splitkv.planner.explanation import explain
from splitkv.planner.legality import expect_backward, expect_config
from splitkv.planner.registry import KERNELS, kernel_named, make_plan

decode = Problem('decode', 2, 16, 2, 128, 128, 1, 8192, mask=Mask(True), lengths='device')
dense = Problem('dense', 2, 16, 2, 128, 128, 4096, 4096, mask=Mask(True))
int8 = replace(dense, codec=Codec('int8', 'head'), products='half')
problems = [decode, replace(decode, place=Paged(16), codec=Codec('fp8', 'token')), dense, int8]
problems += [replace(dense, needs_grad=True), replace(int8, products='widened')]
used = set()
for gpu in ('h200', 'a100'):
    for problem in problems:
        plan = make_plan(problem, GPUS[gpu])
        kernel = kernel_named(plan.kernel)
        assert expect_config(kernel, problem, GPUS[gpu], plan.config) == plan.config
        expect_backward(kernel, plan)
        assert (plan.backward is not None) == problem.needs_grad
        assert plan_with_handle(plan.handle) == plan and str(explain(plan))
        used.add(plan.kernel)
print(sorted(used))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for kernel in ("hopper_decode_split", "decode_split", "hopper_prefill", "prefill"):
        assert repr(kernel) in done.stdout


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
