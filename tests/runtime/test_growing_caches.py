"""Decode on contiguous caches that grow: a new length is launched with addresses, with the same
arguments as a launcher bound to it alone, and compiles nothing.

Kernels are those that a GPU of the table is asked to run, tensors are the CPU's, and nothing is
compiled or runs: see support/fake_gpu.py.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import triton
from fake_gpu import Recorded, fake_gpu, functions_called
from torch import Tensor

import splitkv
from splitkv.kernels.host import map_launch, tensor_maps
from splitkv.kernels.host.launcher import DecodeLauncher
from splitkv.planner import registry
from splitkv.planner.policies import persistent
from splitkv.runtime import dispatch
from splitkv.runtime import growing as growth
from splitkv.runtime.growing_caches import GrowingCaches

HEADS, KV_HEADS, DIM = 8, 2, 128
FIRST, STEPS = 500, 80  # three buckets
# Functions that Python calls for a new length, C functions counted; and where it makes ready a part
# of what the next bucket needs.
MOST_CALLS, MOST_CALLS_READY = 55, 230
STEPS_TO_A_BUCKET = 6
LEAST_ADDRESS = 1 << 24
Caches = dict[str, Any]


@pytest.fixture
def gpu() -> Iterator[Recorded]:
    with fake_gpu() as recorded, torch.no_grad():
        yield recorded


def of_heads(n: int, batch: int = 1, dim: int = DIM, dtype: Any = torch.bfloat16) -> Caches:
    """Caches as transformers makes them: concatenated along the keys of each head."""
    k, v = torch.zeros(2, batch, KV_HEADS, n, dim).to(dtype)
    return {"k_cache": k.transpose(1, 2), "v_cache": v.transpose(1, 2)}


def of_keys(n: int, batch: int = 1) -> Caches:
    k, v = torch.zeros(2, batch, n, KV_HEADS, DIM, dtype=torch.bfloat16)
    return {"k_cache": k, "v_cache": v}


ROOM = torch.zeros(2, 2, FIRST + STEPS, KV_HEADS, DIM, dtype=torch.bfloat16)


LENS = torch.zeros(1, dtype=torch.int32)
TABLE = torch.zeros(1, 40, dtype=torch.int32)
PAGES = dict.fromkeys(("k_cache", "v_cache"), torch.zeros(40, 16, KV_HEADS, DIM).bfloat16())


def in_room(n: int) -> Caches:
    return {"k_cache": ROOM[0, :, :n], "v_cache": ROOM[1, :, :n]}


def quantised(n: int, granularity: str, dtype: Any = torch.int8) -> Caches:
    shape = {"head": (KV_HEADS,), "token": (1, n, KV_HEADS)}[granularity]
    scales = {"k_scale": torch.ones(shape), "v_scale": torch.ones(shape)}
    return of_heads(n, dtype=dtype) | scales


GROWTHS: dict[str, tuple[str, Callable[[int], Caches]]] = {
    "heads": ("h200", of_heads),
    "heads of two sequences": ("h200", lambda n: of_heads(n, batch=2)),
    "keys": ("h200", of_keys),
    "slices": ("h200", in_room),
    "window": ("h200", lambda n: of_heads(n) | {"window_size": (200, 0), "sink_tokens": 4}),
    "lengths on the device": (
        "h200",
        lambda n: of_heads(n) | {"cache_seqlens": torch.zeros(1, dtype=torch.int32)},
    ),
    "sinks and lse": (
        "h200",
        lambda n: of_heads(n) | {"sink_logits": torch.zeros(HEADS), "return_lse": True},
    ),
    "slopes of two sequences": (
        "h200",
        lambda n: of_heads(n, batch=2) | {"alibi_slopes": torch.zeros(2, HEADS)},
    ),
    "queries in 8 bits": ("h200", lambda n: quantised_query(n, 1, HEADS)),
    "queries in 8 bits on another GPU": ("a100", lambda n: quantised_query(n, 1, 1, HEADS)),
    "splits of the caller": ("h200", lambda n: of_heads(n) | {"num_splits": 3}),
    "int8": ("h200", lambda n: quantised(n, "head")),
    "int8 by token": ("h200", lambda n: quantised(n, "token")),
    "e4m3 by token": ("h200", lambda n: quantised(n, "token", torch.float8_e4m3fn)),
    "fp32": ("h200", lambda n: of_heads(n, dtype=torch.float32)),
    "another GPU": ("a100", of_heads),
    "rows of 72": ("a100", lambda n: narrowed(of_heads(n, dim=72))),
}


def quantised_query(n: int, *shape: int) -> Caches:
    """Caches for a query of the same 8 bits, with scales of this shape."""
    return quantised(n, "head", torch.float8_e4m3fn) | {"q_scale": torch.zeros(shape)}


def narrowed(caches: Caches) -> Caches:
    """Columns of wider caches: strides of every other length are multiples of 16."""
    return {name: x[..., :64] for name, x in caches.items()}


def query(caches: Caches) -> Tensor:
    k = caches["k_cache"]
    dtype = torch.bfloat16 if k.element_size() == 1 and "q_scale" not in caches else k.dtype
    batch = 1 if "page_table" in caches else k.shape[0]
    return torch.zeros(batch, 1, HEADS, k.shape[3]).to(dtype)


def launches(recorded: Recorded) -> list[tuple[str, tuple[Any, ...]]]:
    """What was launched: grid, machine code and metadata, arguments but for results."""
    found = []
    for name, args in recorded.calls:
        grid, function, packed, flat = args[:3], args[4], args[7], args[11:]
        found.append((name, (*grid, function, packed, *(x for x in flat if not is_memory(x)))))
    recorded.calls.clear()
    return found


def in_maps(found: list[tuple[str, tuple[Any, ...]]], length: int) -> list[Any]:
    """Launches whose maps have this length in the place of that of the longest of its bucket, as
    those of slices do."""
    longest, made = registry.rounded_up(length), []
    for name, args in found:
        given = list(args)
        for at in [n for n, x in enumerate(args) if isinstance(x, tuple) and x[:1] == ("map",)]:
            sizes = slice(at + 1, at + 6)
            given[sizes] = [length if x == longest else x for x in given[sizes]]
        made.append((name, tuple(given)))
    return made


def is_memory(x: Any) -> bool:
    """Whether an argument has the address of results or of partials, which are new in each call."""
    if not isinstance(x, tuple) or x[:1] == ("map",):
        return False
    return any(type(item) is int and item >= LEAST_ADDRESS for item in x)


@pytest.mark.parametrize("name", GROWTHS)
def test_a_new_length_is_launched_as_if_bound_to_it(name: str, compiled: list[str]) -> None:
    gpu, caches_of = GROWTHS[name]
    with fake_gpu(gpu) as recorded, torch.no_grad():
        calls = [(query(c), c) for c in map(caches_of, range(FIRST, FIRST + STEPS))]
        grown = []
        for q, caches in calls:
            splitkv.decode(q, **caches)
            grown.append(in_maps(launches(recorded), caches["k_cache"].shape[1]))
        of_growth, compiled[:] = [*compiled], []
        through_triton, recorded.through_triton = recorded.through_triton, 0
        for (q, caches), made in zip(calls, grown, strict=True):
            dispatch.calls.clear()
            splitkv.decode(q, **caches)
            assert made == launches(recorded)
        assert recorded.through_triton >= STEPS
    assert compiled == [], "no length compiles what its growth did not"
    # a first call, one that serves all lengths, and one for each kernel that a bucket is first for
    assert through_triton <= 2 * len(of_growth) + 4 < STEPS


@pytest.mark.parametrize("codec", ["as is", "e4m3"])
def test_a_schedule_of_the_step_for_every_length(
    codec: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that have one wherever there is one, whatever that costs."""
    monkeypatch.setattr(persistent, "MOST_LONGER", math.inf)
    monkeypatch.setattr(registry, "_choices", {})
    lens = {"cache_seqlens": torch.zeros(2, dtype=torch.int32)}
    scales = {name: torch.ones(KV_HEADS) for name in ("k_scale", "v_scale")}

    def caches_of(n: int) -> Caches:
        if codec == "as is":
            return of_heads(n, batch=2) | lens
        return of_heads(n, batch=2, dtype=torch.float8_e4m3fn) | scales | lens

    with fake_gpu() as recorded, torch.no_grad():
        calls = [(query(c), c) for c in map(caches_of, range(FIRST, FIRST + STEPS))]
        grown = []
        for q, caches in calls:
            splitkv.decode(q, **caches)
            grown.append(without_addresses(launches(recorded)))
        of_growth, through_triton = len(compiled), recorded.through_triton
        for (q, caches), made in zip(calls, grown, strict=True):
            assert [name for name, _ in made] == ["decode_walk", "combine_slots"]
            dispatch.calls.clear()
            splitkv.decode(q, **caches)
            assert made == without_addresses(launches(recorded))
    assert len(compiled) == of_growth
    assert through_triton <= 2 * of_growth + 4 < STEPS


