"""`splitkv bench ranks`: attention over ranks beside one rank's, under torchrun.

    torchrun --nproc-per-node 2 -m splitkv bench ranks --json ranks.jsonl

Every rank also does the whole case alone, at the same time as the others and on its own GPU: the
fastest of them is what the ranks together are compared with.

* **Checked first**: each way of each kind, outputs and gradients of a short sequence by the
  tolerance rule of the tests, in the processes that are timed. Of a timed case the largest
  difference of the output from one rank's is written down.
* **A round** begins when all ranks are there, and takes as long as the slowest of them. Median, and
  the distance between the quartiles, over the rounds.
* Decode is replayed from a CUDA graph, training is eager: forward and gradients of q, k and v, as
  many calls in a row as take `BURST_US`, as of a model's layers, which no rank waits between.
* `--shrink` divides tokens, keys and windows, to see on small machines that all of it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import splitkv
from splitkv import distributed, reference
from splitkv.core.errors import UnsupportedProblem, expect, expect_at_least, expect_positive
from splitkv.core.masks import Mask
from splitkv.distributed.traffic import HeadShape, moved, spread_of
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.ranks import ranks_tables
from splitkv.testing import assert_close, captured

DTYPE = torch.bfloat16
CALLS = 20  # replays of a round of decode
BURST_US = 1e5  # of a round of training, at least; a call that takes longer is one
CHECKED_TOKENS = 256  # of the short sequence, for each rank
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class RanksCase:
    """One sequence over all ranks.

    kind     "decode", of one query, or "training": forward and gradients under a causal mask
    tokens   of all ranks; keys of decode
    window   keys that a query sees, its own among them; 0: all
    """

    name: str
    kind: str
    tokens: int
    window: int = 0
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def window_size(self) -> tuple[int, int]:
        return (self.window - 1, 0) if self.window else (-1, -1)

    @property
    def mask(self) -> Mask:
        return Mask(True, self.window_size[0])


CASES = (
    *(RanksCase(f"decode_b1_{n}", "decode", n) for n in (131072, 262144, 524288, 1048576)),
    RanksCase("train_131072", "training", 131072),
    RanksCase("train_131072_w4096", "training", 131072, window=4096),
)
WAYS = {"decode": ("all", "own"), "training": ("heads", "keys", "ring", "verl")}
"""kind -> `heads` of decode; exchanges, and verl's own code."""


class Times(NamedTuple):
    """Median of the rounds, and the distance between their quartiles, in microseconds."""

    us: float
    spread_us: float


