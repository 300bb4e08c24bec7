"""The agenda of `splitkv reproduce`: what a run does, in which order, and about how long it takes.

First comes what claims hang on, on every library, then the rest, so that a run which is cut short
has a verdict on as much as it can have. What torch does comes before FlashAttention-3, whose
process starts meanwhile, and that before our kernels, which are compiled meanwhile. The profiler is
last but for what is no timing, as it may stay in a process once it was there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from splitkv.core.device import Device
from splitkv.lab.bench import quality
from splitkv.lab.bench.sequences.suites import CASES, SUITES
from splitkv.lab.bench.sequences.timing import Pace
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.sequence_cases import flops
from splitkv.lab.harness.timing import protocol_for
from splitkv.lab.harness.work import Work
from splitkv.lab.reproduce import model, prefill_step, tracing, training
from splitkv.lab.reproduce.works import in_turns, takes, works

REPEATS, ROUNDS = 5, 3  # of decode: each shape is timed so many times, in so many rounds each
PACE = Pace(rounds=5, burst_us=5_000.0)  # of whole sequences
BACKENDS = ("splitkv", "fa3")

# (command, suite, globs of its cases, of those that claims hang on)
SEQUENCES = (
    ("prefill", "records", ("mqa16_",), ("mqa16_b8_4096", "mqa16_b2_16384")),
    ("prefill", "windows", ("gqa32x8_",), ("8192_causal", "8192_window4096", "16384_")),
    ("prefill", "quant", ("_int8", "_fp8"), ("b8_4096_", "b2_16384_")),
    ("prefill", "linear", ("gqa32x8_",), ("gqa32x8_",)),
    ("backward", "windows", ("gqa32x8_",), ("8192_causal", "8192_window4096", "16384_")),
    ("backward", "linear", ("gqa32x8_",), ("gqa32x8_",)),
    ("backward", "gpt_oss", ("4096_causal", "16384_causal"), ("4096_causal",)),
)
WIDE = "_window128"  # cases of the suite `windows` that no source has
COMMANDS = tuple(dict.fromkeys(command for command, *_ in SEQUENCES))

Measure = Callable[[int], list[Record]]
"""Rounds -> rows of a step that is of no attention kernel."""
BESIDE: Mapping[str, Measure] = {
    "decode step": model.measure,
    "prefill step": prefill_step.measure,
    "trace": tracing.measure,
    "quality": quality.demo_rows,
    "training": training.measure,
}
CASE_OF = {
    "decode step": model.LLAMA.name,
    "prefill step": model.LLAMA.name,
    "trace": "qwen2.5_7b",
    "quality": "demo",
    "training": "demo",
}
AT_FIRST, AT_LAST = ("decode step", "prefill step"), ("trace", "quality", "training")

# Seconds of an H200's host, for the estimate alone, which is scaled by what the first items took.
OF_A_WORK, OF_A_GRAPH, OF_A_REPLAY, OF_A_CALL = 0.05, 0.012, 3e-4, 8e-6
OF_A_SEQUENCE = {"forward": 0.5, "backward": 1.5}
OF_A_STEP = {
    "decode step": 3.0,
    "prefill step": 8.0,
    "trace": 4.0,
    "quality": 40.0,
    "training": 45.0,
}
FLOPS = 4e14  # a second, of the libraries of whole sequences in the mean
LIBRARIES = 5  # of whole sequences, the matrix peak among them


class Item(NamedTuple):
    """A unit of work that is measured at once and gives one or more records.

    part     who does it: a backend, a command of whole sequences, or `beside`
    step     of the sources' steps; of whole sequences the command
    what     a work of decode, a case of whole sequences, None of a step beside
    seconds  that it takes, about
    """

    part: str
    step: str
    name: str
    what: Work | Case | None
    seconds: float


def agenda(
    quick: bool, device: Device, *, backends: Collection[str] = BACKENDS, sequences: bool = True
) -> Iterator[Item]:
    """Everything to do, in its order; `quick`: nothing but what claims hang on."""
    few = works(True, device.num_sms)
    tiers = [few] if quick else [few, [w for w in works(False, device.num_sms) if w not in few]]
    if "splitkv" in backends:
        yield from (step_beside(step) for step in AT_FIRST)
    for tier, todo in enumerate(tiers):
        for part in ("torch", "fa3", "splitkv"):
            if (part if part != "torch" else "splitkv") in backends:
                asked = in_turns(work for work in todo if takes(part, work.step))
                for work in asked:
                    seconds = of_work(work, device)
                    yield Item(part, work.step, work.case.name, work, seconds)
        if sequences:
            yield from of_sequences(rest=tier > 0)
    if "splitkv" in backends and not quick:
        yield from (step_beside(step) for step in AT_LAST)


def step_beside(step: str) -> Item:
    """A step that is of no attention kernel."""
    return Item("beside", step, CASE_OF[step], None, OF_A_STEP[step])


def of_sequences(rest: bool) -> Iterator[Item]:
    """The cases of whole sequences that claims hang on, or the rest of them."""
    for command, suite, globs, few in SEQUENCES:
        for case in SUITES[command][suite]:
            decisive = any(part in case.name for part in few)
            asked = any(part in case.name for part in globs) and WIDE not in case.name
            if asked and decisive != rest:
                yield Item(command, command, case.name, case, of_sequence(command, case))


def sequence_direction(command: str) -> str:
    return "backward" if command == "backward" else "forward"


def sequence_case(command: str, name: str) -> Case:
    """A case of whole sequences by its name."""
    return CASES[sequence_direction(command), name]


def of_work(work: Work, device: Device) -> float:
    """Seconds to prepare a work, to capture and check its graphs, and to replay them."""
    case, graphs = work.case, len({way._replace(name="") for way in work.ways})
    calls = protocol_for(case, device, ROUNDS).calls
    replay = OF_A_REPLAY + calls * (OF_A_CALL + 1.3 * case.kv_bytes / device.bandwidth)
    turns = REPEATS * ROUNDS * (1 + len(work.ways))
    return OF_A_WORK + graphs * OF_A_GRAPH + turns * replay


def of_sequence(command: str, case: Case) -> float:
    """Seconds to check and to time a case of whole sequences on every library."""
    once = flops(case) / FLOPS
    turns = PACE.rounds * LIBRARIES
    return OF_A_SEQUENCE[sequence_direction(command)] + turns * max(once, PACE.burst_us * 1e-6)


def total(items: Iterable[Item]) -> float:
    """Seconds of all of them."""
    return sum(item.seconds for item in items)


def identity(item: Item, machine: Record) -> Record:
    """The identity of a record of decode, or of a step beside it: one with an equal identity need
    not be measured again."""
    ways = [list(way) for way in item.what.ways] if isinstance(item.what, Work) else []
    return {
        "suite": "reproduce",
        "step": item.step,
        "backend": "torch" if item.part == "beside" else item.part,
        "case": item.name,
        "ways": ways,
        "rounds": [REPEATS, ROUNDS],
        **{name: machine[name] for name in ("gpu", "commit")},
    }


def left_of(items: Iterable[Item], records: Iterable[Record], machine: Record) -> list[Item]:
    """The items that these records do not have, of this GPU, these sources and this pace."""
    names = ("suite", "step", "backend", "case", "ways", "rounds", "gpu", "commit")
    works, whole = list[Record](), set[tuple[str, str]]()
    for r in records:
        if r["suite"] == "reproduce":
            works.append({name: r.get(name) for name in names})
        elif all(r[name] == machine[name] for name in ("gpu", "commit")):
            whole |= {(r["suite"], r["case"])} if r["pace"]["rounds"] == PACE.rounds else set()
    return [
        item
        for item in items
        if (
            (item.step, item.name) not in whole
            if item.part in COMMANDS
            else identity(item, machine) not in works
        )
    ]
