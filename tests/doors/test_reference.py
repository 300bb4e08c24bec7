"""The definition of attention, held to loops over float64 numbers and to PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv import reference
from splitkv.core.masks import FAR, Mask
from splitkv.testing import (
    Codec,
    Paged,
    Problem,
    Score,
    assert_close,
    assert_lse_close,
    expected,
    make_operands,
)

DENSE = Problem("dense", 2, 4, 2, 6, 5, 3, 5, dtype="float64", return_lse=True)
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window_left=1, window_right=1),
    "sink_tokens": Mask(causal=True, window_left=1, sink_tokens=2),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"score": Score(softcap=True)},
    "alibi": {"score": Score(alibi=True)},
    "sink_logits": {"sink_logits": True},
    "all": {"score": Score(True, True), "sink_logits": True},
}


def loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, [S, heads, D], by the sums of the definition."""
    seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads, head_dim_v = v.shape
    scale = softmax_scale or 1 / math.sqrt(head_dim)
    out = torch.zeros(seqlen_q, num_heads, head_dim_v, dtype=torch.float64)
    lse = torch.full((num_heads, seqlen_q), -math.inf, dtype=torch.float64)
    for h in range(num_heads):
        g = h // (num_heads // num_kv_heads)
        for i in range(seqlen_q):
            pos = seqlen_k - seqlen_q + i
            scores = {}
            for j in range(seqlen_k):
                if not mask.visible(pos, j):
                    continue
                pairs = zip(q[i, h].tolist(), k[j, g].tolist(), strict=True)
                s = scale * sum(a * b for a, b in pairs)
                if softcap:
                    s = softcap * math.tanh(s / softcap)
                if alibi_slopes is not None:
                    s -= float(alibi_slopes[h]) * abs(pos - j)
                scores[j] = s
            if not scores:
                continue
            l = sum(math.exp(s) for s in scores.values())
            lse[h, i] = math.log(l)
            if sink_logits is not None:
                l += math.exp(float(sink_logits[h]))
            for j, s in scores.items():
                out[i, h] += math.exp(s) / l * v[j, g]
    return out, lse


def by_loops(problem: Problem, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Every sequence of a dense or varlen call on its own."""
    options = {n: call[n] for n in ("softmax_scale", "softcap", "sink_logits")}
    results = []
    for b in range(problem.batch):
        if problem.kind == "dense":
            q, k, v = (call[n][b] for n in "qkv")
        else:
            cu_q, cu_k = call["cu_seqlens_q"], call["cu_seqlens_k"]
            q = call["q"][cu_q[b] : cu_q[b + 1]]
            k, v = (call[n][cu_k[b] : cu_k[b + 1]] for n in "kv")
        slopes = call["alibi_slopes"]
        slopes = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        mask = problem.mask
        if problem.sequence_sink_tokens:
            mask = replace(mask, sink_tokens=int(call["sink_tokens"][b].clamp(min=0)))
        results.append(loops(q, k, v, mask, alibi_slopes=slopes, **options))
    outs, lses = zip(*results, strict=True)
    if problem.kind == "dense":
        return torch.stack(outs), torch.stack(lses)
    return torch.cat(outs), torch.cat(lses, dim=1)


def same(actual: tuple[Tensor, Tensor | None], exact: tuple[Tensor, Tensor]) -> None:
    """Equal to float64's own rounding, infinities included."""
    assert actual[1] is not None
    torch.testing.assert_close(actual[0], exact[0])
    torch.testing.assert_close(actual[1], exact[1])


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6), (2, 0)], ids=str)
def test_dense_is_the_sums(shape: tuple[int, int], mask: str, feature: str) -> None:
    changes = FEATURES[feature]
    seqlen_q, seqlen_k = shape
    problem = replace(DENSE, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=MASKS[mask], **changes)
    call = make_operands(problem)
    same(expected(problem, call), by_loops(problem, call))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
