"""Calls of split-KV decode whose kernels are compiled."""

from __future__ import annotations

from typing import Any

import torch

from splitkv.kernels.host.allocations import Allocations
from splitkv.kernels.host.launch import ENTER_HOOKS, EXIT_HOOKS, KNOBS, Launch, observed
from splitkv.kernels.host.map_launch import LengthLaunch


class Repeat(Allocations):
    """A split-KV decode call: allocate, split, merge.

    split       split(stream, at_q, (at_k, at_v, at_table), at_lens, final, partial,
                (at_sink, at_slopes, at_q_scale, at_sink_tokens), head_scales, key_scales, scale,
                softcap), all of them addresses or None; final is (at_out, at_lse, at_out_scale);
                partial is (at_acc, at_m, at_l), or None without a merge; scales are (at_k_scale,
                at_v_scale); scale and softcap as in tile/score.py
    merge       merge(stream, partial, final, at_lens, at_sink)
    key_scales  scales of K and V are one a key, not one a head
    """

    def __init__(
        self, split: Launch, merge: Launch | None, *rest: Any, key_scales: bool = False
    ) -> None:
        super().__init__(merge, *rest)
        self.split, self.key_scales = split, key_scales
        self.partial: tuple[int, int, int] = (0, 0, 0)  # of the last call

    def call(
        self,
        q,
        k,
        v,
        out,
        lens,
        table,
        sink,
        slopes,
        q_scale,
        k_scale,
        v_scale,
        scale,
        softcap,
        new=None,
        out_scale=None,
        sequence_sink_tokens=None,
        split: LengthLaunch | None = None,
        length: int = 0,
        layout: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(out, lse or None), or None; split: another launch of the splits, for caches of this
        length and layout."""
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        given = at_q | at_k | at_v
        at_out = at_lens = at_table = at_sink = at_slopes = at_q_scale = at_out_scale = None
        at_sink_tokens = None
        of_heads = of_keys = None
        if out is not None:
            at_out = out.data_ptr()
            given |= at_out
        if lens is not None:
            at_lens = lens.data_ptr()
            given |= at_lens
        if table is not None:
            at_table = table.data_ptr()
            given |= at_table
        if sink is not None:
            at_sink = sink.data_ptr()
            given |= at_sink
        if slopes is not None:
            at_slopes = slopes.data_ptr()
            given |= at_slopes
        if k_scale is not None:
            of_cache = k_scale.data_ptr(), v_scale.data_ptr()
            given |= of_cache[0] | of_cache[1]
            of_heads, of_keys = (None, of_cache) if self.key_scales else (of_cache, None)
            if q_scale is not None:
                at_q_scale = q_scale.data_ptr()
                given |= at_q_scale
        if out_scale is not None:
            at_out_scale = out_scale.data_ptr()
            given |= at_out_scale
        if sequence_sink_tokens is not None:
            at_sink_tokens = sequence_sink_tokens.data_ptr()
            given |= at_sink_tokens
        if new is not None:
            appended, bits = addresses_of(new, at_k, at_v)
            given |= bits
        if given & 15 or ENTER_HOOKS or EXIT_HOOKS or (KNOBS and observed()):
            return None
        if out is None:
            out = self.new_out()
            at_out = out.data_ptr()
        lse = at_lse = None
        if self.new_lse is not None:
            lse = self.new_lse()
            at_lse = lse.data_ptr()
        if softcap:
            scale /= softcap
        else:
            scale, softcap = scale * 1.4426950408889634, None
        stream, merge = self.current_stream(self.device), self.merge
        kv, row = (at_k, at_v, at_table), (at_sink, at_slopes, at_q_scale, at_sink_tokens)
        final = at_out, at_lse, at_out_scale
        partial: tuple[int, int, int] | None = None
        if merge is not None:
            captured = stream and self.capturing()  # stream 0, the default, cannot be
            buffer: Any = None if captured else self.buffers.pop(stream, None)
            if buffer is None or buffer[1] < self.numel:
                buffer = self.make_buffer(self.device, self.numel, captured)
            at, kept = buffer[0], self.partial
            if kept[0] != at:
                kept = self.partial = at, at + self.m_at, at + self.l_at
            partial = kept
        # written out, as unpacking takes longer than the call
        if split is not None:
            split(
                length,
                layout,
                stream,
                at_q,
                kv,
                at_lens,
                final,
                partial,
                row,
                of_heads,
                of_keys,
                scale,
                softcap,
            )
        elif new is None:
            self.split(
                stream, at_q, kv, at_lens, final, partial, row, of_heads, of_keys, scale, softcap
            )
        else:
            scales = of_heads, of_keys, scale, softcap
            self.split(stream, at_q, kv, at_lens, final, partial, row, *scales, *appended)
        if merge is None:
            return out, lse
        if new is None:
            merge(stream, partial, final, at_lens, at_sink)
        else:
            merge(stream, partial, final, at_lens, at_sink, appended[0])
        if not captured:
            self.buffers[stream] = buffer
        return out, lse


def addresses_of(call: Any, at_k: int, at_v: int) -> tuple[tuple[Any, ...], int]:
    """(growth, new, turn) of a call of `append` to the caches at_k and at_v as addresses, and all
    their bits."""
    rotary = (None, None, None) if call.rotary is None else call.rotary[:3]
    growth, new, turn = (
        [None if x is None else x.data_ptr() for x in tensors]
        for tensors in (
            (call.cu_seqlens_new, call.leftpad),
            (call.k, call.v, call.k_scale, call.v_scale),
            rotary,
        )
    )
    bits = 0
    for at in (*growth, *new, *turn):
        bits |= at or 0
    new[2:2] = at_k, at_v
    return (tuple(growth), tuple(new), tuple(turn)), bits
