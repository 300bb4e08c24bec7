"""A cache as FlashAttention's arguments describe it, read as pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.core.errors import expect


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache and where each sequence is in it; checked.

    rows        [batch] int32: the row of the cache or of the table; None: b
    leftpad     [batch] int32: where each sequence begins
    capacity    keys that a sequence has room for
    """

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    rows: Tensor | None
    leftpad: Tensor | None
    batch: int
    capacity: int


def pages_of(cache: Cache, needs_table: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns k, v and the page table by which each sequence starts at its first key.

    Nothing is moved.
    A row of a contiguous cache is a page; with padding on the left every key is one.
    """
    k, v, table, rows = cache.k, cache.v, cache.page_table, cache.rows
    if table is not None and rows is not None:
        table = table[rows.long()]
    if cache.leftpad is not None:
        return _single_keys(cache, table)
    if table is None and rows is not None:
        table = rows[:, None]
    if table is None and needs_table:
        table = torch.arange(cache.batch, dtype=torch.int32, device=k.device)[:, None]
    if table is None:
        k, v = k[: cache.batch], v[: cache.batch]
    return k, v, table


def _single_keys(cache: Cache, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the cache as pages of one key, and the page of each key of each sequence."""
    assert cache.leftpad is not None
    keys = torch.arange(cache.capacity, dtype=torch.int32, device=cache.k.device)
    place = cache.leftpad[:, None] + keys
    pitch, page_size = _pitch("k_cache", cache.k), cache.k.shape[1]
    v_pitch = _pitch("v_cache", cache.v)
    expect(pitch == v_pitch, "v_cache", f"{pitch} rows a slab with cache_leftpad", v_pitch)
    if table is not None:
        page = (place // page_size).clamp(max=table.shape[1] - 1)
        slab = table.gather(1, page.long())
    elif cache.rows is not None:
        slab = cache.rows[:, None]
    else:
        slab = torch.arange(cache.batch, dtype=torch.int32, device=cache.k.device)[:, None]
    slots = slab * pitch + (place % page_size if table is not None else place)
    return _as_single_keys(cache.k, pitch), _as_single_keys(cache.v, pitch), slots.int()


def _pitch(name: str, cache: Tensor) -> int:
    """Counts the keys from one slab of [slabs, keys, heads, dim] to the next, in memory."""
    slab, key = (int(n) for n in cache.stride()[:2])
    if cache.shape[0] == 1 or cache.shape[1] == 1:
        return int(cache.shape[1]) if cache.shape[0] == 1 else 1
    whole = key > 0 and slab % key == 0
    expect(whole, name, "a whole number of keys between slabs with cache_leftpad", [slab, key])
    return slab // key


def _as_single_keys(cache: Tensor, pitch: int) -> Tensor:
    """Views the memory as [slabs * pitch, 1, heads, dim]."""
    slabs, keys = cache.shape[:2]
    step = cache.stride(0 if keys == 1 else 1)
    pages = (slabs - 1) * pitch + keys
    strides = step, step, cache.stride(2), 1
    return cache.as_strided((pages, 1, *cache.shape[2:]), strides)  # from its own offset
