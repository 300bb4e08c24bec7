"""Scales of each key of decode on Hopper copied as they lie, those of all KV heads, by TMA.

The scales of a tile are one piece of memory where its keys are, and one thread issues their copy.
Copies by every thread (`cp.async`) are not only more instructions: TMA may write to a stage once a
fence has ordered what all threads did with shared memory, and that fence waits for their own copies
too, which are of tiles that nobody needs yet.

Scales lie behind all that Triton gave out, with a barrier for each stage: see
primitives/cluster.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.cluster import exchange_at, wait_at
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.hopper.primitives.tma_ring import tile_at_place
from splitkv.kernels.limits.hopper_decode_split import bulk_bytes

bytes_of_stages = gluon.constexpr_function(bulk_bytes)


@gluon.constexpr_function
def init_bulk_barriers(stages):
    """Instructions by which one thread sets up so many barriers."""
    code = "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
    code += "".join(f"@p mbarrier.init.shared::cta.b64 [$1+{8 * n}], 1;" for n in range(stages))
    return code + "}"


@gluon.constexpr_function
def issue_copies(between):
    """Instructions by which one thread issues the copies of scales of K, and of V to so many bytes
    further. Operands: barrier, bytes of both, where to, from where, from where, bytes of each."""
    copy = "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"""{{
        .reg .pred p, first;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.lt.u32 first, t, 32;
        elect.sync _|p, 0xffffffff;
        and.pred p, p, first;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
        {copy} [$3], [$4], $6, [$1];
        {copy} [$3+{between}], [$5], $6, [$1];
        }}"""


@gluon.constexpr_function
def load_instructions(offset, heads):
    """(instruction that loads from so many bytes further, constraints, elements that it loads): the
    scales of two keys are neighbours where there is one head."""
    if heads == 1:
        return f"ld.shared.v2.f32 {{$0, $1}}, [$2+{offset}];", "=f,=f,r,r", 2
    return f"ld.shared.f32 $0, [$1+{offset}];", "=f,r", 1


@gluon.jit
def allocate_bulk_scales(EXCHANGED: gl.constexpr, CONFIG: gl.constexpr):
    """Makes `KeyScales.stages` in front of the EXCHANGED bytes of a cluster, and their barriers."""
    BYTES: gl.constexpr = bytes_of_stages(CONFIG.num_stages, CONFIG.tile_n, CONFIG.scale_heads)
    stages = exchange_at(EXCHANGED + BYTES)
    CODE: gl.constexpr = init_bulk_barriers(CONFIG.num_stages)
    run_ptx(CODE, "r", (barrier_of_stage(stages, 0, CONFIG),))
    return stages


@gluon.jit
def barrier_of_stage(stages, stage, CONFIG: gl.constexpr):
    """The address of the barrier of a stage."""
    return stages + CONFIG.num_stages * (8 * CONFIG.tile_n * CONFIG.scale_heads) + stage * 8


@gluon.jit
def issue_bulk_scales(scales, kv, split, stage, tile, CONFIG: gl.constexpr):
    """Issues the copies of the scales of a tile's keys into a stage, up to the next 16 bytes behind
    the last key."""
    HEADS: gl.constexpr = CONFIG.scale_heads
    TILE_N: gl.constexpr = CONFIG.tile_n
    outer = split.sequence
    inner = tile * TILE_N
    each = (gl.minimum(split.num_keys - inner, TILE_N) * (4 * HEADS) + 15) & -16
    if kv.table_ptr is not None:
        row = kv.table_ptr + split.sequence.to(gl.int64) * kv.stride_table
        outer = gl.load(row + inner // CONFIG.page_size)
        inner %= CONFIG.page_size
    near = outer.to(gl.int64) * scales.stride_b + inner * HEADS
    barrier = barrier_of_stage(scales.stages, stage, CONFIG)
    into = scales.stages + stage * (8 * TILE_N * HEADS)
    k_scales, v_scales = scales.pointers.k_ptr + near, scales.pointers.v_ptr + near
    CODE: gl.constexpr = issue_copies(4 * TILE_N * HEADS)
    run_ptx(CODE, "r,r,r,l,l,r", (barrier, 2 * each, into, k_scales, v_scales, each))


@gluon.jit
def issue_first_bulk_scales(scales, kv, split, CONFIG: gl.constexpr):
    """Issues the copies of the scales of the tiles that the ring holds first."""
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        i = split.tiles.first + n * split.tiles.by
        if i < split.tiles.last:
            tile = tile_at_place(split.tiles, i)
            issue_bulk_scales(scales, kv, split, n, tile, CONFIG)


@gluon.jit
def read_bulk_scales(scales, split, stage, phase, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Waits for the scales of a stage and reads (of K, of V) [TILE_N] of a KV head; behind the last
    key there may be anything."""
    HEADS: gl.constexpr = CONFIG.scale_heads
    TILE_N: gl.constexpr = CONFIG.tile_n
    wait_at(barrier_of_stage(scales.stages, stage, CONFIG), phase)
    at = scales.stages + stage * (8 * TILE_N * HEADS) + split.kv_head * 4
    at += gl.arange(0, TILE_N, layout=LAYOUT) * (4 * HEADS)
    return load_shared(at, 0, HEADS), load_shared(at, 4 * TILE_N * HEADS, HEADS)


@gluon.jit
def load_shared(at, OFFSET: gl.constexpr, HEADS: gl.constexpr):
    """Loads the scales at addresses in shared memory, OFFSET bytes further."""
    CODE: gl.constexpr = load_instructions(OFFSET, HEADS)
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [at], dtype=gl.float32, is_pure=False, pack=CODE[2]
    )
