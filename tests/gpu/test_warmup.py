"""After warmup nothing is compiled while serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, SERVING, kernels
from triton import knobs

import splitkv
from splitkv.cache import PagedKVCache
from splitkv.flash_attn import flash_attn_with_kvcache
from splitkv.kernels.hopper.decode.kernel import ENTRIES, entry_point
from splitkv.runtime.warmup import GRANULARITIES

pytestmark = pytest.mark.long

# No other test compiles them.
MODELS: dict[str, dict[str, Any]] = {
    "decode_split": {"num_heads": 16, "num_kv_heads": 2, "head_dim": 176},
    "hopper_decode_split": {"num_heads": 10, "num_kv_heads": 2, "head_dim": 128},
    "hopper_prefill": {"num_heads": 256, "num_kv_heads": 2, "head_dim": 128},
    "prefill": {"num_heads": 140, "num_kv_heads": 2, "head_dim": 120},
}
# Each of the tests below compiles its own: a head dimension, and options, that no other test has.
SOFTCAP = 21.0
QUANTISED = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 192}
APPENDING = {"num_heads": 20, "num_kv_heads": 4, "head_dim": 96}
PAGES = {"num_kv_heads": 4, "head_dim": 80}
PROMPTS = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 112}
OPTIONS: dict[str, Any] = {"window_size": (300, 0), "softcap": 20.0}
LONGEST = 512
STORED = [("as_is", None), *product(("int8", "fp8"), GRANULARITIES)]
AXES: cases.Axes = {
    "stored": ("as_is", "int8", "fp8"),
    "granularity": (None, cases.Alike(("tensor", "head")), "token"),
    "page_size": (None, 16),
}


def exists(values: cases.Values) -> bool:
    """One of STORED, or the beginning of one."""
    given = values.get("stored"), values.get("granularity", "")
    return any(
        given[0] in (None, stored) and given[1] in ("", granularity)
        for stored, granularity in STORED
    )


def pairs(valid: Callable[[cases.Values], bool], **more: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes `values`: tests/runtime/test_warmup.py has all that Triton compiles."""
    chosen = cases.pairs({**AXES, **more}, lambda values: exists(values) and valid(values))
    ids = ["-".join(map(str, values.values())) for values in chosen]
    return pytest.mark.parametrize("values", chosen, ids=ids)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles or loads from here on."""
    names: list[str] = []

    entries = {entry_point(name).__name__: "hopper_decode_split" for name in ENTRIES}

    def hook(*args: Any, **kwargs: Any) -> None:
        name = kwargs["fn"].name
        names.append(entries.get(name, name))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    yield names


def serve(
    model: dict[str, Any],
    batch: int,
    seqlen_q: int,
    capacity: int,
    page_size: int | None,
    **options: Any,
) -> None:
    """A step of a model, its caches laid out as an engine would."""
    heads, kv_heads, dim = model.values()
    q = torch.randn(batch, seqlen_q, heads, dim, device=DEVICE).bfloat16()
    lengths = torch.full((batch,), capacity, dtype=torch.int32, device=DEVICE)
    rows, keys = batch, capacity
    if page_size is not None:
        pages = capacity // page_size
        options["page_table"] = torch.arange(batch * pages, dtype=torch.int32, device=DEVICE).view(
            batch, pages
        )
        rows, keys = batch * pages, page_size
    cache = torch.randn(rows, keys, kv_heads, dim, device=DEVICE).bfloat16()
    splitkv.decode(q, cache, cache, cache_seqlens=lengths, **options)


@pytest.mark.parametrize("page_size", [None, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("kernel", kernels(SERVING))
def test_nothing_is_compiled_after_warmup(
    kernel: str, page_size: int | None, compiled: list[str]
) -> None:
    model = MODELS[kernel]
    batches, queries = (1, 6), (1, 3)
    plans = splitkv.warmup(
        **model,
        max_seqlen_k=LONGEST,
        page_size=page_size,
        batch_sizes=batches,
        seqlens_q=queries,
        **OPTIONS,
    )
    assert kernel in {plan.kernel for plan in plans}
    assert {plan.kernel for plan in plans} <= set(compiled)
    compiled.clear()
    for batch in batches:
        for seqlen_q in queries:
            for capacity in (LONGEST, 400, 256, 128):
                serve(model, batch, seqlen_q, capacity, page_size, **OPTIONS)
    assert compiled == []


@pytest.mark.parametrize("kernel", kernels(SERVING))
def test_warmup_takes_no_memory_for_a_cache(kernel: str) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    splitkv.warmup(**MODELS[kernel], max_seqlen_k=1 << 20, **OPTIONS)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def cache_of(
    model: dict[str, Any], batch: int, stored: str, granularity: str | None, page_size: int | None
) -> dict[str, Any]:
    """Arguments of decode: keys and values of LONGEST tokens a sequence, as an engine has them."""
    kv_heads, dim = model["num_kv_heads"], model["head_dim"]
    given: dict[str, Any] = {}
    rows, keys = batch, LONGEST
    if page_size is not None:
        rows, keys = batch * LONGEST // page_size, page_size
        pages = torch.randperm(rows, device=DEVICE).int()
        given["page_table"] = pages.view(batch, -1)
    k, v = (torch.randn(rows, keys, kv_heads, dim, device=DEVICE).bfloat16() for _ in range(2))
    if stored != "as_is":
        made = splitkv.quantize_kv(k, v, stored, str(granularity))
        k, v = made.k, made.v
        given |= {"k_scale": made.k_scale, "v_scale": made.v_scale}
    return {"k_cache": k, "v_cache": v, **given}


@pairs(lambda values: values.get("stored") != "as_is")
def test_nothing_is_compiled_after_warmup_of_a_quantised_cache(
    values: cases.Values, compiled: list[str]
) -> None:
    caches = {batch: cache_of(QUANTISED, batch, **values) for batch in (1, 5)}
    plans = splitkv.warmup(
        **QUANTISED,
        **values,
        max_seqlen_k=LONGEST,
        batch_sizes=(1, 5),
        seqlens_q=(1, 3),
        softcap=SOFTCAP,
    )
    assert not {plan.kernel for plan in plans} & {"torch_math", "torch_sdpa"}
    compiled.clear()
    for batch, seqlen_q in product((1, 5), (1, 3)):
        given = caches[batch]
        shape = batch, seqlen_q, QUANTISED["num_heads"], QUANTISED["head_dim"]
        q = torch.randn(shape, device=DEVICE).bfloat16()
        for longest in (LONGEST, 400, 128, 33):
            lengths = torch.full((batch,), longest, dtype=torch.int32, device=DEVICE)
            own = {"cache_seqlens": lengths, "max_seqlen_k": longest, "softcap": SOFTCAP}
            splitkv.decode(q, **given, **own)
    assert compiled == []


@pairs(lambda values: values.get("granularity") != "token", rotary=("plain", "rotary"))
def test_nothing_is_compiled_after_warmup_of_appends(
    values: cases.Values, compiled: list[str]
) -> None:
    stored = {name: values[name] for name in AXES}
    dim = APPENDING["head_dim"]
    angles = torch.rand(LONGEST, dim // 2, device=DEVICE)
    turn: dict[str, Any] = {}
    if values["rotary"] == "rotary":
        turn = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        turn["rotary_interleaved"] = False
    caches = {batch: cache_of(APPENDING, batch, **stored) for batch in (1, 5)}
    plans = splitkv.warmup(
        **APPENDING,
        **stored,
        max_seqlen_k=LONGEST,
        batch_sizes=(1, 5),
        seqlens_q=(1, 3, 40),
        append=True,
        **turn,
    )
    assert not {plan.kernel for plan in plans} & {"torch_math", "torch_sdpa"}
    compiled.clear()
    for batch, new in product((1, 5), (1, 3, 40)):
        given = dict(caches[batch])
        for name in ("k", "v"):
            scale = given.pop(f"{name}_scale", None)
            if scale is not None:
                heads = scale.expand(batch, APPENDING["num_kv_heads"])
                given[f"{name}_descale"] = heads
        heads, kv_heads = APPENDING["num_heads"], APPENDING["num_kv_heads"]
        q, k, v = (
            torch.randn(batch, new, n, dim, device=DEVICE).bfloat16()
            for n in (heads, kv_heads, kv_heads)
        )
        for length in (LONGEST - 40, 200, 0):
            lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
            flash_attn_with_kvcache(
                q, k=k, v=v, **given, cache_seqlens=lengths, causal=True, **turn
            )
    assert compiled == []


@pairs(lambda values: True)
def test_nothing_is_compiled_after_warmup_of_prompts(
    values: cases.Values, compiled: list[str]
) -> None:
    heads = PROMPTS["num_heads"]
    calls = []
    for tokens in ((500, 12), (300, 33), (96, 1), (1, 16)):
        total = sum(tokens)
        cu = torch.tensor((0, tokens[0], total), dtype=torch.int32, device=DEVICE)
        given: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": max(tokens)}
        given |= cache_of(PROMPTS, 2, **values)
        if values["page_size"] is not None:
            given |= {"cu_seqlens_k": None, "max_seqlen_k": LONGEST, "cache_seqlens": cu.diff()}
        else:
            given |= {"cu_seqlens_k": cu, "max_seqlen_k": max(tokens)}
            for name in ("k_cache", "v_cache"):
                given[name] = given[name][0, :1].expand(total, -1, -1).contiguous()
            if values["granularity"] == "token":
                for name in ("k_scale", "v_scale"):
                    given[name] = given[name][0, :1].expand(total, -1).contiguous()
        k, v = given.pop("k_cache"), given.pop("v_cache")
        q = torch.randn(total, heads, PROMPTS["head_dim"], device=DEVICE).bfloat16()
        calls.append(partial(splitkv.attention_varlen, q, k, v, causal=True, **given))
    plans = splitkv.warmup(
        **PROMPTS,
        **values,
        max_seqlen_k=LONGEST,
        max_seqlen_q=LONGEST,
        batch_sizes=(2,),
    )
    assert not {plan.kernel for plan in plans} & {"torch_math", "torch_sdpa"}
    compiled.clear()
    for call in calls:
        call()
    assert compiled == []


@pytest.mark.parametrize(("stored", "granularity"), STORED[1:])
def test_warmup_takes_no_memory_for_a_quantised_cache(stored: str, granularity: str) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    how: dict[str, Any] = {"stored": stored, "granularity": granularity, "softcap": SOFTCAP}
    splitkv.warmup(**QUANTISED, max_seqlen_k=1 << 20, **how)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


# Not one scale a tensor: the second layer's does not begin at a multiple of 16 bytes, which warmup
# is not for.
@pytest.mark.parametrize(
    ("stored", "granularity"), [("as_is", None), ("int8", "head"), ("fp8", "token")]
)
def test_nothing_is_compiled_after_warmup_of_a_paged_cache(
    stored: str, granularity: str | None, compiled: list[str]
) -> None:
    heads, kv_heads, dim = 12, *PAGES.values()
    cache = PagedKVCache(
        num_pages=100,
        page_size=16,
        max_batch=2,
        max_seqlen=512,
        num_layers=2,
        dtype="bf16" if stored == "as_is" else stored,
        granularity=granularity,
        device=DEVICE,
        **PAGES,
    )
    q, k, v = (
        torch.randn(300, n, dim, device=DEVICE).bfloat16() for n in (heads, kv_heads, kv_heads)
    )
    if granularity in ("tensor", "head"):
        for layer in range(2):
            cache.calibrate(layer, k, v)
    cache.warmup()
    plans = splitkv.warmup(
        num_heads=heads,
        **PAGES,
        max_seqlen_k=512,
        max_seqlen_q=512,
        page_size=16,
        batch_sizes=(1, 2),
        stored=stored,
        granularity=granularity,
    )
    assert not {plan.kernel for plan in plans} & {"torch_math", "torch_sdpa"}
    sequences = cache.allocate(), cache.allocate()
    compiled.clear()
    for step, count in ((sequences[:1], 300), (sequences[1:], 77), (sequences, 1), (sequences, 1)):
        cache.extend(step, count)
        total = count * len(step)
        for layer in range(2):
            cache.append(layer, k[:total], v[:total])
            cache.attend(layer, q[:total] if count > 1 else q[:total, None])
    assert compiled == []
