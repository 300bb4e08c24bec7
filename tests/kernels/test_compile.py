"""Variants of the kernels compile for every architecture, without a GPU.

Every value of everything that decides what is compiled is compiled for sm_90, with many pairs of
values of any two axes, and held to budgets of registers and shared memory; fewer variants for the
other architectures, which take turns at them. The kernel for Hopper has a set of its own. The pairs
left out are run: tests/interpreter and tests/gpu have them all.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import cases
import pytest
from compiling import ADDRESS, Compiled, compile_plan, variants

from splitkv.core.device import GPUS, Device
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.kernels.hopper.decode import kernel as hopper_decode_split
from splitkv.kernels.limits import decode_split
from splitkv.kernels.limits import hopper_decode_split as hopper_decode_split_limits
from splitkv.planner.policies import decode_cost
from splitkv.planner.policies import variants as variant_policy
from splitkv.planner.policies.shared import clusters, shapes
from splitkv.planner.registry import completed, kernel_named

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
# Rows from 1 to 64, which are one tile; how many warps a shape has is the kernel's.
HOPPER_AXES: cases.Axes = {
    "kernel": ("hopper_decode_split",),
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((64, 64), (128, 128), (256, 256), (128, 64), (64, 256)),
    "shape": ((1, 1), (7, 1), (8, 2), (1, 16), (4, 5), (8, 4), (32, 1), (16, 3), (64, 1)),
    "schedule": ("whole", "even", "cluster of 2", "cluster of 8", "fixed", "batch"),
    "place": (Contiguous(), Paged(16), Paged(48), Paged(64), Paged(256)),
    "mask": tuple(mask for mask in AXES["mask"] if not mask.chunk),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "lengths": ("host", "device"),
    "return_lse": (False, True),
    "tile_n": (64, 32, 128),
    "num_stages": (3, 2, 1, 4, 6),
    "row_gap": (0, 8),
}

# What a warp of its own asks for, which the kernel has where a cache is large.
ASKED_APART_AXES: cases.Axes = {
    **HOPPER_AXES,
    "head_dims": ((128, 128), (64, 64), (128, 64)),
    "shape": ((8, 1), (4, 1), (1, 16), (8, 2)),
    "place": (Paged(16), Paged(48), Paged(32)),
    "schedule": ("whole", "even", "cluster of 2"),
    "codec": (AS_IS, Codec("fp8", "head"), Codec("int8", "token")),
    "row_gap": (0, 16),
    "tile_n": (64,),
    "num_stages": (2, 3),
}

# Quantised caches: the GPUs before sm_89 have no instruction for e4m3.
CODEC_AXES: cases.Axes = {
    "gpu": ("h200", "a100", "a10", "l4", "b200", "rtx5090"),
    "codec": cases.CODECS,
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((64, 64), (128, 128), (192, 128)),
    "shape": ((8, 1), (8, 4)),
    "schedule": ("even", "batch"),
    "place": (Contiguous(), Paged(1), Paged(16)),
    "mask": (Mask(causal=True),),
    "features": (PLAIN | {"lengths": "device"},),
    "tile_n": (32, 64, 128),
    "num_warps": (4,),
    "num_stages": (2, 3),
}
HOPPER_CODEC_AXES: cases.Axes = {
    **CODEC_AXES,
    "gpu": ("h200",),
    "kernel": ("hopper_decode_split",),
    "head_dims": ((64, 64), (128, 128), (256, 256)),
    "shape": (*CODEC_AXES["shape"], (16, 3), (4, 16)),
    "products": ("half", "widened"),
    "place": (Contiguous(), Paged(16), Paged(256)),
    "num_stages": (1, 2, 3),
}

# Queries that are in 8 bits, too.
STORED_Q_AXES: cases.Axes = {
    **HOPPER_CODEC_AXES,
    "dtype": ("bfloat16",),
    "q_granularity": ("head", "token", "tensor"),
    "products": ("widened", "half", "full"),
    "shape": ((7, 1), (8, 2), (8, 4), (4, 16)),
}

# Scales a key in parts of no more tiles than slots, loaded before the tiles or behind them.
AT_ONCE_AXES: cases.Axes = {
    **HOPPER_CODEC_AXES,
    "codec": (Codec("int8", "token"), Codec("fp8", "token")),
    "shape": ((8, 1), (8, 2)),
    "schedule": ("even", "cluster of 2"),
    "place": (Contiguous(), Paged(16), Paged(64)),
    "mask": (Mask(causal=True), Mask(True, 20, -1, 5)),
    "tile_n": (128,),
}

EVERYDAY = {
    "dtype": "bfloat16",
    "head_dims": (128, 128),
    "shape": (8, 1),
    "mask": Mask(causal=True),
    "features": PLAIN | {"lengths": "device"},
    "tile_n": 64,
}
UNALIGNED_AXES: cases.Axes = {
    **{name: (value,) for name, value in EVERYDAY.items()},
    "kernel": ("hopper_decode_split",),
    "place": (Contiguous(),),
    "schedule": ("even", "batch", "fixed"),
    "shape": ((8, 1), (8, 4)),
    "tile_n": (32, 64, 128),
    "num_stages": (2,),
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
# Of a thread; combine: a program a row.
MOST_REGISTERS = {"decode_split": 255, "hopper_decode_split": 255, "combine": 128}
TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
# How keys arrive, when they are there, and what multiplies them: in wide tiles wgmma.
HOPPER = (r"\bcp\.async\.bulk\.tensor\.[45]d", r"\bmbarrier\.try_wait")
PRODUCTS = {True: "wgmma.mma_async", False: "mma.sync"}


CUTS: dict[str, dict[str, Any]] = {
    "even": {"num_splits": 3},
    "cluster of 2": {"num_splits": 2, "merge": "cluster"},
    "cluster of 8": {"num_splits": 8, "merge": "cluster"},
}


LIMITS: dict[str, Any] = {
    "decode_split": decode_split,
    "hopper_decode_split": hopper_decode_split_limits,
}


def kernel_of(values: cases.Values) -> str:
    return values.get("kernel", "decode_split")


def device_of(values: cases.Values) -> Device:
    return GPUS[values.get("gpu", "h200")]


def problem_of(values: cases.Values) -> Problem:
    """The problem of a combination; axes that do not matter to the caller may be missing."""
    values = {**PLAIN, **values}
    values |= values.pop("features", {})
    for name in ("kernel", "gpu", "schedule", "row_gap", *SHAPE):
        values.pop(name, None)
    group, seqlen_q = values.pop("shape")
    fixed = {"batch": 3, "return_lse": True} | values
    return cases.decode_problem(
        {"group": group, "num_kv_heads": 2, "seqlen_q": seqlen_q, "seqlen_k": 130} | fixed
    )


@functools.cache
def legal(kernel: str, gpu: str, clustered: int, *asked: Any) -> frozenset[tuple[int, ...]]:
    """The shapes that a kernel has for a problem, by values in the order of LEAST; those that so
    many parts may be a cluster of."""
    problem = problem_of(dict(zip(LEAST, asked, strict=True)))
    found = shapes(kernel_named(kernel), problem, GPUS[gpu])
    if clustered:
        together = clusters(kernel_named(kernel), problem, GPUS[gpu])
        found = [config for config in together if config.num_splits == clustered]
    return frozenset(tuple(getattr(config, name) for name in SHAPE) for config in found)


def valid(values: cases.Values) -> bool:
    """Whether a launcher may be asked for a combination; of a partial one, for some completion."""
    gpu, values = values.get("gpu", "h200"), {**values.get("features", {}), **values}
    if values.get("schedule") == "batch" and values.get("lengths") == "host":
        return False
    if kernel_of(values) == "hopper_decode_split":
        group, seqlen_q = values.get("shape", (1, 1))
        if not cases.few_rows({**values, "group": group, "seqlen_q": seqlen_q}):
            return False
    asked = (values.get(name, least) for name, least in LEAST.items())
    clustered = CUTS.get(values.get("schedule", ""), {}).get("merge") == "cluster"
    parts = CUTS[values["schedule"]]["num_splits"] if clustered else 0
    found = legal(kernel_of(values), gpu, parts, *asked)
    given = [(i, values[name]) for i, name in enumerate(SHAPE) if name in values]
    return any(all(shape[i] == value for i, value in given) for shape in found)


def plan_of(values: cases.Values) -> Plan:
    problem, device, kernel = problem_of(values), device_of(values), kernel_of(values)
    found, tile_n = kernel_named(kernel), values["tile_n"]
    cuts: dict[str, dict[str, Any]] = {
        "whole": {},
        **CUTS,
        "fixed": {
            "num_splits": -(-problem.seqlen_k // tile_n),
            "schedule": "fixed",
            "split_size": tile_n,
        },
        "batch": {"num_splits": 4, "schedule": "batch", "programs": problem.batch + 3},
    }
    asked = {name: values[name] for name in SHAPE if name in values}
    shape, *_ = (  # of two that differ in TILE_M the lesser
        config
        for config in shapes(found, problem, device)
        if all(getattr(config, name) == value for name, value in asked.items())
    )
    config = replace(shape, **cuts[values["schedule"]])
    assert found.unsupported(problem, device) == []
    assert config.schedule in found.schedules
    assert config.merge == "combine" or config in list(found.configs(problem, device))
    return completed(Plan(problem, device, "fixed", kernel, config, "a test"))


def compiled(values: cases.Values, merged: bool = False) -> dict[str, Compiled]:
    """The kernels of a combination, held to what every architecture and variant must have; merged:
    `combine` among them."""
    plan, row_gap = plan_of(values), values.get("row_gap", 0)
    kernels = compile_plan(plan, row_gap, besides=() if merged else ("combine",))
    merges = plan.config.num_splits > 1 or plan.config.schedule == "batch"
    merges &= plan.config.merge == "combine"
    assert kernels.keys() == {plan.kernel, *(["combine"] if merges else [])}
    kernels = {name: kernel for name, kernel in kernels.items() if kernel is not None}
    for name, kernel in kernels.items():
        assert kernel.shared_bytes <= plan.device.smem_per_block, name
        waits = merges and plan.device.capability >= (9, 0)
        word = "wait" if name == "combine" else "launch_dependents"
        assert kernel.ptx.count(f"griddepcontrol.{word}") == waits, name
        assert kernel.ptx.count("griddepcontrol") == waits, name
    split, module = kernels[plan.kernel], LIMITS[plan.kernel]
    of_device = [plan.device] if plan.kernel == "decode_split" else []
    estimate = module.shared_bytes(plan.problem, plan.config, *of_device)
    assert split.shared_bytes <= estimate <= plan.device.smem_per_block
    if plan.kernel == "hopper_decode_split":
        together = plan.config.merge == "cluster"
        assert ("st.shared::cluster" in split.ptx) == together
        variant = hopper_decode_split.variant_of(plan)
        producer = variant.load == "producer_warp"
        assert ("setmaxnreg" in split.ptx) == producer
        meeting = {6, 8, 10} if producer else {2}  # of four roles some may do the same
        assert split.ptx.count("barrier.cluster.arrive") in {n * together for n in meeting}
        gathered = variant.load == "gather"
        by_tma = [bool(re.search(instruction, split.ptx)) for instruction in HOPPER]
        assert by_tma == [not gathered, True]
        used = {wide: re.search(rf"\b{name}", split.ptx) for wide, name in PRODUCTS.items()}
        wide = plan.config.tile_m >= hopper_decode_split.WIDE
        assert used[wide] and not used[not wide]
        assert ("cp.async.bulk.shared::cluster.global.mbarrier" in split.ptx) == (
            variant.key_scales == "bulk"
        )
        copied = variant.key_scales == "per_tile" or gathered
        assert ("cp.async.c" in split.ptx) == copied, "else by TMA alone"
        in_rows = re.search(r"cp\.async\.cg\.shared\.global .*, 0x10, 0x10;", split.ptx)
        assert bool(in_rows) == gathered, "16 bytes a thread"
        return kernels
    if row_gap == 0:  # keys and values go to shared memory in vectors, past the registers
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", split.ptx)
    exact = plan.problem.dtype == "float32"
    assert bool(TENSOR_CORE.search(split.ptx)) != exact, "fp32 is not rounded to tf32"
    return kernels


def describe(values: cases.Values) -> str:
    """A name that says what is compiled: gpu, type, head dims, and what of the rest is short."""
    dims = "x".join(map(str, values["head_dims"]))
    group, seqlen_q = values["shape"]
    config = "_".join(f"{name.split('_')[1][0]}{values[name]}" for name in SHAPE if name in values)
    gpu = [values["gpu"]] if "gpu" in values else []
    rows = f"{group}x{seqlen_q}"
    return "-".join([*gpu, values["dtype"], dims, rows, values["schedule"], config])


def tolerated_stack(kernel: Compiled, values: cases.Values) -> int:
    """0 bytes, or a few where ptxas gave them up for one more program on an SM, or where a thread
    has all 256 registers for a row of q in fp32: see tile/product.py.
    """
    if values["dtype"] == "float32" and max(values["head_dims"]) > 128:
        return 32
    warps = kernel.num_warps
    steps = [REGISTERS_PER_SM // (32 * warps * programs) // 8 * 8 for programs in range(2, 9)]
    return 32 if kernel.registers in steps else 0


def hold_to_budgets(values: cases.Values, merged: bool = False) -> None:
    """On sm_90 no kernel spills, and a block of each fits on an SM."""
    for name, kernel in compiled(values, merged).items():
        if not values.get("row_gap"):  # else elements are loaded one by one, through registers
            assert kernel.stack_bytes <= tolerated_stack(kernel, values), f"{name} spills: {kernel}"
        assert kernel.registers <= MOST_REGISTERS[name]
        assert kernel.registers * 32 * kernel.num_warps <= REGISTERS_PER_SM


@variants(AXES, most=14, newest=6, valid=valid, ids=describe)
def test_sm_90(values: cases.Values) -> None:
    hold_to_budgets(values, merged=True)


@variants(HOPPER_AXES, most=12, newest=5, valid=valid, ids=describe)
def test_kernel_for_hopper(values: cases.Values) -> None:
    hold_to_budgets(values, merged=True)


@variants(ASKED_APART_AXES, most=6, newest=2, valid=valid, ids=describe)
def test_a_warp_that_asks_for_tiles(values: cases.Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long parts of large caches, here in short ones."""
    for name in ("LARGE_CACHE", "LARGE_CACHE_8BIT", "LONG_SPLIT", "LONG_SPLIT_8BIT"):
        monkeypatch.setattr(variant_policy, name, 0)
    hold_to_budgets(values)


