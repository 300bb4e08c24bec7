"""The self-check of `splitkv doctor`: are the answers right, and is memory read as fast as it can.

Every check compares one call with the reference, by the rule of the tests. On a GPU a decode call
of 134 MB is then timed beside the read floor, and both beside the data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from splitkv.core.device import Device
from splitkv.core.kv import Codec, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.lab.bench.warm import said_of_records
from splitkv.lab.harness.floor import Floors
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Protocol, measure, nvidia_smi, one_line
from splitkv.lab.harness.variants import our_variants
from splitkv.planner.policies import tuned_tables
from splitkv.planner.registry import make_plan
from splitkv.testing import check

SECONDS = 20.0  # past which no further check is begun
CAUSAL = Mask(causal=True)
CHECKS: dict[str, Problem] = {
    "decode": Problem("decode", 2, 8, 1, 128, 128, 1, 1000, mask=CAUSAL, lengths="device"),
    "decode, pages, window, sinks": Problem(
        *("decode", 2, 8, 2, 64, 64, 4, 500),
        mask=Mask(True, 127),
        place=Paged(16),
        sink_logits=True,
        lengths="device",
    ),
    "decode, int8 cache": Problem(
        *("decode", 2, 8, 2, 128, 128, 1, 300),
        mask=CAUSAL,
        codec=Codec("int8", "token"),
        lengths="device",
    ),
    "forward and backward": Problem(
        *("dense", 1, 4, 2, 128, 128, 200, 200), mask=CAUSAL, needs_grad=True
    ),
    "packed sequences": Problem(
        *("varlen", 3, 4, 2, 64, 64, 150, 150), mask=CAUSAL, place=Ragged(), lengths="device"
    ),
}
READ = "mqa8_b64_4096"  # 134 MB
SHORT = Protocol(rounds=7, calls=16)
# Bits of nvidia-smi's reasons for a lower clock; an idle GPU's is none.
SLOWED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}

Said = tuple[str, str]


def correctness(device: Device, clock: Callable[[], float] = time.monotonic) -> Iterator[Said]:
    """(check, what came of it); `FAIL` begins what is wrong."""
    end = clock() + SECONDS
    for name, problem in CHECKS.items():
        if clock() > end:
            yield name, f"left out after {SECONDS:g} s"
            continue
        start = clock()
        try:
            kernel = make_plan(problem, device).kernel
            check(problem, device=device.kind)
        except Exception as error:  # whatever is wrong is what was asked for
            yield name, f"FAIL {one_line(error)}"
        else:
            yield name, f"ok, {kernel}, {clock() - start:.1f} s"


def bandwidth(device: Device) -> Iterator[Said]:
    """The read floor, and decode beside it."""
    case = CASES[READ]
    try:
        us = Floors(SHORT)(case.kv_bytes).timing.us
        (row,) = measure(case, our_variants(), SHORT)
    except RuntimeError as error:  # too little memory, no reader, or a GPU that is lost
        yield "read", f"not measured: {one_line(error)}"
        return
    share = case.kv_bytes / us / 1e-6 / device.bandwidth
    sheet = f"{share:.0%} of {device.bandwidth / 1e12:.2f} TB/s"
    yield "read", f"{case.kv_bytes / 1e6:.0f} MB in {us:.1f} us, {sheet}"
    if row["us"] is None:
        yield "decode", f"FAIL {'; '.join(row['reasons'])}"
    else:
        yield "decode", f"{row['us']:.1f} us, {us / row['us']:.0%} of the speed of the read"
    if now := row["clocks"]:
        yield "clocks then", f"SM {now['sm_mhz']}, memory {now['memory_mhz']} MHz"


CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")


def clocks() -> Iterator[Said]:
    """The clocks now, the highest ones, and what holds them down."""
    found = nvidia_smi(*CLOCKS)
    if found is None:
        yield "clocks", "nvidia-smi does not tell"
        return
    now = dict(zip(CLOCKS, found, strict=True))
    sm, memory = (f"{now[f'clocks.{x}']} of {now[f'clocks.max.{x}']}" for x in ("sm", "mem"))
    yield "clocks", f"SM {sm}, memory {memory} MHz, up to {now['power.limit']} W"
    told = nvidia_smi("clocks_throttle_reasons.active")
    bits = int(told[0], 16) if told and told[0].startswith("0x") else 0
    reasons = [reason for bit, reason in SLOWED.items() if bits & bit]
    if reasons:
        yield "slowed by", ", ".join(reasons)


def table(device: Device) -> Said:
    """A line about the table that the policy `tuned` goes by here."""
    found = tuned_tables.table_of(device.name)
    if found is None:
        return "tuned", f"no table for {device.name}: `splitkv tune` makes one"
    date = str(found.made.get("date", "no date"))[:10]
    return "tuned", f"{len(found.measured)} problems on {found.gpu}{found.note or f', {date}'}"


def self_check(device: Device) -> Iterator[Said]:
    """Everything, a line at a time."""
    yield table(device)
    yield from said_of_records()
    on_gpu = device.kind == "cuda"
    if on_gpu:
        yield from clocks()
    yield from correctness(device)
    if on_gpu:
        yield from bandwidth(device)
