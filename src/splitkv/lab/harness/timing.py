"""How a call is timed: one protocol for every library.

* **Checked before and after.** A call is timed only after what its graph computed has passed
  `testing.assert_close` against the reference in fp32, and has a time only where the graph still
  computes that when all rounds are over: a fast wrong answer is not a time. The output is filled
  with NaN before each of these replays, so that one that is left from before is none.
* **Not faster than memory.** Cold, a time below what reading K and V takes at the data sheet's
  bandwidth is no time but a reason.
* **CUDA graph replay.** A serving loop replays a graph, and the host would be timed otherwise. The
  stream is kept busy until the graph is queued, so the start of the graph is not timed either.
* **Cold.** Buffers of q, K and V rotate: between two reads of one, twice the L2 is read from
  others, as between two steps of a model. `warm` reads one buffer over and over and says so. Where
  many plans are timed, `flush` reads twice the L2 before every replay instead, so that a graph of
  `calls` calls is cold however small its buffers are.
* **Isolated.** A tiny kernel that writes q stands before every call, as the projection does in a
  model: a call cannot start before its q is there, nor overlap the call before it. The time of that
  kernel, alone in a graph of its own, is subtracted. `back-to-back` leaves it out.
* **Interleaved.** Replays of all variants take turns, another one first in every round, so that
  clocks and temperature are the same for all. Differences are taken within a round.
* **Median and spread.** Of the rounds: the median, and the distance between the quartiles.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.core.device import DEFAULT_BANDWIDTH, Device, current
from splitkv.core.errors import expect, expect_one_of
from splitkv.core.kv import AS_IS
from splitkv.lab.harness import nvml
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.testing import assert_close, captured

MODES = ("isolated", "back-to-back")
ROUNDS = 21
CALLS = 64  # in a graph, at least: what is left of its start is shared by that many
LEAD_CYCLES = 200_000  # about 0.1 ms, longer than it takes to queue a graph
BLOCK = 1024  # elements of q a program

Body = Callable[[int], Any]

COARSE = 0.1  # e4m3 keeps 4 bits: rounding q and p to it alone gives about 0.05


@dataclass(frozen=True, slots=True)
class Protocol:
    """mode: isolated or back-to-back; warm: one buffer, which stays in the L2.

    repeats   of all rounds, one after another; the time is the median of theirs
    calls     in a graph, at least
    flush     read twice the L2 before each replay, and rotate no more buffers than there are calls
    """

    mode: str = "isolated"
    warm: bool = False
    rounds: int = ROUNDS
    calls: int = CALLS
    flush: bool = False
    repeats: int = 1

    def __post_init__(self) -> None:
        expect_one_of("mode", self.mode, MODES)
        expect(not (self.warm and self.flush), "flush", "False with warm", self.flush)

    def buffers(self, num_bytes: int, l2_bytes: int) -> int:
        """Buffers of so many bytes to rotate."""
        count = rotation(num_bytes, l2_bytes, self.warm)
        return min(count, self.calls) if self.flush else count


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call: the median of the rounds and the distance between their quartiles.

    repeats_us   the median of each repeat where there are several; `us` is the median of these
    """

    us: float
    spread_us: float
    repeats_us: tuple[float, ...] = ()

    def as_row(self) -> dict[str, Any]:
        """The timing as rows hold it."""
        return {"us": self.us, "spread_us": self.spread_us, "repeats_us": [*self.repeats_us]}


class Prepared(NamedTuple):
    """A library ready to run: `call(i)` launches it on buffer i and returns its output."""

    call: Body
    version: str | None = None
    plan: dict[str, Any] | None = None


@dataclass(frozen=True)
class Variant:
    """One way to compute a case.

    unsupported(case) -> every reason against it, with values; empty: it may run
    prepare(inputs)   -> Prepared; whatever it raises is a reason too
    decision          of ours: the arguments of `splitkv.plan` that say who decides, or a `plan`
    coarse            quantised keys are multiplied in 8 bits, which the tolerance rule does not
                      allow for: held to `COARSE` instead, the error's share of the output's norm
    alike             not None: variants that agree in it launch the same, and share one graph
    """

    library: str
    kernel: str
    prepare: Callable[[Any], Any]
    unsupported: Callable[[Case], list[str]] = lambda case: []
    decision: Mapping[str, Any] = field(default_factory=dict, compare=False)
    coarse: bool = False
    alike: Hashable = None

    def row(self, **found: Any) -> dict[str, Any]:
        """The row of a measurement; without a time it has reasons."""
        absent = dict.fromkeys(("version", "us", "spread_us", "err", "repeats", "plan", "clocks"))
        found = {**absent, "repeats_us": [], "reasons": [], **found}
        return {"library": self.library, "kernel": self.kernel, **found}


