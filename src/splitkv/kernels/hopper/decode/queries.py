"""The rows of q of decode on Hopper as operands of the products with keys.

Packed row r is query token r // group and query head r % group of the KV head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from splitkv.kernels.hopper.decode.byte_pairs import (
    LEAST_UNIT,
    first_of_pairs,
    fours_of_rows,
    no_unit,
    of_all_rows,
    operand_of_bytes,
    pairs_apart,
    power_of_row,
    scaled_pairs,
)
from splitkv.kernels.hopper.decode.eight_rows import above, both_halves
from splitkv.kernels.hopper.decode.layouts import (
    allocate_operand,
    row_a_warp,
    scores_layout,
    vectors_of_rows,
)
from splitkv.kernels.hopper.decode.records import QueryIndices, QueryTile
from splitkv.kernels.tile.new import rotated


@gluon.jit
def locate_rows(kv_head, row_tile, seqlen_q, CONFIG: gl.constexpr):
    """The QueryIndices of a row tile of a KV head, as scores have them."""
    S: gl.constexpr = scores_layout(CONFIG, gl.num_warps())
    GROUP: gl.constexpr = CONFIG.group
    rows = row_tile * CONFIG.tile_m + gl.arange(0, CONFIG.tile_m, layout=gl.SliceLayout(1, S))
    return QueryIndices(rows < seqlen_q * GROUP, rows // GROUP, kv_head * GROUP + rows % GROUP)


@gluon.jit
def load_columns(queries, row_tile, offs_d, TILE_M: gl.constexpr, CONFIG: gl.constexpr):
    """Loads columns `offs_d` of rows of q, rotated where there is a rotation [TILE_M, columns].

    row_tile   which tile of TILE_M rows, which may be a strip of the program's row tile
    """
    GROUP: gl.constexpr = CONFIG.group
    L: gl.constexpr = offs_d.type.layout.parent
    rows = row_tile * TILE_M + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, L))
    ok = rows < queries.seqlen_q * GROUP
    token_offs = rows // GROUP * queries.stride_t
    head_offs = (queries.kv_head * GROUP + rows % GROUP) * queries.stride_h
    ptrs = queries.q_ptr + (token_offs + head_offs)
    if CONFIG.rotary_dim:
        rotation = queries.rotation
        q = rotated(
            ptrs,
            ok,
            rotation.start + rotation.step * (rows // GROUP),
            offs_d=offs_d,
            turn=rotation.turn,
            angles=rotation.angles,
            DIM=CONFIG.head_dim,
            ROTARY_DIM=CONFIG.rotary_dim,
            PAIR=CONFIG.rotary_pair,
        )
    else:
        q = gl.load(ptrs[:, None] + offs_d[None, :], mask=ok[:, None], other=0.0)
    return q


# --- mma ---------------------------------------------------------------------------------------


@gluon.jit
def load_mma_queries(queries, CONFIG: gl.constexpr):
    """Loads a row tile of q as the operands of mma: a QueryTile."""
    S: gl.constexpr = scores_layout(CONFIG, gl.num_warps())
    A: gl.constexpr = gl.DotOperandLayout(0, S, 4 if CONFIG.k_type == gl.int8 else 2)
    if CONFIG.rotary_dim:
        q, q_odd, unit = load_rotated_operands(queries, A, CONFIG)
    else:
        q, q_odd, unit = load_operands(queries, A, CONFIG)
    return QueryTile(q, q_odd, of_all_rows(unit, CONFIG.tile_m, gl.SliceLayout(1, S)))


@gluon.jit
def load_operands(queries, A: gl.constexpr, CONFIG: gl.constexpr):
    """Loads (q, q_odd, unit): q * unit and q_odd * unit [TILE_M, DIM] are the columns of the rows,
    in the order of those of keys. Every warp loads all rows.

    Beside keys of 16 bits, and where q is rounded to int8, q_odd is q. Where eight of 16 rows are
    used, nothing is worked out for the others.
    """
    TILE_M: gl.constexpr = CONFIG.tile_m
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    GROUP: gl.constexpr = CONFIG.group
    L: gl.constexpr = (
        A if CONFIG.dequantize is None else fours_of_rows(TILE_M, HEAD_DIM, gl.num_warps())
    )
    rows = queries.row_tile * TILE_M + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, L))
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L))
    token_offs = rows // GROUP * queries.stride_t
    at = token_offs + (queries.kv_head * GROUP + rows % GROUP) * queries.stride_h
    ok = (rows < queries.seqlen_q * GROUP)[:, None]
    q = gl.load(queries.q_ptr + at[:, None] + offs_d[None, :], mask=ok, other=0.0)
    AS_GIVEN: gl.constexpr = q.dtype == gl.int8 and CONFIG.k_type == gl.int8
    if q.dtype.primitive_bitwidth == 8 and not AS_GIVEN:  # exact in 16 bits
        q = q.to(gl.float16)
    if AS_GIVEN:
        q = gl.convert_layout(q, A, assert_trivial=True)
        q_odd, unit = q, no_unit(TILE_M, A)
    elif CONFIG.dequantize is None:
        q_odd, unit = q, no_unit(TILE_M, A)
    elif CONFIG.k_type == gl.int8:
        q, unit = operand_of_bytes(q, A, CONFIG.used_rows)
        q_odd = q
    elif CONFIG.used_rows < TILE_M:
        q, zeros = both_halves(q)
        q, q_odd, unit = scaled_pairs(*pairs_apart(q))
        zeros, zeros_odd = pairs_apart(zeros)
        q = gl.convert_layout(above(q, zeros), A, assert_trivial=True)
        q_odd = gl.convert_layout(above(q_odd, zeros_odd), A, assert_trivial=True)
    else:
        q, q_odd = pairs_apart(q)
        q = gl.convert_layout(q, A, assert_trivial=True)
        q, q_odd, unit = scaled_pairs(q, gl.convert_layout(q_odd, A, assert_trivial=True))
    return q, q_odd, unit


@gluon.jit
def load_rotated_operands(queries, A: gl.constexpr, CONFIG: gl.constexpr):
    """Computes `load_operands` of rotated rows: all warps load and rotate each row once."""
    TILE_M: gl.constexpr = CONFIG.tile_m
    DIM: gl.constexpr = CONFIG.dim_k
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    if CONFIG.dequantize is None or CONFIG.k_type == gl.int8:  # columns in their order
        ROW: gl.constexpr = row_a_warp(HEAD_DIM, gl.num_warps())
        offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROW))
        even = load_columns(queries, queries.row_tile, offs_d, TILE_M, CONFIG)
        if CONFIG.k_type == gl.int8:
            FOURS: gl.constexpr = fours_of_rows(TILE_M, HEAD_DIM, gl.num_warps())
            even, unit = operand_of_bytes(gl.convert_layout(even, FOURS), A, TILE_M)
        else:
            even, unit = gl.convert_layout(even, A), no_unit(TILE_M, A)
        odd = even
    else:
        PAIRS_ROW: gl.constexpr = row_a_warp(DIM, gl.num_warps())
        offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, PAIRS_ROW))
        first = first_of_pairs(offs_d)
        even = load_columns(queries, queries.row_tile, first, TILE_M, CONFIG)
        odd = load_columns(queries, queries.row_tile, first_of_pairs(offs_d) + 2, TILE_M, CONFIG)
        even, odd, unit = scaled_pairs(gl.convert_layout(even, A), gl.convert_layout(odd, A))
    return even, odd, unit


# --- wgmma -------------------------------------------------------------------------------------


@gluon.jit
def load_wgmma_queries(queries, CONFIG: gl.constexpr):
    """Loads a row tile of q into shared memory, in the type in which keys are multiplied: a
    QueryTile whose `odd` is `even`."""
    TILE_M: gl.constexpr = CONFIG.tile_m
    DIM: gl.constexpr = CONFIG.dim_k
    K_TYPE: gl.constexpr = CONFIG.k_type
    S: gl.constexpr = scores_layout(CONFIG, gl.num_warps())
    M: gl.constexpr = gl.SliceLayout(1, S)
    tile = allocate_operand(K_TYPE, TILE_M, DIM)
    layout: gl.constexpr = vectors_of_rows(DIM, gl.num_warps())
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    unit = gl.full([TILE_M], 1.0, gl.float32, M)
    if queries.q_ptr.dtype.element_ty == K_TYPE:
        STRIP: gl.constexpr = 16 if CONFIG.rotary_dim else TILE_M  # it takes registers
        for n in gl.static_range(TILE_M // STRIP):
            strip = queries.row_tile * (TILE_M // STRIP) + n
            q = load_columns(queries, strip, offs_d, STRIP, CONFIG)
            tile.slice(n * STRIP, STRIP).store(q)
    else:
        q = load_columns(queries, queries.row_tile, offs_d, TILE_M, CONFIG)
        x = q.to(gl.float32)
        top = gl.max(gl.where(x == x, gl.abs(x), float("inf")), 1)
        if gl.int8 == K_TYPE:
            scale = gl.maximum(top / 127.0, LEAST_UNIT)
            x = (x * (1.0 / scale)[:, None] + 12582912.0) - 12582912.0  # the nearest integers
            x = gl.where(x == x, x, 0.0)
        else:
            scale, inverse = power_of_row(top)
            x *= inverse[:, None]
        q = x.to(K_TYPE)
        unit = gl.convert_layout(scale, M)
        tile.store(q)
    fence_async_shared()
    return QueryTile(tile, tile, of_all_rows(unit, TILE_M, M))
