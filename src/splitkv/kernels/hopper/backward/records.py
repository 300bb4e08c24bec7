"""The records that travel through `hopper_backward`: what a program works on, and in which form.

Fields are tensors, pointers, shared memory or None; a field that is None is absent from the
machine code. `HopperBackwardConfig` alone is known when a kernel is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from splitkv.kernels.compile_time import CompileTimeRecord

HALF = gl.constexpr(64)  # keys, or rows, of a warpgroup


class HopperBackwardConfig(CompileTimeRecord):
    """The compile-time values of `hopper_backward`.

    group         query heads a KV head
    num_stages    tiles of q in shared memory; grad_stages: tiles of the gradient of the output
    head_dim      columns of q and k without padding
    head_dim_v    those of v and the output
    sequences     dense: of one length, so that TMA knows where each ends; packed: one after another
    specialize    the function that divides the warps into roles: see mma_half_keys.py and
                  mma_one_gradient.py
    """

    group: int
    num_stages: int
    grad_stages: int
    head_dim: int
    head_dim_v: int
    sequences: str
    specialize: Any


class BackwardInputs(NamedTuple):
    """The tensors that the load role reads from memory.

    q, grad, k, v       TMA descriptors of [batch, tokens, heads, dim]; grad: the gradient of the
                        output
    total_ptr           softmax totals in base 2, from the first row of the program on
    delta_ptr           delta of the same rows
    weight_ptr          the weights of their ds in -dsink; None: no sink logits
    """

    q: Any
    grad: Any
    k: Any
    v: Any
    total_ptr: Any
    delta_ptr: Any
    weight_ptr: Any


class BackwardBoxes(NamedTuple):
    """Shared memory as TMA writes it.

    q, grad   [stages, 1, TILE_M, 1, dim]
    k, v      [1, TILE_N, 1, dim]
    """

    q: Any
    grad: Any
    k: Any
    v: Any


class BackwardTiles(NamedTuple):
    """Shared memory as products read it.

    q, grad     [stages, TILE_M, dim]
    k, v        [TILE_N, dim]
    total       [stages, TILE_M]
    delta       [stages, TILE_M]; -delta where products dp are added to it
    weight      the weights of ds in -dsink [stages, TILE_M]; `total` where there are no sink logits
    p           [TILE_M * TILE_N / 256, 256] in the order of registers; None: not exchanged
    q_strips    q as [strips, 16, 64], the columns of a tile 64 at a time; grad_strips: grad; or
                None
    """

    q: Any
    grad: Any
    k: Any
    v: Any
    total: Any
    delta: Any
    weight: Any
    p: Any
    q_strips: Any
    grad_strips: Any


class BackwardBarriers(NamedTuple):
    """Barriers between the roles: what is there (full), what may be overwritten (empty).

    kv_full                 k and v [1], which stay
    q_full, q_empty         q, total and weights [num_stages]; with grad and delta where these have
                            no barriers of their own
    grad_full, grad_empty   the gradient of the output and delta [grad_stages]; None: with q
    p_full, p_empty         p, from one consumer to the other [1]; None: not exchanged
    """

    kv_full: Any
    q_full: Any
    q_empty: Any
    grad_full: Any
    grad_empty: Any
    p_full: Any
    p_empty: Any


class DqExchange(NamedTuple):
    """Shared memory in which both consumers leave their halves of dq; None: dq is made elsewhere.

    ds                  [2, TILE_N, TILE_M]
    sums                fp32 halves of a tile of dq, or a piece of each consumer [2, rows, 256] in
                        the order of registers, see `store_dq`
    ds_full, ds_empty       barriers of ds [2]; the same ones where nobody waits for ds_empty, see
                            `allocate_dq_halves`
    sums_full, sums_empty   barriers of the halves or pieces, of each consumer [2]
    """

    ds: Any
    sums: Any
    ds_full: Any
    ds_empty: Any
    sums_full: Any
    sums_empty: Any


class BackwardMemory(NamedTuple):
    """The shared memory of the roles that multiply."""

    tiles: Any  # BackwardTiles
    exchange: Any  # DqExchange
    barriers: Any  # BackwardBarriers


class RowTiles(NamedTuple):
    """The tiles of rows that see a tile of keys: `count`, visited once for each head of a group.
    From `middle` to before `middle_end` every row sees every key."""

    count: Any
    middle: Any
    middle_end: Any


class KeyWork(NamedTuple):
    """The work of a program of `hopper_backward`: a tile of keys and the rows that see it.

    steps            row tiles that it visits, of all heads of the group
    sequence         index of the descriptors; kv_head: as well
    key_tile         number of the tile in its sequence
    first_key        the tile's first key; num_keys: how many from there on are in the sequence
    first_row        the first row that it visits; num_rows: how many from there on are there
    shift            key position of the first row, from the first key on
    stat_head        rows from a head to the next in total and delta
    sum_tile         the first row tile of the first head in the sums of dq; sum_head: to the next
    rows             RowTiles
    """

    steps: Any
    sequence: Any
    kv_head: Any
    key_tile: Any
    first_key: Any
    num_keys: Any
    first_row: Any
    num_rows: Any
    shift: Any
    stat_head: Any
    sum_tile: Any
    sum_head: Any
    rows: Any


class MaskedScores(NamedTuple):
    """How products q . k become weights: bounds of the mask, counted from the first key of the
    tile, and the softmax scale in base 2."""

    bounds: Any
    scale_log2: Any


class KeyGradientStore(NamedTuple):
    """Where the gradients of a tile of keys go.

    dk_ptr, dv_ptr         of the first key; dk_stride, dv_stride: elements between tokens
    scale                  of dk
    split_ptr              fp32 [TILE_N, head_dim + head_dim_v] of the rows of this split; None: the
                           rows of no tile are split
    in_split               whether the program has a split of the rows
    sink_ptr               the program's sums for dsink, see sinks.py; None: no sink logits
    sink_head              elements from a head to the next
    """

    dk_ptr: Any
    dv_ptr: Any
    dk_stride: Any
    dv_stride: Any
    scale: Any
    split_ptr: Any
    in_split: Any
    sink_ptr: Any
    sink_head: Any
