"""Decode by a schedule of the step compiles for every architecture, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import pytest
import torch
import triton
from compiling import Compiled, variants
from kernels.test_compile import tolerated_stack
from kernels.test_compile_decode_append import new_of
from step_compiling import compile_schedule, compile_step

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import SCHEDULED, Config, Kernel, Plan
from splitkv.core.problem import Problem
from splitkv.core.tiles import split_tiles
from splitkv.core.variants import Plain
from splitkv.kernels import records
from splitkv.kernels.hopper.decode.kernel import BOX_AT_END
from splitkv.kernels.limits import decode_split, hopper_decode_split
from splitkv.planner.legality import expect_config
from splitkv.planner.policies.appending import MOST_DIM_IN_8_BITS
from splitkv.planner.registry import completed

DECODE = Problem(
    *("decode", 3, 16, 2, 128, 128, 1, 1000),
    mask=Mask(causal=True),
    lengths="device",
    return_lse=True,
)
AXES: cases.Axes = {
    "gpu": ("h200", "a100", "l4", "b200", "rtx5090"),
    "dtype": ("bfloat16", "float32"),
    "head_dims": ((128, 128), (192, 128), (64, 64)),
    "shape": ((8, 1), (7, 16)),
    "place": (Contiguous(), Paged(1), Paged(16)),
    "mask": (Mask(causal=True), Mask(True, 20, -1, 5)),
    "codec": (AS_IS, Codec("fp8", "head"), Codec("int8", "token")),
    "schedule": SCHEDULED,
    "given": (False, True),
    "extras": (False, True),
}
HOPPER_AXES: cases.Axes = {
    "head_dims": ((128, 128), (64, 64), (256, 256), (64, 128)),
    "dtype": ("bfloat16", "float16"),
    "shape": ((8, 1), (8, 2), (8, 4), (4, 1)),
    "place": (Contiguous(), Paged(16), Paged(48), Paged(256)),
    "mask": (Mask(causal=True), Mask(True, 20, -1, 5)),
    "codec": (AS_IS, Codec("fp8", "head"), Codec("int8", "token"), Codec("fp8", "token")),
    "schedule": SCHEDULED,
    "given": (False, True),
    "extras": (False, True),
    "programs_per_sm": (1, 2),
}
# Of combine: the program that has nothing to merge and waits, those of few partials, those of many.
LAUNCHES = {"decode": ["wait", "launch_dependents"], "combine_slots": ["wait"] * 3}
MOST_REGISTERS = {"decode_persistent": 255, "combine_slots": 128}


def valid(values: cases.Values) -> bool:
    stored = values.get("codec", AS_IS) != AS_IS
    wide = values.get("shape") == (7, 16) and values.get("head_dims") == (192, 128)
    return not (stored and values.get("dtype") == "float32") and not wide


def plan_of(values: cases.Values, kernel: Kernel = records.DECODE_SPLIT) -> Plan:
    group, seqlen_q = values.get("shape", (8, 1))
    head_dim, head_dim_v = values.get("head_dims", (128, 128))
    extras = values.get("extras", False)
    given = {name: values[name] for name in ("dtype", "place", "mask", "codec") if name in values}
    problem = replace(
        DECODE,
        num_heads=2 * group,
        seqlen_q=seqlen_q,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        sink_logits=extras,
        score=replace(DECODE.score, softcap=extras, alibi=extras),
        **given,
    )
    device = GPUS[values.get("gpu", "h200")]
    shape, *_ = (c for c in kernel.configs(problem, device) if c.num_stages == 2)
    schedule = values.get("schedule", "ranges")
    groups = 1 if schedule == "ranges" else 2 * -(-problem.rows // shape.tile_m)
    programs = device.num_sms * values.get("programs_per_sm", 1) // groups
    of_split = split_tiles(problem.codec)
    config: Config = replace(shape, schedule=schedule, programs=programs, split_tiles=of_split)
    plan = completed(Plan(problem, device, "fixed", kernel.name, config, "a test"))
    expect_config(kernel, problem, device, plan.config)
    return plan


def describe(values: cases.Values) -> str:
    return "-".join(str(values[name]) for name in ("gpu", "dtype", "place", "schedule"))


def hold_to_launches(kernels: dict[str, Any], plan: Plan) -> None:
    """Each is there before the one before has ended, where the GPU can, and waits for it."""
    early = plan.device.capability >= (9, 0)
    for name, words in LAUNCHES.items():
        found = next(kernel for key, kernel in kernels.items() if name in key)
        if found is None:  # launched, and not compiled here
            continue
        assert said_of_grids(found) == words * early, name


def said_of_grids(kernel: Compiled) -> list[str]:
    """What a kernel says of grids before it and after it."""
    return re.findall(r"griddepcontrol\.(\w+)", kernel.ptx)


@variants(AXES, most=8, newest=3, valid=valid, ids=describe)
def test_every_architecture(values: cases.Values) -> None:
    plan = plan_of(values)
    kernels = compile_step(plan, given=values["given"])
    assert kernels.keys() == MOST_REGISTERS.keys()
    hold_to_launches(kernels, plan)
    for name, kernel in kernels.items():
        assert kernel.shared_bytes <= plan.device.smem_per_block, name
        assert kernel.registers <= MOST_REGISTERS[name], name
    assert kernels["combine_slots"].stack_bytes == 0


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_everyday_decode_spills_nothing(place: Any) -> None:
    """Two programs an SM, keys and values past the registers."""
    plan = plan_of({"place": place})
    kernel = compile_step(plan, merged=False)["decode_persistent"]
    assert kernel.stack_bytes == 0
    assert 2 * kernel.registers * 32 * kernel.num_warps <= 65536
    estimate = decode_split.shared_bytes(plan.problem, plan.config, plan.device)
    assert kernel.shared_bytes <= estimate
    assert re.search(r"cp\.async\.c[ag]\.shared\.global", kernel.ptx)


@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_a_schedule_of_a_step(schedule: str, gpu: str) -> None:
    """Decode is launched before it has ended, where the GPU can; nothing spills."""
    kernel = compile_schedule(plan_of({"schedule": schedule, "gpu": gpu}))
    assert kernel.stack_bytes == 0 and kernel.registers <= 128
    assert said_of_grids(kernel) == ["launch_dependents"] * (gpu == "h200")


def describe_hopper(values: cases.Values) -> str:
    return "-".join(str(values[name]) for name in ("head_dims", "shape", "place", "codec"))


@variants(HOPPER_AXES, most=9, newest=3, ids=describe_hopper)
def test_programs_for_hopper(values: cases.Values) -> None:
    """A producer warp, TMA and mma as in today's kernel, and no register is spilled."""
    plan = plan_of(values, records.HOPPER_DECODE_SPLIT)
    kernels = compile_step(plan, given=values["given"], merged=False)
    hold_to_launches(kernels, plan)
    kernel = kernels["hopper_decode_split"]
    assert kernel.stack_bytes == 0
    assert kernel.shared_bytes <= hopper_decode_split.shared_bytes(plan.problem, plan.config)
    room = plan.device.smem_per_sm // (kernel.shared_bytes + 1024)
    together = min(values["programs_per_sm"], room)
    assert kernel.registers * 32 * kernel.num_warps * together <= 65536
    if together == 2 and hopper_decode_split.spares_registers(plan.problem, plan.config):
        beside = 4 * 32 * MOST_REGISTERS["combine_slots"]
        assert 2 * kernel.registers * 32 * kernel.num_warps + beside <= 65536, "the merge has room"
    for word in ("setmaxnreg.inc", "cp.async.bulk.tensor.5d", "mbarrier.try_wait", "mma.sync"):
        assert word in kernel.ptx, word
    assert "wgmma" not in kernel.ptx and "barrier.cluster" not in kernel.ptx
    of_keys = plan.problem.codec.granularity == "token"
    assert ("cp.async.c" in kernel.ptx) == of_keys, "else by TMA alone"
    if isinstance(plan.problem.place, Contiguous):
        boxes = plan.config.tile_n // BOX_AT_END
        assert kernel.ptx.count("cp.async.bulk.tensor.5d") == 2, "a loop over boxes"
        assert kernel.ptx.count("expect_tx") == boxes, "a sequence ends in any"


