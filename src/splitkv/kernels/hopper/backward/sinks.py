"""Sums of ds that `hopper_backward` adds to the gradient of sink logits, in fp32.

A thread sums up its own numbers, each row's times the weight that it has in -dsink, and leaves
one number a head in memory, each in a place of its own: no thread asks another, and the sum is the
same in every run. What rows have to add is in kernels/backward/rows.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def threads_with_ds(head_dim):
    """Computes how many threads of a program have ds, each of which leaves a sum for dsink."""
    return 256 if head_dim <= 128 else 128


@gluon.jit
def store_no_sinks(ptr, stride, CONFIG: gl.constexpr):
    """Stores the sums for dsink of a program that visits no rows: 0 for each head of the group."""
    COUNT: gl.constexpr = threads_with_ds(CONFIG.head_dim)
    offs = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for g in range(CONFIG.group):
        gl.store(ptr + gl.cast(g, gl.int64) * stride + offs, gl.zeros_like(offs).to(gl.float32))


@gluon.jit
def start_sinks(out, like, W: gl.constexpr):
    """Makes (sums, places) of consumer W before the program's first head: what each of its threads
    adds to dsink, and pointers to where that goes; `like` is as ds [64, rows]."""
    sums = gl.zeros_like(sums_of_ds_threads(like))
    places = sums
    if out.sink_ptr is not None:
        layout: gl.constexpr = sums.type.layout
        lanes = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))[:, None] * 4
        offs = lanes + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
        places = out.sink_ptr + W * 128 + offs
    return sums, places


@gluon.jit
def sums_of_ds_threads(x):
    """Computes the sum of what each thread has of x [64, rows], as [32, 4]."""
    parts = x.reshape([4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(gl.sum(parts, 3), 4), 1).reshape([32, 4])


@gluon.jit
def add_to_sinks(sinks, out, ds, weight, end):
    """Updates (sums, places) by ds [64, rows] of a tile of rows, whose weights in -dsink are
    `weight`.

    Where a head's rows `end` its sums go to memory and those of the next begin. No branch: the
    tiles' addresses would not stay in uniform registers.
    """
    sums, places = sinks
    if out.sink_ptr is not None:
        ROW: gl.constexpr = gl.SliceLayout(0, ds.type.layout)
        sums -= sums_of_ds_threads(ds * weight.load(ROW)[None, :])
        gl.store(places, sums, mask=end)
        sums = gl.where(end, 0.0, sums)
        places += gl.where(end, out.sink_head, 0)
    return sums, places
