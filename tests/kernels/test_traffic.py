"""The traffic formulas against a count, one element at a time, on small shapes.

The counts follow the kernels' docstrings, not their code: rows, keys and parts are enumerated and
the mask is asked about every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import ceil, floor
from typing import Any

import pytest

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Kernel, Traffic
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.kernels.hopper.decode import kernel as hopper_decode_split
from splitkv.kernels.limits import decode_split, hopper_prefill, prefill
from splitkv.kernels.limits import hopper_decode_split as hopper_decode_split_limits
from splitkv.planner.registry import KERNELS

H200 = GPUS["h200"]
SMALL = Problem("decode", 2, 6, 2, 32, 48, 1, 70, mask=Mask(causal=True), return_lse=True)
MASKS = {
    "causal": Mask(causal=True),
    "full": Mask(),
    "window": Mask(causal=True, window_left=20),
    "both_sides": Mask(window_left=9, window_right=2),
    "sink_tokens": Mask(causal=True, window_left=20, sink_tokens=5),
    "chunk": Mask(causal=True, chunk=48),
    "sink_tokens_share_a_tile": Mask(causal=True, window_left=24, sink_tokens=40),
}
SCHEDULES = {
    "whole": Config(),
    "even": Config(num_splits=3, tile_n=16),
    "more_parts_than_tiles": Config(num_splits=40, tile_n=16),
    "fixed": Config(num_splits=3, tile_n=16, schedule="fixed", split_size=32),
    "fixed_whole": Config(num_splits=1, tile_n=16, schedule="fixed", split_size=128),
    "batch": Config(num_splits=4, tile_n=16, schedule="batch", programs=9),
    "batch_whole": Config(num_splits=2, tile_n=64, schedule="batch", programs=4),
}


def seen_keys(problem: Problem) -> list[int]:
    """Keys that some query of a longest sequence sees."""
    first = problem.seqlen_k - problem.seqlen_q
    return [
        key
        for key in range(problem.seqlen_k)
        if any(problem.mask.visible(first + t, key) for t in range(problem.seqlen_q))
    ]


def seen_tiles(problem: Problem, config: Config) -> list[int]:
    """Tiles with a visible key."""
    return sorted({key // config.tile_n for key in seen_keys(problem)})


def num_parts(problem: Problem, config: Config) -> int:
    """Parts that the tiles with a visible key are dealt out to, by the rules of tile/share.py."""
    tiles = seen_tiles(problem, config)
    parts = config.num_splits
    if config.schedule == "batch":  # as many for each sequence as its share of all tiles
        share = Fraction(len(tiles), max(1, problem.batch * len(tiles)))
        parts = max(1, floor(share * (config.programs - problem.batch) + Fraction(1, 2)))
    size = max(1, ceil(len(tiles) / parts))
    if config.schedule == "fixed":
        size = config.split_size // config.tile_n
    return max(1, len([tiles[i : i + size] for i in range(0, len(tiles), size)]))


def num_parts_on_hopper(problem: Problem, config: Config) -> int:
    """The same, but by the even rule the tiles go around, one to each part in turn."""
    if config.schedule != "even":
        return num_parts(problem, config)
    tiles = seen_tiles(problem, config)
    return max(1, len({i % config.num_splits for i, _ in enumerate(tiles)}))


def count_split(problem: Problem, config: Config, parts: int) -> Traffic:
    """Every visible key once; where there are parts, each leaves a row and the combine reads it."""
    p = problem
    traffic = dict.fromkeys(Traffic.__dataclass_fields__, 0)
    for _ in product(range(p.batch), range(p.num_kv_heads), seen_keys(p)):
        traffic["kv_bytes"] += (p.head_dim + p.head_dim_v) * p.element_bytes
    for _ in product(range(p.batch), range(p.seqlen_q), range(p.num_heads)):
        traffic["q_bytes"] += p.head_dim * p.element_bytes
        traffic["out_bytes"] += p.head_dim_v * p.element_bytes + (4 if p.return_lse else 0)
        traffic["flops"] += len(seen_keys(p)) * (2 * p.head_dim + 2 * p.head_dim_v)
        for _ in range(parts if parts > 1 else 0):
            acc, m, l = p.head_dim_v * 4, 4, 4
            traffic["partial_bytes"] += 2 * (acc + m + l)  # written, then read
    return Traffic(**traffic)


def count_decode_split(problem: Problem, config: Config) -> Traffic:
    return count_split(problem, config, num_parts(problem, config))


def count_hopper_decode_split(problem: Problem, config: Config) -> Traffic:
    return count_split(problem, config, num_parts_on_hopper(problem, config))


def count_torch(problem: Problem) -> dict[str, int]:
    """What both kernels of PyTorch operators touch besides their workspace: every key."""
    p = problem
    per_key = (p.head_dim + p.head_dim_v) * p.kv_element_bytes
    rows = list(product(range(p.batch), range(p.seqlen_q), range(p.num_heads)))
    keys = list(product(range(p.batch), range(p.num_kv_heads), range(p.seqlen_k)))
    return {
        "kv_bytes": sum(per_key for _ in keys),
        "q_bytes": sum(p.head_dim * p.element_bytes for _ in rows),
        "out_bytes": sum(p.head_dim_v * p.element_bytes + 4 * p.return_lse for _ in rows),
        "flops": sum(2 * (p.head_dim + p.head_dim_v) for _ in product(rows, range(p.seqlen_k))),
    }


def count_torch_math(problem: Problem, config: Config) -> Traffic:
    p, workspace = problem, 0
    size = max(4, p.element_bytes)
    for _ in product(range(p.batch), range(p.num_heads), range(p.seqlen_q), range(p.seqlen_k)):
        workspace += 2 * 2 * size  # s and p, written and read
    if size != p.element_bytes or p.place != Contiguous() or p.codec != AS_IS:
        workspace += 2 * size * copied_elements(p)
    return Traffic(partial_bytes=workspace, **count_torch(p))


def count_torch_sdpa(problem: Problem, config: Config) -> Traffic:
    p, workspace = problem, 0
    for _ in product(range(p.batch), range(p.group), range(p.seqlen_q), range(p.seqlen_k)):
        workspace += 2  # the mask, a byte an entry
    if p.place != Contiguous() or p.codec != AS_IS:
        workspace += 2 * p.element_bytes * copied_elements(p)
    return Traffic(partial_bytes=workspace, **count_torch(p))


def copied_elements(p: Problem) -> int:
    keys = product(range(p.batch), range(p.num_kv_heads), range(p.seqlen_k))
    return sum(p.head_dim + p.head_dim_v for _ in keys)


def count_prefill(problem: Problem, config: Config) -> Traffic:
    """Every visible key once, two products for every pair of a query and a key that it sees."""
    p = problem
    seen = [sum(row) for row in p.mask.materialize(p.seqlen_q, p.seqlen_k)]
    traffic = dict.fromkeys(Traffic.__dataclass_fields__, 0)
    for _ in product(range(p.batch), range(p.num_kv_heads), seen_keys(p)):
        traffic["kv_bytes"] += (p.head_dim + p.head_dim_v) * p.kv_element_bytes
        traffic["kv_bytes"] += 8 if p.codec.granularity == "token" else 0
    tiles = len(seen_tiles(p, config))
    tokens = p.seqlen_q if p.kind == "dense" or p.seqlen_q <= 256 else 16 // p.group
    parts = len(range(0, tiles, max(1, -(-tiles // config.num_splits))))
    for _ in range(p.batch * tokens * p.num_heads * parts * (parts > 1)):
        traffic["partial_bytes"] += 2 * 4 * (p.head_dim_v + 2)
    for _, keys, _ in product(range(p.batch), seen, range(p.num_heads)):
        traffic["q_bytes"] += p.head_dim * p.element_bytes
        traffic["out_bytes"] += p.head_dim_v * p.element_bytes + (4 if p.return_lse else 0)
        traffic["flops"] += keys * (2 * p.head_dim + 2 * p.head_dim_v)
    return Traffic(**traffic)


def count_prefill_widened(problem: Problem, config: Config) -> Traffic:
    """Of every visible key, besides, what 16 bits take to be written and read."""
    wide = count_prefill(problem.widened, config)
    stored = count_prefill(problem, config).kv_bytes
    return replace(wide, kv_bytes=stored + 2 * wide.kv_bytes)


def count_prefill_half(problem: Problem, config: Config) -> Traffic:
    """As above, of values alone."""
    stored = count_prefill(problem, config)
    values = count_prefill(problem.widened, config).kv_bytes // 2  # as many bytes as keys
    return replace(stored, kv_bytes=stored.kv_bytes + 2 * values)


COUNTS: dict[str, Callable[[Problem, Config], Traffic]] = {
    "hopper_decode_split": count_hopper_decode_split,
    "decode_split": count_decode_split,
    "hopper_prefill": count_prefill,
    "prefill": count_prefill,
    "hopper_prefill_quantised": count_prefill,
    "hopper_prefill_half": count_prefill_half,
    "hopper_prefill_widened": count_prefill_widened,
    "torch_math": count_torch_math,
    "torch_sdpa": count_torch_sdpa,
}


def shapes() -> Iterator[Problem]:
    """Small problems in all that a formula depends on besides the mask."""
    yield SMALL
    yield replace(SMALL, dtype="float32", return_lse=False)
    yield replace(SMALL, seqlen_q=4, num_heads=14, place=Paged(16))
    yield replace(SMALL, seqlen_q=16, num_heads=7, num_kv_heads=1)  # two row tiles, one not full
    yield replace(SMALL, seqlen_q=3, seqlen_k=2)  # a query before the first key
    yield replace(SMALL, batch=1, seqlen_k=16)


def test_every_kernel_is_counted() -> None:
    assert COUNTS.keys() == {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_decode_split(schedule: str, mask: str) -> None:
    for problem in shapes():
        problem = replace(problem, mask=MASKS[mask])
        config = replace(SCHEDULES[schedule], tile_m=decode_split.tile_m(problem))
        assert decode_split.unsupported(problem, H200) == []
        counted = count_decode_split(problem, config)
        assert records.DECODE_SPLIT.traffic(problem, config) == counted, problem


@pytest.mark.parametrize("mask", [name for name, mask in MASKS.items() if not mask.chunk])
@pytest.mark.parametrize("schedule", [n for n in SCHEDULES if not n.startswith("batch")])
def test_hopper_decode_split(schedule: str, mask: str) -> None:
    most = replace(SMALL, seqlen_q=8, num_heads=4, num_kv_heads=1)
    fitting = (p for p in shapes() if p.rows <= hopper_decode_split.WIDE)
    for problem in (most, *fitting):
        problem = replace(problem, mask=MASKS[mask], dtype="float16", head_dim=64, head_dim_v=128)
        config = SCHEDULES[schedule]
        assert hopper_decode_split_limits.unsupported(problem, H200) == []
        counted = count_hopper_decode_split(problem, config)
        assert records.HOPPER_DECODE_SPLIT.traffic(problem, config) == counted, problem


@pytest.mark.parametrize("kernel", (records.DECODE_SPLIT, records.HOPPER_DECODE_SPLIT))
def test_parts_of_the_even_rule(kernel: Kernel) -> None:
    """Seven tiles in five parts: ranges of two tiles fill four of them, tiles in turn all five."""
    problem = replace(SMALL, head_dim=64, head_dim_v=64, seqlen_k=7 * 16)
    traffic = kernel.traffic(problem, Config(num_splits=5, tile_n=16))
    parts = {"decode_split": 4, "hopper_decode_split": 5}[kernel.name]
    assert traffic.partial_bytes == 2 * parts * 2 * 6 * (64 + 2) * 4


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", (records.TORCH_MATH, records.TORCH_SDPA), ids=lambda k: k.name)
def test_torch_kernels(kernel: Kernel, mask: str) -> None:
    """Every key is read, whatever the mask."""
    for problem in shapes():
        for codec in (AS_IS, Codec("int8", "head")):
            problem = replace(problem, mask=MASKS[mask], codec=codec)
            counted = COUNTS[kernel.name](problem, Config())
            assert kernel.traffic(problem, Config()) == counted, problem


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_prefill(kind: Any, mask: str) -> None:
    for problem in shapes():
        problem = replace(problem, kind=kind, place=Contiguous(), mask=MASKS[mask])
        assert prefill.unsupported(problem, H200) == []
        for config in (Config(), Config(num_splits=3, tile_n=16), Config(num_splits=40, tile_n=16)):
            assert prefill.traffic(problem, config) == count_prefill(problem, config), problem


def test_prefill_on_hopper() -> None:
    problem = replace(SMALL, kind="dense", dtype="bfloat16", head_dim=64, head_dim_v=64)
    assert hopper_prefill.unsupported(problem, H200) == []
    for config in hopper_prefill.configs(problem, H200):
        counted = COUNTS["hopper_prefill"](problem, config)
        assert hopper_prefill.traffic(problem, config) == counted


@pytest.mark.parametrize("granularity", ["head", "token"])
def test_prefill_of_quantised_keys_on_hopper(granularity: Any) -> None:
    problem = replace(SMALL, kind="dense", dtype="bfloat16", head_dim=64, head_dim_v=64)
    problem = replace(problem, codec=Codec("int8", granularity), products="half")
    kernels = [records.HOPPER_PREFILL_QUANTISED, records.HOPPER_PREFILL_WIDENED]
    kernels += [records.HOPPER_PREFILL_HALF] if granularity == "head" else []
    for kernel in kernels:
        assert kernel.unsupported(problem, H200) == []
        for config in kernel.configs(problem, H200):
            assert kernel.traffic(problem, config) == COUNTS[kernel.name](problem, config)


def test_prompts_leave_no_partials() -> None:
    """Only the few tokens of other sequences in the batch do."""
    prompts = replace(SMALL, kind="varlen", seqlen_q=300, seqlen_k=400)
    config = Config(num_splits=4, tile_n=16)
    assert prefill.traffic(prompts, config) == count_prefill(prompts, config)
    assert prompts.cut_tokens == 16 // prompts.group < prompts.seqlen_q


@pytest.mark.parametrize("mask", ["window", "sink_tokens"])
def test_a_window_costs_what_it_shows(mask: str) -> None:
    """The keys read do not grow with a cache that the window hides."""
    short, long = (replace(SMALL, mask=MASKS[mask], seqlen_k=n) for n in (70, 70_000))
    config = Config(tile_m=16)
    assert records.DECODE_SPLIT.traffic(short, config) == records.DECODE_SPLIT.traffic(long, config)


def test_bytes_are_the_sum() -> None:
    traffic = records.DECODE_SPLIT.traffic(SMALL, SCHEDULES["even"])
    parts = (traffic.kv_bytes, traffic.q_bytes, traffic.out_bytes, traffic.partial_bytes)
    assert all(parts) and traffic.bytes == sum(parts)
