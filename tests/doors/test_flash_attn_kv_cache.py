"""flash_attn_with_kvcache against one sequence after the other in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv import Plan, reference
from splitkv.core.masks import Mask
from splitkv.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata
from splitkv.planner import registry
from splitkv.runtime import dispatch
from splitkv.testing import assert_close, assert_lse_close

BATCH, CAPACITY, BEFORE, SLACK = 3, 24, (10, 0, 7), 2
RAGGED_Q, RAGGED_NEW = (2, 0, 5), (1, 4, 0)
LEFTPAD, ROWS = (3, 0, 6), (4, 1, 2)
AXES: cases.Axes = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "dims": ((32, 32), (48, 16)),
    "heads": ((4, 2), (3, 3), (6, 1)),
    "page_size": (None, 1, 5, 8),
    "rows": (False, True),
    "leftpad": (False, True),
    "seqlens": ((1, 1), (3, 3), (2, 0), (4, 6), (20, 9), (1, None)),  # of q and of new keys
    "ragged_q": (False, True),
    "ragged_new": (False, True),
    "rotary": (None, "interleaved", "halves"),
    "rotary_dim": (16, 32),
    "rotary_seqlens": (False, True),
    "mask": (Mask(), Mask(True), Mask(True, 4), Mask(False, 3, 1), Mask(True, chunk=5)),
    "modifiers": (None, "softcap", "alibi", "sink"),
    "num_splits": (0, 3),
    "lse": (False, True),
    "strided": (False, True),
}


def valid(values: cases.Values) -> bool:
    """New keys are needed to rotate anything."""
    no_new = values.get("seqlens", (0, 0))[1] is None and not values.get("ragged_new")
    if "seqlens" in values and "ragged_new" in values and no_new:
        return values.get("rotary") is None and not values.get("rotary_seqlens")
    return not (values.get("rotary_seqlens") and values.get("rotary", "") is None)


class Example:
    """A call, its caches as a list of sequences, and the same call by hand."""

    def __init__(self, values: cases.Values) -> None:
        self.values = values
        self.mask: Mask = values["mask"]
        (self.head_dim, self.head_dim_v), (heads, kv_heads) = values["dims"], values["heads"]
        seqlen_q, seqlen_new = values["seqlens"]
        self.queries = RAGGED_Q if values["ragged_q"] else (seqlen_q,) * BATCH
        self.new = RAGGED_NEW if values["ragged_new"] else (seqlen_new or 0,) * BATCH
        self.leftpad = LEFTPAD if values["leftpad"] else (0,) * BATCH
        self.before = tuple(max(n, p) for n, p in zip(BEFORE, self.leftpad, strict=True))
        self.call: dict[str, Any] = {
            "cache_seqlens": torch.tensor(self.before, dtype=torch.int32),
            "causal": self.mask.causal,
            "window_size": (self.mask.window_left, self.mask.window_right),
            "attention_chunk": self.mask.chunk,
            "num_splits": values["num_splits"],
            "return_softmax_lse": values["lse"],
        }
        lead = (sum(self.queries),) if values["ragged_q"] else (BATCH, seqlen_q)
        self.call["q"] = self.random(*lead, heads, self.head_dim)
        if values["ragged_q"]:
            self.call["cu_seqlens_q"] = torch.tensor((0, *self.queries)).cumsum(0).int()
            self.call["max_seqlen_q"] = max(self.queries)
        if values["ragged_new"] or seqlen_new is not None:
            lead = (sum(self.new),) if values["ragged_new"] else (BATCH, self.new[0])
            self.call["k"] = self.random(*lead, kv_heads, self.head_dim)
            self.call["v"] = self.random(*lead, kv_heads, self.head_dim_v)
        if values["ragged_new"]:
            self.call["cu_seqlens_k_new"] = torch.tensor((0, *self.new)).cumsum(0).int()
        self.rows = ROWS if values["rows"] else range(BATCH)
        if values["rows"]:
            self.call["cache_batch_idx"] = torch.tensor(ROWS, dtype=torch.int32)
        if values["leftpad"]:
            self.call["cache_leftpad"] = torch.tensor(self.leftpad, dtype=torch.int32)
        self.make_cache(kv_heads)
        self.make_rotary()
        self.make_modifiers(heads)

    def random(self, *shape: int) -> Tensor:
        gap = 8 if self.values["strided"] else 0
        x = torch.randn(*shape[:-1], shape[-1] + gap).to(self.values["dtype"])
        return x[..., : shape[-1]]

    def make_cache(self, kv_heads: int) -> None:
        page_size, sequences = self.values["page_size"], len(set(self.rows)) + SLACK
        self.table = None
        slabs = (sequences, CAPACITY)
        if page_size is not None:
            pages = -(-CAPACITY // page_size)
            rows = sequences if self.values["rows"] else BATCH
            slabs = (rows * pages + SLACK, page_size)
            self.table = torch.randperm(slabs[0])[: rows * pages].view(rows, pages).int()
            self.call["page_table" if page_size == 8 else "block_table"] = self.table
        for name, dim in (("k_cache", self.head_dim), ("v_cache", self.head_dim_v)):
            cache = self.random(*slabs, kv_heads, dim)
            self.call[name] = cache.fill_(torch.nan)
            for b in range(BATCH):
                for n in range(self.leftpad[b], self.before[b]):
                    cache[self.place(b, n)] = torch.randn(kv_heads, dim)

    def place(self, b: int, n: int) -> tuple[int, int]:
        """Where key n of sequence b is."""
        if self.table is None:
            return self.rows[b], n
        page_size = self.values["page_size"]
        return int(self.table[self.rows[b], n // page_size]), n % page_size

    def make_rotary(self) -> None:
        self.start = self.before
        if self.values["rotary"] is None:
            return
        self.angles = 6 * torch.rand(64, self.values["rotary_dim"] // 2)
        for name, x in (("rotary_cos", self.angles.cos()), ("rotary_sin", self.angles.sin())):
            self.call[name] = x.to(self.values["dtype"])
        self.call["rotary_interleaved"] = self.values["rotary"] == "interleaved"
        if self.values["rotary_seqlens"]:
            self.start = (1, 30, 2)
            self.call["rotary_seqlens"] = torch.tensor(self.start, dtype=torch.int32)

    def make_modifiers(self, heads: int) -> None:
        self.options: dict[str, Any] = {}
        match self.values["modifiers"]:
            case "softcap":
                self.options["softcap"] = self.call["softcap"] = 3.0
            case "alibi":
                self.options["alibi_slopes"] = self.call["alibi_slopes"] = torch.rand(heads) + 0.1
            case "sink":
                self.call["s_aux"] = torch.randn(heads)

    def rotate(self, x: Tensor, positions: list[int]) -> Tensor:
        """[tokens, heads, dim] by complex numbers; rounded to the type that is stored."""
        if self.values["rotary"] is None:
            return x
        dim = self.values["rotary_dim"]
        cos, sin = (self.call[f"rotary_{n}"].double()[positions] for n in ("cos", "sin"))
        turned, rest = x[..., :dim].double(), x[..., dim:]
        if self.values["rotary"] == "interleaved":
            pairs = torch.complex(turned[..., ::2], turned[..., 1::2])
        else:
            pairs = torch.complex(turned[..., : dim // 2], turned[..., dim // 2 :])
        pairs = pairs * torch.complex(cos, sin)[:, None]
        both = torch.stack([pairs.real, pairs.imag], -1)
        if self.values["rotary"] == "halves":
            both = both.transpose(-1, -2)
        return torch.cat([both.flatten(-2).to(x.dtype), rest], -1)

    def by_hand(self, upcast: bool = True) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """out and lse, packed, and the caches afterwards."""
        caches = {n: self.call[n].clone() for n in ("k_cache", "v_cache")}
        queries = self.call["q"].flatten(0, -3).split(self.queries)
        new = {n: (self.call[n].flatten(0, -3)).split(self.new) for n in "kv" if n in self.call}
        outs, lses = [], []
        for b in range(BATCH):
            start, first = self.start[b], self.before[b]
            if new:
                turned = self.rotate(new["k"][b], [start + i for i in range(self.new[b])])
                for i in range(self.new[b]):
                    place = self.place(b, first + i)
                    caches["k_cache"][place], caches["v_cache"][place] = turned[i], new["v"][b][i]
            stays = self.mask == Mask()
            q = self.rotate(
                queries[b], [start + (0 if stays else i) for i in range(self.queries[b])]
            )
            keys = [self.place(b, n) for n in range(self.leftpad[b], first + self.new[b])]
            k, v = (
                torch.stack([c[x] for x in keys]) if keys else c.new_zeros(0, *c.shape[2:])
                for c in caches.values()
            )
            sink = self.call.get("s_aux")
            out, lse = reference.attention(
                *(x[None] for x in (q, k, v)),
                mask=self.mask,
                sink_logits=sink,
                upcast=upcast,
                **self.options,
            )
            assert lse is not None
            if sink is not None:
                lse = torch.logaddexp(lse, sink[:, None].to(lse))
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1), caches


def check(values: cases.Values) -> None:
    example = Example(values)
    ref, ref_lse, caches = example.by_hand()
    pt = example.by_hand(upcast=False)[0]
    result = flash_attn_with_kvcache(**example.call)
    out, lse = result if values["lse"] else (result, None)
    assert out.shape == (*example.call["q"].shape[:-1], example.head_dim_v)
    if lse is not None:
        if not values["ragged_q"]:
            assert lse.shape == (BATCH, example.call["q"].shape[-2], example.call["q"].shape[1])
            lse = lse.transpose(0, 1).flatten(1)
        torch.testing.assert_close(lse.double(), ref_lse.double(), rtol=1e-3, atol=3e-3)
    for name, wanted in caches.items():
        eps = torch.finfo(values["dtype"]).eps
        cache = example.call[name]
        torch.testing.assert_close(cache, wanted, rtol=2 * eps, atol=2 * eps, equal_nan=True)
    assert_close(out.flatten(0, -3), ref, pt, factor=3.0)


@pytest.mark.parametrize("values", cases.pairs(AXES, valid), ids=lambda v: str(v["seqlens"]))
def test_append_rotate_and_attend(values: cases.Values) -> None:
    check(values)


PLAIN: cases.Values = {
    **{name: options[0] for name, options in AXES.items()},
    "mask": Mask(True),
    "lse": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"leftpad": True, "page_size": 5, "rows": True},
        {"leftpad": True, "rows": True, "seqlens": (3, 3), "strided": True},
        {"ragged_q": True, "ragged_new": True, "page_size": 5, "rotary": "halves"},
        {"seqlens": (20, 9), "leftpad": True, "modifiers": "alibi"},
        {"seqlens": (20, 9), "rows": True, "mask": Mask(True, 4)},
        {"mask": Mask(), "seqlens": (3, 3), "rotary": "interleaved"},
    ],
    ids=str,
)
def test_combinations(changes: dict[str, Any]) -> None:
    check(PLAIN | changes)


def test_length_of_the_cache_as_an_integer() -> None:
    example = Example(PLAIN | {"seqlens": (1, None)})
    example.call["k_cache"].nan_to_num_(0.5)
    example.call["v_cache"].nan_to_num_(0.5)
    seven = torch.full((BATCH,), 7, dtype=torch.int32)
    results = [
        flash_attn_with_kvcache(**example.call | {"cache_seqlens": n})[0] for n in (7, seven)
    ]
    assert torch.equal(*results)
    whole = flash_attn_with_kvcache(**example.call | {"cache_seqlens": None})[0]
    wanted = flash_attn_with_kvcache(**example.call | {"cache_seqlens": CAPACITY})[0]
    torch.testing.assert_close(whole, wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 5, "rows": True, "ragged_q": True, "ragged_new": True},
        {"leftpad": True, "rows": True, "rotary": "halves", "rotary_seqlens": True},
    ],
    ids=["pages", "rows"],
)
def test_what_says_where_things_are_may_be_strided(changes: dict[str, Any]) -> None:
    """Again and again: a call that was made before is known by its strides."""
    results = []
    for every_other in (False, True, True, False):
        torch.manual_seed(3)
        example = Example(PLAIN | changes)
        places = [n for n, x in example.call.items() if is_place(n, x)]
        assert len(places) >= 4
        for name in places if every_other else ():
            x = example.call[name]
            example.call[name] = torch.stack([x, x + 1], -1)[..., 0]
        results.append(flash_attn_with_kvcache(**example.call)[0])
    assert all(torch.equal(results[0], x) for x in results[1:])


def is_place(name: str, x: Any) -> bool:
    return name in ("rotary_cos", "rotary_sin") or (
        isinstance(x, Tensor) and x.dtype == torch.int32
    )


def test_a_bound_of_queries_in_a_tensor() -> None:
    results = []
    for bound in (max(RAGGED_Q), torch.tensor(max(RAGGED_Q))):
        torch.manual_seed(3)
        example = Example(PLAIN | {"ragged_q": True})
        results.append(flash_attn_with_kvcache(**example.call | {"max_seqlen_q": bound})[0])
    assert torch.equal(*results)


def test_names_for_the_padding() -> None:
    results = []
    for name in ("cache_leftpad", "leftpad_k"):
        torch.manual_seed(3)
        example = Example(PLAIN | {"leftpad": True})
        example.call[name] = example.call.pop("cache_leftpad")
        results.append(flash_attn_with_kvcache(**example.call)[0])
    assert torch.equal(*results)


def test_one_query_each_in_a_packed_batch() -> None:
    """A packed batch of single queries is decode."""
    example = Example(PLAIN | {"page_size": 5})
    ref, _, _ = example.by_hand()
    dense, lse = flash_attn_with_kvcache(**example.call)
    example.call |= {"q": example.call["q"][:, 0], "max_seqlen_q": 1}
    example.call["cu_seqlens_q"] = torch.arange(BATCH + 1, dtype=torch.int32)
    packed, packed_lse = flash_attn_with_kvcache(**example.call)
    assert_close(packed, ref, dense[:, 0])
    assert_lse_close(packed_lse, lse[..., 0].T)


@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("features", [{}, {"modifiers": "sink"}, {"rows": True}, {"leftpad": True}])
def test_scheduler_metadata(page_size: int | None, features: dict[str, Any]) -> None:
    """One Plan serves calls that differ in what metadata does not know."""
    values = PLAIN | {"page_size": page_size, "seqlens": (3, 3), **features}
    example = Example(values)
    metadata = get_scheduler_metadata(
        BATCH,
        3,
        32 if page_size else CAPACITY,
        4,
        2,
        32,
        example.call["cache_seqlens"],
        torch.float32,
        page_size=page_size,
        max_seqlen_k_new=3,
        causal=True,
        num_splits=2,
        sm_margin=1,
    )
    assert isinstance(metadata, Plan)
    ref, _, _ = example.by_hand()
    out, _ = flash_attn_with_kvcache(**example.call, scheduler_metadata=metadata)
    torch.testing.assert_close(out.flatten(0, 1).double(), ref.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("new", [False, True])
def test_num_splits_reaches_the_plan(
    queries: int, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a prompt, with what is appended and without."""
    asked = []

    def make_plan(*given: Any, num_splits: int = 0, **how: Any) -> Plan:
        asked.append(num_splits)
        return registry.make_plan(*given, num_splits=num_splits, **how)

    monkeypatch.setattr(dispatch, "make_plan", make_plan)
    cache = torch.zeros(2, 50, 2, 32)
    call = {"q": torch.zeros(2, queries, 4, 32), "cache_seqlens": 25, "num_splits": 1000 + queries}
    if new:
        call |= dict.fromkeys("kv", torch.zeros(2, queries, 2, 32))
    flash_attn_with_kvcache(k_cache=cache, v_cache=cache.clone(), **call)
    assert asked[0] == 1000 + queries


