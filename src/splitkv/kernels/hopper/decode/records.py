"""The records that travel through decode on Hopper: what a program works on, and in which form.

Fields are tensors, pointers, shared memory or None; a field that is None is absent from the
machine code. `DecodeConfig` alone is known when a kernel is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from splitkv.kernels.compile_time import CompileTimeRecord


class DecodeConfig(CompileTimeRecord):
    """The compile-time values of a decode kernel on Hopper.

    group         query heads a KV head
    page_size     keys a page; 1 where the cache is contiguous
    batch_p2      the batch, rounded up to a power of two, where programs find their sequence; or 1
    tile_m        packed rows a tile; used_rows: how many of them can be rows of q: 8 of 16, or all
    tile_n        keys a tile
    num_stages    tiles of K and V that the ring holds
    head_dim, head_dim_v   as in the problem
    dim_k, dim_v  columns of a stage of K and V: elements, or pairs of elements of 8 bits
    dequantize    the function from pairs of 8-bit elements to fp16; None: K and V have 16 bits
    k_type        the type in which q @ k^T is multiplied
    load          tma: the warps that multiply issue TMA copies; producer_warp: one that does not
                  multiply issues them; gather: all warps copy rows, each thread 16 bytes
    ring          holds_split: no split has more tiles than the ring has stages; wraps: it may
    key_scales    none, per_tile, preloaded or bulk: how scales arrive, see key_scales.py
    scale_heads   bulk: the KV heads whose scales lie side by side and are copied together
    predecessor   done: all that the kernel before wrote is there; running: it may still write q and
                  the newest keys
    cluster_size  programs that merge their splits in shared memory; 0: none do
    cluster_rows  rows that they exchange; exchanged_bytes: of all of them
    rotary_dim    columns of q and of new keys that are rotated; 0: none
    rotary_pair   columns between the two of a rotated pair
    tile_t        new tokens that are written at once
    find_share    as `find` of a ShareRule, of programs that stay; else None
    split_tiles   of their DecodeStep; else 0
    allocate, load_queries, mainloop   device functions of tiles of this height: mma or wgmma
    """

    group: int
    page_size: int
    batch_p2: int
    tile_m: int
    used_rows: int
    tile_n: int
    num_stages: int
    head_dim: int
    head_dim_v: int
    dim_k: int
    dim_v: int
    dequantize: Any
    k_type: Any
    load: str
    ring: str
    key_scales: str
    scale_heads: int
    predecessor: str
    cluster_size: int
    cluster_rows: int
    exchanged_bytes: int
    rotary_dim: int
    rotary_pair: int
    tile_t: int
    find_share: Any
    split_tiles: int
    allocate: Any
    load_queries: Any
    mainloop: Any


class Program(NamedTuple):
    """The place of a program in the launch.

    split       which split of its sequence it has; by the batch rule, of the whole batch
    head_tile   KV head and row tile in one number
    sequence    by the batch rule without meaning
    slot        where its partial is stored
    """

    split: Any
    head_tile: Any
    sequence: Any
    slot: Any


class Work(NamedTuple):
    """The work of a program before the length of its sequence is known: which keys it is to read.

    lens_ptr      [batch] int32; None: every sequence has max_keys
    max_keys      keys that a sequence may have; seqlen_q: its query tokens
    sequence      index in the batch
    split         which of num_splits splits; split_tiles: tiles of each by the fixed rule, or None
    bounds        Bounds of the mask
    first_token, last_token   query tokens of the row tile
    """

    lens_ptr: Any
    max_keys: Any
    seqlen_q: Any
    sequence: Any
    split: Any
    num_splits: Any
    split_tiles: Any
    bounds: Any
    first_token: Any
    last_token: Any


class BatchRule(NamedTuple):
    """How splits are shared out over a batch, see tile/share.py.

    programs               splits of the whole batch
    seqlen_new, capacity   new tokens of a sequence and keys that it has room for; or None
    """

    programs: Any
    batch: Any
    seqlen_new: Any
    capacity: Any


class Split(NamedTuple):
    """The keys of one split: of a sequence and a KV head.

    tiles        Tiles; num_keys: keys of the sequence; num_splits: splits of the sequence
    """

    sequence: Any
    kv_head: Any
    tiles: Any
    num_keys: Any
    num_splits: Any


class KVCache(NamedTuple):
    """K and V in global memory, and the page table.

    k, v              TMA descriptors of [sequences or pages, keys, num_kv_heads, dim] with boxes of
                      keys of one head; pointers where rows are gathered
    table_ptr         [batch, max_pages]; None: the cache is contiguous
    stride_table      elements between rows of the table
    k_steps, v_steps  where rows are gathered: elements between pages, keys and heads; None: by TMA
    """

    k: Any
    v: Any
    table_ptr: Any
    stride_table: Any
    k_steps: Any
    v_steps: Any


class Ring(NamedTuple):
    """Tiles in flight in shared memory.

    k_boxes, v_boxes   the memory as copies write it
    full               a barrier a stage: its tile has arrived
    empty              a barrier a stage: its tile has been read; None: the warps that multiply
                       issue the copies, too
    k_tiles, v_tiles   the same memory as products read it [num_stages, TILE_N, columns]
    before             tiles that have gone through the ring before those of this split, where a
                       program has several; None: it has one
    """

    k_boxes: Any
    v_boxes: Any
    full: Any
    empty: Any
    k_tiles: Any
    v_tiles: Any
    before: Any = None


class KeyScales(NamedTuple):
    """The fp32 scales of each key and KV head.

    pointers   Scales of K and of V; None: keys have none
    stages     [num_stages, 2 * TILE_N] in shared memory, those of K, then those of V; copied in
               bulk: the address of the first stage
    stride_b   elements between sequences or pages; stride_n: between keys
    """

    pointers: Any
    stages: Any
    stride_b: Any
    stride_n: Any


class QueryRows(NamedTuple):
    """Where the packed rows of q of a program are.

    q_ptr     the first element of the sequence
    rotation  Rotation, or None
    """

    q_ptr: Any
    kv_head: Any
    row_tile: Any
    seqlen_q: Any
    stride_t: Any
    stride_h: Any
    rotation: Any


class Rotation(NamedTuple):
    """How rows of q are rotated.

    turn, angles   Turn, AngleTable: see tile/new.py
    start          the row of cos and sin of query token 0, which has `step` more a token
    """

    turn: Any
    angles: Any
    start: Any
    step: Any


class QueryTile(NamedTuple):
    """Rows of q as products take them.

    even, odd   operands [TILE_M, columns]: K in pairs is multiplied in two halves; else odd is even
    unit        [TILE_M] by which both are to be multiplied
    """

    even: Any
    odd: Any
    unit: Any


class QueryIndices(NamedTuple):
    """The packed rows of a tile, each [TILE_M]: whether it is one, its query token and head."""

    ok: Any
    token: Any
    head: Any


class ScoreTerms(NamedTuple):
    """The terms of a score as the call gave them.

    row            pointers of a row: sink logit, ALiBi slope, scale of q
    head_scales    Scales that the keys of a head share, or None
    slope_stride   elements between sequences of slopes
    q_strides, kv_strides   Strides of the scales of q, and of K and V (t None)
    scale, softcap          as in tile/score.py
    """

    row: Any
    head_scales: Any
    slope_stride: Any
    q_strides: Any
    kv_strides: Any
    scale: Any
    softcap: Any


class RowScoring(NamedTuple):
    """The terms of the scores of a tile of rows, loaded.

    bounds       Bounds of the mask
    pos          [TILE_M, 1] key position of each row; first, last: of the first and the last row
    scale, softcap, slope   as in tile/score.py; the last two may be None
    """

    bounds: Any
    pos: Any
    first: Any
    last: Any
    scale: Any
    softcap: Any
    slope: Any


class Softmax(NamedTuple):
    """A softmax over some keys that is not finished: acc [TILE_M, DIM_V], m [TILE_M] in base 2 and
    l [TILE_M]."""

    acc: Any
    m: Any
    l: Any


class Output(NamedTuple):
    """Where results go.

    final         Final; partial: Partial, or None: each sequence has one split
    sink_ptr      [num_heads], or None
    strides       Strides of out
    """

    final: Any
    partial: Any
    sink_ptr: Any
    seqlen_q: Any
    num_kv_heads: Any
    strides: Any
