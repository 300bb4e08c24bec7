"""`hopper_prefill` compiles for sm_90 without a GPU, and as it was meant to.

As in test_compile_prefill.py: every value of every axis. What ptxas may quietly do to such a kernel
costs half of its speed, so its machine code is looked at: products must not wait for one another,
registers must not spill, and exponentials must come before the wait for the product that they run
under.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from compiling import (
    AnyGPU,
    Layout,
    Recorder,
    key_loops,
    measure,
    meetings,
    overwritten_barriers,
    ptxas_said,
    spilled,
    variants,
)
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.scores import Score
from splitkv.kernels import combine_items, records, schedule_items
from splitkv.kernels.hopper.prefill import kernel as prefill
from splitkv.kernels.hopper.primitives.named_barriers import ALL_CLEARED
from splitkv.kernels.host import sequences, workspace
from splitkv.kernels.limits import hopper_prefill as limits
from splitkv.planner.legality import expect_config
from splitkv.planner.registry import completed

H200 = GPUS["h200"]
AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "dtype": ("bfloat16", "float16"),
    "head_dims": limits.HEAD_DIMS,
    "heads": ((8, 8), (8, 2), (14, 2)),
    "mask": (Mask(causal=True), Mask(), Mask(True, 4096, -1, 4)),
    "softcap": (False, True),
    "sink_logits": (False, True),
    "row_gap": (0, 8),
    "shape": (0, 3),  # which of the configs
}
CACHES: cases.Axes = {  # a shape, pages, and what the kernel is called for
    "kind": ("varlen", "decode"),
    "head_dims": limits.HEAD_DIMS,
    "heads": ((8, 2), (14, 2)),
    "place": (Paged(16), Paged(256), Contiguous()),
    "parts": ((1, "combine"), (3, "combine"), (40, "last")),
    "shape": (0, -1),
}
DEFAULTS = {"heads": (8, 8), "softcap": False, "sink_logits": False, "row_gap": 0, "shape": 0}
EVERYDAY = tuple(
    DEFAULTS
    | {"kind": "dense", "dtype": "bfloat16", "head_dims": (dim, dim), "heads": heads, "mask": mask}
    for dim, heads, mask in (
        *((128, (8, 8), Mask()), (128, (8, 8), Mask(True)), (128, (8, 2), Mask(True))),
        *((64, (8, 8), Mask(True)), (64, (8, 2), Mask(True, 127))),
    )
)
WITH_SINK = EVERYDAY[2] | {"sink_logits": True}


def problem_of(values: cases.Values) -> Problem:
    values = {**DEFAULTS, "kind": "dense", "dtype": "bfloat16", "mask": Mask(True), **values}
    num_heads, num_kv_heads = values["heads"]
    head_dim, head_dim_v = values["head_dims"]
    varlen, place = values["kind"] == "varlen", values.get("place", Contiguous())
    return Problem(
        values["kind"],
        batch=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=40 if values["kind"] == "decode" else 4096,
        seqlen_k=4096,
        dtype=values["dtype"],
        mask=values["mask"],
        place=Ragged() if varlen and place == Contiguous() else place,
        lengths="host" if values["kind"] == "dense" else "device",
        score=Score(values["softcap"], False),
        sink_logits=values["sink_logits"],
        return_lse=True,
    )


def operands_of(problem: Problem, row_gap: int) -> Operands:
    """Operands without memory."""
    p, dtype = problem, getattr(torch, problem.dtype)
    lead, keys, cu, table = (p.batch, p.seqlen_q), (p.batch, p.seqlen_k), None, None
    if p.kind == "varlen":
        lead, cu = (p.batch * p.seqlen_q,), Layout((p.batch + 1,), torch.int32)
        keys = (p.batch * p.seqlen_k,)
    if isinstance(p.place, Paged):
        table = Layout((p.batch, -(-p.seqlen_k // p.place.page_size)), torch.int32)
        keys = (table.shape[0] * table.shape[1], p.place.page_size)
    cached = p.kind == "decode" or table is not None

    def tensor(*shape: int) -> Layout:
        return Layout(torch.Size(shape), dtype, row_gap)

    return Operands(
        q=tensor(*lead, p.num_heads, p.head_dim),
        k=tensor(*keys, p.num_kv_heads, p.head_dim),
        v=tensor(*keys, p.num_kv_heads, p.head_dim_v),
        cache_seqlens=Layout((p.batch,), torch.int32) if cached else None,
        page_table=table,
        cu_seqlens_q=cu,
        cu_seqlens_k=None if table is not None else cu,
        sink_logits=Layout((p.num_heads,), dtype) if p.sink_logits else None,
        softmax_scale=p.head_dim**-0.5,
        softcap=3.0 if p.score.softcap else 0.0,
    )


def compiled(problem: Problem, config: Config, row_gap: int = 0) -> Any:
    """What the launcher would launch."""
    plan = completed(Plan(problem, H200, "fixed", "hopper_prefill", config, "a test"))
    x, recorder = operands_of(problem, row_gap), Recorder(prefill.hopper_prefill, listens=True)
    merge, partials = Recorder(sequences.combine), workspace.partials
    with (
        mock.patch.object(driver, "_active", AnyGPU(90)),
        mock.patch.object(prefill, "hopper_prefill", recorder),
        mock.patch.object(sequences, "combine", merge),
        mock.patch.object(workspace, "partials", lambda like, *n: partials(torch.empty(0), *n)),
        mock.patch.object(workspace, "counter_for", lambda _: Layout((4,), torch.int64)),
    ):
        prefill.bind(plan, x).forward(x, None)
    assert len(merge.compiled) == (config.num_splits > 1 and config.merge == "combine")
    (made,) = recorder.compiled
    return made


def variant_of(problem: Problem, config: Config) -> Any:
    """What is chosen beside a config."""
    plan = Plan(problem, H200, "fixed", "hopper_prefill", config, "a test")
    return completed(plan).config.variant


def as_meant(problem: Problem, config: Config, made: Any) -> None:
    """TMA and products that do not wait for one another, in the shared memory that was said."""
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"):
        assert instruction in made.asm["ptx"]
    assert made.metadata.shared <= H200.smem_per_block
    variant = variant_of(problem, config)
    of_out = variant.out == "own_tiles"
    head_dim, head_dim_v = limits.tile_dims(problem)
    row = (variant.q_stages - 1) * head_dim + of_out * head_dim_v
    room = limits.shared_bytes(problem, config) + config.tile_m * row * problem.element_bytes
    assert made.metadata.shared <= room
    assert "serialized" not in ptxas_said(made)


def steps_of(problem: Problem, config: Config, made: Any) -> list[list[str]]:
    """The instructions of a step, of each warpgroup."""
    warpgroups = config.tile_m // prefill.ROWS.value
    products = (limits.tile_dims(problem)[0] + config.tile_n) // 16
    found = key_loops(made.asm["cubin"], products, warpgroups)
    assert len(found) == warpgroups
    return found


def describe(values: cases.Values) -> str:
    dims = "x".join(map(str, values["head_dims"]))
    heads = "x".join(map(str, values["heads"]))
    names = values["kind"], values.get("dtype", values.get("place")), dims, heads
    names += values.get("mask", values.get("parts")), values["shape"]
    names += ("sink_logits",) if values.get("sink_logits") else ()
    return "-".join(str(name).replace(" ", "_") for name in names)


def chosen(problem: Problem, number: int) -> Config:
    found = list(limits.configs(problem, H200))
    return found[min(number, len(found) - 1)]  # -1: the last


@variants(AXES, most=4, besides=EVERYDAY, newest=2, ids=describe)
def test_variants(values: cases.Values) -> None:
    problem = problem_of(values)
    config = chosen(problem, values["shape"])
    as_meant(problem, config, compiled(problem, config, values["row_gap"]))


# The newest Triton spills in these loops, as support/compiling.py tells: not compiled there.
@variants(CACHES, most=4, newest=0, ids=describe)
def test_caches(values: cases.Values) -> None:
    """Pages, and parts of the keys."""
    problem = problem_of(values)
    parts, merge = values["parts"]
    config = replace(chosen(problem, values["shape"]), num_splits=parts, merge=merge)
    made = compiled(problem, config)
    as_meant(problem, config, made)
    for body in steps_of(problem, config, made):
        assert not spilled(body)


@pytest.mark.parametrize("values", [*EVERYDAY, WITH_SINK], ids=describe)
def test_loops_are_as_meant(values: cases.Values) -> None:
    problem = problem_of(values)
    config = chosen(problem, values["shape"])
    made = compiled(problem, config, values["row_gap"])
    as_meant(problem, config, made)
    assert measure(made).stack_bytes == 0
    lazy = variant_of(problem, config).maxima == "lazy"
    for body in steps_of(problem, config, made):
        assert not any(re.search(r"\b(LDL|STL|PRMT)\b", line) for line in body)
        # a wait for q . k, and one for p . v of steps that look for maxima and of those that do not
        waits = [n for n, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == (3 if lazy else 2)
        for first, last in pairwise(waits):
            under_product = sum("MUFU.EX2" in line for line in body[first:last])
            assert under_product >= prefill.ROWS.value * config.tile_n // 128  # a thread's weights


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize(
    ("head_dim", "heads", "shape"),
    [
        *((128, (8, 2), (192, 64)), (128, (8, 2), (128, 128)), (128, (8, 8), (128, 128))),
        *((64, (8, 2), (192, 128)), (64, (8, 8), (128, 128)), (256, (8, 2), (128, 64))),
    ],
)
def test_a_soft_cap_takes_no_step_its_registers(
    kind: str, head_dim: int, heads: tuple[int, int], shape: tuple[int, int]
) -> None:
    values = {"kind": kind, "head_dims": (head_dim, head_dim), "heads": heads, "softcap": True}
    problem = problem_of(values)
    found = limits.configs(problem, H200)
    config = next(c for c in found if (c.tile_m, c.tile_n) == shape)
    made = compiled(problem, config)
    as_meant(problem, config, made)
    for body in steps_of(problem, config, made):
        assert not spilled(body)


@pytest.mark.parametrize(
    ("shape", "page_size", "parts"),
    [
        ((192, 64, 4), 64, (2, "last")),
        ((192, 64, 4), 16, (2, "combine")),
        ((128, 128, 2), 64, (1, "combine")),
        ((128, 128, 2), 128, (4, "last")),
        ((128, 128, 2), 16, (1, "combine")),
        ((128, 128, 3), 16, (1, "combine")),
    ],
    ids=str,
)
def test_pages_and_parts_take_no_step_its_registers(
    shape: tuple[int, int, int], page_size: int, parts: tuple[int, Any]
) -> None:
    """Steps look for no maximum."""
    values = {"kind": "varlen", "head_dims": (128, 128), "heads": (8, 2), "place": Paged(page_size)}
    problem = problem_of(values)
    found = (replace(config, programs=0) for config in limits.configs(problem, H200))
    config = next(c for c in found if (c.tile_m, c.tile_n, c.num_stages) == shape)
    made = compiled(problem, replace(config, num_splits=parts[0], merge=parts[1]))
    as_meant(problem, config, made)
    assert overwritten_barriers(made.asm["ptx"]) == []
    met = meetings(made.asm["cubin"], ALL_CLEARED.value)
    assert met and all(met)
    for body in steps_of(problem, config, made):
        assert not spilled(body)
        assert sum("WARPGROUP.DEPBAR" in line for line in body) == 3


@pytest.mark.parametrize("head_dims", limits.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_configs(kind: str, head_dims: tuple[int, int]) -> None:
    for heads in AXES["heads"]:
        problem = problem_of({"kind": kind, "head_dims": head_dims, "heads": heads})
        found = list(limits.configs(problem, H200))
        assert found and len(set(found)) == len(found)
        for config in found:
            assert config.tile_m % prefill.ROWS.value == 0
            assert problem.group % prefill.packed_heads(problem, config) == 0


def test_first_shapes() -> None:
    """Three warpgroups where rows fill them and the GPU, tiles of 64 keys where a row sees few."""
    causal, narrow = Mask(True), Mask(True, 127)
    for values, shape in (
        ({"head_dims": (128, 128), "heads": (8, 2), "mask": causal}, (192, 64, 4)),
        ({"head_dims": (128, 128), "heads": (8, 8), "mask": causal}, (128, 128, 2)),
        ({"head_dims": (128, 128), "heads": (8, 2), "mask": narrow}, (128, 64, 4)),
        ({"head_dims": (128, 128), "heads": (8, 2), "kind": "varlen"}, (192, 64, 4)),
        ({"head_dims": (128, 128), "heads": (8, 8), "kind": "varlen"}, (128, 128, 2)),
        ({"head_dims": (64, 64), "heads": (8, 2), "mask": causal}, (192, 128, 4)),
        ({"head_dims": (64, 64), "heads": (8, 2), "mask": narrow}, (128, 64, 6)),
    ):
        config = chosen(problem_of(values), 0)
        assert (config.tile_m, config.tile_n, config.num_stages) == shape, values
    few = replace(problem_of({"head_dims": (128, 128), "heads": (8, 2), "mask": causal}), batch=1)
    assert chosen(few, 0).tile_m == 128


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("head_dims", [(96, 96), (80, 72)], ids=str)
def test_fewer_columns_than_tiles_have(head_dims: tuple[int, int], kind: str) -> None:
    """Steps multiply whole tiles, and nothing is spilled in them."""
    problem = problem_of({"kind": kind, "head_dims": head_dims, "heads": (8, 2)})
    config = chosen(problem, 0)
    made = compiled(problem, config)
    as_meant(problem, config, made)
    assert not any(map(spilled, steps_of(problem, config, made)))


TILES = "expected multiples of 8 in tiles of one of 64/64, 128/128, 256/256, 192/128"


def test_what_is_refused() -> None:
    problem = problem_of({"head_dims": (128, 128)})
    assert limits.unsupported(problem, H200) == []
    assert limits.unsupported(problem, GPUS["b200"]) == ["device sm_100: expected sm_90"]
    odd = replace(problem, dtype="float32", head_dim=32, dropout=True, score=Score(False, True))
    odd = replace(odd, codec=Codec("int8", "head"))
    assert limits.unsupported(odd, H200) == [
        "dtype float32: expected bfloat16 or float16",
        "kv int8 per head: expected as_is",
        f"head_dim/head_dim_v 32/128: {TILES}",
        "alibi: expected none",
        "dropout: expected none",
    ]
    for dims in ((100, 100), (160, 128), (64, 128), (32, 32)):
        other = replace(problem, head_dim=dims[0], head_dim_v=dims[1])
        expected = [f"head_dim/head_dim_v {dims[0]}/{dims[1]}: {TILES}"]
        assert limits.unsupported(other, H200) == expected


def test_layouts_without_tma() -> None:
    problem = problem_of({"head_dims": (64, 64)})
    assert limits.unfit(operands_of(problem, 0)) == []
    reason = "expected strides and an address that are multiples of 16 bytes"
    assert limits.unfit(operands_of(problem, 4)) == [f"{name}: {reason}" for name in "qkv"]
    x = operands_of(problem, 0)
    x.k = replace(x.k, address=limits.BARRIER_BYTES + 8)
    x.v = replace(x.v, shape=torch.Size([3, 0, 8, 64]))
    assert limits.unfit(x) == [
        f"k: {reason}",
        "v: expected at least one token, got [3, 0, 8, 64]",
    ]


def test_expanded_keys_have_tma() -> None:
    """One key for all of a cache is how `warmup` does without its memory."""
    x = operands_of(problem_of({"head_dims": (64, 64)}), 0)
    x.k = x.v = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16).expand(3, 300, -1, -1)
    assert x.k.stride()[:2] == (0, 0)
    assert limits.unfit(x) == []


STEPS: cases.Axes = {
    "kind": ("varlen",),
    "dtype": ("bfloat16", "float16"),
    "head_dims": limits.HEAD_DIMS,
    "heads": ((8, 2), (14, 2), (8, 8)),
    "place": (Paged(16), Paged(64), Paged(256)),
    "mask": (Mask(True), Mask(), Mask(True, 1000, -1, 4)),
    "softcap": (False, True),
    "sink_logits": (False, True),
}
PLAIN_STEP = {"dtype": "bfloat16", "mask": Mask(True), "softcap": False, "sink_logits": False}
PAGES_OF_STEPS = tuple(
    {"kind": "varlen", "head_dims": (128, 128), "heads": (8, 2), "place": Paged(size), **PLAIN_STEP}
    for size in (16, 64)
)
CAPPED_STEP = PAGES_OF_STEPS[0] | {"head_dims": (64, 64), "softcap": True}


def scheduled(problem: Problem, shape: tuple[int, int] | None = None) -> Config:
    """A config of a schedule, in the first shape or in one in particular."""
    found = (c for c in limits.configs(problem, H200) if c.programs == 0)
    config = next(c for c in found if shape in (None, (c.tile_m, c.tile_n)))
    config = replace(config, schedule="items", split_size=8 * config.tile_n, num_splits=8)
    expect_config(records.HOPPER_PREFILL, problem, H200, config)
    return config


def compiled_by_items(problem: Problem, config: Config) -> tuple[Any, Any, Any]:
    """What the launcher would launch: the schedule, attention, and the merge."""
    plan = completed(Plan(problem, H200, "fixed", "hopper_prefill", config, "a test"))
    x, attention = operands_of(problem, 0), Recorder(prefill.hopper_prefill, listens=True)
    schedule = Recorder(schedule_items.schedule_items)
    merge, partials = Recorder(combine_items.combine_items), workspace.partials
    with (
        mock.patch.object(driver, "_active", AnyGPU(90)),
        mock.patch.object(prefill, "hopper_prefill", attention),
        mock.patch.object(schedule_items, "schedule_items", schedule),
        mock.patch.object(combine_items, "combine_items", merge),
        mock.patch.object(workspace, "partials", lambda like, *n: partials(torch.empty(0), *n)),
    ):
        prefill.bind(plan, x).forward(x, None)
    return *schedule.compiled, *attention.compiled, *merge.compiled


def hold_items(problem: Problem, config: Config) -> None:
    schedule, attention, merge = compiled_by_items(problem, config)
    for small in (schedule, merge):
        assert measure(small).stack_bytes == 0
    assert attention.metadata.shared <= H200.smem_per_block
    assert "serialized" not in ptxas_said(attention)
    assert "griddepcontrol.wait" in attention.asm["ptx"]
    assert overwritten_barriers(attention.asm["ptx"]) == []
    met = meetings(attention.asm["cubin"], ALL_CLEARED.value)
    assert met and all(met)
    for body in steps_of(problem, config, attention):
        assert not spilled(body)


def describe_step(values: cases.Values) -> str:
    return "-".join(str(value).replace(" ", "_") for value in values.values())


@variants(STEPS, most=3, besides=(*PAGES_OF_STEPS, CAPPED_STEP), newest=0, ids=describe_step)
def test_steps_of_an_engine(values: cases.Values) -> None:
    problem = problem_of(values)
    hold_items(problem, scheduled(problem))


@pytest.mark.parametrize("page_size", [16, 64])
def test_steps_in_tiles_of_fewer_rows(page_size: int) -> None:
    values = {"kind": "varlen", "head_dims": (128, 128), "heads": (8, 2)}
    problem = problem_of(values | {"place": Paged(page_size)})
    hold_items(problem, scheduled(problem, (128, 64)))