def without_addresses(
    found: list[tuple[str, tuple[Any, ...]]],
) -> list[tuple[str, tuple[Any, ...]]]:
    """Launches without what is as great as an address: a call's own schedule lies elsewhere."""
    small = lambda x: not isinstance(x, int) or x < 1 << 32  # noqa: E731
    return [(name, (*args[:3], *filter(small, args[5:]))) for name, args in found]


LENS = torch.zeros(1, dtype=torch.int32)
TABLE = torch.zeros(1, 40, dtype=torch.int32)
PAGES = dict.fromkeys(("k_cache", "v_cache"), torch.zeros(40, 16, KV_HEADS, DIM).bfloat16())
ROOMY = of_keys(FIRST + STEPS)
BOUNDED: dict[str, Caches] = {
    "host": ROOMY,
    "host, int8 by token": quantised(FIRST + STEPS, "token"),
    "device": ROOMY | {"cache_seqlens": LENS},
    "pages": PAGES | {"cache_seqlens": LENS, "page_table": TABLE},
}


@pytest.mark.parametrize("name", BOUNDED)
def test_the_greatest_length_may_change_in_every_step(
    name: str, gpu: Recorded, compiled: list[str]
) -> None:
    """max_seqlen_k is the length itself on the host, and with lengths on the device a bound that is
    rounded up to that of its bucket."""
    caches = BOUNDED[name]
    q = torch.zeros(1, 1, HEADS, DIM, dtype=torch.bfloat16)
    for n in range(FIRST, FIRST + STEPS):
        gpu.calls.clear()
        splitkv.decode(q, **caches, max_seqlen_k=n)
        (args, *_) = (args for kernel, args in gpu.calls if kernel.startswith("decode"))
        bound = n
        if not name.startswith("host") and n > FIRST:
            bound = min(registry.rounded_up(n), 40 * 16 if name == "pages" else FIRST + STEPS)
        assert bound in args[20:]
    assert gpu.through_triton <= 2 * len(compiled) + 8 < STEPS
    for wrong in (-1, 0.5, True, 40 * 16 + 1):
        with pytest.raises(ValueError, match="max_seqlen_k: expected"):
            splitkv.decode(q, **caches, max_seqlen_k=wrong)


