"""The epilogue of decode on Hopper: results, partials, or a merge inside a cluster."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.combine import PartRows, write_absent, write_part
from splitkv.kernels.hopper.decode.cluster_merge import ClusterPlace, merge_cluster
from splitkv.kernels.hopper.decode.layouts import scores_layout


@gluon.jit
def locate_partial_rows(slot, seqlen_q, CONFIG: gl.constexpr):
    """The rows [TILE_M] of the partials that a program stores."""
    S: gl.constexpr = scores_layout(CONFIG, gl.num_warps())
    rows = slot.to(gl.int64) * gl.minimum(CONFIG.tile_m, seqlen_q * CONFIG.group)
    rows += gl.arange(0, CONFIG.tile_m, layout=gl.SliceLayout(1, S))
    return rows


@gluon.jit
def mark_absent(output, rows, partial_rows):
    """Marks the partial of a split without keys as one that adds nothing."""
    partial = output.partial
    if partial is not None:
        write_absent(partial.m_ptr, partial.l_ptr, partial_rows, rows.ok, 0.0)


@gluon.jit
def per_row(x, LAYOUT: gl.constexpr):
    """Converts one number a row to the layout in which a thread has the rows of its
    accumulators."""
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def write_split(softmax, output, split, rows, partial_rows, CONFIG: gl.constexpr):
    """Writes the result of rows whose keys this program has all seen, else the partial.

    softmax   Softmax; output: Output; rows: QueryIndices; partial_rows: of `locate_partial_rows`
    """
    acc = softmax.acc
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    m, l = per_row(softmax.m, ROWS), per_row(softmax.l, ROWS)
    ok, slot_rows = per_row(rows.ok, ROWS), per_row(partial_rows, ROWS)
    t, head = per_row(rows.token, ROWS), per_row(rows.head, ROWS)
    of_sequence = split.sequence.to(gl.int64) * output.strides.b
    out_rows = of_sequence + t.to(gl.int64) * output.strides.t + head * output.strides.h
    first_head = split.sequence * output.num_kv_heads * CONFIG.group
    part_rows = PartRows(
        head=head,
        ok=ok,
        out_rows=out_rows,
        lse_rows=(first_head + head).to(gl.int64) * output.seqlen_q + t,
        slot_rows=slot_rows,
    )
    offs_v = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    write_part(
        output.final,
        output.partial,
        output.sink_ptr,
        acc,
        m,
        l,
        part_rows,
        offs_v,
        split.num_splits,
        acc.shape[1],
    )


@gluon.jit
def finish_split(softmax, output, work, split, row_tile, rows, partial_rows, CONFIG: gl.constexpr):
    """Merges the splits of a cluster, or writes what this program has."""
    if CONFIG.cluster_size:
        first_row = row_tile * CONFIG.tile_m
        place = ClusterPlace(work.split, split.sequence, split.kv_head, first_row)
        merge_cluster(softmax, output, place, rows.ok, CONFIG)
    else:
        write_split(softmax, output, split, rows, partial_rows, CONFIG)
