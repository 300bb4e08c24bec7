"""How many parts the keys of `prefill` are cut into, on GPUs that need not be here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import splitkv
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.variants import Plain
from splitkv.kernels import records
from splitkv.kernels.hopper.prefill import kernel as hopper_prefill
from splitkv.kernels.limits import hopper_prefill as limits
from splitkv.planner.policies import short_queries, waves
from splitkv.planner.registry import kernel_named

H200 = GPUS["h200"]
FEW = Problem("dense", 1, 32, 8, 128, 128, 16, 32768, mask=Mask(True))
PACKED = replace(FEW, kind="varlen", place=Paged(64), lengths="device")
KERNELS = (records.PREFILL, records.TORCH_MATH)


def config(problem: Problem, **options: Any) -> Any:
    return splitkv.plan(problem, device=H200, **options).config


@pytest.mark.parametrize("seqlen_q", [2, 16, 17, 64, 256])
@pytest.mark.parametrize("problem", [FEW, PACKED, replace(PACKED, kind="decode")], ids=str)
def test_few_queries_of_many_keys(problem: Problem, seqlen_q: int) -> None:
    """A wave of programs or so, and much less time than one part would take."""
    problem = replace(problem, seqlen_q=seqlen_q)
    choice = short_queries.choose(problem, H200, KERNELS)
    assert choice is not None and choice.kernel == "prefill"
    best = short_queries.cost(problem, H200, choice.config)
    assert best.programs / best.parts < H200.num_sms <= best.programs * 1.5 <= best.slots * 6
    whole = short_queries.cost(problem, H200, replace(choice.config, num_splits=1))
    assert best.seconds < 0.6 * whole.seconds and "to merge; in one part" in choice.why
    for parts in (best.parts + 1, best.parts - 1, 2 * best.parts, best.parts // 2 or 1):
        other = replace(choice.config, num_splits=parts)
        assert best.seconds <= 1.1 * short_queries.cost(problem, H200, other).seconds


@pytest.mark.parametrize(
    "changes",
    [{"seqlen_q": 4096, "seqlen_k": 4096}, {"batch": 64}, {"seqlen_k": 64}, {"needs_grad": True}],
    ids=str,
)
def test_whole(changes: dict[str, Any]) -> None:
    """Where rows fill the device, keys are few or a gradient is wanted."""
    assert config(replace(FEW, **changes)).num_splits == 1


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seqlen_q", [1, 40, 300])
def test_plans_are_legal_everywhere(seqlen_q: int, dtype: str, gpu: str) -> None:
    for problem in (FEW, PACKED, replace(PACKED, place=Paged(16), batch=7)):
        for head_dim in (64, 80, 256):
            asked = replace(problem, seqlen_q=seqlen_q, dtype=dtype)
            asked = replace(asked, head_dim=head_dim, head_dim_v=head_dim)
            plan = splitkv.plan(asked, device=GPUS[gpu])
            whole = plan.config.shape
            assert plan.kernel in ("prefill", "hopper_prefill")
            assert whole in kernel_named(plan.kernel).configs(asked, GPUS[gpu])
            assert 1 <= plan.config.num_splits <= 1024


@pytest.mark.parametrize("place", [Contiguous(), Paged(16), Paged(64)], ids=str)
@pytest.mark.parametrize("heads", [(16, 1), (128, 8)], ids=str)
def test_few_queries_on_hopper(heads: tuple[int, int], place: Any) -> None:
    """The kernel for Hopper, in as many programs as there are SMs at most, and explained."""
    problem = replace(PACKED, kind="decode", batch=1, num_heads=heads[0], num_kv_heads=heads[1])
    problem = replace(problem, place=place, seqlen_q=16, seqlen_k=1 << 17)
    plan = splitkv.plan(problem, device=H200, policy="waves")
    assert plan.kernel == "hopper_prefill" and plan.config.num_splits > 1
    hopper = short_queries.H200_HOPPER
    best = short_queries.cost(problem, H200, plan.config, hopper)
    assert best.slots == H200.num_sms and best.programs <= 2 * H200.num_sms
    assert "us to merge; in one part" in plan.why
    assert "hopper_prefill" in str(splitkv.explain(problem, device=H200))
    odd = splitkv.plan(replace(problem, place=Paged(8)), device=H200)
    assert odd.kernel == "prefill" and odd.config.num_splits > 1
    reasons = dict(odd.rejected)["hopper_prefill"]
    assert reasons == ("page_size 8: expected a multiple of 16",)


def test_decode_of_many_rows_is_weighed_however_many_heads_there_are() -> None:
    """128 rows do not fill a program of 192, which took 1.5 times as long as two parts of 128."""
    problem = replace(
        FEW, kind="decode", batch=12, num_heads=128, num_kv_heads=16, lengths="device"
    )
    problem = replace(problem, head_dim=64, head_dim_v=64, seqlen_k=16384)
    choice = short_queries.choose(problem, H200, [records.HOPPER_PREFILL])
    assert choice is not None and choice.config.tile_m in (64, 128)


ROWS48 = Problem("decode", 64, 16, 1, 128, 128, 3, 4096, mask=Mask(True), lengths="device")
ROWS48 = replace(ROWS48, codec=Codec("int8", "head"), products="half")


def test_two_parts_are_a_cluster_where_all_run_at_once() -> None:
    otherwise: tuple[dict[str, Any], ...]
    otherwise = {"batch": 67}, {"seqlen_k": 65536}, {"seqlen_q": 5}, {"products": "full"}
    for place in (Contiguous(), Paged(16), Paged(64)):
        rows48 = replace(ROWS48, place=place)
        plan = splitkv.plan(rows48, device=H200)
        assert (plan.config.merge, plan.config.num_splits) == ("cluster", 2)
        assert "us to merge in a cluster" in plan.why
        kernel = kernel_named(plan.kernel)
        assert replace(plan.config, variant=Plain()) in kernel.configs(rows48, H200)
        assert kernel.traffic(rows48, plan.config).partial_bytes == 0
        for changes in otherwise:
            assert config(replace(rows48, **changes)).merge == "combine", changes
    fp8 = replace(ROWS48, codec=Codec("fp8", "head"), products="widened", place=Paged(16))
    assert config(fp8).merge == "combine"  # in tiles of 64 keys


@pytest.mark.parametrize(("batch", "parts"), [(32, 4), (16, 8)])
def test_more_parts_than_a_cluster_has_are_merged_by_combine(batch: int, parts: int) -> None:
    rows48 = replace(ROWS48, batch=batch, seqlen_k=ROWS48.batch * ROWS48.seqlen_k // batch)
    for place in (Contiguous(), Paged(16)):
        chosen = config(replace(rows48, place=place))
        assert (chosen.merge, chosen.num_splits) == ("combine", parts)


def test_wide_rows_are_not_read_for_twice() -> None:
    """32 rows of head_dim 256 would be two programs by mma."""
    problem = replace(FEW, kind="decode", batch=9, num_heads=64, seqlen_q=4, lengths="device")
    problem = replace(problem, seqlen_k=8192, place=Paged(64))
    for dim in (128, 256):
        plan = splitkv.plan(replace(problem, head_dim=dim, head_dim_v=dim), device=H200)
        assert plan.kernel.startswith("hopper_") and plan.config.tile_m >= problem.rows


@pytest.mark.parametrize("place", [Paged(16), Paged(256)], ids=str)
def test_chunks_of_prompts_on_hopper(place: Any) -> None:
    chunks = replace(PACKED, place=place, seqlen_q=2048)
    plan = splitkv.plan(chunks, device=H200)
    assert (plan.kernel, plan.config.num_splits) == ("hopper_prefill", 1)
    assert "hopper_prefill" in str(splitkv.explain(chunks, device=H200))


@pytest.mark.parametrize("place", [Ragged(), Paged(64), Paged(256)], ids=str)
def test_prompts_of_few_programs_take_the_shape_of_dense_ones(place: Any) -> None:
    """Their keys stay whole, and the tiles in flight are weighed all the same."""
    dense = replace(FEW, seqlen_q=512, seqlen_k=16384)
    packed = replace(PACKED, place=place, seqlen_q=512, seqlen_k=16384)
    assert replace(config(packed), programs=config(dense).programs) == config(dense)


def test_groups_that_no_power_of_two_packs() -> None:
    """Seven heads would read their keys seven times."""
    packed = short_queries.H200_HOPPER.packed
    problem = replace(PACKED, kind="decode", seqlen_q=16, seqlen_k=1 << 16)
    (first, *_) = limits.configs(problem, H200)
    for group, heads in ((1, 1), (4, 4), (6, 2), (7, 1), (128, 64)):
        one = replace(problem, num_heads=group, num_kv_heads=1)
        assert packed(group, first) == heads == hopper_prefill.packed_heads(one, first)
    seven = replace(problem, num_heads=28, num_kv_heads=4)
    kernels = records.HOPPER_PREFILL, records.PREFILL
    choice = short_queries.choose(seven, H200, kernels)
    assert choice is not None and choice.kernel == "prefill"


def test_parts_are_short_where_other_sequences_may_be() -> None:
    """Also where the rows alone fill the device more than half."""
    problem = replace(PACKED, batch=8, seqlen_q=8, seqlen_k=1 << 17)
    longest = short_queries.H200.longest_part
    assert config(problem).num_splits * longest >= (1 << 17) * 512
    alone = config(replace(problem, lengths="host")).num_splits
    assert alone < config(problem).num_splits


def test_prompts_beside_single_tokens() -> None:
    """Pages: the keys of the few tokens are cut. Packed keys are those of prompts or training."""
    mixed = replace(PACKED, batch=64, seqlen_q=512, seqlen_k=1 << 17)
    mixed = replace(mixed, codec=Codec("fp8", "head"))  # of which there is no schedule
    assert config(mixed).num_splits == 8
    assert config(replace(mixed, seqlen_k=4096)).num_splits == 1
    assert config(replace(mixed, place=Ragged())).num_splits == 1
    assert mixed.cut_tokens == 4 and replace(mixed, seqlen_q=256).cut_tokens == 256
    assert replace(mixed, num_heads=512).cut_tokens == 1
    shown = str(splitkv.explain(mixed, device=H200))
    assert "sequences of at most 4 tokens in up to 8 parts of their keys" in shown
    assert "no schedule of items: kernel hopper_prefill_quantised" in shown
    row_tiles = 8 * 512 * 4 // 128
    assert f"{64 * (row_tiles + 7 * 8)}" in shown.split("programs (CTAs)")[1].split()[0]


def test_partials_have_their_limit() -> None:
    many = replace(PACKED, batch=2000, num_heads=64, seqlen_q=512, seqlen_k=1 << 19)
    choice = short_queries.choose(many, H200, KERNELS)
    assert choice is not None
    parts = choice.config.num_splits
    rows = many.batch * many.cut_tokens * many.num_heads
    assert parts > 1 and parts * rows * 130 * 4 <= short_queries.MOST_PARTIAL_BYTES


def test_other_kernels_are_left_alone() -> None:
    """Decode kernels decide for themselves; what comes before `prefill` runs what is not cut."""
    decode = replace(FEW, kind="decode", seqlen_q=4)
    assert short_queries.choose(decode, H200, (records.DECODE_SPLIT, *KERNELS)) is None
    assert short_queries.choose(FEW, H200, (records.TORCH_MATH,)) is None
    first = replace(records.TORCH_MATH, name="another")
    assert short_queries.choose(replace(FEW, batch=64), H200, (first, *KERNELS)) is None
    cut = waves.choose(FEW, H200, (first, *KERNELS))
    assert cut.kernel == "prefill" and cut.config.num_splits > 1


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_as_asked(place: Any) -> None:
    problem = replace(FEW, place=place, kind="dense" if place == Contiguous() else "varlen")
    assert config(problem, num_splits=7).num_splits == 7
    assert (
        config(replace(problem, needs_grad=True, place=Contiguous()), num_splits=7).num_splits == 1
    )
