"""Training on sequences whose lengths change: a new length is launched with addresses, forward and
backward, with the same arguments as launchers bound to it alone, and compile and plan nothing.

Kernels are those that a GPU of the table is asked to run, tensors are the CPU's, and nothing is
compiled or runs: see support/fake_gpu.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import Recorded, fake_gpu
from torch import Tensor

import splitkv
from splitkv.planner import registry
from splitkv.runtime import dispatch, growing_sequences
from splitkv.runtime.growing_gradients import AtLength, GrowingGradients

HEADS, KV_HEADS, DIM, BATCH = 8, 2, 64, 2
LEAST_ADDRESS = 1 << 24
LENGTHS = [200, 201, 2, 208, 209, 16, 17, 33, 64, 65, 127, 128, 190, 224, 225, 300, 512, 513]
SINKS, SLOPES = torch.zeros(HEADS, requires_grad=True), torch.ones(HEADS, requires_grad=True)
Call = tuple[Callable[[], Any], list[Tensor]]


def leaves(*lead: int, head_dim: int = DIM) -> list[Tensor]:
    """q, k and v that want gradients."""
    heads = HEADS, KV_HEADS, KV_HEADS
    return [torch.zeros(*lead, n, head_dim).bfloat16().requires_grad_() for n in heads]


def dense(n: int, **options: Any) -> Call:
    q, k, v = leaves(BATCH, n)
    wanted = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    return lambda: splitkv.attention(q, k, v, causal=True, **options), wanted


def packed(n: int, **options: Any) -> Call:
    """Sequences of n tokens and fewer."""
    lengths = [n, n // 2, 1]
    q, k, v = leaves(sum(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    rest = cu, cu.clone(), n, n
    wanted = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    return lambda: splitkv.attention_varlen(q, k, v, *rest, causal=True, **options), wanted


GROWTHS: dict[str, Callable[[int], Call]] = {
    "dense": dense,
    "packed": packed,
    "window": lambda n: dense(n, window_size=(200, 0)),
    "packed with a window": lambda n: packed(n, window_size=(100, 0)),
    "sinks": lambda n: dense(n, sink_logits=SINKS),
    "packed with sinks": lambda n: packed(n, sink_logits=SINKS, return_lse=True),
    "deterministic": lambda n: packed(n, deterministic=True),
    "kernels for any GPU": lambda n: dense(n, alibi_slopes=SLOPES, sink_logits=SINKS),
}


def launches(recorded: Recorded, call: Call, of_lse: bool) -> list[tuple[str, Any]]:
    """What a step launches: grid, machine code and metadata, arguments with names for addresses."""
    forward, wanted = call
    recorded.calls.clear()
    result = forward()
    outputs = list(result) if isinstance(result, tuple) else [result]
    outputs = outputs if of_lse else outputs[:1]
    grads = [torch.ones_like(x) for x in outputs]
    torch.autograd.grad(outputs, wanted, grads)
    names = {x.data_ptr(): n for n, x in enumerate([*wanted, *outputs, *grads])}

    def named(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(named, x))
        if type(x) is int and x >= LEAST_ADDRESS:
            return names.get(x, "memory")
        return x

    return [
        (name, (*args[:3], args[4], args[7], *map(named, args[11:])))
        for name, args in recorded.calls
    ]


def launchers() -> list[GrowingGradients]:
    entries = [e for of_options in dispatch.calls.recent.values() for e in of_options]
    found = {id(bound): bound.launcher for *_, bound in entries}
    return [x for x in found.values() if isinstance(x, GrowingGradients)]


@pytest.mark.parametrize("name", GROWTHS)
def test_a_new_length_is_launched_as_if_bound_to_it(name: str, compiled: list[str]) -> None:
    any_gpu = name == "kernels for any GPU"
    with fake_gpu() as recorded:
        calls = [GROWTHS[name](n) for n in LENGTHS]
        grown = [launches(recorded, call, False) for call in calls]
        assert len(launchers()) == 1
        of_growth, compiled[:] = [*compiled], []
        through_triton, recorded.through_triton = recorded.through_triton, 0
        for n, call, made in zip(LENGTHS, calls, grown, strict=True):
            dispatch.calls.clear()
            wanted = launches(recorded, call, False)
            assert [kernel for kernel, _ in made] == [kernel for kernel, _ in wanted]
            for (kernel, ours), (_, theirs) in zip(made, wanted, strict=True):
                assert ours == theirs, (n, kernel)
    assert compiled == [], "no length compiles what its growth did not"
    if not any_gpu:
        assert through_triton <= 2 * len(of_growth) + 8


@pytest.mark.parametrize("name", GROWTHS)
def test_a_length_within_a_known_bucket_plans_and_compiles_nothing(
    name: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpu() as recorded:
        for n in (460, 470, 480):
            launches(recorded, GROWTHS[name](n), False)
        compiled.clear()
        recorded.through_triton = 0
        for function in ("_decided", "make_plan"):
            monkeypatch.setattr(registry, function, pytest.fail)
        monkeypatch.setattr(dispatch, "plan_for", pytest.fail)
        for n in (465, 466, 479, 480):
            launches(recorded, GROWTHS[name](n), False)
    assert compiled == []
    assert recorded.through_triton == 0 or name == "kernels for any GPU"


def test_gradients_are_recorded_where_they_are_wanted_alone() -> None:
    """Calls of the same layouts with and without gradients, in turns."""
    with fake_gpu() as recorded:
        for n in (200, 201, 202, 203):
            forward, wanted = packed(n)
            with torch.no_grad():
                assert not forward().requires_grad
            assert forward().requires_grad
            launches(recorded, (forward, wanted), False)
        assert len(launchers()) == 1


def test_a_gradient_of_the_lse_that_comes_and_goes() -> None:
    with fake_gpu() as recorded:
        call = GROWTHS["packed with sinks"]
        made = {}
        for n in (200, 201, 202):
            for of_lse in (False, True, False, True):
                made[n, of_lse] = launches(recorded, call(n), of_lse)
        recorded.through_triton = 0
        for (n, of_lse), wanted in made.items():
            assert launches(recorded, call(n), of_lse) == wanted, (n, of_lse)
        assert recorded.through_triton == 0
    assert made[202, True] != made[202, False]


def test_a_day_of_lengths_compiles_few_variants(compiled: list[str]) -> None:
    """Whatever the lengths are: no more than for those that are decided for, once each."""
    rnd = random.Random(0)

    def day(recorded: Recorded, lengths: list[int]) -> None:
        for n in lengths:
            for call in (dense(n), packed(n, sink_logits=SINKS)):
                launches(recorded, call, False)

    with fake_gpu() as recorded:
        day(recorded, [n for n in registry.decided_lengths(1024) if n])
        variants = len(compiled)
        assert variants <= 24
        dispatch.calls.clear()
        day(recorded, [rnd.randint(1, 1024) for _ in range(150)])
    assert len(compiled) == variants


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitkv.runtime.growing.MAX_KNOWN", 4)
    with fake_gpu() as recorded:
        for n in range(200, 220):
            launches(recorded, packed(n), False)
        (launcher,) = launchers()
        assert len(launcher.known) <= 4
        assert all(isinstance(x, AtLength) for x in launcher.known.values())


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_a_length_that_came_before_is_looked_up_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is launched by what the length is known by for its gradients."""
    with fake_gpu() as recorded:
        calls = [GROWTHS[name](n) for n in (200, 201, 202)]
        made = [launches(recorded, call, False) for _ in range(3) for call in calls]
        monkeypatch.setattr(growing_sequences.GrowingSequences, "__call__", pytest.fail)
        assert [launches(recorded, call, False) for call in calls[1:]] == made[-2:]