def test_varlen_is_every_sequence_alone(mask: str, feature: str) -> None:
    problem = replace(
        DENSE, kind="varlen", batch=4, seqlen_q=4, mask=MASKS[mask], **FEATURES[feature]
    )
    call = make_operands(problem, lengths=(5, 0, 2, 3), seed=3)
    assert 0 < call["q"].shape[0] < 16
    if feature == "alibi":
        call["alibi_slopes"] = torch.rand(problem.batch, problem.num_heads)
    same(expected(problem, call), by_loops(problem, call))


OWN_SINKS = [
    *(
        Mask(True, 1, -1, FAR),
        Mask(window_left=0, sink_tokens=3),
        Mask(True, chunk=2, sink_tokens=FAR),
    ),
    Mask(True, 0, -1, 2, 3),
]


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("mask", OWN_SINKS, ids=str)
def test_sink_tokens_of_each_sequence(mask: Mask, kind: Any) -> None:
    """Of none to more than there are keys; fewer than none are none."""
    problem = replace(DENSE, kind=kind, batch=4, mask=mask, sequence_sink_tokens=True)
    call = make_operands(problem, seed=5)
    assert call["sink_tokens"].unique().numel() > 1
    same(expected(problem, call), by_loops(problem, call))
    call["sink_tokens"][0] = -3
    same(expected(problem, call), by_loops(problem, call))


RANGES = torch.tensor([[[1, 4], [6, 6]], [[0, 5], [3, 9]], [[0, 0], [2, 1]]], dtype=torch.int32)


