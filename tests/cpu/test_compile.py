"""Every variant of the kernels compiles for every architecture, without a GPU.

A covering set over all that decides what is compiled: pairs of values of any two axes on sm_90,
where registers and shared memory are held to budgets too, and a smaller set for the others.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import cases
import pytest
from compiling import Compiled, compile_plan

from splitkv.device import GPUS, Device
from splitkv.kernels import decode_split
from splitkv.kv import Contiguous, Paged
from splitkv.masks import Mask
from splitkv.plans import Config, Plan
from splitkv.problem import Problem

# Heads a KV head and query tokens: TILE_M is 16, 32 and 64, and in the last there is more than one.
SHAPES = ((1, 1), (7, 1), (8, 2), (4, 5), (8, 4), (64, 1), (7, 16))
AXES: cases.Axes = {
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": (*cases.AXES["head_dims"], (16, 48), (64, 256)),
    "shape": SHAPES,
    "schedule": ("whole", "even", "fixed", "batch"),
    "place": cases.AXES["place"],
    "mask": (*cases.AXES["mask"], Mask(window_left=9, window_right=2), Mask(window_right=2)),
    "batch": (1, 3),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "lengths": ("host", "device"),
    "return_lse": (False, True),
    "tile_n": (64, 32, 128, 16),
    "num_warps": (4, 2, 8),
    "num_stages": (2, 3, 1, 4, 6, 8),
    "row_gap": (0, 8),
}
# What the architectures treat alike is varied together where there are many.
PLAIN = {"softcap": False, "alibi": False, "sink_logits": False, "lengths": "host"}
EVERYTHING = {"softcap": True, "alibi": True, "sink_logits": True, "lengths": "device"}
OTHER_AXES: cases.Axes = {
    "gpu": ("a100", "a10", "l4", "b200", "rtx5090"),
    "dtype": AXES["dtype"],
    "head_dims": ((64, 64), (80, 80), (192, 128), (256, 256)),
    "shape": ((8, 1), (4, 5), (64, 1)),
    "schedule": AXES["schedule"],
    "place": (Contiguous(), Paged(1), Paged(16)),
    "mask": (Mask(causal=True), Mask(True, 20, -1, 5)),
    "features": (PLAIN, EVERYTHING),
    "tile_n": AXES["tile_n"],
    "num_warps": (4, 2, 8),
    "num_stages": (1, 2, 4),
}

SHAPE = ("tile_n", "num_warps", "num_stages")
# What decides which shapes are legal, each at the value that rules out the fewest.
LEAST = {
    "dtype": "bfloat16",
    "head_dims": (16, 48),
    "shape": (1, 1),
    "place": Contiguous(),
    "mask": Mask(causal=True),
    "softcap": False,
    "alibi": False,
}

REGISTERS_PER_SM = 65536
MOST_REGISTERS = {"decode_split": 255, "combine": 128}  # of a thread; combine: a program a row
TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")


def device_of(values: cases.Values) -> Device:
    return GPUS[values.get("gpu", "h200")]


def problem_of(values: cases.Values) -> Problem:
    """The problem of a combination; axes that do not matter to the caller may be missing."""
    values = {**PLAIN, **values}
    values |= values.pop("features", {})
    for name in ("gpu", "schedule", "row_gap", "tile_n", "num_warps", "num_stages"):
        values.pop(name, None)
    group, seqlen_q = values.pop("shape")
    fixed = {"batch": 3, "return_lse": True} | values
    return cases.decode_problem(
        {"group": group, "num_kv_heads": 2, "seqlen_q": seqlen_q, "seqlen_k": 130} | fixed
    )


@functools.cache
def legal(gpu: str, *asked: Any) -> frozenset[tuple[int, ...]]:
    """The shapes that the kernel has for a problem, by values in the order of LEAST."""
    problem = problem_of(dict(zip(LEAST, asked, strict=True)))
    found = decode_split.configs(problem, GPUS[gpu])
    return frozenset(tuple(getattr(config, name) for name in SHAPE) for config in found)


def valid(values: cases.Values) -> bool:
    """Whether a launcher may be asked for a combination; of a partial one, for some completion."""
    gpu, values = values.get("gpu", "h200"), {**values.get("features", {}), **values}
    if values.get("schedule") == "batch" and values.get("lengths") == "host":
        return False
    shapes = legal(gpu, *(values.get(name, least) for name, least in LEAST.items()))
    given = [(i, values[name]) for i, name in enumerate(SHAPE) if name in values]
    return any(all(shape[i] == value for i, value in given) for shape in shapes)


def plan_of(values: cases.Values) -> Plan:
    problem, device = problem_of(values), device_of(values)
    tile_n = values["tile_n"]
    schedules = {
        "whole": Config(),
        "even": Config(num_splits=3),
        "fixed": Config(
            num_splits=-(-problem.seqlen_k // tile_n), schedule="fixed", split_size=tile_n
        ),
        "batch": Config(num_splits=4, schedule="batch", programs=problem.batch + 3),
    }
    config = replace(
        schedules[values["schedule"]],
        tile_m=decode_split.tile_m(problem),
        tile_n=tile_n,
        num_warps=values["num_warps"],
        num_stages=values["num_stages"],
    )
    assert decode_split.unsupported(problem, device) == []
    return Plan(problem, device, "fixed", "decode_split", config, "a test")


def compiled(values: cases.Values) -> dict[str, Compiled]:
    """The kernels of a combination, held to what every architecture and variant must have."""
    plan, row_gap = plan_of(values), values.get("row_gap", 0)
    kernels = compile_plan(plan, row_gap)
    merges = plan.config.num_splits > 1 or plan.config.schedule == "batch"
    assert kernels.keys() == {"decode_split", *(["combine"] if merges else [])}
    for name, kernel in kernels.items():
        assert kernel.shared_bytes <= plan.device.smem_per_block, name
        waits = merges and plan.device.capability >= (9, 0)
        word = {"decode_split": "launch_dependents", "combine": "wait"}[name]
        assert kernel.ptx.count(f"griddepcontrol.{word}") == waits, name
        assert kernel.ptx.count("griddepcontrol") == waits, name
    split = kernels["decode_split"]
    assert split.shared_bytes <= decode_split.shared_bytes(plan.problem, plan.config)
    if row_gap == 0:  # keys and values go to shared memory in vectors, past the registers
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", split.ptx)
    exact = plan.problem.dtype == "float32"
    assert bool(TENSOR_CORE.search(split.ptx)) != exact, "fp32 is not rounded to tf32"
    return kernels


def describe(values: cases.Values) -> str:
    """A name that says what is compiled: gpu, type, head dims, and what of the rest is short."""
    dims = "x".join(map(str, values["head_dims"]))
    group, seqlen_q = values["shape"]
    config = "n{tile_n}_w{num_warps}_s{num_stages}".format(**values)
    gpu = [values["gpu"]] if "gpu" in values else []
    rows = f"{group}x{seqlen_q}"
    return "-".join([*gpu, values["dtype"], dims, rows, values["schedule"], config])


def tolerated_stack(kernel: Compiled) -> int:
    """0 bytes, or a few where ptxas gave them up for one more program on an SM."""
    warps = kernel.num_warps
    steps = [REGISTERS_PER_SM // (32 * warps * programs) // 8 * 8 for programs in range(2, 9)]
    return 32 if kernel.registers in steps else 0


@pytest.mark.parametrize("values", cases.pairs(AXES, valid), ids=describe)
def test_sm_90(values: cases.Values) -> None:
    for name, kernel in compiled(values).items():
        if values["row_gap"] == 0:  # else elements are loaded one by one, through registers
            assert kernel.stack_bytes <= tolerated_stack(kernel), f"{name} spills: {kernel}"
        assert kernel.registers <= MOST_REGISTERS[name]
        assert kernel.registers * 32 * kernel.num_warps <= REGISTERS_PER_SM


@pytest.mark.parametrize("values", cases.pairs(OTHER_AXES, valid), ids=describe)
def test_other_architectures(values: cases.Values) -> None:
    compiled(values)


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[gpu].capability for gpu in OTHER_AXES["gpu"]} | {(9, 0)} == known


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_budget_of_everyday_decode(place: Contiguous | Paged) -> None:
    """head_dim 128 in bf16, 8 heads a KV head: an SM holds two programs of 64 keys a tile."""
    values = {"dtype": "bfloat16", "head_dims": (128, 128), "shape": (8, 1), "schedule": "batch"}
    values |= {"mask": Mask(causal=True), "place": place, "features": PLAIN | {"lengths": "device"}}
    values |= {"tile_n": 64, "num_warps": 4, "num_stages": 3}
    kernel, device = compiled(values)["decode_split"], device_of(values)
    assert 2 * kernel.registers * 32 * kernel.num_warps <= REGISTERS_PER_SM
    assert 2 * (kernel.shared_bytes + 1024) <= device.smem_per_sm
