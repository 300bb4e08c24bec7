"""The tables of docs/flash-attn.md that say what functions and arguments do are true: each row has
a check here, and a row without one fails."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import flash_attn
from splitkv.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

PAGE = Path(__file__).parents[2] / "docs" / "flash-attn.md"
CU_Q, CU_K = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 9))
LENGTHS = CU_Q, CU_K, 5, 9


def rows(header: str) -> dict[str, str]:
    """First cell -> the rest, of the table whose first cell this is."""
    _, _, table = PAGE.read_text().partition(f"\n| {header} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {first: " | ".join(rest) for first, *rest in cells}


def tensors(rows_q: int = 5, keys: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (2, rows_q, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16)
    return tuple(torch.randn(s, generator=g) for s in shapes)  # type: ignore[return-value]


def packed() -> tuple[Tensor, ...]:
    return tuple(x.flatten(0, 1) for x in tensors())


def same(*results: Tensor) -> None:
    for x in results[1:]:
        torch.testing.assert_close(x, results[0])


def dense_functions() -> None:
    q, k, v = tensors()
    kv, qkv = torch.stack((k, v), 2), torch.stack((k, k, v), 2)
    wanted = splitkv.attention(q, k, v)
    same(wanted, flash_attn_func(q, k, v), flash_attn.flash_attn_kvpacked_func(q, kv))
    same(splitkv.attention(k, k, v), flash_attn.flash_attn_qkvpacked_func(qkv))


def varlen_functions() -> None:
    q, k, v = packed()
    kv, qkv = torch.stack((k, v), 1), torch.stack((k, k, v), 1)
    wanted = splitkv.attention_varlen(q, k, v, *LENGTHS)
    of_kv = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *LENGTHS)
    same(wanted, flash_attn_varlen_func(q, k, v, *LENGTHS), of_kv)
    of_qkv = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, CU_K, 9)
    same(splitkv.attention_varlen(k, k, v, CU_K, CU_K, 9, 9), of_qkv)


def cache_function() -> None:
    q, k, v = tensors()
    same(splitkv.decode(q, k, v), flash_attn_with_kvcache(q, k, v, causal=True))


def metadata() -> None:
    plan = get_scheduler_metadata(
        *(2, 1, 9, 4, 2, 16), torch.full((2,), 9, dtype=torch.int32), torch.float32
    )
    assert isinstance(plan, splitkv.Plan)


def combine() -> None:
    out = torch.randn(3, 2, 5, 4, 16)
    merged, lse = flash_attn.flash_attn_combine(out, torch.zeros(3, 2, 5, 4))
    same(out.mean(0), merged)
    same(torch.full((2, 5, 4), math.log(3)), lse)


FUNCTIONS: dict[str, Callable[[], None]] = {
    "flash_attn_func": dense_functions,
    "flash_attn_varlen_func": varlen_functions,
    "flash_attn_with_kvcache": cache_function,
    "get_scheduler_metadata": metadata,
    "flash_attn_combine": combine,
}


def mask_and_score() -> None:
    q, k, v = tensors()
    for given in (
        *({"softmax_scale": 0.3}, {"causal": True}, {"window_size": (2, 1)}, {"softcap": 2.0}),
        *({"alibi_slopes": torch.rand(4)}, {"deterministic": True}),
    ):
        same(splitkv.attention(q, k, v, **given), flash_attn_func(q, k, v, **given))  # type: ignore[call-overload]
    for bad in ({"softmax_scale": 0.0}, {"softmax_scale": -1.0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
            flash_attn_func(q, k, v, **bad)


def dropout() -> None:
    q, k, v = tensors()
    assert not torch.equal(flash_attn_func(q, k, v, dropout_p=0.5), flash_attn_func(q, k, v))


def sinks() -> None:
    q, k, v = tensors()
    logits = torch.rand(4, requires_grad=True)
    outs = [flash_attn_func(q, k, v, **{n: logits}) for n in ("s_aux", "learnable_sink")]
    same(splitkv.attention(q, k, v, sink_logits=logits), *outs)
    assert (torch.autograd.grad(outs[0].sum(), logits)[0] != 0).all()


def tables() -> None:
    q, k, v = tensors(1)
    for size in (1, 3):
        table = torch.arange(2 * 9 // size, dtype=torch.int32).view(2, -1)
        pages = [x.reshape(-1, size, 2, 16) for x in (k, v)]
        for name in ("block_table", "page_table"):
            same(
                flash_attn_with_kvcache(q, k, v),
                flash_attn_with_kvcache(q, *pages, **{name: table}),
            )


def used() -> None:
    q, k, v = (x.requires_grad_() for x in packed())
    only = {n: torch.tensor([2, 3], dtype=torch.int32) for n in ("seqused_q", "seqused_k")}
    out = flash_attn_varlen_func(q, k, v, *LENGTHS, **only)  # type: ignore[arg-type]
    assert (out[2:5] == 0).all() and (out[8:] == 0).all() and (out[:2] != 0).any()
    for grad, (a, b) in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), ((2, 5), (2, 9), (2, 9)), strict=True
    ):
        assert (grad[a:b] == 0).all()


def new_tokens() -> None:
    q, k, v = tensors(1, 2)
    caches = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)
    before = torch.tensor([3, 7], dtype=torch.int32)
    flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=before)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[0, 3:5], new[0]) and torch.equal(cache[1, 7], new[1, 0])
        assert (cache[0, 5:] == 0).all() and (cache[1, :7] == 0).all()
    other = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)
    flat, cu = (x.flatten(0, 1) for x in (k, v)), torch.tensor([0, 2, 4], dtype=torch.int32)
    flash_attn_with_kvcache(q, *other, *flat, cache_seqlens=before, cu_seqlens_k_new=cu)
    assert all(torch.equal(a, b) for a, b in zip(caches, other, strict=True))


def rotary() -> None:
    q, k, v = tensors(1, 1)
    angle = torch.rand(8, 4)
    caches = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)
    before = torch.tensor([3, 5], dtype=torch.int32)
    tables = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": False}
    flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=before, **tables)  # type: ignore[arg-type]
    c, s = angle[3].cos(), angle[3].sin()
    a, b = k[0, 0, :, :4], k[0, 0, :, 4:8]
    turned = torch.cat((a * c - b * s, a * s + b * c, k[0, 0, :, 8:]), -1)
    same(turned, caches[0][0, 3])


def lengths() -> None:
    q, k, v = tensors(1)
    as_tensor = torch.full((2,), 6, dtype=torch.int32)
    wanted = splitkv.decode(q, k[:, :6], v[:, :6])
    same(wanted, *(flash_attn_with_kvcache(q, k, v, cache_seqlens=n) for n in (6, as_tensor)))


def bounds_of_lengths() -> None:
    q, k, v = packed()
    *cu, most_q, most_k = LENGTHS
    bounds = torch.tensor(most_q), torch.tensor(most_k)
    same(flash_attn_varlen_func(q, k, v, *LENGTHS), flash_attn_varlen_func(q, k, v, *cu, *bounds))  # type: ignore[arg-type]


def batch_rows() -> None:
    q, k, v = tensors(1)
    index = torch.tensor([1, 0], dtype=torch.int32)
    same(
        splitkv.decode(q, k.flip(0), v.flip(0)),
        flash_attn_with_kvcache(q, k, v, cache_batch_idx=index),
    )


def leftpad() -> None:
    q, k, v = tensors(1)
    pad, ends = (torch.full((2,), n, dtype=torch.int32) for n in (2, 9))
    for name in ("cache_leftpad", "leftpad_k"):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=ends, **{name: pad})  # type: ignore[arg-type]
        same(splitkv.decode(q, k[:, 2:], v[:, 2:]), out)


def packed_queries() -> None:
    q, k, v = tensors()
    out = flash_attn_with_kvcache(
        q.flatten(0, 1), k, v, causal=True, cu_seqlens_q=CU_Q, max_seqlen_q=5
    )
    same(splitkv.decode(q, k, v).flatten(0, 1), out)


def descales() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors())
    scale = torch.full((2, 2), 0.5)
    names = "q_descale", "k_descale", "v_descale"
    out = flash_attn_func(q, k, v, **dict.fromkeys(names, scale))  # type: ignore[arg-type]
    wide = splitkv.attention(*(x.float() * 0.5 for x in (q, k, v)))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wide, rtol=0.1, atol=0.05)
    same(out, flash_attn_func(q, k, v, **dict.fromkeys(names, torch.tensor([0.5]))))  # type: ignore[arg-type]


def hints() -> None:
    q, k, v = tensors()
    wanted = flash_attn_func(q, k, v)
    for given in ({"num_splits": 3}, {"pack_gqa": True}, {"sm_margin": 8}):
        same(wanted, flash_attn_func(q, k, v, **given))  # type: ignore[arg-type]
    for bad in ({"num_splits": -1}, {"pack_gqa": 1}, {"sm_margin": -1}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
            flash_attn_func(q, k, v, **bad)  # type: ignore[arg-type]
    same(flash_attn_with_kvcache(q, k, v), flash_attn_with_kvcache(q, k, v, num_splits=3))


def scheduler_metadata() -> None:
    q, k, v = tensors(1)
    plan = splitkv.plan(q, k, v, causal=False)
    same(
        flash_attn_with_kvcache(q, k, v), flash_attn_with_kvcache(q, k, v, scheduler_metadata=plan)
    )
    with pytest.raises(ValueError, match="^scheduler_metadata: "):
        flash_attn_with_kvcache(tensors(3)[0], k, v, scheduler_metadata=plan)


def triple() -> None:
    q, k, v = tensors()
    out, lse, weights = flash_attn_func(q, k, v, return_attn_probs=True)
    same(out, flash_attn_func(q, k, v))
    assert lse.shape == (2, 4, 5) and weights.numel() == 0
    with pytest.raises(splitkv.UnsupportedProblem, match="return_attn_probs: "):
        flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


def pair() -> None:
    q, k, v = tensors()
    wanted = splitkv.attention(q, k, v, return_lse=True)
    for call in (flash_attn_func, flash_attn_with_kvcache):
        for a, b in zip(wanted, call(q, k, v, return_softmax_lse=True), strict=True):
            same(a, b)


def chunks() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    out = flash_attn_func(q, k, v, causal=True, attention_chunk=3)
    same(splitkv.attention(q, k, v, causal=True, attention_chunk=3), out)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def qv() -> None:
    q, k, v = tensors()
    with pytest.raises(splitkv.UnsupportedProblem, match="qv: "):
        flash_attn_func(q, k, v, qv=q)


ARGUMENTS: dict[str, Callable[[], None]] = {
    "softmax_scale": mask_and_score,
    "dropout_p": dropout,
    "s_aux": sinks,
    "block_table": tables,
    "seqused_q": used,
    "k": new_tokens,
    "rotary_cos": rotary,
    "cache_seqlens": lengths,
    "max_seqlen_q": bounds_of_lengths,
    "cache_batch_idx": batch_rows,
    "cache_leftpad": leftpad,
    "cu_seqlens_q": packed_queries,
    "q_descale": descales,
    "num_splits": hints,
    "pack_gqa": hints,
    "scheduler_metadata": scheduler_metadata,
    "return_attn_probs": triple,
    "return_softmax_lse": pair,
    "attention_chunk": chunks,
    "qv": qv,
}


@pytest.mark.parametrize(
    "header, checks",
    [("function", FUNCTIONS), ("argument", ARGUMENTS)],
    ids=["function", "argument"],
)
def test_every_row_has_a_check(header: str, checks: dict[str, Any]) -> None:
    assert {re.findall(r"`(\w+)`", cell)[0] for cell in rows(header)} == checks.keys()


@pytest.mark.parametrize("name", [*FUNCTIONS, *ARGUMENTS])
def test_a_row_is_true(name: str) -> None:
    (FUNCTIONS | ARGUMENTS)[name]()


@pytest.mark.parametrize("row", rows("LSE of a row without keys"))
def test_lse_of_a_row_without_keys(row: str) -> None:
    q, k, _ = tensors(3, 1)
    sink = {"without a sink": None, "with a sink": 0.7, "with a sink of `-inf`": -math.inf}[row]
    given = {} if sink is None else {"s_aux": torch.full((4,), sink)}
    cells = rows("LSE of a row without keys")[row].split(" | ")
    for cell, form in zip(cells, ("return_softmax_lse", "return_attn_probs"), strict=True):
        found = flash_attn_func(q, k, k, causal=True, **{form: True}, **given)[1][..., :2]  # type: ignore[arg-type]
        said = re.match(r"`(-?inf)`", cell)
        wanted = float(said[1]) if said else sink
        assert wanted is not None and (found == wanted).all(), (cell, found)
