"""Steps of an engine after `warm_layer`: whatever their sizes, nothing is compiled.

Kernels are those that a GPU of the table is asked to run, tensors are the CPU's, and nothing is
compiled or runs: see support/fake_gpu.py. Processes that compile: tests/runtime/test_warm_model.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu import compilations, fake_gpu
from uncompiled import uncompiled

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS, Codec
from splitkv.integrations import engine_warmup, serving
from splitkv.integrations.engine_warmup import Layer, Sizes, bounds, powers, shapes_of
from splitkv.integrations.serving import (
    LEAST_BOUND,
    Pages,
    Plans,
    Step,
    attend,
    bound_of,
    bound_of_new,
)
from splitkv.runtime import attention, call_cache, compile_pool, compile_worker
from splitkv.runtime.compile_worker import Task

SIZES = Sizes(batch_sizes=(1, 2), max_tokens=64, max_sequences=2, max_seqlen_k=1024)
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
POLICY = "scheduled"


def layer(codec: Codec = AS_IS) -> Layer:
    return Layer(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        head_dim_v=DIM,
        dtype=torch.bfloat16,
        codec=codec,
        page_size=PAGE,
        longest=SIZES.max_seqlen_k,
        device=torch.device("cpu"),
        arguments={"window_size": (-1, -1), "softcap": 0.0},
        policy=POLICY,
    )


def attend_a_step(draw: random.Random) -> None:
    """A step of sequences that decode, some of them, and a chunk of a prompt, or not."""
    decodes, chunk = draw.randrange(3), draw.choice((0, draw.randrange(1, 62)))
    if not decodes and not chunk:
        return
    lengths = [draw.randrange(1, 1000) for _ in range(decodes)]
    new = [1] * decodes + [chunk] * bool(chunk)
    lengths += [chunk + draw.randrange(900)] * bool(chunk)
    both = torch.zeros(4, PAGE, KV_HEADS, 2 * DIM).bfloat16()
    k, v = both.split(DIM, dim=-1)
    q, longest = torch.zeros(sum(new), HEADS, DIM).bfloat16(), max(lengths)
    step = Step.of(
        torch.tensor([0, *new]).cumsum(0).int(),
        torch.tensor(lengths).int(),
        torch.zeros(len(new), SIZES.max_seqlen_k // PAGE, dtype=torch.int32),
        num_decodes=decodes,
        decode_len=1,
        num_tokens=sum(new),
        max_seqlen_q=bound_of_new(max(new), SIZES.max_tokens),
        max_seqlen_k=bound_of(longest, SIZES.max_seqlen_k),
    )
    options = {"softmax_scale": 0.125, "window_size": (-1, -1)}
    attend(q, Pages(k, v), step, torch.empty_like(q), options, Plans(POLICY, ["decode"]))


@contextmanager
def here(*_: Any) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """In the place of processes that do tasks."""
    yield lambda tasks: ((task, compile_worker.answer(task)) for task in tasks)


@pytest.mark.filterwarnings("ignore:Use of index_put_")  # append of the CPU, to one page
@pytest.mark.parametrize("seed", [1])
def test_steps_of_any_sizes_compile_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, draw = Device.named("h200"), random.Random(seed)
    monkeypatch.setattr(engine_warmup, "current", lambda: gpu)
    monkeypatch.setattr(compile_pool, "_workers", here)
    with fake_gpu("h200"), torch.no_grad():
        made = engine_warmup.warm_layer(layer(), SIZES)
        assert made is not None and not made.failures
        assert {"append_kv", "decode_walk"} < set(made.kernels.values())
        with compilations() as compiled:
            for _ in range(150):
                attend_a_step(draw)
        assert compiled == []


@pytest.mark.parametrize("codec", [AS_IS, Codec("int8", "token")], ids=str)
def test_processes_that_compile_ask_no_driver(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have none, before a kernel of a call is compiled and after that."""

    def current() -> int:
        raise RuntimeError("No CUDA GPUs are available")

    for module in (attention, call_cache):
        monkeypatch.setattr(module, "current_device", current)
    model = replace(layer(codec), gpu=Device.named("h200"))
    shapes = list(shapes_of(replace(SIZES, batch_sizes=(2,), appends=False)))
    with uncompiled(), torch.no_grad():
        found = compile_worker.answer(Task(model, shapes))
        wanted = frozenset(found.asked)
        for task in (Task(model, shapes, wanted), Task(model, shapes)):
            assert compile_worker.answer(task).failures == []


def test_slots_are_of_the_type_that_engines_give() -> None:
    (call,) = layer().slots(16).run.args  # type: ignore[attr-defined]
    assert call.slots.dtype == torch.int64


