"""SinkWindowCache for `generate` of Hugging Face transformers 5: memory that does not grow.

    from splitkv.integrations import transformers as splitkv_transformers
    from splitkv.integrations.sink_window_cache import SinkWindowCache

    splitkv_transformers.register()
    model.set_attn_implementation("splitkv")
    cache = SinkWindowCache(model.config, sink_tokens=4, window=1024,
                            attention_mask=inputs["attention_mask"])
    model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache

The prompt is attended to as the model's own mask says; of it, and of what is generated, each layer
keeps the first `sink_tokens` and the last `window` tokens of each sequence, padding not counted.
Every later token attends to what is kept. Keys keep the rotary phase of their own position.

Slots are filled from the last to the first: then the slots of a sequence are the last ones, as the
tokens of a row padded on the left are, and a padding mask says the right thing about them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from splitkv.cache.sink_window import slots_of
from splitkv.cache.storage import expect_sizes
from splitkv.core.errors import UnsupportedProblem, expect, expect_size
from splitkv.kernels.host.append_call import Append
from splitkv.runtime.append import append


class Ring:
    """State that the layers of a cache share: its sizes, the padding, where a step's tokens go."""

    def __init__(self, sink_tokens: int, window: int, leftpad: Tensor | None) -> None:
        self.sink_tokens, self.window = sink_tokens, window
        self.capacity = sink_tokens + window
        self.leftpad = leftpad
        self._step: tuple[tuple[Any, ...], Tensor] | None = None

    def padding(self, batch: int, device: torch.device) -> Tensor:
        """[batch] int32; sequences that `generate` repeats for beams are repeated here."""
        if self.leftpad is None:
            return torch.zeros(batch, dtype=torch.int32, device=device)
        rows = self.leftpad.shape[0]
        expect(batch % rows == 0, "attention_mask", f"rows that divide the batch {batch}", rows)
        return self.leftpad.to(device).repeat_interleave(batch // rows)

    def slots(self, seen: int, num_tokens: int, batch: int, device: torch.device) -> Tensor:
        """Slots [batch * num_tokens] of tokens after `seen` others: the same for all layers."""
        step = seen, num_tokens, batch, device
        if self._step is None or self._step[0] != step:
            leftpad = self.padding(batch, device)
            lengths = torch.full_like(leftpad, seen)
            if seen:
                lengths, leftpad = lengths - leftpad, torch.zeros_like(leftpad)
            slot = slots_of(lengths, num_tokens, self.sink_tokens, self.window, leftpad)
            last = torch.arange(1, batch + 1, dtype=torch.int32, device=device)[:, None]
            slot = torch.where(slot < 0, -1, last * self.capacity - 1 - slot)
            self._step = step, slot.flatten()
        return self._step[1]


class RingLayer(CacheLayerMixin):
    """One layer: keys and values [batch, capacity, heads, dim], seen as [batch, heads, .., dim]."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.ring, self.cumulative_length = ring, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            x.new_zeros(x.shape[0], self.ring.capacity, x.shape[1], x.shape[3])
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what is to be kept of new keys and values [batch, heads, tokens, dim].

        Returns what they attend to: themselves, the first time, then the slots in use.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen, (batch, _, tokens, _) = self.cumulative_length, key_states.shape
        if seen and tokens != 1:
            raise _unsupported(
                f"input_ids: expected one new token a step after the prompt, got {tokens}; "
                "assisted decoding and prompts in chunks need another cache"
            )
        k, v = key_states.transpose(1, 2), value_states.transpose(1, 2)
        slots = self.ring.slots(seen, tokens, batch, key_states.device)
        with torch.no_grad():
            append(Append(k, v, self.keys, self.values, slots=slots))
        self.cumulative_length = seen + tokens
        if not seen:
            return key_states, value_states
        unused = self.ring.capacity - min(self.cumulative_length, self.ring.capacity)
        return self.keys[:, unused:].transpose(1, 2), self.values[:, unused:].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots in use, the position that the first of them would have in a plain cache)."""
        total = self.cumulative_length + query_length
        slots = min(total, self.ring.capacity) if self.cumulative_length else total
        return slots, total - slots

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        raise _unsupported("crop: expected a cache that keeps every token")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times; what is there of them is repeated."""
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        raise _unsupported("batch_select_indices: expected a batch that stays")


class SinkWindowCache(Cache):
    """The first and last tokens of each sequence, for models whose layers all attend fully.

    config           of the model
    sink_tokens      first tokens that are kept; window: last ones
    attention_mask   [batch, positions] of the prompts, padded on the left; None: no padding. Has to
                     be the one that the model is given: a cache does not see it otherwise

    Beam search of padded batches, more than one new token a step and models with sliding layers of
    their own raise UnsupportedProblem.
    """

    def __init__(
        self, config: Any, *, sink_tokens: int, window: int, attention_mask: Tensor | None
    ) -> None:
        expect_sizes(window=window)
        expect_size("sink_tokens", sink_tokens, empty=True)
        config = config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ())
        windowed = not kinds and getattr(config, "sliding_window", None) is not None
        if windowed or kinds - {"full_attention"}:
            named = sorted(kinds) if kinds else f"sliding_window {config.sliding_window}"
            raise _unsupported(f"config: expected layers of full attention only, got {named}")
        self.ring = Ring(sink_tokens, window, _leftpad(attention_mask))
        super().__init__(layers=[RingLayer(self.ring) for _ in range(config.num_hidden_layers)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams trade places; with padding they would take it along, which the slots do not."""
        if self.ring.leftpad is not None:
            raise _unsupported("attention_mask: expected no padding with beam search")
        super().reorder_cache(beam_idx)


def _leftpad(attention_mask: Tensor | None) -> Tensor | None:
    """[batch] int32 from a padding mask, or None where there is no padding; read by the host."""
    if attention_mask is None:
        return None
    expect(attention_mask.ndim == 2, "attention_mask", "[batch, positions]", attention_mask)
    mask = attention_mask.bool()
    leftpad = mask.shape[1] - mask.sum(-1)
    left = torch.arange(mask.shape[1], device=mask.device) >= leftpad[:, None]
    expect(bool((mask == left).all()), "attention_mask", "padding on the left only", attention_mask)
    return None if bool(mask.all()) else leftpad.int()


def _unsupported(reason: str) -> UnsupportedProblem:
    return UnsupportedProblem("a SinkWindowCache", "any device", [("splitkv", [reason])])
