"""Which kernels FlashAttention-2 launches for one token of Qwen2.5-7B, by torch's profiler.

The article runs the model under Nsight Systems with 64 and with 512 new tokens. Which kernels run
depends on the shape alone, so the last step's attention is enough: torch's FlashAttention-2 on 28
query heads over 4 KV heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from splitkv.core.problem import Problem
from splitkv.lab.harness.lines import Record

PROMPT, NEW_TOKENS = 30, (64, 512)  # tokens of the article's prompt, about; and after it
HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128  # of Qwen2.5-7B
COMBINE = "flash_fwd_splitkv_combine_kernel"


def qwen(new_tokens: int) -> Problem:
    """The last step's attention after so many new tokens."""
    keys = PROMPT + new_tokens
    return Problem("decode", 1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, 1, keys)


def measure(rounds: int) -> list[Record]:
    """A row for each kernel launched at each length; `rounds` makes no difference."""
    rows = []
    for tokens in NEW_TOKENS:
        p = qwen(tokens)
        q = torch.randn(1, HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(1, KV_HEADS, p.seqlen_k, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        for name, grid in launched(q, k, v):
            found: Record = {
                "kernel": name,
                "us": None,
                "err": None,
                "repeats": None,
                "reasons": [],
            }
            rows.append({**found, "keys": p.seqlen_k, "grid": grid})
    return rows


def launched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[str, list[int]]]:
    """(name, grid) of the kernels that FlashAttention-2 launches for these heads."""

    def attend() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.cuda.synchronize()

    attend()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiled:
        attend()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        yield from kernels(json.loads(path.read_text()))


def kernels(trace: Any) -> Iterator[tuple[str, list[int]]]:
    """(name, grid) of the kernels of attention in a trace of the profiler; grid [] if unnamed."""
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" and "flash" in event["name"]:
            yield event["name"], list(event.get("args", {}).get("grid", []))
