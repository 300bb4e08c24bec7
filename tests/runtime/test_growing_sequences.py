"""attention and attention_varlen of sequences whose lengths change: a new length is launched with
addresses, with the same arguments as a launcher bound to it alone, and compiles nothing.

Kernels are those that a GPU of the table is asked to run, tensors are the CPU's, and nothing is
compiled or runs: see support/fake_gpu.py.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import Recorded, fake_gpu, functions_called
from torch import Tensor

import splitkv
from splitkv.kernels.hopper.prefill import launch
from splitkv.kernels.host import sequences, workspace
from splitkv.planner import registry
from splitkv.runtime import attention as attention_call
from splitkv.runtime import dispatch, growing, growing_sequences
from splitkv.runtime.growing_sequences import GrowingSequences

HEADS, KV_HEADS, DIM, BATCH = 8, 2, 64, 2
LEAST_ADDRESS = 1 << 24
LENGTHS = [200, 201, 1, 2, 208, 209, 16, 17, 33, 64, 65, 127, 128, 190, 224, 225, 300, 512, 513]
MOST_CALLS = 105  # functions that Python calls for a new length, C functions counted
A_LAUNCH = 50  # of them, those of a third launch
Given = dict[str, Any]


@pytest.fixture
def gpu() -> Iterator[Recorded]:
    with fake_gpu() as recorded, torch.no_grad():
        yield recorded


def dense(
    queries: int, keys: int, layout: str = "tokens", dim: int = DIM, dtype: Any = torch.bfloat16
) -> Given:
    """q, k and v with tokens before heads in memory, or after them, as transformers has them."""

    def made(n: int, heads: int) -> Tensor:
        if layout == "heads":
            return torch.zeros(BATCH, heads, n, dim, dtype=dtype).transpose(1, 2)
        return torch.zeros(BATCH, n, heads, dim, dtype=dtype)

    return {"q": made(queries, HEADS), "k": made(keys, KV_HEADS), "v": made(keys, KV_HEADS)}


def prompt(n: int, **options: Any) -> Given:
    return dense(n, n) | options


def packed(n: int, keys: int | None = None) -> Given:
    """Sequences of n tokens and fewer."""
    lengths = [n, n // 2, 1]
    q, k, v = (torch.zeros(sum(lengths), heads, DIM).bfloat16() for heads in (8, 2, 2))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu.clone(),
        "max_seqlen_q": n,
        "max_seqlen_k": n,
        "causal": True,
    }


def quantised(n: int, granularity: str, dtype: Any = torch.int8, queries: int = 0) -> Given:
    given = dense(queries or n, n, dtype=dtype)
    shape = {"head": (KV_HEADS,), "token": (BATCH, n, KV_HEADS)}[granularity]
    scales = {"k_scale": torch.ones(shape), "v_scale": torch.ones(shape)}
    return given | {"q": given["q"].bfloat16()} | scales


def packed_8bit(n: int) -> Given:
    given = packed(n)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(KV_HEADS))
    return given | {name: given[name].to(torch.float8_e4m3fn) for name in "kv"} | scales


PAGES = torch.zeros(2, 96, 16, KV_HEADS, DIM).bfloat16()
TABLE = torch.zeros(3, 40, dtype=torch.int32)


def paged(n: int) -> Given:
    """Chunks of packed prompts, and single tokens, whose keys are in pages."""
    given = packed(min(n, 90))
    more = {"k": PAGES[0], "v": PAGES[1], "cu_seqlens_k": None, "max_seqlen_k": n}
    lens = torch.zeros(3, dtype=torch.int32)
    return given | more | {"page_table": TABLE, "cache_seqlens": lens}


TABLE_OF_STEP = torch.zeros(64, 1024, dtype=torch.int32)


def step(n: int) -> Given:
    """A chunk of a prompt and single tokens, whose keys are in pages and many."""
    cu = torch.tensor([0, n, *[1] * 63]).cumsum(0).int()
    lens = torch.zeros(64, dtype=torch.int32)
    more = {"cu_seqlens_q": cu, "cu_seqlens_k": None, "page_table": TABLE_OF_STEP}
    more |= {"cache_seqlens": lens, "max_seqlen_q": 2048 + n, "max_seqlen_k": 15000 + n}
    q = torch.zeros(n + 63, HEADS, DIM).bfloat16()
    return {"q": q, "k": PAGES[0], "v": PAGES[1], "causal": True} | more


def steps(n: int) -> Given:
    """As many sequences as n is large, of which the first has a chunk of a prompt."""
    table = torch.zeros(600, 1024, dtype=torch.int32)
    cu = torch.tensor([0, 1500, *[1] * (n - 1)]).cumsum(0).int()
    more = {"cu_seqlens_q": cu, "cu_seqlens_k": None, "page_table": table[:n]}
    more |= {"cache_seqlens": torch.zeros(n, dtype=torch.int32)}
    more |= {"max_seqlen_q": 2048, "max_seqlen_k": 15000, "causal": True}
    q = torch.zeros(1499 + n, HEADS, DIM).bfloat16()
    return with_out({"q": q, "k": PAGES[0], "v": PAGES[1]} | more)


def documents(n: int) -> Given:
    """As many packed sequences as n is large."""
    cu = torch.arange(0, 7 * n + 1, 7, dtype=torch.int32)
    q, k, v = (torch.zeros(7 * n, heads, DIM).bfloat16() for heads in (8, 2, 2))
    lengths = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 7)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    return given | lengths


def narrowed(given: Given) -> Given:
    """Columns of wider tensors: strides of every other length are multiples of 16."""
    return {name: x[..., :64] for name, x in given.items()}


def in_8_bits(given: Given) -> Given:
    stored = {name: given[name].to(torch.float8_e4m3fn) for name in "kv"}
    return given | stored | dict.fromkeys(("k_scale", "v_scale"), torch.ones(1))


def with_out(given: Given) -> Given:
    return given | {"out": torch.zeros_like(given["q"], memory_format=torch.contiguous_format)}


def one_of(given: Given) -> Given:
    """The first sequence of a batch."""
    return given | {name: given[name][:1] for name in "qkv"}


SLOPES, SINKS = torch.ones(HEADS), torch.zeros(HEADS)
GROWTHS: dict[str, tuple[str, Callable[[int], Given]]] = {
    "prompts": ("h200", lambda n: prompt(n, causal=True)),
    "prompts, heads first": ("h200", lambda n: dense(n, n, "heads")),
    "one prompt": ("h200", lambda n: one_of(prompt(n, causal=True))),
    "one prompt, heads first": ("h200", lambda n: one_of(dense(n, n, "heads"))),
    "one query": ("h200", lambda n: dense(1, n, "heads")),
    "three queries": ("h200", lambda n: dense(3, n) | {"causal": True, "return_lse": True}),
    "more queries, as many keys": ("h200", lambda n: dense(n, 300) | {"causal": True}),
    "chunks of 128": ("h200", lambda n: dense(128, n) | {"causal": True}),
    "window": ("h200", lambda n: prompt(n, causal=True, window_size=(200, 0))),
    "two-sided window": ("h200", lambda n: prompt(n, window_size=(100, 30), sink_tokens=3)),
    "attention chunks": ("h200", lambda n: prompt(n, causal=True, attention_chunk=64)),
    "sinks and soft cap": ("h200", lambda n: prompt(n, sink_logits=SINKS, softcap=30.0)),
    "alibi": ("h200", lambda n: prompt(n, causal=True, alibi_slopes=SLOPES)),
    "fp32": ("h200", lambda n: dense(n, n, dtype=torch.float32)),
    "out": ("h200", lambda n: with_out(dense(n, n))),
    "rows of 72": ("h200", lambda n: narrowed(dense(n, n, "heads", dim=72))),
    "another GPU": ("a100", lambda n: prompt(n, causal=True)),
    "one query on another GPU": ("a100", lambda n: dense(1, n, "heads")),
    "rows of 72 on another GPU": ("a100", lambda n: narrowed(dense(n, n, "heads", dim=72))),
    "packed": ("h200", packed),
    "packed with a window": ("h200", lambda n: packed(n) | {"window_size": (100, 0)}),
    "packed into out": ("h200", lambda n: with_out(packed(n))),
    "packed on another GPU": ("a100", packed),
    "pages": ("h200", paged),
    "pages on another GPU": ("a100", paged),
    "int8": ("h200", lambda n: quantised(n, "head") | {"causal": True}),
    "e4m3": ("h200", lambda n: quantised(n, "head", torch.float8_e4m3fn)),
    "e5m2": ("h200", lambda n: quantised(n, "head", torch.float8_e5m2)),
    "int8, one query": ("h200", lambda n: quantised(n, "head", queries=1)),
    "int8 on another GPU": ("a100", lambda n: quantised(n, "head") | {"causal": True}),
    "packed e4m3": ("h200", packed_8bit),
    "steps of an engine": ("h200", step),
    "steps of any number of sequences": ("h200", steps),
    "the same in 8 bits": ("h200", lambda n: in_8_bits(steps(n))),
    "the same on another GPU": ("a100", steps),
    "documents": ("h200", documents),
    "documents on another GPU": ("a100", documents),
}


def run(given: Given) -> Any:
    given = dict(given)
    q, k, v = (given.pop(name) for name in "qkv")
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    if "cu_seqlens_q" not in given:
        return splitkv.attention(q, k, v, **given)
    return splitkv.attention_varlen(q, k, v, *(given.pop(name) for name in names), **given)


def launches(recorded: Recorded, given: Given) -> list[tuple[str, Any]]:
    """What was launched: grid, machine code and metadata, arguments with names for addresses."""
    names = {x.data_ptr(): name for name, x in given.items() if isinstance(x, Tensor)}

    def named(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(named, x))
        if type(x) is int and x >= LEAST_ADDRESS:
            return names.get(x, "memory")
        return x

    found = []
    for name, args in recorded.calls:
        grid, function, packed_metadata, flat = args[:3], args[4], args[7], args[11:]
        found.append((name, (*grid, function, packed_metadata, *map(named, flat))))
    recorded.calls.clear()
    return found


def launchers() -> set[GrowingSequences]:
    entries = [e for of_options in dispatch.calls.recent.values() for e in of_options]
    found = (bound.launcher for *_, bound in entries)
    return {launcher for launcher in found if isinstance(launcher, GrowingSequences)}


@pytest.mark.parametrize("name", GROWTHS)
def test_a_new_length_is_launched_as_if_bound_to_it(name: str, compiled: list[str]) -> None:
    gpu, given_of = GROWTHS[name]
    with fake_gpu(gpu) as recorded, torch.no_grad():
        calls = [given_of(n) for n in LENGTHS]
        grown = []
        for given in calls:
            shape = given["q"].shape[:-1]
            result = run(given)
            out, lse = result if given.get("return_lse") else (result, None)
            assert out.shape[:-1] == shape and out.is_contiguous()
            assert lse is None or lse.shape == (BATCH, HEADS, shape[1])
            grown.append(launches(recorded, given))
        assert len(launchers()) == 1
        of_growth, compiled[:] = [*compiled], []
        through_triton, recorded.through_triton = recorded.through_triton, 0
        for given, made in zip(calls, grown, strict=True):
            dispatch.calls.clear()
            run(given)
            wanted = launches(recorded, given)
            assert [kernel for kernel, _ in made] == [kernel for kernel, _ in wanted]
            for (_, ours), (_, theirs) in zip(made, wanted, strict=True):
                assert ours == theirs, given["q"].shape
        assert recorded.through_triton >= len(calls)
    assert compiled == [], "no length compiles what its growth did not"
    assert through_triton <= 2 * len(of_growth) + 4


@pytest.mark.parametrize("name", GROWTHS)
def test_a_known_call_is_launched_with_addresses(name: str) -> None:
    gpu, given_of = GROWTHS[name]
    with fake_gpu(gpu) as recorded, torch.no_grad():
        given = given_of(200)
        made = []
        for _ in range(3):
            run(given)
            made.append((launches(recorded, given), recorded.through_triton))
            recorded.through_triton = 0
    (first, slow), *others = made
    assert slow >= 1 and others == [(first, 0)] * 2


@pytest.mark.parametrize("granularity", ["head", "token"])
@pytest.mark.parametrize("of", ["h200", "a100"])
def test_scales_are_those_of_the_call(of: str, granularity: str) -> None:
    with fake_gpu(of) as recorded, torch.no_grad():
        for n in (200, 201, 202, 200):
            made = []
            for _ in range(2):
                given = quantised(n, granularity)
                run(given)
                made.append(launches(recorded, given))
            assert made[0] == made[1]


def test_a_day_of_lengths_compiles_few_variants(gpu: Recorded, compiled: list[str]) -> None:
    """Of prompts, steps of several queries and packed prompts of every length, in any order: no
    more than for the lengths that are decided for, once each."""
    rnd = random.Random(0)

    def day(lengths: list[int]) -> None:
        for n in lengths:
            for given in (prompt(n, causal=True), dense(1, n, "heads"), packed(n)):
                run(given)
                gpu.calls.clear()

    decided = [n for n in registry.decided_lengths(2048) if n]
    day(decided)
    variants = len(compiled)
    assert variants <= 30
    dispatch.calls.clear()
    gpu.through_triton = 0
    day([rnd.randint(1, 2048) for _ in range(400)])
    assert len(compiled) == variants
    assert gpu.through_triton <= 2 * variants


def test_an_edge_that_no_query_meets_is_dropped_at_each_length(gpu: Recorded) -> None:
    """A window of 78 keys is causal for prompts of up to 78, and not for others of the bucket."""
    kernels = {}
    for n in (73, 74, 78, 79, 80, 78, 79, 80, 81):
        run(prompt(n, causal=True, window_size=(77, 0)))
        ((_, args),) = gpu.calls
        kernels[n] = args[4], 77 in args
        gpu.calls.clear()
    assert {n: windowed for n, (_, windowed) in kernels.items()} == {n: n > 78 for n in kernels}
    assert kernels[78][0] != kernels[79][0]


def grown(given_of: Callable[[int], Given] = prompt) -> None:
    """Prompts of up to 256 tokens, and of some more, whose kernels are compiled."""
    for n in (*range(225, 257), 261, 262):
        run(given_of(n))


def test_a_new_length_is_neither_described_nor_planned(
    gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given_of in (prompt, packed):
        grown(given_of)
    gpu.through_triton = 0
    monkeypatch.setattr(attention_call, "describe_attention", pytest.fail)
    monkeypatch.setattr(dispatch, "make_plan", pytest.fail)
    monkeypatch.setattr(growing, "plan_at_length", pytest.fail)
    for given_of in (prompt, packed):
        for n in (256, 272, 250, 263):
            run(given_of(n))
    assert gpu.through_triton == 0


def test_a_new_number_of_sequences_is_neither_described_nor_planned(
    gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given_of in (steps, documents):
        for n in (*range(113, 121), 117):
            run(given_of(n))
    gpu.through_triton = 0
    monkeypatch.setattr(attention_call, "describe_attention", pytest.fail)
    monkeypatch.setattr(dispatch, "make_plan", pytest.fail)
    monkeypatch.setattr(growing, "plan_at_length", pytest.fail)
    for given_of in (steps, documents):
        for n in (119, 114, 116):
            run(given_of(n))
            assert functions_called(partial(run, given_of(n - 1))) <= MOST_CALLS + A_LAUNCH
    assert gpu.through_triton == 0


@pytest.mark.parametrize("name", ["cache_seqlens", "page_table", "cu_seqlens_q"])
def test_tensors_of_another_number_of_sequences_are_refused(name: str, gpu: Recorded) -> None:
    for n in range(113, 121):
        run(steps(n))
    given = steps(117)
    with pytest.raises(ValueError, match="expected"):
        run(given | {name: given[name][:-1]})


def test_slopes_of_each_sequence_are_bound_to_their_number(gpu: Recorded) -> None:
    """`alibi_slopes` [batch, heads]: a call with another number of them is bound anew."""
    for n in (*range(113, 121), 115):
        run(steps(n) | {"alibi_slopes": torch.ones(n, HEADS)})
    with pytest.raises(ValueError, match="alibi_slopes: expected"):
        run(steps(116) | {"alibi_slopes": torch.ones(115, HEADS)})


def test_lengths_that_come_again_are_known(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are kept, whatever their order."""
    grown()
    (launcher,) = launchers()
    assert len(launcher.known) >= 30
    monkeypatch.setattr(GrowingSequences, "launcher_of", pytest.fail)
    for n in (240, 250, 230, 240):
        run(prompt(n))
    monkeypatch.undo()
    monkeypatch.setattr(growing_sequences, "MAX_AGAIN", 5)
    for n in range(225, 257):
        run(prompt(n))
        run(prompt(n - 90))
    assert 0 < len(launcher.known) <= 5


