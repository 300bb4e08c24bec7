"""Memory for partials and for the sums of a small backward: one buffer a device and stream, kept
from call to call; for counters; and for results.

Bound: a plan needs `programs * rows * (head_dim_v + 2) * 4` bytes, a buffer is the next power of
two, and a stream keeps only the largest that it has needed: at most twice the largest plan. A later
call allocates nothing, and calls on different streams never share a buffer. A backward takes one
where its sums are few; more of them are allocated anew and given back.

A call takes the buffer of its stream out of the table, launches its kernels and puts it back. Two
threads on one stream are therefore never in one buffer, whenever the interpreter changes between
them: the second finds none and makes its own. While a graph is being captured the partials come
from the graph's own pool instead, so that a replay cannot meet a call of another stream.

What kernels write and nobody reads, the LSE of a call that is not asked for it, goes to one place
of a device, in all streams, if it is not much. That is kept, as graphs may know it, too.

A launch that merges parts itself counts arrivals. Each stream has counters for that, as launches on
it follow each other, and so has each launch that a graph captured; they are not given back.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from splitkv.kernels.combine import Partial
from splitkv.kernels.host.stand_in import StandIn

Buffer = tuple[int, int, torch.Tensor]
"""Address, number of fp32 elements, and the memory itself."""

MAX_COUNTERS = 1 << 11  # of a device, before more are made
MOST_UNREAD = 1 << 18  # 32-bit elements of what a call writes and nobody reads
WIDTH = 4  # elements of each, those of tile/merge.py
_buffers: dict[int, dict[int, Buffer]] = {}  # by device, then by stream
_counters: dict[int, Iterator[torch.Tensor]] = {}  # by device: those that nobody has yet
_all_counters: list[torch.Tensor] = []  # kept, as graphs know only addresses
_of_streams: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
_unread: dict[torch.device, torch.Tensor] = {}


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


def counter(device: int, stream: int, captured: bool = False) -> torch.Tensor:
    """The counters of a stream, the current one, or for one launch that is being captured: int64
    [4] on the device, see kernels/tile/merge.py."""
    if captured:
        return _new_counter(device, captured)
    found = _of_streams.get((device, stream))
    if found is None:
        found = _of_streams[device, stream] = _new_counter(device, captured)
    return found


def counter_for(like: torch.Tensor) -> torch.Tensor:
    """The counter for a launch on the current stream of `like`'s device."""
    if not like.is_cuda:
        return counter(-1, 0)
    if isinstance(like, StandIn):
        return like.new_empty(WIDTH, dtype=torch.int64)
    device = like.device.index
    captured = torch._C._cuda_isCurrentStreamCapturing()
    return counter(device, torch._C._cuda_getCurrentRawStream(device), captured)


def _new_counter(device: int, captured: bool) -> torch.Tensor:
    unused = next(_counters.get(device, iter(())), None)
    if unused is not None:
        return unused
    if captured:  # made in the graph, which clears it in every replay
        return _zeros(device, WIDTH, captured)
    made = _zeros(device, MAX_COUNTERS * WIDTH, captured)
    _all_counters.append(made)
    each = functools.partial(made.narrow, 0)
    _counters[device] = map(each, range(0, made.numel(), WIDTH), itertools.repeat(WIDTH))
    return next(_counters[device])


def _zeros(device: int, numel: int, captured: bool) -> torch.Tensor:
    """int64, on the current stream; unless captured, for all streams. Device -1 is the CPU."""
    where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    made = torch.zeros(numel, dtype=torch.int64, device=where)
    if device >= 0 and not captured:  # once in MAX_COUNTERS times
        torch.cuda.current_stream(device).synchronize()
    return made


def unread(like: torch.Tensor) -> int | None:
    """The address of memory on `like`'s device for up to MOST_UNREAD elements that nobody reads;
    None: there is none yet, and a graph is being captured."""
    device = like.device
    found = _unread.get(device)
    if found is None:
        if like.is_cuda and torch._C._cuda_isCurrentStreamCapturing():
            return None
        made = torch.empty(MOST_UNREAD, dtype=torch.float32, device=device)
        if like.is_cuda:  # other streams write to it, too, and what was there before may be read
            torch.cuda.current_stream(device).synchronize()
        found = _unread.setdefault(device, made)
    return found.data_ptr()


def held_bytes() -> int:
    """Bytes of all buffers that are kept."""
    return sum(4 * numel for kept in _buffers.values() for _, numel, _ in kept.values())


def release() -> None:
    """Give all buffers back to torch's allocator."""
    for kept in _buffers.values():
        kept.clear()


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch has them."""
    sizes = shape[:0:-1]
    if 0 in sizes:
        sizes = [n or 1 for n in sizes]
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1]


def empty_strided(device: torch.device) -> Callable[..., torch.Tensor]:
    """A function (shape, strides, dtype) that gives uninitialised tensors, on CUDA for the current
    device: two tuples and a type.

    Where torch has the function that its compiled graphs allocate with, that one: it takes half the
    time of `torch.empty`.
    """
    empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type == "cuda" and empty is not None:
        return cast("Callable[..., torch.Tensor]", empty)
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def allocation(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> Callable[[], torch.Tensor]:
    """A function that gives uninitialised tensors, see `empty_strided`.

    strides   None: contiguous
    """
    if strides is None:
        strides = contiguous(shape)
    return functools.partial(empty_strided(device), tuple(shape), tuple(strides), dtype)
