"""Results of `splitkv reproduce` of times that nobody took: those of a GPU on which all holds."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import MACHINE
from rich.console import Console

from splitkv.core.device import GPUS
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.lines import Lines
from splitkv.lab.harness.timing import Variant
from splitkv.lab.harness.work import Way, Work
from splitkv.lab.reproduce import agenda, model, prefill_step, run, tracing, works
from splitkv.lab.reproduce.agenda import Item
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims import int8, paged
from splitkv.lab.reproduce.claims.verdict import Verdict
from splitkv.planner.policies import paged_attention_v2

H200 = GPUS["h200"]


Us = Callable[[Work, Way], float | None]


def fast(work: Work, way: Way) -> float | None:
    """A GPU on which the claims of the sources hold."""
    p = work.case.problem
    if work.step.startswith("packing"):
        row = int8.TABLE_3[p.seqlen_k]
        return {**row._asdict(), "both": row.both / 1.01}[way.name] + (way.name == "split")
    if work.step == "sdpa":
        return 9.5
    if work.step == "page sizes":
        return 12.0 if way.name == "one pass" else 10.0
    if work.step == "one launch":
        return 10.0 + p.seqlen_k / (100 if way.name == "one program" else 1000)
    if work.step == "kernels":
        return 80.0 if way.name == "triton" else 10.0
    if work.step == "no metadata":
        return 10.2 if way.name == "standard" else 10.0
    if work.step == "ten shapes":
        shape = work.case.name.removeprefix("seed003_").removesuffix("_page16")
        picked = works.picks(paged_attention_v2.CONSERVATIVE, p, 132)
        picked = paged.NAMED[shape][0] if shape in paged.NAMED else picked
        return {"default": 9.0, picked: 10.0}.get(way.name, 20.0)
    splits = way.splits or 3
    if work.step == "splits" and way.splits > 32:
        return None
    slowest = 14.0 if p.seqlen_k == 512 else 10.0
    return slowest if splits == 1 else 10.0 + 0.001 * abs(splits - 8)


class FakeBackend:
    """Times nothing; says what `us` says."""

    def __init__(self, name: str, us: Us = fast, absent: str = "") -> None:
        self.name, self.us, self.why = name, us, absent
        self.asked: list[str] = []
        self.paces: set[tuple[int, int]] = set()
        self.starts = 0

    def absent(self) -> list[str]:
        return [self.why] if self.why else []

    def start(self) -> None:
        self.starts += 1

    def measure(self, work: Work, rounds: int, repeats: int = 1) -> list[dict[str, Any]]:
        self.asked.append(work.case.name)
        self.paces.add((rounds, repeats))
        rows = []
        for way in work.ways:
            us = self.us(work, way)
            found = {"us": us, "spread_us": 0.1, "err": 1e-4, "repeats": True}
            found["repeats_us"] = [(us or 0.0) + d for d in (-0.2, -0.1, 0.0, 0.1, 0.2)]
            variant = Variant(self.name, way.name, lambda inputs: None)
            rows.append(variant.row(**found) if us else variant.row(reasons=["too many"]))
        return rows

    def stop(self) -> None:
        pass


def taken(backend: str, todo: list[Work]) -> list[Work]:
    return [work for work in todo if works.takes(backend, work.step)]


def rest(rounds: int) -> list[dict[str, Any]]:
    row = {"spread_us": 0.1, "err": None, "repeats": None, "reasons": []}
    return [
        {"kernel": part, "us": us, **row} for part, us in zip(model.PARTS, (50, 60), strict=True)
    ]


def prompts(rounds: int) -> list[dict[str, Any]]:
    """A layer of prompts, of which attention by default takes half."""
    own = {"spread_us": 0.1, "err": None, "repeats": None, "reasons": []}
    us = {prefill_step.LAYER: 100.0, "triton": 200.0, "default": 100.0}
    return [
        {"kernel": prefill_step.row_of(part, tokens), "us": x, **own}
        for tokens in prefill_step.TOKENS
        for part, x in us.items()
    ]


def traced(rounds: int) -> list[dict[str, Any]]:
    """Kernels as the source's traces have them."""
    one = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(params)"
    split = "void pytorch_flash::flash_fwd_splitkv_kernel<Traits<128, 64>, false>(params)"
    merged = f"void pytorch_flash::{tracing.COMBINE}<Traits<128, 64>, 4, 3, true>(params)"
    rows = [(94, one, [1, 1, 4]), (542, split, [1, 5, 4]), (542, merged, [7, 1, 1])]
    own = {"us": None, "err": None, "repeats": None, "reasons": []}
    return [{"kernel": name, "keys": keys, "grid": grid, **own} for keys, name, grid in rows]