def test_one_greatest_length_is_a_layout_of_its_own(gpu: Recorded) -> None:
    """Given again and again, nothing is cut to it or rounded."""
    q = torch.zeros(1, 1, HEADS, DIM, dtype=torch.bfloat16)
    for _ in range(3):
        splitkv.decode(q, **ROOMY, max_seqlen_k=FIRST + 1)
    ((options, _),) = dispatch.calls.recent
    assert options[0] == FIRST + 1


def test_a_day_of_lengths_compiles_few_variants(gpu: Recorded, compiled: list[str]) -> None:
    """What is compiled for every length up to 1024, and for longer ones now and then, in the order
    of their growth, is compiled for a length of each bucket."""
    longest = 20_000
    lengths = [*range(1, 1025), *range(1025, longest, 97)]
    room = torch.zeros(2, KV_HEADS * longest * DIM, dtype=torch.bfloat16)

    def decode(n: int) -> None:
        k, v = (x[: KV_HEADS * n * DIM].view(1, KV_HEADS, n, DIM).transpose(1, 2) for x in room)
        splitkv.decode(torch.zeros(1, 1, HEADS, DIM, dtype=torch.bfloat16), k, v)
        gpu.calls.clear()

    for n in registry.decided_lengths(longest):
        if n:
            decode(n)
    variants = len(compiled)
    assert variants <= 24
    dispatch.calls.clear()
    gpu.through_triton = 0
    for n in lengths:
        decode(n)
    assert len(compiled) == variants
    assert gpu.through_triton <= 2 * variants


