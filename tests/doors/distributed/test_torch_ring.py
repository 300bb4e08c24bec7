"""torch's context parallelism around this package's forward and its backward from (out, lse)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_cases import whole
from rank_torch_ring import torch_ring
from ranks import Ranks

from splitkv import reference
from splitkv.core.masks import Mask
from splitkv.testing import assert_close


@pytest.mark.parametrize(
    ("causal", "layout"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")]
)
def test_its_ring_merges_our_partial_results(causal: bool, layout: Any, ranks: Ranks) -> None:
    tensors = [torch.randn(2, 4, 16, 8) for _ in range(4)]
    found = ranks.run(torch_ring, 2, tensors, causal, layout)

    def exactly(*, upcast: bool) -> list[torch.Tensor]:
        leaves = [x.transpose(1, 2).clone().requires_grad_() for x in tensors[:3]]
        out = reference.attention(*leaves, mask=Mask(causal), upcast=upcast)[0]
        grads = torch.autograd.grad(out, leaves, tensors[3].transpose(1, 2).to(out))
        return [x.detach().transpose(1, 2) for x in (out, *grads)]

    ref, pt = exactly(upcast=True), exactly(upcast=False)
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        made = whole([part[i] for part in found], layout, 2)
        assert_close(made, ref[i], pt[i], factor=3.0, name=name)
