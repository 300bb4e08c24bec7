"""`kernels/merge_states.py` in Triton's interpreter, against its definition in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv import reference
from splitkv.runtime.merge_states import merge_on_gpu

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
AXES: cases.Axes = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "heads": (1, 6),
    "dim": (64, 80, 16),
    "states": (2, 3, 5),
    "packed": (False, True),
    "tokens": (1, 7),
    "sink": (False, True),
    "into": ("new", "strided", "the first state"),
    "layout": ("contiguous", "tokens last", "different", "beside the LSE"),
}


def state(values: Mapping[str, Any], number: int) -> tuple[Tensor, Tensor]:
    """Random results of attention; rows that saw no key hold NaN."""
    tokens, heads, dim = values["tokens"], values["heads"], values["dim"]
    lead = (tokens,) if values["packed"] else (2, tokens)
    out = torch.randn(*lead, heads, dim).to(values["dtype"])
    lse = 3 * torch.randn(*lead[:-1], heads, tokens)
    last = values["layout"] == "tokens last" or (values["layout"] == "different" and number == 1)
    if last:
        out = out.transpose(-3, -2).contiguous().transpose(-3, -2)
        lse = lse.transpose(-2, -1).contiguous().transpose(-2, -1)
    if values["layout"] == "beside the LSE":  # as ranks send them
        out = torch.cat([out, torch.full_like(out[..., :2], math.nan)], -1)[..., :-2]
    lse[torch.rand_like(lse) < 0.3] = -math.inf
    if number:
        out[lse.transpose(-2, -1) == -math.inf] = math.nan
    return out, lse


@pytest.mark.parametrize("values", cases.pairs(AXES), ids=lambda v: v["into"])
def test_kernel_is_the_definition(values: Mapping[str, Any]) -> None:
    states = [state(values, n) for n in range(values["states"])]
    sink = torch.randn(values["heads"]) if values["sink"] else None
    known = [(out.nan_to_num(), lse) for out, lse in states]
    wanted, of_wanted = reference.merge_states(
        *(x for pair in known for x in (pair[0].double(), pair[1].double())), sink_logits=sink
    )
    out = lse = None
    shape = wanted.shape
    if values["into"] == "strided":
        room = torch.full((*shape[:-1], shape[-1] + 8), math.nan, dtype=values["dtype"])
        out, lse = room[..., :-8], torch.empty_like(states[0][1])
    elif values["into"] == "the first state":
        out, lse = states[0]
    merged, of_merged = merge_on_gpu(states, sink, out, lse)
    assert out is None or merged is out
    assert lse is None or of_merged is lse
    assert merged.dtype == values["dtype"] and of_merged.dtype == torch.float32
    tolerance = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}[merged.dtype]
    torch.testing.assert_close(merged.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(of_merged.double(), of_wanted, rtol=1e-6, atol=1e-6)
    if values["into"] == "strided":
        assert room[..., -8:].isnan().all()


def test_states_that_saw_nothing() -> None:
    """Their rows stay out to the bit; of nothing but these come 0 and -inf."""
    out, lse = torch.randn(3, 2, 16), torch.randn(2, 3)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    merged, of_merged = merge_on_gpu([nothing, (out, lse), nothing], None, None, None)
    assert torch.equal(merged, out)
    torch.testing.assert_close(of_merged, lse, rtol=1e-6, atol=1e-6)
    merged, of_merged = merge_on_gpu([nothing, nothing], torch.zeros(2), None, None)
    assert (merged == 0).all() and (of_merged == -math.inf).all()


def test_no_rows() -> None:
    states = [(torch.randn(0, 2, 16), torch.randn(2, 0))] * 2
    merged, of_merged = merge_on_gpu(states, None, None, None)
    assert merged.shape == (0, 2, 16) and of_merged.shape == (2, 0)
