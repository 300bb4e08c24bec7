"""What stands in for torch's FlashAttention, with the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from splitkv.core.device import GPUS
from splitkv.integrations import torch_sdpa
from splitkv.runtime.call_cache import CallCache

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def on_an_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "calls", CallCache())
    monkeypatch.setattr(torch_sdpa, "device_of", lambda q: GPUS["a100"])


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_forward_and_backward(dropout_p: float) -> None:
    """[batch, heads, tokens, dim] in and out; with dropout the output is linear in v, whose
    gradient so tells whether backward drops what forward dropped."""
    q = torch.randn(2, 20, 4, 16).transpose(1, 2)
    k, v = (torch.randn(2, 2, 20, 16) for _ in range(2))
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse, _, _, max_q, max_k, seed, unused, _ = torch_sdpa._sdpa(q, k, v, dropout_p, True)
    grad = torch.randn_like(out)
    found = torch_sdpa._sdpa_backward(
        *(grad, q, k, v, out, lse, None, None, max_q, max_k, dropout_p, True, seed, unused)
    )
    assert [x.stride() for x in (out, *found)] == [x.stride() for x in (q, q, k, v)]
    if dropout_p:
        first, kept = out[:, :, 0], v[:, :, 0].repeat_interleave(2, 1) / (1 - dropout_p)
        dropped = (first == 0).all(-1)  # a first query has one weight
        torch.testing.assert_close(first[~dropped], kept[~dropped])
        assert 0 < dropped.sum() < dropped.numel()
        torch.testing.assert_close((grad * out).sum(), (found[2] * v).sum())
        return
    # Parts of a longer result, as torch's ring hands them on.
    parts = [torch.cat([x, x], 2)[:, :, :20] for x in (out, lse)]
    assert not any(x.is_contiguous() for x in parts)
    again = torch_sdpa._sdpa_backward(
        *(grad, q, k, v, *parts, None, None, max_q, max_k, dropout_p, True, seed, unused)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    exact = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    exact.backward(grad)
    torch.testing.assert_close(out, exact)
    for x, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(x, leaf.grad, rtol=1e-4, atol=1e-5)