@variants(OTHER_AXES, most=8, valid=valid, newest=4, ids=describe)
def test_other_architectures(values: cases.Values) -> None:
    compiled(values, merged=True)


@variants(CODEC_AXES, most=8, valid=valid, newest=1, ids=describe)
def test_codecs(values: cases.Values) -> None:
    """Every codec and GPU; tests/gpu and tests/interpreter run the pairs."""
    compiled(values)


@variants(HOPPER_CODEC_AXES, most=8, valid=valid, newest=2, ids=describe)
def test_codecs_on_hopper(values: cases.Values) -> None:
    hold_to_budgets(values)


@variants(STORED_Q_AXES, most=6, valid=valid, newest=1, ids=describe)
def test_queries_in_8_bits_on_hopper(values: cases.Values) -> None:
    hold_to_budgets(values)


@pytest.mark.parametrize("q_granularity", ["head", "none"])
@pytest.mark.parametrize("rows", [(8, 1), (8, 2), (8, 4)], ids=str)
def test_queries_in_int8_are_not_rounded_again(rows: Any, q_granularity: str) -> None:
    """They are multiplied as they are; of others rows are made of the low bytes of fp32."""
    values = EVERYDAY | {"kernel": "hopper_decode_split", "schedule": "even", "num_stages": 2}
    values |= {"codec": Codec("int8", "head"), "products": "half", "place": Contiguous()}
    values |= {"shape": rows, "q_granularity": q_granularity}
    ptx = compile_plan(plan_of(values), besides=("combine",))["hopper_decode_split"].ptx
    assert ("prmt.b32 low," in ptx) == (q_granularity == "none")