# --- new tokens --------------------------------------------------------------------------------

OF_NEW: cases.Axes = {
    "packed": (False, True),
    "rotary": (None, "interleaved", "halves"),
    "start": (False, True),
    "leftpad": (False, True),
    "table": (torch.float32, torch.bfloat16),
    "tokens": (1, 8),
}
MOST_OF_A_THREAD = 255  # registers
WITHOUT_SCALES = (AS_IS, Codec("fp8", "head"), Codec("int8", "tensor"))
HOPPER_NEW_AXES = HOPPER_AXES | OF_NEW | {"codec": WITHOUT_SCALES}
NEW_AXES = AXES | OF_NEW | {"codec": WITHOUT_SCALES}


def valid_new(values: cases.Values) -> bool:
    turned = values.get("rotary", "") is not None
    return valid(values) and (turned or not values.get("start"))


def compile_appending(values: cases.Values, kernel: Kernel) -> dict[str, Compiled]:
    plan = plan_of({n: x for n, x in values.items() if n not in OF_NEW}, kernel)
    rotary = values["rotary"] is not None
    problem = replace(plan.problem, seqlen_new=values["tokens"], rotary=rotary)
    config = replace(plan.config, appends=True, variant=Plain())
    plan = completed(replace(plan, problem=problem, config=config))
    expect_config(kernel, problem, plan.device, plan.config)
    new = partial(new_of, values)
    kernels = compile_step(plan, given=values["given"], new=new)
    hold_to_launches(kernels, plan)
    assert kernels["combine_slots"].stack_bytes == 0
    return kernels


@variants(NEW_AXES, most=6, newest=2, valid=valid_new, ids=describe)
def test_every_architecture_that_appends(values: cases.Values) -> None:
    kernel = compile_appending(values, records.DECODE_SPLIT)["decode_persistent"]
    assert kernel.shared_bytes <= GPUS[values["gpu"]].smem_per_block


@variants(HOPPER_NEW_AXES, most=8, newest=2, valid=valid_new, ids=describe_hopper)
def test_programs_that_append_for_hopper(values: cases.Values) -> None:
    """Two more warps write new tokens; TMA reads them after a fence."""
    kernel = compile_appending(values, records.HOPPER_DECODE_SPLIT)["hopper_decode_split"]
    if max(values["head_dims"]) <= MOST_DIM_IN_8_BITS or values["codec"] == AS_IS:
        # the newest Triton has a thread spill 16 bytes where it has all registers that there are
        full = kernel.registers == MOST_OF_A_THREAD and triton.__version__.startswith("3.9")
        assert kernel.stack_bytes <= max(16 if full else 0, tolerated_stack(kernel, values))
    assert kernel.ptx.count("fence.proxy.async.global") == 2, "what is written, and before TMA"
    assert re.search(r"bar\.sync\s+\d+, 64;", kernel.ptx), "the warps that write wait for another"