def test_strides_are_told_apart_as_triton_does(compiled: list[str]) -> None:
    """Of every other length they are multiples of 16."""
    with fake_gpu("a100"), torch.no_grad():
        for n in range(FIRST, FIRST + 12):
            caches = narrowed(of_heads(n, dim=72))
            splitkv.decode(query(caches), **caches)
        (call,) = {id(b.launcher): b.launcher for b in bound_calls()}.values()
        assert len({alignment for alignment, _ in call.buckets}) == 2
        assert compiled.count("decode_split") == 2


def bound_calls() -> list[Any]:
    entries = [e for of_options in dispatch.calls.recent.values() for e in of_options]
    return [bound for *_, bound in entries if isinstance(bound.launcher, GrowingCaches)]


def growing(n: int = FIRST) -> tuple[Tensor, Caches]:
    """A call that is known to grow."""
    for length in (n - 2, n - 1, n):
        caches = of_heads(length)
        q = query(caches)
        splitkv.decode(q, **caches)
    return q, caches


def grown_again() -> Tensor:
    """A query for caches that grow from FIRST on, where a growth like it has compiled all."""
    for n in range(FIRST, FIRST + STEPS):
        splitkv.decode(query(of_heads(n)), **of_heads(n))
    dispatch.calls.clear()
    return growing()[0]