@pytest.mark.parametrize("given_of", [prompt, packed, step])
def test_an_lse_that_nobody_reads_takes_no_memory(
    given_of: Callable[[int], Given], gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them go to one place, but for those of many rows; one that is asked for is new."""
    grown(given_of)
    unread = workspace.unread(torch.zeros(1))
    for n in (241, 250, 241):
        gpu.calls.clear()
        out = run(given_of(n))
        assert written_to(gpu) == (out.data_ptr(), unread)
    grown(partial(with_lse, given_of))
    gpu.calls.clear()
    out, lse = run(with_lse(given_of, 241))
    assert written_to(gpu) == (out.data_ptr(), lse.data_ptr()) and lse.data_ptr() != unread
    monkeypatch.setattr(sequences, "MOST_UNREAD", 100)
    monkeypatch.setattr(launch, "MOST_UNREAD", 100)
    gpu.calls.clear()
    run(given_of(270))
    assert written_to(gpu)[1] != unread


def with_lse(given_of: Callable[[int], Given], n: int) -> Given:
    return given_of(n) | {"return_lse": True}


def written_to(recorded: Recorded) -> tuple[int, int]:
    """The addresses of out and LSE that the only call had its first kernel write to."""
    (found,) = {
        x[:2]
        for name, args in recorded.calls
        for x in args
        if "prefill" in name and type(x) is tuple and len(x) == 3 and x[2] is None and x[0]
    }
    out, lse = found
    return out, lse


def test_nothing_is_made_for_an_unread_lse_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    like = SimpleNamespace(device="a GPU", is_cuda=True)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    assert workspace.unread(like) is None


def test_scales_of_each_token_have_the_length_of_their_keys(gpu: Recorded) -> None:
    """Also where calls differed in the number of queries before."""
    k, v = torch.zeros(2, BATCH, 200, KV_HEADS, DIM, dtype=torch.int8)
    given = {"k": k, "v": v, "k_scale": torch.ones(BATCH, 200, KV_HEADS)}
    given["v_scale"] = given["k_scale"].clone()
    for queries in (200, 190, 180, 170):
        run(given | {"q": torch.zeros(BATCH, queries, HEADS, DIM, dtype=torch.bfloat16)})
    k, v = torch.zeros(2, BATCH, 230, KV_HEADS, DIM, dtype=torch.int8)
    q = torch.zeros(BATCH, 170, HEADS, DIM, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="k_scale"):
        run(given | {"q": q, "k": k, "v": v})


@pytest.mark.parametrize("given_of", [prompt, packed, paged, step])
def test_few_functions_are_called_for_a_new_length(
    given_of: Callable[[int], Given], gpu: Recorded
) -> None:
    """Counted, as times depend on the machine."""
    grown(given_of)
    most = MOST_CALLS + A_LAUNCH * (given_of is step)
    for n in (272, 263, 270):
        assert functions_called(partial(run, given_of(n))) <= most


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": dense(9, 230)["v"]},
        {"k": dense(9, 230)["k"]},
        {"q": dense(241, 9)["q"][:1]},
        {"k": dense(9, 241)["k"].half()},
        {"out": torch.zeros(BATCH, 230, HEADS, DIM).bfloat16()},
        {"out": torch.zeros(1, 1, 1, 1).bfloat16().expand(BATCH, 241, HEADS, DIM)},
    ],
    ids=[
        "v shorter",
        "k shorter",
        "a sequence less",
        "another type",
        "out shorter",
        "out expanded",
    ],
)
def test_malformed_tensors_are_refused(wrong: Given, gpu: Recorded) -> None:
    grown()
    grown(lambda n: with_out(prompt(n)))
    with pytest.raises(ValueError, match="expected"):
        run(prompt(241) | wrong)


@pytest.mark.parametrize("wrong", [-1, True, 240.0, 1 << 30, None, 40 * 16 + 1])
def test_malformed_lengths_are_refused(wrong: Any, gpu: Recorded) -> None:
    for given_of, names in ((paged, ["max_seqlen_k"]), (packed, ["max_seqlen_q", "max_seqlen_k"])):
        grown(given_of)
        for name in names:
            if given_of is packed and wrong == 40 * 16 + 1:
                continue
            with pytest.raises(ValueError, match=f"{name}: expected"):
                run(given_of(241) | {name: wrong})


def test_no_queries_or_keys(gpu: Recorded) -> None:
    """They are served as before, between others."""
    for n in (200, 201, 202):
        run(prompt(n))
    for given in (dense(0, 5), dense(5, 0), dense(0, 0)):
        assert run(given).shape == given["q"].shape
    assert run(packed(8) | {"max_seqlen_q": 0, "max_seqlen_k": 0}).shape[0] == 13


def test_packed_lengths_need_not_be_those_of_tensors(gpu: Recorded) -> None:
    """The greatest lengths are bounds, and change with the tokens or without them."""
    given = packed(100)
    for longest in (100, 101, 500, 333, 100):
        here = given | {"max_seqlen_q": longest, "max_seqlen_k": longest}
        run(here)
        made = launches(gpu, here)
        dispatch_calls, dispatch.calls = dispatch.calls, type(dispatch.calls)()
        run(here)
        dispatch.calls = dispatch_calls
        assert made == launches(gpu, here)


def test_calls_that_record_gradients_have_a_launcher_of_their_own(gpu: Recorded) -> None:
    grown()
    with torch.enable_grad():
        given = prompt(241)
        out = run(given | {"q": given["q"].requires_grad_()})
    assert out.requires_grad and out.grad_fn is not None


def test_an_address_that_is_no_multiple_of_16(gpu: Recorded) -> None:
    grown()
    given = prompt(241)
    off = torch.zeros(given["q"].numel() + 1).bfloat16()[1:].view(given["q"].shape)
    gpu.through_triton = 0
    with pytest.warns(UserWarning, match="multiples of 16 bytes"):
        run(given | {"q": off})
    assert gpu.through_triton >= 1
    (launcher,) = launchers()
    assert len(launcher.buckets) == 5, "up to 232, 240, 248, 256 and 272"
    gpu.through_triton = 0
    run(prompt(242))
    run(given)
    assert gpu.through_triton == 0
    given = prompt(280)  # the first of its bucket
    off = torch.zeros(given["v"].numel() + 1).bfloat16()[1:].view(given["v"].shape)
    with pytest.warns(UserWarning, match="multiples of 16 bytes"):
        run(given | {"v": off})
    assert len(launcher.buckets) == 5


def test_a_launch_hook_sees_every_launch(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    grown()
    monkeypatch.setattr("splitkv.kernels.host.sequence_repeat.observed", lambda: True)
    monkeypatch.setattr("splitkv.kernels.host.sequences.observed", lambda: True)
    for n in (241, 242, 242):
        gpu.calls.clear()
        gpu.through_triton = 0
        run(prompt(n))
        assert gpu.through_triton == len(gpu.calls) > 0


def test_a_growing_step_has_its_next_bucket_ready(
    gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(225, 300):
        run(dense(1, n, "heads"))
    dispatch.calls.clear()
    planned = []
    plan_at = growing.plan_at_length

    def noted(plan: Any, problem: Any, *rest: Any) -> Any:
        planned.append((n, problem.seqlen_k))
        return plan_at(plan, problem, *rest)

    monkeypatch.setattr(growing, "plan_at_length", noted)
    for n in range(225, 300):
        run(dense(1, n, "heads"))
    ahead = {keys for n, keys in planned if registry.rounded_up(n) < keys}
    assert {272, 288, 304} <= ahead


def test_threads_with_different_lengths(gpu: Recorded) -> None:
    """Each launch has the lengths and strides of its own tensors."""
    grown()
    gpu.calls.clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def serve(first: int) -> None:
        for n in range(first, first + 40):
            run(prompt(n))

    threads = [threading.Thread(target=serve, args=(first,)) for first in (200, 210, 260)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        sys.setswitchinterval(before)
    assert len(gpu.calls) == 120
    for _, args in gpu.calls:
        maps = [n for n, x in enumerate(args) if isinstance(x, tuple) and x[:1] == ("map",)]
        lengths = {args[n + 2] for n in maps}  # of q, k, v and out
        assert len(lengths) == 1
        (length,) = lengths
        assert args[maps[-1] + 9 :].count(length) >= 2, "the run-time lengths are those of the maps"
