"""`splitkv trace`: which attention kernels a model of transformers runs, in prefill and in decode.

The model is made from its configuration with random weights, for which kernels run depends on
shapes alone, and generates under torch's profiler. Whatever serves its attention is wrapped while
it does, so that every call is a range of the profile that says how many queries met how many keys;
a kernel belongs to the call within which the host launched it. On a CPU operators take the place
of kernels.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from splitkv.core.device import Device
from splitkv.core.errors import expect, expect_one_of, expect_positive
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.scales import DTYPE_BYTES
from splitkv.core.scores import Score
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.markdown import number, table
from splitkv.planner.explanation import explain
from splitkv.planner.policies import DEFAULT
from splitkv.planner.policies.flash_attention_2 import dispatch
from splitkv.planner.registry import KERNELS

RANGE = "splitkv.trace "  # begins the names of the ranges
# Part of a kernel's name, in lower case -> what it is; the first that fits.
KNOWN = {
    "flash_fwd_splitkv_combine": "FlashAttention-2 merges the splits",
    "flash_fwd_splitkv": "FlashAttention-2 for a cache, in splits of the keys or in one",
    "flash_fwd": "FlashAttention-2, keys not split",
    "flashattnfwdcombine": "FlashAttention-3 merges the splits",
    "flashattnfwd": "FlashAttention-3",
    "cudnn": "cuDNN",
    "fmha_cutlass": "torch's memory-efficient attention",
    "softmax": "a softmax of its own: the scores went through memory",
}
FA2 = "flash_fwd"
LEAST = 0.01  # share of a phase that an operator on a CPU has to take to be shown


class Launch(NamedTuple):
    """A kernel of one call, the number of that call, and its microseconds."""

    call: int
    name: str
    us: float


@dataclass(frozen=True)
class Row:
    """A kernel of one phase.

    keys    of the calls in which it ran, the fewest and the most
    us      of a launch, the mean
    """

    phase: str
    kernel: str
    keys: tuple[int, int]
    launches: int
    us: float
    what: str

    def cells(self) -> list[str]:
        keys = "-".join(map(str, dict.fromkeys(self.keys)))
        return [self.phase, self.kernel, keys, str(self.launches), number(self.us), self.what]


def parse_new_tokens(text: str) -> list[int]:
    """`64,512`."""
    parts = text.split(",")
    expect(all(part.strip().isdigit() for part in parts), "new_tokens", "N,N,...", text)
    counts = [int(part) for part in parts]
    for count in counts:
        expect_positive("new_tokens", count)
    return counts


def config_of(model: str, layers: int | None) -> Any:
    """The configuration of a folder, a .json file or a name; `layers`: only so many."""
    path = Path(model)
    if path.suffix == ".json":
        expect(path.is_file(), "model", "a configuration that is there", model)
        given = json.loads(path.read_text())
        expect("model_type" in given, "model", "a configuration with model_type", model)
        config = AutoConfig.for_model(**given)
    else:
        try:
            config = AutoConfig.from_pretrained(model)
        except OSError as error:
            expect(False, "model", "a folder, a config.json or a name", str(error).split("\n")[0])
    if layers is not None:
        expect_positive("layers", layers)
        most = config.num_hidden_layers
        expect(layers <= most, "layers", f"at most {most}, as the model has", layers)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def make_model(config: Any, attention: str, dtype: str, device: str) -> Any:
    """The model with random weights. ValueError: it cannot have this attention here."""
    expect_one_of("dtype", dtype, DTYPE_BYTES)
    if attention == "splitkv":
        from splitkv.integrations import transformers as integration

        integration.register()
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention
            )
    except (ImportError, ValueError) as error:
        said = str(error).strip().split("\n")[0]
        expect(False, "attention", "one that this model can have here", f"{attention}: {said}")
    return model.eval()


def problem_of(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]
) -> Problem:
    """The Problem that a layer asked its attention for, without padding: [batch, heads, tokens,
    head_dim]."""
    window = given.get("sliding_window") or getattr(module, "sliding_window", None)
    sinks = given.get("s_aux") is not None or getattr(module, "sinks", None) is not None
    return Problem(
        "decode" if q.shape[2] == 1 else "dense",
        *(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.shape[2], k.shape[2]),
        dtype=str(q.dtype).removeprefix("torch."),
        mask=Mask(True, window - 1 if window else -1),
        score=Score(softcap=bool(given.get("softcap"))),
        sink_logits=sinks,
    )


@contextmanager
def marked(calls: list[Problem]) -> Iterator[None]:
    """Every call of attention is a range with its number, and noted in `calls`."""
    found = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend = found(self, name, default)

        def call(module: Any, q: Any, k: Any, v: Any, *args: Any, **given: Any) -> Any:
            calls.append(problem_of(module, q, k, v, given))
            with record_function(f"{RANGE}{len(calls) - 1}"):
                return attend(module, q, k, v, *args, **given)

        return call

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = found


def run(model: Any, batch: int, prompt: int, new_tokens: int) -> tuple[list[Problem], list[Launch]]:
    """Generate so many tokens greedily; what attention was asked for and what it ran."""
    device = next(model.parameters()).device
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    options |= {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    calls: list[Problem] = []
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        model.generate(ids, **options)  # compiles and loads what there is to
    with marked(calls), profile(activities=activities, acc_events=True) as profiled:
        model.generate(ids, **options)
        if device.type == "cuda":
            torch.cuda.synchronize()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    return calls, list(launches(events, on_gpu=device.type == "cuda"))


def launches(events: Iterable[Any], on_gpu: bool) -> Iterator[Launch]:
    """The kernels launched within the ranges, or the outermost operators."""
    cpu = torch.autograd.DeviceType.CPU
    host = [e for e in events if e.device_type() == cpu]
    ranges = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), int(e.name().removeprefix(RANGE)))
        for e in host
        if e.name().startswith(RANGE)
    )
    starts = [start for start, *_ in ranges]

    def call_at(ns: int) -> int | None:
        i = bisect_right(starts, ns) - 1
        return ranges[i][2] if i >= 0 and ns <= ranges[i][1] else None

    if on_gpu:
        launched = {e.correlation_id(): e.start_ns() for e in host if "aunch" in e.name()}
        for e in events:
            at = launched.get(e.correlation_id())
            call = None if e.device_type() == cpu or at is None else call_at(at)
            if call is not None and not e.name().startswith(RANGE):
                yield Launch(call, e.name(), e.duration_ns() / 1e3)
        return
    end = 0
    for e in sorted(host, key=lambda e: (e.start_ns(), -e.duration_ns())):
        call = None if e.name().startswith(RANGE) else call_at(e.start_ns())
        if call is not None and e.start_ns() >= end:
            end = e.start_ns() + e.duration_ns()
            yield Launch(call, e.name(), e.duration_ns() / 1e3)


def phase(problem: Problem) -> str:
    return "prefill" if problem.seqlen_q > 1 else "decode"


def rows(calls: Sequence[Problem], ran: Sequence[Launch], least: float = 0.0) -> list[Row]:
    """A row for each phase and kernel, in the order in which they first ran.

    least   share of the time of its phase below which a kernel is left out
    """
    found: dict[tuple[str, str], list[Launch]] = {}
    total: dict[str, float] = {}
    for launch in ran:
        when = phase(calls[launch.call])
        found.setdefault((when, launch.name), []).append(launch)
        total[when] = total.get(when, 0.0) + launch.us
    made = []
    for (when, name), of_it in found.items():
        keys = [calls[launch.call].seqlen_k for launch in of_it]
        us = sum(launch.us for launch in of_it)
        if us >= least * total[when]:
            bounds, mean = (min(keys), max(keys)), us / len(of_it)
            made.append(Row(when, short(name), bounds, len(of_it), mean, what_is(name)))
    return made


def short(name: str) -> str:
    """A kernel's name without its type, template arguments and parameters."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return bare.split("<")[0].split("(")[0]


