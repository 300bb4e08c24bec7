"""Memory of calls that are relaunched: results, and partials from the buffers of their stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from splitkv.kernels.host import workspace
from splitkv.kernels.host.launch import Launch


class Allocations:
    """Memory of a call that is relaunched: new results, and the partials of its stream.

    merge        as the class says, or None: one part each, or merged where they are made
    lse_shape    None: no LSE is wanted
    acc, rows    elements and rows of the partials

    `call` gives (out, lse or None), or None where the call has to go through Triton: an address is
    not a multiple of 16, which is another specialisation of the kernels, or a launch hook is set.
    Belongs to one device, which has to be current.
    """

    def __init__(
        self,
        merge: Launch | None,
        device: torch.device,
        dtype: torch.dtype,
        out_shape: Sequence[int],
        lse_shape: Sequence[int] | None,
        acc: int,
        rows: int,
    ) -> None:
        self.merge, self.dtype = merge, dtype
        self.empty = workspace.empty_strided(device)
        self.new_out = workspace.allocation(out_shape, dtype, device)
        self.new_lse: Any = None
        if lse_shape is not None:
            self.new_lse = workspace.allocation(lse_shape, torch.float32, device)
        self.device = device.index
        self.current_stream = torch._C._cuda_getCurrentRawStream
        self.capturing = torch._C._cuda_isCurrentStreamCapturing
        self.buffers, self.make_buffer = workspace.buffers(device.index), workspace.make_buffer
        self.counter = workspace.counter
        self.m_at, self.l_at, self.numel = workspace.layout(acc, rows)
        self.unread: int | None = None  # where results go that nobody reads, see workspace.py

    def take_buffer(
        self, stream: int, captured: Any, layout: tuple[int, int, int] | None = None
    ) -> tuple[Any, tuple[int, int, int]]:
        """A buffer for the partials, the stream's own where no graph is captured, which gets it
        back in `buffers` after the call; and the addresses of acc, m and l in it.

        layout   of `workspace.layout`; None: that of this call
        """
        m_at, l_at, numel = layout or (self.m_at, self.l_at, self.numel)
        buffer: Any = None if captured else self.buffers.pop(stream, None)
        if buffer is None or buffer[1] < numel:
            buffer = self.make_buffer(self.device, numel, captured)
        at = buffer[0]
        return buffer, (at, at + m_at, at + l_at)


NO_PARTIALS = 0, 0, 0
