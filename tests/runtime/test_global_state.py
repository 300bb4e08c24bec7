"""Calls leave the state of the process alone: torch's switches, generators and warning filters."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import splitkv

SWITCHES = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.is_grad_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_default_dtype,
    torch.get_num_threads,
    torch.is_autocast_cache_enabled,
)


def state() -> list[Any]:
    held = [switch() for switch in SWITCHES]
    return [*held, list(warnings.filters), dict(os.environ), torch.get_rng_state().tolist()]


def train(**options: Any) -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16)
    x = q.requires_grad_()
    out = splitkv.attention(x, k, k, causal=True, **options)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def decode() -> None:
    splitkv.decode(torch.randn(2, 1, 4, 16), *(torch.randn(2, 9, 2, 16) for _ in "kv"))


CALLS = {
    "train": train,
    "lse": lambda: train(return_lse=True),
    "softcap": lambda: train(softcap=3.0),
    "sinks": lambda: train(sink_logits=torch.zeros(4)),
    "decode": decode,
}


@pytest.mark.parametrize("name", CALLS)
def test_state_during_and_after_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also during it: what one thread switches, another sees."""
    seen: list[tuple[Any, ...]] = []
    asked = {f: getattr(torch, f) for f in ("matmul", "softmax")}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            seen.append(tuple(switch() for switch in SWITCHES[:4]))
            return function(*args, **kwargs)

        return wrapper

    for f, function in asked.items():
        monkeypatch.setattr(torch, f, watched(function))
    aten = torch.ops.aten
    math = aten._scaled_dot_product_attention_math
    monkeypatch.setattr(aten, "_scaled_dot_product_attention_math", watched(math))
    functional = torch.nn.functional
    sdpa = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched(sdpa))
    torch.manual_seed(0)
    before = state()
    CALLS[name]()
    after = state()
    assert before[:-1] == after[:-1]
    assert seen and set(seen) == {tuple(before[:4])}


def test_threads_that_train() -> None:
    before = [switch() for switch in SWITCHES]

    def work() -> None:
        for _ in range(60):
            train()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [switch() for switch in SWITCHES] == before


def test_dropout_in_a_graph_draws_from_a_generator_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeding torch's generators, if only for a while, seeds those of all devices and threads."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's generators are everybody's")

    compiled = torch.compile(splitkv.attention, backend="aot_eager", fullgraph=True)
    q, k = torch.randn(2, 5, 4, 16, requires_grad=True), torch.randn(2, 9, 2, 16)
    torch._dynamo.reset()
    compiled(q, k, k, dropout_p=0.5)
    monkeypatch.setattr(torch, "manual_seed", refuse)
    monkeypatch.setattr(torch.random, "fork_rng", refuse)
    drawn = []
    for _ in range(2):
        out = compiled(q, k, torch.ones_like(k), dropout_p=0.5)
        out.sum().backward()
        drawn.append(out.detach())
    assert not torch.equal(*drawn)
