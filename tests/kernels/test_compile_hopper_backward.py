"""The Hopper backward compiles without a GPU: TMA, wgmma that overlap, and no spills that matter.

As in test_compile_prefill.py: what `Backward` launches is compiled in the shapes that it would
take, with every value of every axis, and held to budgets. ptxas says when it has to wait for every
wgmma.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import triton
from compiling import (
    AnyGPU,
    Layout,
    Recorder,
    instructions,
    measure,
    ptxas_said,
    spilled,
    variants,
)
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.core.kv import Contiguous, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import HopperBackward
from splitkv.kernels.backward.records import Saved
from splitkv.kernels.hopper.backward.launcher import HopperBackwardLauncher
from splitkv.kernels.hopper.backward.launches import (
    GradientCall,
    lane_tiling,
    launches_of,
    sizes_of,
)
from splitkv.kernels.hopper.primitives.tma_limits import unfit
from splitkv.kernels.limits import hopper_backward as limits
from splitkv.kernels.limits.hopper_backward import shared_bytes
from splitkv.kernels.limits.hopper_backward import variants as backward_variants
from splitkv.planner.policies.backward import with_row_splits

H200 = GPUS["h200"]
OLD_PTXAS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
MASKS = (Mask(), Mask(True), Mask(True, 128, -1, 4), Mask(window_left=9, window_right=2))
AXES: cases.Axes = {
    # head_dim, deterministic
    "made": tuple((dim, same) for dim in (128, 64, 256, 192) for same in (False, True)),
    "kind": ("dense", "varlen"),
    "dtype": ("bfloat16", "float16"),
    "heads": ((8, 8), (14, 2)),
    "mask": MASKS,
    "sink_logits": (False, True),
    "row_gap": (0, 8),
    "config": (0, 1),
}
EVERYDAY = {
    **{"made": (128, False), "kind": "dense", "dtype": "bfloat16", "heads": (14, 2)},
    **{"mask": Mask(True), "sink_logits": False, "row_gap": 0, "config": 0},
}
# Scalars, most of them read once a tile of rows. The ptxas of Triton 3.9 leaves more of them there.
STACK_BYTES = 128 if OLD_PTXAS else 320
# Clearing rows of 256 columns of another sequence, once a sequence, beside sums that fill them.
WIDE_PACKED_BYTES = 256 if OLD_PTXAS else 512
SPILLS = 28  # loads and stores of them in a loop of 600 to 1000 instructions


def problem_of(values: cases.Values) -> Problem:
    num_heads, num_kv_heads = values.get("heads", (8, 2))
    kind = values.get("kind", "dense")
    head_dim, deterministic = values["made"]
    head_dim_v = 128 if head_dim == 192 else head_dim
    return Problem(
        kind,
        batch=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=4096,
        seqlen_k=4096,
        dtype=values.get("dtype", "bfloat16"),
        mask=values["mask"],
        place=Ragged() if kind == "varlen" else Contiguous(),
        sink_logits=values.get("sink_logits", False),
        deterministic=deterministic,
        needs_grad=True,
    )


def operands_of(problem: Problem, row_gap: int) -> Operands:
    """Operands without memory."""
    p, dtype = problem, getattr(torch, problem.dtype)
    packed = p.kind == "varlen"
    lead = (p.batch * p.seqlen_q,) if packed else (p.batch, p.seqlen_q)
    cu = Layout(torch.Size([p.batch + 1]), torch.int32) if packed else None
    q, k, v, out = (
        Layout(torch.Size([*lead, heads, dim]), dtype, row_gap)
        for heads, dim in (
            (p.num_heads, p.head_dim),
            (p.num_kv_heads, p.head_dim),
            (p.num_kv_heads, p.head_dim_v),
            (p.num_heads, p.head_dim_v),
        )
    )
    scale = p.head_dim**-0.5
    cu_seqlens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    sinks = Layout(torch.Size([p.num_heads]), torch.float32) if p.sink_logits else None
    return Operands(q=q, k=k, v=v, out=out, **cu_seqlens, softmax_scale=scale, sink_logits=sinks)


def variant_of(problem: Problem, number: int) -> HopperBackward:
    """One of the variants, by tiles of keys; beside it the best tiles of queries."""
    found = [with_row_splits(problem, H200, x) for x in backward_variants(problem, H200)]
    found = [variant for variant in found if variant.queries == found[0].queries]
    return found[number % len(found)]


def compiled(problem: Problem, row_gap: int = 0, number: int = 0) -> dict[str, list[Any]]:
    """The kernels of a backward after `backward_rows`, by name and in order of their launch."""
    x = operands_of(problem, row_gap)
    variant = variant_of(problem, number)
    run = HopperBackwardLauncher(problem, H200, variant)
    lengths = x.cu_seqlens_q, x.cu_seqlens_k
    lse = Layout(torch.Size([*x.q.shape[:-3], problem.num_heads, x.q.shape[-3]]), torch.float32)
    saved = Saved(x.q, x.k, x.v, x.out, lse, x.sink_logits, None, *lengths)
    call = GradientCall(saved, x.out, None, x)
    sizes = sizes_of(run, call)
    tensors = call.given | {"dq": x.q, "dk": x.k, "dv": x.v, "dsink": x.sink_logits}
    for name, (_, numel) in sizes.workspace.places.items():
        dtype = torch.int32 if name == "turns" else torch.float32
        tensors[name] = Layout(torch.Size([numel]), dtype)
    made: dict[str, list[Any]] = {}
    with mock.patch.object(driver, "_active", AnyGPU(90)):
        for launch in launches_of(run, call, sizes)[1:]:
            recorder = Recorder(launch.kernel, listens=True)
            launch._replace(kernel=recorder).through_triton(tensors)
            made[launch.kernel.__name__] = recorder.compiled
    for kernel in made["hopper_backward"]:
        assert kernel.metadata.shared <= shared_bytes(problem, variant)
    return made


def describe(values: cases.Values) -> str:
    names = (values[name] for name in ("kind", "dtype", "made", "heads", "mask"))
    return "-".join(re.sub(r"[ ,()]+", "_", str(name)) for name in names)


def loops_with_products(cubin: bytes) -> list[list[str]]:
    """The instructions of each innermost loop with wgmma in it.

    A loop ends in a conditional jump; waits return from where they try again by one that is not.
    """
    lines = instructions(cubin)
    jumps = [(at, re.search(r"@\S+ BRA\S* .*?0x([0-9a-f]+)", line)) for at, line in lines]
    loops = [(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) < at]
    products = [at for at, line in lines if "HGMMA" in line]
    loops = [loop for loop in loops if any(loop[0] <= at <= loop[1] for at in products)]
    loops = [loop for loop in loops if not any(encloses(loop, other) for other in loops)]
    return [[line for at, line in lines if first <= at <= last] for first, last in loops]


def encloses(loop: tuple[int, int], other: tuple[int, int]) -> bool:
    return loop != other and loop[0] <= other[0] and other[1] <= loop[1]


def held_to_everything(values: cases.Values) -> None:
    """TMA copies and adds, no wgmma waits for the one before, and spills in loops are few."""
    problem = problem_of(values)
    made = compiled(problem, values["row_gap"], values["config"])
    variant = variant_of(problem, values["config"])
    turns = variant.dq == "added_in_turns"
    narrow = problem.head_dim <= 128
    assert turns == (problem.deterministic and problem.mask == Mask() and narrow)
    apart = problem.deterministic and not turns
    makes_dq = "hopper_backward_queries" if apart else "hopper_backward_finish"
    assert apart == (variant.dq == "recomputed")
    assert made.keys() == {"hopper_backward", makes_dq}
    assert len(made["hopper_backward"]) == 1
    for name, kernels in made.items():
        for kernel in kernels:
            ptx = kernel.asm["ptx"]
            assert kernel.metadata.shared <= H200.smem_per_block, name
            products = name in ("hopper_backward", "hopper_backward_queries")
            for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor.4d", "setmaxnreg.inc"):
                assert (instruction in ptx) == products, f"{name}: {instruction}"
            if products:
                clears = problem.kind == "varlen" and problem.head_dim == 256
                limit = WIDE_PACKED_BYTES if clears else STACK_BYTES
                assert measure(kernel).stack_bytes <= limit, name
                if OLD_PTXAS:  # the loops of the pinned Triton: those of another are its own
                    products_overlap(kernel)
            adds = name == "hopper_backward" and not apart
            assert ("cp.reduce.async.bulk.tensor.2d" in ptx) == adds, name
            assert ("ld.acquire.gpu.global" in ptx) == (adds and turns), name


def products_overlap(kernel: Any) -> None:
    said = ptxas_said(kernel)
    assert "serialized" not in said, said
    assert "Used 168 registers" in said, said
    loops = loops_with_products(kernel.asm["cubin"])
    assert len(loops) == 2, "expected a loop of each consumer"
    for body in loops:
        assert len(spilled(body)) <= SPILLS, spilled(body)


def test_everyday_models() -> None:
    held_to_everything(EVERYDAY)


@variants(AXES, most=7, besides=(EVERYDAY,), newest=2, ids=describe)
def test_covering_set(values: cases.Values) -> None:
    held_to_everything(values)


@pytest.mark.parametrize("deterministic", [False, True])
def test_fewer_columns_than_tiles_have(deterministic: bool) -> None:
    held_to_everything(EVERYDAY | {"made": (96, deterministic)})


TILES = (
    "expected one of 64/64, 128/128, 192/128, 256/256, or multiples of 8 in tiles of the first two"
)


def test_limits() -> None:
    problem = problem_of({"made": (128, False), "mask": Mask(True)})
    assert not limits.unsupported(problem, H200)
    refused = {
        "device sm_80: expected sm_90": (problem, GPUS["a100"]),
        "dtype float32: expected bfloat16 or float16": (replace(problem, dtype="float32"), H200),
        "dropout: expected none": (replace(problem, dropout=True), H200),
        "alibi: expected none": (replace(problem, score=cases.Score(False, True)), H200),
        "softcap: expected none": (replace(problem, score=cases.Score(True, False)), H200),
        f"head_dim/head_dim_v 192/192: {TILES}": (
            replace(problem, head_dim=192, head_dim_v=192),
            H200,
        ),
        f"head_dim/head_dim_v 100/100: {TILES}": (
            replace(problem, head_dim=100, head_dim_v=100),
            H200,
        ),
    }
    for reason, (other, device) in refused.items():
        assert limits.unsupported(other, device) == [reason]


def test_layouts_that_tma_cannot_describe() -> None:
    problem = problem_of({"made": (128, False), "mask": Mask(True)})
    x = operands_of(problem, 8)
    assert not unfit(x)
    reason = "{}: expected strides and an address that are multiples of 16 bytes"
    assert unfit(replace(x, k=operands_of(problem, 4).k)) == [reason.format("k")]
    moved = Layout(x.q.shape, x.q.dtype, 0, address=(1 << 20) + 2)
    assert unfit(replace(x, q=moved)) == [reason.format("q")]
    empty = Layout(torch.Size([0, 2, 128]), x.q.dtype)
    assert unfit(replace(x, v=empty)) == ["v: expected at least one token, got [0, 2, 128]"]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lanes_that_go_together_leave_no_sm_idle(head_dim: int) -> None:
    problem = problem_of({"made": (head_dim, False), "mask": Mask(True), "heads": (32, 8)})
    for batch, length in ((4, 4096), (1, 16384), (64, 128), (1, 128)):
        p = replace(problem, batch=batch, seqlen_q=length, seqlen_k=length)
        tiles, lanes, width = lane_tiling(p, H200, batch * length, 8, 128)
        assert (tiles, lanes) == (-(-length // 128), batch * 8)
        assert lanes % width == 0
        assert tiles * width >= 0.9 * H200.num_sms or width == lanes
