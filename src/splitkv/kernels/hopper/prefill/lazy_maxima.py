"""The maxima that weights of 16 bits are relative to in the kernels for whole sequences: they are
raised only where they have to be, so that sums are rarely rescaled."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = gl.constexpr(15.5)  # in base 2, by which weights of 16 bits may be larger than 1
TOO_LARGE = gl.constexpr(0x47000000)  # the bits of 2 ** 15: fp16 still has weights of 2 ** SLACK


@gluon.jit
def raised_maxima(m, highest):
    """The maximum of each row after one more tile: mostly the one before, so that sums stay as they
    are. The true maximum is at most `SLACK` above it.

    A row that grows has by itself a weight for which maxima are looked for (`TOO_LARGE`), and one
    that does not keeps its bits: what other rows of a warp see makes no difference to it.
    """
    return gl.where(highest > m + SLACK, highest, m)
