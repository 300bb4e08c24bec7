"""A few small calls of decode for NVIDIA's compute-sanitizer; `make sanitize` runs all its tools.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py

Results are checked too, against references on the CPU, so that on the GPU there is little beside
our kernels. Every tensor is an allocation of its own: memcheck sees a read past its end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from running import DEVICE, HERE, batch_plan, fixed_plan, kernels, plan_with, same_bits

import splitkv
from splitkv import Plan
from splitkv.testing import Call, Mask, Paged, Problem, Score, check

SMALL = Problem(
    "decode",
    batch=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
    seqlen_q=1,
    seqlen_k=150,
    mask=Mask(causal=True),
    lengths="device",
    return_lse=True,
)
WINDOW = replace(SMALL, mask=Mask(True, 40, -1, 5), sink_logits=True)
SCORES = replace(SMALL, score=Score(True, True), head_dim=128, head_dim_v=256, seqlen_q=4)
# name -> problem, keys of its sequences, and parts of each: a number, or "fixed" ones of 64 keys
CALLS: dict[str, tuple[Problem, tuple[int, ...], int | str]] = {
    "one_part": (replace(SMALL, seqlen_k=700), (700, 65), 1),
    "more_parts_than_tiles": (SMALL, (150, 3), 7),
    "fixed": (replace(SMALL, seqlen_k=500), (500, 64), "fixed"),
    "page_16": (replace(SMALL, place=Paged(16), seqlen_k=500), (500, 33), 2),
    "page_48_fixed": (replace(SMALL, place=Paged(48), dtype="float16"), (150, 1), "fixed"),
    "page_64_empty": (replace(SMALL, place=Paged(64), sink_logits=True), (0, 128), 2),
    "window": (WINDOW, (150, 44), 2),
    "tokens_and_scores": (SCORES, (150, 2), 3),
    "tokens_of_a_wide_group": (replace(SMALL, num_heads=16, seqlen_q=4), (150, 0), 1),
}
BATCH_RULE = "batch_rule"


def plan_of(problem: Problem, kernel: str, parts: int | str) -> Plan:
    if parts == BATCH_RULE:
        return batch_plan(problem, problem.batch + 3, kernel)
    if parts == "fixed":
        return fixed_plan(problem, 64, kernel)
    return plan_with(kernel, problem, int(parts))


def on_the_gpu(plan: Plan) -> Callable[[Problem, Call], Any]:
    """`run=` of `check`: the call moved there, once through Triton and once past it."""

    def run(problem: Problem, call: Call) -> Any:
        there = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
        first, again = (splitkv.decode(**there, plan=plan) for _ in range(2))
        assert same_bits(first, again), "the second call gave other bits than the first"
        return tuple(x.cpu() for x in again)

    return run


def main() -> None:
    print(f"decode on {HERE}, every tensor in memory of its own")
    for name, (problem, lengths, parts) in CALLS.items():
        for kernel in kernels(problem):
            given = on_the_gpu(plan_of(problem, kernel, parts))
            check(problem, run=given, lengths=lengths)
            print(f"  {name}, {kernel}: right", flush=True)
    check(SMALL, run=on_the_gpu(plan_of(SMALL, "decode_split", BATCH_RULE)), lengths=(150, 20))
    print(f"  {BATCH_RULE}, decode_split: right")


if __name__ == "__main__":
    main()
