"""TransformerEngine's call shape in one process, against the public functions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.integrations.transformer_engine import DotProductAttention

HEADS, GROUPS, DIM, DIM_V = 4, 2, 16, 8
CU_SEQLENS = (0, 5, 5, 18)


def layers(format_: str, seqlen_q: int = 12, seqlen_k: int = 12) -> tuple[Tensor, ...]:
    found = []
    for heads, dim, tokens in (
        (HEADS, DIM, seqlen_q),
        (GROUPS, DIM, seqlen_k),
        (GROUPS, DIM_V, seqlen_k),
    ):
        outer = {"sbhd": (tokens, 2), "bshd": (2, tokens), "thd": (18,)}[format_]
        found.append(torch.randn(*outer, heads, dim))
    return tuple(found)


def module(**options: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, (DIM, DIM_V), num_gqa_groups=GROUPS, **options)


MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"causal": True}),
    "window": ({"window_size": (4, 0)}, {"causal": True, "window_size": (4, 0)}),
    "no_mask": ({"attn_mask_type": "no_mask"}, {}),
    "two_sided": (
        {"attn_mask_type": "no_mask", "window_size": (3, 2)},
        {"window_size": (3, 2)},
    ),
    "scale": ({"softmax_scale": 0.1}, {"causal": True, "softmax_scale": 0.1}),
}


@pytest.mark.parametrize("format_", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", MASKS)
def test_dense(mask: str, format_: str) -> None:
    options, ours = MASKS[mask]
    q, k, v = layers(format_)
    found = module(qkv_format=format_, **options)(q, k, v)
    first = [x.transpose(0, 1) if format_ == "sbhd" else x for x in (q, k, v)]
    out = splitkv.attention(*first, **ours).flatten(-2)
    torch.testing.assert_close(found, out.transpose(0, 1) if format_ == "sbhd" else out)
    assert found.is_contiguous()


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "causal,padding"])
def test_packed(mask: str) -> None:
    q, k, v = layers("thd")
    bounds = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    call: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    call |= {"max_seqlen_q": 13, "max_seqlen_kv": 13, "cu_seqlens_q_padded": bounds}
    found = module()(q, k, v, None, qkv_format="thd", attn_mask_type=mask, **call)
    causal = "causal" in mask
    out = splitkv.attention_varlen(q, k, v, bounds, bounds, 13, 13, causal=causal)
    torch.testing.assert_close(found, out.flatten(-2))


def test_what_a_call_says_is_what_counts() -> None:
    q, k, v = layers("bshd", seqlen_k=20)
    found = module(qkv_format="thd", attn_mask_type="padding")(
        *(q, k, v, torch.ones(1, 1, 1, 1)),
        **{"qkv_format": "bshd", "attn_mask_type": "causal_bottom_right", "window_size": (7, 0)},
    )
    out = splitkv.attention(q, k, v, causal=True, window_size=(7, 0))
    torch.testing.assert_close(found, out.flatten(-2))


@pytest.mark.parametrize("again", [False, True])
def test_learnable_softmax(again: bool) -> None:
    attend = module(qkv_format="bshd", softmax_type="learnable")
    assert [name for name, _ in attend.named_parameters()] == ["softmax_offset"]
    offset = attend.softmax_offset
    assert offset is not None
    with torch.no_grad():
        offset.copy_(torch.randn(HEADS))
    q, k, v = layers("bshd")
    q.requires_grad_()
    found = attend(q, k, v, checkpoint_core_attention=again)
    sinks = offset.detach().clone().requires_grad_()
    out = splitkv.attention(q, k, v, causal=True, sink_logits=sinks).flatten(-2)
    torch.testing.assert_close(found, out)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(found, (q, offset), grad), torch.autograd.grad(out, (q, sinks), grad)
    )


def test_off_by_one() -> None:
    q, k, v = layers("bshd")
    attend = module(qkv_format="bshd", softmax_type="off-by-one")
    assert not list(attend.parameters()) and not attend.state_dict()
    out = splitkv.attention(q, k, v, causal=True, sink_logits=torch.zeros(HEADS))
    torch.testing.assert_close(attend(q, k, v), out.flatten(-2))


def test_alibi() -> None:
    q, k, v = layers("bshd")
    slopes = torch.rand(HEADS)
    found = module(qkv_format="bshd")(
        q, k, v, core_attention_bias_type="alibi", alibi_slopes=slopes
    )
    out = splitkv.attention(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(found, out.flatten(-2))


def test_heads_of_a_tensor_parallel_rank_and_its_dropout() -> None:
    forked: list[bool] = []

    class Tracker:
        @contextmanager
        def fork(self) -> Any:
            forked.append(True)
            yield

    options: dict[str, Any] = {"get_rng_state_tracker": Tracker, "attention_dropout": 0.5}
    options |= {"num_gqa_groups": 3 * GROUPS, "tp_size": 3, "qkv_format": "bshd"}
    attend = DotProductAttention(3 * HEADS, (DIM, DIM_V), **options)
    q, k, v = layers("bshd")
    torch.manual_seed(0)
    found = attend(q, k, v)
    torch.manual_seed(0)
    out = splitkv.attention(q, k, v, causal=True, dropout_p=0.5).flatten(-2)
    torch.testing.assert_close(found, out)
    assert forked == [True]
    torch.testing.assert_close(
        attend.eval()(q, k, v), splitkv.attention(q, k, v, causal=True).flatten(-2)
    )
    assert forked == [True]


BOUNDS = torch.tensor(CU_SEQLENS, dtype=torch.int32)
PACKED: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
PACKED |= {"cu_seqlens_q": BOUNDS, "max_seqlen_q": 13, "max_seqlen_kv": 13}


@pytest.mark.parametrize(
    ("format_", "options", "message"),
    [
        ("bshd", {"attn_mask_type": "arbitrary"}, "attn_mask_type: expected 'no_mask', "),
        ("bshd", {"attn_mask_type": "padding"}, "attn_mask_type: expected no padding mask with"),
        (
            "thd",
            {**PACKED, "attn_mask_type": "causal", "cu_seqlens_kv": BOUNDS},
            "attn_mask_type: expected a padding mask with 'thd', got",
        ),
        ("bshd", {"qkv_format": "bsd"}, "qkv_format: expected 'sbhd', 'bshd' or 'thd', got"),
        ("bshd", {"core_attention_bias_type": "alibi"}, "alibi_slopes: expected slopes with"),
        ("bshd", {"core_attention_bias_type": "pre_scale_bias"}, "core_attention_bias_type: exp"),
        ("bshd", {"fp8_output": True}, "fp8_output: expected None, got True"),
        ("bshd", {"inference_params": 1}, "inference_params: expected None, got 1"),
        ("bshd", {"softcap": 1.0}, "argument of DotProductAttention: expected 'qkv_format', "),
        ("thd", PACKED, "cu_seqlens_kv: expected a value with qkv_format 'thd', got None"),
        (
            "thd",
            {**PACKED, "cu_seqlens_kv": BOUNDS.clone()},
            "attn_mask_type: expected one that aligns at the last query and key, with keys of",
        ),
        (
            "thd",
            {**PACKED, "cu_seqlens_kv": BOUNDS, "cu_seqlens_kv_padded": BOUNDS + 1},
            "cu_seqlens_kv_padded: expected None or cu_seqlens_kv, got",
        ),
    ],
)
def test_what_there_is_no_answer_for_raises(
    format_: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        module(qkv_format="bshd")(*layers(format_), **options)
    assert str(refused.value).startswith(message)


def test_a_causal_mask_at_the_first_query_needs_as_many_keys() -> None:
    with pytest.raises(ValueError, match=r"pass causal_bottom_right$"):
        module(qkv_format="bshd")(*layers("bshd", seqlen_k=20))


def test_malformed_modules() -> None:
    for options, message in (
        ({"softmax_type": "sink"}, "softmax_type: expected 'vanilla', 'off-by-one' or 'learnable'"),
        ({"return_max_logit": True}, "return_max_logit: expected None, got True"),
        ({"tp_size": 3}, "num_attention_heads: expected a multiple of tp_size=3, got 4"),
    ):
        with pytest.raises(ValueError) as refused:
            module(**options)
        assert str(refused.value).startswith(message)
    with pytest.raises(ValueError, match=r"key_layer: expected \[.., heads=2, head_dim=16\]"):
        q, _, v = layers("bshd")
        module(qkv_format="bshd")(q, q, v)
