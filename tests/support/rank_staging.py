"""Collectives of gloo through host memory, for ranks that share a GPU.

gloo neither sends nor receives tensors of a GPU, and NCCL takes no two ranks of one. So what
splitkv.distributed asks of torch.distributed is copied to the host first, and what comes is copied
back where it is waited for. All that is computed is as with NCCL; that transfers run beside it is
not: the first copy waits for the GPU. Groups of NCCL are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from splitkv.distributed import collectives

REPLACED = "all_gather", "all_reduce", "all_to_all_single", "batch_isend_irecv"


class Landing:
    """A transfer on its way to host memory, from where `wait` copies what came.

    pairs   (tensor that is asked for, its copy on the host)
    sent    copies that have to stay until the transfer is over
    """

    def __init__(self, work: Any, pairs: Sequence[tuple[Tensor, Tensor]], *sent: Tensor) -> None:
        self.work, self.pairs, self.sent = work, pairs, sent

    def wait(self) -> None:
        self.work.wait()
        for x, copy in self.pairs:
            x.copy_(copy)
        self.pairs, self.sent = (), ()


def on_host(x: Tensor) -> Tensor:
    """A copy of a tensor in host memory."""
    return x.detach().to("cpu", copy=True)


def install() -> None:
    """Replace the functions that splitkv.distributed calls, in this process and for good."""
    original = {name: getattr(dist, name) for name in REPLACED}
    gather_into = collectives._all_gather

    def is_nccl(group: Any) -> bool:
        return bool(dist.get_backend(group) == "nccl")

    def all_gather(out: list[Tensor], x: Tensor, group: Any) -> None:
        if is_nccl(group):
            return original["all_gather"](out, x, group=group)
        sent = on_host(x)
        copies = [on_host(part) for part in out]
        work = original["all_gather"](copies, sent, group=group, async_op=True)
        Landing(work, list(zip(out, copies, strict=True)), sent).wait()

    def all_reduce(x: Tensor, group: Any) -> None:
        if is_nccl(group):
            return original["all_reduce"](x, group=group)
        copy = on_host(x)
        work = original["all_reduce"](copy, group=group, async_op=True)
        Landing(work, [(x, copy)]).wait()

    def all_gather_into(out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
        if is_nccl(group):
            return gather_into(out, x, group=group, async_op=async_op)
        copy, sent = on_host(out), on_host(x)
        work = gather_into(copy, sent, group=group, async_op=True)
        return Landing(work, [(out, copy)], sent)

    def all_to_all(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        move, sizes = original["all_to_all_single"], (output_split_sizes, input_split_sizes)
        if is_nccl(group):
            return move(output, input, *sizes, group=group, async_op=async_op)
        copy, sent = on_host(output), on_host(input)
        work = move(copy, sent, *sizes, group=group, async_op=True)
        landing = Landing(work, [(output, copy)], sent)
        return landing if async_op else landing.wait()

    def batch(messages: list[Any]) -> list[Any]:
        move = original["batch_isend_irecv"]
        if is_nccl(messages[0].group):
            found: list[Any] = move(messages)
            return found
        works = []
        copies = [on_host(message.tensor) for message in messages]
        for message, copy in zip(messages, copies, strict=True):
            staged = dist.P2POp(
                message.op, copy, group=message.group, group_peer=message.group_peer
            )
            (work,) = move([staged])
            came = [(message.tensor, copy)] if message.op is dist.irecv else []
            works.append(Landing(work, came, copy))
        return works

    for name, run in zip(REPLACED, (all_gather, all_reduce, all_to_all, batch), strict=True):
        setattr(dist, name, run)
    collectives._all_gather = all_gather_into
