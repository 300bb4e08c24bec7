"""FlashAttention-2's rule, ported exactly: how many splits, and which kernels run.

Source: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp (`num_splits_heuristic`,
`set_params_splitkv`, `mha_fwd`, `mha_varlen_fwd`, `mha_fwd_kvcache`, `run_mha_fwd`). Floats are
singles where the C++ has `float`; a test holds the port to answers of the compiled original.

The rule in words: one split if the tiles of rows fill four fifths of the slots (two an SM);
otherwise the fewest splits that fill their waves at least 85 % as well as the best number of splits
does, no more than one a block of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from splitkv.core.device import Device
from splitkv.core.kv import Paged
from splitkv.core.masks import UNBOUNDED
from splitkv.core.plan import Choice, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.planner.policies.shared import count, fit, float32

Entry = Literal["fwd", "varlen_fwd", "fwd_kvcache"]
ENTRY_OF_KIND: dict[str, Entry] = {
    "dense": "fwd",
    "varlen": "varlen_fwd",
    "decode": "fwd_kvcache",
}
BLOCK_M, MAX_SPLITS, CTAS_PER_SM = 64, 128, 2


def num_splits_heuristic(
    batch_nheads_mblocks: int, num_SMs: int, num_n_blocks: int, max_splits: int
) -> int:
    """The number of splits for so many tiles of rows and blocks of keys."""
    if float32(batch_nheads_mblocks) >= float32(float32(0.8) * num_SMs):
        return 1
    max_splits = min(max_splits, num_SMs, num_n_blocks)

    def eligible(splits: int) -> bool:
        """Whether one split more makes the longest split shorter."""
        longest = ceil_div(num_n_blocks, splits)
        return splits == 1 or longest != ceil_div(num_n_blocks, splits - 1)

    efficiency = {
        splits: wave_efficiency(batch_nheads_mblocks * splits, num_SMs)
        for splits in range(1, max_splits + 1)
        if eligible(splits)
    }
    return fewest_splits_near_best(efficiency)


def wave_efficiency(tiles: int, num_SMs: int) -> float:
    """How full the waves are: 1 where the last one is full."""
    waves = float32(float32(tiles) / num_SMs)
    return float32(waves / ceil(waves)) if waves else 0.0


def fewest_splits_near_best(efficiency: dict[int, float]) -> int:
    """The first number of splits that reaches 85 % of the best efficiency."""
    enough = 0.85 * max(efficiency.values(), default=0.0)
    return next((splits for splits, value in efficiency.items() if value >= enough), 1)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The way in which FlashAttention-2 runs a call.

    packed    the query heads of a KV head became the rows of one tile (one query token only)
    block_n   keys a block of the split kernel
    kernels   the kernels launched, in order
    refusals  why FlashAttention-2 would raise instead; empty where it runs
    """

    num_splits: int
    packed: bool
    block_n: int
    num_n_blocks: int
    num_tiles: int
    kernels: tuple[str, ...]
    refusals: tuple[str, ...]
    why: str


