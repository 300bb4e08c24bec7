"""`splitkv bench host`: what a call takes the host, beside other libraries.

    splitkv bench host --json host.jsonl

The problems are small, so that the GPU is never what a call waits for. Each library runs in a
process of its own, which answers lines of JSON (`python -m splitkv.lab.bench.host NAME`).

* **Checked first**: the first result of each call, and the gradients, by the tolerance rule.
* **A batch** is `CALLS` calls in a row that begin on an idle GPU, by the host's clock; a round is
  `BATCHES` of them. Rounds of the libraries take turns, and the least batch of all rounds counts:
  what else runs on a host only adds to a time.
* New lengths: each call has other tensors, of another length than the one before, made before the
  clock starts.
* A backward is timed with its forward, in autograd's thread and (`one thread`) in its caller's.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import splitkv
from splitkv import reference
from splitkv.core.errors import expect
from splitkv.core.masks import Mask
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.peers import importable
from splitkv.lab.harness.process import Ended, Process
from splitkv.lab.harness.records import OURS
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.host import host_report
from splitkv.testing import assert_close

CALLS, BATCHES, ROUNDS = 50, 20, 5
SECONDS = 240  # that a process may take for an answer; the first one compiles
DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, TOKENS, PAGE_SIZE = 32, 8, 128, 512, 16
FIRST_LENGTH, LENGTHS = 1000, 100  # of calls that have another length each
WINDOW = 127


@dataclass(frozen=True)
class HostCase:
    """A call that is timed.

    kind    "decode" of one query, or "sequences" under a causal mask
    pages   keys and values of decode in pages
    packed  sequences packed, by `cu_seqlens`
    grown   each call has another length
    grads   None; "forward" with gradients recorded; "step": forward and backward; "one thread": a
            step whose backward runs in the thread that asks for it
    """

    name: str
    kind: str
    pages: bool = False
    packed: bool = False
    grown: bool = False
    window: int = -1
    deterministic: bool = False
    grads: str | None = None


def _training(name: str, **changes: Any) -> Iterator[HostCase]:
    for grads in ("forward", "step", "one thread"):
        yield HostCase(f"training, {name}: {grads}", "sequences", grads=grads, **changes)


CASES = (
    HostCase("decode", "decode"),
    HostCase("decode, pages", "decode", pages=True),
    HostCase("decode, new lengths", "decode", grown=True),
    HostCase("prompt", "sequences"),
    HostCase("prompts, new lengths", "sequences", grown=True),
    HostCase("packed prompts", "sequences", packed=True),
    *_training("dense"),
    *_training("packed", packed=True),
    *_training("window", window=WINDOW),
    *_training("deterministic", deterministic=True),
)


@dataclass(frozen=True)
class Library:
    """Functions of a library, None where it has none.

    decode     (q, keys, values, lengths, page_table) -> out
    sequences  (case, q, k, v) -> out
    packed     (case, q, k, v, cu_seqlens, longest) -> out
    options    what its sequences can have: "gradients", "window", "deterministic"
    """

    decode: Callable[..., Tensor] | None = None
    sequences: Callable[..., Tensor] | None = None
    packed: Callable[..., Tensor] | None = None
    options: tuple[str, ...] = ("gradients", "window", "deterministic")

    def against(self, case: HostCase) -> str | None:
        """Why it does not serve a case."""
        kind = "packed" if case.packed else case.kind
        if getattr(self, kind) is None:
            return f"{kind}: expected another kind of call"
        wanted = {
            "gradients": case.grads is not None,
            "window": case.window >= 0,
            "deterministic": case.deterministic,
        }
        lacks = [name for name, is_wanted in wanted.items() if is_wanted > (name in self.options)]
        return f"{lacks[0]}: expected none" if lacks else None


def ours() -> Library:
    def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, pages: Tensor | None) -> Tensor:
        return splitkv.decode(q, k, v, cache_seqlens=lengths, page_table=pages)

    def sequences(case: HostCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.deterministic:
            return splitkv.attention(q, k, v, causal=True, deterministic=True)
        if case.window >= 0:
            return splitkv.attention(q, k, v, causal=True, window_size=(case.window, 0))
        return splitkv.attention(q, k, v, causal=True)

    def packed(case: HostCase, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        return splitkv.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)

    return Library(decode, sequences, packed)


def fa3() -> Library:
    """FlashAttention-3 as vLLM builds it; prompts come packed, as it has no others."""
    fa = import_module("peers.fa3")

    def packed(case: HostCase, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        out: Tensor = fa.flash_attn_varlen_func(q, k, v, longest, cu, longest, cu, causal=True)
        return out

    return Library(fa.flash_attn_with_kvcache, None, packed, options=())


def fa3x() -> Library:
    """FlashAttention-3 upstream."""
    fa = import_module("peers.fa3x")

    def sequences(case: HostCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = (case.window, 0) if case.window >= 0 else (-1, -1)
        out: Tensor = fa.flash_attn_func(
            q, k, v, causal=True, window_size=window, deterministic=case.deterministic
        )
        return out

    def packed(case: HostCase, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        out: Tensor = fa.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
        return out

    return Library(None, sequences, packed)


def sdpa() -> Library:
    """torch's own, with heads before tokens as views; it has no cache and no packed sequences."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def sequences(case: HostCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return Library(sequences=sequences, options=("gradients",))


