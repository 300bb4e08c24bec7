"""attention_backward: gradients from a given output and LSE, of all keys or of some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import reference
from splitkv.runtime.backward import attention_backward
from splitkv.testing import assert_close

CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "sinks": {"causal": True, "window_size": (5, -1), "sink_logits": True},
    "scores": {"softcap": 2.0, "alibi_slopes": True, "sink_logits": True},
}


def operands(
    case: str, packed: bool, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    outer = (23,) if packed else (2, 11)
    leaves = {
        "q": torch.randn(*outer, 4, 16).to(dtype),
        "k": torch.randn(*outer, 2, 16).to(dtype),
        "v": torch.randn(*outer, 2, 8).to(dtype),
    }
    options = dict(CASES[case])
    for name in ("sink_logits", "alibi_slopes"):
        if options.pop(name, False):
            leaves[name] = torch.rand(4)
    if packed:
        bounds = torch.tensor([0, 9, 9, 21], dtype=torch.int32)
        options |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        options |= {"max_seqlen_q": 12, "max_seqlen_k": 12}
    return {name: x.requires_grad_() for name, x in leaves.items()}, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case: str, packed: bool, dtype: torch.dtype) -> None:
    leaves, options = operands(case, packed, dtype)
    attend: Any = splitkv.attention_varlen if packed else splitkv.attention
    out, lse = attend(**leaves, **options, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    finite = torch.where(lse == float("-inf"), 0.0, lse)
    loss = (out * grad_out).sum() + (finite * grad_lse).sum()
    expected = torch.autograd.grad(loss, list(leaves.values()))
    given = {name: x.detach() for name, x in leaves.items()}
    found = attention_backward(
        grad_out, out=out.detach(), lse=lse.detach(), grad_lse=grad_lse, **given, **options
    )
    for name, grad in zip(leaves, expected, strict=True):
        actual = getattr(found, name)
        assert actual.dtype == grad.dtype
        # both are of this working precision: 3 times what one rounding of the type makes
        error = (actual - grad).double().abs().max()
        assert error <= 24 * torch.finfo(dtype).eps * grad.double().abs().max(), name
    for name in {"sink_logits", "alibi_slopes"} - leaves.keys():
        assert getattr(found, name) is None


def test_disjoint_keys_add_up() -> None:
    """The ring's use: blocks of keys, and the merged output and LSE."""
    q, k, v = (torch.randn(2, 12, 4, 16) for _ in "qkv")
    parts = [splitkv.attention(q, k[:, s], v[:, s], return_lse=True) for s in BLOCKS]
    out, lse = splitkv.merge_states(*parts[0], *parts[1])
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = [
        attention_backward(grad_out, q, k[:, s], v[:, s], out, lse, grad_lse=grad_lse)
        for s in BLOCKS
    ]
    exact, pt = (
        _by_definition((q, k, v), grad_out, grad_lse, upcast=upcast) for upcast in (True, False)
    )
    assert_close(found[0].q + found[1].q, exact[0], pt[0], factor=3.0, name="dq")
    for i, name in ((1, "k"), (2, "v")):
        actual = torch.cat([getattr(part, name) for part in found], 1)
        assert_close(actual, exact[i], pt[i], factor=3.0, name=f"d{name}")


def test_a_merge_may_be_left_to_autograd() -> None:
    qkv = [torch.randn(2, 12, 4, 16) for _ in "qkv"]
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    parts = [splitkv.attention(q, k[:, s], v[:, s], return_lse=True) for s in BLOCKS]
    out, lse = splitkv.merge_states(*parts[0], *parts[1])
    grads = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v), grads)
    exact, pt = (_by_definition(tuple(qkv), *grads, upcast=upcast) for upcast in (True, False))
    for name, x, ref, working in zip(("dq", "dk", "dv"), found, exact, pt, strict=True):
        assert_close(x, ref, working, factor=3.0, name=name)


BLOCKS = slice(0, 5), slice(5, None)


def _by_definition(
    qkv: tuple[Tensor, ...], grad_out: Tensor, grad_lse: Tensor, *, upcast: bool
) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, lse = reference.attention(*leaves, upcast=upcast)
    assert lse is not None
    return torch.autograd.grad((out, lse), leaves, (grad_out.to(out), grad_lse.to(lse)))


def test_an_output_in_another_layout_and_dtype() -> None:
    """As a ring has it that merges in fp32, heads first."""
    q, k, v, grad_out = (torch.randn(2, 12, 4, 16).to(torch.bfloat16) for _ in range(4))
    out, lse = splitkv.attention(q, k, v, return_lse=True)
    found = attention_backward(grad_out, q, k, v, out, lse)
    apart = [
        x.float().permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in (grad_out, out)
    ]
    assert all(x.stride(-1) != 1 for x in apart)
    other = attention_backward(apart[0], q, k, v, apart[1], lse)
    for a, b in zip(found[:3], other[:3], strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)


def test_arguments_by_name_come_in_any_order() -> None:
    """Two calls that differ in which length is which are two kinds of calls."""
    q, k, v, grad_out = (torch.randn(20, 2, 16) for _ in range(4))
    short = torch.tensor([0, 5, 10, 15, 20], dtype=torch.int32)
    long = torch.tensor([0, 13, 18, 19, 20], dtype=torch.int32)
    for cu_q, cu_k, most_q, most_k in ((short, long, 5, 13), (long, short, 13, 5)):
        options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        lengths = {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = splitkv.attention_varlen(*leaves, **options, **lengths, return_lse=True)
        wanted = torch.autograd.grad(out, leaves, grad_out)
        lengths = dict(sorted(lengths.items(), key=lambda item: item[1]))
        found = attention_backward(grad_out, q, k, v, out, lse, **options, **lengths)
        for x, exact in zip(found[:3], wanted, strict=True):
            torch.testing.assert_close(x, exact)


def test_the_lse_is_differentiable_itself() -> None:
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")

    def lse(q: Tensor, k: Tensor) -> Tensor:
        return splitkv.attention(q, k, v, causal=True, return_lse=True)[1]

    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * 8**-0.5
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = torch.autograd.grad(
        scores.masked_fill(hidden, -torch.inf).logsumexp(-1).sum(), (q, k)
    )
    for actual, exact in zip(torch.autograd.grad(lse(q, k).sum(), (q, k)), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.randn(1, 6, 2, 4)}, "out: expected [batch=1, seqlen_q=6, num_heads=2, "),
        ({"lse": torch.randn(1, 6, 2)}, "lse: expected [batch=1, num_heads=2, seqlen_q=6], got"),
        ({"dropout_p": 0.1}, "argument of attention_backward: expected 'causal'"),
        ({"bidirectional_ranges": None}, "argument of attention_backward: expected 'causal'"),
        ({"cu_seqlens_q": torch.tensor([0, 6])}, "cu_seqlens_k: expected a value with"),
    ],
)
def test_a_malformed_call(change: dict[str, Any], message: str) -> None:
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in "qkv")
    call = {"grad_out": q, "q": q, "k": k, "v": v, "out": q, "lse": torch.randn(1, 2, 6)}
    with pytest.raises(ValueError) as refused:
        attention_backward(**(call | change))
    assert str(refused.value).startswith(message)
