"""The roles of programs that stay and take their items one by one, whoever is free the next.

The load role asks for an item, by one atomic addition for all programs, while it issues the copies
of the one before, and says its number to the mma roles when it has issued them all. So the first
tiles of an item arrive while the mma roles still multiply, and store, the one before.

Who takes which item follows the clock, and what an item is does not: the same bits come out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from splitkv.kernels.hopper.prefill.epilogue import store_split_or_results
from splitkv.kernels.hopper.prefill.items import has_rows, item_of_schedule, tiles_of_item
from splitkv.kernels.hopper.prefill.load import issue_step
from splitkv.kernels.hopper.prefill.mma import (
    first_row,
    mainloop,
    num_rows,
    row_scales_of,
    sit_out_steps,
    wait_last_product,
)
from splitkv.kernels.hopper.prefill.records import ItemQueue, Progress
from splitkv.kernels.hopper.prefill.sums import declare_any, pass_turn, wait_turn
from splitkv.kernels.hopper.primitives.scheduling_fences import again
from splitkv.kernels.hopper.primitives.tma_ring import arrivals, thread_barrier

LANES = gl.constexpr(32)
PLACES = gl.constexpr(2)  # numbers that are said and not yet read


@gluon.jit
def allocate_queue(next_ptr, CONFIG: gl.constexpr):
    """The ItemQueue of a program."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [PLACES, LANES], layout)
    return ItemQueue(next_ptr, numbers, arrivals(PLACES, 1), arrivals(PLACES, CONFIG.mma_roles))


@gluon.jit
def ask(queue):
    """Asks for an item: [LANES], of which the first is how many were asked for before."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, LANES, layout=layout)
    first = lanes == 0
    before = gl.atomic_add(queue.next_ptr + lanes * 0, lanes * 0 + 1, mask=first, sem="relaxed")
    return gl.where(first, before, 0)


@gluon.jit
def say(queue, number, k):
    """Says a number to the mma roles, the k-th."""
    place = k % PLACES
    mbarrier.wait(queue.empty.index(place), (k // PLACES & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    queue.numbers.index(place).store(gl.full([LANES], number, gl.int32, layout))
    thread_barrier()
    mbarrier.arrive(queue.full.index(place), count=1)


@gluon.jit
def hear(queue, k):
    """Reads the k-th number that the load role says."""
    place = k % PLACES
    mbarrier.wait(queue.full.index(place), k // PLACES & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(queue.numbers.index(place).load(layout), 0)


@gluon.jit
def item_there(batch, number, CONFIG: gl.constexpr):
    """(the Item of a number, whether there is one): entries that are nobody's come last."""
    items = again(batch.items, batch.lazy_maxima)
    item = item_of_schedule(batch, gl.minimum(number, items - 1), CONFIG)
    return item, (number < items) & has_rows(item, CONFIG)


@gluon.jit
def load_role_of_queue(loads, CONFIG: gl.constexpr):
    """The load role: issues the copies of the items that it asks for."""
    batch, queue = loads.batch, loads.queue
    number = gl.program_id(0)
    n = number * 0
    k = n
    item, there = item_there(batch, number, CONFIG)
    while there:
        asked = ask(queue)
        item_tiles = tiles_of_item(batch, item, CONFIG)
        kv_head = item.head // CONFIG.group
        for i in range(0, item_tiles.steps):
            issue_step(loads, item, item_tiles, i, kv_head, Progress(n, k), CONFIG)
            n += 1
        number = gl.num_programs(0) + gl.sum(asked, 0)
        say(queue, number, k)
        k += 1
        item, there = item_there(batch, number, CONFIG)


@gluon.jit
def mma_role_of_queue(program, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """The mma role ROLE: multiplies its rows of the row tile, in the items that it hears of."""
    batch, tiles, barriers = program.batch, program.tiles, program.barriers
    queue = program.queue
    number = gl.program_id(0)
    n = number * 0
    k = n
    declare_any(ROLE)
    if barriers.mma_turns is not None:
        if CONFIG.mma_roles - 1 == ROLE:
            pass_turn(0)
    item, there = item_there(batch, number, CONFIG)
    while there:
        item_tiles = tiles_of_item(batch, item, CONFIG)
        done = Progress(n, k)
        sits_out = number != number
        if ROLE > 0:
            sits_out = first_row(item, CONFIG, ROLE) >= num_rows(item, CONFIG)
        if sits_out:
            sit_out_steps(program, item, item_tiles, done, CONFIG, ROLE)
        else:
            row_scales = row_scales_of(item, program, CONFIG, ROLE)
            last = mainloop(program, item, item_tiles, done, row_scales, CONFIG, ROLE)
            acc = wait_last_product(last, n + item_tiles.steps - 1, program)
            whole = item_tiles.is_whole
            store_split_or_results(acc, last.l, last.m, whole, item, program, CONFIG, ROLE)
            if tiles.out is None:
                tma.store_wait(0)
                mbarrier.arrive(barriers.q_empty.index(0), count=1)
        n += item_tiles.steps
        if k > 0:  # all warps have read the number of this item before its first turn
            mbarrier.arrive(queue.empty.index((k - 1) % PLACES), count=1)
        number = hear(queue, k)
        k += 1
        item, there = item_there(batch, number, CONFIG)
    if barriers.mma_turns is not None:
        if ROLE == 0:  # the last turn is nobody's
            wait_turn(0)
    tma.store_wait(0)