LIBRARIES: dict[str, Callable[[], Library]] = {OURS: ours, "sdpa": sdpa, "fa3": fa3, "fa3x": fa3x}
PEERS = tuple(name for name in LIBRARIES if name != OURS)


def select(globs: Sequence[str]) -> list[HostCase]:
    """The cases by name."""
    for pattern in globs:
        known = any(fnmatchcase(case.name, pattern) for case in CASES)
        names = "; ".join(case.name for case in CASES)
        expect(known, "case", f"one of {names}, or a glob", pattern)
    return [c for c in CASES if not globs or any(fnmatchcase(c.name, g) for g in globs)]


class Made:
    """The tensors of a case and the call that is timed.

    Attributes:
        call   what is timed; each call of a case that grows takes the next of its tensors
        check  compares one result, and its gradients, with those of the reference
    """

    def __init__(self, library: Library, case: HostCase, device: torch.device) -> None:
        self.library, self.case, self.device = library, case, device
        torch.manual_seed(0)
        make = self._decode if case.kind == "decode" else self._sequences
        self.call, self.check = make()

    def _lengths(self) -> list[int]:
        """In an order in which no length follows its neighbour."""
        if not self.case.grown:
            return [TOKENS]
        return [FIRST_LENGTH + n * 7 % LENGTHS for n in range(LENGTHS)]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, device=self.device, dtype=DTYPE)

    def _decode(self) -> tuple[Callable[[], Any], Callable[[], None]]:
        lengths = self._lengths()
        batch = 4 if self.case.pages else 1
        q, room = self._normal(batch, 1, HEADS), max(lengths)
        k, v = (self._normal(batch, room, KV_HEADS) for _ in range(2))
        used = torch.full((batch,), min(lengths), device=self.device, dtype=torch.int32)
        pages = None
        if self.case.pages:
            count = batch * room // PAGE_SIZE
            pages = torch.arange(count, device=self.device, dtype=torch.int32).view(batch, -1)
            k, v = (x.reshape(count, PAGE_SIZE, KV_HEADS, HEAD_DIM) for x in (k, v))
        caches = [(k, v)] if self.case.pages else [(k[:, :n], v[:, :n]) for n in lengths]
        following, run = itertools.cycle(caches), self.library.decode
        assert run is not None

        def call() -> Tensor:
            k, v = next(following)
            return run(q, k, v, used, pages)

        def check() -> None:
            options: dict[str, Any] = {"cache_seqlens": used, "page_table": pages}
            for cache in caches[:2]:
                wide, narrow = (
                    reference.decode(q, *cache, upcast=upcast, **options)[0]
                    for upcast in (True, False)
                )
                assert_close(run(q, *cache, used, pages), wide, narrow)

        return call, check

    def _sequences(self) -> tuple[Callable[[], Any], Callable[[], None]]:
        case = self.case
        given = [self._inputs(length) for length in self._lengths()]
        grads = [torch.randn_like(tensors[0]) for tensors in given[:1]]

        def forward(tensors: tuple[Tensor, ...]) -> Tensor:
            if case.packed:
                assert self.library.packed is not None
                return self.library.packed(case, *tensors, self.cu_seqlens, TOKENS - TOKENS // 3)
            assert self.library.sequences is not None
            return self.library.sequences(case, *tensors)

        def step() -> Any:
            return torch.autograd.grad(forward(given[0]), given[0], grads[0])

        def check() -> None:
            expected = [self._expected(given[0], grads[0], upcast) for upcast in (True, False)]
            found = [forward(given[0])]
            if case.grads:
                found += torch.autograd.grad(found[0], given[0], grads[0])
            for one, wide, narrow in zip(found, *expected, strict=True):
                assert_close(one.detach(), wide, narrow)

        following = itertools.cycle(given)
        timed = step if case.grads in ("step", "one thread") else lambda: forward(next(following))
        return timed, check

    def _inputs(self, length: int) -> tuple[Tensor, ...]:
        lead = (length,) if self.case.packed else (1, length)
        if self.case.packed:
            ends = [0, length // 3, length]
            self.cu_seqlens = torch.tensor(ends, device=self.device, dtype=torch.int32)
        heads = (HEADS, KV_HEADS, KV_HEADS)
        return tuple(self._normal(*lead, n).requires_grad_(bool(self.case.grads)) for n in heads)

    def _expected(self, tensors: tuple[Tensor, ...], grad: Tensor, upcast: bool) -> list[Tensor]:
        """The result of the reference and, where they are wanted, its gradients."""
        case = self.case
        mask = Mask(True, case.window)
        leaves = [x.detach().requires_grad_(bool(case.grads)) for x in tensors]
        if case.packed:
            q, k, v = leaves
            cu = self.cu_seqlens
            out = reference.attention_varlen(q, k, v, cu, cu, mask=mask, upcast=upcast)[0]
        else:
            out = reference.attention(*leaves, mask=mask, upcast=upcast)[0]
        found = torch.autograd.grad(out, leaves, grad.to(out.dtype)) if case.grads else ()
        return [out.detach(), *found]

    def round_us(self, batches: int, calls: int) -> float:
        """The least time of a call in microseconds, over batches of so many calls."""
        here = self.case.grads == "one thread"
        threads = torch.autograd.set_multithreading_enabled(False) if here else nullcontext()
        least = math.inf
        with threads, nullcontext() if self.case.grads else torch.no_grad():
            for _ in range(batches):
                self.wait()
                start = time.perf_counter()
                for _ in range(calls):
                    self.call()
                least = min(least, (time.perf_counter() - start) / calls * 1e6)
            self.wait()
        return least

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def serve(name: str) -> None:
    """Answer lines: {"case": name} makes and checks it, with "round" and "calls" it is timed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    library = LIBRARIES[name]()
    made: dict[str, Made] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        case = next(case for case in CASES if case.name == asked["case"])
        answer: dict[str, Any] = {}
        if reason := library.against(case):
            answer["reason"] = reason
        elif "round" not in asked:
            made[case.name] = Made(library, case, device)
            made[case.name].check()
            made[case.name].round_us(2, LENGTHS if case.grown else 1)  # binds and compiles
        else:
            gc.collect()
            gc.disable()
            answer["us"] = made[case.name].round_us(asked["round"], asked["calls"])
            gc.enable()
        print(json.dumps(answer), file=answers, flush=True)


class There:
    """A library in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = Process((sys.executable, "-m", "splitkv.lab.bench.host", name))

    def ask(self, **question: Any) -> Record:
        """{}, {"us": ...} or {"reason": ...}."""
        try:
            self.process.send(json.dumps(question))
            answer: Record = self.process.receive(SECONDS)
        except Ended as error:
            return {"reason": str(error)}
        return answer


def time_in_turns(
    case: HostCase, libraries: Sequence[There], *, rounds: int, batches: int, calls: int
) -> Record:
    """The record of a case: its least time by each library, or why there is none."""
    reasons = {x.name: x.ask(case=case.name).get("reason") for x in libraries}
    least = dict.fromkeys(reasons, math.inf)
    for x in [*libraries] * rounds:
        if reasons[x.name]:
            continue
        answer = x.ask(case=case.name, round=batches, calls=calls)
        reasons[x.name] = answer.get("reason")
        least[x.name] = min(least[x.name], answer.get("us", math.inf))
    return {
        **{"suite": "host", "case": case.name, **facts()},
        "us": {name: least[name] for name, reason in reasons.items() if not reason},
        "reasons": {name: reason for name, reason in reasons.items() if reason},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def bench_host(
    cases: Sequence[HostCase],
    peers: Sequence[str],
    *,
    console: Console,
    rounds: int = ROUNDS,
    batches: int = BATCHES,
    calls: int = CALLS,
    json_path: Path | None = None,
) -> tuple[list[Record], int]:
    """Time the cases, by every library; (records, exit status: 1 where ours failed)."""
    absent = [name for name in peers if name != "sdpa" and not importable(f"peers.{name}")]
    libraries = [There(name) for name in (OURS, *peers) if name not in absent]
    records: list[Record] = []
    with ExitStack() as stack:
        for x in libraries:
            stack.callback(x.process.stop)
        lines = stack.enter_context(Lines(json_path))
        for case in cases:
            record = time_in_turns(case, libraries, rounds=rounds, batches=batches, calls=calls)
            record["reasons"] |= dict.fromkeys(absent, "expected importable, got none")
            records.append(record)
            lines.add(record)
            told = ", ".join(f"{name} {us:.1f}" for name, us in record["us"].items())
            say(console, f"{case.name}: {told}")
    say(console, host_report(records))
    return records, int(any(OURS not in r["us"] for r in records))


if __name__ == "__main__":
    serve(*sys.argv[1:])
