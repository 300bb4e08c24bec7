"""The ported rules against answers of the originals, compiled from their C++ sources.

`golden/ports.json` holds those answers to the grids below (docs/policies.md says how they were
made): a digest of all of them, and a sample of rows to see where a port departs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import Any

import pytest

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.planner.policies import flash_attention_2, flash_attention_3, sequence_aware
from splitkv.planner.policies.shared import float32

GOLDEN = Path(__file__).parents[1] / "golden" / "ports.json"
H200 = GPUS["h200"]
SM_COUNTS = sorted({gpu.num_sms for gpu in GPUS.values()})

BLOCKS = (*range(1, 18), 20, 24, 31, 32, 33, 47, 64, 100, 128, 129, 257, 1024)
TILES = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    12,
    16,
    24,
    28,
    32,
    46,
    47,
    58,
    64,
    86,
    87,
    96,
    105,
    106,
    128,
    211,
    212,
)
FLASH_KERNELS = (
    ("flash_fwd_kernel",),
    ("flash_fwd_splitkv_kernel",),
    ("flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel"),
)
BOOLS = (0, 1)
WINDOWS = ((-1, -1), (1023, 0), (255, -1), (-1, 0), (100000, 100000))


def spread(count: int, *axes: Sequence[Any]) -> Iterator[list[Any]]:
    """`count` points of the product of these axes, spread over all of them."""
    total = prod(map(len, axes))
    stride = int(0.618 * total)
    while gcd(stride, total) != 1:
        stride += 1
    for i in range(count):
        index, point = i * stride % total, []
        for axis in axes:
            index, digit = divmod(index, len(axis))
            point.append(axis[digit])
        yield point


def fa2_grid(entry: str) -> Iterator[tuple[int, ...]]:
    """batch, seqlen_q, seqlen_k, heads, KV heads, head_dim, causal, left, right, dropout, ALiBi,
    [paged or appended,] SMs"""
    heads = ((28, 4), (8, 1), (32, 32), (128, 1))
    for b, q, k, (h, hk), d, causal, (left, right), dropout, alibi, forced, sms in spread(
        3000,
        (1, 3, 8, 40),
        (1, 1, 2, 65),
        (86, 128, 600, 9000),
        heads,
        (64, 128, 136),
        BOOLS,
        (*WINDOWS, (-1, -1), (-1, -1)),
        (0,) if entry == "fwd_kvcache" else (0, 0, 1),
        (0, 0, 1),
        BOOLS,
        SM_COUNTS,
    ):
        row = (b, q, k, h, hk, d, causal, left, right, dropout, alibi)
        yield (*row, sms) if entry == "fwd" else (*row, forced, sms)


def fa2_answer(entry: flash_attention_2.Entry) -> Callable[..., tuple[int, ...]]:
    def answer(*args: int) -> tuple[int, ...]:
        b, q, k, h, hk, d, causal, left, right, dropout, alibi, *rest = args
        forced = bool(rest[0]) if len(rest) == 2 else False
        problem = Problem(
            "decode",
            b,
            h,
            hk,
            d,
            d,
            q,
            k,
            mask=Mask(bool(causal), left, right),
            place=Paged(256) if forced and entry == "varlen_fwd" else Contiguous(),
            score=Score(alibi=bool(alibi)),
            dropout=bool(dropout),
        )
        device = replace(H200, num_sms=rest[-1])
        append = forced and entry == "fwd_kvcache"
        told = flash_attention_2.dispatch(problem, device, entry, append=append)
        return int(told.packed), told.num_splits, FLASH_KERNELS.index(told.kernels)

    return answer


def fa3_heuristic_grid() -> Iterator[tuple[int, ...]]:
    for tiles, sms, blocks in product(TILES, SM_COUNTS[::2], BLOCKS):
        yield tiles, sms, blocks, 1, 128 * 1024 * blocks, 0, 128
    for sms, m_blocks, size, causal in product(
        SM_COUNTS, (1, 200, 300, 400), (50 << 20, (50 << 20) + 1, 1 << 30, 2_000_000_000), (0, 1)
    ):
        yield m_blocks * 8, sms, 1000, m_blocks, size, causal, 32


def fa3_grid() -> Iterator[tuple[int, ...]]:
    """arch, SMs, batch, seqlen_q, seqlen_k, heads, KV heads, head_dim, head_dim_v, e4m3, causal,
    left, right, softcap, paged, page_size, append, varlen, lengths on the device, sm_margin"""
    for arch, sms, b, q, k, (h, hk), (d, dv), *rest in spread(
        6000,
        (80, 86, 89, 90),
        SM_COUNTS,
        (1, 2, 8),
        (1, 1, 4, 300),
        (512, 700, 8192, 200_000),
        ((8, 1), (32, 32), (28, 4)),
        ((64, 64), (64, 512), (96, 96), (128, 128), (192, 128), (256, 256)),
        BOOLS,
        BOOLS,
        WINDOWS,
        BOOLS,
        ((0, 1), (1, 16), (1, 128), (1, 176), (1, 256)),
        BOOLS,
        BOOLS,
        BOOLS,
        (0, 24),
    ):
        e4m3, causal, (left, right), softcap, (paged, page), append, varlen, device, margin = rest
        row = (arch, sms, b, q, k, h, hk, d, dv, e4m3, causal, left, right, softcap)
        yield (*row, paged, page, append, varlen and not paged, device, margin)


def fa3_answer(*args: int) -> tuple[int, ...]:
    arch, sms, b, q, k, h, hk, d, dv, e4m3, causal, left, right, *rest = args
    softcap, paged, page, append, varlen, device, margin = rest
    problem = Problem(
        "varlen" if varlen else "decode",
        b,
        h,
        hk,
        d,
        dv,
        q,
        k,
        mask=Mask(bool(causal), left, right),
        place=Paged(page) if paged else Contiguous(),
        codec=Codec("fp8", "tensor") if e4m3 else AS_IS,
        score=Score(softcap=bool(softcap)),
        lengths="device" if device else "host",
    )
    gpu = replace(H200, capability=divmod(arch, 10), num_sms=sms)
    told = flash_attention_3.dispatch(problem, gpu, sm_margin=margin, append=bool(append))
    return told.num_splits, int(told.pack_gqa)


HEAD_DIMS = (32, 64, 72, 96, 112, 128, 160, 192, 224, 256)
PORTS: dict[str, tuple[Callable[[], Iterator[tuple[int, ...]]], Callable[..., Any]]] = {
    "flash_attention_2.num_splits_heuristic": (
        lambda: product(TILES, [2 * sms for sms in SM_COUNTS[::2]], BLOCKS, (128, 16)),
        flash_attention_2.num_splits_heuristic,
    ),
    "flash_attention_2.dispatch fwd": (lambda: fa2_grid("fwd"), fa2_answer("fwd")),
    "flash_attention_2.dispatch varlen_fwd": (
        lambda: fa2_grid("varlen_fwd"),
        fa2_answer("varlen_fwd"),
    ),
    "flash_attention_2.dispatch fwd_kvcache": (
        lambda: fa2_grid("fwd_kvcache"),
        fa2_answer("fwd_kvcache"),
    ),
    "flash_attention_3.num_splits_heuristic": (
        fa3_heuristic_grid,
        flash_attention_3.num_splits_heuristic,
    ),
    "sequence_aware.num_splits_heuristic": (
        fa3_heuristic_grid,
        sequence_aware.num_splits_heuristic,
    ),
    "flash_attention_3.should_pack_gqa": (
        lambda: product(
            BOOLS, (*range(1, 140), 191, 192, 193, 1000), (1, 2, 4, 7, 8), (64, 128, 192)
        ),
        flash_attention_3.should_pack_gqa,
    ),
    "flash_attention_3.tile_size_fwd_sm90": (
        lambda: product(
            HEAD_DIMS, (64, 96, 128, 192, 256, 512), *[BOOLS] * 2, (1, 2), *[BOOLS] * 3
        ),
        flash_attention_3.tile_size_fwd_sm90,
    ),
    "flash_attention_3.tile_size_fwd_sm8x": (
        lambda: product(BOOLS, HEAD_DIMS, (0,), (0,), BOOLS, (1, 2), BOOLS, BOOLS, (0,), BOOLS),
        lambda sm86, d, dv, causal, local, size, paged, split, softcap, append: (
            flash_attention_3.tile_size_fwd_sm8x(sm86, d, local, size, paged, split, append)
        ),
    ),
    "flash_attention_3.dispatch": (fa3_grid, fa3_answer),
}


def ints(answer: Any) -> tuple[int, ...]:
    return tuple(map(int, answer)) if isinstance(answer, tuple) else (int(answer),)


def digest(answers: list[tuple[int, ...]]) -> str:
    lines = "\n".join(" ".join(map(str, answer)) for answer in answers)
    return hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("name", PORTS)
def test_port_equals_the_compiled_original(name: str):
    grid, answer = PORTS[name]
    golden = json.loads(GOLDEN.read_text())[name]
    for args, expected in golden["rows"]:
        assert ints(answer(*args)) == tuple(expected), args
    answers = [ints(answer(*args)) for args in grid()]
    assert len(answers) == golden["count"]
    assert digest(answers) == golden["sha256"]


def test_float32_rounds_as_c_does():
    assert float32(0.8) == 0.800000011920928955078125
    assert float32(1 / 3) != 1 / 3
    # 0.8f is a little more than 0.8, but 0.8f * 110 rounds to 88 exactly
    assert float32(0.8) * 110 > 88
    assert flash_attention_3.saturated(88, 110)
    assert not flash_attention_3.saturated(87, 110)


def test_a_tie_is_decided_in_single_precision():
    """17 of 20 splits are 0.85 as efficient on paper: less in single precision, more in double."""
    assert flash_attention_3.num_splits_heuristic(1, 72, 20, 1, 0, False, 128) == 18
