"""The roles of the warps of kernels for whole sequences: multiply, make ready, have copied.

`give_roles_to_warpgroups` is of `hopper_prefill` and `hopper_prefill_half`, all else of
`hopper_prefill_quantised`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from splitkv.kernels.hopper.cluster import arrive_running
from splitkv.kernels.hopper.known import known
from splitkv.kernels.hopper.numbered import give_first_turn
from splitkv.kernels.hopper.prefill_cluster import merge_pair
from splitkv.kernels.hopper.prefill_load import ROWS, produce
from splitkv.kernels.hopper.prefill_prepare import prepare
from splitkv.kernels.hopper.prefill_rows import own_item, own_visit
from splitkv.kernels.hopper.prefill_scaled import rows_layout
from splitkv.kernels.hopper.prefill_sums import declare_any
from splitkv.kernels.hopper.prefill_tile import consume, known_of_item, last_sums
from splitkv.kernels.hopper.prefill_write import finish, mark_absent, write, write_part_or_all
from splitkv.kernels.hopper.scaled_steps import attend_scaled, sums_layout


@gluon.constexpr_function
def registers(warpgroups, stored, of_k, of_v, paged):
    """Of a thread that makes tiles ready and of one that has them copied; those that multiply get
    what is left of 512 in all with two warpgroups of them. Widening takes some, of two rings more,
    and so do the page numbers of a tile."""
    if warpgroups == 1:
        return 128, 64
    return 24 if of_v == stored else 40 if of_k == stored else 56, 40 if paged else 24


@gluon.jit
def consume_placed(
    whole,  # see `consume`
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    CLUSTER: gl.constexpr,  # parts that the programs of a cluster merge, or 0
    KEPT: gl.constexpr,  # rows that a sequence may have
    LEFT: gl.constexpr,  # clusters of a row tile
):
    """The rows of the only item of a program, with keys and values in 8 bits."""
    work, maps, boxes, tiles, scales, signals, output = whole
    ROWS: gl.constexpr = tiles.q.shape[1]
    TILE_N: gl.constexpr = tiles.k.shape[1]
    n = gl.program_id(0) * 0
    declare_any(0)
    give_first_turn(signals.numbers)
    own = own_item(work, n, PACK, ROWS)
    of_item = known_of_item(own, tiles, scales, 0, GROUP, PACK, ROWS)
    visit, steps, asking, alone = own_visit(work, own, PACK, ROWS, TILE_N)
    where = own, work, output
    item = work, own, visit, steps, asking, n, n, tiles, of_item, scales, signals
    if CLUSTER:
        DIM_V: gl.constexpr = tiles.q.shape[2]
        O: gl.constexpr = sums_layout(DIM_V, tiles.v.dtype, gl.num_warps())
        M: gl.constexpr = rows_layout(TILE_N, tiles.k.dtype, gl.num_warps())
        acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
        l = gl.zeros([ROWS], gl.float32, M)
        m = gl.full([ROWS], float("-inf"), gl.float32, M)
        if steps > 0:
            acc, product, l, m, shrink, v_scale = attend_scaled(*item, 0, GROUP, PACK)
            acc = last_sums(acc, product, shrink, v_scale, steps - 1, tiles, signals)
        merge_pair(acc, l, m, own, work, output, PACK, KEPT, LEFT)
    elif steps > 0:
        acc, product, l, m, shrink, v_scale = attend_scaled(*item, 0, GROUP, PACK)
        if output.partial is None:
            factor = known(finish(l, m, *where, 0, GROUP, PACK, ROWS))
            acc = last_sums(acc, product, shrink, v_scale, steps - 1, tiles, signals)
            write(acc, l, factor, maps, boxes, tiles, *where, 0, GROUP, PACK, ROWS)
        else:
            acc = last_sums(acc, product, shrink, v_scale, steps - 1, tiles, signals)
            write_part_or_all(acc, l, m, alone, maps, boxes, tiles, *where, 0, GROUP, PACK, ROWS)
        tma.store_wait(0)
    elif output.partial is not None:
        mark_absent(ROWS, *where, 0, GROUP, PACK, ROWS)


@gluon.jit
def consume_items(
    whole,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    CLUSTER: gl.constexpr,
    KEPT: gl.constexpr,
    LEFT: gl.constexpr,
):
    """`consume`, or its like where a program has one item."""
    work = whole[0]
    if work.placed is None:
        consume(whole, 0, GROUP, PACK, 1)
    elif work.items is None:
        consume_placed(whole, GROUP, PACK, CLUSTER, KEPT, LEFT)
    else:
        consume(whole, 0, GROUP, PACK, 1)


@gluon.jit
def prepare_items(
    to_ready,  # the arguments of `prepare` up to `numbers`
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """`prepare`, and what all threads of a cluster do."""
    arrive_running(CLUSTER)
    prepare(*to_ready, GROUP, PACK, TILE_M, TILE_N, PAGE_SIZE)


@gluon.jit
def produce_items(
    to_copy,  # see `produce`
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ASKED: gl.constexpr,
    PDL: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """`produce`, and what all threads of a cluster do."""
    arrive_running(CLUSTER)
    produce(to_copy, GROUP, PACK, 1, STAGES, PAGE_SIZE, ASKED, PDL)


@gluon.jit
def give_roles(
    whole,  # see `consume`
    rings,  # see `prepare`
    arriving,  # Parts: tiles as they are stored
    coming,  # Signals of what is copied
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PDL: gl.constexpr,
    ASKED: gl.constexpr,
    CLUSTER: gl.constexpr,
    KEPT: gl.constexpr,
    LEFT: gl.constexpr,
):
    """Do the work of a program."""
    work, maps, boxes, ready, scales, signals, _ = whole
    TILE_M: gl.constexpr = ready.q.shape[1]
    TILE_N: gl.constexpr = arriving.k.shape[1]
    STAGES: gl.constexpr = coming.k_full.shape[0]
    stored: gl.constexpr = arriving.k.dtype
    PAGED: gl.constexpr = work.keys.table_ptr is not None
    of: gl.constexpr = registers(TILE_M // ROWS, stored, ready.k.dtype, ready.v.dtype, PAGED)
    # registers: in all 504 and 512 for a thread of each warpgroup, of which the first gets the rest
    to_ready = work, rings, scales, signals.numbers
    to_copy = work, maps, boxes, arriving, coming
    if CLUSTER:
        gl.warp_specialize(
            [
                (consume_items, (whole, GROUP, PACK, CLUSTER, KEPT, LEFT)),
                (prepare_items, (to_ready, GROUP, PACK, TILE_M, TILE_N, PAGE_SIZE, CLUSTER)),
                (produce_items, (to_copy, GROUP, PACK, STAGES, PAGE_SIZE, ASKED, PDL, CLUSTER)),
                # three warps that Triton would add anyway
                (arrive_running, (CLUSTER,)),
                (arrive_running, (CLUSTER,)),
            ],
            [4, 1, 1, 2],
            [of[0], of[1], of[1], of[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consume_items, (whole, GROUP, PACK, CLUSTER, KEPT, LEFT)),
                (prepare_items, (to_ready, GROUP, PACK, TILE_M, TILE_N, PAGE_SIZE, CLUSTER)),
                (produce_items, (to_copy, GROUP, PACK, STAGES, PAGE_SIZE, ASKED, PDL, CLUSTER)),
            ],
            [4, 1],
            [of[0], of[1]],
        )


@gluon.jit
def give_roles_to_warpgroups(
    whole,  # see `consume`
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Do the work of a program whose warpgroups each multiply 64 rows of a row tile by themselves,
    with tiles as they are copied."""
    work, maps, boxes, tiles, _, signals, _ = whole
    to_copy = work, maps, boxes, tiles, signals
    # the numbers of many pages take registers
    FEW: gl.constexpr = work.keys.table_ptr is None or work.scarce is not None
    PRODUCER: gl.constexpr = 24 if FEW else 40
    CONSUMER: gl.constexpr = 240 if FEW else 232
    # registers: in all 504 and 512 for a thread of each warpgroup, of which the first gets the rest
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consume, (whole, 0, GROUP, PACK, 1)),
                (produce, (to_copy, GROUP, PACK, 1, STAGES, PAGE_SIZE, 0, False)),
            ],
            [1],
            [64],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (whole, 0, GROUP, PACK, 2)),
                (consume, (whole, 1, GROUP, PACK, 2)),
                (produce, (to_copy, GROUP, PACK, 2, STAGES, PAGE_SIZE, 0, False)),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (whole, 0, GROUP, PACK, 3)),
                (consume, (whole, 1, GROUP, PACK, 3)),
                (consume, (whole, 2, GROUP, PACK, 3)),
                (produce, (to_copy, GROUP, PACK, 3, STAGES, PAGE_SIZE, 0, False)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