def what_is(name: str) -> str:
    """A description of a kernel by its name."""
    ours = [kernel.name for kernel in KERNELS if kernel.name in name]
    if ours:
        return f"splitkv: {max(ours, key=len)}"
    return next((what for part, what in KNOWN.items() if part in name.lower()), "")


def reasons(
    calls: Sequence[Problem], ran: Iterable[Launch], attention: str, device: Device
) -> list[str]:
    """Why: of each phase and layer shape, at its fewest and its most keys, what the rule says.

    Known are the rules of splitkv, and of FlashAttention-2 where kernels of its names ran.
    """
    of_fa2 = {phase(calls[launch.call]) for launch in ran if FA2 in launch.name}

    def shape(p: Problem) -> str:
        return repr((phase(p), replace(p, seqlen_k=0)))

    said: dict[str, None] = {}
    for _, group in groupby(sorted(calls, key=shape), shape):
        alike = sorted(group, key=lambda p: p.seqlen_k)
        for p in (alike[0], alike[-1]):
            head = f"{phase(p)}, {p.seqlen_k} keys"
            if attention == "splitkv":
                found = explain(p, device, policies=(DEFAULT,))
                said |= {f"{head}: {plan.kernel}, {plan.why}": None for plan in found.plans}
            elif phase(p) in of_fa2:
                said[f"{head}: FlashAttention-2's rule, {dispatch(p, device, 'fwd').why}"] = None
    return list(said)


def trace(
    model: str,
    attentions: Sequence[str],
    new_tokens: Sequence[int],
    *,
    batch: int,
    prompt: int,
    layers: int | None,
    dtype: str,
    device: Device,
    console: Console,
) -> None:
    """Print the kernels of each implementation and number of new tokens, and the reasons."""
    expect_positive("batch", batch)
    expect(prompt > 1, "prompt", "more than 1 token", prompt)
    least = 0.0 if device.kind == "cuda" else LEAST
    for attention in attentions:
        made = make_model(config_of(model, layers), attention, dtype, device.kind)
        for number_of_tokens in new_tokens:
            calls, ran = run(made, batch, prompt, number_of_tokens)
            found = rows(calls, ran, least)
            head = f"{attention}: {prompt} + {number_of_tokens} tokens, batch {batch}, {device}"
            header = ["phase", "kernel" if not least else "operator", "keys", "launches", "us", ""]
            say(console, f"\n{head}\n\n{table(header, [row.cells() for row in found])}")
            if least:
                say(console, f"operators that took less than {least:.0%} of a phase left out")
            for reason in reasons(calls, ran, attention, device):
                say(console, f"* {reason}")
