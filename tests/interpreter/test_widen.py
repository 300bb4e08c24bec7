"""`kernels/widen.py` in Triton's interpreter: each stored number times its scale, where it is read.

What nothing has to write keeps what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.kernels.widen import WHOLE, Widening
from splitkv.rounding import dequantize

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:invalid value encountered:RuntimeWarning",
)
STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
AXES: cases.Axes = {
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "stored": STORED,
    "granularity": ("tensor", "head", "sequence", "token"),
    "lead": ((3, 70), (1, 9), (140,)),
    "heads": (1, 3, 8),
    "dims": ((64, 64), (24, 80), (192, 128)),
    "strided": (False, True),
    "values_only": (False, True),
}


def valid(values: cases.Values) -> bool:
    return values.get("granularity") != "sequence" or len(values.get("lead", (1, 1))) == 2


def stored_numbers(shape: tuple[int, ...], stored: torch.dtype, g: torch.Generator) -> Tensor:
    x = torch.randint(-127, 128, shape, generator=g)
    if stored == torch.int8:
        return x.to(stored)
    return (x.float() * 2.0 ** -(x % 11)).to(stored)


def scale_of(granularity: str, lead: tuple[int, ...], heads: int, g: torch.Generator) -> Tensor:
    shapes = {"tensor": (1,), "head": (heads,), "sequence": (lead[0], heads)}
    return torch.rand(shapes.get(granularity, (*lead, heads)), generator=g) + 0.01


@pytest.mark.parametrize("values", cases.pairs(AXES, valid), ids=lambda v: v["granularity"])
def test_kernel_is_the_definition(values: Mapping[str, Any]) -> None:
    g = torch.Generator().manual_seed(len(str(values)))
    lead, heads = values["lead"], values["heads"]
    tensors = []
    for dim in values["dims"][values["values_only"] :]:
        x = stored_numbers((*lead, heads, dim), values["stored"], g)
        if values["strided"]:
            x = torch.cat([x, x], -1)[..., :dim]
        tensors.append((x, scale_of(values["granularity"], lead, heads, g)))
    batch, room = lead if len(lead) == 2 else (1, *lead)
    as_bits = values["stored"] == torch.float8_e4m3fn
    widen = Widening(tensors, values["dtype"], batch, room, as_bits=as_bits)
    made, first = widen(tensors)
    assert first is None
    for (x, scale), out in zip(tensors, made, strict=True):
        assert torch.equal(out, dequantize(x, scale, values["dtype"]))


UNTOUCHED = -7.0


@contextmanager
def filled_memory() -> Iterator[None]:
    """New tensors of a type that is asked for are filled."""
    new_empty = Tensor.new_empty

    def filled(x: Tensor, shape: Any, dtype: Any = None, **options: Any) -> Tensor:
        made = new_empty(x, shape, dtype=dtype, **options)
        return made if dtype is None else made.fill_(UNTOUCHED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", filled)
        yield


OF_PAGES: cases.Axes = {
    "stored": STORED,
    "granularity": ("head", "sequence", "token"),
    "page_size": (1, 16, 48, 0),
    "packed": (False, True),
    "mask": (Mask(True), Mask(True, 40, -1, 0), Mask(True, 40, -1, 300)),
}


def of_pages(values: cases.Values) -> bool:
    return bool(values.get("page_size", 1)) or not values.get("packed", False)


@pytest.mark.parametrize("values", cases.pairs(OF_PAGES, of_pages), ids=str)
def test_what_sequences_hold(values: Mapping[str, Any]) -> None:
    """Lengths of the device: no page past them is looked up, no key past them written."""
    g = torch.Generator().manual_seed(7)
    heads, dims, room, queries = 2, (16, 32), 900, 5
    lens = torch.tensor([900, 0, 613, 3], dtype=torch.int32)
    batch, page_size, table, lead = len(lens), values["page_size"], None, (len(lens), room)
    if page_size:
        most = -(-room // page_size)
        order = torch.randperm(batch * most, generator=g).to(torch.int32).view(batch, most)
        past = torch.arange(most) * page_size >= lens[:, None]
        table, lead = order.masked_fill(past, 1 << 30), (batch * most, page_size)
    scale_lead = (batch,) if values["granularity"] == "sequence" else lead
    tensors = [
        (
            stored_numbers((*lead, heads, dim), values["stored"], g),
            scale_of(values["granularity"], scale_lead, heads, g),
        )
        for dim in dims
    ]
    mask, packed, as_bits = values["mask"], values["packed"], values["stored"] != torch.int8
    given = {"table": table, "packed": packed, "as_bits": as_bits}
    widen = Widening(tensors, torch.bfloat16, batch, room, mask=mask, seqlen_q=queries, **given)
    cu_q = torch.arange(batch + 1, dtype=torch.int32) * queries if packed else None
    with filled_memory():
        made, first = widen(tensors, lens, table, cu_q)
    assert (first is not None) == packed
    if first is not None:
        assert first.tolist() == [room * b for b in range(batch + 1)]
    for (x, scale), out in zip(tensors, made, strict=True):
        out = out.view(batch, room, heads, -1)
        of_sequence = scale.dim() == 2 and scale.shape[0] == batch and len(scale_lead) == 1
        for b, length in enumerate(lens.tolist()):
            keys, own = x[b : b + 1], scale[b : b + 1] if scale.dim() > 1 else scale
            if table is not None:
                pages = table[b, : -(-length // page_size)].long()
                keys = x[pages].flatten(0, 1)[None]
                if not of_sequence:
                    own = scale[pages].flatten(0, 1)[None] if scale.dim() > 1 else scale
            keys = keys[:, :length]
            own = own[:, :length] if own.dim() == 3 else own
            wanted = dequantize(keys, own, torch.bfloat16)[0]
            key = torch.arange(length)
            seen = torch.ones(length, dtype=torch.bool)
            if mask.left is not None:
                lowest = max(length - queries - mask.left, 0)
                seen = (key >= lowest) | (key < mask.sink_tokens)
                skipped = key < lowest // WHOLE.value * WHOLE.value
                skipped &= key >= -(-mask.sink_tokens // WHOLE.value) * WHOLE.value
                assert (out[b, :length][skipped] == UNTOUCHED).all()
            assert torch.equal(out[b, :length][seen], wanted[seen])
            assert (out[b, length:] == UNTOUCHED).all()