def test_few_functions_are_called_for_a_new_length(gpu: Recorded) -> None:
    """Counted, as times depend on the machine; also for the first length of a bucket."""
    q = grown_again()
    counts = {}
    bucket = registry.rounded_up(FIRST)
    for n in range(FIRST + 1, bucket + 4):
        counts[n] = functions_called(partial(splitkv.decode, q, **of_heads(n)))
    first = bucket - growth.AHEAD + 1
    ready = [counts.pop(n) for n in range(first, first + STEPS_TO_A_BUCKET)]
    assert max(counts.values()) <= MOST_CALLS
    assert min(ready) > MOST_CALLS and max(ready) <= MOST_CALLS_READY


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done for a bucket, in its order."""
    done: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: done.append(name) or function(*given, **named)

    plan, keep, init = growth.plan_at_length, DecodeLauncher.keep, DecodeLauncher.__init__
    monkeypatch.setattr(growth, "plan_at_length", noted("plan", plan))
    monkeypatch.setattr(DecodeLauncher, "__init__", noted("bind", init))
    monkeypatch.setattr(DecodeLauncher, "keep", noted("keep", keep))
    return done


def test_what_a_bucket_takes_is_done_once_and_in_steps(gpu: Recorded, steps: list[str]) -> None:
    q = grown_again()
    steps.clear()
    done: list[str] = []
    for n in range(FIRST + 1, FIRST + STEPS):
        splitkv.decode(q, **of_heads(n))
        assert len(steps) <= 1
        done += steps
        steps.clear()
    assert done == 3 * ["plan", "bind", "keep"], "of buckets up to 544, 576 and 608 keys"


# What is left of these after so many of six steps: the first describes the problem, the fourth and
# fifth find which kernels there are to keep.
LEFT = {0: 0, 1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3}


@pytest.mark.parametrize("begun", LEFT)
def test_a_bucket_that_nobody_was_near_takes_all_at_once(
    begun: int, gpu: Recorded, steps: list[str]
) -> None:
    """And what was begun for it is not begun again."""
    q, last = grown_again(), registry.rounded_up(FIRST)
    for n in range(last - begun + 1, last + 1):
        splitkv.decode(q, **of_heads(n))
    steps.clear()
    splitkv.decode(q, **of_heads(last + 1))
    assert steps == ["plan", "bind", "keep"][LEFT[begun] :]


def test_no_cache_is_held_for_a_bucket_to_come(gpu: Recorded) -> None:
    q, last = grown_again(), registry.rounded_up(FIRST)
    first = last - growth.AHEAD + 1
    for n in range(first, first + STEPS_TO_A_BUCKET):
        caches = of_heads(n)
        held = [weakref.ref(x) for x in caches.values()]
        splitkv.decode(q, **caches)
        del caches
        gc.collect()
        assert [x() for x in held] == [None, None]


def test_a_new_length_is_neither_described_nor_planned(
    gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, _ = growing(FIRST + 13)
    for name in ("run_decode", "describe_decode", "make_plan"):
        monkeypatch.setattr(dispatch, name, pytest.fail)
    monkeypatch.setattr(growth, "plan_at_length", pytest.fail)
    last = registry.rounded_up(FIRST + 14) - growth.AHEAD
    assert last - FIRST - 14 >= 6
    for n in range(FIRST + 14, last + 1):
        splitkv.decode(q, **of_heads(n))


def test_a_known_layout_keeps_its_own_check(gpu: Recorded) -> None:
    """A cache with room for all keys is of one layout, and nothing looks for its length."""
    caches = of_heads(FIRST)
    for _ in range(3):
        splitkv.decode(query(caches), **caches)
    assert bound_calls() == []


def test_a_gradient_that_nobody_records_is_no_length(gpu: Recorded) -> None:
    """Tensors that require one under no_grad are of a layout of their own, and repeat as others."""
    caches = of_heads(FIRST)
    q = query(caches)
    for given in (q, q.clone().requires_grad_(), q, q.clone().requires_grad_()):
        splitkv.decode(given, **caches)
    entries = [entry for of_options in dispatch.calls.recent.values() for entry in of_options]
    assert sorted(str(grad_mode) for _, grad_mode, _ in entries) == ["False", "None"]
    assert bound_calls() == []
    assert all(bound.launcher.repeat is not None for *_, bound in entries)


@pytest.mark.parametrize(
    "wrong",
    [
        {"v_cache": of_heads(FIRST)["v_cache"]},
        {"k_cache": of_heads(FIRST)["k_cache"]},
        {"v_cache": of_heads(FIRST + 9, batch=2)["v_cache"]},
        {"k_cache": of_heads(FIRST + 9, dtype=torch.float16)["k_cache"]},
        {"k_cache": of_heads(FIRST + 9)["k_cache"][:, :, :1]},
    ],
    ids=["v shorter", "k shorter", "more of v", "another type", "a head"],
)
def test_malformed_caches_are_refused(wrong: Caches, gpu: Recorded) -> None:
    q, _ = growing()
    with pytest.raises(ValueError, match="expected"):
        splitkv.decode(q, **of_heads(FIRST + 9) | wrong)


def test_scales_of_other_lengths_are_refused(gpu: Recorded) -> None:
    for n in range(FIRST, FIRST + 3):
        caches = quantised(n, "token")
        splitkv.decode(query(caches), **caches)
    with pytest.raises(ValueError, match="k_scale"):
        splitkv.decode(query(caches), **caches | {"k_scale": torch.ones(1, FIRST, KV_HEADS)})


def test_a_single_scale_is_not_one_of_a_token(gpu: Recorded) -> None:
    """With one key and one KV head both have one element."""
    q = torch.zeros(1, 1, HEADS, DIM, dtype=torch.bfloat16)
    for n in (1, 2, 3, 1, 4, 1):
        gpu.calls.clear()
        k, v = torch.zeros(2, 1, n, 1, DIM, dtype=torch.int8)
        given = {"k_scale": torch.ones(1, n, 1), "v_scale": torch.ones(1, n, 1)}
        splitkv.decode(q, k, v, **given)
        grown = launches(gpu)
        dispatch_calls, dispatch.calls = dispatch.calls, type(dispatch.calls)()
        splitkv.decode(q, k, v, **given)
        dispatch.calls = dispatch_calls
        assert grown == launches(gpu)


def off_by_an_element(n: int) -> Tensor:
    """Keys as those of `of_heads` at an address that is no multiple of 16."""
    memory = torch.zeros(KV_HEADS * n * DIM + 1, dtype=torch.bfloat16)[1:]
    return memory.view(1, KV_HEADS, n, DIM).transpose(1, 2)


def test_an_address_that_is_no_multiple_of_16(gpu: Recorded) -> None:
    """It is launched through Triton, with the strides of its own length."""
    q, _ = growing()
    for n in (FIRST + 3, FIRST + 4):
        k = off_by_an_element(n)
        gpu.calls.clear()
        gpu.through_triton = 0
        with pytest.warns(UserWarning, match="multiples of 16 bytes"):
            splitkv.decode(q, k, of_heads(n)["v_cache"])
        assert gpu.through_triton >= 1
        (_, args), *_ = gpu.calls
        assert n in args and k.data_ptr() in [x for t in args if isinstance(t, tuple) for x in t]
    q, caches = growing(FIRST + 9)
    gpu.through_triton = 0
    splitkv.decode(q, **caches)
    assert gpu.through_triton == 0


def test_a_known_cache_off_by_an_element_has_as_many_keys(gpu: Recorded) -> None:
    """And not those that the plan of its layout was made for."""
    caches = of_heads(FIRST)
    for off in (False, True):
        gpu.calls.clear()
        if not off:
            splitkv.decode(query(caches), **caches)
        else:
            with pytest.warns(UserWarning, match="multiples of 16 bytes"):
                splitkv.decode(query(caches), off_by_an_element(FIRST), caches["v_cache"])
        (_, args), *_ = gpu.calls
        assert FIRST in args and registry.rounded_up(FIRST) not in args[20:]


def test_an_address_that_is_no_multiple_of_16_decides_for_itself_alone(
    gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later cache of the same layout has the kernel that it would have had without it."""
    monkeypatch.setattr(dispatch, "_unfit", lambda operands, kernel: kernel.unfit(operands))
    q, _ = growing()
    aligned = of_heads(FIRST + STEPS)
    splitkv.decode(q, off_by_an_element(FIRST + STEPS), aligned["v_cache"])
    gpu.calls.clear()
    splitkv.decode(q, **aligned)
    made = launches(gpu)
    dispatch.calls.clear()
    splitkv.decode(q, **aligned)
    assert made == launches(gpu)


