"""The records that travel through the kernels for whole sequences on Hopper.

Fields are tensors, pointers, TMA descriptors, shared memory or None; a field that is None is absent
from the machine code. The `*Config` records alone are known when a kernel is compiled.

Terms: a row tile is TILE_M packed rows of a sequence, row = token * packed_heads + head. An item is
one split of the keys of one row tile. A lane is what the row tiles of a sequence and its packed
heads have in common. A step multiplies one row tile by one tile of keys and one of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from splitkv.kernels.compile_time import CompileTimeRecord


class PrefillConfig(CompileTimeRecord):
    """The compile-time values of `hopper_prefill` and `hopper_prefill_half`.

    group          query heads a KV head; packed_heads: how many of them are packed into rows
    page_size      keys a page; 1 where keys are not in pages
    head_dim_v     columns of tiles of V, and of q and K but for head_dim_rest more of these
    columns        of these those that results have; the others TMA has filled with zeros
    tile_m         packed rows a row tile, 64 a warpgroup; tile_n: keys a tile
    mma_roles      warpgroups that multiply, each 64 rows of a row tile in a role of its own
    num_stages     tiles of K and of V that their rings hold
    q_stages       row tiles of q in shared memory
    out_stages     tiles of 64 rows in shared memory for out; 0: out takes the place of q
    mma_order      in_turns: warpgroups take turns at issuing products; any: whenever they can
    maxima         lazy: steps look for maxima where a weight is too large; each_tile: always
    issued_first   steps of the first item whose tiles are copied before warps have roles
    merge_splits, merge_rows   splits and rows that a program merges at a time, where the launch
                   that makes partials merges them
    dependents     when `combine` is launched: launched_first, when this grid starts; launched_last,
                   when its copies are issued; launched_after, when it is done
    """

    group: int
    packed_heads: int
    page_size: int
    head_dim_v: int
    columns: int
    head_dim_rest: int
    tile_m: int
    tile_n: int
    mma_roles: int
    num_stages: int
    q_stages: int
    out_stages: int
    mma_order: str
    maxima: str
    issued_first: int
    merge_splits: int
    merge_rows: int
    dependents: str


class QuantisedConfig(CompileTimeRecord):
    """The compile-time values of `hopper_prefill_quantised`; for the other names see PrefillConfig.

    warpgroups     that multiply; all of them are one role
    key_scales     per_key: every key has scales of its own; shared: the keys of a head share one
    k_type, v_type types in which K, as q, and V, as p, are multiplied
    program_items  numbered: programs find their items by number; by_grid: the place of a program
                   in the grid is its item, or the first of several
    cluster_size   programs that merge their splits as a cluster; 0: none do
    cluster_rows   rows that a sequence may have, of those of a row tile
    """

    group: int
    packed_heads: int
    page_size: int
    head_dim_v: int
    columns: int
    tile_m: int
    tile_n: int
    mma_roles: int
    warpgroups: int
    num_stages: int
    q_stages: int
    mma_order: str
    key_scales: str
    k_type: Any
    v_type: Any
    program_items: str
    issued_first: int
    cluster_size: int
    cluster_rows: int
    merge_splits: int
    merge_rows: int
    dependents: str


class Lengths(NamedTuple):
    """Where the tokens and keys of each sequence are, as pointers or None.

    cu_q_ptr, cu_k_ptr   [batch + 1] int32 of packed queries and keys
    lens_ptr             [batch] int32: keys of each sequence
    table_ptr            [batch, max_pages] int32
    items_ptr            [entries, 8] int32: a schedule of kernels/schedule_items.py
    """

    cu_q_ptr: Any
    cu_k_ptr: Any
    lens_ptr: Any
    table_ptr: Any
    items_ptr: Any


class ScalePointers(NamedTuple):
    """The fp32 scales of q, K and V, or None."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any


