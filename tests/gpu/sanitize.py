"""Small calls of every kernel for NVIDIA's compute-sanitizer; `make sanitize` runs all its tools.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --without-roles

racecheck takes what warps of one role hand to those of another for a race ("Sanitizers" in
measurements/measured-facts.md), so it gets the kernels without roles alone.

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

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from running import DEVICE, HERE, batch_plan, fixed_plan, kernels, only, plan_with, plans, same_bits
from training import FUNCTION, any_gpu_backward, paged

import splitkv
from splitkv import Plan
from splitkv.core.plan import SCHEDULED
from splitkv.core.variants import Plain
from splitkv.kernels import prefill
from splitkv.planner.policies import persistent
from splitkv.planner.registry import KERNELS
from splitkv.testing import Call, Codec, Mask, Paged, Problem, Ragged, Score, check

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
# name -> problem, keys of its sequences, and parts of each: a number, "fixed" ones of 64 keys, or
# those of a cluster where the kernel has any
CALLS: dict[str, tuple[Problem, tuple[int, ...], int | str]] = {
    "one_part": (replace(SMALL, seqlen_k=700), (700, 65), 1),
    "more_parts_than_tiles": (SMALL, (150, 3), 7),
    "fixed": (replace(SMALL, seqlen_k=500), (500, 64), "fixed"),
    "in_a_cluster": (replace(WINDOW, seqlen_k=700), (700, 3), "cluster_of_8"),
    "page_16": (replace(SMALL, place=Paged(16), seqlen_k=500), (500, 33), 2),
    "page_48_fixed": (replace(SMALL, place=Paged(48), dtype="float16"), (150, 1), "fixed"),
    "page_64_empty": (replace(SMALL, place=Paged(64), sink_logits=True), (0, 128), 2),
    "window": (WINDOW, (150, 44), 2),
    "tokens_and_scores": (SCORES, (150, 2), 3),
    "tokens_of_a_wide_group": (replace(SMALL, num_heads=16, seqlen_q=4), (150, 0), 1),
}
BATCH_RULE = "batch_rule"
TRAINED = Problem("dense", 1, 4, 2, 64, 64, 150, 200, mask=Mask(True), return_lse=True)
TRAINED = replace(TRAINED, needs_grad=True)
PACKED = replace(TRAINED, kind="varlen", place=Ragged(), lengths="device", batch=3)
WIDE = replace(TRAINED, head_dim=128, head_dim_v=128)
STORED = replace(WIDE, needs_grad=False, products="half", codec=Codec("int8", "token"))
SEQUENCES: dict[str, Problem] = {
    "dense": TRAINED,
    "window_and_sinks": replace(WIDE, mask=Mask(True, 40, -1, 5), sink_logits=True),
    "packed": replace(PACKED, deterministic=True),
    "int8": STORED,
    "int8_a_head": replace(STORED, codec=Codec("int8", "head")),
    "fp8": replace(STORED, products="full", codec=Codec("fp8", "head")),
}
MIX = replace(SMALL, batch=5, seqlen_k=500)
SCHEDULES = {
    "mix": MIX,
    "mix_in_pages": replace(MIX, place=Paged(16), mask=Mask(True, 200, -1, 5)),
    "mix_of_fp8": replace(MIX, codec=Codec("fp8", "token"), sink_logits=True),
}
PAGE_SIZE, PARTS = 16, 3
WITH_ROLES = (
    *("hopper_prefill", "hopper_prefill_quantised"),
    *("hopper_prefill_half", "hopper_prefill_widened"),
)


def plan_of(problem: Problem, kernel: str, parts: int | str) -> Plan:
    if parts == BATCH_RULE:
        return batch_plan(problem, problem.batch + 3, kernel)
    if parts == "fixed":
        return fixed_plan(problem, 64, kernel)
    if isinstance(parts, str):
        made = plans(problem, kernel)
        return made.get(parts, made["even"])
    return plan_with(kernel, problem, parts)


def on_the_gpu(plan: Plan) -> Callable[[Problem, Call], Any]:
    """`run=` of `check`: the call moved there, once through Triton and once past it."""

    def run(problem: Problem, call: Call) -> Any:
        there = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
        first, again = (splitkv.decode(**there, plan=plan) for _ in range(2))
        assert same_bits(first, again), "the second call gave other bits than the first"
        return tuple(x.cpu() for x in again)

    return run


def sequences_on_the_gpu(kernel: str, parts: int, page_size: int = 0) -> Callable[..., Any]:
    """`run=` of `check`: by this kernel; gradients by those for any GPU where it is `prefill`."""

    def run(problem: Problem, call: Call) -> Any:
        if page_size:
            problem, call = paged(problem, call, page_size)
        plan = splitkv.plan(problem, policy=only(kernel))
        plan = replace(plan, config=replace(plan.config, variant=Plain(), num_splits=parts))
        there = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
        result = FUNCTION[problem.kind](**there, plan=plan)
        return tuple(x.cpu() for x in result)

    return run


def check_sequences(roles: bool) -> None:
    preferred = prefill.backward_for
    for kernel in (k for k in KERNELS if "prefill" in k.name):
        if kernel.name in WITH_ROLES and not roles:
            continue
        any_gpu = kernel.name == "prefill"
        prefill.backward_for = any_gpu_backward if any_gpu else preferred
        for name, problem in SEQUENCES.items():
            if kernel.unsupported(problem, HERE):
                continue
            check(problem, run=sequences_on_the_gpu(kernel.name, 1))
            print(f"  {name}, {kernel.name}: right", flush=True)
        few = replace(PACKED, needs_grad=False, seqlen_q=9, seqlen_k=400)
        if not kernel.unsupported(replace(few, place=Paged(PAGE_SIZE)), HERE):
            check(few, run=sequences_on_the_gpu(kernel.name, PARTS, PAGE_SIZE))
            print(f"  pages_in_parts, {kernel.name}: right", flush=True)


def check_schedules(roles: bool) -> None:
    """Programs that walk over splits: those for Hopper have roles."""
    for kernel in ("decode_split", *(["hopper_decode_split"] if roles else [])):
        for name, problem in SCHEDULES.items():
            if kernel not in kernels(problem):
                continue
            for schedule in SCHEDULED:
                policy = only(kernel, persistent.with_schedule(schedule))
                plan = splitkv.plan(problem, device=HERE, policy=policy)
                few = replace(plan.config, programs=problem.batch + 3)
                given = on_the_gpu(replace(plan, config=few))
                check(problem, run=given, lengths=(500, 0, 33, 1, 64))
                print(f"  {schedule}, {name}, {kernel}: right", flush=True)


def main(roles: bool) -> None:
    print(f"{HERE}, every tensor in memory of its own")
    for name, (problem, lengths, parts) in CALLS.items():
        for kernel in kernels(problem):
            if kernel in WITH_ROLES and not roles:
                continue
            given = on_the_gpu(plan_of(problem, kernel, parts))
            check(problem, run=given, lengths=lengths)
            print(f"  {name}, {kernel}: right", flush=True)
    check(SMALL, run=on_the_gpu(plan_of(SMALL, "decode_split", BATCH_RULE)), lengths=(150, 20))
    print(f"  {BATCH_RULE}, decode_split: right")
    check_schedules(roles)
    check_sequences(roles)


if __name__ == "__main__":
    main(roles="--without-roles" not in sys.argv[1:])
