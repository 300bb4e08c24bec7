"""The policies: what their sources say of them, legal choices everywhere, golden plans.

`golden/plans.json` holds what every policy chooses on every known GPU for a stand-in of a kernel,
and what the default chooses of the real ones; run this file as a script to write it anew.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkv.core.device import CPU, GPUS, Device
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Choice, Config, Kernel, Plan, Traffic, plan_with_handle
from splitkv.core.problem import Problem
from splitkv.core.variants import Plain
from splitkv.kernels import records
from splitkv.kernels.host.partition import grid
from splitkv.kernels.limits import hopper_decode_split
from splitkv.kernels.limits.hopper_decode_split import CLUSTERS
from splitkv.planner import registry
from splitkv.planner.policies import (
    DEFAULT,
    POLICIES,
    decode_cost,
    fixed,
    flash_attention_2,
    flash_attention_3,
    paged_attention_v2,
    sequence_aware,
    waves,
)
from splitkv.planner.policies.shared import ceil_div, num_tiles, slowest
from splitkv.planner.registry import kernel_named, make_plan

GOLDEN = Path(__file__).parents[1] / "golden"
H200 = GPUS["h200"]


def no_traffic(problem: Problem, config: Config) -> Traffic:
    return Traffic(problem.kv_bytes, 0, 0, 0, 0)


def decode_shapes(problem: Problem, device: Device) -> Iterator[Config]:
    """A stand-in for a split-KV decode kernel: its tile shapes, at one split."""
    tile_m = min(64, max(16, 1 << (problem.rows - 1).bit_length()))
    dims = problem.head_dim + problem.head_dim_v
    for tile_n, num_warps, num_stages in product((64, 32, 128, 16), (4, 2, 8), (2, 3, 1, 4)):
        smem = num_stages * tile_n * dims * problem.element_bytes
        if device.kind == "cpu" or smem <= 0.9 * device.smem_per_block:
            yield Config(1, tile_m, tile_n, num_warps, num_stages)


def decode_space(problem: Problem, device: Device) -> Iterator[Config]:
    """The same shapes with every number of splits, fewest first."""
    found = list(decode_shapes(problem, device))
    for splits in range(1, num_tiles(problem, 16) + 1):
        for config in found:
            if splits <= num_tiles(problem, config.tile_n):
                yield replace(config, num_splits=splits)


def fake(
    name: str,
    configs: Callable[[Problem, Device], Iterator[Config]],
    *schedules: str,
) -> Kernel:
    return Kernel(
        name,
        lambda problem, device: [],
        configs,
        no_traffic,
        lambda plan, operands: None,
        schedules=("even", *schedules),
    )


DECODE = fake("decode", decode_shapes, "batch", "fixed")
HOPPER = records.HOPPER_DECODE_SPLIT
ON_HOPPER = [HOPPER, records.DECODE_SPLIT]
WHOLE = fake("whole", lambda problem, device: iter([Config(tile_m=64, tile_n=32)]))


def decode(
    batch: int = 1,
    num_heads: int = 8,
    num_kv_heads: int = 1,
    seqlen_k: int = 4096,
    head_dim: int = 128,
    seqlen_q: int = 1,
    **more: Any,
) -> Problem:
    more.setdefault("mask", Mask(causal=True))
    more.setdefault("head_dim_v", head_dim)
    return Problem(
        "decode",
        batch,
        num_heads,
        num_kv_heads,
        head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        **more,
    )


# --- what the sources say ----------------------------------------------------------------------


def test_sequence_aware_splits_512_keys_where_flash_attention_3_does_not():
    problem = decode(1, 8, 1, 512, place=Paged(16))
    standard = flash_attention_3.dispatch(problem, H200, pack_gqa=False)
    patched = sequence_aware.dispatch(problem, H200, pack_gqa=False)
    assert (standard.num_n_blocks, standard.num_splits, standard.num_ctas) == (4, 1, 8)
    assert (patched.num_n_blocks, patched.num_splits, patched.num_ctas) == (4, 3, 24)
    assert flash_attention_3.dispatch(problem, H200).pack_gqa


def test_a_contiguous_cache_moves_that_boundary():
    """Blocks of 176 keys there: 512 keys are three blocks, which neither rule splits."""
    for seqlen_k, blocks, splits in ((512, 3, 1), (529, 4, 3), (704, 4, 3), (705, 5, 5)):
        told = sequence_aware.dispatch(decode(1, 8, 1, seqlen_k), H200)
        assert (told.block_n, told.num_n_blocks, told.num_splits) == (176, blocks, splits)


@pytest.mark.parametrize("heads_kv", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("seqlen_k", [128, 256, 384, 512, 1024, 2048, 4096, 8192])
def test_sequence_aware_changes_only_the_boundary(batch: int, seqlen_k: int, heads_kv: int):
    """The 160 configurations of the source: only 512 keys with fewer than four tiles change."""
    problem = decode(batch, 8 * heads_kv, heads_kv, seqlen_k, place=Paged(16))
    standard = flash_attention_3.dispatch(problem, H200).num_splits
    patched = sequence_aware.dispatch(problem, H200).num_splits
    changed = seqlen_k == 512 and batch * heads_kv < 4
    assert (standard, patched) == (1, 3) if changed else standard == patched


@pytest.mark.parametrize("gpu", GPUS)
def test_qwen_splits_at_512_new_tokens_and_not_at_64(gpu: str):
    """Qwen2.5-7B (28/4 heads) at batch 1: a prompt of 22 tokens, then 64 or 512 more."""
    short, long = (
        flash_attention_2.dispatch(decode(1, 28, 4, 22 + new), GPUS[gpu], "varlen_fwd")
        for new in (64, 512)
    )
    assert short.packed and long.packed
    assert (short.num_n_blocks, short.num_splits) == (1, 1)
    assert short.kernels == ("flash_fwd_kernel",)
    assert (long.num_n_blocks, long.num_splits) == (5, 5)
    assert long.kernels == ("flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel")
    assert "534 keys in 5 blocks of 128: 5 splits" in long.why


def test_flash_attention_2_names_what_it_refuses():
    paged = decode(1, 28, 4, 600, place=Paged(16))
    told = flash_attention_2.dispatch(paged, H200)
    assert told.refusals == ("page_size 16: expected a multiple of 256",)
    assert told.kernels[0] == "flash_fwd_splitkv_kernel"
    assert not flash_attention_2.dispatch(replace(paged, place=Paged(256)), H200).refusals
    rich = replace(
        decode(1, 28, 4, 600, mask=Mask(True, 127, -1, 4)), sink_logits=True, dtype="float32"
    )
    assert flash_attention_2.dispatch(rich, H200).refusals == (
        "dtype float32: expected float16 or bfloat16",
        "sink_logits: expected none",
        "sink_tokens 4: expected 0",
    )


@pytest.mark.parametrize(
    ("rule", "splits"),
    [
        ("paged_attention_v2", {"mqa-B16-ctx4k": 8}),
        (
            "paged_attention_v2_permissive",
            {
                "llama7b-B1-ctx1k": 2,
                "llama7b-B1-ctx4k": 8,
                "llama70b-B4-ctx2k": 4,
                "mqa-B16-ctx4k": 8,
            },
        ),
    ],
)
def test_the_ten_shapes_of_paged_attention_v2(rule: str, splits: dict[str, int]):
    """What each rule splits on the L4; the times say which choices were wrong."""
    chosen = {
        shape.name: POLICIES[rule](ten_shape(shape), GPUS["l4"], [DECODE]).config.num_splits
        for shape in paged_attention_v2.TEN_SHAPES
    }
    assert len(chosen) == 10
    assert {name: n for name, n in chosen.items() if n > 1} == splits


def ten_shape(shape: paged_attention_v2.Shape) -> Problem:
    return decode(
        shape.batch,
        shape.num_heads,
        shape.num_kv_heads,
        shape.seqlen_k,
        place=Paged(16),
        dtype="float16",
    )


def test_the_conservative_rule_is_right_on_nine_of_ten():
    wrong = {
        rule.name: [
            shape.name
            for shape in paged_attention_v2.TEN_SHAPES
            if paged_attention_v2.dispatch(ten_shape(shape), GPUS["l4"], rule).partitioned
            != (shape.partitioned_ms < shape.one_pass_ms)
        ]
        for rule in (paged_attention_v2.CONSERVATIVE, paged_attention_v2.PERMISSIVE)
    }
    assert wrong == {
        "conservative": ["llama7b-B1-ctx4k"],
        "permissive": ["llama7b-B1-ctx1k", "llama70b-B4-ctx2k"],
    }


# --- fixed -------------------------------------------------------------------------------------


def test_fixed_takes_what_is_asked_up_to_a_split_a_tile():
    problem = decode(seqlen_k=1000)
    assert fixed.choose(problem, H200, [DECODE]).config.num_splits == 1
    assert fixed.with_splits(5)(problem, H200, [DECODE]).config.num_splits == 5
    choice = fixed.with_splits(500)(problem, H200, [DECODE])
    assert (choice.config.tile_n, choice.config.num_splits) == (64, 16)
    assert choice.why == "500 splits, as asked; decode takes 16, the most that it can use here"
    assert fixed.with_splits(7)(problem, H200, [WHOLE]).config == Config(tile_m=64, tile_n=32)


def test_a_fixed_split_size_does_not_depend_on_the_batch_or_the_length():
    choose = fixed.with_split_size(192)
    configs = [
        choose(decode(batch, seqlen_k=keys), gpu, [DECODE]).config
        for batch, keys, gpu in product((1, 64), (100, 5000), (H200, GPUS["l4"]))
    ]
    cuts = {(config.schedule, config.split_size, config.tile_n) for config in configs}
    assert cuts == {("fixed", 192, 64)}
    assert choose(decode(seqlen_k=5000), H200, [DECODE]).config.num_splits == 27
    assert choose(decode(seqlen_k=100), H200, [DECODE]).config.num_splits == 1


def test_a_fixed_split_size_is_whole_tiles():
    choice = fixed.with_split_size(100)(decode(seqlen_k=1000), H200, [DECODE])
    assert (choice.config.tile_n, choice.config.split_size, choice.config.num_splits) == (
        64,
        128,
        8,
    )
    assert choice.why == "parts of 128 keys, asked for 100: 1000 visible keys, 8 splits"


def test_malformed_fixed_policies():
    with pytest.raises(ValueError, match=r"^num_splits: expected at least 1, got 0$"):
        fixed.with_splits(0)
    with pytest.raises(ValueError, match=r"^split_size: expected at least 1, got -4$"):
        fixed.with_split_size(-4)
    with pytest.raises(ValueError, match=r"^split_size: expected at least 256 keys, got 64$"):
        fixed.with_split_size(64)(decode(seqlen_k=1 << 18), H200, [DECODE])


# --- waves -------------------------------------------------------------------------------------

# Microseconds of split + merge on an H200, bf16, head_dim 128: batch, keys, heads, KV heads.
MEASURED = {
    (1, 512, 8, 1): 4.49,
    (1, 2048, 8, 1): 5.04,
    (1, 8192, 8, 1): 6.65,
    (1, 32768, 8, 1): 10.66,
    (1, 131072, 8, 1): 23.60,
    (8, 4096, 8, 1): 10.12,
    (64, 4096, 8, 1): 37.90,
    (32, 4096, 32, 8): 124.81,
}


@pytest.mark.parametrize("shape", MEASURED)
def test_waves_reproduces_what_its_constants_come_from(shape: tuple[int, int, int, int]):
    batch, seqlen_k, heads, heads_kv = shape
    problem = decode(batch, heads, heads_kv, seqlen_k)
    config = waves.choose(problem, H200, [DECODE]).config
    told = decode_cost.cost(problem, H200, config).seconds * 1e6
    assert 0.8 <= told / MEASURED[shape] <= 1.2


def test_waves_counts_visible_keys_not_the_cache():
    window = Mask(True, window_left=1023)
    config = {
        seqlen_k: waves.choose(decode(seqlen_k=seqlen_k, mask=window), H200, [DECODE]).config
        for seqlen_k in (4096, 1 << 20)
    }
    assert config[4096] == config[1 << 20]
    assert waves.choose(decode(seqlen_k=1 << 20), H200, [DECODE]).config != config[4096]


def test_waves_splits_where_sms_idle_and_not_where_they_are_full():
    assert waves.choose(decode(1, seqlen_k=32768), H200, [DECODE]).config.num_splits > 32
    assert waves.choose(decode(1, seqlen_k=16), H200, [DECODE]).config.num_splits == 1
    full = decode(32, 32, 8, 4096)
    assert waves.choose(full, H200, [DECODE]).config.num_splits == 1


def test_waves_bounds_the_longest_part_where_lengths_are_the_device_s():
    problem = decode(264, 4, 1, 16384)
    host = waves.choose(problem, H200, [DECODE]).config
    device = waves.choose(replace(problem, lengths="device"), H200, [DECODE]).config
    longest = [16384 / c.num_splits * 512 for c in (host, device)]  # bytes of K and V, bf16, D 128
    assert device.schedule == "even"
    assert longest[0] > decode_cost.H200.longest_part >= longest[1]


def test_waves_shares_one_wave_out_where_bounded_parts_would_be_too_many():
    problem = decode(64, 32, 8, 1 << 17, lengths="device")
    shared = waves.choose(problem, H200, [DECODE]).config
    assert shared.schedule == "batch"
    assert shared.programs >= 3 * 64  # one a sequence for rounding, and two
    assert shared.num_splits == shared.programs - 64
    alone = replace(problem, batch=1)
    assert waves.choose(alone, H200, [DECODE]).config.schedule == "even"
    short = replace(problem, seqlen_k=16)
    assert waves.choose(short, H200, [DECODE]).config.num_splits == 1


@pytest.mark.parametrize("batch", [2, 30, 200, 1000, 3000])
def test_a_long_sequence_among_short_ones_is_cut_whatever_the_batch(batch: int):
    problem = decode(batch, 32, 8, 1 << 18, lengths="device")
    config = waves.choose(problem, H200, [DECODE]).config
    tiles = [num_tiles(problem, config.tile_n)] + [1] * (batch - 1)
    if config.schedule == "even":
        assert config.num_splits * decode_cost.H200.longest_part >= (1 << 18) * 512
        return
    # the batch rule: in proportion, rounded up
    full = config.programs - batch
    parts = [ceil_div(n * full, sum(tiles)) for n in tiles]
    assert sum(parts) <= config.programs
    assert parts[0] <= config.num_splits
    assert tiles[0] / parts[0] <= 1.5 * sum(tiles) / min(batch, 1023) + 1


def test_waves_weighs_enough_splits():
    """Against every number of splits of the shapes it weighs: never more than 2 % is missed."""
    for problem in (decode(1, 8, 1, 700), decode(3, 28, 4, 3000), decode(9, 32, 32, 200)):
        for gpu in (H200, GPUS["l4"]):
            chosen = decode_cost.cost(
                problem, gpu, waves.choose(problem, gpu, [DECODE]).config
            ).seconds
            best = min(
                decode_cost.cost(problem, gpu, config).seconds
                for config in decode_space(problem, gpu)
                if (config.tile_n, config.num_warps, config.num_stages) in decode_cost.SHAPES
            )
            assert best <= chosen <= 1.02 * best


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_waves_weighs_enough_splits_on_hopper(place: Contiguous | Paged):
    for problem in (decode(1, 8, 1, 700), decode(3, 28, 4, 3000), decode(9, 32, 32, 200)):
        problem = replace(problem, place=place)
        chosen = waves.choose(problem, H200, ON_HOPPER)
        assert chosen.kernel == HOPPER.name
        best = min(
            decode_cost.cost(
                problem, H200, replace(config, num_splits=splits), decode_cost.H200_HOPPER
            ).seconds
            for config in hopper_decode_split.configs(problem, H200)
            if (config.tile_n, config.num_warps, config.num_stages) in decode_cost.HOPPER_SHAPES
            and config.num_stages > 1
            and config.merge == "combine"
            and (config.tile_n < 128 or place == Contiguous())
            for splits in range(1, num_tiles(problem, config.tile_n) + 1)
        )
        seconds = decode_cost.cost(problem, H200, chosen.config, decode_cost.H200_HOPPER).seconds
        assert seconds <= 1.02 * best


@pytest.mark.parametrize(
    ("problem", "programs"),
    [
        (decode(1, 32, 16, 65536, 64, place=Paged(16), lengths="device"), 3),
        (decode(1, 16, 8, 161498, 64, place=Paged(64), lengths="device"), 2.9),
        (decode(1, 32, 32, 41687, place=Paged(64), lengths="device"), 1.9),
    ],
    ids=str,
)
def test_waves_asks_for_enough_at_once(problem: Problem, programs: float):
    """With fewer an SM these took up to 1.35 times as long: a tile is not hidden behind another."""
    config = waves.choose(problem, H200, ON_HOPPER).config
    told = decode_cost.cost(problem, H200, config, decode_cost.H200_HOPPER)
    assert told.waves == 1
    assert told.num_ctas * config.tile_n / 64 >= programs * H200.num_sms


def test_kernels_are_weighed_against_each_other():
    """256 rows of 32 heads fill four tiles of 64; what they take apart decides."""
    rows = decode(1, 64, 4, 123782, seqlen_q=16, lengths="device")
    for page_size, best in ((1, "prefill"), (16, "hopper_prefill")):
        plan = make_plan(replace(rows, place=Paged(page_size)), H200, policy="waves")
        assert plan.kernel == best
    few = decode(8, 32, 8, 4096, lengths="device", place=Paged(16))
    assert make_plan(few, H200, policy="waves").kernel == "hopper_decode_split"


@pytest.mark.parametrize(
    "dims, place, best",
    [
        ((1, 128, 8, 8192, 256, 4), Paged(64), "hopper_prefill"),  # 25.8 us, 31.8 in wide tiles
        ((32, 16, 1, 256, 256, 4), Contiguous(), "hopper_prefill"),  # 8.6 us, 10.5
        ((1, 4, 1, 256, 256, 16), Paged(16), "hopper_decode_split"),  # 6.0 us, 6.9 by `prefill`
    ],
)
def test_a_wide_tile_of_256_costs_more_at_the_beginning_of_a_part(
    dims: tuple[int, ...], place: Contiguous | Paged, best: str
):
    problem = decode(*dims, lengths="device", place=place)
    assert problem.rows == 64
    assert make_plan(problem, H200, policy="waves").kernel == best


def test_the_soft_maximum():
    assert slowest(2.0) == slowest(2.0, 0.0) == 2.0
    assert slowest(0.0, 0.0) == 0.0
    assert 1.25 < slowest(1.0, 1.0) < 1.27
    assert 1.0 < slowest(1.0, 0.3) < 1.01


def test_one_slot_is_for_parts_of_one_tile():
    """With one slot nothing is on its way while a tile is worked on."""
    seen = set()
    for batch, seqlen_k in product((1, 2, 8, 64, 300), (16, 100, 512, 2000, 9000, 1 << 17)):
        for place in (Contiguous(), Paged(16)):
            problem = decode(batch, seqlen_k=seqlen_k, place=place)
            config = waves.choose(problem, H200, ON_HOPPER).config
            one_tile = config.num_splits == num_tiles(problem, config.tile_n)
            assert config.num_stages > 1 or one_tile
            seen.add(config.num_stages)
    assert seen >= {1, 2}


def test_waves_launches_the_programs_that_it_counts():
    """A few more may be a wave more: 400 programs of 8-bit pages where an H200 holds 396."""
    quantised = replace(decode(1, 32, 8, 32768), codec=Codec("int8", "token"), place=Paged(16))
    problems = [quantised]
    places = Contiguous(), Paged(16)
    for batch, seqlen_k, place in product((1, 3, 8), (700, 9000, 50_000), places):
        problems.append(replace(decode(batch, 32, 8, seqlen_k), place=place))
    for problem, gpu in product(problems, (H200, GPUS["l4"])):
        choice = waves.choose(problem, gpu, ON_HOPPER if gpu is H200 else [records.DECODE_SPLIT])
        own = decode_cost.H200_HOPPER if gpu is H200 else decode_cost.H200
        told = decode_cost.cost(problem, gpu, choice.config, own)
        assert told.num_ctas == math.prod(grid(problem, choice.config))
        if problem is quantised and gpu is H200:
            assert told.waves == 1


def test_waves_shares_a_batch_out_on_hopper_too():
    problem = decode(64, 32, 8, 1 << 17, lengths="device")
    choose = waves.for_equal_lengths()
    choice = choose(problem, H200, ON_HOPPER)
    assert (choice.kernel, choice.config.schedule) == ("hopper_decode_split", "batch")
    assert waves.choose(problem, H200, ON_HOPPER).config.schedule == "head_ranges"
    alone = choose(replace(problem, batch=1), H200, ON_HOPPER)
    assert (alone.kernel, alone.config.schedule) == ("hopper_decode_split", "even")


@pytest.mark.parametrize(
    "batch, heads, head_dim, seqlen_k", [(76, 2, 256, 5118), (64, 8, 128, 1 << 17)]
)
def test_sharing_a_batch_out_costs_little_where_lengths_are_equal_after_all(
    batch: int, heads: int, head_dim: int, seqlen_k: int
):
    problem = decode(batch, heads, heads, seqlen_k, head_dim, 16, lengths="device")
    choose = waves.for_equal_lengths()
    own, equal = (
        choose(p, H200, ON_HOPPER).config for p in (problem, replace(problem, lengths="host"))
    )
    told = [
        decode_cost.cost(problem, H200, c, decode_cost.H200_HOPPER).seconds for c in (own, equal)
    ]
    assert told[0] <= waves.SHARING * waves.CLOSE * told[1]
    assert own.schedule == ("even" if batch == 76 else "batch")
    longest = seqlen_k / own.num_splits * 4 * head_dim
    assert own.schedule == "batch" or longest <= decode_cost.H200.longest_part


def test_parts_are_a_cluster_where_all_can_run_at_once():
    seen = set()
    for batch, kv_heads, seqlen_k in product((1, 8, 64, 200), (1, 8), (512, 4096, 32768)):
        problem = decode(batch, 4 * kv_heads, kv_heads, seqlen_k, lengths="device")
        config = waves.choose(problem, H200, ON_HOPPER).config
        if config.merge == "cluster":
            told = decode_cost.cost(problem, H200, config, decode_cost.H200_HOPPER)
            share = 1.0 if config.num_splits == 2 else waves.ROOM_FOR_CLUSTERS
            assert told.num_ctas == batch * kv_heads * config.num_splits <= told.slots * share
            assert config.schedule == "even" and config.num_splits in CLUSTERS
            assert "us to merge in clusters" in waves.choose(problem, H200, ON_HOPPER).why
        seen.add((config.merge, config.num_splits > 1))
    assert seen == {("cluster", True), ("combine", True), ("combine", False)}


@pytest.mark.parametrize("mask", [Mask(True), Mask(True, chunk=64)], ids=str)
def test_whole_sequences_with_gradients_take_the_kernel_s_own_tile(mask: Mask):
    problem = Problem("dense", 2, 8, 2, 128, 128, 800, 700, mask=mask, needs_grad=True)
    plan = make_plan(problem, H200)
    first = next(kernel_named(plan.kernel).configs(problem, H200))
    assert replace(plan.config, variant=Plain()) == first and first.tile_m > 16


def test_a_cluster_takes_shared_memory_for_what_it_exchanges():
    problem, config = decode(8, 32, 8, 4096), Config(tile_m=16, tile_n=64, num_stages=2)
    pair = replace(config, num_splits=2, merge="cluster")
    more = hopper_decode_split.shared_bytes(problem, pair)
    more -= hopper_decode_split.shared_bytes(problem, config)
    assert more == 4 * (4 * 128 + 2 * 4 * 2)  # 4 rows of acc, and of m and l a part each
    pairs = [c for c in hopper_decode_split.configs(problem, H200) if c.merge == "cluster"]
    assert {c.shape for c in pairs} <= set(hopper_decode_split.configs(problem, H200))
    assert hopper_decode_split.traffic(problem, pair).partial_bytes == 0


def test_waves_constants_are_a_parameter():
    problem = decode(1, seqlen_k=32768)
    dear = decode_cost.Constants(merge=1.0, cluster=1.0)
    assert waves.with_constants(dear)(problem, H200, [DECODE]).config.num_splits == 1
    assert waves.with_constants(dear)(problem, H200, [HOPPER]).config.num_splits == 1
    of_hopper = waves.with_constants(decode_cost.H200, hopper=dear)
    assert of_hopper(problem, H200, [HOPPER]).config.num_splits == 1
    assert of_hopper(problem, H200, [DECODE]) == waves.choose(problem, H200, [DECODE])


def test_each_kernel_has_its_own_constants():
    own = decode_cost.Constants(merge=1.0)
    assert decode_cost.constants_of(DECODE) is decode_cost.H200
    assert decode_cost.constants_of(HOPPER) is decode_cost.H200_HOPPER
    assert decode_cost.constants_of(DECODE, own) is decode_cost.constants_of(HOPPER, own) is own
    assert decode_cost.constants_of(HOPPER, decode_cost.H200, own) is own


def test_waves_cost_counts_ctas_and_waves():
    problem = decode(4, 32, 8, 4096)
    config = Config(num_splits=4, tile_n=64, num_stages=2)
    told = decode_cost.cost(problem, H200, config)
    assert told.num_ctas == 4 * 8 * 4
    assert told.slots == 132 * 3  # 2 stages of 32 KiB and 6 KiB: three programs in 228 KiB
    assert (told.waves, told.tiles_per_split) == (1, 16)
    assert told.merge_seconds > decode_cost.H200.merge
    assert decode_cost.cost(problem, H200, replace(config, num_splits=1)).merge_seconds == 0
    tall = decode(4, 64, 8, 4096, seqlen_q=16)  # 128 rows: two tiles of 64
    assert decode_cost.cost(tall, H200, replace(config, tile_m=64)).num_ctas == 2 * 4 * 8 * 4
    assert decode_cost.cost(replace(problem, batch=64), H200, config).waves == 6


def test_waves_never_gets_slower_with_a_faster_memory_or_fewer_keys():
    config = Config(num_splits=8)
    seconds = [
        decode_cost.cost(decode(seqlen_k=n), H200, config).seconds for n in range(64, 9000, 64)
    ]
    assert seconds == sorted(seconds)
    fast = replace(H200, bandwidth=2 * H200.bandwidth)
    problem = decode(32, 32, 8, 4096)
    assert (
        decode_cost.cost(problem, fast, config).seconds
        < decode_cost.cost(problem, H200, config).seconds
    )


# --- every policy on everything ----------------------------------------------------------------

PROBLEMS = {
    "mqa_b1_512": decode(1, 8, 1, 512),
    "mqa_b1_32k": decode(1, 8, 1, 32768),
    "mqa_b64_4k": decode(64, 8, 1, 4096),
    "gqa_b1_600": decode(1, 28, 4, 600),
    "gqa_b1_4k": decode(1, 32, 8, 4096),
    "gqa_b8_1k": decode(8, 32, 8, 1024),
    "gqa_b32_4k": decode(32, 32, 8, 4096),
    "mha_b1_1k": decode(1, 32, 32, 1024),
    "paged_b1_512": decode(1, 8, 1, 512, place=Paged(16)),
    "paged_b8_lengths": decode(8, 32, 8, 8192, place=Paged(16), lengths="device"),
    "window_b1_128k": decode(1, 32, 8, 131072, mask=Mask(True, 4095, -1, 4)),
    "speculative_b4_8k": decode(4, 64, 8, 8192, seqlen_q=4),
    "dims_192_128": decode(2, 128, 128, 4096, head_dim=192, head_dim_v=128),
    "float32_d256": decode(1, 16, 2, 4096, head_dim=256, dtype="float32"),
    "long_b64_lengths": decode(64, 32, 8, 131072, lengths="device"),
    "empty": decode(1, 8, 1, 0),
}


def line(choice: Choice | Plan) -> str:
    config = choice.config
    text = f"{config.num_splits} {config.tile_m}x{config.tile_n} w{config.num_warps}"
    text += f" s{config.num_stages}" + " cluster" * (config.merge == "cluster")
    return text if config.schedule == "even" else f"{text} {config.schedule} {config.programs}"


def plans(policy: str) -> dict[str, dict[str, str]]:
    """What a policy chooses, by GPU and problem."""
    choose = POLICIES[policy]
    return {
        gpu: {name: line(choose(p, device, [DECODE])) for name, p in PROBLEMS.items()}
        for gpu, device in GPUS.items()
    }


def default_plans() -> dict[str, dict[str, str]]:
    """What the default policy chooses of the kernels that there are, by GPU and problem."""
    made = {
        gpu: {name: make_plan(p, device) for name, p in PROBLEMS.items()}
        for gpu, device in GPUS.items()
    }
    return {
        gpu: {name: f"{plan.kernel} {line(plan)}" for name, plan in here.items()}
        for gpu, here in made.items()
    }


def everything() -> dict[str, dict[str, dict[str, str]]]:
    return {policy: plans(policy) for policy in POLICIES} | {"the default": default_plans()}


@pytest.mark.parametrize("policy", POLICIES)
def test_golden_plans(policy: str):
    golden = json.loads((GOLDEN / "plans.json").read_text())
    assert set(golden) == {*POLICIES, "the default"}
    assert plans(policy) == golden[policy]


def test_golden_plans_of_the_default():
    golden = json.loads((GOLDEN / "plans.json").read_text())["the default"]
    assert default_plans() == golden
    kernels = {gpu: {text.split()[0] for text in golden[gpu].values()} for gpu in golden}
    hopper = {gpu for gpu in kernels if HOPPER.name in kernels[gpu]}
    assert hopper == {gpu for gpu, device in GPUS.items() if device.capability == (9, 0)}
    assert all("decode_split" in found for found in kernels.values())


@pytest.mark.parametrize("gpu", GPUS)
def test_golden_plans_are_plain_data(gpu: str):
    """And come back from a file, and from the string that a compiled graph holds of them."""
    for problem in PROBLEMS.values():
        plan = make_plan(problem, GPUS[gpu])
        data = json.loads(json.dumps(plan.as_dict()))
        again = Plan.from_dict(data)
        assert again == plan and hash(again) == hash(plan)
        assert again.as_dict() == plan.as_dict() == data
        assert plan_with_handle(plan.handle) == plan and again.handle == plan.handle


def test_the_default_is_a_policy():
    assert DEFAULT == "tuned"
    assert DEFAULT in POLICIES


problems = st.builds(
    lambda b, kv, group, q, k, d, mask, place, lengths, dtype: decode(
        b, kv * group, kv, k, d, q, mask=mask, place=place, lengths=lengths, dtype=dtype
    ),
    st.integers(1, 300),
    st.sampled_from([1, 2, 4, 8, 32]),
    st.sampled_from([1, 2, 7, 8, 64]),
    st.integers(1, 16),
    st.integers(0, 300_000),
    st.sampled_from([64, 80, 128, 192, 256]),
    st.builds(Mask, st.booleans(), st.integers(-1, 5000), st.integers(-1, 50), st.integers(0, 9)),
    st.one_of(st.just(Contiguous()), st.builds(Paged, st.integers(1, 300))),
    st.sampled_from(["host", "device"]),
    st.sampled_from(["bfloat16", "float16", "float32"]),
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(problem=problems, gpu=st.sampled_from([*GPUS.values(), CPU]))
def test_choices_are_legal_and_repeatable(policy: str, problem: Problem, gpu: Device):
    before = asdict(problem)
    choice = POLICIES[policy](problem, gpu, [DECODE, WHOLE])
    assert choice == POLICIES[policy](problem, gpu, (DECODE, WHOLE))
    assert asdict(problem) == before
    assert choice.kernel == "decode"
    assert choice.why
    config = choice.config
    plain = replace(config, num_splits=1, schedule="even", programs=0, split_size=0)
    assert plain in list(decode_shapes(problem, gpu))
    assert 1 <= config.num_splits <= min(1024, num_tiles(problem, config.tile_n))
    if config.schedule == "batch":
        assert problem.lengths == "device"
        assert problem.batch < config.programs < problem.batch + 1024
        longest = num_tiles(problem, config.tile_n)
        assert config.num_splits == min(longest, 1024, config.programs - problem.batch)
    assert POLICIES[policy](problem, gpu, [WHOLE]).config == Config(tile_m=64, tile_n=32)


on_hopper = st.builds(
    replace,
    problems.filter(lambda problem: problem.rows <= 64),
    head_dim=st.sampled_from([64, 128, 256]),
    head_dim_v=st.sampled_from([64, 128, 256]),
    place=st.one_of(st.just(Contiguous()), st.builds(Paged, st.sampled_from([16, 48, 64, 256]))),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(problem=on_hopper, gpu=st.sampled_from(["h100", "h200"]))
def test_choices_on_hopper_are_legal(policy: str, problem: Problem, gpu: str):
    plan = make_plan(problem, GPUS[gpu], policy=policy)
    kernel, config = plan.kernel, replace(plan.config, variant=Plain())
    assert kernel == "hopper_decode_split" or policy in registry.BY_TIME
    found = kernel_named(kernel)
    assert config.schedule in found.schedules
    plain = replace(config.shape, schedule="even", programs=0, split_size=0)
    legal = list(found.configs(problem, GPUS[gpu]))
    assert plain in legal
    assert config.merge == "combine" or config in legal
    assert 1 <= config.num_splits <= 1024


@pytest.mark.parametrize("policy", POLICIES)
def test_a_kernel_may_yield_its_whole_space(policy: str):
    for problem in (decode(1, 8, 1, 512), decode(2, 28, 4, 3000)):
        whole_space = fake("decode", decode_space, "batch", "fixed")
        choice = POLICIES[policy](problem, H200, [whole_space])
        assert choice == POLICIES[policy](problem, H200, [DECODE])
        plain = replace(choice.config, schedule="even", split_size=0)
        assert plain in list(decode_space(problem, H200))


@pytest.mark.parametrize("policy", POLICIES)
def test_only_decode_is_split(policy: str):
    dense = Problem("dense", 1, 8, 1, 128, 128, 4096, 4096)
    assert POLICIES[policy](dense, H200, [DECODE]).config.num_splits == 1


@given(
    length=st.integers(1, 600),
    shorter=st.integers(0, 600),
    window=st.integers(-1, 200),
    sinks=st.integers(0, 90),
    chunk=st.sampled_from([0, 0, 1, 16, 48, 64, 100, 200]),
    seqlen_q=st.integers(1, 8),
    tile_n=st.sampled_from([16, 32, 64]),
)
def test_num_tiles_covers_every_length_up_to_the_bound(
    length: int, shorter: int, window: int, sinks: int, chunk: int, seqlen_q: int, tile_n: int
):
    mask = Mask(True, window, -1, sinks, chunk)
    problem = decode(seqlen_k=length, seqlen_q=seqlen_q, mask=mask, lengths="device")
    keys = min(shorter, length)
    touched = {key // tile_n for lo, hi in mask.span(seqlen_q, keys) for key in range(lo, hi)}
    assert len(touched) <= num_tiles(problem, tile_n)


@pytest.mark.parametrize("module", ["splitkv.planner.policies", "splitkv.core.device"])
def test_policies_import_neither_torch_nor_triton(module: str):
    code = f"import sys, {module}; print([m for m in ('torch', 'triton') if m in sys.modules])"
    path = str(Path(__file__).parents[2] / "src")
    told = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "[]"


if __name__ == "__main__":
    (GOLDEN / "plans.json").write_text(json.dumps(everything(), indent=1) + "\n")
