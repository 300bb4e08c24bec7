"""Write new keys and values into a cache, on the way rotated and, if it is quantised, quantised.

Computes, for token i of sequence b, whose cache holds before[b] keys already,

    place of the token     before[b] + i, in row rows[b] of the cache or of the page table;
                           or slots[n] for the n-th of all tokens: page slots[n] // page_size
    k_cache[place] = rotate(k[b, i], start[b] + i)      v_cache[place] = v[b, i]
    q_out[b, j]    = rotate(q[b, j], start[b] + q_step * j)
    after[b]       = before[b] + number of new tokens - leftpad[b], at most what fits

    and into a cache of 8 bits round((x - mean) / scale) of these, mean of keys only: by the
    scale of the head, or by that of the token and head, max |x - mean| / largest stored value,
    which is written beside it

    rotate(x, t): with distance 1 or rotary_dim / 2 between the two elements of a pair,
    (x1, x2) -> (x1 cos[t] - x2 sin[t], x2 cos[t] + x1 sin[t]); elements past rotary_dim stay

Shapes      k, v [batch, seqlen_new, num_kv_heads, head_dim or head_dim_v], or packed
            [total, num_kv_heads, ..] with cu_seqlens; q likewise; caches [batch or pages, keys,
            num_kv_heads, ..]; cos, sin [seqlen_ro, rotary_dim / 2]; before, after, start, rows,
            leftpad [batch]; slots [total]; scales [1], [num_kv_heads], [batch, num_kv_heads] or
            [batch or pages, keys, num_kv_heads], mean [num_kv_heads, head_dim]
Grid        (token tiles * num_kv_heads + query tiles * num_heads,); the first program also writes
            `after`
Traffic     every new key and value read and written once, q too if it is rotated; a row of cos and
            sin a token and head, which stays in the caches
Numerics    rotation in fp32, rounded once; what is not rotated is copied bit by bit; quantised to
            the bits of `rounding.quantize`, after that rounding
Limits      bf16, fp16 or fp32, the cache of the type of the new tokens or of 8 bits. A token whose
            place is negative or outside the cache is not written, nor is a packed one after the
            last sequence; one whose row of cos is outside the table is not rotated. The same in
            PyTorch, for any type: `host/append_call.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from splitkv.kernels.host.append_arguments import codes, new_scale_strides, token_strides
from splitkv.kernels.host.append_call import Append, Result, Rotary
from splitkv.kernels.host.arguments import prepared
from splitkv.kernels.host.launch import Launch, launch_of, observed
from splitkv.kernels.tile.encode import Place, StoredTensor, write_tokens
from splitkv.kernels.tile.locate import locate
from splitkv.kernels.tile.new import AngleTable, Growth, Turn, grown, rotated, start_of
from splitkv.kernels.tile.visit import Strides


class TokenPointers(NamedTuple):
    """Pointers to the new k and v, and to cu_seqlens [batch + 1], or None: dense."""

    k_ptr: Any
    v_ptr: Any
    cu_ptr: Any


class Store(NamedTuple):
    """Pointers to the caches and to what says where a token goes: the page table, the row of each
    sequence, the slot of each token; None where there is none."""

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any
    rows_ptr: Any
    slots_ptr: Any


class RotatedQueries(NamedTuple):
    """Pointers to q, to a contiguous q_out, and to cu_seqlens_q [batch + 1] or None."""

    q_ptr: Any
    out_ptr: Any
    cu_ptr: Any


class StoredScales(NamedTuple):
    """Pointers to the scales of the caches and to the mean key; None: as they are, no mean."""

    k_ptr: Any
    v_ptr: Any
    mean_ptr: Any


class CacheLengths(NamedTuple):
    """Pointers to int32 [batch]: keys before, keys after, padding on the left or None."""

    before_ptr: Any
    after_ptr: Any
    leftpad_ptr: Any


@triton.jit
def owners(cu_ptr, n, n_ok, seqlen, batch):
    """Finds (b, i): the sequence of each token n, and its index in it."""
    if cu_ptr is None:
        b = n // seqlen
        i = n % seqlen
    else:
        b = n * 0
        for past in range(1, batch, 128):
            offs = past + tl.arange(0, 128)
            ends = tl.load(cu_ptr + offs, mask=offs < batch, other=2147483647)
            b += tl.sum((ends[None, :] <= n[:, None]).to(tl.int32), 1)
        i = n - tl.load(cu_ptr + b, mask=n_ok, other=0)
    return b, i


@triton.jit
def owned(cu_ptr, n, tokens, batch):
    """Which of tokens n a sequence has; packed ones after the last sequence are nobody's."""
    if cu_ptr is not None:
        tokens = tl.minimum(tokens, tl.load(cu_ptr + batch))
    return n < tokens


