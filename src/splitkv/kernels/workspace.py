"""Memory for partials: one buffer a device, stream and size class, kept from call to call.

Bound: a plan needs `programs * rows * (head_dim_v + 2) * 4` bytes, a size class is the next power
of two, and a stream keeps only the largest class it has needed: at most twice the largest plan.
Nothing is allocated on a later call, and calls on different streams never share a buffer. While a
graph is being captured the partials come from the graph's own pool instead, so that a replay
cannot meet a call of another stream.
"""

from __future__ import annotations

import torch

from splitkv.kernels.combine import Partial

_buffers: dict[tuple[int, int], torch.Tensor] = {}
_cuts: dict[tuple[int, int, int, int], tuple[Partial, Partial]] = {}


def _cut(buffer: torch.Tensor, acc: int, rows: int) -> tuple[Partial, Partial]:
    """The partials in a buffer, as tensors and as addresses."""
    m_at, l_at = acc, acc + _aligned(rows)
    tensors = Partial(buffer[:acc], buffer[m_at : m_at + rows], buffer[l_at : l_at + rows])
    return tensors, Partial(*(x.data_ptr() for x in tensors))


def _aligned(count: int) -> int:
    return -(-count // 32) * 32


def partials(like: torch.Tensor, acc: int, rows: int) -> tuple[Partial, Partial]:
    """acc, m, l of so many elements in fp32, on the current stream of `like`'s device.

    Returned as tensors and as addresses; valid until the next call on the same stream.
    """
    numel = acc + 2 * _aligned(rows)
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return _cut(like.new_empty(numel, dtype=torch.float32), acc, rows)
    device = like.device.index
    key = (device, torch._C._cuda_getCurrentRawStream(device), acc, rows)
    cut = _cuts.get(key)
    if cut is None:
        buffer = _buffers.get(key[:2])
        if buffer is None or buffer.numel() < numel:
            for stale in [k for k in _cuts if k[:2] == key[:2]]:
                del _cuts[stale]
            size_class = 1 << (numel - 1).bit_length()
            buffer = _buffers[key[:2]] = like.new_empty(size_class, dtype=torch.float32)
        cut = _cuts[key] = _cut(buffer, acc, rows)
    return cut


def release() -> None:
    """Give all buffers back to torch's allocator."""
    _buffers.clear()
    _cuts.clear()
