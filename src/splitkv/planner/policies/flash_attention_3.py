"""FlashAttention-3's rule, ported exactly: tile sizes, head packing and the number of splits.

Source: Dao-AILab/flash-attention, hopper/heuristics.h (`num_splits_heuristic`, `should_pack_gqa`),
hopper/tile_size.h (`tile_size_fwd_sm90`, `tile_size_fwd_sm8x`) and hopper/flash_api.cpp
(`get_pagedkv_tma`, `get_pack_gqa`, `get_num_splits`). Floats are singles where the C++ has `float`;
a test holds the port to answers of the compiled original.

The rule in words: one split if the tiles fill four fifths of the SMs (unless one KV head outgrows a
50 MB L2 and is read at least twice), or if there are at most four blocks of keys; otherwise the
fewest splits that fill their waves at least 85 % as well as the best number of splits does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitkv.core.device import Device, MiB
from splitkv.core.kv import Paged
from splitkv.core.plan import Choice, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.planner.policies.flash_attention_2 import fewest_splits_near_best, wave_efficiency
from splitkv.planner.policies.shared import count, fit, float32

Heuristic = Callable[[int, int, int, int, int, bool, int], int]
MAX_SPLITS, L2_BYTES = 128, 50 * MiB


def num_splits_heuristic(
    total_mblocks: int,
    num_SMs: int,
    num_n_blocks: int,
    num_m_blocks: int,
    size_one_kv_head: int,
    is_causal_or_local: bool,
    max_splits: int,
) -> int:
    """The number of splits for so many tiles of rows and blocks of keys.

    total_mblocks     tiles of rows over batch and heads; num_m_blocks: of one sequence and head
    size_one_kv_head  bytes of one sequence and KV head's keys and values
    """
    if saturated(total_mblocks, num_SMs):
        read_twice = num_m_blocks >= 2 * num_SMs and not is_causal_or_local
        if size_one_kv_head > L2_BYTES and read_twice:
            return min(ceil_div(size_one_kv_head, L2_BYTES), max_splits)
        return 1
    if num_n_blocks <= 4:
        return 1
    most = min(max_splits, num_SMs, num_n_blocks)
    return fewest_splits_near_best(
        {splits: wave_efficiency(total_mblocks * splits, num_SMs) for splits in range(1, most + 1)}
    )


def saturated(total_mblocks: int, num_SMs: int) -> bool:
    """Whether the tiles alone fill four fifths of the SMs."""
    return float32(total_mblocks) >= float32(float32(0.8) * num_SMs)


def should_pack_gqa(varlen_q: bool, seqlen_q: int, qhead_per_khead: int, block_m: int) -> bool:
    """Whether packing the query heads of a KV head into one tile wastes clearly fewer rows."""
    if varlen_q:
        return True
    packed_rows = seqlen_q * qhead_per_khead
    unpacked = float32(seqlen_q / (ceil_div(seqlen_q, block_m) * block_m))
    packed = float32(packed_rows / (ceil_div(packed_rows, block_m) * block_m))
    return unpacked < 0.9 * packed


def tile_size_fwd_sm90(
    head_dim: int,
    head_dim_v: int,
    is_causal: bool,
    is_local: bool,
    element_size: int = 2,
    v_colmajor: bool = False,
    paged_kv_non_tma: bool = False,
    softcap: bool = False,
) -> tuple[int, int]:
    """(block_m, block_n) of the Hopper forward kernel."""
    narrow = is_causal or is_local or paged_kv_non_tma
    if element_size == 2:
        if head_dim <= 64:
            if head_dim_v in (256, 512):
                return (128, 96) if head_dim_v == 256 else (64, 64)
            return 192, 128 if narrow else 192
        if head_dim <= 96:
            return 192, 128 if is_local or paged_kv_non_tma else 144
        if head_dim <= 128:
            return 128, 128 if narrow else 176
        if head_dim <= 192:
            if paged_kv_non_tma or is_local:
                return 128, 96
            return 128, 128 if head_dim_v <= 128 else 112
        return 128, 64 if is_local else 80
    if head_dim <= 64:
        return 192, 160
    if head_dim <= 96:
        return 192, 128
    if head_dim <= 128:
        if paged_kv_non_tma:
            return 128, 160
        return 128, 192 if v_colmajor or (softcap and is_local) else 224
    if head_dim <= 192:
        return 128, 128 if (paged_kv_non_tma or softcap) and is_local else 160
    return 128, 64 if is_local else 128


def tile_size_fwd_sm8x(
    sm86_or_89: bool,
    head_dim: int,
    is_local: bool,
    element_size: int = 2,
    paged_kv: bool = False,
    varlen_and_split: bool = False,
    append_kv: bool = False,
) -> tuple[int, int]:
    """(block_m, block_n) of the Ampere and Ada forward kernel."""
    if element_size == 1:
        return 128, 64
    if head_dim <= 64:
        return 128, 80 if varlen_and_split else 96 if is_local else 112
    if head_dim <= 96:
        return 128, 48 if varlen_and_split or is_local else 64
    if head_dim <= 128:
        if varlen_and_split:
            return 128, 96 if is_local else 112
        if sm86_or_89:
            return 128, 96 if is_local else 128
        return 128, 48 if is_local else 64
    if head_dim <= 192:
        return 128, 64 if append_kv or is_local or varlen_and_split or paged_kv else 96
    if append_kv:
        return 128, 32 if sm86_or_89 else 48
    if varlen_and_split or is_local:
        return 128, 48 if sm86_or_89 else 64
    return 128, 64 if sm86_or_89 else 96


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The way in which FlashAttention-3 runs a call.

    num_splits  with the lengths on the device an upper bound: the kernel then splits each sequence
                by its own length, and the rule pretends that the batch is one sequence
    num_ctas    thread blocks with work at the upper bound
    """

    num_splits: int
    pack_gqa: bool
    block_m: int
    block_n: int
    num_n_blocks: int
    total_mblocks: int
    num_ctas: int
    why: str