@pytest.mark.parametrize(
    "mask", [Mask(True), Mask(True, 1), Mask(True, 0, -1, 1), Mask(True, chunk=2)]
)
def test_ranges_are_seen_from_within(mask: Mask) -> None:
    """By the definition, pair by pair: the mask's keys, and those of a range that both are in."""
    seqlens_q, seqlens_k = (5, 4, 3), (7, 8, 3)
    problem = replace(
        DENSE, kind="varlen", batch=3, seqlen_q=5, seqlen_k=8, mask=mask, bidirectional_ranges=True
    )
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(n), heads, dim, generator=g, dtype=torch.float64)
        for n, heads, dim in ((seqlens_q, 4, 6), (seqlens_k, 2, 6), (seqlens_k, 2, 5))
    )
    assert problem.span == ((0, 8),)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (seqlens_q, seqlens_k))
    out, lse = reference.attention_varlen(
        q, k, v, cu_q, cu_k, mask=mask, bidirectional_ranges=RANGES
    )
    for b, (len_q, len_k) in enumerate(zip(seqlens_q, seqlens_k, strict=True)):
        for i in range(len_q):
            pos, row = len_k - len_q + i, int(cu_q[b]) + i
            together = [
                any(a <= pos < z and a <= key < z for a, z in RANGES[b].tolist())
                for key in range(len_k)
            ]
            seen = [key for key in range(len_k) if together[key] or mask.visible(pos, key)]
            for h in range(4):
                keys = k[[int(cu_k[b]) + key for key in seen], h // 2]
                s = keys @ q[row, h] / math.sqrt(6)
                values = v[[int(cu_k[b]) + key for key in seen], h // 2]
                torch.testing.assert_close(out[row, h], s.softmax(0) @ values)
                torch.testing.assert_close(lse[h, row], s.logsumexp(0))


def test_varlen_tokens_after_the_last_sequence_see_nothing() -> None:
    problem = replace(DENSE, kind="varlen", mask=Mask())
    call = make_operands(problem)
    used = call["q"].shape[0]
    exact = expected(problem, call)
    for name in "qkv":
        call[name] = torch.cat([call[name], torch.ones_like(call[name][:2])])
    out, lse = expected(problem, call)
    assert lse is not None
    same((out[:used], lse[:, :used]), exact)
    assert (out[used:] == 0).all() and (lse[:, used:] == -math.inf).all()


@pytest.mark.parametrize("place", [Paged(1), Paged(2), Paged(8)], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
def test_decode_is_dense_on_the_used_keys(mask: str, feature: str, place: Paged) -> None:
    contiguous = replace(
        DENSE, kind="decode", batch=4, seqlen_k=7, lengths="device", mask=MASKS[mask]
    )
    contiguous = replace(contiguous, **FEATURES[feature])
    lengths = (7, 0, 2, 5)
    call = make_operands(contiguous, lengths=lengths)
    if feature == "alibi":
        call["alibi_slopes"] = torch.rand(contiguous.batch, contiguous.num_heads)
    for b, length in enumerate(lengths):
        slopes = call["alibi_slopes"]
        slopes = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        exact = loops(
            call["q"][b],
            call["k_cache"][b, :length],
            call["v_cache"][b, :length],
            contiguous.mask,
            softcap=call["softcap"],
            sink_logits=call["sink_logits"],
            alibi_slopes=slopes,
        )
        out, lse = expected(contiguous, call)
        assert lse is not None
        same((out[b], lse[b]), exact)

    paged = replace(contiguous, place=place)
    paged_call = make_operands(paged, lengths=lengths)
    as_slab = dict(paged_call, page_table=None)
    table = paged_call["page_table"]
    for name in ("k_cache", "v_cache"):
        pool = paged_call[name]
        slab = torch.full((4, 7, *pool.shape[2:]), math.nan, dtype=pool.dtype)
        for b, length in enumerate(lengths):
            for j in range(length):
                slab[b, j] = pool[table[b, j // place.page_size], j % place.page_size]
        as_slab[name] = slab
    out, lse = expected(contiguous, as_slab)
    assert lse is not None
    same(expected(paged, paged_call), (out, lse))


def test_unused_cache_and_table_entries_are_never_used() -> None:
    problem = replace(
        DENSE, kind="decode", seqlen_k=9, lengths="device", place=Paged(2), needs_grad=True
    )
    call = make_operands(problem, lengths=(9, 3))
    table = call["page_table"]
    assert (table < 0).any() or (table >= call["k_cache"].shape[0]).any()
    assert call["k_cache"].isnan().any() and call["v_cache"].isnan().any()
    out, lse = expected(problem, call)
    assert out.isfinite().all()
    leaves = [call["q"], call["k_cache"], call["v_cache"]]
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("place", [None, Paged(4)], ids=str)
def test_quantised_values_are_stored_times_scale(
    name: Any, granularity: Any, place: Paged | None
) -> None:
    problem = replace(
        DENSE,
        kind="decode",
        dtype="float32",
        seqlen_k=9,
        lengths="device",
        codec=Codec(name, granularity),
    )
    problem = problem if place is None else replace(problem, place=place)
    call = make_operands(problem, lengths=(9, 5))
    plain = dict(call, k_scale=None, v_scale=None)
    for cache in ("k", "v"):
        stored, scale = call[f"{cache}_cache"].double(), call[f"{cache}_scale"].double()
        wide = torch.empty_like(stored)
        for a, b, h in torch.cartesian_prod(*map(torch.arange, stored.shape[:3])).tolist():
            at: Any = {"tensor": 0, "head": h, "token": (a, b, h)}[granularity]
            wide[a, b, h] = stored[a, b, h] * scale[at]
        plain[f"{cache}_cache"] = wide
        assert scale.numel() == 1 or scale.unique().numel() > 1
    out, lse = expected(problem, call)
    ref, ref_lse = expected(replace(problem, dtype="float64"), plain)
    torch.testing.assert_close(out, ref)
    torch.testing.assert_close(lse, ref_lse)


def test_scales_of_queries_and_of_each_sequence() -> None:
    problem = replace(DENSE, kind="decode", seqlen_q=2)
    call = make_operands(problem)
    exact = expected(problem, call)
    q_scale, k_scale, v_scale = torch.rand(2, 4) + 0.5, torch.rand(2, 2) + 0.5, torch.rand(2) + 0.5
    scaled = dict(call, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    scaled["q"] = call["q"] / q_scale.double()[:, None, :, None]
    scaled["k_cache"] = call["k_cache"] / k_scale.double()[:, None, :, None]
    scaled["v_cache"] = call["v_cache"] / v_scale.double()[:, None]
    out, lse = expected(problem, scaled)
    assert exact[1] is not None
    same((out, lse), (exact[0], exact[1]))

    stored = (call["q"] * 40).round().clamp(-127, 127)
    int8 = dict(call, q=stored.to(torch.int8), q_scale=torch.tensor([1 / 40]))
    out, lse = expected(problem, int8)
    ref, ref_lse = expected(problem, dict(call, q=stored * torch.tensor(1 / 40).double()))
    assert ref_lse is not None
    same((out, lse), (ref, ref_lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_against_torch(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 40, h, 32, generator=g).to(dtype) for h in (6, 2, 2))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    ref, _ = reference.attention(q, k, v, mask=Mask(causal=True))
    pt, _ = reference.attention(q, k, v, mask=Mask(causal=True), upcast=False)
    assert pt.dtype == dtype and ref.dtype == reference.compute_dtype(dtype, True)
    if dtype == torch.float64:
        torch.testing.assert_close(out.transpose(1, 2), ref)
    else:
        assert_close(out.transpose(1, 2), ref, pt)


def _gradcheck(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    call: dict[str, Any],
    names: tuple[str, ...],
    **options: Any,
) -> None:
    """First derivatives of out, and of lse where it is finite."""
    fixed = {n: x for n, x in call.items() if n not in names}

    def finite(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(**dict(zip(names, leaves, strict=True)), **fixed, **options)
        assert lse is not None
        return out, torch.where(lse == -math.inf, 0.0, lse)

    leaves = tuple(call[n].detach().double().requires_grad_() for n in names)
    assert torch.autograd.gradcheck(finite, leaves)


REFERENCE_ARGUMENTS = ("softmax_scale", "softcap", "alibi_slopes", "sink_logits")


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_everything(mask: str) -> None:
    """Every input, with rows that see no key (S_q > S_k)."""
    problem = replace(
        DENSE, batch=1, head_dim=3, head_dim_v=2, seqlen_q=4, seqlen_k=3, **FEATURES["all"]
    )
    call = make_operands(problem)
    call = {n: call[n] for n in (*"qkv", *REFERENCE_ARGUMENTS)}
    names = ("q", "k", "v", "sink_logits", "alibi_slopes")
    _gradcheck(reference.attention, call, names, mask=MASKS[mask])


def test_gradients_of_varlen() -> None:
    problem = replace(DENSE, kind="varlen", head_dim=3, head_dim_v=2, batch=3, sink_logits=True)
    call = make_operands(problem, lengths=(3, 0, 2))
    kept = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *REFERENCE_ARGUMENTS)
    call = {n: call[n] for n in kept}
    names = ("q", "k", "v", "sink_logits")
    _gradcheck(reference.attention_varlen, call, names, mask=Mask(causal=True))


@pytest.mark.parametrize("sink", [None, 0.0, 90.0, -math.inf])
def test_rows_without_keys_are_zero_with_zero_gradients(sink: float | None) -> None:
    """S_q = 5 over S_k = 2 under a causal mask: the first three rows see nothing."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 4, generator=g).requires_grad_() for n in (5, 2, 2))
    sinks = None if sink is None else torch.full((2,), sink, requires_grad=True)
    out, lse = reference.attention(q, k, v, mask=Mask(causal=True), sink_logits=sinks)
    assert lse is not None
    assert (out[:, :3] == 0).all() and (lse[..., :3] == -math.inf).all()
    assert lse[..., 3:].isfinite().all() and out.isfinite().all()
    leaves = [q, k, v] + ([] if sinks is None else [sinks])
    empty = torch.autograd.grad(out[:, :3].sum() + out[:, 3:].sum() * 0, leaves, retain_graph=True)
    assert all((grad == 0).all() for grad in empty)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :3] == 0).all()


def test_sink_logit_is_one_more_key_of_value_zero() -> None:
    problem = replace(DENSE, sink_logits=True)
    call = make_operands(problem)
    sinks, q, k, v = (call[n] for n in ("sink_logits", "q", "k", "v"))
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 6**-0.5
    column = sinks.double().view(1, 4, 1, 1).expand(2, 4, 3, 1)
    p = torch.cat([s, column], -1).softmax(-1)[..., :-1]
    out, lse = expected(problem, call)
    exact = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2))
    assert lse is not None
    same((out, lse), (exact, s.logsumexp(-1)))  # the LSE is without the sink


def test_large_scores_stay_finite() -> None:
    q = torch.full((1, 1, 1, 4), 1e3)
    k = torch.full((1, 3, 1, 4), 1e3)
    out, lse = reference.attention(q, k, torch.ones(1, 3, 1, 4), sink_logits=torch.tensor([1e5]))
    torch.testing.assert_close(out, torch.ones_like(out))
    assert lse is not None and lse.isfinite().all()


def test_dropout_keeps_the_mean_and_the_lse() -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(1, 64, 4, 8), torch.zeros(1, 256, 4, 8)
    v = torch.ones(1, 256, 4, 8)
    out, lse = reference.attention(q, k, v, dropout_p=0.25)
    assert out.std() > 0.01
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), atol=0.02, rtol=0, check_dtype=False)
    assert lse is not None
    assert_lse_close(lse, torch.full_like(lse, math.log(256)))


def test_merged_states_are_attention_over_all_keys() -> None:
    problem = replace(DENSE, seqlen_q=4, seqlen_k=9, sink_logits=True)
    call = make_operands(problem)
    q, k, v, sinks = (call[n] for n in ("q", "k", "v", "sink_logits"))
    whole, lse = reference.attention(q, k, v)
    with_sink, _ = reference.attention(q, k, v, sink_logits=sinks)
    state = reference.attention(q, k[:, :2], v[:, :2])
    for a, b in ((2, 3), (3, 3), (3, 9)):  # one part without keys
        part = reference.attention(q, k[:, a:b], v[:, a:b])
        assert state[1] is not None and part[1] is not None
        state = reference.merge_states(*state, *part)
    assert lse is not None
    same(state, (whole, lse))
    torch.testing.assert_close(reference.apply_sink_logits(*state, sinks), with_sink)


@pytest.mark.parametrize("empty", ["a", "b", "both"])
def test_merging_empty_states(empty: str) -> None:
    g = torch.Generator().manual_seed(0)
    outs = [torch.randn(2, 3, 4, 5, generator=g).bfloat16() for _ in "ab"]
    lses = [torch.randn(2, 4, 3, generator=g) for _ in "ab"]
    for i, name in enumerate("ab"):
        if empty in (name, "both"):
            outs[i], lses[i] = torch.zeros_like(outs[i]), torch.full_like(lses[i], -math.inf)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    out, lse = reference.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    other = outs[0] if empty == "b" else outs[1]
    assert torch.equal(out, other)
    assert torch.equal(lse, lses[0] if empty == "b" else lses[1])
    grads = torch.autograd.grad(out.float().sum() + lse[lse.isfinite()].sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    sinks = torch.full((4,), -math.inf)
    assert torch.equal(reference.apply_sink_logits(out, lse, sinks), out)


def test_gradients_of_merging() -> None:
    g = torch.Generator().manual_seed(0)
    out_a, out_b = (
        torch.randn(3, 2, 2, generator=g, dtype=torch.float64).requires_grad_() for _ in "ab"
    )
    lse_a, lse_b = (
        torch.randn(2, 3, generator=g, dtype=torch.float64).requires_grad_() for _ in "ab"
    )
    assert torch.autograd.gradcheck(reference.merge_states, (out_a, lse_a, out_b, lse_b))
