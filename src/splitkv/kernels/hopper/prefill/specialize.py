"""How the warps of a kernel for whole sequences divide into roles.

`specialize_warpgroups` is of `hopper_prefill` and `hopper_prefill_half`: load and mma.
`specialize_convert` is of `hopper_prefill_quantised`: load, convert and mma.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.prefill.convert import convert_role
from splitkv.kernels.hopper.prefill.load import load_role
from splitkv.kernels.hopper.prefill.mma import mma_role
from splitkv.kernels.hopper.prefill.mma_one_item import mma_role_beside_convert
from splitkv.kernels.hopper.prefill.records import Converts, Loads
from splitkv.kernels.hopper.primitives.cluster import arrive_running


@gluon.constexpr_function
def convert_registers(warpgroups, stored, k_type, v_type):
    """Registers of a thread of the convert role; those that multiply get what is left of 512 in all
    with two warpgroups of them. Dequantizing takes some, of two rings more."""
    if warpgroups == 1:
        return 128
    return 24 if v_type == stored else 40 if k_type == stored else 56


@gluon.constexpr_function
def load_registers(warpgroups, paged):
    """Registers of a thread of the load role beside a convert role: the page numbers of a tile take
    some."""
    if warpgroups == 1:
        return 64
    return 40 if paged else 24


@gluon.jit
def convert_role_of_cluster(converts, CONFIG: gl.constexpr):
    """`convert_role`, and what all threads of a cluster do."""
    arrive_running(CONFIG.cluster_size)
    convert_role(converts, CONFIG)


@gluon.jit
def load_role_of_cluster(loads, CONFIG: gl.constexpr):
    """`load_role`, and what all threads of a cluster do."""
    arrive_running(CONFIG.cluster_size)
    load_role(loads, CONFIG)


@gluon.jit
def specialize_convert(
    program,  # PrefillProgram
    rings,  # ConvertRings
    loads,  # Loads: tiles as they are stored
    CONFIG: gl.constexpr,
):
    """Runs the roles of `hopper_prefill_quantised`."""
    batch = program.batch
    tiles = program.tiles
    PAGED: gl.constexpr = batch.keys.table_ptr is not None
    STORED: gl.constexpr = loads.tiles.k.dtype
    converts = Converts(batch, rings, program.scales, program.barriers.named)
    # registers: in all 504 and 512 for a thread of each warpgroup, of which the first gets the rest
    CONVERT: gl.constexpr = convert_registers(
        CONFIG.warpgroups, STORED, tiles.k.dtype, tiles.v.dtype
    )
    LOAD: gl.constexpr = load_registers(CONFIG.warpgroups, PAGED)
    CLUSTER: gl.constexpr = CONFIG.cluster_size
    if CLUSTER > 0:
        gl.warp_specialize(
            [
                (mma_role_beside_convert, (program, CONFIG)),
                (convert_role_of_cluster, (converts, CONFIG)),
                (load_role_of_cluster, (loads, CONFIG)),
                # three warps that Triton would add anyway
                (arrive_running, (CLUSTER,)),
                (arrive_running, (CLUSTER,)),
            ],
            [4, 1, 1, 2],
            [CONVERT, LOAD, LOAD, LOAD],
        )
    else:
        gl.warp_specialize(
            [
                (mma_role_beside_convert, (program, CONFIG)),
                (convert_role_of_cluster, (converts, CONFIG)),
                (load_role_of_cluster, (loads, CONFIG)),
            ],
            [4, 1],
            [CONVERT, LOAD],
        )


@gluon.jit
def specialize_warpgroups(program, CONFIG: gl.constexpr):
    """Runs the roles of a program whose warpgroups each multiply 64 rows of a row tile by
    themselves, with tiles as they are copied."""
    batch = program.batch
    loads = Loads(batch, program.maps, program.boxes, program.tiles, program.barriers)
    # the numbers of many pages take registers
    FEW: gl.constexpr = batch.keys.table_ptr is None or batch.lazy_maxima is not None
    LOAD: gl.constexpr = 24 if FEW else 40
    MMA: gl.constexpr = 240 if FEW else 232
    # registers: in all 504 and 512 for a thread of each warpgroup, of which the first gets the rest
    if CONFIG.mma_roles == 1:
        gl.warp_specialize(
            [(mma_role, (program, CONFIG, 0)), (load_role, (loads, CONFIG))],
            [1],
            [64],
        )
    elif CONFIG.mma_roles == 2:
        gl.warp_specialize(
            [
                (mma_role, (program, CONFIG, 0)),
                (mma_role, (program, CONFIG, 1)),
                (load_role, (loads, CONFIG)),
            ],
            [4, 1],
            [MMA, LOAD],
        )
    else:
        gl.warp_specialize(
            [
                (mma_role, (program, CONFIG, 0)),
                (mma_role, (program, CONFIG, 1)),
                (mma_role, (program, CONFIG, 2)),
                (load_role, (loads, CONFIG)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
