"""FlashAttention's functions on e4m3 and int8: FlashAttention-3's, held to dequantised values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv import flash_attn, reference
from splitkv.core.masks import Mask
from splitkv.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata
from splitkv.flash_attn.descales import scales_of
from splitkv.kernels.host.append_call import Rotary, _rotate
from splitkv.kernels.limits.scale_layout import scale_strides
from splitkv.rounding import quantize
from splitkv.testing import assert_close, assert_lse_close

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
BATCH, HEADS, KV_HEADS, PAGE_SIZE, UNUSED = 3, 4, 2, 8, 2
QUERIES, KEYS = (5, 1, 3), (24, 9, 17)
ALIKE = ("func", "kvpacked_func", "qkvpacked_func")  # sequences of one length
FUNCTIONS = (
    *ALIKE,
    *("varlen_func", "varlen_kvpacked_func", "varlen_qkvpacked_func"),
    *("varlen_func in pages", "varlen_func in pages, unused queries", "varlen_func, unused keys"),
    *("with_kvcache", "with_kvcache in pages", "with_kvcache, metadata"),
    *("with_kvcache, packed queries", "with_kvcache in pages, packed queries"),
    *("with_kvcache, long queries", "with_kvcache, rows"),
)
AXES: cases.Axes = {
    "function": FUNCTIONS,
    "dtype": (E4M3, INT8),
    "wide_q": (False, True),
    "descales": ("none", "one", "expanded", "of heads", "of sequences", "mixed"),
    "mask": (Mask(True), Mask(), Mask(True, 6)),
    "softcap": (0.0, 5.0),
    "lse": (False, True),
    "dim": (32, 64),
}


def valid(values: cases.Values) -> bool:
    """What is packed in one tensor is of one type."""
    return not (values.get("wide_q") and "qkvpacked" in values.get("function", ""))


def descale(how: str, name: str) -> Tensor | None:
    each = torch.rand(BATCH, KV_HEADS, generator=torch.Generator().manual_seed(ord(name))) + 0.5
    if how == "mixed":
        how = {"q": "of sequences", "k": "one", "v": "of heads"}[name]
    return {
        "none": None,
        "one": each[0, :1],
        "expanded": each[0, 0].expand(BATCH, KV_HEADS),
        "of heads": each[:1].expand(BATCH, KV_HEADS),
        "of sequences": each,
    }[how]


def stored(dtype: torch.dtype, *shape: int) -> Tensor:
    x = torch.randn(shape)
    return (40 * x).round().clamp(-127, 127).to(dtype) if dtype == INT8 else x.to(dtype)


def lengths_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)


@dataclass
class Example:
    """A call of one of the functions, and the same by hand, one sequence after the other."""

    values: cases.Values

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.how: str = self.values["function"]
        self.name, dtype = f"flash_attn_{self.how.split(',')[0].split()[0]}", self.values["dtype"]
        alike = self.how in ALIKE
        self.queries = {"with_kvcache, long queries": (19,) * BATCH}.get(self.how, QUERIES)
        if alike or ("cache" in self.how and "packed" not in self.how):
            self.queries = self.queries if len({*self.queries}) == 1 else (5,) * BATCH
        self.keys = (24,) * BATCH if alike else KEYS
        self.queries = self.keys if "qkvpacked" in self.how else self.queries
        wide = self.values["wide_q"]
        self.descales = {n: descale(self.values["descales"], n) for n in "qkv"}
        if dtype == INT8:
            self.descales = {
                n: torch.tensor([0.02]) if x is None else x / 40 for n, x in self.descales.items()
            }
        self.descales["q"] = None if wide else self.descales["q"]
        self.kv_heads = HEADS if "qkvpacked" in self.how else KV_HEADS
        if self.kv_heads == HEADS:
            self.descales = {
                n: x if x is None or x.dim() == 1 else x.repeat(1, 2)
                for n, x in self.descales.items()
            }
        dim = self.values["dim"]
        of_q = torch.bfloat16 if wide else dtype
        self.q = [stored(of_q, n, HEADS, dim) for n in self.queries]
        self.k = [stored(dtype, n, self.kv_heads, dim) for n in self.keys]
        self.v = [stored(dtype, n, self.kv_heads, dim) for n in self.keys]

    def call(self, device: str = "cpu") -> dict[str, Any]:
        mask = self.values["mask"]
        call = {
            "causal": mask.causal,
            "window_size": (mask.window_left, -1),
            "softcap": self.values["softcap"],
            "return_softmax_lse": self.values["lse"],
            **{f"{n}_descale": x for n, x in self.descales.items()},
            **(self.with_kvcache() if "cache" in self.how else self.without_cache()),
        }
        call = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in call.items()}
        if "metadata" in self.how:
            call["scheduler_metadata"] = self.metadata(call)
        return call

    def without_cache(self) -> dict[str, Any]:
        join = torch.stack if self.how in ALIKE else torch.cat
        tensors = {n: join(getattr(self, n)) for n in "qkv"}
        parts = next((n for n in ("qkv", "kv") if f"{n}packed" in self.how), "")
        if parts:
            packed = torch.stack([tensors.pop(n) for n in parts], -3)
            tensors[parts] = packed
        if self.how in ALIKE:
            return tensors
        cu_q, cu_k = lengths_of(self.queries), lengths_of(self.keys)
        if parts == "qkv":
            return tensors | {"cu_seqlens": cu_q, "max_seqlen": max(self.queries)}
        call = tensors | {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": max(self.queries),
            "max_seqlen_k": max(self.keys),
        }
        if "pages" in self.how:
            pages = self.pages()
            call |= {"k": pages["k_cache"], "v": pages["v_cache"], "cu_seqlens_k": None}
            call |= {"block_table": pages["page_table"], "seqused_k": pages["cache_seqlens"]}
        if "unused queries" in self.how:  # after those of each sequence
            call["q"] = torch.cat([x for q in self.q for x in (q, stored_as(q, UNUSED))])
            call["cu_seqlens_q"] = cu_q + UNUSED * torch.arange(BATCH + 1).int()
            call["seqused_q"] = cu_q.diff()
            call["max_seqlen_q"] += UNUSED
        if "unused keys" in self.how:
            for name in "kv":
                x = getattr(self, name)
                call[name] = torch.cat([y for z in x for y in (z, stored_as(z, UNUSED))])
            call["cu_seqlens_k"] = cu_k + UNUSED * torch.arange(BATCH + 1).int()
            call["seqused_k"] = cu_k.diff()
            call["max_seqlen_k"] += UNUSED
        return call

    def pages(self) -> dict[str, Tensor]:
        """Caches of pages in disorder, and what else says where keys are."""
        most = -(-max(self.keys) // PAGE_SIZE)
        table = torch.randperm(BATCH * most).view(BATCH, most).int()
        call = {"page_table": table, "cache_seqlens": lengths_of(self.keys).diff()}
        for name in "kv":
            x = getattr(self, name)
            cache = stored(x[0].dtype, BATCH * most, PAGE_SIZE, *x[0].shape[1:])
            for b, keys in enumerate(x):
                for n, key in enumerate(keys):
                    cache[table[b, n // PAGE_SIZE], n % PAGE_SIZE] = key
            call[f"{name}_cache"] = cache
        return call

    def with_kvcache(self) -> dict[str, Any]:
        call: dict[str, Any] = {"q": torch.cat(self.q), **self.pages()}
        if "packed" not in self.how:
            call["q"] = torch.stack(self.q)
        else:
            call |= {"cu_seqlens_q": lengths_of(self.queries), "max_seqlen_q": max(self.queries)}
        if "pages" not in self.how:
            table = call.pop("page_table").long()
            for name in ("k_cache", "v_cache"):
                call[name] = take(call[name], table).flatten(1, 2)
        if "rows" in self.how:
            rows = torch.tensor([4, 1, 2], dtype=torch.int32)
            for name in ("k_cache", "v_cache"):
                cache = stored_as(call[name], 5)
                cache[rows.long()] = call[name]
                call[name] = cache
            call["cache_batch_idx"] = rows
        return call

    def metadata(self, call: dict[str, Any]) -> Any:
        batch, queries, _, dim = call["q"].shape
        mask = self.values["mask"]
        return get_scheduler_metadata(
            *(batch, queries, call["k_cache"].shape[1], HEADS, KV_HEADS, dim),
            call["cache_seqlens"],
            call["q"].dtype if call["q"].dtype != INT8 else torch.bfloat16,
            causal=mask.causal,
            window_size=(mask.window_left, -1),
            has_softcap=self.values["softcap"] > 0,
        )

    def by_hand(self, upcast: bool = True, rounding: bool = False) -> tuple[Tensor, Tensor]:
        """(out [tokens, heads, dim], lse [heads, tokens]), exactly or in working precision, and
        with the rounding that a call allows: with e4m3 q of the weights, with int8 of a wide q."""
        full = self.q[0].dtype == E4M3
        products = "full" if full else "half" if self.values["dtype"] == INT8 else "widened"
        outs, lses = [], []
        for b in range(BATCH):
            scales = {
                f"{n}_scale": None if x is None else x.expand(BATCH, self.kv_heads)[b]
                for n, x in self.descales.items()
            }
            if scales["q_scale"] is not None:
                scales["q_scale"] = scales["q_scale"].repeat_interleave(HEADS // self.kv_heads)
            out, lse = reference.attention(
                *(x[b][None] for x in (self.q, self.k, self.v)),
                mask=self.values["mask"],
                softcap=self.values["softcap"],
                upcast=upcast,
                products=products if rounding else "widened",
                **scales,
            )
            assert lse is not None
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    def check(self, device: str = "cpu") -> None:
        call = self.call(device)
        result = getattr(flash_attn, self.name)(**call)
        out, lse = result if self.values["lse"] else (result, None)
        assert not out.requires_grad and out.dtype == torch.bfloat16
        out = out.flatten(0, -3)
        if lse is not None:
            lse = lse.transpose(0, 1).flatten(1) if lse.dim() == 3 else lse
        if "unused queries" in self.how:
            used = [
                UNUSED * b + first + n
                for b, first in enumerate(lengths_of(self.queries)[:-1].tolist())
                for n in range(self.queries[b])
            ]
            rest = sorted({*range(len(out))} - {*used})
            assert len(rest) == UNUSED * BATCH and not out[rest].any()
            out = out[used]
            if lse is not None:
                assert lse[:, rest].eq(-torch.inf).all()
                lse = lse[:, used]
        ref, ref_lse = self.by_hand()
        assert_close(out.cpu(), ref, self.by_hand(False, rounding=True)[0], name="out")
        if lse is not None:
            rounds = self.values["dtype"] == INT8 or not self.values["wide_q"]
            rounded = self.by_hand(rounding=True)[1] if rounds else None
            assert_lse_close(lse.cpu(), ref_lse, rounded=rounded)


def take(x: Tensor, index: Tensor) -> Tensor:
    return x.view(torch.uint8)[index].view(x.dtype)


def stored_as(x: Tensor, *lead: int) -> Tensor:
    """Other numbers of the same type and last sizes."""
    if x.dtype == torch.bfloat16:
        return torch.randn(*lead, *x.shape[1:]).to(x.dtype)
    return stored(x.dtype, *lead, *x.shape[1:])


@pytest.mark.parametrize("values", cases.pairs(AXES, valid), ids=lambda v: v["function"])
def test_eight_bit_inputs(values: cases.Values) -> None:
    Example(values).check()


def test_the_set_has_every_function() -> None:
    """And each of them a call with scales of sequences and a call that is e4m3 throughout."""
    sets = cases.pairs(AXES, valid)
    for name, value in (("descales", "of sequences"), ("dtype", E4M3), ("wide_q", False)):
        assert {v["function"] for v in sets if v[name] == value} == {*FUNCTIONS}, name


@pytest.mark.parametrize("how_v", AXES["descales"])
@pytest.mark.parametrize("how_k", AXES["descales"])
def test_scales_of_keys_and_values_are_laid_out_alike(how_k: str, how_v: str) -> None:
    """Kernels have one set of strides for both."""
    descales = {
        "q_descale": None,
        "k_descale": descale(how_k, "k"),
        "v_descale": descale(how_v, "v"),
    }
    q, k = torch.zeros(BATCH, 1, HEADS, 32), stored(E4M3, BATCH, 9, KV_HEADS, 32)
    scales = scales_of(descales, q, k, BATCH)
    for name in ("k", "v"):
        given = descales[f"{name}_descale"]
        wanted = torch.ones(1) if given is None else given
        wanted, got = torch.broadcast_tensors(wanted, scales[f"{name}_scale"])
        assert torch.equal(got, wanted)
    assert scale_strides(scales["k_scale"], k) == scale_strides(scales["v_scale"], k)


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("scales", ["one", "heads", "mixed"])
@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("paged", [False, True])
def test_appending(dtype: torch.dtype, scales: str, queries: int, paged: bool) -> None:
    """New tokens are divided by the scales that the cache is read with."""
    capacity = 24
    shapes = {"one": ((1,), (1, 1)), "heads": ((BATCH, 2),) * 2, "mixed": ((BATCH, 2), (1,))}
    descales = [torch.rand(shape) / 20 + 0.02 for shape in shapes[scales]]
    shape = (BATCH * 3, capacity // 3) if paged else (BATCH, capacity)
    caches = [torch.zeros(*shape, 2, 32, dtype=dtype) for _ in range(2)]
    table = torch.arange(BATCH * 3, dtype=torch.int32).view(BATCH, 3) if paged else None
    new = [torch.randn(BATCH, queries, 2, 32) for _ in range(2)]
    before = torch.tensor([0, 3, 1], dtype=torch.int32)
    q = torch.randn(BATCH, queries, 4, 32)
    given = {"k_descale": descales[0], "v_descale": descales[1], "block_table": table}
    out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=before, causal=True, **given)
    wide = []
    for cache, x, scale in zip(caches, new, descales, strict=True):
        by = scale.view(1, 1, 1, 1) if scale.numel() == 1 else scale[:, None, :, None]
        wide.append(torch.zeros(BATCH, capacity, 2, 32))
        for b, first in enumerate(before.tolist()):
            rows = slice(first, first + queries)
            bits = quantize(x, by, dtype)[b]
            written = cache.view(torch.uint8).view(BATCH, capacity, 2, 32)[b, rows].view(dtype)
            assert torch.equal(written.float(), bits.float())
            wide[-1][b, rows] = bits.float() * by.expand(BATCH, -1, -1, -1)[b]
    ref, _ = reference.decode(q, *wide, cache_seqlens=before + queries, mask=Mask(True))
    torch.testing.assert_close(out.double(), ref, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("descales", ["none", "one", "of sequences"])
def test_new_tokens_in_the_type_of_the_cache(
    dtype: torch.dtype, rotary: str | None, descales: str, device: str = "cpu"
) -> None:
    """They are written as they are, or rotated and rounded again; queries are rotated too.

    Rotated on a GPU, where a product and a sum are one operation, a number may be the next one.
    """
    capacity, before = 16, torch.tensor([4, 0, 7], dtype=torch.int32)
    torch.manual_seed(0)
    q = stored(dtype, BATCH, 3, HEADS, 32)
    caches = [stored(dtype, BATCH, capacity, KV_HEADS, 32) for _ in "kv"]
    new = [stored(dtype, BATCH, 3, KV_HEADS, 32) for _ in "kv"]
    scales = {n: descale(descales, n) for n in "qkv"}
    if dtype == INT8:
        scales = {n: torch.tensor([0.02]) if x is None else x / 40 for n, x in scales.items()}
    wanted = [x.clone() for x in caches]
    given: dict[str, Any] = {f"{n}_descale": x for n, x in scales.items()}
    turned = {"q": q.float(), "k": new[0].float(), "v": new[1].float()}
    if rotary is not None:
        angles = torch.rand(capacity, 8) * 6
        tables = [x.to(E4M3) if dtype == E4M3 else x for x in (angles.cos(), angles.sin())]
        interleaved = rotary == "interleaved"
        given |= {"rotary_cos": tables[0], "rotary_sin": tables[1]}
        given["rotary_interleaved"] = interleaved
        by = Rotary(*(x.float() for x in tables), interleaved=interleaved)
        place = (before[:, None] + torch.arange(3)).flatten()
        for name in "qk":
            x = turned[name].flatten(0, 1).bfloat16()
            turned[name] = _rotate(x, place, by).view(turned[name].shape).float()
    for cache, name in zip(wanted, "kv", strict=True):
        bits = quantize(turned[name], torch.ones(1), dtype)
        for b, first in enumerate(before.tolist()):
            cache.view(torch.uint8)[b, first : first + 3] = bits[b].view(torch.uint8)
    given |= dict(zip(("q", "k_cache", "v_cache", "k", "v"), (q, *caches, *new), strict=True))
    given |= {"cache_seqlens": before}
    given = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
    out = flash_attn_with_kvcache(**given, causal=True).cpu()
    for name, want in zip(("k_cache", "v_cache"), wanted, strict=True):
        steps = (given[name].cpu().view(torch.int8).int() - want.view(torch.int8).int()).abs()
        assert steps.max() <= (device != "cpu" and rotary is not None and name == "k_cache")
    assert out.dtype == torch.bfloat16

    def widened(name: str, x: Tensor) -> Tensor:
        scale = scales[name]
        if scale is None or scale.numel() == 1:
            return x.float() * (1.0 if scale is None else scale)
        return x.float() * scale.repeat_interleave(x.shape[2] // KV_HEADS, 1)[:, None, :, None]

    tensors = widened("q", turned["q"]), *(widened(n, x) for n, x in zip("kv", wanted, strict=True))
    ref, _ = reference.decode(*tensors, cache_seqlens=before + 3, mask=Mask(True))
    pt, _ = reference.decode(
        *(x.bfloat16() for x in tensors), cache_seqlens=before + 3, mask=Mask(True), upcast=False
    )
    assert_close(out, ref, pt, name="out")


def test_types_that_do_not_go_together_are_refused() -> None:
    q, cache = torch.zeros(3, 1, 4, 32), torch.zeros(3, 8, 2, 32).to(E4M3)
    new, lengths = torch.zeros(3, 1, 2, 32), torch.ones(3, dtype=torch.int32)
    angles = torch.zeros(8, 16)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("k: expected dtype float32, got float8_e4m3fn", {"k": new.to(E4M3), "v": new.to(E4M3)}),
        ("v: expected dtype float32, got bfloat16", {"k": new, "v": new.bfloat16()}),
        (
            "k: expected dtype float8_e4m3fn or bfloat16, got float32",
            {"q": q.to(E4M3), "k": new, "v": new, "rotary_cos": angles, "rotary_sin": angles},
        ),
        (
            "v: expected dtype float8_e4m3fn, got int8",
            {"q": q.to(E4M3), "k": new.to(E4M3)} | {"v": new.to(INT8)},
        ),
        ("q_descale: expected None with a float32 q, got", {"q_descale": torch.ones(1)}),
    ]
    for message, given in wrong:
        with pytest.raises(ValueError, match=f"^{message}"):
            flash_attn_with_kvcache(
                **{"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": lengths} | given
            )


def test_expanded_scales_stay_one() -> None:
    """Servers expand one scale to all sequences and heads: no scale a key is made of it."""
    from splitkv.flash_attn.descales import scales_of

    k = torch.zeros(20, KV_HEADS, 32).to(E4M3)
    one = torch.tensor(0.5)
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), one.expand(BATCH, KV_HEADS))
    scales = scales_of(descales, k, k, BATCH, lengths_of((9, 1, 10)))
    assert all(scales[f"{n}_scale"].data_ptr() == one.data_ptr() for n in "qkv")
    assert all(scales[f"{n}_scale"].shape == (1,) for n in "qkv")
