"""Decode kernels that append compile for every architecture; on sm_90 they do not spill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from compiling import Compiled, Layout, compile_plan, variants
from kernels.test_compile import (
    EVERYDAY,
    MOST_REGISTERS,
    PLAIN,
    device_of,
    plan_of,
    programs_an_sm,
    tolerated_stack,
)
from kernels.test_compile import valid as has_config

from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.problem import Operands
from splitkv.core.variants import Plain
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.planner.registry import completed

DEVICE_LENGTHS = PLAIN | {"lengths": "device"}
AXES: cases.Axes = {
    "gpu": ("h200", "a100", "a10", "l4", "b200", "rtx5090"),
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": ((128, 128), (64, 64), (80, 80), (192, 128), (256, 256)),
    "shape": ((8, 1), (8, 4), (1, 16)),
    "schedule": ("whole", "even", "fixed", "batch"),
    "place": (Contiguous(), Paged(1), Paged(16)),
    "mask": (Mask(causal=True), Mask(True, 20, -1, 5), Mask(True, chunk=24)),
    "features": (DEVICE_LENGTHS,),
    "codec": (None, Codec("int8", "tensor"), Codec("fp8", "head")),
    "tile_n": (64, 32),
    "num_warps": (4, 2),
    "num_stages": (2, 3),
    "packed": (False, True),
    "rotary": (None, "interleaved", "halves"),
    "start": (False, True),
    "leftpad": (False, True),
    "table": (torch.float32, torch.bfloat16),
    "tokens": (1, 8),
}
HOPPER_AXES: cases.Axes = {
    **AXES,
    "kernel": ("hopper_decode_split",),
    "gpu": ("h200",),
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((64, 64), (128, 128), (256, 256), (128, 64)),
    "shape": ((8, 1), (1, 1), (8, 4), (16, 4)),
    "place": (Contiguous(), Paged(16), Paged(256)),
    "schedule": ("whole", "even", "cluster of 2", "cluster of 8", "fixed", "batch"),
    "mask": (Mask(causal=True), Mask(True, 20, -1, 5)),
    "num_warps": (4,),
    "num_stages": (2, 3, 1),
}


def valid(values: cases.Values) -> bool:
    """Scales are of types that are not fp32; a row of cos and sin is of a rotation."""
    if values.get("rotary", "") is None and values.get("start"):
        return False
    if values.get("codec") is not None and values.get("dtype") == "float32":
        return False
    known = {name: x for name, x in values.items() if name not in OF_NEW}
    if known.get("codec", 0) is None:
        del known["codec"]
    return has_config(known)


OF_NEW = ("packed", "rotary", "start", "leftpad", "table", "tokens")


def new_of(values: cases.Values, operands: Operands) -> Append:
    """New tokens of every sequence; tensors have no memory."""
    o, batch = operands, operands.q.shape[0]
    tokens = values["tokens"]
    lead = (batch * tokens,) if values["packed"] else (batch, tokens)
    dims = o.k.shape[3], o.v.shape[3]
    assert o.out is not None
    k, v = (Layout((*lead, o.k.shape[2], dim), o.out.dtype) for dim in dims)

    def index(size: int) -> Any:
        return Layout((size,), torch.int32)

    named: dict[str, Any] = {}
    if values["packed"]:
        named["cu_seqlens_new"] = index(batch + 1)
    if values["leftpad"]:
        named["leftpad"] = index(batch)
    if o.k_scale is not None:
        named |= {"k_scale": o.k_scale, "v_scale": o.v_scale}
    if values["rotary"] is not None:
        table = Layout((4096, dims[0] // 2), values["table"])
        start = index(batch) if values["start"] else None
        named["rotary"] = Rotary(table, table, start, values["rotary"] == "interleaved")
        named["q"] = o.q
    return Append(k, v, o.k, o.v, before=o.cache_seqlens, page_table=o.page_table, **named)  # type: ignore[arg-type]


def compiled(values: cases.Values, merged: bool = False) -> dict[str, Compiled]:
    """The kernels of a combination; merged: `combine` among them, which reads lengths that grow."""
    of_plan = {name: x for name, x in values.items() if name not in OF_NEW}
    if of_plan["codec"] is None:
        del of_plan["codec"]
    rotary = values["rotary"] is not None
    plan = plan_of(of_plan)
    problem = replace(plan.problem, seqlen_new=values["tokens"], rotary=rotary)
    config = replace(plan.config, appends=True, variant=Plain())
    plan = completed(replace(plan, problem=problem, config=config))
    besides = () if merged else ("combine",)
    made = compile_plan(plan, new=lambda operands: new_of(values, operands), besides=besides)
    kernels = {name: kernel for name, kernel in made.items() if kernel is not None}
    split = kernels[plan.kernel]
    hopper = plan.kernel == "hopper_decode_split"
    assert ("fence.proxy.async.global" in split.ptx) == hopper, "before TMA reads what was written"
    assert split.shared_bytes <= plan.device.smem_per_block
    return kernels


@variants(AXES, most=10, newest=2, valid=valid, ids=lambda v: f"{v['gpu']}-{v['schedule']}")
def test_any_gpu(values: cases.Values) -> None:
    compiled(values, merged=True)


@variants(HOPPER_AXES, most=8, newest=2, valid=valid, ids=lambda v: str(v["schedule"]))
def test_hopper(values: cases.Values) -> None:
    for name, kernel in compiled(values).items():
        assert kernel.stack_bytes <= tolerated_stack(kernel, values), f"{name} spills: {kernel}"
        assert kernel.registers <= MOST_REGISTERS[name]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_queries_in_8_bits_on_hopper(name: Any) -> None:
    """Eight of 16 rows, which are not rotated."""
    new = {"packed": False, "rotary": None, "start": False, "leftpad": False, "tokens": 1}
    values = EVERYDAY | {"kernel": "hopper_decode_split", "place": Contiguous(), "num_stages": 2}
    values |= {"schedule": "even", "codec": Codec(name, "head"), "q_granularity": "head"}
    for kernel in compiled(values | new).values():
        assert kernel.stack_bytes == 0


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_as_many_programs_an_sm(place: Contiguous | Paged) -> None:
    """As without new tokens: what the policy counts on."""
    new = {"packed": False, "rotary": "halves", "start": False, "leftpad": False, "codec": None}
    new |= {"tokens": 1}
    kernel = {"kernel": "hopper_decode_split", "schedule": "even", "table": torch.float32}
    values = EVERYDAY | kernel | new | {"place": place, "num_stages": 2}
    assert programs_an_sm(compiled(values)["hopper_decode_split"], device_of(values)) >= 3
