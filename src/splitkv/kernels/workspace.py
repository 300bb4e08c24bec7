"""Memory for partials: one buffer a device and stream, kept from call to call; and for results.

Bound: a plan needs `programs * rows * (head_dim_v + 2) * 4` bytes, a buffer is the next power of
two, and a stream keeps only the largest that it has needed: at most twice the largest plan. A later
call allocates nothing, and calls on different streams never share a buffer.

A call takes the buffer of its stream out of the table, launches its kernels and puts it back. Two
threads on one stream are therefore never in one buffer, whenever the interpreter changes between
them: the second finds none and makes its own. While a graph is being captured the partials come
from the graph's own pool instead, so that a replay cannot meet a call of another stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from splitkv.kernels.combine import Partial

Buffer = tuple[int, int, torch.Tensor]
"""Address, number of fp32 elements, and the memory itself."""

_buffers: dict[int, dict[int, Buffer]] = {}  # by device, then by stream


def layout(acc: int, rows: int) -> tuple[int, int, int]:
    """Bytes from acc to m and to l of so many rows, and the elements of all three, in fp32."""
    aligned = -(-rows // 32) * 32
    return 4 * acc, 4 * (acc + aligned), acc + 2 * aligned


def partials(like: torch.Tensor, acc: int, rows: int) -> Partial:
    """acc, m, l of so many elements in fp32, in memory of their own on `like`'s device."""
    *ends, numel = layout(acc, rows)
    memory = like.new_empty(numel, dtype=torch.float32)
    m_at, l_at = (end // 4 for end in ends)
    return Partial(memory[:acc], memory[m_at : m_at + rows], memory[l_at : l_at + rows])


def buffers(device: int) -> dict[int, Buffer]:
    """The buffers of a device by stream: pop one, and put it back when all is launched."""
    return _buffers.setdefault(device, {})


def make_buffer(device: int, numel: int, captured: bool = False) -> Buffer:
    """A buffer of at least so many elements on the current stream; of just so many for a graph."""
    numel = numel if captured else 1 << (numel - 1).bit_length()
    memory = torch.empty(numel, dtype=torch.float32, device=torch.device("cuda", device))
    return memory.data_ptr(), numel, memory


def held_bytes() -> int:
    """Bytes of all buffers that are kept."""
    return sum(4 * numel for kept in _buffers.values() for _, numel, _ in kept.values())


def release() -> None:
    """Give all buffers back to torch's allocator."""
    for kept in _buffers.values():
        kept.clear()


def allocation(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that gives uninitialised contiguous tensors, on CUDA for the current device.

    Where torch has the function that its compiled graphs allocate with, that one: it takes half the
    time of `torch.empty`.
    """
    empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type != "cuda" or empty is None:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return functools.partial(empty, tuple(shape), strides, dtype)
