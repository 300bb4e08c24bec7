"""A call of `widen_rows` that is launched again by addresses: those of its arguments, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv.kernels import widen
from splitkv.kernels.widen import Widening, widen_rows

SCALE = torch.ones(2, 64, 3)


def tensors_of(count: int) -> list[tuple[Tensor, Tensor | None]]:
    dims = (16, 32)[:count]
    return [(torch.zeros(2, 64, 3, dim, dtype=torch.int8), SCALE.clone()) for dim in dims]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_addresses_stand_for_arguments(
    count: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, table = tensors_of(count), torch.zeros(2, 3, dtype=torch.int32)
    lens, cu_q = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    bound = Widening(tensors, torch.bfloat16, 2, 160, table=table, packed=packed)
    launched: list[tuple[Any, ...]] = []
    new = [lambda what=what: torch.empty(*what[:1], dtype=what[1]) for what in bound.shapes]
    bound.again = (lambda *given: launched.append(given)), new
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    made, first = bound(tensors, lens, table, cu_q)
    assert len(made) == count and (first is not None) == packed
    assert [tuple(out.shape) for out in made] == [tuple(shape) for shape, _ in bound.shapes[:count]]
    ((stream, *given),) = launched
    at = dict(zip(widen_rows.arg_names, given, strict=False))
    addresses = [
        (x.data_ptr(), scale.data_ptr(), out.data_ptr())
        for (x, scale), out in zip(tensors, made, strict=True)
        if scale is not None
    ]
    assert stream == 7
    assert [at["x"], at["y"]] == [*addresses, *[None] * (2 - count)]
    assert at["lens_ptr"] == lens.data_ptr() and at["table_ptr"] == table.data_ptr()
    assert at["cu_q_ptr"] == cu_q.data_ptr()
    assert at["first_ptr"] == (None if first is None else first.data_ptr())
    assert [*at, *bound.fixed] == widen_rows.arg_names


def test_an_odd_address_is_launched_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another specialisation of the kernel."""
    ((x, scale),) = tensors_of(1)
    bound = Widening([(x, scale)], torch.bfloat16, 2, 64)
    through_triton: list[Any] = []

    class Kernel:
        arg_names = widen_rows.arg_names

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: through_triton.append(args)

    monkeypatch.setattr(widen, "widen_rows", Kernel())
    new = [lambda: torch.empty(bound.shapes[0][0], dtype=torch.bfloat16)]
    bound.again = pytest.fail, new
    odd = torch.zeros(x.numel() + 16, dtype=torch.int8)[8:-8].view(x.shape)
    bound([(odd, scale)])
    assert len(through_triton) == 1 and through_triton[0][0].ptr is odd
