"""How attention of whole sequences is timed: one protocol for every library and both directions.

* **Checked first** against the reference, in the process that is timed: see `check`.
* **Queued.** The public call is made as a training step makes it, eagerly, in bursts of some
  milliseconds behind a kernel that spins until the host has queued all of a burst. So the GPU never
  waits for the host, and nothing but the GPU is timed; a burst that the host did not queue in time
  is taken again, and one that cannot be is no time.
* **Backward alone**: the forward ran before, its graph is kept, and only the gradients are asked.
* **Interleaved.** Bursts of all libraries take turns, another one first in every round, also those
  of libraries in processes of their own, which stay idle meanwhile. Matrix kernels draw so much
  power that the clocks fall: in turns they fall for all alike.
* **The matrix peak takes its turns too**: `torch.matmul` of bf16 matrices of 8192 x 8192, in every
  round of every case. The share of the peak is of what the GPU gave in the same seconds.
* **SM clock**, the mean over the burst: what the SMs counted, over the time that passed.
* **Median and spread** of the rounds, as for decode.
* **Memory**: the most that torch had allocated at once during one call, over what it had before.

Operands stay the same from call to call. They are larger than the L2 but for the shortest cases,
which find them there: `warm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import globaltimer, smid

from splitkv.lab.bench.sequences.check import Reference
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.process import Ended
from splitkv.lab.harness.sequence_cases import Inputs
from splitkv.lab.harness.timing import Timing, Variant, interleave, one_line, summarize

WARM_UP = 2  # calls, besides the checked one
MAX_CALLS = 64  # in a burst: the queue of a GPU is finite
SPIN_HZ = 2.0e9  # no GPU's SMs count faster
MIN_LEAD, LEAD = 2e-4, 2.0  # seconds, and times what queueing took when it was tried
TRIES = 4
PEAK_SIZE = 8192
PEAK = f"torch.matmul bfloat16 {PEAK_SIZE}x{PEAK_SIZE}x{PEAK_SIZE}"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pace:
    """How many rounds, and how long a burst should take at least."""

    rounds: int = 9
    burst_us: float = 15_000.0


QUICK = Pace(rounds=3, burst_us=4_000.0)


class Sample(NamedTuple):
    """A burst: microseconds a call, and the mean clock of the SMs in MHz where it could be told."""

    us: float
    sm_mhz: float | None = None


class Prepared(NamedTuple):
    """A library ready to run: `call()` is its forward on the inputs, in the layout of q."""

    call: Callable[[], Tensor]
    version: str | None = None
    plan: dict[str, Any] | None = None


class Measured(NamedTuple):
    """A row of each variant, and what the peak took meanwhile.

    lost   what left the GPU unusable for this process, if anything did
    """

    rows: list[Row]
    peak: Timing | None = None
    peak_mhz: int | None = None
    lost: str | None = None


class Station(Protocol):
    """Variants of one process.

    begin   gets them ready for a case
    rows    waits until they are; a row for each: reasons, or all but a time
    sample  a burst of one that is ready
    end     gives up what the case holds
    """

    def begin(self, case: Case) -> None: ...

    def rows(self) -> Iterable[Row]: ...

    def sample(self, key: str) -> Sample: ...

    def end(self) -> None: ...


@triton.jit
def read_clocks(out_ptr):  # [programs, 3] int64: the SM, its cycles, nanoseconds
    own = out_ptr + tl.program_id(0) * 3
    tl.store(own, smid().to(tl.int64))
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(own + 1, cycles)
    tl.store(own + 2, globaltimer())


class Clock:
    """Reads the counters of the SMs before and after a burst."""

    def __init__(self) -> None:
        programs = 4 * torch.cuda.get_device_properties().multi_processor_count
        self.read = torch.zeros(2, programs, 3, dtype=torch.int64, device="cuda")

    def stamp(self, i: int) -> None:
        """0: before; 1: after."""
        read_clocks[(self.read.shape[1],)](self.read[i], num_warps=1)

    def mhz(self) -> float | None:
        return mean_mhz(*self.read.tolist())


def mean_mhz(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> float | None:
    """The mean clock of the SMs between two readings, the median over the SMs; None where no SM was
    read twice or a counter did not go on."""
    start = {sm: (cycles, ns) for sm, cycles, ns in before}
    rates = []
    for sm, cycles, ns in after:
        if sm in start and ns > start[sm][1] and cycles > start[sm][0]:
            rates.append(1e3 * (cycles - start[sm][0]) / (ns - start[sm][1]))
    return round(median(rates), 1) if rates else None


class Burst:
    """Calls behind a kernel that spins until all of them are queued; a Sample when called."""

    def __init__(self, body: Callable[[], Any], burst_us: float, clock: Clock) -> None:
        self.body, self.clock = body, clock
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(WARM_UP):
            body()
        torch.cuda.synchronize()
        self.start.record()
        body()
        self.end.record()
        self.end.synchronize()
        once = max(1.0, self.start.elapsed_time(self.end) * 1e3)
        self.calls = min(MAX_CALLS, max(1, round(burst_us / once)))
        before = perf_counter()
        for _ in range(self.calls):
            body()
        self.lead = MIN_LEAD + LEAD * (perf_counter() - before)
        torch.cuda.synchronize()

    def __call__(self) -> Sample:
        for _ in range(TRIES):
            torch.cuda._sleep(int(self.lead * SPIN_HZ))
            self.clock.stamp(0)
            self.start.record()
            for _ in range(self.calls):
                self.body()
            self.end.record()
            in_time = not self.start.query()
            self.clock.stamp(1)
            torch.cuda.synchronize()
            if in_time:
                us = self.start.elapsed_time(self.end) * 1e3 / self.calls
                return Sample(us, self.clock.mhz())
            self.lead *= LEAD
        raise RuntimeError(f"{self.calls} calls: expected queued in {self.lead:.3f} s, got a wait")


class Launches:
    """The names of Triton's kernels launched in it, each once, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> list[str]:
        knobs.runtime.launch_enter_hook.add(self._note)
        return self.names

    def __exit__(self, *_: Any) -> None:
        knobs.runtime.launch_enter_hook.remove(self._note)

    def _note(self, metadata: Any) -> None:
        name = metadata.get()["name"]
        if name not in self.names:
            self.names.append(name)