@variants(AT_ONCE_AXES, most=4, valid=valid, newest=1, ids=describe)
def test_scales_that_are_loaded_at_once(values: cases.Values) -> None:
    plan = plan_of(values)
    assert hopper_decode_split.variant_of(plan).key_scales == "preloaded"
    hold_to_budgets(values)


@pytest.mark.parametrize("schedule", ["even", "cluster of 2"])
@pytest.mark.parametrize("place", [Contiguous(), Paged(128)], ids=str)
def test_scales_that_are_copied_in_bulk(place: Any, schedule: str) -> None:
    """Many tiles of several heads, whose scales lie side by side."""
    values = EVERYDAY | {"kernel": "hopper_decode_split", "schedule": schedule, "num_stages": 2}
    values |= {"codec": Codec("int8", "token"), "place": place, "seqlen_k": 1 << 13}
    assert hopper_decode_split.variant_of(plan_of(values)).key_scales == "bulk"
    hold_to_budgets(values)


@pytest.mark.parametrize("values", cases.pairs(UNALIGNED_AXES, valid), ids=describe)
def test_the_plan_for_an_address_that_tma_cannot_take(values: cases.Values) -> None:
    """The same parts by the kernel for any GPU, in tiles of its own."""
    plan = plan_of(values)
    instead = hopper_decode_split_limits.without_tma(plan, "another address")
    assert decode_split.unsupported(plan.problem, plan.device) == []
    cut = ("schedule", "num_splits", "split_size", "programs", "tile_n")
    assert [getattr(instead.config, n) for n in cut] == [getattr(plan.config, n) for n in cut]