def trained(rounds: int) -> list[dict[str, Any]]:
    rows = [("float32", 0.0), ("eager", 0.01), ("splitkv", 0.011), ("without sinks", None)]
    own = {"us": None, "err": None, "repeats": None, "reasons": [], "loss": 1.5, "runs": 5}
    return [{"kernel": name, "distance": distance, **own} for name, distance in rows]


def read(rounds: int) -> list[dict[str, Any]]:
    """Rows of `splitkv quality` as a model that knows its text has them."""
    own = {"us": None, "err": None, "repeats": None, "reasons": [], "model": "demo"}
    own |= {"tokens": 2048, "needles": 8}
    found = {"bf16": 10.0, "int8": 10.05, "fp8": 10.2, "sinks and window": 12.0}
    found |= {"window alone": 60.0, "int8 in a window": 12.1}
    return [
        {"kernel": name, "perplexity": x, "found": float(x < 11), **own}
        for name, x in found.items()
    ]


BESIDE = {
    **{"decode step": rest, "prefill step": prompts},
    **{"trace": traced, "quality": read, "training": trained},
}


def items_of(*backends: str, todo: list[Work] | None = None) -> list[Item]:
    """The agenda of these backends without whole sequences; of these works alone, with all steps
    that are of no attention kernel."""
    asked = [name for name in backends if name in agenda.BACKENDS]
    items = list(agenda.agenda(False, H200, backends=asked, sequences=False))
    if todo is None:
        return items
    names = {(work.step, work.case.name) for work in todo}
    return [item for item in items if item.what is None or (item.step, item.name) in names]


def measured(
    path: Path, *who: FakeBackend, todo: list[Work] | None = None, end: float = math.inf
) -> tuple[bool, str]:
    """(whether the GPU was lost, what the screen said)."""
    screen = io.StringIO()
    with Lines(path) as lines:
        console = Console(file=screen, width=200)
        found = run.Run(
            *(H200, lines, Compiler(0), console),
            **{"end": end, "backends": who, "machine": MACHINE, "beside": BESIDE},
        )
        lost = found.all(items_of(*(backend.name for backend in who), todo=todo))
        found.stop()
    return lost, screen.getvalue()


def rates(direction: str, case: str, library: str, us: float, tflops: float = 1.0) -> Any:
    shape = {"suite": "prefill", "direction": direction, "case": case, "library": library}
    shape |= {"pace": {"rounds": agenda.PACE.rounds}}
    return {**shape, "us": us, "tflops": tflops, "peak_fraction": 0.5, "reasons": [], **MACHINE}


def whole_sequences() -> list[dict[str, Any]]:
    """Results of prefill and backward on which the sources' claims hold."""
    found = []
    for mask, columns in int8.TABLES.items():
        for dtype, by_tokens in columns.items():
            for tokens, tflops in zip(int8.TOKENS, by_tokens, strict=True):
                case = int8.prefill_case(tokens, mask, dtype)
                for name in ("splitkv", "fa3x"):
                    found.append(rates("forward", case, name, 1.0, 1.1 * tflops))
    for direction in ("forward", "backward"):
        for tokens in (1024, 8192, 16384):
            full, window = tokens**2 / 8192, float(tokens)
            name = f"gqa32x8_b1_{tokens}"
            found.append(rates(direction, f"{name}_causal", "fa2", full))
            ours = rates(direction, f"{name}_window4096_sink_tokens4", "splitkv", window - 1)
            found.append(ours)
            found.append(rates(direction, f"{name}_causal", "splitkv", full))
        for tokens in (32768, 131072):
            name = f"gqa32x8_b1_{tokens}_window4096_sink_tokens4"
            linear = {"us": float(tokens), "peak_bytes": 4 * tokens}
            found.append({**rates(direction, name, "splitkv", 1.0), **linear})
    for end, us in (("", 100.5), ("_nosink", 100.0)):
        found.append(rates("backward", f"gpt_oss_b1_4096_causal{end}", "splitkv", us))
    return found


def verdicts(records: list[dict[str, Any]]) -> dict[str, Verdict]:
    return {v.claim: v for v in check(records)}


def doctored(
    records: list[dict[str, Any]], step: str, backend: str, way: str, **change: Any
) -> list[dict[str, Any]]:
    """The same results, but of one way in one step."""
    copy = json.loads(json.dumps(records))
    for r in copy:
        if r.get("step") == step and r.get("backend") == backend:
            for row in r["rows"]:
                if row["kernel"] == way:
                    row.update(change)
    return copy
