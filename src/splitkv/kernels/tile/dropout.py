"""Which attention weights dropout keeps: a function of the seed and of the weight's place alone.

The bits are those of Philox 4x32 with seven rounds, the key being the seed and the counter (key
position, query token, sequence and head). So forward and backward agree whatever their tiles, and
a sequence is treated alike in any layout of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(seed_ptr, drop_below, offs_n, t, sequence_head):
    """The predicate of weights to keep, of the shape that the three counters broadcast to.

    drop_below  the probability of dropping times 2**24, in fp32
    """
    bits = tl.philox(tl.load(seed_ptr), offs_n, t, sequence_head, 0, n_rounds=7)[0]
    return (bits >> 8).to(tl.int32).to(tl.float32) >= drop_below
