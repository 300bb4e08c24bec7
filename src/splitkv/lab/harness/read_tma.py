"""Reading memory and nothing else, by TMA: the Gluon kernel behind the read floor on Hopper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.kernels.hopper.primitives.tma_ring import async_load

# (rows of a tile, tiles in flight a program, programs an SM)
SETTINGS = ((64, 12, 1), (128, 6, 1), (32, 24, 1), (64, 6, 2), (64, 4, 3), (16, 12, 1), (16, 12, 4))


@gluon.jit
def read_tma(rows_desc, num_tiles, IN_FLIGHT: gl.constexpr):
    TILE: gl.constexpr = rows_desc.block_type.shape
    tiles = gl.allocate_shared_memory(rows_desc.dtype, [IN_FLIGHT] + TILE, rows_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [IN_FLIGHT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(IN_FLIGHT):
        mbarrier.init(arrived.index(i), count=1)
    program, programs = gl.program_id(0), gl.num_programs(0)
    mine = (num_tiles - program + programs - 1) // programs
    for i in gl.static_range(IN_FLIGHT):
        ask = i < mine
        row = (program + i * programs) * TILE[0]
        mbarrier.expect(arrived.index(i), rows_desc.block_type.nbytes, pred=ask)
        async_load(rows_desc, [row, 0], arrived.index(i), tiles.index(i), pred=ask)
    for n in range(mine):
        slot = n % IN_FLIGHT
        mbarrier.wait(arrived.index(slot), (n // IN_FLIGHT) & 1)
        ask = n + IN_FLIGHT < mine
        row = (program + (n + IN_FLIGHT) * programs) * TILE[0]
        mbarrier.expect(arrived.index(slot), rows_desc.block_type.nbytes, pred=ask)
        async_load(rows_desc, [row, 0], arrived.index(slot), tiles.index(slot), pred=ask)


def reader(
    buffers: Sequence[Tensor], num_sms: int, setting: tuple[int, int, int]
) -> Callable[[int], Any]:
    """`read(i)` reads buffers[i], [rows, columns], once."""
    tile_rows, in_flight, programs_an_sm = setting
    rows, columns = buffers[0].shape
    layout = gl.NVMMASharedLayout.get_default_for([tile_rows, columns], gl.bfloat16)
    descriptors = [TensorDescriptor.from_tensor(x, [tile_rows, columns], layout) for x in buffers]
    num_tiles = -(-rows // tile_rows)
    grid = (min(num_sms * programs_an_sm, num_tiles),)

    def read(i: int) -> None:
        read_tma[grid](descriptors[i], num_tiles, IN_FLIGHT=in_flight, num_warps=4)

    return read
