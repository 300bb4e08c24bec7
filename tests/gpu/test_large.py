"""Caches of more than 2**31 elements: every offset is 64 bits wide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING, kernels, only

import splitkv
from splitkv import reference
from splitkv.core.masks import Mask
from splitkv.planner.policies import fixed, waves
from splitkv.testing import assert_close, assert_lse_close

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
PAST = (1 << 31) // (KV_HEADS * DIM)  # keys whose elements come to 2**31
every_kernel = pytest.mark.parametrize("kernel", kernels(SERVING))


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Memory for the largest cache, before and for others after."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    assert free > 24 << 30, f"expected 24 GiB of free GPU memory, got {free / (1 << 30):.1f}"
    yield
    torch.cuda.empty_cache()


def caches(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [rows, keys, KV_HEADS, DIM], all NaN."""
    shape = rows, keys, KV_HEADS, DIM
    k, v = (torch.full(shape, math.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    assert k.numel() > 1 << 31
    return k, v


def decode(kernel: str, num_splits: int, *tensors: torch.Tensor, **given: Any) -> tuple:
    """decode by a kernel, in so many splits; 0: as the default policy has it."""
    given["return_lse"] = True
    choose = fixed.with_splits(num_splits) if num_splits else waves.choose
    plan = splitkv.plan(*tensors, policy=only(kernel, choose), **given)
    return splitkv.decode(*tensors, plan=plan, **given)


def hold(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: tuple, **options: object
) -> None:
    """The result against the reference on small caches of the same keys."""
    ref, ref_lse = reference.decode(q, k, v, **options)
    pt, _ = reference.decode(q, k, v, upcast=False, **options)
    assert_close(result[0], ref, pt)
    assert_lse_close(result[1], ref_lse)


@every_kernel
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_pages_at_the_far_end(num_splits: int, kernel: str) -> None:
    pages = PAST // PAGE_SIZE + 64
    k, v = caches(pages, PAGE_SIZE)
    lengths = torch.tensor([700, 1000, 3], dtype=torch.int32, device=DEVICE)
    per_sequence = -(-1000 // PAGE_SIZE)
    # The last pages and the first ones in turns, from both ends.
    order = [n // 2 if n % 2 else pages - 1 - n // 2 for n in range(3 * per_sequence)]
    table = torch.tensor(order, dtype=torch.int32, device=DEVICE).view(3, per_sequence)
    small = []
    for cache in (k, v):
        used = torch.randn(len(order), PAGE_SIZE, KV_HEADS, DIM, device=DEVICE).bfloat16()
        cache[table.flatten().long()] = used
        small.append(used)
    q = torch.randn(3, 2, HEADS, DIM, device=DEVICE).bfloat16()
    small_table = torch.arange(len(order), device=DEVICE, dtype=torch.int32).view(3, per_sequence)
    given = {"cache_seqlens": lengths, "page_table": table}
    result = decode(kernel, num_splits, q, k, v, **given)
    hold(q, *small, result, cache_seqlens=lengths, page_table=small_table)


@every_kernel
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_sequences_at_the_far_end(num_splits: int, kernel: str) -> None:
    batch, capacity = 3, PAST // 2 + 64
    k, v = caches(batch, capacity)
    small = []
    for cache in (k, v):
        used = torch.randn(batch, 1000, KV_HEADS, DIM, device=DEVICE).bfloat16()
        cache[:, :1000] = used
        small.append(used)
    lengths = torch.tensor([1000, 5, 999], dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, 1, HEADS, DIM, device=DEVICE).bfloat16()
    given = {"cache_seqlens": lengths, "max_seqlen_k": 1000}
    result = decode(kernel, num_splits, q, k, v, **given)
    hold(q, *small, result, cache_seqlens=lengths)


@every_kernel
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_keys_at_the_far_end_of_a_sequence(num_splits: int, kernel: str) -> None:
    """A window over the last keys: only those are read, at offsets past 2**31."""
    capacity, window = PAST + 1000, 600
    k, v = caches(1, capacity)
    small = []
    for cache in (k, v):
        used = torch.randn(1, 1000, KV_HEADS, DIM, device=DEVICE).bfloat16()
        cache[:, -1000:] = used
        small.append(used)
    q = torch.randn(1, 2, HEADS, DIM, device=DEVICE).bfloat16()
    result = decode(kernel, num_splits, q, k, v, window_size=(window, 0))
    hold(q, *small, result, mask=Mask(True, window, 0))
