"""Runs a candidate policy where it can do nothing but compute.

    python -I sandbox.py    stdin: a JSON object of source, calls, seconds, rounds; stdout: another

A source may import `math` and call a few builtins; it has no attribute that starts with an
underscore and no name with two. Processor time and memory are limited. This file imports nothing of
the package, so that starting it takes no time.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

IMPORTS = ("math",)
ARGUMENTS = (
    "batch",
    "seqlen_q",
    "seqlen_k",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "num_sms",
)
MEMORY_BYTES = 512 << 20
MAX_CHARACTERS = 20_000
ALLOWED = (
    *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "len", "list"),
    *("max", "min", "range", "reversed", "round", "set", "sorted", "sum", "tuple", "zip"),
)
REFUSED = {
    ast.ClassDef: "a class",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Try: "try",
    ast.With: "with",
    ast.While: "while",
    ast.Await: "await",
    ast.AsyncFunctionDef: "async",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Delete: "del",
    ast.JoinedStr: "an f-string",
}


def objections(source: str) -> list[str]:
    """Everything in a source that a policy may not have, each with its line."""
    if len(source) > MAX_CHARACTERS:
        return [f"{len(source)} characters: expected at most {MAX_CHARACTERS}"]
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [f"no Python: {error}"]
    found = []
    for node in ast.walk(tree):
        line = f"line {getattr(node, 'lineno', 0)}"
        if type(node) in REFUSED:
            found.append(f"{line}: expected no {REFUSED[type(node)]}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names = [node.module or "."] if isinstance(node, ast.ImportFrom) else names
            bad = [name for name in names if name not in IMPORTS]
            if bad:
                found.append(f"{line}: import {bad[0]}: expected {' or '.join(IMPORTS)}")
        elif isinstance(node, ast.Attribute):
            if node.attr.startswith("_") or "format" in node.attr:
                found.append(f"{line}: attribute {node.attr}: expected a public one")
        elif isinstance(node, ast.Name) and node.id.startswith("__"):
            found.append(f"{line}: name {node.id}: expected one without __")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    policies = [node for node in functions if node.name == "policy"]
    if len(policies) != 1:
        found.append(f"expected one function `policy`, got {len(policies)}")
    elif tuple(arg.arg for arg in policies[0].args.args) != ARGUMENTS:
        got = ", ".join(arg.arg for arg in policies[0].args.args)
        found.append(f"policy({got}): expected policy({', '.join(ARGUMENTS)})")
    return found


def load(source: str) -> Any:
    """The function `policy` of a source without objections."""
    import builtins

    def importer(name: str, *_: Any) -> Any:
        if name not in IMPORTS:
            raise ImportError(f"{name}: expected {' or '.join(IMPORTS)}")
        return __import__(name)

    allowed = {name: getattr(builtins, name) for name in ALLOWED}
    names: dict[str, Any] = {"__builtins__": {**allowed, "__import__": importer}}
    exec(compile(source, "<candidate>", "exec"), names)
    return names["policy"]


def answers(
    source: str, calls: Sequence[Mapping[str, int]], rounds: int
) -> tuple[list[Any], float]:
    """Its answers to each call, and the microseconds of a call in the fastest round."""
    policy = load(source)
    found = [policy(**call) for call in calls]
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        again = [policy(**call) for call in calls]
        best = min(best, time.perf_counter() - start)
        if again != found:
            raise ValueError("expected the same answer to the same question")
    return found, best * 1e6 / max(1, len(calls))


def limit(seconds: int) -> None:
    """Limits processor time and memory, from here on."""
    try:
        import resource
    except ImportError:  # no Unix: the caller's clock alone limits it
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def main() -> None:
    asked = json.loads(sys.stdin.read())
    if against := objections(asked["source"]):
        told: dict[str, Any] = {"reason": "; ".join(against)}
    else:
        limit(asked["seconds"])
        try:
            found, us = answers(asked["source"], asked["calls"], asked["rounds"])
            told = {"answers": found, "us": us}
            json.dumps(told)
        except Exception as error:
            told = {"reason": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
