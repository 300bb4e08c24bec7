"""The records that travel through the backward for any GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from splitkv.kernels.compile_time import CompileTimeRecord

SIZES = (  # arguments whose values are no reason to compile again
    *("left", "right", "sink_tokens", "chunk", "seqlen_q", "seqlen_k", "batch", "num_kv_heads"),
    *("total_q", "total_k", "stride_slope", "tiles", "lanes", "width", "split_tiles"),
    *("row_splits", "clear_blocks", "sink_columns", "stride_lse_b", "stride_lse_h"),
    *("stride_stat_b", "stride_stat_h", "sink_programs", "sink_sequences", "sink_lanes"),
    *("sink_numbers", "split_programs", "num_heads"),
)


class GradientTensors(NamedTuple):
    """q, k, v, the gradient of out, and those to find; or the Strides of each."""

    q: Any
    k: Any
    v: Any
    grad: Any
    dq: Any
    dk: Any
    dv: Any


class Saved(NamedTuple):
    """Tensors that a forward keeps for its backward, in this order; seed: of dropout. Those of
    the last five that are not there may be left out behind those that are."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    sink_logits: Any = None
    alibi_slopes: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seed: Any = None


class Gradients(NamedTuple):
    """The gradients of a call, as q, k, v, sink logits [num_heads] and ALiBi slopes; None: not
    wanted."""

    dq: Any
    dk: Any
    dv: Any
    dsink: Any
    dslopes: Any


class Stats(NamedTuple):
    """Pointers to rows [sequences, num_kv_heads, tokens, group] fp32; packed sequences are one.

    total       the total of the softmax in base 2, inf where a row sees no key
    delta       see kernels/backward
    sink        p_sink, which a row's part of dsink takes the place of; None: not wanted
    slope       what ds add up to but for the rounding of out, to be replaced by a row's part of
                dslope; None: not wanted
    weight      the weight of a row's ds in -dsink; None: not wanted
    sink_sums   [num_heads, columns] fp32, the parts of dsink where every head is a group: those of
                row tiles of all sequences, then as many as the kernels after have; or None
    """

    total: Any
    delta: Any
    sink: Any
    slope: Any
    weight: Any = None
    sink_sums: Any = None


class BackwardConfig(CompileTimeRecord):
    """The compile-time values of `backward_keys` and `backward_queries`.

    group          query heads a KV head
    dim, dim_v     columns of tiles: head_dim and head_dim_v, padded
    offset_type    the type of offsets inside a tile of the other side
    """

    group: int
    head_dim: int
    head_dim_v: int
    dim: int
    dim_v: int
    tile_m: int
    tile_n: int
    num_stages: int
    offset_type: Any