@variants(UNALIGNED_AXES, most=3, newest=0, valid=valid, ids=describe)
def test_an_address_that_tma_cannot_take(values: cases.Values) -> None:
    """It is said, and what runs instead compiles."""
    plan = plan_of(values)
    said = "this call runs on decode_split: k: expected strides and an address that are multiples"
    with pytest.warns(UserWarning, match=f"^{said} of 16 bytes$"):
        kernels = compile_plan(plan, address=ADDRESS + 2, besides=("combine",))
    assert kernels.keys() == {"decode_split", "combine"}


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[gpu].capability for gpu in OTHER_AXES["gpu"]} | {(9, 0)} == known


def programs_an_sm(kernel: Compiled, device: Device) -> int:
    """How many of a kernel's blocks an SM holds by registers, 8 at a time, and shared memory."""
    registers = -(-kernel.registers // 8) * 8 * 32 * kernel.num_warps
    reserved = 1024  # CUDA's own, with each block
    return min(
        REGISTERS_PER_SM // registers, device.smem_per_sm // (kernel.shared_bytes + reserved)
    )


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_budget_of_everyday_decode(place: Contiguous | Paged) -> None:
    """head_dim 128 in bf16, 8 heads a KV head: an SM holds two programs of 64 keys a tile."""
    values = EVERYDAY | {"place": place, "schedule": "batch", "num_warps": 4, "num_stages": 3}
    assert programs_an_sm(compiled(values)["decode_split"], device_of(values)) >= 2


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_budget_of_everyday_decode_on_hopper(place: Contiguous | Paged) -> None:
    """The same, which the policy counts on: three programs with two tiles in flight each."""
    kernel = {"kernel": "hopper_decode_split", "schedule": "even"}
    values = EVERYDAY | kernel | {"place": place, "num_stages": 2}
    assert programs_an_sm(compiled(values)["hopper_decode_split"], device_of(values)) >= 3


@pytest.mark.parametrize(
    ("stored", "programs"),
    [({}, 2), ({"codec": Codec("int8", "head"), "products": "half"}, 3)],
    ids=("bf16", "int8"),
)
def test_budget_of_wide_tiles(stored: dict[str, Any], programs: int) -> None:
    """Of 48 rows two programs, or three beside int8, which the policy counts on."""
    asked = {"kernel": "hopper_decode_split", "shape": (16, 3), "place": Contiguous()}
    values = EVERYDAY | asked | stored | {"schedule": "even", "num_stages": 2}
    kernel, plan = compiled(values)["hopper_decode_split"], plan_of(values)
    assert programs_an_sm(kernel, plan.device) == programs
    counted = decode_cost.occupancy(plan.problem, plan.device, plan.config, decode_cost.H200_HOPPER)
    assert counted == programs
