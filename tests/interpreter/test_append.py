"""`kernels/append.py` in Triton's interpreter, against its definition in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv.cache import quantize_kv
from splitkv.kernels.append import AppendLauncher
from splitkv.kernels.host.append_call import Append, Result, Rotary, append_in_torch
from splitkv.rounding import STORED

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)
CAPACITY, PAGE_SIZE, PAGES = 40, 8, 23
BEFORE, NEW, QUERIES = (11, 0, 36), (2, 0, 5), (1, 3, 0)
AXES: cases.Axes = {
    "dtype": (torch.float16, torch.float32, torch.bfloat16),
    "dims": ((32, 32), (48, 16)),
    "heads": ((4, 2), (3, 3)),
    "place": ("contiguous", "rows", "paged", "paged_rows", "slots"),
    "packed": (False, True),
    "seqlen": (0, 1, 3, 300),
    "rotary_dim": (0, 16, 32),
    "interleaved": (False, True),
    "q": (False, True),
    "q_step": (0, 1),
    "start": (False, True),
    "leftpad": (False, True),
    "strided": (False, True),
    "stored": (None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    "scale": ("token", "head", "tensor", "sequence"),
    "mean": (False, True),
}


def valid(values: Mapping[str, Any]) -> bool:
    """Rotated queries need a rotation, and packed sequences and slots have no dense length."""
    if values.get("rotary_dim") == 0 and (values.get("q") or values.get("start")):
        return False
    slots, packed = values.get("place") == "slots", values.get("packed")
    if slots and values.get("scale") == "sequence":
        return False
    if values.get("stored", 0) is None and values.get("mean"):
        return False
    if slots and (packed or values.get("leftpad")):
        return False
    if packed and values.get("seqlen") in (0, 3, 300):
        return False
    return not (slots and values.get("rotary_dim") and values.get("start") is False)


def call_of(values: Mapping[str, Any]) -> Append:
    """A call of these values; the caches hold NaN."""
    dtype, (head_dim, head_dim_v) = values["dtype"], values["dims"]
    num_heads, num_kv_heads = values["heads"]
    batch, seqlen, place = len(BEFORE), values["seqlen"], values["place"]
    paged = place.startswith("paged") or place == "slots"

    def tokens(lead: tuple[int, ...], heads: int, dim: int) -> Tensor:
        gap = 8 if values["strided"] else 0
        return torch.randn(*lead, heads, dim + gap).to(dtype)[..., :dim]

    options: dict[str, Any] = {"before": torch.tensor(BEFORE, dtype=torch.int32)}
    lead: tuple[int, ...] = (batch, seqlen)
    lead_q: tuple[int, ...] = (batch, max(seqlen, 1))
    if values["packed"]:
        lead, lead_q = (sum(NEW),), (sum(QUERIES),)
        for name, lengths in (("cu_seqlens_new", NEW), ("cu_seqlens_q", QUERIES)):
            options[name] = torch.tensor((0, *lengths)).cumsum(0).int()
    if place == "slots":
        lead = lead_q = (max(seqlen, 1),)
        slots = torch.randperm(max(PAGES * PAGE_SIZE, seqlen))[: lead[0]]
        slots[1::3] = -1  # dropped, as are those past the cache
        options = {"slots": slots.int() if seqlen == 1 else slots}
    if place.endswith("rows"):
        options["rows"] = torch.tensor([3, 0, 1], dtype=torch.int32)
    if place.startswith("paged"):
        options["page_table"] = torch.randperm(PAGES)[:20].view(4, 5).int()
    if values["leftpad"]:
        options["leftpad"] = torch.tensor([3, 0, 7], dtype=torch.int32)
    if values["rotary_dim"]:
        angles = torch.rand(50, values["rotary_dim"] // 2) * 6
        table_dtype = dtype if values["strided"] else torch.float32
        start = torch.randint(0, 60, (lead[0] if place == "slots" else batch,)).int()
        options["rotary"] = Rotary(
            angles.cos().to(table_dtype),
            angles.sin().to(table_dtype),
            start if values["start"] else None,
            values["interleaved"],
            values["q_step"],
        )
        if values["q"]:
            options["q"] = tokens(lead_q, num_heads, head_dim)
    slabs = (PAGES, PAGE_SIZE) if paged else (4, CAPACITY)
    caches = [
        torch.full((*slabs, num_kv_heads, dim), torch.nan, dtype=dtype)
        for dim in (head_dim, head_dim_v)
    ]
    if values["stored"] is not None:
        caches = [torch.full_like(x, 127, dtype=torch.int8) for x in caches]  # NaN in floats
        caches = [x.view(values["stored"]) for x in caches]
        heads, granularity = (num_kv_heads,), values["scale"]
        shapes = {"tensor": (1,), "head": heads, "sequence": (batch, *heads)}
        shape = shapes.get(granularity, (*slabs, *heads))
        for name in ("k_scale", "v_scale"):
            scale = torch.rand(shape) / 40 + 0.005
            options[name] = scale.fill_(torch.nan) if granularity == "token" else scale
        if values["mean"]:
            options["k_mean"] = torch.randn(num_kv_heads, head_dim)
    k, v = tokens(lead, num_kv_heads, head_dim), tokens(lead, num_kv_heads, head_dim_v)
    return Append(k, v, *caches, **options)


def copied(call: Append) -> Append:
    """The same call with caches and scales of its own."""
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    own = {name: getattr(call, name) for name in names}
    return call._replace(**{name: x if x is None else x.clone() for name, x in own.items()})


def launch(call: Append) -> Result:
    return AppendLauncher(call)(call, call.given)


def compare(call: Append) -> None:
    """The kernel writes the same places, with rotated values equal to a rounding."""
    other = copied(call)
    results, wanted = launch(call), append_in_torch(other)
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-6}
    rtol = tolerance[call.k.dtype]
    close = {"rtol": rtol, "atol": rtol * 1e-1, "equal_nan": True}
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    stored = call.k_scale is not None
    pairs = [(call.v_cache, other.v_cache, exactly), (call.v_scale, other.v_scale, exactly)]
    of_keys = close if call.rotary is not None else exactly
    pairs.append((call.k_scale, other.k_scale, of_keys))
    if stored and call.rotary is not None:  # a rounding may be a step, of either sign
        codes = [x.k_cache.view(torch.int8).int() for x in (call, other)]
        if call.k_cache.dtype != torch.int8:
            codes = [torch.where(x < 0, -(x & 0x7F), x) for x in codes]
        assert (codes[0] - codes[1]).abs().max() <= 1
    else:
        pairs.append((call.k_cache, other.k_cache, of_keys))
    for x, y, tight in pairs:
        if x is not None:
            eight = x.element_size() == 1
            torch.testing.assert_close(
                *((t.view(torch.uint8) if eight else t) for t in (x, y)), **tight
            )
    for x, y in zip(results, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=rtol, atol=rtol * 1e-1)


@pytest.mark.parametrize("values", cases.pairs(AXES, valid), ids=lambda v: v["place"])
def test_kernel_is_the_definition(values: Mapping[str, Any]) -> None:
    call = call_of(values)
    compare(call)
    if values["seqlen"] and not values["packed"]:
        codes = call.k_cache.view(torch.uint8) if values["stored"] else call.k_cache
        assert (codes != (127 if values["stored"] else torch.nan)).any()
        assert not call.k_cache.float().isnan().all()


@pytest.mark.parametrize("name", STORED)
def test_appended_tokens_are_those_of_quantize_kv(name: str) -> None:
    k, v = torch.randn(2, 3, 2, 16).half(), torch.randn(2, 3, 2, 24).half()
    mean = torch.randn(2, 16)
    wanted = quantize_kv(k, v, name, "token", k_mean=mean)
    caches = [torch.zeros_like(x) for x in wanted[:2]]
    scales = [torch.zeros_like(x) for x in wanted[2:4]]
    before = torch.zeros(2, dtype=torch.int32)
    named = {"k_scale": scales[0], "v_scale": scales[1], "k_mean": mean}
    launch(Append(k, v, *caches, before=before, **named))
    for x, y in zip((*caches, *scales), wanted[:4], strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_tokens_past_the_end_are_not_written_and_not_counted() -> None:
    """36 keys and 5 more in a cache of 40: the last is dropped, whatever lies behind the cache."""
    memory = torch.full((2, CAPACITY, 1, 16), torch.nan)
    before = torch.tensor([36], dtype=torch.int32)
    new = torch.randn(1, 5, 1, 16)
    _, after = launch(Append(new, new, memory[:1], memory[:1].clone(), before=before))
    assert after is not None and after.tolist() == [CAPACITY]
    assert torch.equal(memory[0, 36:], new[0, :4])
    assert memory[1].isnan().all() and memory[0, :36].isnan().all()


def test_page_numbers_outside_the_cache_are_not_written() -> None:
    memory = torch.full((4, PAGE_SIZE, 1, 16), torch.nan)
    table = torch.tensor([[2], [-1], [9]], dtype=torch.int32)
    new = torch.randn(3, 1, 1, 16)
    before = torch.zeros(3, dtype=torch.int32)
    launch(Append(new, new, memory, memory.clone(), before=before, page_table=table))
    assert torch.equal(memory[2, 0], new[0, 0])
    assert memory.isnan().sum() == memory.numel() - 16


def test_lengths_of_a_large_batch() -> None:
    """More sequences than the kernel counts in one step."""
    batch = 300
    lengths = torch.randint(0, 3, (batch,))
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    new = torch.randn(int(cu_seqlens[-1]), 1, 16)
    cache = torch.full((batch, 8, 1, 16), torch.nan)
    before = torch.randint(0, 4, (batch,)).int()
    call = Append(new, new, cache, cache.clone(), before=before, cu_seqlens_new=cu_seqlens)
    compare(call)
    assert (~cache.isnan()).sum() == new.numel()


@pytest.mark.parametrize("append", [launch, append_in_torch], ids=["kernel", "torch"])
def test_packed_tokens_after_the_last_sequence_are_not_written(append: Any) -> None:
    """They are no sequence's: the table past the keys of one may say anything, as it does here."""
    memory = torch.full((4, PAGE_SIZE, 1, 16), torch.nan)
    before = torch.tensor([0, PAGE_SIZE - 2], dtype=torch.int32)
    new = torch.randn(7, 1, 16)
    named = {
        "page_table": torch.tensor([[1, 0], [2, 0]], dtype=torch.int32),
        "cu_seqlens_new": torch.tensor([0, 1, 3], dtype=torch.int32),
    }
    _, after = append(Append(new, new, memory, memory.clone(), before=before, **named))
    assert after is not None and after.tolist() == [1, PAGE_SIZE]
    assert torch.equal(memory[1, :1], new[:1]) and torch.equal(memory[2, -2:], new[1:3])
    assert memory.isfinite().any((2, 3)).sum() == 3
