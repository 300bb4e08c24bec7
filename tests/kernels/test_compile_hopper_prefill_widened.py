"""What `hopper_prefill_widened` launches compiles without a GPU: keys, queries, then attention.

The last is `hopper_prefill` on tensors of the working type, contiguous or packed: see there.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import cases
import pytest
import torch
from compiling import AnyGPU, Launched, Recorder, layouts_in_8_bits, measure, variants
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records, widen
from splitkv.kernels.hopper.prefill import kernel as prefill
from splitkv.kernels.host import sequences, workspace
from splitkv.kernels.limits import hopper_prefill_widened as prefill_widened
from splitkv.planner.registry import completed

H200 = GPUS["h200"]
AXES: cases.Axes = {
    "kind": ("varlen", "dense", "decode"),
    "codec": (Codec("int8", "token"), Codec("fp8", "head")),
    "q_granularity": ("none", "token"),
    "place": (Paged(1), Contiguous(), Paged(48)),
    "mask": (Mask(True), Mask(True, 128, -1, 4)),
    "head_dims": ((128, 128), (64, 64)),
    "parts": (1, 3),
}


def valid(values: cases.Values) -> bool:
    return values.get("kind") != "dense" or not isinstance(values.get("place"), Paged)


def problem_of(values: cases.Values) -> Problem:
    kind, place, (dim, dim_v) = values["kind"], values["place"], values["head_dims"]
    few = Problem(kind, 3, 16, 2, dim, dim_v, 100, 4096, mask=values["mask"], products="full")
    return replace(
        few,
        place=Ragged() if kind == "varlen" and place == Contiguous() else place,
        lengths="host" if kind == "dense" else "device",
        codec=values["codec"],
        q_granularity=values["q_granularity"],
    )


@variants(AXES, most=4, valid=valid, newest=1)
def test_what_is_launched(values: cases.Values) -> None:
    problem = problem_of(values)
    config = next(prefill_widened.configs(problem, H200))
    config = replace(config, num_splits=values["parts"])
    plan = completed(
        Plan(problem, H200, "fixed", records.HOPPER_PREFILL_WIDENED.name, config, "a test")
    )
    operands, on_host = layouts_in_8_bits(problem), torch.empty(0)
    keys, attend = (Recorder(kernel) for kernel in (widen.widen_rows, prefill.hopper_prefill))
    merge = Launched(sequences.combine)
    partials = workspace.partials
    with (
        mock.patch.object(driver, "_active", AnyGPU(90)),
        mock.patch.object(widen, "widen_rows", keys),
        mock.patch.object(prefill, "hopper_prefill", attend),
        mock.patch.object(sequences, "combine", merge),
        mock.patch.object(workspace, "partials", lambda like, *n: partials(on_host, *n)),
    ):
        out, lse = records.HOPPER_PREFILL_WIDENED.bind(plan, operands)(operands)
    assert tuple(out.shape) == (*operands.q.shape[:-1], problem.head_dim_v)
    assert out.dtype == torch.bfloat16 and lse is None
    assert len(keys.compiled) == 1 + (operands.q_scale is not None)
    assert len(attend.compiled) == 1
    assert len(merge.compiled) == (values["parts"] > 1)
    assert all(measure(made).stack_bytes == 0 for made in keys.compiled)
    assert "wgmma.mma_async.sync.aligned.m64n" in attend.compiled[0].asm["ptx"]


def test_what_is_refused() -> None:
    """What `hopper_prefill` takes of 16 bits, in pages of any size."""
    plain = {"kind": "varlen", "codec": Codec("int8", "token"), "q_granularity": "none"}
    problem = problem_of({**plain, "place": Paged(1), "mask": Mask(), "head_dims": (192, 128)})
    assert prefill_widened.unsupported(problem, H200) == []
    assert prefill_widened.unsupported(replace(problem, return_lse=True), H200) == []
    exact = replace(problem, products="widened", return_lse=True)
    no_lse = (
        "return_lse: expected products half or full and q of 16 bits, as keys and q are rounded"
    )
    assert prefill_widened.unsupported(replace(exact, needs_grad=True, head_dim_v=96), H200) == [
        "head_dim/head_dim_v 192/96: expected multiples of 8 in tiles of one of 64/64, 128/128, "
        "256/256, 192/128",
        no_lse,
        "gradient: expected inputs that require none",
    ]
    narrow = replace(problem, head_dim=96, head_dim_v=96)
    assert prefill_widened.unsupported(narrow, H200) == [
        "head_dim/head_dim_v 96/96: expected columns that are a tile's, as keys that are widened "
        "have"
    ]
    stored = replace(problem, q_granularity="token")
    assert prefill_widened.unsupported(stored, H200) == []
    assert prefill_widened.unsupported(replace(stored, return_lse=True), H200) == [no_lse]
    as_is = replace(problem, codec=AS_IS, products="widened")
    assert prefill_widened.unsupported(as_is, H200) == ["kv as_is: expected int8, fp8 or fp8_e5m2"]


@pytest.mark.parametrize("kind", ["varlen", "decode"])
def test_pages_become_one_after_the_other(kind: str) -> None:
    values = {"kind": kind, "codec": Codec("fp8", "head"), "q_granularity": "token"}
    problem = problem_of({**values, "place": Paged(48), "mask": Mask(), "head_dims": (64, 64)})
    wide = problem.widened
    assert wide.place == (Ragged() if kind == "varlen" else Contiguous())
    assert (wide.codec, wide.products, wide.q_granularity) == (AS_IS, "widened", "none")
    config = next(prefill_widened.configs(problem, H200))
    traffic = prefill_widened.traffic(problem, config)
    assert traffic.kv_bytes == problem.kv_bytes + 2 * wide.kv_bytes
