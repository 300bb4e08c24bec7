"""Online softmax in base 2, and the one place where it is finished."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(m):
    """A row maximum fit to subtract: 0 where the row has seen no key, so exp2 gives 0, not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def weights(m, s):
    """(m, p, shrink) after scores s [rows, keys]: p are their weights, and what was summed up under
    the maximum before is times `shrink`."""
    m_new = tl.maximum(m, tl.max(s, 1))
    top = finite_or_zero(m_new)
    p = tl.exp2(s - top[:, None])
    shrink = tl.exp2(m - top)
    return m_new, p, shrink


@triton.jit
def finish(acc, m, l, sink_log2):
    """Output rows and natural LSE from (acc [rows, D], m [rows], l [rows]), m in base 2.

    The sink logit (base 2, [rows] or None) joins the denominator and adds nothing to the output;
    the LSE leaves it out. A row that saw no key gives 0 and -inf.
    """
    lse = (m + tl.log2(l)) * 0.6931471805599453
    if sink_log2 is None:
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    else:
        out = acc * factor_beside_sink(m, l, sink_log2)[:, None]
    return out, lse


@triton.jit
def factor_beside_sink(m, l, sink_log2):
    """The factor by which sums are multiplied at the end."""
    top = finite_or_zero(tl.maximum(m, sink_log2))
    shrink = tl.exp2(m - top)
    total = l * shrink + tl.exp2(sink_log2 - top)
    return shrink / tl.where(total == 0.0, 1.0, total)
