"""`early_kv`: decode starts before the kernel before it has ended, and waits for its writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from running import DEVICE, SERVING
from torch import Tensor

import splitkv
from splitkv.testing import Paged, assert_close, expected, make_operands

CYCLES = 200_000  # about 0.1 ms: decode is long there when the keys and queries are


@triton.jit
def write_late(out_ptr, x_ptr, size, cycles, BLOCK: tl.constexpr):
    """Lets the next kernel start, waits, and copies x."""
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    now = start
    while now - start < cycles:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < size), mask=offs < size)


def late(out: Tensor, x: Tensor) -> None:
    write_late[(triton.cdiv(x.numel(), 1024),)](out, x, x.numel(), CYCLES, BLOCK=1024)


CASES: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "page16": {"place": Paged(16)},
    "page256": {"place": Paged(256)},
    "tokens": {"seqlen_q": 4},
    "one_part": {"seqlen_k": 64},
}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_queries_and_the_last_keys_may_be_late(name: str, captured: bool) -> None:
    problem = replace(SERVING, return_lse=False, early_kv=True, **CASES[name])
    assert splitkv.plan(problem).kernel == "hopper_decode_split", splitkv.explain(problem)
    call = make_operands(problem, device=DEVICE)
    late_q = call["q"].clone()
    exact, working = (expected(problem, call, upcast=up)[0] for up in (True, False))

    def step() -> Tensor:
        late(call["q"], late_q)
        return splitkv.decode(**call, early_kv=True)

    step()
    call["q"].fill_(float("nan"))
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        call["q"].fill_(float("nan"))
        graph.replay()
    else:
        out = step()
    assert_close(out, exact, working)


def test_the_last_key_may_be_late() -> None:
    """Written in place by the kernel before, in a slab of one KV head."""
    problem = replace(SERVING, batch=1, num_kv_heads=1, num_heads=8, return_lse=False)
    call = make_operands(problem, device=DEVICE, lengths=[problem.seqlen_k])
    exact, working = (expected(problem, call, upcast=up)[0] for up in (True, False))
    last = call["k_cache"][0, problem.seqlen_k - 1, 0]
    wanted = last.clone()
    for _ in range(3):
        last.fill_(float("nan"))
        late(last, wanted)
        out = splitkv.decode(**call, early_kv=True)
        assert_close(out, exact, working)