@pytest.mark.parametrize("of", ["h200", "a100"])
def test_results_are_where_the_caller_s_strides_say(of: str) -> None:
    """Whatever was compiled for those of another call."""
    with fake_gpu(of) as gpu, torch.no_grad():
        shape = 2, 2, HEADS, DIM
        q, out = torch.zeros(2, *shape, dtype=torch.bfloat16)
        heads_first = torch.zeros_like(out.transpose(1, 2).contiguous()).transpose(1, 2)
        for x in (out, heads_first):
            for n in range(FIRST, FIRST + STEPS):
                gpu.calls.clear()
                splitkv.decode(q, **of_heads(n, batch=2), out=x)
                assert x.stride()[:3] in gpu.calls[0][1]


def test_a_launch_hook_sees_every_launch(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    q, _ = growing()
    monkeypatch.setattr("splitkv.kernels.host.decode_repeat.ENTER_HOOKS", [None])
    gpu.through_triton = 0
    for n in (FIRST + 1, FIRST + 2):
        gpu.calls.clear()
        splitkv.decode(q, **of_heads(n))
        assert gpu.through_triton == len(gpu.calls) > 0
        gpu.through_triton = 0


def test_maps_of_lengths_are_forgotten(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the length, and of one length where there are too many."""
    for module in (tensor_maps, map_launch):
        monkeypatch.setattr(module, "MAX_MAPS", 3)
    kept = len(tensor_maps._made)
    q, _ = growing()
    for n in (FIRST + 1, FIRST + 2):
        for _ in range(7):
            splitkv.decode(q, **of_heads(n))
    assert len(tensor_maps._made) <= kept + 6
    tile = tensor_maps.Tile(lambda address, *layout: ("map", address), (0, 2, 1, [1]))
    maps = tensor_maps.MapsOfLength(tile, (8,), (1,))
    for address in range(16, 320, 16):
        assert maps[address][1:] == (8, 1)
        assert 0 < len(maps) <= 3


def maps_of(gpu: Recorded) -> list[tuple[int, int]]:
    """The addresses that the last split has maps of, and the keys of each in them."""
    (args, *_) = (args for name, args in gpu.calls[::-1] if name.startswith("decode"))
    at = [n for n, x in enumerate(args) if isinstance(x, tuple) and x[:1] == ("map",)]
    return [(args[n][1], args[n + 2]) for n in at]


def test_slices_have_the_maps_of_their_bucket(
    gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made once for all its lengths; of caches of just one length for each."""
    asked: list[tuple[int, int]] = []

    def fill(address: int, *layout: Any) -> tuple[str, int]:
        asked.append((address, layout[-3][1]))
        return "map", address

    utils = triton.runtime.driver.active.utils
    for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):
        monkeypatch.setattr(utils, name, fill)
    longest = registry.rounded_up(FIRST + 5)
    for n in range(FIRST, longest + 1):
        splitkv.decode(query(in_room(n)), **in_room(n))
        if n >= FIRST + 5:
            assert [keys for _, keys in maps_of(gpu)] == [longest, longest]
    of_bucket = [address for address, keys in asked if keys == longest]
    assert of_bucket == [x.data_ptr() for x in in_room(longest).values()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0, 1)])
