"""A call of `append`: its tensors, and what it computes, in PyTorch operations.

`append_in_torch` is the definition of the kernel in `kernels/append.py`, and what a CPU runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from splitkv.rounding import is_of_tokens, quantize, scale_of

Result = tuple[Tensor | None, Tensor | None]
"""(q_out, after): the rotated queries, and how many keys there are now; None without q, slots."""


class Rotary(NamedTuple):
    """A rotary embedding: cos and sin [seqlen_ro, rotary_dim / 2].

    start         [batch] int32, the first new token's row of cos; None: the keys before it
    interleaved   pairs are (0, 1), (2, 3), ...; otherwise (0, rotary_dim / 2), ...
    q_step        1: query j is rotated as token j; 0: all queries as token 0
    """

    cos: Tensor
    sin: Tensor
    start: Tensor | None = None
    interleaved: bool = True
    q_step: int = 1


class Append(NamedTuple):
    """One call: new tokens and where they go. Checked by whoever makes it.

    k, v                    [batch, seqlen_new, heads, dim]; packed [total, heads, dim] with
                            cu_seqlens_new [batch + 1], or each token a sequence of its own
    before, rows, leftpad   [batch] int32: keys there are; the row of the cache or of the page
                            table, None: b; padding before the keys, None: none
    slots                   [tokens] int32 or int64, instead of before, rows and page_table
    q                       as k, packed with cu_seqlens_q; None unless it is to be rotated
    k_scale, v_scale        fp32, of caches in 8 bits: of the caches' shape without the last
                            dimension, which is written with each token; or [1], [heads] or
                            [batch, heads], which is what tokens are divided by
    k_mean                  [heads, head_dim] fp32, contiguous: subtracted from keys as they are
                            stored, after the rotation
    """

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    before: Tensor | None = None
    rows: Tensor | None = None
    leftpad: Tensor | None = None
    page_table: Tensor | None = None
    slots: Tensor | None = None
    cu_seqlens_new: Tensor | None = None
    q: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_mean: Tensor | None = None
    rotary: Rotary | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, given or not, in an order that never changes."""
        rotary = (None, None, None) if self.rotary is None else self.rotary[:3]
        return (*self[:-1], *rotary)

    @property
    def given(self) -> list[Tensor]:
        """The tensors that are given."""
        return [x for x in self.tensors if x is not None]

    @property
    def batch(self) -> int:
        """Sequences; with slots every token is one."""
        return self.k.shape[0] if self.before is None else self.before.shape[0]

    @property
    def tokens_a_sequence(self) -> int:
        """New tokens of a sequence; of packed ones on average, rounded up."""
        if self.k.dim() == 4:
            return int(self.k.shape[1])
        return -(-int(self.k.shape[0]) // max(self.batch, 1))

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        if self.page_table is None:
            return self.k_cache.shape[1]
        return self.page_table.shape[1] * self.k_cache.shape[1]


@torch.no_grad()
def append_in_torch(call: Append) -> Result:
    """Write into the caches of a call; (q_out, after)."""
    x = call
    page_size, before = x.k_cache.shape[1], x.before
    sequence, i = _owners(x.k, x.cu_seqlens_new)
    if x.slots is not None:
        place = x.slots.long()
        outer, inner = place // page_size, place % page_size
    else:
        assert before is not None
        row = sequence if x.rows is None else x.rows.long()[sequence]
        place = before.long()[sequence] + i
        place = torch.where(place < x.capacity, place, -1)
        outer, inner = row, place
        if x.page_table is not None:
            page = (place // page_size).clamp(min=0)
            outer, inner = x.page_table.long()[row, page], place % page_size
    ok = (place >= 0) & (outer >= 0) & (outer < x.k_cache.shape[0])
    if x.cu_seqlens_new is not None:  # packed tokens after the last sequence are nobody's
        ok &= torch.arange(ok.shape[0], device=ok.device) < x.cu_seqlens_new[-1]
    start = before if x.rotary is None or x.rotary.start is None else x.rotary.start
    k, v = x.k.reshape(-1, *x.k.shape[-2:]), x.v.reshape(-1, *x.v.shape[-2:])
    q_out = None
    if x.rotary is not None:
        assert start is not None
        k = _rotate(k, start.long()[sequence] + i, x.rotary)
        if x.q is not None:
            sequence_q, j = _owners(x.q, x.cu_seqlens_q)
            turned = start.long()[sequence_q] + x.rotary.q_step * j
            q_out = _rotate(x.q.reshape(-1, *x.q.shape[-2:]), turned, x.rotary).view(x.q.shape)
    if x.k_mean is not None:
        k = k.float() - x.k_mean
    for new, cache, scale in ((k, x.k_cache, x.k_scale), (v, x.v_cache, x.v_scale)):
        if scale is None:
            cache[outer[ok], inner[ok]] = new[ok]
            continue
        if is_of_tokens(scale, cache):
            by = scale_of(new, (2,), cache.dtype)
            scale[outer[ok], inner[ok]] = by[ok][..., 0]
        else:
            by = (scale if scale.dim() < 2 else scale[sequence])[..., None]
        bits = quantize(new, by, cache.dtype).view(torch.uint8)
        cache.view(torch.uint8)[outer[ok], inner[ok]] = bits[ok]
    if before is None:
        return q_out, None
    new = x.k.shape[1] if x.cu_seqlens_new is None else x.cu_seqlens_new.diff()
    after = (before + new).clamp(max=x.capacity)
    return q_out, (after if x.leftpad is None else after - x.leftpad).int()


def _owners(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Finds the sequence of each of all tokens of x and its index in that."""
    seqlen = x.shape[1] if x.dim() == 4 else 1
    n = torch.arange(x.shape[0] * seqlen, device=x.device)
    if cu_seqlens is None:
        return n // max(seqlen, 1), n % max(seqlen, 1)
    last = cu_seqlens.shape[0] - 2
    sequence = torch.searchsorted(cu_seqlens[1:].long(), n, right=True).clamp(max=last)
    return sequence, n - cu_seqlens.long()[sequence]


def _rotate(x: Tensor, t: Tensor, rotary: Rotary) -> Tensor:
    """x [tokens, heads, dim] rotated by rows `t` [tokens] of cos and sin."""
    half = rotary.cos.shape[1]
    known = (t >= 0) & (t < rotary.cos.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (y[torch.where(known, t, 0)].to(wide)[:, None] for y in (rotary.cos, rotary.sin))
    turned = x[..., : 2 * half].to(wide)
    if rotary.interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, -1).flatten(-2) if rotary.interleaved else torch.cat(pair, -1)
    out = x.clone()
    out[..., : 2 * half] = torch.where(
        known[:, None, None], turned.to(x.dtype), out[..., : 2 * half]
    )
    return out
