"""The mma role of `hopper_prefill_quantised`: all warpgroups that multiply, in one role.

Programs that find their items by number, or have several by the grid, run `mma_role` of mma.py. One
that has a single item needs no loop over items, and may merge its split with that of the other
program of a cluster.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from splitkv.kernels.hopper.prefill.cluster_merge import merge_pair
from splitkv.kernels.hopper.prefill.epilogue import (
    finish_rows,
    store_absent_split,
    store_results,
    store_split_or_results,
)
from splitkv.kernels.hopper.prefill.items import item_at, tiles_of_item
from splitkv.kernels.hopper.prefill.mma import mma_role, row_scales_of, wait_last_product
from splitkv.kernels.hopper.prefill.mma_scaled import mainloop_scaled, sums_layout
from splitkv.kernels.hopper.prefill.records import Progress
from splitkv.kernels.hopper.prefill.scales import rows_layout
from splitkv.kernels.hopper.primitives.named_barriers import give_first_turn
from splitkv.kernels.hopper.primitives.scheduling_fences import hold_bits
from splitkv.kernels.hopper.primitives.votes import declare_any


@gluon.jit
def mma_role_of_one_item(program, CONFIG: gl.constexpr):
    """Multiplies the rows of the only item of a program, with keys and values in 8 bits."""
    batch, tiles = program.batch, program.tiles
    ROWS: gl.constexpr = tiles.q.shape[1]
    n = gl.program_id(0) * 0
    declare_any(0)
    give_first_turn(program.barriers.named)
    item = item_at(batch, n, CONFIG)
    row_scales = row_scales_of(item, program, CONFIG, 0)
    item_tiles = tiles_of_item(batch, item, CONFIG)
    done = Progress(n, n)
    if CONFIG.cluster_size > 0:
        DIM_V: gl.constexpr = tiles.q.shape[2]
        O: gl.constexpr = sums_layout(DIM_V, tiles.v.dtype, gl.num_warps())
        M: gl.constexpr = rows_layout(tiles.k.shape[1], tiles.k.dtype, gl.num_warps())
        acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
        l = gl.zeros([ROWS], gl.float32, M)
        m = gl.full([ROWS], float("-inf"), gl.float32, M)
        if item_tiles.steps > 0:
            last = mainloop_scaled(program, item, item_tiles, done, row_scales, CONFIG)
            l = last.l
            m = last.m
            acc = wait_last_product(last, item_tiles.steps - 1, program)
        merge_pair(acc, l, m, item, program, CONFIG)
    elif item_tiles.steps > 0:
        last = mainloop_scaled(program, item, item_tiles, done, row_scales, CONFIG)
        store_item(last, item, item_tiles, program, CONFIG)
        tma.store_wait(0)
    elif program.results.partial is not None:
        store_absent_split(ROWS, item, program, CONFIG, 0)


@gluon.jit
def store_item(last, item, item_tiles, program, CONFIG: gl.constexpr):
    """Stores the results, or the partial, of the only item of a program, once its LastProduct is
    there."""
    n = item_tiles.steps - 1
    if program.results.partial is None:
        factor = hold_bits(finish_rows(last.l, last.m, item, program, CONFIG, 0))
        acc = wait_last_product(last, n, program)
        store_results(acc, last.l, factor, item, program, CONFIG, 0)
    else:
        acc = wait_last_product(last, n, program)
        whole = item_tiles.is_whole
        store_split_or_results(acc, last.l, last.m, whole, item, program, CONFIG, 0)


@gluon.jit
def mma_role_beside_convert(program, CONFIG: gl.constexpr):
    """The mma role: `mma_role`, or `mma_role_of_one_item` where the grid gives a program one."""
    batch = program.batch
    if batch.by_grid is None:
        mma_role(program, CONFIG, 0)
    elif batch.items is None:
        mma_role_of_one_item(program, CONFIG)
    else:
        mma_role(program, CONFIG, 0)