@triton.jit
def token_rows(ptr, cu_ptr, n, b, i, stride_b, stride_t):
    """Computes where the first heads of tokens n begin, number i of sequences b."""
    if cu_ptr is None:
        rows = ptr + b.to(tl.int64) * stride_b + i.to(tl.int64) * stride_t
    else:
        rows = ptr + n.to(tl.int64) * stride_t
    return rows


@triton.jit
def write_lengths(lengths, cu_ptr, seqlen_new, batch, capacity):
    """Stores after[b], the number of keys now, of every sequence."""
    for past in range(0, batch, 128):
        b = past + tl.arange(0, 128)
        ok = b < batch
        growth = Growth(cu_ptr, lengths.leftpad_ptr)
        length = grown(lengths.before_ptr, growth, b, ok, seqlen_new, capacity)
        tl.store(lengths.after_ptr + b, length.keys, mask=ok)


@triton.jit
def places(store, lengths, n, n_ok, b, i, capacity, slabs, stride_table, PAGE_SIZE: tl.constexpr):
    """Finds (outer, inner, ok) of tokens n, number i of sequences b: slab or page, and key in
    it."""
    if store.slots_ptr is not None:
        slot = tl.load(store.slots_ptr + n, mask=n_ok, other=-1).to(tl.int64)
        ok = n_ok & (slot >= 0)
        outer = slot // PAGE_SIZE
        inner = slot % PAGE_SIZE
    else:
        place = tl.load(lengths.before_ptr + b, mask=n_ok, other=0) + i
        ok = n_ok & (place >= 0) & (place < capacity)
        row = b
        if store.rows_ptr is not None:
            row = tl.load(store.rows_ptr + b, mask=ok, other=0)
        table = None
        if store.table_ptr is not None:
            table = store.table_ptr + row.to(tl.int64) * stride_table
        outer, inner = locate(table, row, place, ok, PAGE_SIZE)
    return outer, inner, ok & (outer >= 0) & (outer < slabs)


@triton.jit
def starts(turn, lengths, b, ok):
    """Loads the row of cos and sin of the first token of sequences b."""
    t = b * 0
    if turn.cos_ptr is not None:
        before = t
        if turn.start_ptr is None:
            before = tl.load(lengths.before_ptr + b, mask=ok, other=0)
        t = start_of(turn, before, b, ok)
    return t


