"""Workloads: the problems whose time counts, and those on which nothing may get slower.

A workload of one's own is a JSON file: {"name": ..., "counted": [SHAPE, ...], "held_out": [...]},
a SHAPE being {"seqlen_k": 512, "batch": 1, "num_heads": 8, "num_kv_heads": 1, "head_dim": 128,
"seqlen_q": 1, "page_size": null}, of which only seqlen_k has to be given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitkv.core.errors import expect, expect_one_of, expect_positive
from splitkv.lab.harness.cases import Case
from splitkv.lab.tune.problems import case_of
from splitkv.lab.tune.sweep import USUAL
from splitkv.planner.policies.tuned_tables import DIMS, tuned_problem


@dataclass(frozen=True)
class Workload:
    """counted: the geometric mean of their times is the fitness; held_out: none above 1 %."""

    name: str
    counted: tuple[Case, ...]
    held_out: tuple[Case, ...]


def shape(**dims: int | None) -> Case:
    """One query token of 8 heads on one KV head of 128, contiguous, unless said otherwise."""
    for name, size in dims.items():
        expect_one_of("shape", name, DIMS)
        if size is not None:
            expect_positive(name, size)
    given: dict[str, Any] = {**USUAL, "page_size": None, **dims}
    return case_of(tuned_problem(**given))


def chat() -> Workload:
    """Chat with Llama-3.1-70B on 8 GPUs: one sequence of up to 512 keys. Held out are the lengths
    between, longer and more sequences, other heads and pages."""
    counted = [shape(seqlen_k=keys) for keys in (64, 128, 192, 256, 320, 384, 448, 512)]
    held_out = [shape(seqlen_k=keys) for keys in (96, 160, 224, 288, 352, 416, 480)]
    held_out += [shape(seqlen_k=keys) for keys in (640, 1024, 2048, 8192)]
    held_out += [shape(seqlen_k=keys, batch=batch) for keys in (256, 512) for batch in (4, 32)]
    held_out += [
        shape(seqlen_k=keys, num_heads=32, num_kv_heads=8, page_size=page_size)
        for keys in (256, 512, 4096)
        for page_size in (None, 16)
    ]
    return Workload("chat", tuple(counted), tuple(held_out))


def long_context() -> Workload:
    """Few sequences of many keys; held out are others, and short ones."""
    counted = [shape(seqlen_k=keys, batch=b) for keys in (4096, 16384, 65536) for b in (1, 4)]
    held_out = [shape(seqlen_k=keys, batch=b) for keys in (6000, 24000) for b in (1, 2, 8)]
    held_out += [shape(seqlen_k=keys) for keys in (256, 512, 1024)]
    return Workload("long_context", tuple(counted), tuple(held_out))


WORKLOADS = {"chat": chat, "long_context": long_context}


def workload_named(name: str) -> Workload:
    """A workload of this file, or of a JSON file."""
    if name in WORKLOADS:
        return WORKLOADS[name]()
    path = Path(name)
    known = f"{', '.join(WORKLOADS)} or a JSON file"
    expect(path.is_file(), "workload", known, name)
    try:
        told: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"workload: expected JSON, got {error}") from None
    ok = isinstance(told, dict) and told.get("counted") and "held_out" in told
    expect(ok, "workload", "an object with name, counted and held_out", told)
    lists = (tuple(shape(**dims) for dims in told[key]) for key in ("counted", "held_out"))
    return Workload(told.get("name", path.stem), *lists)