def dispatch(
    problem: Problem,
    device: Device,
    *,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    append: bool = False,
    heuristic: Heuristic = num_splits_heuristic,
    name: str = "FlashAttention-3",
) -> Dispatch:
    """FlashAttention-3's tiles, packing and number of splits for this call.

    pack_gqa   None: FlashAttention-3 decides; sm_margin: SMs left to others
    append     new keys are appended to the cache by the same call
    heuristic  the rule for the number of splits, and its `name`
    """
    capability = 10 * device.capability[0] + device.capability[1]
    num_sms = device.num_sms - sm_margin
    causal, window = _mask(problem)
    local = window is not None
    dim = _round_up_head_dim(problem.head_dim)
    dim_v = _round_up_head_dim(problem.head_dim_v)
    element_size = 1 if problem.codec.name == "fp8" else 2
    varlen = problem.kind == "varlen" or problem.lengths == "device"
    page_size = problem.place.page_size if isinstance(problem.place, Paged) else None

    def sm90_tile(paged_kv_non_tma: bool) -> tuple[int, int]:
        return tile_size_fwd_sm90(
            dim,
            dim_v,
            causal,
            local,
            element_size,
            paged_kv_non_tma=paged_kv_non_tma,
            softcap=problem.score.softcap,
        )

    if capability >= 90:
        block_m, block_n = sm90_tile(False)
        tma = page_size is not None and page_size % block_n == 0
        non_tma = page_size is not None and not (tma and problem.rows > block_m and not append)
        block_m, block_n = sm90_tile(non_tma)
    else:
        non_tma = page_size is not None
        block_m, block_n = tile_size_fwd_sm8x(
            capability in (86, 89), dim, local, element_size, page_size is not None, varlen, append
        )

    keys = problem.seqlen_k if window is None else max(0, min(problem.seqlen_k, window + block_m))
    num_n_blocks = ceil_div(keys, block_n)
    num_m_blocks = ceil_div(problem.rows, block_m)
    total_mblocks = (1 if varlen else problem.batch) * problem.num_kv_heads * num_m_blocks
    size_one_kv_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * element_size
    splits = heuristic(
        total_mblocks,
        num_sms,
        num_n_blocks,
        num_m_blocks,
        size_one_kv_head,
        causal or local,
        MAX_SPLITS,
    )

    if pack_gqa is None:
        if capability < 90 or non_tma or splits > 1:
            pack_gqa = True
        elif problem.group == 1:
            pack_gqa = False
        else:
            pack_gqa = should_pack_gqa(
                problem.kind == "varlen", problem.seqlen_q, problem.group, block_m
            )
    heads = problem.num_kv_heads if pack_gqa else problem.num_heads
    rows = problem.rows if pack_gqa else problem.seqlen_q
    num_ctas = problem.batch * heads * ceil_div(rows, block_m) * splits
    one_sequence = f" (as if batch 1 of {problem.batch})" if varlen and problem.batch > 1 else ""
    why = (
        f"{name}: {count(total_mblocks, 'tile')}{one_sequence} for {num_sms} SMs, "
        f"{keys} keys in {count(num_n_blocks, 'block')} of {block_n}: {count(splits, 'split')}"
    )
    return Dispatch(splits, pack_gqa, block_m, block_n, num_n_blocks, total_mblocks, num_ctas, why)


def _mask(problem: Problem) -> tuple[bool, int | None]:
    """(is_causal, keys of a local window or None), as FlashAttention-3 normalises its arguments."""
    left, right = problem.mask.window_left, problem.mask.window_right
    causal = problem.mask.causal
    if left >= problem.seqlen_k - 1:
        left = -1
    if right >= problem.seqlen_q - 1:
        right = -1
    chunk = problem.mask.chunk
    if problem.seqlen_q == 1 and left == right == -1 and not chunk:
        # One query at the end of its keys sees them all. A paged cache with head_dim above 64, up
        # to 128, stays causal: that kernel has the smaller key block.
        causal = causal and 64 < problem.head_dim <= 128 and isinstance(problem.place, Paged)
    if causal:
        right = 0
    is_causal = left < 0 and right == 0 and not chunk
    if is_causal or (left < 0 and right < 0 and not chunk):
        return is_causal, None
    left = problem.seqlen_k - 1 if left < 0 else left
    right = problem.seqlen_q - 1 if right < 0 else right
    if chunk:
        left, right = min(left, chunk - 1), min(right, chunk - 1)
    return False, left + right + 1


def _round_up_head_dim(head_dim: int) -> int:
    return next((dim for dim in (64, 96, 128, 192, 256) if head_dim <= dim), 512)


def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    """FlashAttention-3's number of splits, on our kernel."""
    told = dispatch(problem, device)
    return fit(problem, device, candidates, told.num_splits, told.why, told.block_n)