@triton.jit(
    do_not_specialize=[
        "seqlen_new",
        "seqlen_q",
        "tokens",
        "tokens_q",
        "batch",
        "num_kv_heads",
        "num_heads",
        "capacity",
        "slabs",
        "rotary_rows",
        "q_step",
        "stride_table",
    ]
)
def append_kv(
    new,  # TokenPointers
    store,  # Store
    lengths,  # CacheLengths; all None with slots
    turn,  # Turn; all None without a rotation
    queries,  # RotatedQueries; all None where none are rotated
    scales,  # StoredScales
    seqlen_new,
    seqlen_q,
    tokens,  # of all sequences
    tokens_q,
    batch,
    num_kv_heads,
    num_heads,
    capacity,
    slabs,
    rotary_rows,
    q_step,
    stride_kb,  # of the new tokens; of packed ones, 0
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ks,  # of the caches
    stride_kn,
    stride_kd,
    stride_vs,
    stride_vn,
    stride_vd,
    stride_k_scale_s,
    stride_k_scale_n,
    stride_k_scale_d,
    stride_v_scale_s,
    stride_v_scale_n,
    stride_v_scale_d,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_table,
    stride_cos,
    stride_sin,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    TILE_T: tl.constexpr,
    DEPENDENTS: tl.constexpr,  # early: decode is launched before this grid has ended; or in_order
):
    if DEPENDENTS == "early":  # it waits for this grid before it reads what is written here
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if lengths.after_ptr is not None:
        if pid == 0:
            write_lengths(lengths, new.cu_ptr, seqlen_new, batch, capacity)
    programs = (tokens + TILE_T - 1) // TILE_T * num_kv_heads
    offs_t = tl.arange(0, TILE_T)
    if pid < programs:
        head = (pid % num_kv_heads).to(tl.int64)
        n = pid // num_kv_heads * TILE_T + offs_t
        n_ok = owned(new.cu_ptr, n, tokens, batch)
        b, i = owners(new.cu_ptr, n, n_ok, seqlen_new, batch)
        outer, inner, ok = places(
            store, lengths, n, n_ok, b, i, capacity, slabs, stride_table, PAGE_SIZE
        )
        t = starts(turn, lengths, b, n_ok) + i
        k_rows = token_rows(new.k_ptr, new.cu_ptr, n, b, i, stride_kb, stride_kt) + head * stride_kh
        offs_k = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
        offs_v = tl.arange(0, triton.next_power_of_2(HEAD_DIM_V))
        angles = AngleTable(rotary_rows, stride_cos, stride_sin)
        k = rotated(k_rows, ok, t, offs_k, turn, angles, HEAD_DIM, ROTARY_DIM, PAIR)
        v_rows = token_rows(new.v_ptr, new.cu_ptr, n, b, i, stride_vb, stride_vt) + head * stride_vh
        still, no_angles = Turn(None, None, None), AngleTable(0, 0, 0)
        v = rotated(v_rows, ok, t, offs_v, still, no_angles, HEAD_DIM_V, 0, 1)
        at = Place(b, outer, inner, head)
        k_cache = StoredTensor(
            store.k_ptr,
            scales.k_ptr,
            scales.mean_ptr,
            Strides(stride_ks, stride_kn, stride_kd),
            Strides(stride_k_scale_s, stride_k_scale_n, stride_k_scale_d),
        )
        v_cache = StoredTensor(
            store.v_ptr,
            scales.v_ptr,
            None,
            Strides(stride_vs, stride_vn, stride_vd),
            Strides(stride_v_scale_s, stride_v_scale_n, stride_v_scale_d),
        )
        write_tokens(k, ok, offs_k, k_cache, at, HEAD_DIM)
        write_tokens(v, ok, offs_v, v_cache, at, HEAD_DIM_V)
    elif queries.q_ptr is not None:
        pid -= programs
        head = (pid % num_heads).to(tl.int64)
        n = pid // num_heads * TILE_T + offs_t
        n_ok = n < tokens_q
        b, i = owners(queries.cu_ptr, n, n_ok, seqlen_q, batch)
        t = starts(turn, lengths, b, n_ok) + q_step * i
        q_rows = token_rows(queries.q_ptr, queries.cu_ptr, n, b, i, stride_qb, stride_qt)
        offs_d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
        angles = AngleTable(rotary_rows, stride_cos, stride_sin)
        q_rows += head * stride_qh
        q = rotated(q_rows, n_ok, t, offs_d, turn, angles, HEAD_DIM, ROTARY_DIM, PAIR)
        q_ok = n_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
        out_rows = queries.out_ptr + (n.to(tl.int64) * num_heads + head) * HEAD_DIM
        tl.store(out_rows[:, None] + offs_d[None, :], q, mask=q_ok)


