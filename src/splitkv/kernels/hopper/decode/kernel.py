"""Split-KV decode attention for Hopper: keys and values by TMA, a ring of tiles in flight.

Computes what kernels/decode_split.py computes, leaves the same partials and shares `combine`. It
differs in how keys arrive. Five entry points share device functions; each reads from top to bottom:

    kernel_all_warps.py  16 or 32 packed rows, multiplied by mma; every warp issues copies
    kernel_producer.py   16 rows; a producer warp issues the many boxes of small pages
    kernel_wgmma.py      64 rows, multiplied by wgmma
    kernel_append.py     new tokens are written first; of either height
    kernel_persistent.py by a schedule of the step; 16 or 32 rows

What they work on is named in records.py; kernels/hopper/README.md says in which order to read the
others. Split s of n takes the tiles s, s + n, s + 2n, ...: all
SMs then read neighbouring tiles at the same time, which the memory serves faster than n distant
ranges, and no program has to divide. By the fixed rule a split is a range of keys, whatever else
there is. Two, four or eight splits may be a cluster, which merges them itself: cluster_merge.py.

Shapes      as kernels/decode_split.py
Grid        as kernels/decode_split.py
Traffic     as kernels/decode_split.py
Numerics    scores and sums in fp32, base-2 exponentials; p is rounded to the value type before p @
            v; beside 8 bits, which are widened to fp16 exactly, q and p are fp16, too, with
            powers of two taken out of them; int8, products half or full: q is rounded to int8 with
            a scale a row, and sums of q . k are exact
Limits      sm_90; bf16 or fp16; head_dim and head_dim_v 64, 128 or 256; at most 16 query tokens and
            64 packed rows, 32 where head_dim is 256 in 8 bits; pages of a multiple of 16 keys;
            strides of K and V multiples of 16 bytes; otherwise those of kernels/decode_split.py
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from functools import cache
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import SCHEDULED, Config, Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import WIDE, box_rows
from splitkv.core.variants import HopperDecode
from splitkv.kernels.hopper.decode.byte_pairs import from_e4m3, from_e5m2, from_int8, pairs_of
from splitkv.kernels.hopper.decode.mma_loop import mma_loop
from splitkv.kernels.hopper.decode.queries import load_mma_queries, load_wgmma_queries
from splitkv.kernels.hopper.decode.records import DecodeConfig
from splitkv.kernels.hopper.decode.ring import allocate_boxes, allocate_panels, allocate_rows
from splitkv.kernels.hopper.decode.tensor_maps import boxes_of, layouts_of
from splitkv.kernels.host.append_arguments import TokenTiles, fixed_arguments, token_tiles
from splitkv.kernels.host.arguments import in_order
from splitkv.kernels.host.launch import Launch, holding, in_clusters
from splitkv.kernels.host.launcher import (
    PER_CALL,
    PER_CALL_OF_APPEND,
    CacheLaunch,
    CacheTail,
    DecodeLauncher,
    SplitKernel,
    batch_p2,
    compile_options,
    partial_rows,
    split_arguments,
)
from splitkv.kernels.host.lengths import CacheLayout
from splitkv.kernels.host.map_launch import CacheMaps, bind_to_lengths, bind_to_maps
from splitkv.kernels.host.partition import grid
from splitkv.kernels.host.tensor_maps import JUST_ADDRESSES, TensorMaps, Tile, tile_of
from splitkv.kernels.limits.hopper_decode_split import (
    NAME,
    bulk_bytes,
    exchange_bytes,
    most_registers,
    refit,
    ring_of,
    rounds_rows,
    unfit,
    variant_of,
)
from splitkv.kernels.tile.strides import Strides

if TYPE_CHECKING:
    from splitkv.kernels.host.step import StepLauncher

DEQUANTIZE = {"as_is": None, "int8": from_int8, "fp8": from_e4m3, "fp8_e5m2": from_e5m2}
BOX_AT_END = 16
"""Keys that programs by a schedule copy at a time: what lies behind the last one is left out."""
ENTRIES = "all_warps", "producer", "wgmma", "append", "persistent"


def entry_point(name: str) -> Any:
    """The kernel of this name among ENTRIES, which is imported when one is first bound."""
    if name == "all_warps":
        from splitkv.kernels.hopper.decode.kernel_all_warps import decode_all_warps

        return decode_all_warps
    if name == "producer":
        from splitkv.kernels.hopper.decode.kernel_producer import decode_producer

        return decode_producer
    if name == "wgmma":
        from splitkv.kernels.hopper.decode.kernel_wgmma import decode_wgmma

        return decode_wgmma
    if name == "append":
        from splitkv.kernels.hopper.decode.kernel_append import decode_append

        return decode_append
    from splitkv.kernels.hopper.decode.kernel_persistent import decode_walk

    return decode_walk


def mainloop_of(config: Config) -> Any:
    """The device function of the loop over keys, by the rows of a tile."""
    if config.tile_m != WIDE:
        return mma_loop
    from splitkv.kernels.hopper.decode.wgmma_loop import wgmma_loop

    return wgmma_loop


def find_share_of(config: Config) -> Any:
    """The device function by which a program finds its share of a step; None: there is none."""
    if config.schedule not in SCHEDULED:
        return None
    from splitkv.kernels.tile.step_share import RULES

    return RULES[config.schedule].find


def entry_of(config: Config, variant: HopperDecode) -> str:
    """The entry point of a plan: one of ENTRIES."""
    if config.schedule in SCHEDULED:
        return "persistent"
    if config.appends:
        return "append"
    if config.tile_m == WIDE:
        return "wgmma"
    return "producer" if variant.load == "producer_warp" else "all_warps"


def type_of_keys(problem: Problem) -> Any:
    """The type in which keys are multiplied: int8 where q may be rounded to it, else of 16 bits."""
    if problem.codec == AS_IS:
        return {"bfloat16": gl.bfloat16, "float16": gl.float16}[problem.dtype]
    return gl.int8 if rounds_rows(problem) else gl.float16


def box_of(problem: Problem, config: Config) -> int:
    """Keys that a copy by TMA brings."""
    box = box_rows(problem, config.tile_n)
    if config.schedule in SCHEDULED and not isinstance(problem.place, Paged):
        return min(box, BOX_AT_END)
    return box


def as_stored(x: Any, config: Config) -> Any:
    """K or V as TMA copies it: for mma, two elements of 8 bits are one of 16."""
    return x if config.tile_m == WIDE else pairs_of(x)


def device_config(
    plan: Plan, variant: HopperDecode, dims: tuple[int, int], tokens: TokenTiles
) -> DecodeConfig:
    """The compile-time values of a plan; dims: columns of K and of V as they are stored."""
    problem, config = plan.problem, plan.config
    wide, cluster = config.tile_m == WIDE, config.merge == "cluster"
    allocate = allocate_rows if variant.load == "gather" else allocate_boxes
    rows = min(config.tile_m, problem.rows)
    exchanged = exchange_bytes(rows, problem.head_dim_v, config.num_splits)
    return DecodeConfig(
        group=problem.group,
        page_size=problem.place.page_size if isinstance(problem.place, Paged) else 1,
        batch_p2=batch_p2(plan),
        tile_m=config.tile_m,
        used_rows=8 if config.tile_m == 16 and problem.rows <= 8 else config.tile_m,
        tile_n=config.tile_n,
        num_stages=config.num_stages,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dim_k=dims[0],
        dim_v=dims[1],
        dequantize=DEQUANTIZE[problem.codec.name],
        k_type=type_of_keys(problem),
        load=variant.load,
        ring=ring_of(problem, config),
        key_scales=variant.key_scales,
        scale_heads=problem.num_kv_heads if variant.key_scales == "bulk" else 0,
        predecessor="running" if problem.early_kv else "done",
        cluster_size=config.num_splits if cluster else 0,
        cluster_rows=rows if cluster else 0,
        exchanged_bytes=exchanged if cluster else 0,
        rotary_dim=tokens.rotary_dim,
        rotary_pair=tokens.pair,
        tile_t=tokens.tile_t,
        find_share=find_share_of(config),
        split_tiles=config.split_tiles if config.schedule in SCHEDULED else 0,
        allocate=allocate_panels if wide else allocate,
        load_queries=load_wgmma_queries if wide else load_mma_queries,
        mainloop=mainloop_of(config),
    )


def shared_behind(problem: Problem, config: Config, variant: HopperDecode) -> int:
    """Bytes of shared memory behind all that Triton gives out: see primitives/cluster.py."""
    behind = 0
    if config.merge == "cluster":
        rows = min(config.tile_m, problem.rows)
        behind += exchange_bytes(rows, problem.head_dim_v, config.num_splits)
    if variant.key_scales == "bulk":
        behind += bulk_bytes(config.num_stages, config.tile_n, problem.num_kv_heads)
    return behind


def fixed_arguments_of(
    entry: str, plan: Plan, variant: HopperDecode, operands: Operands
) -> dict[str, Any]:
    """The run-time arguments of an entry point that never change from call to call."""
    mask, appends = plan.problem.mask, plan.config.appends
    if entry == "persistent":
        from splitkv.kernels.host.step import step_arguments

        arguments = step_arguments(plan, operands)
    else:
        arguments = split_arguments(plan, operands)
    arguments |= {
        "left": mask.left,
        "right": mask.right,
        "sink_tokens": mask.sink_tokens if mask.num_bands == 2 else None,
    }
    if entry in ("all_warps", "append", "persistent"):
        gathered = appends or variant.load == "gather"
        for name, x in (("k_strides", operands.k), ("v_strides", operands.v)):
            arguments[name] = Strides(*x.stride()[:3]) if gathered else None
    if entry == "producer":  # splits of one sequence, by the even rule
        for name in ("batch", "size", "programs"):
            del arguments[name]
    if entry == "append":
        del arguments["stride_sn"]
        arguments |= fixed_arguments(operands)
    return arguments


def bind_split(plan: Plan, operands: Operands) -> SplitKernel:
    """The entry point of a plan, bound to it and to a memory layout."""
    problem, config = plan.problem, plan.config
    variant = variant_of(plan)
    entry, wide = entry_of(config, variant), config.tile_m == WIDE
    kernel, producer = entry_point(entry), variant.load == "producer_warp"
    run_time = fixed_arguments_of(entry, plan, variant, operands)
    dims = tuple([as_stored(x, config).shape[3] for x in (operands.k, operands.v)])
    tokens = token_tiles(operands) if config.appends else TokenTiles()
    per_call: tuple[str, ...] = PER_CALL_OF_APPEND if config.appends else PER_CALL
    programs = grid(problem, config)
    if entry == "persistent":
        from splitkv.kernels.host import step

        per_call, programs = step.per_call_of(plan), step.grid_of(plan)
        if config.appends:  # one token a warp: it has few registers
            from splitkv.kernels.hopper.decode.walk_roles import WRITING_WARPS

            tokens = tokens._replace(tile_t=WRITING_WARPS.value)
    names = tuple(x for name in per_call for x in (KV_NAMES if name == "kv" else (name,)))
    options = compile_options(config.num_warps)
    if producer:
        options["maxnreg"] = most_registers(problem, config, plan.device)
    if problem.early_kv or entry == "persistent":
        options["launch_pdl"] = True
    cluster_size = config.num_splits if config.merge == "cluster" else 1
    clusters = (1, *programs[1:]) if config.merge == "cluster" else programs
    behind = shared_behind(problem, config, variant)
    box = box_of(problem, config)
    halves = wide and box < config.tile_n

    # each when it is asked for, as `combine`, and without the operands, which they would keep
    @cache
    def fixed() -> dict[str, Any]:
        return run_time | {"CONFIG": device_config(plan, variant, dims, tokens)}

    @cache
    def tail() -> CacheTail:
        return CacheTail(kernel, names, fixed())

    def read_by(x: Any) -> Any:
        x = as_stored(x, config)
        return x if variant.load == "gather" else boxes_of(x, box, halves, producer)

    def launch(arguments: dict[str, Any]) -> Any:
        named = {name: x for name, x in arguments.items() if name != "kv"}
        kv = arguments["kv"]
        named |= {"k": read_by(kv.k_ptr), "v": read_by(kv.v_ptr), "table_ptr": kv.table_ptr}
        ordered = in_order(kernel, named | fixed())
        if not behind:
            return kernel[programs](*ordered, **options)
        compiled = kernel.warmup(*ordered, grid=programs, **options)
        if compiled is None:  # whoever looks at what is compiled has declined it
            return None
        clustered = in_clusters(compiled, cluster_size, behind)
        clustered[clusters](*ordered)
        return clustered

    k_layout, v_layout = (layouts_of(x, producer, pairs=not wide) for x in (operands.k, operands.v))
    of_k, of_v = ((x.shape[1], x.stride()) for x in (operands.k, operands.v))

    @cache
    def tiles_of(compiled: Any) -> tuple[Tile, Tile]:
        return tile_of(compiled, 0), tile_of(compiled, 1)

    def relaunch(compiled: Any) -> Launch | None:
        launch_with = bind_to_maps(compiled, clusters)
        if launch_with is None:
            return None
        maps: list[Any] = [JUST_ADDRESSES, JUST_ADDRESSES]
        if variant.load != "gather":
            layouts = k_layout(*of_k), v_layout(*of_v)
            maps = [TensorMaps(t, *x) for t, x in zip(tiles_of(compiled), layouts, strict=True)]
        return holding(compiled, launch_with(tail().arguments, *maps))

    def at_lengths(compiled: Any) -> CacheLaunch | None:
        if variant.load == "gather":
            return None
        tiles = k_tile, v_tile = tiles_of(compiled)
        launch = bind_to_lengths(compiled, clusters, tiles)
        if launch is None:
            return None
        around, around_length = tail().around, tail().around_length
        alike = problem.head_dim == problem.head_dim_v and k_tile == v_tile
        rooms: dict[CacheLayout, CacheMaps] = {}

        def layout_at(here: CacheLayout, room: int) -> CacheMaps:
            if room:
                here = room, here[1]
                known = rooms.get(here)
                if known is not None:
                    return known
            length, (k, v, _) = here
            of_k = of_v = k_layout(length, k)
            if not alike or k != v:
                of_v = v_layout(length, v)
            maps: CacheMaps = around or around_length(here), {}, (of_k, of_v)
            if room:
                if len(rooms) >= MAX_ROOMS:
                    rooms.clear()
                rooms[here] = maps
            return maps

        return CacheLaunch(layout_at, tail().told(launch))

    def told_apart() -> Hashable:
        merged = partial_rows(plan) > 0, cluster_size, behind, box, halves
        return tail().variant(), *sorted(options.items()), *merged

    return SplitKernel(launch, relaunch, at_lengths, told_apart)


KV_NAMES = "k", "v", "table_ptr"
MAX_ROOMS = 64  # of a bucket of lengths; past it they start afresh


def bind(plan: Plan, operands: Operands) -> DecodeLauncher | StepLauncher:
    """The kernel and what merges its partials bound to one plan and one memory layout."""
    if plan.config.schedule in SCHEDULED:
        from splitkv.kernels.host.step import StepLauncher

        return StepLauncher(plan, operands, bind_split(plan, operands), rebind)
    return DecodeLauncher(plan, operands, bind_split(plan, operands), rebind)


def rebind(plan: Plan, operands: Operands) -> Any:
    """A launcher for tensors that the plan does not fit; None where it does."""
    other = refit(plan, operands)
    if other == plan:
        return None
    if other.kernel == NAME:
        return bind(other, operands)
    warnings.warn(f"this call runs on {other.kernel}: {unfit(operands)[0]}", stacklevel=2)
    from splitkv.kernels import decode_split

    return decode_split.bind(other, operands)
