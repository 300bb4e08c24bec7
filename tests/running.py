"""How the GPU tests call decode: twice, into poisoned memory, under a plan that they know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cases import Case
from torch import Tensor

import splitkv
from splitkv import Plan
from splitkv.device import current
from splitkv.policies import fixed
from splitkv.registry import kernel_named
from splitkv.testing import Call, Mask, Problem

DEVICE = "cuda"
MAX_CACHE_ELEMENTS = 1 << 23  # keeps the making of operands on the host short
LENGTHS = {17: 77, 130: 1030, 301: 4096}
BATCHES = {1: 1, 2: 3, 3: 8}

Result = tuple[Tensor, Tensor | None]


def realistic(case: Case) -> Problem:
    """The problem of a case at the lengths and batches of serving; windows are widened along.

    A case with lengths of its own stays as it is.
    """
    problem = case.problem
    if "lengths" in case.options:
        return problem
    seqlen_k = LENGTHS.get(problem.seqlen_k, problem.seqlen_k)
    batch = BATCHES.get(problem.batch, problem.batch)
    a_sequence = seqlen_k * problem.num_kv_heads * max(problem.head_dim, problem.head_dim_v)
    mask = problem.mask
    if mask.left and seqlen_k >= 1024:
        mask = replace(mask, window_left=16 * mask.left)
    batch = max(1, min(batch, MAX_CACHE_ELEMENTS // a_sequence))
    return replace(problem, seqlen_k=seqlen_k, batch=batch, mask=mask)


def plan_of(problem: Problem, call: Call) -> Plan:
    """The policy's plan for a call."""
    by_position = ("q", "k_cache", "v_cache")
    rest = {name: x for name, x in call.items() if name not in by_position}
    made = splitkv.plan(*(call[name] for name in by_position), **rest)
    assert made.problem == problem
    return made


def decode(**how: Any) -> Callable[[Problem, Call], Result]:
    """`run=` of `check`: decode with these arguments besides the call's.

    It runs twice, as the first call goes through Triton's dispatch and later ones launch the
    compiled kernel directly; both write over NaN and have to give the same bits.
    """

    def run(problem: Problem, call: Call) -> Result:
        expect_decode_split(problem, call)
        results = [into_poison(problem, call, **how) for _ in range(2)]
        assert same_bits(*results), "the second call gave other bits than the first"
        return results[1]

    return run


def into_poison(problem: Problem, call: Call, **how: Any) -> Result:
    """decode into an `out` that is full of NaN."""
    shape = problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v
    dtype = getattr(torch, problem.dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=call["q"].device)
    result = splitkv.decode(**call, out=out, **how)
    written, lse = result if problem.return_lse else (result, None)
    assert written is out
    return out, lse


def expect_decode_split(problem: Problem, call: Call) -> None:
    """What decode_split can run, it runs."""
    against = kernel_named("decode_split").unsupported(problem, current())
    assert not against, against
    assert plan_of(problem, call).kernel == "decode_split"


def same_bits(a: Result, b: Result) -> bool:
    """NaN is a value like any other here; the comparison with the reference refuses it."""
    pairs = zip(a, b, strict=True)
    return all(
        torch.equal(x.nan_to_num(1e4), y.nan_to_num(1e4))
        for x, y in pairs
        if x is not None and y is not None
    )


def batch_plan(problem: Problem, programs: int) -> Plan:
    """The whole batch shared out over so many programs a KV head and row tile."""
    assert problem.lengths == "device" and programs > problem.batch
    made = splitkv.plan(problem, num_splits=2)
    config = replace(
        made.config,
        schedule="batch",
        programs=programs,
        num_splits=programs - problem.batch + 1,
    )
    return replace(made, config=config)


def fixed_plan(problem: Problem, split_size: int) -> Plan:
    """Parts of so many keys."""
    return splitkv.plan(problem, policy=fixed.with_split_size(split_size))


def plans(problem: Problem) -> dict[str, Plan]:
    """A plan of every schedule that the problem allows."""
    made = {
        "even": splitkv.plan(problem, num_splits=5),
        "fixed": fixed_plan(problem, max(64, -(-problem.seqlen_k // 6))),
    }
    if problem.lengths == "device":
        made["batch"] = batch_plan(problem, problem.batch + 1)
        made["batch_of_many"] = batch_plan(problem, problem.batch + 37)
    return made


SERVING = Problem(
    "decode",
    batch=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    head_dim_v=128,
    seqlen_q=1,
    seqlen_k=4096,
    mask=Mask(causal=True),
    lengths="device",
    return_lse=True,
)
"""A model being served: what the tests of graphs, streams and time start from."""
