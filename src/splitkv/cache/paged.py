"""A paged KV cache: pages shared between sequences, written by slot mapping.

    cache = PagedKVCache(num_pages=512, page_size=16, max_batch=8, max_seqlen=4096,
                         num_layers=32, num_kv_heads=8, head_dim=128, device="cuda")
    a = cache.allocate()
    cache.extend([a], 100)                    # room for a prompt of 100 tokens
    for layer in range(32):
        cache.append(layer, k, v)             # [1, 100, 8, 128]
        out = cache.attend(layer, q)
    b = cache.fork(a)                         # shares every page; copied when written
    cache.extend([a, b], 1)                   # the next step: one token each

`extend` is bookkeeping on the host and a few small copies to the device; `append` and `attend` are
the launches of a layer. The page table, lengths and slots of a step lie at fixed addresses: a graph
captured for a batch size and number of tokens is replayed after each `extend` of the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitkv.api import attention_varlen, decode
from splitkv.cache.storage import Layers, Storage, dtype_of, expect_sizes, unit_stride
from splitkv.core.errors import (
    expect,
    expect_at_least,
    expect_in_range,
    expect_int,
    expect_none_with,
    expect_shape,
)
from splitkv.kernels.host.append_call import Append
from splitkv.runtime.append import append

MAX_DECODE_QUERIES = 16  # more of them a sequence are a prompt: attention_varlen


class CacheFull(RuntimeError):
    """There is no room for what was asked; nothing has changed."""


@dataclass(slots=True)
class Held:
    """A sequence: its pages in order, and how many tokens they hold.

    row, written   the row of the table that last had its pages, and how many of them are as there
    """

    pages: list[int]
    length: int
    row: int = -1
    written: int = 0


class PagedKVCache:
    """Keys and values in pages of `page_size` tokens, for all layers of a model.

    num_pages     pages in all; page_size: any
    max_batch     sequences a step; max_seqlen: tokens a sequence
    max_tokens    new tokens a step over all sequences, default max_seqlen or one each. All sizes
                  are from 1 to less than 2**30, and tokens of all pages fewer than 2**31
    dtype         "bf16", "fp16", "fp32", "int8", "fp8" (e4m3), "fp8_e5m2" or the torch dtype; those
                  of 8 bits quantise on append what comes in one of the others
    granularity   of the scales of 8 bits: "token", the default, "head" or "tensor". The
                  latter two have to be settled before a layer's first token: see `calibrate`
    smooth_k      store keys less a mean key of their layer, settled likewise; see
                  `splitkv.quantize_kv`. No soft cap and no sink_logits then; the LSE is corrected

    k, v          [num_layers, num_pages, page_size, num_kv_heads, head_dim (v: head_dim_v)]
    k_scale, v_scale  fp32, beside the pages [num_layers, num_pages, page_size, num_kv_heads], or
                  [num_layers, num_kv_heads], or [num_layers, 1]; None where nothing is quantised
    k_mean        [num_layers, num_kv_heads, head_dim] fp32 with smooth_k, else None
    page_table    [max_batch, max_pages] int32, cache_seqlens [max_batch], cu_seqlens_q
                  [max_batch + 1] and slot_mapping [max_tokens] int32: of the last `extend`, in the
                  order of its sequences. Rows past them have length 0 and slot -1
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_batch: int,
        max_seqlen: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        num_layers: int = 1,
        max_tokens: int | None = None,
        dtype: torch.dtype | str = "bf16",
        granularity: str | None = None,
        smooth_k: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        expect_sizes(
            num_pages=num_pages, page_size=page_size, max_batch=max_batch, max_seqlen=max_seqlen
        )
        if max_tokens is None:
            max_tokens = max(max_seqlen, max_batch)
        expect_sizes(max_tokens=max_tokens)
        self.page_size, self.max_batch = page_size, max_batch
        self.max_seqlen, self.max_tokens = max_seqlen, max_tokens
        shape = num_layers, num_pages, page_size, num_kv_heads, head_dim, head_dim_v
        self._layers = held = Layers(*shape, Storage(dtype, granularity, smooth_k, device))
        self.k, self.v, self.dtype = held.k, held.v, held.dtype
        self.k_scale, self.v_scale, self.k_mean = held.k_scale, held.v_scale, held.k_mean
        max_pages = -(-max_seqlen // page_size)

        def index(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32, device=device)

        self.page_table = index(max_batch, max_pages)
        self.cache_seqlens = index(max_batch)
        self.cu_seqlens_q = index(max_batch + 1)
        self.slot_mapping = index(max_tokens, fill=-1)
        self._sequences: dict[int, Held] = {}
        self._users = [0] * num_pages  # sequences that hold each page
        self._free = list(range(num_pages))[::-1]
        self._next = 0
        self._table = torch.zeros(max_batch, max_pages, dtype=torch.int32)  # page_table on the host
        self._row_of: list[Held | None] = [None] * max_batch
        self._counts: tuple[int, ...] = ()  # new tokens of each sequence of the step

    # Sequences

    def allocate(self) -> int:
        """A new, empty sequence: the number that it is called by. Takes no page yet."""
        return self._register(Held([], 0))

    def fork(self, sequence: int, num_tokens: int | None = None) -> int:
        """A sequence that begins with the first tokens of another, all by default.

        Shares its pages, the last one too. Whoever first writes into a shared page, in `extend`,
        gets a copy of its own.
        """
        parent = self._find(sequence)
        length = parent.length if num_tokens is None else num_tokens
        expect_int("num_tokens", length)
        expect_in_range("num_tokens", length, 0, parent.length)
        length = int(length)
        pages = parent.pages[: -(-length // self.page_size)]
        for page in pages:
            self._users[page] += 1
        return self._register(Held(pages, length))

    def free(self, sequence: int) -> None:
        """Forget a sequence; pages that no other one holds are free again."""
        self._release(self._find(sequence).pages)
        del self._sequences[sequence]

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Keep only the first tokens, as after a rejected draft."""
        held = self._find(sequence)
        expect_int("num_tokens", num_tokens)
        expect_in_range("num_tokens", num_tokens, 0, held.length)
        kept = -(-num_tokens // self.page_size)
        self._release(held.pages[kept:])
        del held.pages[kept:]
        held.length, held.written = int(num_tokens), min(held.written, kept)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._find(sequence).length

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def _register(self, held: Held) -> int:
        number, self._next = self._next, self._next + 1
        self._sequences[number] = held
        return number

    def _find(self, sequence: int) -> Held:
        allocated = isinstance(sequence, int) and sequence in self._sequences
        expect(allocated, "sequence", "one that is allocated", sequence)
        return self._sequences[sequence]

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    # Scales

    def calibrate(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Settle a layer's scales of granularity "tensor" or "head", and its mean key.

        k, v   keys and values like those to come, [batch, tokens, num_kv_heads, ..] or packed

        The largest of them will be stored as the largest stored value; what is past it later, as
        that value. Called again, scales grow to the largest seen; the mean key stays that of the
        first call. Only while no sequence holds a token, whose stored values would change.
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
        """Settle them by values that are known already, as those that come with a model.

        k_scale, v_scale   [num_kv_heads] or [1] fp32, by the granularity; none of "token"
        k_mean             [num_kv_heads, head_dim] fp32, with smooth_k
        """
        self._expect_empty("set_scales")
        self._layers.set_scales(layer, k_scale, v_scale, k_mean)

    def _expect_empty(self, name: str) -> None:
        held = sum(x.length for x in self._sequences.values())
        expect(not held, name, "no tokens held, as what is stored would change", held)

    # A step

    def extend(self, sequences: Sequence[int], num_tokens: int | Sequence[int] = 1) -> None:
        """Make room for new tokens of these sequences, and describe the step on the device.

        num_tokens   of each sequence, or one number for all

        Raises CacheFull, and changes nothing, where there are not enough pages. Outside a graph:
        the step's numbers are copied to the device, in order with the work of the current stream.
        """
        capturing = self.k.is_cuda and torch.cuda.is_current_stream_capturing()
        expect(not capturing, "extend", "to be called before a graph's capture or replay", "both")
        counts = self._checked_counts(sequences, num_tokens)
        held = [self._find(sequence) for sequence in sequences]
        needed = self._needed(held, counts)
        if needed > len(self._free):
            raise CacheFull(
                f"num_pages: expected {needed} free pages for {sum(counts)} new tokens, got "
                f"{len(self._free)} of {len(self._users)}; free or truncate sequences"
            )
        copies = []
        for x, n in zip(held, counts, strict=True):
            copies += self._grow(x, n)
        if copies:
            source, target = torch.tensor(copies, device=self.k.device).unbind(1)
            self._layers.copy_slabs(source, target)
        self._describe(held, counts)

    def _checked_counts(self, sequences: Sequence[int], num_tokens: Any) -> tuple[int, ...]:
        """New tokens of each sequence, checked."""
        many = isinstance(sequences, Sequence)
        expect(many, "sequences", "a list of what allocate and fork returned", sequences)
        expect_in_range("number of sequences", len(sequences), 0, self.max_batch)
        distinct = len({id(self._find(x)) for x in sequences}) == len(sequences)
        expect(distinct, "sequences", "distinct ones", sequences)
        listed = isinstance(num_tokens, Sequence) and not isinstance(num_tokens, str)
        counts = tuple(num_tokens) if listed else (num_tokens,) * len(sequences)
        same = len(counts) == len(sequences)
        expect(same, "num_tokens", f"{len(sequences)} numbers, one a sequence", len(counts))
        for n in counts:
            expect_int("num_tokens", n)
            expect_at_least("num_tokens", n, 0)
        expect(sum(counts) <= self.max_tokens, "num_tokens", f"{self.max_tokens} in all", counts)
        for sequence, n in zip(sequences, counts, strict=True):
            longest = self._find(sequence).length + n
            if longest > self.max_seqlen:
                raise CacheFull(
                    f"max_seqlen: expected at most {self.max_seqlen} tokens a sequence, got "
                    f"{longest} for sequence {sequence}; truncate or free it"
                )
        return tuple(int(n) for n in counts)

    def _needed(self, held: list[Held], counts: tuple[int, ...]) -> int:
        """Pages that a step takes, copies of shared ones included."""
        needed, shared = 0, dict[int, int]()
        for x, n in zip(held, counts, strict=True):
            needed += max(0, -(-(x.length + n) // self.page_size) - len(x.pages))
            if n and x.length % self.page_size:
                last = x.pages[-1]
                users = shared.get(last, self._users[last])
                if users > 1:
                    needed += 1
                    shared[last] = users - 1
        return needed

    def _grow(self, held: Held, count: int) -> list[tuple[int, int]]:
        """Give a sequence its new pages; (source, copy) of the page that it has to have alone."""
        copies = []
        if count and held.length % self.page_size and self._users[held.pages[-1]] > 1:
            shared = held.pages[-1]
            held.pages[-1] = self._take()
            held.written = min(held.written, len(held.pages) - 1)
            self._users[shared] -= 1
            copies.append((shared, held.pages[-1]))
        held.length += count
        while len(held.pages) * self.page_size < held.length:
            held.pages.append(self._take())
        return copies

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _describe(self, held: list[Held], counts: tuple[int, ...]) -> None:
        """Write the step's table, lengths and slots to the device."""
        batch, changed = len(held), False
        for row, x in enumerate(held):
            if x.row != row or self._row_of[row] is not x:
                x.row, x.written, self._row_of[row] = row, 0, x
            if x.written < len(x.pages):
                pages = torch.tensor(x.pages[x.written :], dtype=torch.int32)
                self._table[row, x.written : len(x.pages)] = pages
                x.written, changed = len(x.pages), True
        if changed:
            self.page_table[:batch].copy_(self._table[:batch], non_blocking=True)
        slots = [self._slots(x.row, x.length - n, n) for x, n in zip(held, counts, strict=True)]
        lengths = [x.length for x in held] + [0] * (self.max_batch - batch)
        bounds = [0]
        for n in (*counts, *[0] * (self.max_batch - batch)):
            bounds.append(bounds[-1] + n)
        self._to_device(self.cache_seqlens, torch.tensor(lengths, dtype=torch.int32))
        self._to_device(self.cu_seqlens_q, torch.tensor(bounds, dtype=torch.int32))
        past = torch.full((self.max_tokens - sum(counts),), -1, dtype=torch.int32)
        self._to_device(self.slot_mapping, torch.cat([*slots, past]))
        self._counts = counts

    def _slots(self, row: int, first: int, count: int) -> Tensor:
        """Where tokens first, first + 1, ... of a row go."""
        place = torch.arange(first, first + count, dtype=torch.int32)
        page = self._table[row, (place // self.page_size).long()]
        return page * self.page_size + place % self.page_size

    def _to_device(self, at: Tensor, x: Tensor) -> None:
        """From pageable memory, which is free again when the call returns."""
        at.copy_(x, non_blocking=True)

    # A layer of the step

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's new keys and values of a layer: one launch, which a graph may hold.

        k, v   [batch, num_tokens, num_kv_heads, ..] where all sequences have as many, or packed
               [total, num_kv_heads, ..]; rotary applied
        """
        self._layers.check(layer, k, v, **self._lead(k))
        total = sum(self._counts)
        call = Append(
            unit_stride(k),
            unit_stride(v),
            self.k[layer],
            self.v[layer],
            slots=self.slot_mapping[:total],
            **self._layers.stored_by(layer),
        )
        append(call)

    def warmup(self, dtype: torch.dtype | str | None = None) -> None:
        """Compile what `append` launches for new keys and values of a type; nothing is written.

        dtype   of the new ones, by default the cache's own, and bf16 where that has 8 bits

        `splitkv.warmup` with the cache's page_size, max_seqlen, `stored` and granularity is for
        what `attend` launches.
        """
        quantised = self.k_scale is not None
        kind = dtype_of(dtype or ("bf16" if quantised else self.dtype))
        for layer in range(self.k.shape[0]):
            for total in (1, self.max_tokens):  # few and many tokens are other kernels
                k, v = (
                    torch.zeros(total, *x.shape[-2:], dtype=kind, device=x.device)
                    for x in (self.k, self.v)
                )
                self._layers.check(layer, k, v, total=total)
                mean = None if self.k_mean is None else self.k_mean[layer]
                call = Append(
                    k,
                    v,
                    self.k[layer],
                    self.v[layer],
                    slots=torch.full_like(self.slot_mapping[:total], -1),
                    **self._layers.scales(layer),
                    k_mean=mean,
                )
                append(call)

    def attend(self, layer: int, q: Tensor, **options: Any) -> Any:
        """Attention of the step's tokens to their sequences, causal unless told otherwise.

        q         [batch, num_tokens, num_heads, head_dim], or packed as in `append`
        options   of `splitkv.decode`, and for packed tokens or more than 16 a sequence of
                  `splitkv.attention_varlen`; max_seqlen_k is max_seqlen unless given. The table
                  and the lengths are the cache's own

        Returns out, as q with head_dim_v, and with `return_lse` what these return beside it.
        """
        lead, layer = self._lead(q), self._layers.expect_layer(layer)
        expect_shape("q", q, **lead, num_heads=None, head_dim=self.k.shape[4])
        batch, most = len(self._counts), max(self._counts, default=0)
        k, v, table = self.k[layer], self.v[layer], self.page_table[:batch]
        lengths = self.cache_seqlens[:batch]
        self._layers.expect_options(options)
        for name in ("cache_seqlens", "page_table"):
            expect_none_with(name, options.pop(name, None), "a cache that has its own")
        options = {"causal": True, **options, **self._layers.scales(layer)}
        longest = options.pop("max_seqlen_k", self.max_seqlen)
        if q.dim() == 4 and most <= MAX_DECODE_QUERIES:
            where = {"cache_seqlens": lengths, "page_table": table, "max_seqlen_k": longest}
            result = decode(q, k, v, **where, **options)
            return self._layers.finish(layer, q, result, options)
        packed = q if q.dim() == 3 else q.flatten(0, 1)
        result = attention_varlen(
            packed,
            k,
            v,
            self.cu_seqlens_q[: batch + 1],
            None,
            most,
            longest,
            page_table=table,
            cache_seqlens=lengths,
            **options,
        )
        result = self._layers.finish(layer, packed, result, options)
        if q.dim() == 3:
            return result
        out, lse = result if isinstance(result, tuple) else (result, None)
        out = out.unflatten(0, q.shape[:2])
        return out if lse is None else (out, lse.unflatten(1, q.shape[:2]).transpose(0, 1))

    def _lead(self, x: Any) -> dict[str, int]:
        """The first dimensions that a tensor of the step has to have."""
        counts = self._counts
        if getattr(x, "ndim", 0) == 4 and len(set(counts)) <= 1:
            return {"batch": len(counts), "num_tokens": counts[0] if counts else 0}
        return {"total": sum(counts)}
