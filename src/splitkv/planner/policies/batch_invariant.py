"""Plans by which a sequence has the same bits whatever else, and how much, is in the batch.

What a row is summed up from, and in which order, follows from its own length and from the bounds of
the call, `max_seqlen_q` and `max_seqlen_k`, which an engine keeps at the most that it serves:

* the kernel is the first that can, and never one that another launch makes keys ready for, which
  pays off for many of them;
* decode is cut into parts of a fixed size, which no neighbour moves, at most MOST_SPLITS of the
  longest sequence;
* whole sequences are not cut.

So the queries that a call has of a sequence give the same bits in every batch. Which queries these
are is the caller's: kernels visit masked tiles of a row tile before the others, so a token may have
other bits in a chunk that begins elsewhere. It costs speed where the batch is small: see `waves`
for what cuts by the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.planner.policies.fixed import with_split_size
from splitkv.planner.policies.shared import READY_BEFORE, best_shape, shapes

LEAST_KEYS = 1024  # a part of decode
MOST_SPLITS = 32  # what `combine` merges in one step


def split_size(seqlen_k: int) -> int:
    """Keys of a part: a power of two, so that every tile divides it."""
    size = LEAST_KEYS
    while ceil_div(seqlen_k, size) > MOST_SPLITS:
        size *= 2
    return size


def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    """The policy: see the module."""
    able = [kernel for kernel in candidates if kernel.name not in READY_BEFORE] or list(candidates)
    kernel, alone = able[0], replace(problem, batch=min(problem.batch, 1))
    if problem.kind == "decode" and "fixed" in kernel.schedules:
        choice = with_split_size(split_size(problem.seqlen_k))(alone, device, able)
        return replace(choice, why=f"whatever the batch: {choice.why}")
    shape = best_shape(shapes(kernel, alone, device), alone)
    return Choice(kernel.name, shape, "whatever the batch: no keys are split")