def test_processes_that_end_stop_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ended(*_: object, processes: int) -> None:
        assert processes == engine_warmup.MOST_PROCESSES
        raise RuntimeError("a process that compiles ended with -9")

    monkeypatch.setattr(engine_warmup, "current", lambda: Device.named("h200"))
    monkeypatch.setattr(engine_warmup, "compile_calls", ended)
    assert engine_warmup.warm_layer(layer(), SIZES, processes=100) is None
    assert "ended with -9" in caplog.text


def calls_of(decodes: int, chunk: int, dtype: torch.dtype) -> list[str]:
    """What a step of Llama-8B's heads calls for a layer on an H200."""
    both = torch.zeros(4, PAGE, 8, 2 * 128).to(dtype)
    k, v = both.split(128, dim=-1)
    scales = () if dtype == torch.bfloat16 else (torch.ones(1), torch.ones(1))
    new = [1] * decodes + [chunk]
    q = torch.zeros(sum(new), 32, 128).bfloat16()
    step = Step.of(
        torch.tensor([0, *new]).cumsum(0).int(),
        torch.full((len(new),), 5000).int(),
        torch.zeros(len(new), 1024, dtype=torch.int32),
        num_decodes=decodes,
        decode_len=1,
        num_tokens=sum(new),
        max_seqlen_q=bound_of_new(chunk, 8192),
        max_seqlen_k=8192,
    )
    options, called = {"softmax_scale": 0.125, "window_size": (-1, -1)}, list[str]()
    with fake_gpu("h200"), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for name in ("decode", "attention_varlen"):
            patch.setattr(serving, name, lambda *_, name=name, **__: called.append(name))
        attend(
            q, Pages(k, v, *scales), step, torch.empty_like(q), options, Plans("tuned", ["decode"])
        )
    return called


def test_a_step_with_a_prompt_is_one_call_where_that_is_balanced() -> None:
    both = ["decode", "attention_varlen"]
    assert calls_of(30, 2000, torch.bfloat16) == ["attention_varlen"]
    assert calls_of(0, 2000, torch.bfloat16) == ["attention_varlen"]
    assert calls_of(30, 200, torch.bfloat16) == both
    assert calls_of(30, 2000, torch.float8_e4m3fn) == both


def test_each_kind_of_layer_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[Any, ...]]()
    monkeypatch.setattr(engine_warmup, "warm_layer", lambda *given: asked.append(given))
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    plain, sinks = layer(), replace(layer(), sink_logits=True)
    same_bits = replace(layer(), policy="batch_invariant")
    engine_warmup.warm_layers([plain, sinks, layer(), same_bits], SIZES, engines=2)
    assert asked == [(plain, SIZES, 4), (sinks, SIZES, 4)]
    monkeypatch.setenv(engine_warmup.SWITCH, "0")
    engine_warmup.warm_layers([plain], SIZES)
    assert len(asked) == 2


def test_sizes_of_an_engine() -> None:
    found = Sizes.of(
        [1, 3, 64], max_sequences=20, decode_len=3, max_tokens=256, max_seqlen_k=999, appends=False
    )
    batches = 1, 2, 3, 4, 8, 16, 20
    assert found == Sizes(batches, 256, 20, 999, decode_lens=(1, 3), appends=False)
    assert Sizes.of((), max_sequences=2, max_tokens=64, max_seqlen_k=1024) == SIZES


def test_bounds_are_those_of_steps() -> None:
    found = bounds(5000)
    assert found[0] == LEAST_BOUND
    assert found[-1] == 5000
    assert {bound_of(n, 5000) for n in range(1, 5001)} == set(found)
    assert powers(20) == [1, 2, 4, 8, 16, 20]
    assert {bound_of_new(n, 20) for n in range(1, 21)} == set(powers(20))


def test_calls_are_within_what_an_engine_serves() -> None:
    shapes = list(shapes_of(SIZES))
    of_prompts = [x for x in shapes if x.kind == "prompt"]
    assert all(x.seqlen_q <= SIZES.max_tokens and x.seqlen_k >= x.seqlen_q for x in of_prompts)
    assert {x.batch for x in shapes if x.kind == "step"} == set(SIZES.batch_sizes)
    assert max(x.seqlen_k for x in shapes) == SIZES.max_seqlen_k


def test_a_layer_reads_keys_and_values_of_one_cache() -> None:
    for heads_first in (False, True):
        k, v = replace(layer(), heads_first=heads_first).caches(1, PAGE)
        assert k.shape == v.shape == (1, PAGE, KV_HEADS, DIM)
        assert v.data_ptr() - k.data_ptr() == DIM * k.element_size()
