"""Products of tiles, summed up in fp32.

In fp32 a product is no more exact than its sum, and Triton makes each element as one chain of
multiply-adds. The rounding errors of a long chain grow with the partial sums along it: over 96
dimensions up to five times those of a library that adds up several chains.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def added_apart(x, y):
    """Computes x + y by an instruction that Triton does not fold into the product that made x,
    which would start its sum at y."""
    return tl.fma(x, tl.full(x.shape, 1.0, tl.float32), y)


@triton.jit
def add_product(acc, a, b):
    """acc + a @ b; in fp32 the sum over each tile by itself, not one over all tiles."""
    if a.dtype == tl.float32:
        acc = added_apart(acc, tl.dot(a, b, input_precision="ieee"))
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def add_product_compensated(acc, lost, a, b):
    """(acc + a @ b, what its rounding lost): in fp32 the next sum gets back what this one lost, so
    that errors do not grow with the number of tiles. Where a is not, `lost` is passed through."""
    if a.dtype == tl.float32:
        x = added_apart(tl.dot(a, b, input_precision="ieee"), -lost)
        total = acc + x
        lost = (total - acc) - x
        acc = total
    else:
        acc = tl.dot(a, b, acc)
    return acc, lost


@triton.jit
def empty_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Makes (sum, its rounding error) before the first product of tiles of the type of x: zeros;
    only fp32 keeps an error for each element."""
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    lost = tl.zeros([1], tl.float32)
    if x.dtype == tl.float32:
        lost = acc
    return acc, lost


@triton.jit
def halves(x):
    """The even and the odd columns of x [rows, DIM]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def row_product(a, b):
    """a [M, DIM] @ b [N, DIM].T; in fp32 up to four chains of at least 16 products."""
    if a.dtype == tl.float32 and a.shape[1] >= 32:
        a_even, a_odd = halves(a)
        b_even, b_odd = halves(b)
        if a.shape[1] >= 64:
            product = added_apart(_two_chains(a_even, b_even), _two_chains(a_odd, b_odd))
        else:
            product = added_apart(_chain(a_even, b_even), _chain(a_odd, b_odd))
    else:
        product = _chain(a, b)
    return product


@triton.jit
def _two_chains(a, b):
    a_even, a_odd = halves(a)
    b_even, b_odd = halves(b)
    return added_apart(_chain(a_even, b_even), _chain(a_odd, b_odd))


@triton.jit
def _chain(a, b):
    return tl.dot(a, tl.trans(b), input_precision="ieee")
