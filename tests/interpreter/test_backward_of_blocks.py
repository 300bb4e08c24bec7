"""`attention_backward` by the kernels of a GPU: blocks of keys, and (out, lse) of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv import reference
from splitkv.core.device import GPUS
from splitkv.core.plan import Config
from splitkv.kernels.host.sequences import SequenceLauncher
from splitkv.kernels.limits import backward as variant
from splitkv.runtime import backward, dispatch
from splitkv.testing import assert_close

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
TOTAL, BLOCKS = 40, (slice(0, 24), slice(24, 40))


@pytest.fixture(autouse=True)
def a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 wherever a device is looked at, and tiles of 16."""
    monkeypatch.setattr(dispatch, "device_of", lambda tensor: GPUS["a100"])
    monkeypatch.setattr(backward, "_calls", type(backward._calls)())
    for name in ("key_configs", "query_configs"):
        config = Config(tile_m=16, tile_n=16)
        monkeypatch.setattr(variant, name, lambda problem, device, c=config: iter([c]))


def by_definition(
    tensors: dict[str, Tensor], grads: tuple[Tensor, Tensor], *, upcast: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out, lse = reference.attention(**leaves, upcast=upcast)
    assert lse is not None
    cotangents = grads[0].to(out), grads[1].to(lse)
    found = torch.autograd.grad((out, lse), list(leaves.values()), cotangents)
    return out.detach(), lse.detach(), list(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_blocks_add_up(sinks: bool, packed: bool) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape).half()

    tensors = {n: random(1, TOTAL, heads, 16) for n, heads in (("q", 4), ("k", 2), ("v", 2))}
    if sinks:
        tensors["sink_logits"] = torch.randn(4)
    grads = random(1, TOTAL, 4, 16), torch.randn(1, 4, TOTAL)
    out, lse, ref = by_definition(tensors, grads, upcast=True)
    pt = by_definition(tensors, grads, upcast=False)[2]
    parts = []
    for block in BLOCKS:
        given = [grads[0], tensors["q"], *(tensors[n][:, block] for n in "kv")]
        given.append(out.mT.contiguous().mT)  # wider than q, and not row by row
        rows, options = [lse, grads[1]], {}
        if packed:
            bounds = {"q": (0, TOTAL), "k": (0, block.stop - block.start)}
            given, rows = [x[0].contiguous() for x in given], [x[0] for x in rows]
            options = {
                f"cu_seqlens_{x}": torch.tensor(of, dtype=torch.int32) for x, of in bounds.items()
            }
            options |= {f"max_seqlen_{x}": of[1] for x, of in bounds.items()}
        if sinks:
            options["sink_logits"] = tensors["sink_logits"]
        parts.append(_of_block(given, rows, options))
    shape = ref[0].shape
    assert_close(
        (parts[0].q.float() + parts[1].q).view(shape), ref[0], pt[0], factor=3.0, name="dq"
    )
    for i, name in ((1, "k"), (2, "v")):
        whole = torch.cat([getattr(part, name).view(-1, 2, 16) for part in parts])
        assert_close(whole[None], ref[i], pt[i], factor=3.0, name=f"d{name}")
    if sinks:
        for part in parts:  # of all keys
            assert_close(part.sink_logits, ref[3], pt[3], factor=3.0, name="dsink_logits")
    kept = list(backward._calls._by_layout.values())
    assert kept and all(isinstance(bound.launcher, SequenceLauncher) for _, bound in kept)
    known = [dict(bound.launcher.backward_launchers) for _, bound in kept]
    assert all(len(of_layout) <= 2 for of_layout in known)  # at addresses of 16 bytes, at others
    _of_block(given, rows, options)
    assert [dict(bound.launcher.backward_launchers) for _, bound in kept] == known, "bound again"


def _of_block(given: list[Tensor], rows: list[Tensor], options: dict[str, Any]) -> Any:
    return backward.attention_backward(*given, rows[0], grad_lse=rows[1], **options)
