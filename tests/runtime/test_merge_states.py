"""merge_states: any number of states, into buffers of the caller, with gradients and without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import reference
from splitkv.kernels import merge_states as kernel
from splitkv.runtime import merge_states as module

OUT, LSE = (2, 3, 4, 8), (2, 4, 3)


def states(number: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made: list[Tensor] = []
    for _ in range(number):
        made += torch.randn(OUT, dtype=dtype), 3 * torch.randn(LSE)
    return made


@pytest.mark.parametrize("number", [2, 3, 5])
def test_parts_of_a_sequence(number: int) -> None:
    """Attention over parts of the keys, merged, is attention over all of them."""
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 20, 2, 8), torch.randn(2, 20, 2, 8)
    sink = torch.randn(4)
    wanted, of_wanted = splitkv.attention(q, k, v, sink_logits=sink, return_lse=True)
    parts: list[Tensor] = []
    for keys in torch.arange(20).tensor_split(number):
        parts += splitkv.attention(q, k[:, keys], v[:, keys], return_lse=True)
    out, lse = splitkv.merge_states(*parts, sink_logits=sink)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, of_wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_into_buffers(dtype: torch.dtype) -> None:
    given = states(3, dtype)
    wanted = splitkv.merge_states(*given)
    room = torch.full((*OUT[:-1], 12), math.nan, dtype=dtype)
    out, lse = room[..., :8], torch.empty(2, 3, 4).transpose(1, 2)
    merged = splitkv.merge_states(*given, out=out, lse=lse)
    assert merged[0] is out and merged[1] is lse
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert room[..., 8:].isnan().all()


def test_what_no_key_has_made_may_be_anything() -> None:
    given = states(3)
    wanted = splitkv.merge_states(*given[:4])
    given[4].fill_(math.nan)
    given[5].fill_(-math.inf)
    out, lse = splitkv.merge_states(*given)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    leaves = [x.requires_grad_() for x in given]
    out, lse = splitkv.merge_states(*given)
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert not any(grad.isnan().any() for grad in grads)


def test_traced() -> None:
    given, sink = states(3), torch.randn(4)
    compiled = torch.compile(splitkv.merge_states, backend="eager", fullgraph=True)
    wanted = reference.merge_states(*given, sink_logits=sink)
    for x, y in zip(compiled(*given, sink_logits=sink), wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_gradients() -> None:
    given = [x.double().requires_grad_() for x in states(3)]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def of(*tensors: Tensor) -> Any:
        return splitkv.merge_states(*tensors[:-1], sink_logits=tensors[-1])

    assert torch.autograd.gradcheck(of, (*given, sink))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"out": torch.empty(2, 3, 4, 9)}, "out: expected [batch=2, seqlen_q=3, num_heads=4, "),
        ({"out": torch.empty(1).expand(OUT)}, "out: expected stride 1 in the last dimension"),
        ({"lse": torch.empty(2, 3, 4)}, "lse: expected [batch=2, num_heads=4, seqlen_q=3]"),
        ({"lse": torch.empty(LSE).half()}, "lse: expected dtype float32 or float64"),
        ({"sink_logits": torch.zeros(3)}, "sink_logits: expected [num_heads=4], got [3]"),
    ],
)
def test_malformed(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        splitkv.merge_states(*states(2), **wrong)
    assert str(error.value).startswith(message)


def test_malformed_states() -> None:
    with pytest.raises(ValueError, match="states: expected an out and an lse of each, got 5"):
        splitkv.merge_states(*states(2), torch.randn(OUT))
    with pytest.raises(ValueError, match=r"lse_c: expected \[batch=2"):
        splitkv.merge_states(*states(2), torch.randn(OUT), torch.randn(2, 3, 4))


def test_no_buffer_beside_a_gradient() -> None:
    given = [x.requires_grad_() for x in states(2)]
    with pytest.raises(ValueError, match="out: expected None where a gradient is recorded"):
        splitkv.merge_states(*given, out=torch.empty(OUT))
    with torch.no_grad():
        splitkv.merge_states(*given, out=torch.empty(OUT))


def test_strides_that_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All states alike: as they are; else, and where rows are not, copied."""
    launched: list[Any] = []
    monkeypatch.setattr(kernel, "launch", lambda *given: launched.append(given))
    a, of_a, b, of_b = states(2)
    module.merge_on_gpu([(a, of_a), (b, of_b)], None, None, None)
    ((pairs, out, lse, _),) = launched
    assert pairs == [(a, of_a), (b, of_b)] and out.shape == OUT and lse.shape == LSE
    turned = b.transpose(1, 2).contiguous().transpose(1, 2)
    module.merge_on_gpu([(a, of_a), (turned, of_b)], None, None, None)
    pairs = launched[1][0]
    assert pairs[0][0] is a and pairs[1][0].is_contiguous() and torch.equal(pairs[1][0], b)
    assert pairs[1][1] is of_b