def select(globs: Sequence[str], ways: Sequence[str], shrink: int = 1) -> list[RanksCase]:
    """The cases by name, with so much less of everything."""
    for pattern in globs:
        known = any(fnmatchcase(case.name, pattern) for case in CASES)
        names = ", ".join(case.name for case in CASES)
        expect(known, "case", f"one of {names}, or a glob", pattern)
    every = [way for of_kind in WAYS.values() for way in of_kind]
    for way in ways:
        expect(way in every, "way", f"one of {', '.join(every)}", way)
    expect_positive("shrink", shrink)
    found = []
    for case in CASES:
        if not globs or any(fnmatchcase(case.name, pattern) for pattern in globs):
            window = max(1, case.window // shrink) if case.window else 0
            name = case.name if shrink == 1 else f"{case.name}/{shrink}"
            found.append(replace(case, name=name, tokens=case.tokens // shrink, window=window))
    return found


def join() -> torch.device:
    """Connect the ranks that torchrun has started; this one's device."""
    expect(dist.is_torchelastic_launched(), "ranks", "torchrun to start them", "one process", _HOW)
    rank = dist.get_node_local_rank()
    here = torch.cuda.is_available()
    if here:
        count = torch.cuda.device_count()
        expect(rank < count, "ranks", f"{count} of a node, one a GPU", rank + 1)
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if here else "gloo")
    return torch.device("cuda", rank) if here else torch.device("cpu")


_HOW = "torchrun --nproc-per-node 2 -m splitkv bench ranks"


def bench_ranks(
    cases: Sequence[RanksCase],
    ways: Sequence[str],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: int,
    json_path: Path | None = None,
    console: Console | None = None,
) -> tuple[list[Record], int]:
    """Measure the cases, the first rank writes and says what comes out.

    Returns the results on every rank, and 0, or 1 where something is wrong or has no time.
    """
    expect_at_least("rounds", rounds, 2)
    console, first = console or Console(), dist.get_rank(group) == 0
    bench = Bench(group, device, rounds)
    machine, records = facts(), []
    with Lines(json_path if first else None) as lines:
        for case in cases:
            for result in bench.of_case(case, [w for w in WAYS[case.kind] if w in (ways or [w])]):
                records.append(record(case, bench, result) | machine)
                lines.add(records[-1])
                if first:
                    say(console, shown(records[-1]))
    if first and records:
        say(console, "\n" + "\n\n".join(ranks_tables(records)))
    return records, int(bench.lost)


class Result(NamedTuple):
    """The outcome of one way to run a case, or why it has no time."""

    way: str
    alone: Times | None
    together: Times | None
    error: float | None
    reasons: tuple[str, ...] = ()


class Bench:
    """The ranks of a group, and their clock."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, rounds: int) -> None:
        self.group, self.device, self.rounds = group, device, rounds
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.checked: dict[tuple[str, str], str] = {}
        self.lost = False  # whether something that is installed has no time

    def of_case(self, case: RanksCase, ways: Sequence[str]) -> list[Result]:
        """Each way beside one rank alone."""
        make = of_decode if case.kind == "decode" else of_training
        alone: tuple[Times, Tensor] | None = None
        results = []
        for way in ways:
            try:
                ready = make(case, way, self)
                fault = self.fault(replace(case, tokens=self.size * CHECKED_TOKENS), way)
                self.lost |= bool(fault)
            except ModuleNotFoundError as error:
                missing = (error.name or way).partition(".")[0]
                fault = f"{way}: expected {missing} installed"
            except (UnsupportedProblem, ValueError) as error:  # the same on all ranks
                fault, self.lost = str(error).splitlines()[0], True
            if fault:
                results.append(Result(way, None, None, None, (fault,)))
                continue
            if alone is None:
                alone = self.time(ready.alone, case, best=min), ready.alone()
            together, out = self.time(ready.together, case, best=max), ready.together()
            off = (out.float() - ready.own(alone[1]).float()).abs().max()
            dist.all_reduce(off, dist.ReduceOp.MAX, group=self.group)
            results.append(Result(way, alone[0], together, off.item()))
        return results

    def time(self, run: Run, case: RanksCase, best: Callable[..., float]) -> Times:
        """Times of a call; best: what stands for a round of all ranks."""
        calls = 1
        if case.kind == "decode" and self.device.type == "cuda":
            run, calls = partial(repeat, captured(run, mode="thread_local")[0], CALLS), CALLS
        run()
        if case.kind == "training":
            calls = self.calls_of(self.sample(run))
            run = partial(repeat, run, calls)
        own = torch.tensor([self.sample(run) / calls for _ in range(self.rounds)])
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, own.tolist(), group=self.group)
        times = [best(of_round) for of_round in zip(*every, strict=True)]
        quartiles = quantiles(times, n=4)
        return Times(median(times), quartiles[2] - quartiles[0])

    def calls_of(self, us: float) -> int:
        """Calls of a round, the same on all ranks, of which one has taken so long on this rank."""
        slowest = torch.tensor([us], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        return max(1, ceil(BURST_US / slowest.item()))

    def sample(self, run: Callable[[], Any]) -> float:
        """Microseconds of one run that all ranks begin together."""
        ready = torch.zeros(1, device=self.device)
        if self.device.type == "cpu":
            dist.all_reduce(ready, group=self.group)
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.all_reduce(ready, group=self.group)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def fault(self, case: RanksCase, way: str) -> str:
        """Names what is wrong with a way on any rank, by a short sequence; empty: nothing."""
        window = min(case.window, CHECKED_TOKENS // 2)
        kind = f"{case.kind}{' with a window' if window else ''}", way
        if kind not in self.checked:
            check = check_decode if case.kind == "decode" else check_training
            fault = ""
            try:
                check(replace(case, window=window), way, self)
            except AssertionError as error:
                fault = f"wrong on rank {self.rank}: {error}"
            every: list[Any] = [None] * self.size
            dist.all_gather_object(every, fault, group=self.group)
            self.checked[kind] = next(filter(None, every), "")
        return self.checked[kind]


class Ready(NamedTuple):
    """A case's calls: of one rank alone, and of all together.

    own   this rank's part of what one alone makes
    """

    alone: Run
    together: Run
    own: Callable[[Tensor], Tensor]


def repeat(run: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        run()


def random(bench: Bench, *shape: int) -> Tensor:
    """Numbers that every rank draws alike; other ones with the next call."""
    return torch.randn(shape, dtype=DTYPE, device=bench.device)


def of_decode(case: RanksCase, way: str, bench: Bench) -> Ready:
    """One query against keys of which each rank has a range."""
    torch.manual_seed(0)
    q = random(bench, 1, 1, case.num_heads, case.head_dim)
    k, v = (random(bench, 1, case.tokens, case.num_kv_heads, case.head_dim) for _ in "kv")
    length = torch.tensor([case.tokens], dtype=torch.int32, device=bench.device)
    own_k, own_v = (distributed.shard(x, bench.group, dim=1) for x in (k, v))

    def together() -> Tensor:
        options: Any = {"heads": way, "keys": "ranges"}
        out: Tensor = distributed.decode(q, own_k, own_v, length, group=bench.group, **options)
        return out

    def own(x: Tensor) -> Tensor:
        return x if way == "all" else x.chunk(bench.size, 2)[bench.rank]

    return Ready(lambda: splitkv.decode(q, k, v, cache_seqlens=length), together, own)


def check_decode(case: RanksCase, way: str, bench: Bench) -> None:
    """Raise where the short sequence's result is past the tolerance."""
    ready = of_decode(case, way, bench)
    torch.manual_seed(0)
    q = random(bench, 1, 1, case.num_heads, case.head_dim)
    k, v = (random(bench, 1, case.tokens, case.num_kv_heads, case.head_dim) for _ in "kv")
    ref, pt = (ready.own(reference.attention(q, k, v, upcast=x)[0]) for x in (True, False))
    assert_close(ready.together(), ref, pt)


class Training(NamedTuple):
    """The leaves of a sequence, and the gradient of its output."""

    leaves: list[Tensor]
    grad: Tensor

    def run(self, attend: Callable[..., Tensor]) -> list[Tensor]:
        """The output, and the gradients of the leaves."""
        out = attend(*self.leaves)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad.to(out.dtype))]