def rotation(num_bytes: int, l2_bytes: int, warm: bool = False) -> int:
    """Buffers, so that twice the L2 is read between two reads of one."""
    return 1 if warm else 1 + -(-2 * l2_bytes // num_bytes)


def interleave(
    replays: Mapping[str, Callable[[], float]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """The results of each replay, one of each in every round."""
    names = list(replays)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        first = r % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name].append(replays[name]())
    return samples


def summarize(
    samples: Sequence[float], baseline: Sequence[float] | None = None, repeats: int = 1
) -> Timing:
    """Median and spread of the samples, less those of a baseline in the same rounds; `repeats`: as
    many samples of each, one repeat after the other."""
    if baseline is not None:
        samples = [a - b for a, b in zip(samples, baseline, strict=True)]
    low, high = quantiles(samples, n=4)[::2]
    if repeats == 1:
        return Timing(median(samples), high - low)
    rounds = len(samples) // repeats
    medians = [median(samples[i * rounds : (i + 1) * rounds]) for i in range(repeats)]
    return Timing(median(medians), high - low, tuple(medians))


@triton.jit
def write_q(q_ptr, x_ptr, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(q_ptr + offs, tl.load(x_ptr + offs, mask=offs < size), mask=offs < size)


def q_writer(x: Tensor, q: Tensor) -> Body:
    """The kernel that stands before a call: copies x into q[i]."""
    grid, size = (triton.cdiv(x.numel(), BLOCK),), x.numel()

    def write(i: int) -> None:
        write_q[grid](q[i], x, size, BLOCK=BLOCK, num_warps=4)

    return write


def after(first: Body, then: Body) -> Body:
    """Both, and the result of the second."""

    def both(i: int) -> Any:
        first(i)
        return then(i)

    return both


class Replay:
    """A CUDA graph of calls over the buffers; replayed when called, it returns microseconds a call.

    before   runs before every replay, and is not timed
    result   what the first call of the graph returned, rewritten by every replay
    body     holds the memory that the graph reads: freed, it would be given to others
    """

    def __init__(
        self, body: Body, buffers: int, calls: int = CALLS, before: Callable[[], Any] | None = None
    ) -> None:
        self.calls, self.before, self.body = buffers * -(-calls // buffers), before, body

        def run() -> Any:
            result = body(0)
            for i in range(1, self.calls):
                body(i % buffers)
            return result

        def warm() -> None:
            for i in (0, 0, buffers - 1):
                body(i)

        self.replay, self.result = captured(run, warm)
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.replay()
        torch.cuda.synchronize()

    def __call__(self) -> float:
        torch.cuda._sleep(LEAD_CYCLES)
        if self.before:
            self.before()
        self.start.record()
        self.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) * 1e3 / self.calls


class Stopwatch:
    """Times bodies over rotating buffers by a protocol, all against the same q writer."""

    def __init__(self, protocol: Protocol, x: Tensor, q: Tensor) -> None:
        self.options: dict[str, Any] = {"buffers": q.shape[0], "calls": protocol.calls}
        if protocol.flush:
            l2_bytes = torch.cuda.get_device_properties().L2_cache_size
            self.options["before"] = torch.empty(l2_bytes // 2, device=q.device).sum
        isolated = protocol.mode == "isolated"
        self.protocol, self.write = protocol, q_writer(x, q) if isolated else None
        self.writer = Replay(self.write, **self.options) if self.write else None

    def capture(self, body: Body) -> Replay:
        return Replay(after(self.write, body) if self.write else body, **self.options)

    def time(self, replays: Mapping[str, Replay], rounds: int = 0) -> dict[str, Timing]:
        """Every replay in turns with the others and the writer; `rounds`: so many, once, not the
        protocol's."""
        writer = {} if self.writer is None else {"": self.writer}
        repeats = 1 if rounds else self.protocol.repeats
        samples = interleave({**writer, **replays}, repeats * (rounds or self.protocol.rounds))
        baseline = samples.pop("", None)
        return {name: summarize(us, baseline, repeats) for name, us in samples.items()}


class Session:
    """A case ready to be timed: its operands, what they have to give, and a stopwatch."""

    def __init__(self, case: Case, protocol: Protocol) -> None:
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.case, self.protocol = case, protocol
        self.inputs = Inputs(case, protocol.buffers(case.kv_bytes, l2_bytes))
        self.ref, self.pt = self.inputs.references()
        self.watch = Stopwatch(protocol, self.inputs.x, self.inputs.q)

    def capture(self, variant: Variant) -> tuple[Replay, dict[str, Any]]:
        """A graph of the variant, its answer checked, and its row without a time.

        `repeats` in the row: whether a second replay gave the same bits.
        """
        call, version, plan = variant.prepare(self.inputs)
        replay = self.watch.capture(call)
        first = replay.result.clone()
        self.check(replay, variant.coarse)
        err = (replay.result.double().reshape(self.ref.shape) - self.ref).abs().max().item()
        repeats = torch.equal(first, replay.result)
        return replay, variant.row(version=version, plan=plan, err=err, repeats=repeats)

    def check(self, replay: Replay, coarse: bool = False) -> None:
        """Replay it into an output of NaN, and hold what it computes to the reference."""
        replay.result.fill_(float("nan"))
        replay()
        out = replay.result.reshape(self.ref.shape)
        if coarse and self.inputs.problem.codec != AS_IS:
            error = ((out - self.ref).norm() / self.ref.norm()).item()
            assert error < COARSE, f"error of {error:.3f} of the norm, expected below {COARSE}"
        else:
            assert_close(out, self.ref, self.pt)

    def time(
        self, replays: Mapping[str, Replay], coarse: Collection[str] = (), rounds: int = 0
    ) -> tuple[dict[str, Timing], dict[str, str]]:
        """(times, reasons of those that have none after all); `coarse`: names of those replays."""
        times, reasons = self.watch.time(replays, rounds), dict[str, str]()
        wrong: dict[Replay, str | None] = {}  # a graph is checked once, whoever shares it
        for name, replay in replays.items():
            if replay not in wrong:
                try:
                    self.check(replay, name in coarse)
                except AssertionError as error:
                    wrong[replay] = f"after its rounds: {one_line(error)}"
                else:
                    wrong[replay] = None
            if said := wrong[replay]:
                reasons[name] = said
            else:
                fast = too_fast(self.case, times[name].us, self.protocol, current())
                reasons |= {name: fast} if fast else {}
        return {name: t for name, t in times.items() if name not in reasons}, reasons


def too_fast(case: Case, us: float, protocol: Protocol, device: Device) -> str | None:
    """Why so many microseconds cannot be, None where they can.

    Nothing is said of a GPU whose bandwidth nobody told.
    """
    if protocol.warm or device.bandwidth == DEFAULT_BANDWIDTH:
        return None
    least = case.kv_bytes / device.bandwidth * 1e6
    if us >= least:
        return None
    rate = f"{case.kv_bytes} bytes at {device.bandwidth / 1e9:g} GB/s"
    return f"time: expected at least {least:.2f} us for {rate}, got {us:.2f}"


def measure(
    case: Case, variants: Sequence[Variant], protocol: Protocol
) -> Iterator[dict[str, Any]]:
    """A row for each variant: its time and error, or the reasons why there is none.

    An error that leaves the GPU unusable is raised after its row.
    """
    against = {variant: variant.unsupported(case) for variant in variants}
    yield from (variant.row(reasons=reasons) for variant, reasons in against.items() if reasons)
    able = [variant for variant, reasons in against.items() if not reasons]
    if not able:
        return
    try:
        session = Session(case, protocol)
    except Exception as error:  # mostly too little memory
        yield from (variant.row(reasons=[one_line(error)]) for variant in able)
        torch.cuda.synchronize()
        return
    rows, coarse = dict[str, dict[str, Any]](), set[str]()
    replays: dict[str, Replay] = {}
    graphs: dict[Hashable, str] = {}
    for variant in able:
        key = f"{variant.library} {variant.kernel}"
        if variant.alike is not None and variant.alike in graphs:
            same = graphs[variant.alike]
            replays[key], rows[key] = replays[same], {**rows[same], "kernel": variant.kernel}
            continue
        try:
            replays[key], rows[key] = session.capture(variant)
            graphs[variant.alike] = key
        except Exception as error:  # whatever a library raises is why it has no time
            yield variant.row(reasons=[one_line(error)])
            torch.cuda.synchronize()
        if variant.coarse:
            coarse.add(key)
    times, reasons = session.time(replays, coarse)
    now = clocks()
    for key, row in rows.items():
        if key in reasons:
            yield {**row, "reasons": [reasons[key]]}
        else:
            yield {**row, **times[key].as_row(), "clocks": now}


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def nvidia_smi(*fields: str) -> list[str] | None:
    """Fields of the GPU in use, None where nvidia-smi cannot tell."""
    gpu = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
    query = ["nvidia-smi", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in told.strip().split(",")]
    return values if len(values) == len(fields) else None


def clocks() -> dict[str, int] | None:
    """Clocks right after the last replay, in MHz: by NVML, or where that is not here by
    nvidia-smi."""
    if found := nvml.clocks():
        return found
    values = nvidia_smi("clocks.sm", "clocks.mem")
    if values is None or not all(value.isdigit() for value in values):
        return None
    return dict(zip(("sm_mhz", "memory_mhz"), map(int, values), strict=True))


GRAPH_SECONDS = 1.5e-3  # that a graph is to take: enough to time, and many are replayed


MOST_CALLS, LEAST_CALLS = 64, 8  # in a graph of a study


def protocol_for(case: Case, device: Device, rounds: int, repeats: int = 1) -> Protocol:
    """Short graphs, each cold by reading twice the L2 before it."""
    seconds = case.kv_bytes / device.bandwidth + 5e-6
    calls = min(MOST_CALLS, max(LEAST_CALLS, round(GRAPH_SECONDS / seconds)))
    return Protocol(rounds=rounds, calls=calls, flush=True, repeats=repeats)
