"""After warmup nothing is compiled while serving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING, kernels
from triton import knobs

import splitkv

# No other test compiles them.
MODELS: dict[str, dict[str, Any]] = {
    "decode_split": {"num_heads": 16, "num_kv_heads": 2, "head_dim": 176},
    "hopper_decode_split": {"num_heads": 10, "num_kv_heads": 2, "head_dim": 128},
    "hopper_prefill": {"num_heads": 256, "num_kv_heads": 2, "head_dim": 128},
    "prefill": {"num_heads": 140, "num_kv_heads": 2, "head_dim": 120},
}
LONGEST = 2048


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles or loads from here on."""
    names: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        names.append(kwargs["fn"].name)

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
    batches, queries, options = (1, 6), (1, 3), {"window_size": (900, 0), "softcap": 20.0}
    plans = splitkv.warmup(
        **model,
        max_seqlen_k=LONGEST,
        page_size=page_size,
        batch_sizes=batches,
        seqlens_q=queries,
        **options,
    )
    assert kernel in {plan.kernel for plan in plans}
    assert {plan.kernel for plan in plans} <= set(compiled)
    compiled.clear()
    for batch in batches:
        for seqlen_q in queries:
            for capacity in (LONGEST, 1808, 1024, 720, 512, 256, 128):
                serve(model, batch, seqlen_q, capacity, page_size, **options)
    assert compiled == []


@pytest.mark.parametrize("kernel", kernels(SERVING))
def test_warmup_takes_no_memory_for_a_cache(kernel: str) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    splitkv.warmup(**MODELS[kernel], max_seqlen_k=1 << 20)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