def training(case: RanksCase, bench: Bench) -> Training:
    """All tokens."""
    torch.manual_seed(0)
    heads = case.num_heads, case.num_kv_heads, case.num_kv_heads
    leaves = [random(bench, 1, case.tokens, n, case.head_dim).requires_grad_() for n in heads]
    return Training(leaves, random(bench, 1, case.tokens, case.num_heads, case.head_dim))


def over_ranks(case: RanksCase, way: str, bench: Bench) -> tuple[Callable[..., Tensor], Any]:
    """A function of this rank's q, k and v, and the layout of its tokens."""
    if way == "verl":
        return through_verl(case, bench), "contiguous"
    layout = "zigzag" if way == "ring" and not case.window else "contiguous"
    options: Any = {"exchange": way, "layout": layout, "window_size": case.window_size}
    return partial(distributed.attention, group=bench.group, causal=True, **options), layout


def of_training(case: RanksCase, way: str, bench: Bench) -> Ready:
    """A sequence of which each rank has as many tokens."""
    attend, layout = over_ranks(case, way, bench)
    cut = partial(distributed.shard, group=bench.group, dim=1, layout=layout)
    whole = training(case, bench)
    own = Training([cut(x.detach()).requires_grad_() for x in whole.leaves], cut(whole.grad))
    one = partial(splitkv.attention, causal=True, window_size=case.window_size)
    return Ready(lambda: whole.run(one)[0], lambda: own.run(attend)[0], cut)


