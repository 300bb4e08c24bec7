"""Who runs the ways of `works`: our kernels in this process, FlashAttention-3 in one of its own.

python -m splitkv.lab.harness.backends    works on stdin, lines of JSON on stdout
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

import splitkv
from splitkv.core.device import Device, current
from splitkv.core.errors import expect
from splitkv.core.plan import Kernel, Plan
from splitkv.core.problem import Problem
from splitkv.lab.harness import peers, space
from splitkv.lab.harness.cases import Inputs
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.process import Ended, Process
from splitkv.lab.harness.timing import Prepared, Variant, measure, protocol_for
from splitkv.lab.harness.work import Way, Work, unpacked
from splitkv.planner.policies.shared import max_splits, shapes
from splitkv.planner.registry import make_plan

ABLATED = "decode_split"  # the kernel that packing is taken out of, and put into again
SECONDS = 60  # that a process may take for a work; the first one loads


class Backend(Protocol):
    """Times the ways of a work in turns: a row of each, in which `kernel` is the way's name.

    absent   why nothing can run here; empty where it can
    start    begins what it needs before its first work, and does not wait for it
    """

    name: str

    def absent(self) -> list[str]: ...

    def start(self) -> None: ...

    def measure(self, work: Work, rounds: int, repeats: int = 1) -> list[Record]: ...

    def stop(self) -> None: ...


def our_plan(p: Problem, device: Device, way: Way, only: str | None = None) -> Plan:
    """The default policy's plan, or the first shape of the first kernel with so many splits.

    only   the one kernel that may run it
    """

    def unfit(kernel: Kernel) -> list[str]:
        return [] if only in (None, kernel.name) else [f"expected {only}"]

    if way.splits == 0:
        return make_plan(p, device, unfit=unfit)
    kernel = next(k for k in space.splitting(p, device) if only in (None, k.name))
    found = shapes(kernel, p, device)
    able = [shape for shape in found if max_splits(p, found, shape) >= way.splits]
    most = max(max_splits(p, found, shape) for shape in found)
    expect(able, "splits", f"at most {most}, as there are tiles", way.splits)
    config = replace(able[0], num_splits=way.splits)
    return Plan(p, device, "reproduce", kernel.name, config, f"{way.name}, as asked")


def our_plans(work: Work, device: Device) -> dict[Way, Plan | ValueError]:
    """way -> its plan, or why there is none."""
    ablation = any(way.packed is False for way in work.ways)
    found: dict[Way, Plan | ValueError] = {}
    for way in work.ways:
        p = unpacked(work.case.problem) if way.packed is False else work.case.problem
        try:
            found[way] = our_plan(p, device, way, way.kernel or (ABLATED if ablation else None))
        except ValueError as error:
            found[way] = error
    return found


def expanded(given: dict[str, Any], heads: int) -> dict[str, Any]:
    """The arguments of a call whose only KV head is given so many times, with its scales."""
    caches = {name: given[name].expand(-1, -1, heads, -1) for name in ("k_cache", "v_cache")}
    scales: dict[str, Any]
    scales = {name: given[name].expand(heads) for name in ("k_scale", "v_scale") if name in given}
    return {**given, **caches, **scales}


def our_variants(work: Work) -> list[Variant]:
    """`splitkv.decode` under each way's plan; unpacked, every query head is given its keys anew."""

    def prepare(inputs: Inputs, plan: Any) -> Prepared:
        heads = plan.problem.num_kv_heads

        def arguments(i: int) -> dict[str, Any]:
            given = inputs.arguments(i)
            same = heads == inputs.problem.num_kv_heads
            return {**(given if same else expanded(given, heads)), "plan": plan}

        calls = [arguments(i) for i in range(inputs.buffers)]
        return Prepared(lambda i: splitkv.decode(**calls[i]), splitkv.__version__, plan.as_dict())

    def variant(way: Way, plan: Plan | ValueError) -> Variant:
        against = [] if isinstance(plan, Plan) else [str(plan)]
        run = partial(prepare, plan=plan)
        alike = None
        if isinstance(plan, Plan):  # all but why
            alike = plan.policy, plan.problem, plan.kernel, plan.config
        return Variant("splitkv", way.name, run, lambda case: against, alike=alike)

    return [variant(way, plan) for way, plan in our_plans(work, current()).items()]


def fa3_variants(work: Work) -> list[Variant]:
    """FlashAttention-3 with its schedule made ahead for the way's number of splits."""
    variants = []
    for way in work.ways:
        prepare = partial(
            peers.fa3,
            num_splits=way.splits,
            pack_gqa=way.packed,
            sm_margin=way.margin,
            ahead=way.ahead,
        )
        needed, alike = peers.needs("peers.fa3"), way._replace(name="")
        variants.append(Variant("fa3", way.name, prepare, needed, alike=alike))
    return variants


class Ours:
    """Our kernels."""

    name = "splitkv"

    def absent(self) -> list[str]:
        device = current()
        return [] if device.kind == "cuda" else [f"device: expected a CUDA GPU, got {device.name}"]

    def start(self) -> None:
        pass

    def measure(self, work: Work, rounds: int, repeats: int = 1) -> list[Record]:
        protocol = protocol_for(work.case, current(), rounds, repeats)
        rows = list(measure(work.case, our_variants(work), protocol))
        torch.cuda.empty_cache()
        return rows

    def stop(self) -> None:
        pass


class Torch:
    """torch's own attention on a contiguous cache, as a yardstick: FlashAttention-2 and cuDNN."""

    name = "torch"

    def absent(self) -> list[str]:
        return Ours().absent()

    def start(self) -> None:
        pass

    def measure(self, work: Work, rounds: int, repeats: int = 1) -> list[Record]:
        variants = [v for name in ("fa2", "cudnn") for v in peers.PEERS[name].variants]
        protocol = protocol_for(work.case, current(), rounds, repeats)
        rows = list(measure(work.case, variants, protocol))
        torch.cuda.empty_cache()
        return [{**row, "kernel": f"{row['library']} {row['kernel']}"} for row in rows]

    def stop(self) -> None:
        pass


class FlashAttention3:
    """FlashAttention-3, in a process that stays from work to work."""

    name = "fa3"

    def __init__(self, command: Sequence[str] | None = None) -> None:
        own = (sys.executable, "-m", "splitkv.lab.harness.backends")
        self.process = Process(command or own)

    def absent(self) -> list[str]:
        return [] if peers.importable("peers.fa3") else ["peers.fa3: expected importable, got none"]

    def start(self) -> None:
        self.process.start()

    def measure(self, work: Work, rounds: int, repeats: int = 1) -> list[Record]:
        variants = {variant.kernel: variant for variant in fa3_variants(work)}
        rows: list[Record] = []
        try:
            self.process.send(base64.b64encode(pickle.dumps((work, rounds, repeats))).decode())
            while row := self.process.receive(SECONDS):
                variants.pop(row["kernel"], None)
                rows.append(row)
        except Ended as error:
            rows += [variant.row(reasons=[str(error)]) for variant in variants.values()]
        return rows

    def stop(self) -> None:
        self.process.stop()


def answers(line: str) -> Iterator[Record]:
    """The rows of a work asked for, and {}."""
    work, rounds, repeats = pickle.loads(base64.b64decode(line))
    protocol = protocol_for(work.case, current(), rounds, repeats)
    yield from measure(work.case, fa3_variants(work), protocol)
    torch.cuda.empty_cache()
    yield {}


def serve() -> None:
    """Answer on stdin; what libraries print is no answer."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        for row in answers(line):
            print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    serve()