class KeySource(NamedTuple):
    """Where the keys of a sequence are, and how many.

    cu_ptr           [batch + 1] int32 of packed keys, or None; lens_ptr: [batch] int32, or None
    table_ptr        [batch, max_pages] int32, or None; stride_table: elements between sequences
    undefined_tail   not None: memory behind the last key may hold anything, NaN too
    seqlen_k         keys of each sequence where nothing else says
    ordered_values   not None: keys are in pages and V is not, [batch, keys, heads, dim]
    """

    cu_ptr: Any
    lens_ptr: Any
    table_ptr: Any
    stride_table: Any
    undefined_tail: Any
    seqlen_k: Any
    ordered_values: Any = None


class Splitting(NamedTuple):
    """How the keys of a row tile are split.

    num_splits   most splits of a row tile; None: its keys are one split
    split_tiles  tiles of keys a split; None: those of a row tile over num_splits
    max_tokens   tokens of the longest sequences whose keys are split
    items_ptr    not None: a schedule of kernels/schedule_items.py says what the items are, and how
                 many splits each row tile has; num_splits: partials that a lane has room for
    """

    num_splits: Any
    split_tiles: Any
    max_tokens: Any
    items_ptr: Any = None


class SequenceBatch(NamedTuple):
    """Facts that all items of a launch have in common.

    cu_q_ptr              [batch + 1] int32, or None: dense
    keys                  KeySource
    bounds, scoring       Bounds and Scoring of the mask and of scores
    splitting             Splitting
    seqlen_q              tokens of each sequence where dense
    total_q               tokens of all sequences where packed
    lane_heads            heads of q that are not packed into rows
    tiles, lanes          row tiles of a lane, and lanes; width: lanes that go together
    items                 row tiles of all lanes, and their further splits
    lazy_maxima           not None: steps look for a maximum only where a weight is too large
    scarce                not None: such steps need all registers, so what follows from these sizes
                          is computed anew wherever it is used: see `rematerialized`
    by_grid               not None: the place of a program in the grid says which item it has, as
                          split, lane of a sequence, sequence; dense, a lane has one row tile, and
                          `items` is how many sequences a program goes through, None: one
    """

    cu_q_ptr: Any
    keys: Any
    bounds: Any
    scoring: Any
    splitting: Any
    seqlen_q: Any
    batch: Any
    total_q: Any
    lane_heads: Any
    tiles: Any
    lanes: Any
    width: Any
    items: Any
    lazy_maxima: Any
    scarce: Any
    by_grid: Any = None


class Item(NamedTuple):
    """One split of the keys of one row tile.

    b         first coordinate of its rows: the sequence, 0 where packed
    sequence  index in the batch
    split     which split of the keys; by a schedule: its entry, which says so
    head      of q, the first of those packed into rows
    tile      row tile of the sequence
    first_q, len_q   first token in memory, and tokens, of the sequence; first_k, len_k: keys
    """

    b: Any
    sequence: Any
    split: Any
    head: Any
    tile: Any
    first_q: Any
    len_q: Any
    first_k: Any
    len_k: Any


class ItemTiles(NamedTuple):
    """The tiles of keys that an item multiplies.

    visit         Visit
    steps         their number, at least one; 0 of a split that the row tile does not have
    masked_steps  how many of them ask the mask: the first ones
    is_whole      whether these are all keys of the row tile
    """

    visit: Any
    steps: Any
    masked_steps: Any
    is_whole: Any


class PerOperand(NamedTuple):
    """One thing for each operand: TMA descriptors of [batch, tokens, heads, dim], with one sequence
    where packed and pages in the place of sequences; or shared memory, as boxes of TMA or as tiles
    [stages, rows or keys, dim].

    q_rest, k_rest   the columns of q and K from head_dim_v on, or None
    """

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    out: Any


class OperandMemory(NamedTuple):
    """Shared memory for rows of q and for rings of K and V, as boxes and as tiles: the fields of
    PerOperand that every kernel has, as a device function cannot return None among others."""

    q_boxes: Any
    q: Any
    k_boxes: Any
    k: Any
    v_boxes: Any
    v: Any


