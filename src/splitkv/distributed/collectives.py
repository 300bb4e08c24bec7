"""Collectives that are started, and waited for where what they bring is used; differentiable.

`start(x, move)` returns at once, and `wait()` of what it returns gives the tensor. Between the two,
whatever runs on this rank runs beside the transfer. So it is backwards: the gradient's transfer
starts where the forward waited, and is waited for where the forward started. With NCCL `wait` lets
the current stream wait and not the host; with gloo it is the host that waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames it
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Move(Protocol):
    """One collective and its transpose, on contiguous tensors; each gives a buffer and its work."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]: ...

    def backward(self, grad: Tensor) -> tuple[Tensor, Any]: ...

    def finish(self, grads: Tensor) -> Tensor:
        """The gradient of x, from what `backward` brought."""


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Rows of dimension 0 for every rank, in their order, for rows of every rank.

    sends, receives   rows for and of each rank; None: as many for each
    """

    group: dist.ProcessGroup
    sends: Sequence[int] | None = None
    receives: Sequence[int] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return _exchange(x, self.group, self.sends, self.receives)

    def backward(self, grad: Tensor) -> tuple[Tensor, Any]:
        return _exchange(grad, self.group, self.receives, self.sends)

    def finish(self, grads: Tensor) -> Tensor:
        return grads


@dataclass(frozen=True, eq=False)
class AllGather:
    """Rows of dimension 0 of every rank; the gradient is the sum of what all ranks have of it."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        every = x.new_empty(dist.get_world_size(self.group) * x.shape[0], *x.shape[1:])
        return every, _all_gather(every, x, group=self.group, async_op=True)

    def backward(self, grad: Tensor) -> tuple[Tensor, Any]:
        return _exchange(grad, self.group, None, None)

    def finish(self, grads: Tensor) -> Tensor:
        by_rank = grads.unflatten(0, (dist.get_world_size(self.group), -1))
        return by_rank.sum(0, dtype=_sum_dtype(grads.dtype)).to(grads.dtype)


class Pending:
    """A transfer on its way."""

    def __init__(self, move: Move, x: Tensor) -> None:
        self.move, self.sent = move, x
        self.work: Any = None
        self.back: Tensor | None = None
        self.buffer: Tensor | None = _Start.apply(x, self)

    def wait(self) -> Tensor:
        """Waits, and returns what was received; only once."""
        buffer, self.buffer = self.buffer, None  # the graph of which holds this: no circle
        received: Tensor = _Wait.apply(buffer, self)
        return received


def start(x: Tensor, move: Move) -> Pending:
    """Begin to move x, contiguous, which may not change until it has been waited for."""
    return Pending(move, x)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        buffer, pending.work = pending.move.forward(x)
        return buffer

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pending = ctx.pending
        pending.work.wait()
        found, pending.work, pending.back, pending.sent = pending.back, None, None, None
        return pending.move.finish(found), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        pending.work.wait()
        pending.work = pending.sent = None
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pending = ctx.pending
        pending.sent = grad.contiguous()  # kept until the transfer is done
        pending.back, pending.work = pending.move.backward(pending.sent)
        return grad, None  # of the buffer's shape; `_Start` returns what the transfer brings


class Together(torch.autograd.Function):
    """x itself, whose gradient brings a gradient of 0 to what else arrived: the transfer back of
    something that this rank has no use for runs here too, where others wait for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


class Copies(torch.autograd.Function):
    """Slices of x's dimension 0, one after the other. Where they overlap, as keys do that several
    ranks get, the gradient sums the copies' in fp32 and rounds once: one of as many ranks, added up
    in 16 bits, would lose what is small beside what is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: slice) -> Tensor:
        ctx.like, ctx.parts = (x.shape, x.dtype, x.device), parts
        return torch.cat([x[part] for part in parts]) if parts else x[:0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        total = torch.zeros(shape, dtype=_sum_dtype(dtype), device=device)
        begins = offsets([part.stop - part.start for part in ctx.parts])
        for part, begin in zip(ctx.parts, begins, strict=True):
            total[part] += grad[begin : begin + part.stop - part.start]
        return (total.to(dtype), *(None for _ in ctx.parts))


class Rows(torch.autograd.Function):
    """Rows of x's dimension 0 by their numbers, 0 where `held` is False; the gradient of a row that
    is there several times is summed in fp32, as that of `Copies`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, held: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        ctx.save_for_backward(index, held)
        if not x.shape[0]:
            return x.new_zeros(*index.shape, *x.shape[1:])
        return torch.where(_beside(held, x), x[index], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, held = ctx.saved_tensors
        shape, dtype, device = ctx.like
        total = torch.zeros(shape, dtype=_sum_dtype(dtype), device=device)
        if shape[0]:
            known = torch.where(_beside(held, total), grad.to(total.dtype), 0.0)
            total.index_put_((index,), known, accumulate=True)  # in a fixed order on a GPU, too
        return total.to(dtype), None, None


def _beside(held: Tensor, x: Tensor) -> Tensor:
    """held [..], for x [rows, ..] indexed by as many numbers."""
    return held.view(*held.shape, *(1 for _ in x.shape[1:]))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class SumOfGradients(torch.autograd.Function):
    """x itself; its gradient is summed over the ranks, which have a copy of it each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.to(_sum_dtype(grad.dtype), copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


class Trade:
    """Messages between pairs of ranks, all of one round at once.

    sends      (tensor, rank within the group) to send, contiguous
    receives   (tensor, rank within the group) to fill
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> None:
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x, to in sends]
        ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=of) for x, of in receives]
        self.kept = sends, receives
        self.works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        """Waits until what is received is there."""
        for work in self.works:
            work.wait()
        self.works, self.kept = [], ((), ())


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each begins that follows the others."""
    return tuple(accumulate(sizes, initial=0))[:-1]


def _exchange(
    x: Tensor,
    group: dist.ProcessGroup,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> tuple[Tensor, Any]:
    rows = x.shape[0] if receives is None else sum(receives)
    buffer = x.new_empty(rows, *x.shape[1:])
    work = dist.all_to_all_single(
        buffer,
        x,
        None if receives is None else list(receives),
        None if sends is None else list(sends),
        group=group,
        async_op=True,
    )
    return buffer, work