def block_n(head_dim: int) -> int:
    """Keys a block of the split kernel."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


def dispatch(
    problem: Problem,
    device: Device,
    entry: Entry | None = None,
    *,
    append: bool = False,
    cache_batch_idx: bool = False,
) -> Dispatch:
    """The kernels that this call to FlashAttention-2 launches, and the number of splits.

    entry            fwd (`flash_attn_func`), varlen_fwd (`flash_attn_varlen_func`) or fwd_kvcache
                     (`flash_attn_with_kvcache`); None: the one for the problem's kind
    append           new keys are appended to the cache by the same call
    cache_batch_idx  the cache is indexed by sequence

    `problem.seqlen_k` is what that function sees: max_seqlen_k, or the capacity of the cache.
    """
    entry = ENTRY_OF_KIND[problem.kind] if entry is None else entry
    paged = isinstance(problem.place, Paged)
    packed = _packs_heads(problem, entry)
    heads = problem.num_kv_heads if packed else problem.num_heads
    rows = problem.group if packed else problem.seqlen_q
    keys_a_block = block_n(ceil_div(problem.head_dim, 8) * 8)
    tiles = problem.batch * heads * ceil_div(rows, BLOCK_M)
    blocks = ceil_div(problem.seqlen_k, keys_a_block)
    slots = CTAS_PER_SM * device.num_sms

    numbers = f"{count(tiles, 'tile')} for {device.num_sms} SMs x {CTAS_PER_SM}"
    numbers += f", {problem.seqlen_k} keys in {count(blocks, 'block')} of {keys_a_block}"
    if problem.dropout:
        splits, why = 1, "dropout never splits"
    elif entry == "varlen_fwd" and not packed:
        splits, why = 1, "varlen_fwd splits only where it packs one query token's heads"
    else:
        splits = max(1, num_splits_heuristic(tiles, slots, blocks, MAX_SPLITS))
        why = f"{numbers}: {count(splits, 'split')}"

    forced = paged or (entry == "fwd_kvcache" and (append or cache_batch_idx))
    if splits > 1:
        kernels: tuple[str, ...] = ("flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel")
    elif forced:
        kernels = ("flash_fwd_splitkv_kernel",)
    else:
        kernels = ("flash_fwd_kernel",)
    why = f"FlashAttention-2 {entry}{', heads packed' * packed}: {why}"
    refusals = _refusals(problem, entry, paged)
    return Dispatch(splits, packed, keys_a_block, blocks, tiles, kernels, refusals, why)


def _packs_heads(problem: Problem, entry: Entry) -> bool:
    """Whether the query heads of a KV head become rows: one token, grouped heads, plain mask."""
    left, right = problem.mask.window_left, problem.mask.window_right
    causal = problem.mask.causal
    if entry == "fwd":  # the others test the window before they clip it to the sequence
        left, right = (UNBOUNDED if w >= problem.seqlen_k else w for w in (left, right))
    if problem.seqlen_q == 1 and not problem.score.alibi:
        causal = False  # one query at the end of its keys sees them all
    if causal:
        right = 0
    return (
        problem.seqlen_q == 1
        and problem.num_heads > problem.num_kv_heads
        and left < 0
        and right < 0
        and problem.head_dim % 8 == 0
        and not problem.score.alibi
        and not (problem.dropout and entry != "fwd_kvcache")
    )


def _refusals(problem: Problem, entry: Entry, paged: bool) -> tuple[str, ...]:
    """Why FlashAttention-2 would raise."""
    reasons = []
    if problem.head_dim > 256:
        reasons.append(f"head_dim {problem.head_dim}: expected at most 256")
    if entry != "fwd_kvcache" and problem.head_dim % 8:
        reasons.append(f"head_dim {problem.head_dim}: expected a multiple of 8")
    if problem.head_dim_v != problem.head_dim:
        reasons.append(f"head_dim_v {problem.head_dim_v}: expected head_dim={problem.head_dim}")
    if paged and entry == "fwd":
        reasons.append("page_table: expected none in fwd")
    if isinstance(problem.place, Paged) and problem.place.page_size % 256:
        reasons.append(f"page_size {problem.place.page_size}: expected a multiple of 256")
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"dtype {problem.dtype}: expected float16 or bfloat16")
    if problem.codec.element_bytes is not None:
        reasons.append(f"kv {problem.codec}: expected as_is")
    if problem.sink_logits:
        reasons.append("sink_logits: expected none")
    if problem.mask.num_bands == 2:
        reasons.append(f"sink_tokens {problem.mask.sink_tokens}: expected 0")
    if problem.mask.chunk:
        reasons.append(f"attention_chunk {problem.mask.chunk}: expected 0")
    if problem.dropout and problem.score.softcap:
        reasons.append("dropout_p: expected 0 with softcap")
    return tuple(reasons)


def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    """FlashAttention-2's number of splits, on our kernel."""
    told = dispatch(problem, device)
    return fit(problem, device, candidates, told.num_splits, told.why, told.block_n)
