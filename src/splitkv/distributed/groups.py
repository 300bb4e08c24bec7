"""The ranks that share a call, and that they all make the same one.

A collective whose ranks disagree hangs, or moves the wrong numbers. So the first call of a kind
compares what the ranks are about to do, by one small collective that the host waits for; a fault
that one rank finds alone raises on every rank. Later calls of that kind compare nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from splitkv.core.errors import UnsupportedProblem, expect

Facts = dict[str, Any]
"""Facts that have to be equal on every rank, by the name of the argument: values with a `repr`."""

Checked = TypeVar("Checked")

MAX_KINDS = 4096  # of calls that are known not to differ

_agreed: WeakKeyDictionary[ProcessGroup, dict[Any, Any]] = WeakKeyDictionary()


def group_of(group: Any, device_mesh: Any = None) -> ProcessGroup:
    """The process group of a call, given by itself or as a DeviceMesh of one dimension."""
    expect(dist.is_available() and dist.is_initialized(), "group", "a process group", None, _INIT)
    both = group is not None and device_mesh is not None
    expect(not both, "device_mesh", "None with a group", device_mesh)
    if device_mesh is not None:
        expect(isinstance(device_mesh, DeviceMesh), "device_mesh", "a DeviceMesh", device_mesh)
        dims = device_mesh.ndim
        hint = "pass the dimension whose ranks share the sequence, as in device_mesh['cp']"
        expect(dims == 1, "device_mesh", "1 dimension", f"{dims} dimensions", hint)
        group = device_mesh.get_group()
    expect(group is not None, "group", "a process group, or a device_mesh", None)
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    expect(member, "group", "one that this rank belongs to", "another ranks' group")
    expect(isinstance(group, ProcessGroup), "group", "a process group", group)
    checked: ProcessGroup = group
    return checked


_INIT = "call torch.distributed.init_process_group first"


def ranks_of(group: ProcessGroup) -> tuple[int, int]:
    """(this rank within the group, how many there are)."""
    return dist.get_rank(group), dist.get_world_size(group)


def agree(
    group: ProcessGroup, facts: Facts, check: Callable[[], Checked], like: Any = None
) -> Checked:
    """Returns what `check` does, once all ranks of the group have come here with the same facts.

    check   says what of the call is malformed, from the facts alone
    like    a tensor of the call; what is compared goes over its device

    Raises the same ValueError on every rank where facts differ, or where `check` raises on any.
    """
    kept = _agreed.setdefault(group, {})
    kind = tuple((name, repr(value)) for name, value in facts.items())
    if kind in kept:
        checked: Checked = kept[kind]
        return checked
    fault, result = "", None
    try:
        result = check()
    except (ValueError, UnsupportedProblem) as error:
        fault = f"{error}"
    _compare(group, facts, fault, like)
    if len(kept) >= MAX_KINDS:  # as on every other rank, which has seen the same calls
        kept.clear()
    kept[kind] = result
    return result  # type: ignore[return-value]


def _compare(group: ProcessGroup, facts: Facts, fault: str, like: Any) -> None:
    """Raise on every rank unless all have these facts and none has a fault."""
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    if device.type == "cpu" and dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    size = dist.get_world_size(group)
    said = repr((fault, facts)).encode()
    digest = int.from_bytes(hashlib.blake2b(said, digest_size=7).digest(), "big")
    own = torch.tensor([digest, int(fault != "")], dtype=torch.int64, device=device)
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own, group=group)
    digests, faults = torch.stack(every).cpu().unbind(1)
    if bool((digests == digest).all()) and not bool(faults.any()):
        return
    told: list[Any] = [None] * size
    dist.all_gather_object(told, (fault, {n: repr(x) for n, x in facts.items()}), group=group)
    found = [(rank, text) for rank, (text, _) in enumerate(told) if text]
    if found:
        rank, text = found[0]
        alone = len({text for text, _ in told}) > 1
        raise ValueError(f"{text} (on rank {rank} of the group)" if alone else text)
    first = told[0][1]
    for rank, (_, other) in enumerate(told):
        names = [n for n in {**first, **other} if first.get(n) != other.get(n)]
        for name in names[:1]:
            raise ValueError(
                f"{name}: expected the same on every rank of the group, got {first.get(name)} on "
                f"rank 0 and {other.get(name)} on rank {rank}"
            )
