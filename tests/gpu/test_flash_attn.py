"""FlashAttention's functions on a GPU: against the reference, launches counted, in graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import appending
import cases
import pytest
import torch
from doors import test_flash_attn as dense
from doors import test_flash_attn_8bit as stored
from doors import test_flash_attn_kv_cache as cached
from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.flash_attn import flash_attn_combine, flash_attn_with_kvcache, get_scheduler_metadata
from splitkv.testing import Call, assert_close, captured, check

DEVICE = "cuda"
NAMES = ("k_cache", "v_cache")
GPU_ALONE = [torch.profiler.ProfilerActivity.CUDA]
DENSE_AXES: cases.Axes = {
    **dense.AXES,
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((64, 64), (128, 128), (192, 128), (59, 59)),
    "seqlens": ((70, 200), (200, 200), (90, 40)),
}
CACHE_AXES: cases.Axes = {
    **cached.AXES,
    "dtype": (torch.bfloat16, torch.float16),
    "dims": ((64, 64), (128, 128), (192, 128)),
    "heads": ((4, 2), (3, 3), (8, 1)),
}


@pytest.mark.parametrize(
    "values", cases.pairs(DENSE_AXES, dense.valid), ids=lambda v: f"{v['kind']}{v['pack']}"
)
def test_outputs_lse_and_gradients(values: cases.Values) -> None:
    problem = dense.problem_of(values)
    if values["pack"] == 3 and problem.kind == "varlen":
        lengths = (problem.seqlen_k,) * problem.batch
        check(problem, run=same_lengths(dense.run(3)), lengths=lengths, device=DEVICE)
        return
    check(problem, run=dense.run(values["pack"]), strided=values["strided"], device=DEVICE)


def same_lengths(call_flash: Callable[..., Any]) -> Callable[..., Any]:
    """A varlen call whose queries are as long as its keys."""

    def call_with(problem: Problem, call: Call) -> Any:
        call["q"] = torch.randn_like(call["k"]).requires_grad_()
        call["cu_seqlens_q"] = call["cu_seqlens_k"]
        return call_flash(problem, call)

    return call_with


def moved(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.items()}


@pytest.mark.parametrize(
    "values", cases.pairs(CACHE_AXES, cached.valid), ids=lambda v: str(v["seqlens"])
)
def test_append_rotate_and_attend(values: cases.Values) -> None:
    example = cached.Example(values)
    ref, ref_lse, caches = example.by_hand()
    pt = example.by_hand(upcast=False)[0]
    call = moved(example.call)
    result = flash_attn_with_kvcache(**call)
    out, lse = result if values["lse"] else (result, None)
    if lse is not None:
        lse = lse if values["ragged_q"] else lse.transpose(0, 1).flatten(1)
        torch.testing.assert_close(lse.cpu().double(), ref_lse.double(), rtol=1e-3, atol=3e-3)
    eps = torch.finfo(values["dtype"]).eps
    for name, wanted in caches.items():
        torch.testing.assert_close(
            call[name].cpu(), wanted, rtol=2 * eps, atol=2 * eps, equal_nan=True
        )
    assert_close(out.flatten(0, -3).cpu(), ref, pt, factor=3.0)


STORED_AXES: cases.Axes = {
    **stored.AXES,
    "descales": (
        *("none", cases.Alike(("one", "expanded"))),
        cases.Alike(("of heads", "of sequences", "mixed")),
    ),
    "dim": (64, 128),
}


@pytest.mark.parametrize(
    "values",
    cases.pairs(STORED_AXES, stored.valid),
    ids=lambda v: f"{v['function']}, {v['descales']}",
)
def test_eight_bit_inputs(values: cases.Values) -> None:
    stored.Example(values).check(DEVICE)


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("dtype", [stored.INT8, stored.E4M3], ids=str)
def test_new_tokens_in_the_type_of_the_cache(dtype: torch.dtype, rotary: str | None) -> None:
    stored.test_new_tokens_in_the_type_of_the_cache(dtype, rotary, "of sequences", DEVICE)


def decode_step(**changes: Any) -> dict[str, Any]:
    return appending.model_step((32, 8), 16, DEVICE, **changes)


@pytest.mark.parametrize(("num_splits", "wanted"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("place", ["pages", "rows"])
def test_append_rotary_and_attention_are_one_launch(
    place: str, num_splits: int, wanted: int, tmp_path: Path
) -> None:
    """With one split; a combine where there are more."""
    call = decode_step(num_splits=num_splits)
    if place == "rows":
        call["k_cache"], call["v_cache"] = (call[n].view(4, -1, 8, 128) for n in NAMES)
        call["cache_batch_idx"] = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=DEVICE)
        del call["page_table"]
    work = launches(lambda: flash_attn_with_kvcache(**call), tmp_path)
    assert not any("append_kv" in name for name in work)
    assert len(work) == wanted, work


def launches(run: Callable[[], Any], folder: Path) -> list[str]:
    """What a call starts on the GPU, once it is known."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=GPU_ALONE, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    # by category, as the profiler's own overhead has a time on the device too
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    work = [e["name"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return [name for name in work if "FillFunctor" not in name]  # the tests' poison


@pytest.mark.parametrize("how", ["dense", "packed", "compiled"])
@pytest.mark.parametrize(("queries", "new"), [(1, 1), (1, 40), (16, 16), (17, 17), (64, 64)])
def test_at_most_two_launches(how: str, queries: int, new: int, tmp_path: Path) -> None:
    """Whoever writes the new tokens, and however many parts there are."""
    call = appending.model_step((8, 1), 64, DEVICE)
    q, k = (
        torch.randn(4, n, h, 128, device=DEVICE).bfloat16() for n, h in ((queries, 8), (new, 1))
    )
    call |= {"q": q, "k": k, "v": k.clone(), "cache_seqlens": call["cache_seqlens"] + 3000}
    if how == "packed":
        bounds = torch.arange(5, dtype=torch.int32, device=DEVICE) * queries
        call |= {"q": q.flatten(0, 1), "cu_seqlens_q": bounds, "max_seqlen_q": queries}
    function = flash_attn_with_kvcache
    if how == "compiled":
        torch.compiler.reset()
        function = torch.compile(function, backend="eager")
    work = launches(lambda: function(**call), tmp_path)
    assert 1 <= len(work) <= 2, work


def test_no_host_sync(no_host_sync: Callable[[], AbstractContextManager[None]]) -> None:
    calls = [
        decode_step(),
        decode_step(cache_batch_idx=torch.arange(4, dtype=torch.int32, device=DEVICE)),
        decode_step(cache_leftpad=torch.zeros(4, dtype=torch.int32, device=DEVICE)),
    ]
    for call in calls:
        flash_attn_with_kvcache(**call)
        with no_host_sync():
            flash_attn_with_kvcache(**call)


def test_a_generation_in_a_graph() -> None:
    """Lengths and tokens change between replays; metadata made once serves all of them."""
    call = decode_step(return_softmax_lse=True)
    metadata = get_scheduler_metadata(
        4, 1, 1024, 32, 8, 128, call["cache_seqlens"], page_size=16, causal=True
    )

    def run() -> Any:
        return flash_attn_with_kvcache(**call, scheduler_metadata=metadata)

    replay, (out, lse) = captured(run)
    for lengths in ((0, 1, 2, 3), (1023, 500, 0, 16), (15, 16, 17, 1000)):
        call["cache_seqlens"].copy_(torch.tensor(lengths))
        for name in ("q", "k", "v"):
            call[name].normal_()
        other = {**call, "k_cache": call["k_cache"].clone(), "v_cache": call["v_cache"].clone()}
        replay()
        wanted, wanted_lse = flash_attn_with_kvcache(**other, scheduler_metadata=metadata)
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
        assert torch.equal(call["k_cache"], other["k_cache"])


def test_combine_merges_parts() -> None:
    outs = torch.randn(5, 2, 33, 8, 128, device=DEVICE)
    lses = torch.randn(5, 2, 33, 8, device=DEVICE)
    lses[1] = -torch.inf
    out, lse = flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    exact, exact_lse = flash_attn_combine(outs.cpu(), lses.cpu())
    torch.testing.assert_close(out.cpu().float(), exact, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(lse.cpu(), exact_lse, rtol=1e-5, atol=1e-5)


def test_long_queries_take_the_prefill_kernel() -> None:
    """20 queries on a cache of pages: not decode, and the same numbers as sequence by sequence."""
    values = {**cached.PLAIN, "dtype": torch.bfloat16, "dims": (64, 64), "seqlens": (20, 9)}
    example = cached.Example({**values, "page_size": 8, "mask": Mask(True)})
    ref, _, _ = example.by_hand()
    pt = example.by_hand(upcast=False)[0]
    call = moved(example.call) | {"return_softmax_lse": False}
    out = flash_attn_with_kvcache(**call)
    assert_close(out.flatten(0, 1).cpu(), ref, pt, factor=3.0)
