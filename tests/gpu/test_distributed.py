"""Attention over ranks on GPUs, against one process.

Two processes for all cases, as starting them takes longest, on a GPU each with NCCL. On one GPU,
which NCCL does not give to two ranks, gloo moves what they exchange through host memory: what is
computed is the same, what runs beside what is not. Groups of one rank are of NCCL on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_cases import CACHES, SEQUENCES, CacheSizes, Sizes, compare, operands, shared_cache
from rank_tasks import alone_in_nccl, cache, moved, on_gpu, replayed, sequence
from ranks import Ranks
from running import DEVICE
from torch import Tensor

import splitkv
from splitkv.distributed import attention_backward
from splitkv.testing import assert_close

HALF = torch.bfloat16
TOKENS = Sizes(640, (0, 100, 100, 420, 600, 630), 128, 128)
KEYS = CacheSizes(8, 2, 128, 2048, 16)
HEADS = (8, 2)
STEPS = ((2048, 1, 700), (5, 5, 5), (0, 2048, 63), (1000, 129, 0))  # lengths of the replays


def sequences(ranks: Ranks, name: str, *, alone: bool) -> None:
    way, packed, options = SEQUENCES[name]
    call = operands(options, HEADS, packed=packed, dtype=HALF, sizes=TOKENS)
    found = ranks.run(on_gpu, 2, alone_in_nccl if alone else sequence, way, call)
    call, parts = moved(call, DEVICE), moved(found, DEVICE)
    for each in [[part] for part in parts] if alone else [parts]:
        compare(call, way["layout"], each)


def caches(ranks: Ranks, name: str) -> None:
    case, options = CACHES[name]
    shared = shared_cache(case | {"size": 2}, options, dtype=HALF, sizes=KEYS)
    shared.compare(ranks.run(on_gpu, 2, cache, shared.way, shared.calls))


def replays(ranks: Ranks, name: str) -> None:
    case, options = CACHES[name]
    shared = shared_cache(case | {"size": 1}, options, dtype=HALF, sizes=KEYS)
    steps = [torch.tensor(lengths, dtype=torch.int32) for lengths in STEPS]
    for found in ranks.run(on_gpu, 2, replayed, shared.way, shared.calls[0], steps):
        for lengths, result in zip(steps, found, strict=True):
            then = shared._replace(whole=shared.whole | {"cache_seqlens": lengths})
            then.compare([result])


@pytest.mark.long
def test_over_ranks() -> None:
    """Every case is run, whatever becomes of those before."""
    cases: list[tuple[str, Callable[..., None], dict[str, Any]]] = [
        *((name, sequences, {"alone": False}) for name in SEQUENCES),
        *((name, caches, {}) for name in CACHES),
        *((f"{name}, one rank", sequences, {"alone": True}) for name in ("heads", "keys packed")),
        *((f"{name}, in a graph", replays, {"name": name}) for name in CACHES),
    ]
    failed = []
    with Ranks(2, on_gpu=True) as ranks:
        for title, hold, options in cases:
            try:
                hold(ranks, **{"name": title.partition(",")[0], **options})
            except AssertionError as error:
                failed.append(f"{title}: {error}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_of_blocks_add_up(sinks: bool) -> None:
    """The ring's use of `attention_backward`: blocks of keys, and the merged output and LSE."""
    call = operands({}, HEADS, packed=False, dtype=HALF, sizes=TOKENS)
    if not sinks:
        call["sink_logits"] = None
    call = moved(call, DEVICE)
    q, k, v = (call[name] for name in "qkv")
    blocks = slice(0, 250), slice(250, None)
    parts = [splitkv.attention(q, k[:, s], v[:, s], return_lse=True) for s in blocks]
    (out, lse), (other, other_lse) = ((out.float(), lse) for out, lse in parts)
    out, lse = splitkv.merge_states(out, lse, other, other_lse)
    if sinks:
        out = splitkv.reference.apply_sink_logits(out, lse, call["sink_logits"])
    given = {"grad_lse": call["grad_lse"], "sink_logits": call["sink_logits"]}
    found = [
        attention_backward(call["grad_out"], q, k[:, s], v[:, s], out.to(HALF), lse, **given)
        for s in blocks
    ]
    exact, working = (of_whole(call, upcast=upcast) for upcast in (True, False))
    actual: dict[str, Tensor | None] = {
        "dq": found[0].q.float() + found[1].q.float(),
        "dk": torch.cat([part.k for part in found], 1),
        "dv": torch.cat([part.v for part in found], 1),
        "dsink_logits": found[0].sink_logits,  # of all keys, whichever block it comes with
    }
    for name, ref in exact.items():
        x = actual[name]
        assert x is not None
        assert_close(x.to(working[name].dtype), ref, working[name], factor=3.0, name=name)


def of_whole(call: dict[str, Any], *, upcast: bool) -> dict[str, Tensor]:
    """The gradients by definition."""
    names = ["q", "k", "v", *(["sink_logits"] if call["sink_logits"] is not None else [])]
    leaves = {name: call[name].clone().requires_grad_() for name in names}
    out, lse = splitkv.reference.attention(**leaves, upcast=upcast)
    assert lse is not None
    grads = call["grad_out"].to(out), call["grad_lse"].to(lse)
    found = torch.autograd.grad((out, lse), list(leaves.values()), grads)
    return {f"d{name}": grad for name, grad in zip(names, found, strict=True)}


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_policy_step_under_ulysses(kv_heads: int) -> None:
    """Packed sequences, gpt-oss, sinks trained: verl's exchange, or what stands in for it."""
    pytest.importorskip("transformers", reason="the transformers extra is not installed")
    from rank_models import assert_step, step

    with Ranks(2, on_gpu=True) as ranks:
        found = ranks.run(step, 2, kv_heads, "splitkv_ulysses", True, "cuda")
    assert_step(found, kv_heads, 1e-3)
