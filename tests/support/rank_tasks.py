"""What the ranks of a pool do in tests of splitkv.distributed; see ranks.py."""

from __future__ import annotations

import gc
import sys
import time
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from splitkv import distributed
from splitkv.testing import captured

LEAVES = "q", "k", "v", "sink_logits"


def sequence(group: Any, way: dict[str, Any], call: dict[str, Any]) -> dict[str, Tensor]:
    """out, lse and gradients of this rank's tokens.

    call   what every rank knows: q, k, v [(batch,) total, heads, dim], grad_out, grad_lse, and the
           options; cu_seqlens and max_seqlen where sequences are packed
    """
    dim, layout = -3, way["layout"]
    call = dict(call)
    grad_out = distributed.shard(call.pop("grad_out"), group, dim=dim, layout=layout)
    grad_lse = distributed.shard(call.pop("grad_lse"), group, dim=-1, layout=layout)
    for name in ("q", "k", "v"):
        call[name] = distributed.shard(call[name], group, dim=dim, layout=layout)
    leaves = {name: call[name].requires_grad_() for name in LEAVES if call[name] is not None}
    packed = "cu_seqlens" in call
    attend = distributed.attention_varlen if packed else distributed.attention
    out, lse = attend(**call, group=group, **way, return_lse=True)
    loss = (out * grad_out).sum() + (finite(lse) * grad_lse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **found}


def twice_differentiated(group: Any, window: tuple[int, int]) -> None:
    """The gradient of a gradient through a ring, or a window."""
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in "qkv")
    way: dict[str, Any] = {"exchange": "ring", "causal": True, "window_size": window}
    layout = "contiguous" if window[0] >= 0 else "zigzag"
    out = distributed.attention(q, k, v, group=group, layout=layout, **way)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    dq.sum().backward()


def finite(lse: Tensor) -> Tensor:
    """0 in the place of -inf."""
    return torch.where(lse == float("-inf"), 0.0, lse)