def test_scheduler_metadata_of_another_shape() -> None:
    example = Example(PLAIN)
    metadata = get_scheduler_metadata(
        BATCH, 1, CAPACITY, 8, 2, 32, example.call["cache_seqlens"], torch.float32, causal=True
    )
    before = example.call["k_cache"].clone()
    with pytest.raises(ValueError, match=r"^scheduler_metadata: expected one for \(decode"):
        flash_attn_with_kvcache(**example.call, scheduler_metadata=metadata)
    assert torch.equal(before.nan_to_num(9), example.call["k_cache"].nan_to_num(9))


def test_sm_margin_reaches_the_plan() -> None:
    lengths = torch.zeros(1, dtype=torch.int32)
    sms = [
        get_scheduler_metadata(1, 1, 64, 4, 4, 32, lengths, sm_margin=n).device.num_sms
        for n in (0, 1)
    ]
    assert sms[0] - sms[1] == 1


def test_refused_calls_write_nothing() -> None:
    for wrong in ({"softcap": -1.0}, {"window_size": (1, 2, 3)}, {"alibi_slopes": torch.rand(7)}):
        example = Example(PLAIN)
        before = {n: example.call[n].clone() for n in ("k_cache", "v_cache")}
        with pytest.raises(ValueError):
            flash_attn_with_kvcache(**example.call | wrong)
        for name, cache in before.items():
            assert torch.equal(cache.nan_to_num(9), example.call[name].nan_to_num(9))


def test_no_gradient_is_recorded() -> None:
    example = Example(PLAIN)
    example.call["q"] = example.call["q"].clone().requires_grad_()
    assert not flash_attn_with_kvcache(**example.call)[0].requires_grad


def test_a_call_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call of a kind goes straight to the launcher."""
    from splitkv.flash_attn import kv_cache

    example = Example(PLAIN | {"heads": (6, 1)})
    flash_attn_with_kvcache(**example.call)
    monkeypatch.setattr(kv_cache, "describe", None)
    flash_attn_with_kvcache(**example.call)


def test_case_has_what_it_says() -> None:
    """The covering set has every feature with new keys and without."""
    sets = cases.pairs(AXES, valid)
    assert {v["seqlens"] for v in sets} == set(AXES["seqlens"])
    assert any(v["rotary_seqlens"] for v in sets) and any(v["leftpad"] for v in sets)
    assert replace(Mask(True), window_left=4) in {v["mask"] for v in sets}