def check_training(case: RanksCase, way: str, bench: Bench) -> None:
    """Raise where the short sequence's output or gradients are past the tolerance."""
    attend, layout = over_ranks(case, way, bench)
    cut = partial(distributed.shard, group=bench.group, dim=1, layout=layout)
    whole = training(case, bench)
    own = Training([cut(x.detach()).requires_grad_() for x in whole.leaves], cut(whole.grad))
    found = own.run(attend)
    exact, working = (
        whole.run(lambda q, k, v, x=x: reference.attention(q, k, v, mask=case.mask, upcast=x)[0])
        for x in (True, False)
    )
    names = ("out", "dq", "dk", "dv")
    for name, x, ref, pt in zip(names, found, exact, working, strict=True):
        assert_close(x, cut(ref), cut(pt), factor=2.0 if name == "out" else 3.0, name=name)


def through_verl(case: RanksCase, bench: Bench) -> Callable[..., Tensor]:
    """verl's function in the place of transformers' FlashAttention, with this package's below.

    Raises ModuleNotFoundError where verl or transformers is not installed.
    """
    from verl.models.transformers.monkey_patch import _ulysses_flash_attention_forward
    from verl.utils import ulysses

    from splitkv.integrations import verl

    verl.register()
    ulysses.set_ulysses_sequence_parallel_group(bench.group)
    positions = torch.arange(case.tokens, device=bench.device)[None]
    own = distributed.shard(positions, bench.group, dim=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        verl.fill_slots(verl.NAME)
        out: Tensor = _ulysses_flash_attention_forward(
            q,
            k,
            v,
            None,
            q.shape[1],
            is_causal=True,
            position_ids=own,
            sliding_window=case.window or None,
            implementation=verl.NAME,
        )
        return out

    return attend


def record(case: RanksCase, bench: Bench, result: Result) -> Record:
    """A result as it is written."""
    together, alone = result.together, result.alone
    return {
        "suite": "ranks",
        "case": case.name,
        "kind": case.kind,
        "way": result.way,
        "ranks": bench.size,
        "backend": dist.get_backend(bench.group),
        "shape": {
            **{"tokens": case.tokens, "window": case.window, "num_heads": case.num_heads},
            **{"num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim},
        },
        "dtype": str(DTYPE).removeprefix("torch."),
        "us": together and together.us,
        "spread_us": together and together.spread_us,
        "alone_us": alone and alone.us,
        "alone_spread_us": alone and alone.spread_us,
        "moved_bytes": moved_bytes(case, result.way, bench.size),
        "err": result.error,
        "reasons": list(result.reasons),
        "rounds": bench.rounds,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def moved_bytes(case: RanksCase, way: str, size: int) -> int:
    """Bytes that the rank with the most of them receives, by the plan of the exchange."""
    element = DTYPE.itemsize
    if case.kind == "decode":
        partial_result = case.num_heads * (case.head_dim * element + 4)
        return (size - 1) * partial_result // (1 if way == "all" else size)
    exchange: Any = "heads" if way == "verl" else way
    layout: Any = "contiguous" if case.window else None
    dims = case.head_dim, case.head_dim
    shape = HeadShape(case.num_heads, case.num_kv_heads, *dims, element)
    return moved(spread_of(exchange, case.tokens, size, case.mask, layout), shape).total


def shown(r: Record) -> str:
    """A record in a line."""
    if r["us"] is None:
        return f"{r['case']} {r['way']}: {'; '.join(r['reasons'])}"
    times = f"{r['us']:.1f} us beside {r['alone_us']:.1f} alone"
    return f"{r['case']} {r['way']}: {times}, {r['alone_us'] / r['us']:.2f} times the rate"