class RingBarriers(NamedTuple):
    """Barriers of the rings of q, K and V, of stages that have arrived (full) or may be overwritten
    (empty): the fields of PipelineBarriers that every kernel has."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class PipelineBarriers(NamedTuple):
    """Barriers between the roles: what has arrived (full), what may be overwritten (empty).

    mma_turns   not None: warpgroups take turns at issuing products
    named       NamedBarriers of `hopper_prefill_quantised` in the place of k_full, k_empty and
                v_empty; or None
    """

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    mma_turns: Any
    named: Any


class OperandScales(NamedTuple):
    """Scales of operands in 8 bits; all None of others.

    q_ptr, k_ptr, v_ptr   in memory; q_ptr None: q has none
    q, k, v               Strides of each, 0 along what has one scale
    unrounded_q           rows of q as they came, still to be rounded, in shared memory
                          [roles, ROWS, dim]; or None

    Where every key has scales of its own, also those of a step, in shared memory. With V in 8 bits:
    of_k [stages, TILE_N, 2], the scale of a key and the logarithm of that of its value, and
    `inverse` [stages, TILE_N], 1 / that of its value. With V that is dequantized: of_k
    [stages, TILE_N] in the order of `key_at`; of_v likewise, by keys, in fp16 and relative to the
    largest of the tile, by which values are multiplied; and of_tile [stages * 2, 1], the logarithm
    of that largest one, and 1 / it.
    """

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    q: Any
    k: Any
    v: Any
    of_k: Any
    of_v: Any
    of_tile: Any
    inverse: Any
    unrounded_q: Any


class TileCopy(NamedTuple):
    """A TMA descriptor, and the shared memory that it fills, as boxes and as tiles."""

    desc: Any
    boxes: Any
    tiles: Any


class Loads(NamedTuple):
    """Inputs of the load role.

    batch      SequenceBatch
    maps       PerOperand: TMA descriptors; boxes: shared memory as boxes; tiles: as tiles
    barriers   PipelineBarriers
    """

    batch: Any
    maps: Any
    boxes: Any
    tiles: Any
    barriers: Any


class ConvertRing(NamedTuple):
    """Tiles as they arrive, and those made of them; all None where there are none to be made.

    stored       [stages * pieces of a tile, keys, columns]: where tiles arrive, of 16 bits and
                 PART keys for `transpose`
    ready        what is made of them: tiles to be dequantized into, or
                 [stages * pieces, dim, PART // 2] of 16 bits for `transpose`
    full, empty  barriers of `stored`; ready_full: of `ready`, or None
    """

    stored: Any
    ready: Any
    full: Any
    empty: Any
    ready_full: Any


class ConvertRings(NamedTuple):
    """Rings of the convert role.

    k_full   barriers that keys have arrived
    k, v     ConvertRing of keys, of None where they are multiplied as they are stored, and of V
    """

    k_full: Any
    k: Any
    v: Any


class Converts(NamedTuple):
    """Inputs of the convert role.

    batch    SequenceBatch
    rings    ConvertRings
    scales   OperandScales
    named    NamedBarriers of primitives/named_barriers.py
    """

    batch: Any
    rings: Any
    scales: Any
    named: Any


class InKernelMerge(NamedTuple):
    """How the launch that makes partials merges them: the counters of tile/merge.py, None:
    `combine` merges; Strides of out."""

    count_ptr: Any
    out_strides: Any


class Results(NamedTuple):
    """Where results go: out with TMA or, by token and head, as `stride_t` says; lse by sequence and
    head; sink_ptr [num_heads], or None; the Partial of kernels/combine.py, or None: one split."""

    out_ptr: Any
    lse_ptr: Any
    sink_ptr: Any
    partial: Any
    merging: Any
    stride_t: Any
    stride_lse_b: Any
    stride_lse_h: Any


class PrefillProgram(NamedTuple):
    """State that the roles of a program share.

    batch      SequenceBatch
    maps       PerOperand: TMA descriptors; boxes: shared memory as boxes; tiles: as tiles
    scales     OperandScales
    barriers   PipelineBarriers
    results    Results
    """

    batch: Any
    maps: Any
    boxes: Any
    tiles: Any
    scales: Any
    barriers: Any
    results: Any


class Progress(NamedTuple):
    """The work that a role has done before an item: steps of all items, and items that had any."""

    steps: Any
    items: Any


class RowScales(NamedTuple):
    """Scales that are read before an item begins: those of its rows of q [ROWS], and the scale
    of K that all keys share; 1 where there are none. Both without meaning where nothing has 8 bits.
    """

    of_rows: Any
    k_scale: Any


class Step(NamedTuple):
    """One tile of keys: its number over all items of a program, the tile of the sequence, and
    whether a row may see only a part of it."""

    n: Any
    tile: Any
    masked: Any


class RunningSoftmax(NamedTuple):
    """The softmax of a warpgroup's rows between two steps.

    m     [ROWS] in base 2, what weights are relative to
    l     [ROWS, 4] sums of weights, of each of four threads that have a row
    acc   [ROWS, DIM_V] without the values of the last step
    p     [ROWS, TILE_N] weights of the last step, still to be multiplied with its values
    """

    m: Any
    l: Any
    acc: Any
    p: Any


class TileSoftmax(NamedTuple):
    """The softmax of one tile of keys.

    weights   [ROWS, TILE_N] in fp32; sums: [ROWS, 4], of each of four threads that have a row
    m         [ROWS] in base 2, what weights are relative to
    shrink    [ROWS] by what the sums before are multiplied
    """

    weights: Any
    sums: Any
    m: Any
    shrink: Any


class Maxima(NamedTuple):
    """The maxima that weights of 8-bit steps are relative to.

    m        [ROWS] in base 2
    top      [ROWS] the largest m
    settle   not 0: the next step looks for maxima
    """

    m: Any
    top: Any
    settle: Any


class ScaledRows(NamedTuple):
    """The rows of a role: by what their products are multiplied to be scores, and their positions
    among the keys; [ROWS] each."""

    factor: Any
    pos: Any


class ScaledTile(NamedTuple):
    """The softmax of one tile of keys in 8 bits.

    p, sums   [ROWS, TILE_N] weights as products take them, and [ROWS, 4] their sums
    maxima    Maxima that they are relative to
    shrink    Shrink
    """

    p: Any
    sums: Any
    maxima: Any
    shrink: Any


class ScaledSoftmax(NamedTuple):
    """The softmax of a role's rows between two steps.

    m        [ROWS] in base 2, what weights are relative to
    p        [ROWS, TILE_N] weights of the last step, still to be multiplied with its values
    l        [ROWS, 4] sums of weights, of each of four threads that have a row
    top, settle   as in Maxima
    shrink   Shrink of the last step
    acc      [ROWS, DIM_V]; where p is of 8 bits without the last step
    """

    m: Any
    p: Any
    l: Any
    top: Any
    settle: Any
    shrink: Any
    acc: Any


class LastProduct(NamedTuple):
    """The softmax of an item whose last product p @ v is under way.

    acc       [ROWS, DIM_V] what that product is added to outside the tensor cores; or the product
    product   [ROWS, DIM_V]
    l, m      [ROWS], m in base 2
    shrink    Shrink of the last step
    v_scale   the scale that all values share
    """

    acc: Any
    product: Any
    l: Any
    m: Any
    shrink: Any
    v_scale: Any


class Shrink(NamedTuple):
    """[ROWS] each: by what the sums before a step are multiplied, and its own product p @ v."""

    before: Any
    own: Any


class Half(NamedTuple):
    """Half of the columns of a softmax that is not finished: acc [ROWS, half of DIM_V]; l and m
    [ROWS] of all columns, m in base 2."""

    acc: Any
    l: Any
    m: Any


class PairSums(NamedTuple):
    """The two programs of a cluster together: l and m [ROWS]; the weights [ROWS] of the own sums
    and of those of the other program; and where these are in shared memory."""

    l: Any
    m: Any
    weight: Any
    weight_other: Any
    received: Any


class HalfRows(NamedTuple):
    """Where half of the columns of out [ROWS, half of DIM_V] go; of each row [ROWS] whether it
    exists, its head and its place in lse."""

    ok: Any
    head: Any
    out_ptrs: Any
    lse_rows: Any
