"""A cache of bounded size: the first tokens of each sequence and a ring of its last ones.

    cache = SinkWindowCache(batch=8, sink_tokens=4, window=1024, num_layers=32, num_kv_heads=8,
                            head_dim=128, device="cuda")
    out = splitkv.attention(q, k, v, **cache.mask)      # the prompt, layer by layer
    cache.extend(seqlen); cache.append(layer, k, v)
    cache.extend(1)                                     # then every step, once for all layers
    cache.append(layer, k, v)                           # [8, 1, 8, 128], rotary applied
    out = cache.attend(layer, q)

A token at position p is in slot p if it is one of the first, else in slot
sink_tokens + (p - sink_tokens) % window. Softmax does not ask for an order of keys, and rotary was
applied before, so attention reads the slots where they are: nothing is copied into a line. Keys
keep the rotary phase of their own position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitkv.api import decode
from splitkv.cache.storage import Layers, Storage, expect_sizes, unit_stride
from splitkv.core.errors import (
    UnsupportedProblem,
    expect,
    expect_device,
    expect_dtype,
    expect_shape,
    expect_size,
)
from splitkv.kernels.host.append_call import Append
from splitkv.runtime.append import append

MASKS = (
    *("causal", "window_size", "sink_tokens", "attention_chunk", "alibi_slopes"),
    *("cache_seqlens", "page_table", "max_seqlen_k"),
)


def slots_of(
    lengths: Tensor, num_tokens: int, sink_tokens: int, window: int, leftpad: Tensor | None = None
) -> Tensor:
    """Slots [batch, num_tokens] int32 of tokens that follow `lengths` [batch] others.

    -1 for padding, the first leftpad[b] of them, and for tokens that later ones of the same call
    take the place of.
    """
    n = torch.arange(num_tokens, dtype=torch.int32, device=lengths.device)
    pad = torch.zeros_like(lengths) if leftpad is None else leftpad
    place = lengths[:, None] + n - pad[:, None]
    slot = torch.where(place < sink_tokens, place, sink_tokens + (place - sink_tokens) % window)
    end = lengths[:, None] + num_tokens - pad[:, None]
    kept = (n >= pad[:, None]) & ((place < sink_tokens) | (place >= end - window))
    return torch.where(kept, slot, -1).int()


class SinkWindowCache:
    """Keys and values of the first `sink_tokens` and the last `window` tokens of each sequence.

    dtype, granularity, smooth_k, calibrate, set_scales   as of PagedKVCache

    k, v            [num_layers, batch, sink_tokens + window, num_kv_heads, head_dim (v: .._v)]
    k_scale, v_scale, k_mean   as of PagedKVCache, a scale a slot and head where tokens have one
    lengths         [batch] int32 on the device: tokens seen, those that are gone included
    cache_seqlens   [batch] int32: slots that are in use, the first ones
    mask            arguments of `splitkv.attention` that make a prompt see what this cache would
                    have kept: causal, a window, and the first tokens always

    All of a step is arithmetic on the device at fixed addresses, `extend` included: a graph may
    hold it. It never fills up.
    """

    def __init__(
        self,
        *,
        batch: int,
        sink_tokens: int,
        window: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype | str = "bf16",
        granularity: str | None = None,
        smooth_k: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        expect_sizes(batch=batch, window=window)
        expect_size("sink_tokens", sink_tokens, empty=True)
        self.sink_tokens, self.window = int(sink_tokens), int(window)
        self.capacity = self.sink_tokens + self.window
        shape = num_layers, batch, self.capacity, num_kv_heads, head_dim, head_dim_v
        self._layers = held = Layers(*shape, Storage(dtype, granularity, smooth_k, device))
        self.k, self.v, self.dtype = held.k, held.v, held.dtype
        self.k_scale, self.v_scale, self.k_mean = held.k_scale, held.v_scale, held.k_mean
        self._empty = True
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.cache_seqlens = torch.zeros_like(self.lengths)
        self.slots = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
        self._one = self.slots  # of a step of one token, always at one address
        first = torch.arange(batch, dtype=torch.int32, device=device) * self.capacity
        self._first = first[:, None]

    @property
    def mask(self) -> dict[str, Any]:
        return {
            "causal": True,
            "window_size": (self.window - 1, -1),
            "sink_tokens": self.sink_tokens,
        }

    def reset(self) -> None:
        """Forget all tokens."""
        self.lengths.zero_()
        self.cache_seqlens.zero_()
        self._empty = True

    def calibrate(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Settle a layer's scales and mean key, like `PagedKVCache.calibrate`.

        Only before the first `extend`, or after `reset`.
        """
        self._expect_empty("calibrate")
        self._layers.calibrate(layer, k, v)

    def set_scales(
        self,
        layer: int,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        k_mean: Tensor | None = None,
    ) -> None:
        """Settle them by values that are known, like `PagedKVCache.set_scales`.

        Only before the first `extend`, or after `reset`.
        """
        self._expect_empty("set_scales")
        self._layers.set_scales(layer, k_scale, v_scale, k_mean)

    def _expect_empty(self, name: str) -> None:
        what = "no tokens held, as what is stored would change"
        expect(self._empty, name, what, "tokens; reset() forgets them")

    def extend(self, num_tokens: int = 1, leftpad: Tensor | None = None) -> None:
        """Say where the next tokens of every sequence go, once for all layers.

        leftpad   [batch] int32: so many of them are padding in front, and are not kept
        """
        expect_size("num_tokens", num_tokens)
        if leftpad is not None:
            expect_shape("leftpad", leftpad, batch=self.lengths.shape[0])
            expect_dtype("leftpad", leftpad, "int32")
            expect_device("leftpad", leftpad, self.lengths.device)
        self._empty = False
        slots = slots_of(self.lengths, num_tokens, self.sink_tokens, self.window, leftpad)
        slots = torch.where(slots < 0, -1, slots + self._first)
        self.slots = self._one.copy_(slots) if num_tokens == 1 else slots
        self.lengths += num_tokens if leftpad is None else num_tokens - leftpad
        torch.clamp(self.lengths, max=self.capacity, out=self.cache_seqlens)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write what is kept of the new keys and values [batch, num_tokens, num_kv_heads, ..] of
        the last `extend`: one launch."""
        batch, num_tokens = self.slots.shape
        self._layers.check(layer, k, v, batch=batch, num_tokens=num_tokens)
        k, v, slots = unit_stride(k), unit_stride(v), self.slots.flatten()
        how = self._layers.stored_by(layer)
        append(Append(k, v, self.k[layer], self.v[layer], slots=slots, **how))

    def attend(self, layer: int, q: Tensor, **options: Any) -> Any:
        """Attention of one new token a sequence, already appended, to all that is kept.

        q         [batch, 1, num_heads, head_dim]
        options   of `splitkv.decode` without a mask: softmax_scale, softcap, sink_logits,
                  return_lse, num_splits, plan, out. The mask is what is kept: the first tokens and
                  the window. More queries, other masks and ALiBi raise
        """
        batch, dim, layer = self.lengths.shape[0], self.k.shape[4], self._layers.expect_layer(layer)
        for name in MASKS:
            expect(
                name not in options, name, "not given: the slots are the mask", options.get(name)
            )
        tokens = expect_shape("q", q, batch=batch, num_tokens=None, num_heads=None, head_dim=dim)[1]
        if tokens != 1:
            reason = f"q: expected one token a sequence, as a ring has no order, got {tokens}"
            raise UnsupportedProblem("a SinkWindowCache", "any device", [("attend", [reason])])
        self._layers.expect_options(options)
        options = {**options, **self._layers.scales(layer), "cache_seqlens": self.cache_seqlens}
        result = decode(q, self.k[layer], self.v[layer], causal=False, **options)
        return self._layers.finish(layer, q, result, options)
