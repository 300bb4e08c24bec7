"""Problems drawn from all that a call may ask: every policy has a plan that can be launched.

A plan is legal, its launch is within the limits of a grid, and partials take no more memory than
comes with tensors of that size. What a plan's kernels take of an SM is for tests/kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import SCHEDULED, Plan
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.kernels.host import launcher, sequences, step
from splitkv.kernels.host.partition import grid
from splitkv.kernels.host.workspace import layout
from splitkv.kernels.limits.decode_split import MAX_GRID
from splitkv.planner.explanation import explain
from splitkv.planner.legality import expect_backward, expect_config
from splitkv.planner.policies import POLICIES
from splitkv.planner.registry import kernel_named, make_plan

MOST_PROGRAMS = (1 << 31) - 1  # along the first axis of a grid
LARGEST_CALL = 70 << 30  # bytes of tensors that a GPU may have
# Bytes of partials: of a small call, and times the bytes of the tensors of a large one. Rules that
# follow others cut a cache that is shared by many query heads as those do.
FEW_BYTES, MOST_TIMES = 256 << 20, 8

LENGTHS = st.integers(0, 20).flatmap(lambda n: st.integers(max(1, (1 << n) - 1), 1 << n))
DIMS = st.one_of(
    st.sampled_from([16, 24, 32, 64, 72, 80, 96, 112, 128, 192, 208, 256, 512]).map(
        lambda d: (d,) * 2
    ),
    st.sampled_from([(192, 128), (576, 512), (256, 16), (32, 256)]),
)
PAGES = st.sampled_from([1, 3, 16, 48, 64, 100, 256, 272]).map(Paged)
MASKS = st.builds(
    Mask,
    st.booleans(),
    st.sampled_from([-1, -1, 0, 127, 4095]),
    st.sampled_from([-1, -1, 3]),
    st.sampled_from([0, 0, 4, 1000]),
    st.sampled_from([0, 0, 0, 100, 8192]),
)
CODECS = st.one_of(
    st.just(AS_IS),
    st.builds(
        Codec,
        st.sampled_from(["int8", "fp8", "fp8_e5m2"]),
        st.sampled_from(["tensor", "head", "token"]),
    ),
)


@st.composite
def problems(draw: Any) -> Problem:
    kind = draw(st.sampled_from(["decode", "decode", "dense", "varlen"]))
    codec, keys, dims, mask = draw(CODECS), draw(LENGTHS), draw(DIMS), draw(MASKS)
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 8, 32])), draw(st.sampled_from([1, 4, 7, 64]))
    places = {"decode": Contiguous(), "dense": Contiguous(), "varlen": Ragged()}
    place = draw(PAGES) if kind != "dense" and draw(st.booleans()) else places[kind]
    of_kind: dict[str, Any] = {"lengths": "host" if kind == "dense" else "device"}
    if kind == "decode":
        queries = draw(st.integers(1, 16))
        of_kind["lengths"] = draw(st.sampled_from(["host", "device"]))
        appends = of_kind["lengths"] == "device" and codec.granularity != "token"
        of_kind["seqlen_new"] = queries if appends and draw(st.booleans()) else 0
        of_kind["early_kv"] = not of_kind["seqlen_new"] and draw(st.booleans())
    else:
        queries = min(draw(st.one_of(st.just(keys), LENGTHS)), 1 << 17)
        mask = mask.within(queries, keys)
        trains = codec == AS_IS and not isinstance(place, Paged) and draw(st.booleans())
        of_kind |= {"needs_grad": trains, "deterministic": draw(st.booleans())}
    return Problem(
        kind,
        draw(st.sampled_from([1, 2, 3, 8, 31, 256])),
        kv_heads * group,
        kv_heads,
        *dims,
        queries,
        keys,
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        mask=mask,
        place=place,
        codec=codec,
        products="widened"
        if codec == AS_IS
        else draw(st.sampled_from(["widened", "half", "full"])),
        score=draw(st.builds(Score, st.booleans(), st.booleans())),
        sink_logits=draw(st.booleans()),
        return_lse=draw(st.booleans()),
        sequence_sink_tokens=mask.num_bands == 2
        and not of_kind.get("needs_grad")
        and not of_kind.get("seqlen_new")
        and draw(st.booleans()),
        **of_kind,
    )


def call_bytes(problem: Problem) -> int:
    """Bytes of q, out, K and V."""
    dims = problem.head_dim + problem.head_dim_v
    rows = problem.batch * problem.seqlen_q * problem.num_heads
    keys = problem.batch * problem.seqlen_k * problem.num_kv_heads
    return dims * (rows * problem.element_bytes + keys * problem.kv_element_bytes)


def launched(plan: Plan) -> tuple[tuple[int, ...], int]:
    """(programs along each axis, rows of partials) of a plan by a kernel of this package."""
    problem, config = plan.problem, plan.config
    if kernel_named(plan.kernel).name not in ("decode_split", "hopper_decode_split"):
        splits, tiles = sequences.sequence_splits(plan), problem.seqlen_q * problem.group
        tiles = problem.batch * problem.num_kv_heads * (tiles // config.tile_m + 1)
        return (tiles * config.num_splits,), splits.rows
    if config.schedule in SCHEDULED:
        return step.grid_of(plan), step.step_partial_rows(plan)
    return grid(problem, config), launcher.partial_rows(plan)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100)
@given(problem=problems(), gpu=st.sampled_from([*GPUS]))
def test_plans_can_be_launched(policy: str, problem: Problem, gpu: str):
    if call_bytes(problem) > LARGEST_CALL:
        return
    device = GPUS[gpu]
    plan = make_plan(problem, device, policy=policy)
    kernel = kernel_named(plan.kernel)
    expect_config(kernel, problem, device, plan.config)
    expect_backward(kernel, plan)
    assert plan.kernel in str(explain(plan))
    if plan.kernel.startswith("torch"):
        return
    programs, rows = launched(plan)
    assert programs[0] <= MOST_PROGRAMS
    assert max(programs[1:], default=1) <= MAX_GRID
    assert problem.kind != "decode" or problem.batch <= MAX_GRID  # the second axis of `combine`
    partials = 4 * layout(rows * problem.head_dim_v, rows)[2]
    assert partials <= max(FEW_BYTES, MOST_TIMES * call_bytes(problem))


@pytest.mark.parametrize("policy", ["paged_attention_v2", "paged_attention_v2_permissive"])
def test_a_rule_for_single_queries_leaves_prompts_whole(policy: str):
    """They fill the SMs, and partials of all of their rows would be many times the prompt."""
    prompt = Problem("dense", 1, 8, 2, 128, 128, 1 << 17, 1 << 17, mask=Mask(causal=True))
    assert make_plan(prompt, GPUS["h200"], policy=policy).config.num_splits == 1
    few = Problem("dense", 1, 8, 2, 128, 128, 4, 1 << 17, mask=Mask(causal=True))
    splits = make_plan(few, GPUS["h200"], policy=policy).config.num_splits
    assert splits == math.ceil(few.seqlen_k / 512)


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_more_programs_than_are_counted_leave_merging_to_combine(gpu: str):
    """Programs of a launch that merges what it made count who has come, up to a number."""
    kwargs: dict[str, Any] = {"mask": Mask(causal=True), "place": Paged(64), "lengths": "device"}
    few = Problem("varlen", 64, 8, 1, 64, 64, 1, 4000, **kwargs)
    merges = {}
    for batch in (64, 100_000):
        plan = make_plan(replace(few, batch=batch), GPUS[gpu], policy="flash_attention_3")
        assert plan.config.num_splits > 1
        merges[batch] = plan.config.merge
    assert merges == {64: "last", 100_000: "combine"}


def test_heads_beyond_a_grid_are_left_to_a_kernel_with_larger_tiles():
    """Of 8 bits and head_dim 256 a tile on Hopper has 16 rows, and that of any GPU has 32."""
    codec, kv_heads = Codec("int8", "head"), 33_000
    problem = Problem("decode", 1, 2 * kv_heads, kv_heads, 256, 256, 16, 1000, codec=codec)
    plan = make_plan(problem, GPUS["h200"])
    assert plan.kernel == "decode_split" and max(launched(plan)[0][1:]) <= MAX_GRID
    reason = "KV heads x row tiles 66000: expected at most 65535"
    assert dict(plan.rejected)["hopper_decode_split"] == (reason,)