def test_no_map_goes_on_behind_the_memory(order: tuple[int, ...], gpu: Recorded) -> None:
    """The caches of two layers have one layout; those of the last end with all memory. In the same
    step those of the first may have the maps of just that length, too."""
    capacity = registry.rounded_up(FIRST) - 2
    layers = torch.zeros(2, 2, capacity, KV_HEADS, DIM, dtype=torch.bfloat16)
    q = torch.zeros(1, 1, HEADS, DIM, dtype=torch.bfloat16)
    for n in range(FIRST, capacity + 1):
        for layer in order:
            k, v = (x[None, :n] for x in layers[layer])
            splitkv.decode(q, k, v)
            if n > FIRST + 2:
                (k_map, v_map), longest = maps_of(gpu), capacity + 2
                assert (k_map[0], v_map[0]) == (k.data_ptr(), v.data_ptr())
                assert k_map[1] == v_map[1] == n or (layer == 0 and k_map[1] == longest)


def test_threads_that_grow_at_different_lengths(gpu: Recorded) -> None:
    """Each launch has the length and strides of its own caches."""
    q, _ = growing()
    gpu.calls.clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def grow(first: int) -> None:
        for n in range(first, first + 60):
            splitkv.decode(q, **of_heads(n))

    threads = [threading.Thread(target=grow, args=(first,)) for first in (510, 520, 560)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        sys.setswitchinterval(before)
    splits = [args for name, args in gpu.calls if name.startswith("decode")]
    assert len(splits) == 180
    for args in splits:
        at = next(n for n, x in enumerate(args) if isinstance(x, tuple) and x[:1] == ("map",))
        length = args[at + 2]
        assert 510 <= length < 620 and length * DIM in args[at:]
        assert length in args[at + 20 :], "the run-time length is that of the maps"


def test_what_has_no_shape_is_described(gpu: Recorded) -> None:
    """And refused there, also where a GPU is."""
    q, caches = growing()
    for wrong in ([1.0], None, torch.zeros(())):
        for name in ("k_cache", "v_cache"):
            for more in ({}, {"max_seqlen_k": 3}):
                with pytest.raises(ValueError, match="expected"):
                    splitkv.decode(q, **caches | {name: wrong} | more)
