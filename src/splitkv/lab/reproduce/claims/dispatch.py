"""Claims of the walk through FlashAttention-2's dispatch: which kernels one token launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, log2

from splitkv.core.device import GPUS, Device
from splitkv.lab.harness.lines import Record
from splitkv.lab.reproduce.claims.verdict import Claim, Verdict, judge
from splitkv.lab.reproduce.results import Results
from splitkv.lab.reproduce.tracing import COMBINE, NEW_TOKENS, qwen
from splitkv.planner.policies.flash_attention_2 import dispatch

RULE = "0x1 and 0x4, num_splits_heuristic"
GRID = "0x5, run_flash_splitkv_fwd"


def device_of(results: Results) -> Device:
    """A GPU with as many SMs as the results', of which the rule asks no more; an H100 without."""
    h100 = GPUS["h100"]
    return replace(h100, num_sms=results.num_sms) if results.works else h100


def rule_of_new_tokens(results: Results) -> Iterator[Verdict]:
    """The rule itself at the lengths that 64 and 512 new tokens come to: it needs no time."""
    for tokens, relation, bound in zip(NEW_TOKENS, ("<=", ">="), (1, 2), strict=True):
        p = qwen(tokens)
        found = dispatch(p, device_of(results), "fwd")
        text = f"{tokens} new tokens: splits of the last step by FlashAttention-2's rule"
        figure = "flash_fwd_kernel" if bound == 1 else "flash_fwd_splitkv_kernel and its combine"
        claim = Claim(text, "dispatch", RULE, relation, bound, figure)  # type: ignore[arg-type]
        yield judge(claim, "rules", float(found.num_splits), found.why)


def traced(results: Results) -> Iterator[Verdict]:
    """The splits that torch's FlashAttention-2 launched at those lengths, beside the rule."""
    rows = results.rows("trace")
    for tokens in NEW_TOKENS:
        p = qwen(tokens)
        text = f"{tokens} new tokens: kernels of the rule that the last step launched, share"
        claim = Claim(text, "dispatch", "0x1, traces", ">=", 1.0, figure="as the rule says")
        names = [row["kernel"] for row in rows if row["keys"] == p.seqlen_k]
        if not names:
            yield judge(claim, "fa2", None, "no results of the step `trace`")
            continue
        wanted = dispatch(p, device_of(results), "fwd").kernels
        seen = sum(any(matches(name, kernel) for name in names) for kernel in wanted)
        why = f"the rule says {' and '.join(wanted)}; launched {', '.join(map(short, names))}"
        yield judge(claim, "fa2", seen / len(wanted), why)


def combine(results: Results) -> Iterator[Verdict]:
    """The specialisation and the grid of the kernel that merges the splits."""
    p = qwen(NEW_TOKENS[1])
    claims = (
        Claim(
            "the combine's rows a block and log of its most splits are those of the source",
            *("dispatch", GRID, ">=", 1.0, "by head dimension and number of splits"),
        ),
        Claim(
            "the combine's grid is that of the source",
            *("dispatch", GRID, ">=", 1.0, "rows over rows a block"),
        ),
    )
    launched = [row for row in results.rows("trace") if COMBINE in row["kernel"]]
    if not launched:
        for claim in claims:
            yield judge(claim, "fa2", None, f"no {COMBINE} in the step `trace`")
        return
    row = launched[-1]
    splits = dispatch(p, device_of(results), "fwd").num_splits
    block, log = rows_a_block(p.head_dim), max(1, ceil(log2(splits)))
    parts = [part.strip(" ()int>") for part in row["kernel"].split(",")]
    named = str(block) in parts and str(log) in parts
    why = f"{block} rows, log {log} for {splits} splits; launched {row['kernel'][-80:]}"
    yield judge(claims[0], "fa2", float(named), why)
    grid = ceil(p.batch * p.num_heads * p.seqlen_q / block)
    told: Record = row
    if not told["grid"]:
        yield judge(claims[1], "fa2", None, "the profiler names no grid")
        return
    why = f"{grid} programs expected, grid {told['grid']}"
    yield judge(claims[1], "fa2", float(told["grid"][0] == grid), why)


def rows_a_block(head_dim: int) -> int:
    """Rows of a block of the combine: 4 for multiples of 128, 8 for those of 64, 16 else."""
    return 4 if head_dim % 128 == 0 else 8 if head_dim % 64 == 0 else 16


def matches(name: str, kernel: str) -> bool:
    """Whether a launched kernel is this one: `flash_fwd_kernel` is no part of the other names."""
    return kernel in name


def short(name: str) -> str:
    """A kernel's name without its template arguments and parameters."""
    bare = name.removeprefix("void ").split("<")[0].split("(")[0]
    return bare.split("::")[-1]