class Here:
    """The variants of this process."""

    def __init__(self, variants: Sequence[Variant], pace: Pace) -> None:
        self.variants, self.pace = variants, pace
        self.bursts: dict[str, Burst] = {}
        self.clock: Clock | None = None

    def begin(self, case: Case) -> None:
        self.case = case

    def rows(self) -> Iterator[Row]:
        """An error that leaves the GPU unusable is raised after its row."""
        against = {variant: variant.unsupported(self.case) for variant in self.variants}
        yield from (variant.row(reasons=reasons) for variant, reasons in against.items() if reasons)
        able = [variant for variant, reasons in against.items() if not reasons]
        if not able:
            return
        try:
            self.clock = self.clock or Clock()
            inputs = Inputs(self.case)
            reference = Reference(inputs, self.case)
        except Exception as error:  # mostly too little memory
            yield from (variant.row(reasons=[one_line(error)]) for variant in able)
            torch.cuda.synchronize()
            return
        for variant in able:
            try:
                yield self._ready(variant, inputs, reference)
            except Exception as error:  # whatever a library raises is why it has no time
                yield variant.row(reasons=[one_line(error)])
                torch.cuda.synchronize()

    def _ready(self, variant: Variant, inputs: Inputs, reference: Reference) -> Row:
        call, version, plan = variant.prepare(inputs)
        backward = inputs.problem.needs_grad
        with Launches() as launched:
            out = call()
            grads = inputs.gradients(out) if backward else ()
        errors = reference.check(out, grads)
        body: Callable[[], Any] = (lambda: inputs.gradients(out)) if backward else call
        assert self.clock is not None
        burst = Burst(body, self.pace.burst_us, self.clock)
        row = variant.row(version=version, plan=plan, err=max(errors.values()))
        row |= {"errors": errors, "launched": launched, "calls": burst.calls}
        row |= {"peak_bytes": peak_bytes(body)}
        self.bursts[key_of(row)] = burst
        return row

    def sample(self, key: str) -> Sample:
        return self.bursts[key]()

    def end(self) -> None:
        """Raises what left the GPU unusable."""
        self.bursts.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def peak_bytes(body: Callable[[], Any]) -> int:
    """The most that torch allocates at once in a call, beyond what is allocated before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    body()
    return torch.cuda.max_memory_allocated() - before


def key_of(row: Row) -> str:
    return f"{row['library']} {row['kernel']}"


class Peak:
    """The matrix peak, sampled as a library is."""

    def __init__(self, pace: Pace) -> None:
        a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(a)
        self.burst = Burst(lambda: torch.matmul(a, b, out=out), pace.burst_us, Clock())

    def __call__(self) -> Sample:
        return self.burst()


class Turn:
    """A sampler whose first error is kept as the reason why it has no time."""

    def __init__(self, sample: Callable[[], Sample]) -> None:
        self.sample = sample
        self.mhz: list[float] = []
        self.reason: str | None = None

    def __call__(self) -> float:
        if self.reason is None:
            try:
                us, mhz = self.sample()
            except Exception as error:
                self.reason = str(error) if isinstance(error, Ended) else one_line(error)
            else:
                self.mhz += [] if mhz is None else [mhz]
                return us
        return float("nan")

    @property
    def sm_mhz(self) -> int | None:
        return round(median(self.mhz)) if self.mhz else None


def measure(
    case: Case, stations: Sequence[Station], peak: Callable[[], Sample], rounds: int
) -> Measured:
    """A row for each variant of all stations: its time and errors, or reasons why there is none."""
    rows: list[Row] = []
    turns: dict[str, Turn] = {}
    of_peak = Turn(peak)
    samples: dict[str, list[float]] = {}
    lost = None
    try:
        for station in stations:
            station.begin(case)
        for station in stations:
            for row in station.rows():
                rows.append(row)
                if not row["reasons"]:
                    turns[key_of(row)] = Turn(partial(station.sample, key_of(row)))
        if turns:
            samples = interleave({"": of_peak, **turns}, rounds)
        for station in stations:
            station.end()
    except RuntimeError as error:
        lost = one_line(error)
    for row in rows:
        if key_of(row) in turns:
            row |= result(turns[key_of(row)], samples.get(key_of(row)), lost)
    if not samples or of_peak.reason is not None:
        return Measured(rows, lost=lost)
    return Measured(rows, summarize(samples[""]), of_peak.sm_mhz, lost)


def result(turn: Turn, samples: Sequence[float] | None, lost: str | None) -> Row:
    """The time of a row after the rounds, or the reason why there is none."""
    if samples is None or turn.reason is not None:
        return {"reasons": [turn.reason or lost or "no rounds"]}
    timing = summarize(samples)
    clocks = None if turn.sm_mhz is None else {"sm_mhz": turn.sm_mhz}
    return {"us": timing.us, "spread_us": timing.spread_us, "clocks": clocks}