def cache(group: Any, way: dict[str, Any], calls: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """(out, lse) of decode against this rank's part of a cache, by its arguments in calls."""
    call = calls[dist.get_rank(group)]
    result: tuple[Tensor, Tensor] = distributed.decode(**call, group=group, **way)
    return result


def merged(
    group: Any, parts: list[tuple[Tensor, Tensor]], heads: Any, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`combine` of what each rank has."""
    out, lse = parts[dist.get_rank(group)]
    return distributed.combine(out, lse, group, heads=heads, sink_logits=sinks)


def called(group: Any, name: str, calls: list[dict[str, Any]]) -> Any:
    """A function of splitkv.distributed, with other arguments on each rank."""
    result = getattr(distributed, name)(**calls[dist.get_rank(group)], group=group)
    return result if isinstance(result, Tensor) else None


def traffic(group: Any, way: dict[str, Any], call: dict[str, Any]) -> list[tuple[int, ...]]:
    """Elements that this rank gets of each other one, of every all-to-all of a forward."""
    seen: list[tuple[int, ...]] = []
    original = dist.all_to_all_single

    def spy(out: Tensor, x: Tensor, receives: Any = None, *args: Any, **kwargs: Any) -> Any:
        size = dist.get_world_size(group)
        rows = receives or [out.shape[0] // size] * size
        seen.append(tuple(n * out[:1].numel() for n in rows))
        return original(out, x, receives, *args, **kwargs)

    dist.all_to_all_single = spy
    try:
        layout = way["layout"]
        own = {n: distributed.shard(call[n], group, layout=layout) for n in ("q", "k", "v")}
        distributed.attention_varlen(**{**call, **own}, group=group, **way)
    finally:
        dist.all_to_all_single = original
    return seen


class Received:
    """Counts the bytes that this rank gets of others, by whatever transfer."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes = 0

    def __enter__(self) -> Received:
        from splitkv.distributed import collectives

        self.stack = ExitStack()
        for module, name, spy in (
            (dist, "all_to_all_single", self.all_to_all),
            (dist, "batch_isend_irecv", self.messages),
            (collectives, "_all_gather", self.all_gather),
        ):
            replaced = partial(spy, getattr(module, name))
            self.stack.enter_context(mock.patch.object(module, name, replaced))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def taken(self) -> int:
        """What came since this was asked for."""
        found, self.bytes = self.bytes, 0
        return found

    def all_to_all(
        self, run: Any, out: Tensor, x: Tensor, receives: Any, *rest: Any, **options: Any
    ) -> Any:
        rows = receives or [out.shape[0] // self.size] * self.size
        of_others = sum(rows) - rows[self.rank]
        self.bytes += of_others * out[:1].numel() * out.element_size() if of_others else 0
        return run(out, x, receives, *rest, **options)

    def all_gather(self, run: Any, out: Tensor, x: Tensor, **options: Any) -> Any:
        self.bytes += (out.numel() - x.numel()) * out.element_size()
        return run(out, x, **options)

    def messages(self, run: Any, messages: list[Any]) -> Any:
        come = [message.tensor for message in messages if message.op is dist.irecv]
        self.bytes += sum(x.numel() * x.element_size() for x in come)
        return run(messages)


def packed_traffic(group: Any, way: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank gets in the forward and the backward of one packed sequence."""
    total, heads, dim = 48, 4, 16
    tensors = [torch.randn(total, heads, dim) for _ in "qkv"]
    leaves = [distributed.shard(x, group, layout=way["layout"]).requires_grad_() for x in tensors]
    bounds = torch.tensor((0, total), dtype=torch.int32)
    with Received(group) as received:
        out = distributed.attention_varlen(*leaves, bounds, total, group=group, **way, **options)
        forward = received.taken()
        out.sum().backward()
        return forward, received.taken()


def bytes_of_decode(group: Any, call: dict[str, Any], heads: Any) -> int:
    """Bytes that this rank gets in a step of decode."""
    with Received(group) as received:
        distributed.decode(**call, group=group, heads=heads)
        return received.taken()


class _Told(torch.autograd.Function):
    """x itself; its gradient's way back is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, told: list[str]) -> Tensor:
        ctx.told = told
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.told.append("attend_backward")
        return grad, None


class _Work:
    """A transfer whose wait is told, once a transfer however many messages it has."""

    def __init__(self, works: Any, told: list[str]) -> None:
        self.works, self.told = works, told

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.told.append("wait")


def events(group: Any, way: dict[str, Any]) -> list[str]:
    """What a forward and a backward do, in order: "start" and "wait" of transfers, "attend" and
    "attend_backward"."""
    from splitkv.distributed import collectives, heads, keys, ring, window

    told: list[str] = []

    def transfer(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            works = original(*args, **kwargs)
            told.append("start")
            single = not isinstance(works, list)
            work = _Work([works] if single else works, told)
            return work if single else [work]

        return run

    def attend(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            told.append("attend")
            out, lse = original(*args, **kwargs)
            return (_Told.apply(out, told), lse) if out.requires_grad else (out, lse)

        return run

    def backward(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            told.append("attend_backward")
            return original(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for module, name, spy in (
            (dist, "all_to_all_single", transfer),
            (dist, "batch_isend_irecv", transfer),
            (collectives, "_all_gather", transfer),
            *((module, "attention", attend) for module in (heads, keys, ring, window)),
            *((module, "attention_backward", backward) for module in (ring, window)),
        ):
            found = spy(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, found))
        q, k, v = (torch.randn(1, 8, 8, 8, requires_grad=True) for _ in "qkv")
        out = distributed.attention(q, k, v, group=group, **{"causal": True, **way})
        out.sum().backward()
    return told


def demo_losses(group: Any, shape: Any, steps: int, exchange: Any) -> list[float]:
    """The losses of `splitkv demo --ranks`."""
    from splitkv.demo.ranks import losses

    return losses(shape, steps, 0, torch.device("cpu"), group, exchange)


def core_attention(group: Any, call: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """out and gradients of this rank's tokens, by a module of TransformerEngine's call shape.

    call   as that of `sequence`, dense
    """
    from splitkv.integrations.transformer_engine import DotProductAttention

    packed = "cu_seqlens" in call
    layout: Any = {"dim": -3, "layout": "zigzag"}
    names = ("q", "k", "v", "grad_out")
    q, k, v, grad = (distributed.shard(call[name], group, **layout) for name in names)
    dims = q.shape[-1], v.shape[-1]
    attend = DotProductAttention(
        q.shape[-2],
        dims,
        num_gqa_groups=k.shape[-2],
        softmax_type="learnable",
        cp_group=group,
        **{"qkv_format": "bshd", **options},
    )
    sinks = attend.softmax_offset
    assert sinks is not None
    with torch.no_grad():
        sinks.copy_(call["sink_logits"])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = options.get("qkv_format") == "sbhd"
    given = [x.transpose(0, 1) if first else x for x in leaves]
    lengths = {}
    if packed:
        bounds, longest = call["cu_seqlens"], call["max_seqlen"]
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
        lengths |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    out = attend(*given, **lengths)
    out = (out.transpose(0, 1) if first else out).unflatten(-1, (q.shape[-2], -1))
    grads = torch.autograd.grad(out, [*leaves, sinks], grad)
    found = dict(zip(("dq", "dk", "dv", "dsink_logits"), grads, strict=True))
    return {"out": out.detach(), **found}


def with_dtensors(group: Any) -> Any:
    """A call with a DTensor in the place of a rank's part."""
    mesh = DeviceMesh.from_group(group, "cpu")
    q = DTensor.from_local(torch.randn(1, 4, 2, 8), mesh, [Shard(1)], run_check=False)
    return distributed.attention(q, q, q, group=group)


def compiled_caller(group: Any) -> tuple[Tensor, Tensor]:
    """The output of a function that calls attention, eager and compiled."""

    def run(x: Tensor) -> Tensor:
        out: Tensor = distributed.attention(x * 2, x, x, group=group, causal=True)
        return out + 1

    x = torch.randn(1, 4, 2, 8)
    return run(x), torch.compile(run, backend="eager")(x)


def with_group(group: Any, how: str) -> Any:
    """A call with a group that is not one."""
    mesh = DeviceMesh.from_group(group, "cpu")
    every = torch.arange(dist.get_world_size(group))[None]
    two = DeviceMesh("cpu", every, _init_backend=False)
    given: dict[str, Any] = {
        "none": {},
        "both": {"group": group, "device_mesh": mesh},
        "two_dimensions": {"device_mesh": two},
        "others": {"group": dist.GroupMember.NON_GROUP_MEMBER},
        "no_group": {"group": "cp"},
    }[how]
    x = torch.randn(1, 4, 2, 8)
    return distributed.attention(x, x, x, **given)


def left_over(group: Any, exchange: Any) -> int:
    """Tensors that are there after a step is over and were not before, garbage left lying."""

    def count() -> int:
        return sum(isinstance(x, Tensor) for x in gc.get_objects())

    def once() -> None:
        q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in "qkv")
        out = distributed.attention(q, k, v, group=group, exchange=exchange, causal=True)
        out.sum().backward()

    once()
    gc.collect()
    gc.disable()
    before = count()
    once()
    after, waited = count(), 0
    while after > before and waited < 40:  # the group's own threads let go of what they sent
        time.sleep(0.05)
        after, waited = count(), waited + 1
    gc.enable()
    return max(0, after - before)


def on_gpu(group: Any, task: Any, *arguments: Any) -> Any:
    """Another task, of tensors on this rank's GPU; what it returns is on the host."""
    return moved(task(group, *(moved(x, "cuda") for x in arguments)), "cpu")


def moved(x: Any, device: str) -> Any:
    """x with the tensors of its dicts, lists and tuples on a device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    return type(x)(moved(value, device) for value in x) if isinstance(x, (list, tuple)) else x


def alone_in_nccl(group: Any, way: dict[str, Any], call: dict[str, Any]) -> dict[str, Tensor]:
    """`sequence` over a group of this rank alone, of NCCL."""
    return sequence(own_group_of_nccl(), way, call)


@lru_cache(maxsize=1)
def own_group_of_nccl() -> Any:
    """A group of NCCL that has this rank alone; every rank has to ask for it."""
    every = [dist.new_group([rank], backend="nccl") for rank in range(dist.get_world_size())]
    return every[dist.get_rank()]


def replayed(
    group: Any, way: dict[str, Any], call: dict[str, Any], steps: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of decode over a group of this rank alone, of NCCL, for the cache_seqlens of each
    step: captured once in a CUDA graph, and replayed."""
    own = own_group_of_nccl()

    def run() -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = distributed.decode(**call, group=own, **way)
        return result

    replay, (out, lse) = captured(run, mode="thread_local")
    found = []
    for lengths in steps:
        call["cache_seqlens"].copy_(lengths)
        for x in (out, lse):
            x.fill_(torch.nan)
        replay()
        found.append((out.clone(), lse.clone()))
    return found


def benched(group: Any, cases: Any, ways: list[str], path: Any) -> tuple[list[Any], int, str]:
    """`splitkv bench ranks` without verl: its results and status, and what it says."""
    from io import StringIO

    from rich.console import Console

    from splitkv.lab.bench.ranks import bench_ranks

    said = StringIO()
    console, device = Console(file=said, width=200), torch.device("cpu")
    options: Any = {"rounds": 2, "json_path": path, "console": console}
    with mock.patch.dict(sys.modules, {"verl": None}):
        found = bench_ranks(cases, ways, group=group, device=device, **options)
    return *found, said.getvalue()
