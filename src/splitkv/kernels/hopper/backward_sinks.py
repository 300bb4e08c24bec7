"""What `hopper_backward` adds to the gradient of sink logits: sums of ds, in fp32.

A thread sums up its own numbers, each row's times what the softmax gives the sink in it, and leaves
one number a head in memory, each in a place of its own: no thread asks another, and the sum is the
same in every run. What rows have to add is in kernels/backward_rows.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def threads_with_ds(head_dim):
    """How many threads of a program have ds, each of which leaves a sum for dsink."""
    return 256 if head_dim <= 128 else 128


@gluon.jit
def put_no_sinks(ptr, stride, GROUP: gl.constexpr, KEY_DIM: gl.constexpr):
    """The sums for dsink of a program that visits no rows: 0 for each head of the group."""
    COUNT: gl.constexpr = threads_with_ds(KEY_DIM)
    offs = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for g in range(GROUP):
        gl.store(ptr + gl.cast(g, gl.int64) * stride + offs, gl.zeros_like(offs).to(gl.float32))


@gluon.jit
def sink_weights(inputs, g, total):
    """What the softmax gives the sink of head g in rows of such totals; 0 where they see no key."""
    sink = gl.load(inputs.sink_ptr + g).to(gl.float32) * 1.4426950408889634
    return gl.exp2(sink - total)


@gluon.jit
def start_sinks(out, like, W: gl.constexpr):
    """(sums, places) of consumer W before the program's first head: what each of its threads adds
    to dsink, and pointers to where that goes; `like` ds [64, rows]."""
    sums = gl.zeros_like(sums_of_warpgroup(like))
    places = sums
    if out.sink_ptr is not None:
        layout: gl.constexpr = sums.type.layout
        lanes = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))[:, None] * 4
        offs = lanes + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
        places = out.sink_ptr + W * 128 + offs
    return sums, places


@gluon.jit
def sums_of_warpgroup(x):
    """[32, 4]: the sum of what each thread has of x [64, rows]."""
    parts = x.reshape([4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(gl.sum(parts, 3), 4), 1).reshape([32, 4])


@gluon.jit
def add_sinks(sinks, out, ds, p_sink, end):
    """(sums, places) after ds [64, rows] of a tile of rows, whose weights of the sink are `p_sink`.

    Where a head's rows `end` its sums go to memory and those of the next begin. No branch: the
    tiles' addresses would not stay in uniform registers.
    """
    sums, places = sinks
    if out.sink_ptr is not None:
        ROW: gl.constexpr = gl.SliceLayout(0, ds.type.layout)
        sums -= sums_of_warpgroup(ds * p_sink.load(ROW)[None, :])
        gl.store(places, sums, mask=end)
        sums = gl.where(end, 0.0, sums)
        places += gl.where(end, out.sink_head, 0)
    return sums, places