class AppendLauncher:
    """`append_kv` bound to the layout of one call.

    early   a kernel behind it may be launched before it has ended, if that asks for it

    The first call goes through Triton's own dispatch and keeps what it compiled: `again` launches
    that directly, unless an address is not a multiple of 16, which is another specialisation.
    """

    def __init__(self, call: Append, early: bool = False) -> None:
        x, rotary = call, call.rotary
        seqlen_new, tokens = _counts(x.k)
        seqlen_q, tokens_q, num_heads, q_strides = 0, 0, 0, (0, 0, 0)
        self.like = x.k
        self.q_shape = self.after_shape = None
        if x.before is not None:
            self.after_shape = tuple(x.before.shape)
        if x.q is not None:
            self.q_shape = tuple(x.q.shape)
            (seqlen_q, tokens_q), num_heads = _counts(x.q), x.q.shape[-2]
            q_strides = token_strides(x.q, x.cu_seqlens_q)
        num_kv_heads, rotary_dim = x.k.shape[-2], 2 * rotary.cos.shape[1] if rotary else 0
        tile_t = tile_tokens(max(tokens, tokens_q))
        programs = -(-tokens // tile_t) * num_kv_heads + -(-tokens_q // tile_t) * num_heads
        if not programs and self.after_shape is not None:
            programs = 1
        self.grid = programs, 1, 1
        self.tail = (
            seqlen_new,
            max(seqlen_q, 1),
            tokens,
            tokens_q,
            x.batch,
            num_kv_heads,
            num_heads,
            x.capacity,
            x.k_cache.shape[0],
            rotary.cos.shape[0] if rotary else 0,
            rotary.q_step if rotary else 0,
            *token_strides(x.k, x.cu_seqlens_new),
            *token_strides(x.v, x.cu_seqlens_new),
            *x.k_cache.stride()[:3],
            *x.v_cache.stride()[:3],
            *new_scale_strides(x.k_scale, x.k_cache),
            *new_scale_strides(x.v_scale, x.v_cache),
            *q_strides,
            0 if x.page_table is None else x.page_table.stride(0),
            rotary.cos.stride(0) if rotary else 0,
            rotary.sin.stride(0) if rotary else 0,
            x.k.shape[-1],
            x.v.shape[-1],
            x.k_cache.shape[1] if x.page_table is not None or x.slots is not None else 1,
            rotary_dim,
            1 if rotary is None or rotary.interleaved else rotary_dim // 2,
            tile_t,
            "early" if early else "in_order",
        )
        self.num_warps = 4 if tile_t > 1 else 1
        self.again: Callable[[Sequence[Tensor]], Result | None] | None = None

    def __call__(self, call: Append, tensors: Sequence[Tensor]) -> Result:
        """Launch on the current stream of the device, which has to be current.

        tensors   those of the call that are given
        """
        if not self.grid[0]:
            return (None if call.q is None else call.q.new_empty(call.q.shape)), None
        done = None if self.again is None else self.again(tensors)
        return done or self.dispatch(call)

    def dispatch(self, call: Append) -> Result:
        """Launch through Triton, which compiles what these arguments need, and keep that."""
        x, after = call, None if call.before is None else call.before.new_empty(call.before.shape)
        q_out = None if x.q is None else x.q.new_empty(x.q.shape)
        cos, sin, start = (None, None, None) if x.rotary is None else x.rotary[:3]
        caches = codes(x.k_cache, x.k_cache), codes(x.v_cache, x.v_cache)
        compiled = prepared(append_kv)[self.grid](
            TokenPointers(x.k, x.v, x.cu_seqlens_new),
            Store(*caches, x.page_table, x.rows, x.slots),
            CacheLengths(x.before, after, x.leftpad),
            Turn(cos, sin, start),
            RotatedQueries(x.q, q_out, x.cu_seqlens_q),
            StoredScales(x.k_scale, x.v_scale, x.k_mean),
            *self.tail,
            num_warps=self.num_warps,
            enable_fp_fusion=True,
        )
        aligned = not any(t is not None and t.data_ptr() & 15 for t in x.tensors)
        if compiled is not None and aligned and self.again is None and not observed():
            self.again = AppendRepeat(launch_of(compiled, self.grid, self.tail), call).call
        return q_out, after


ADDRESSES = *Append._fields[:-1], *Rotary._fields[:3], "q_out", "after"
"""Names of the addresses that `AppendRepeat` has, in order: `Append.tensors`, and the results."""


def _pick(*names: str) -> itemgetter[Any]:
    return itemgetter(*map(ADDRESSES.index, names))


PER_CALL = (
    _pick("k", "v", "cu_seqlens_new"),  # TokenPointers
    _pick("k_cache", "v_cache", "page_table", "rows", "slots"),  # Store
    _pick("before", "after", "leftpad"),  # CacheLengths
    _pick("cos", "sin", "start"),  # Turn
    _pick("q", "q_out", "cu_seqlens_q"),  # RotatedQueries
    _pick("k_scale", "v_scale", "k_mean"),  # StoredScales
)
"""The records that change from call to call, as `append_kv` takes them, each from `ADDRESSES`."""


class AppendRepeat:
    """A call of `append` launched again with addresses: one of the layout of an earlier call, by
    what that compiled."""

    def __init__(self, launch: Launch, call: Append) -> None:
        import torch

        from splitkv.kernels.host.workspace import allocation

        self.launch, self.device = launch, call.k.device.index
        self.current_stream = torch._C._cuda_getCurrentRawStream
        self.given = [n for n, t in enumerate(call.tensors) if t is not None]
        self.absent: list[int | None] = [None] * len(call.tensors)
        self.new_q = self.new_after = None
        if call.q is not None:
            self.new_q = allocation(call.q.shape, call.q.dtype, call.q.device)
        if call.before is not None:
            self.new_after = allocation(call.before.shape, call.before.dtype, call.before.device)

    def call(self, tensors: Sequence[Tensor]) -> Result | None:
        """None: the call has to go through Triton."""
        at, bits = self.absent.copy(), 0
        for n, x in zip(self.given, tensors, strict=True):
            at[n] = address = x.data_ptr()
            bits |= address
        if bits & 15 or observed():
            return None
        q_out = after = at_q_out = at_after = None
        if self.new_q is not None:
            q_out = self.new_q()
            at_q_out = q_out.data_ptr()
        if self.new_after is not None:
            after = self.new_after()
            at_after = after.data_ptr()
        at += at_q_out, at_after
        self.launch(self.current_stream(self.device), *[pick(at) for pick in PER_CALL])
        return q_out, after


def tile_tokens(tokens: int) -> int:
    """Tokens a program: one where there are few, so that all loads are in flight at once."""
    return 1 if tokens <= 256 else 8


def _counts(x: Tensor) -> tuple[int, int]:
    """Tokens of a dense sequence, and of all."""
    seqlen = x.shape[1] if x.dim() == 4 else 1
    return seqlen, x.shape[0] * seqlen
