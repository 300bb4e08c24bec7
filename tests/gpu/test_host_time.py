"""What a call costs the host: the GPU must not wait for Python."""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import running
import torch
import triton
from running import DEVICE, HERE, SERVING

import splitkv
from splitkv import reference
from splitkv.core.options import defaults_of
from splitkv.flash_attn import cached_call, flash_attn_with_kvcache
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.runtime import append as append_calls
from splitkv.runtime import dispatch
from splitkv.runtime.append import append
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import Paged, assert_close, check, make_operands

DEFAULTS = defaults_of("decode")

alone = pytest.mark.alone

HOW = ("policy", "plan", "out", "one_split")
# What is ours of a call, beside allocating its result and launching its kernels. Hosts differ: the
# two launches alone took 9 us on one and 17 on another, and Python is as much slower there.
OWN_SHARE = 0.7
STEP_SHARE = 2.5  # of launching alone, for knowing a step again by all of its arguments, too
NEW_LENGTH_US, NEW_BUCKET_US = (
    25.0,
    200.0,
)  # of a length that no call had; and that plans differ for
GROWN_FROM, GROWN_STEPS, GROWN_PASSES = 1000, 600, 5
LAYOUTS = "heads", "slices", "lengths on the device"
CALLS, BATCHES, ROUNDS, PAUSE = 50, 100, 5, 0.5
SMALL = replace(SERVING, batch=1, seqlen_k=512)
FORWARD_US, BACKWARD_US = 40.0, 90.0  # of a training step's attention, in one thread of the host
PROBLEMS = {
    "plain": SMALL,
    "host_lengths": replace(SMALL, lengths="host", return_lse=False),
    "paged": replace(SMALL, place=Paged(16), batch=4, sink_logits=True),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here: filling what was allocated would be timed, also by launchers of earlier tests."""
    for module in (dispatch, cached_call, append_calls):
        module.calls.clear()


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def host_microseconds(*calls: Callable[[], Any], batches: int = BATCHES) -> list[float]:
    """The least over batches of the time of each call, the GPU idle at the start of each batch.

    They take turns. What else runs on a host only adds to a time, and for a second or so it may add
    to all of them, and not alike: so there are rounds of batches, some time apart.
    """
    least = [math.inf] * len(calls)
    for batch in range(-1, batches * ROUNDS):  # the first is not counted
        if batch > 0 and batch % batches == 0:
            time.sleep(PAUSE)
        for n, call in enumerate(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if batch >= 0:
                least[n] = min(least[n], (time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return least


def latest(calls: CallCache[Any]) -> Any:
    """The bound call that the first of the options were given last."""
    (_, _, bound), *_ = next(iter(calls.recent.values()))
    return bound


def written(tensors: tuple[Any, ...], call: dict[str, Any]) -> Callable[[], Any]:
    """decode with its arguments written out: to unpack them takes up to a microsecond."""
    arguments = ", ".join(("q, k, v", *(f"{name}={name}" for name in call)))
    names = {"decode": splitkv.decode, **dict(zip("qkv", tensors, strict=True)), **call}
    made: Callable[[], Any] = eval(f"lambda: decode({arguments})", names)
    return made


def parts(tensors: tuple[Any, ...], call: dict[str, Any]) -> list[Callable[[], Any]]:
    """A call, what it repeats once it is recognised, the same without launching, allocations."""
    decode = written(tensors, call)
    decode()
    cached = latest(dispatch.calls)
    repeated = cached.launcher.repeat
    names = ["out", "cache_seqlens", "page_table", "sink_logits", "alibi_slopes"]
    names += ["q_scale", "k_scale", "v_scale"]
    given = (*tensors, *(call.get(name) for name in names), cached.softmax_scale, 0.0)
    bound = repeated.__self__
    idle = copy.copy(bound)  # it does everything but launch
    idle.split = lambda *args: None
    idle.merge = bound.merge and idle.split
    allocations = [x for x in (bound.new_out, bound.new_lse) if x]
    return [decode, lambda: repeated(*given), lambda: idle.call(*given), *allocations]


def needed(total: float, repeat: float, unlaunched: float, *allocated: float) -> float:
    """Of the times of `parts`, what allocating and launching take."""
    return sum(allocated) + repeat - unlaunched


@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("name", PROBLEMS)
def test_decode_before_it_is_timed(name: str, num_splits: int) -> None:
    """It is right, and compiled beside other tests."""
    check(PROBLEMS[name], device=DEVICE, run=running.decode(num_splits=num_splits))


@alone
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", PROBLEMS)
def test_decode(name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Given what is not a default, as a caller writes it."""
    given = make_operands(PROBLEMS[name], device=DEVICE)
    tensors = tuple(given.pop(n) for n in ("q", "k_cache", "v_cache"))
    call = {
        option: x
        for option, x in given.items()
        if isinstance(x, torch.Tensor) or x != DEFAULTS[option]
    }
    if how == "plan":
        call["plan"] = splitkv.plan(*tensors, **call)
    elif how == "out":
        call["out"] = torch.empty_like(tensors[0])
    elif how == "one_split":
        call["num_splits"] = 1

    taken = host_microseconds(*parts(tensors, call))
    with capsys.disabled():
        told = f"total {taken[0]:.1f}, repeat {taken[1]:.1f}, needed {needed(*taken):.1f} us"
        print(f"\n  decode, {name}, {how}: {told} on the host", end="")
    assert taken[0] - needed(*taken) <= OWN_SHARE * needed(*taken)


@alone
@pytest.mark.parametrize("place", ["slots", "rotary"])
def test_append(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A token of each of four sequences; by slot mapping, and by page table with rotary and q."""
    token = torch.randn(4, 1, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k_cache, v_cache = torch.zeros(2, 64, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    call = Append(token, token.clone(), k_cache, v_cache)
    index = torch.arange(4, device=DEVICE, dtype=torch.int32)
    if place == "slots":
        call = call._replace(slots=index)
    else:
        angles = torch.rand(256, 64, device=DEVICE)
        table = torch.arange(64, device=DEVICE, dtype=torch.int32).view(4, 16)
        rotary = Rotary(angles.cos(), angles.sin(), interleaved=False)
        q = torch.randn(4, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
        call = call._replace(before=index, page_table=table, q=q, rotary=rotary)
    append(call)
    given = call.given
    launcher = latest(append_calls.calls).args[-1]  # behind what makes its device current
    taken, launch_alone = host_microseconds(lambda: append(call), lambda: launcher(call, given))
    with capsys.disabled():
        told = f"{taken:.1f} us on the host, launching it {launch_alone:.1f}"
        print(f"\n  append, {place}: {told}", end="")
    assert taken - launch_alone <= OWN_SHARE * launch_alone


@alone
def test_a_step_that_appends(capsys: pytest.CaptureFixture[str]) -> None:
    """flash_attn_with_kvcache with rotary, in one launch: the call is recognised by its arguments
    and not checked anew."""
    token = torch.randn(4, 1, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k_cache, v_cache = torch.zeros(2, 64, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    angles = torch.rand(256, 64, device=DEVICE)
    table = torch.arange(64, device=DEVICE, dtype=torch.int32).view(4, 16)
    lens = torch.arange(4, device=DEVICE, dtype=torch.int32)
    q = torch.randn(4, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    cos, sin = angles.cos(), angles.sin()
    call = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": lens, "page_table": table}
    tensors = q, k_cache, v_cache, token, token.clone()
    for _ in range(3):
        flash_attn_with_kvcache(*tensors, **call, causal=True)
    repeat = latest(cached_call.calls).bound.launcher.repeat
    new = Append(*tensors[3:], k_cache, v_cache, lens, rotary=Rotary(cos, sin, None, True))
    of_decode = q, k_cache, v_cache, None, lens, table, *[None] * 5
    taken, launch_alone = host_microseconds(
        lambda: flash_attn_with_kvcache(*tensors, **call, causal=True),
        lambda: repeat(*of_decode, 128**-0.5, 0.0, new),
    )
    with capsys.disabled():
        told = f"{taken:.1f} us on the host, launching it {launch_alone:.1f}"
        print(f"\n  flash_attn_with_kvcache, a step: {told}", end="")
    assert taken <= STEP_SHARE * launch_alone


def grown_cache(length: int, layout: str) -> tuple[torch.Tensor, ...]:
    """K and V of eight heads: as transformers concatenates them, or slices of a larger cache."""
    like: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    if layout == "heads":
        return tuple(x.transpose(1, 2) for x in torch.empty(2, 1, 8, length, 128, **like))
    room = torch.empty(2, 1, GROWN_FROM + GROWN_STEPS, 8, 128, **like)
    return tuple(x[:, :length] for x in room)


def lengths_of(layout: str) -> dict[str, Any]:
    """Where they are on the device, one sequence's."""
    if layout != "lengths on the device":
        return {}
    return {"cache_seqlens": torch.full((1,), GROWN_FROM, device=DEVICE, dtype=torch.int32)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_that_grows_before_it_is_timed(layout: str) -> None:
    """The last step is right, and all are compiled beside other tests."""
    dispatch.calls.clear()
    q = torch.randn(1, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    given = lengths_of(layout)
    for length in range(GROWN_FROM, GROWN_FROM + GROWN_STEPS):
        k, v = grown_cache(length, layout)
        splitkv.decode(q, k, v, **given)
    out = splitkv.decode(q, k.normal_(), v.normal_(), **given)
    (ref, _), (working, _) = (reference.decode(q, k, v, upcast=x, **given) for x in (True, False))
    assert_close(out, ref, working)


@alone
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_that_grows(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A key more in each of 600 steps. After a pass that compiles, the first step of another and
    the second, in which later ones are bound, are not counted; of each other the least time of
    several passes, all calls forgotten between them."""
    lengths = range(GROWN_FROM, GROWN_FROM + GROWN_STEPS)
    q = torch.randn(1, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    given = lengths_of(layout)
    compiled, first = list[str](), list[str]()
    taken = [math.inf] * GROWN_STEPS
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.fn.__name__)
        for each in range(1 + GROWN_PASSES):
            dispatch.calls.clear()
            if each == 1:
                first, compiled[:] = [*compiled], []
            for n, length in enumerate(lengths):
                cache = grown_cache(length, layout)
                torch.cuda.synchronize()
                start = time.perf_counter()
                splitkv.decode(q, *cache, **given)
                if each:
                    taken[n] = min(taken[n], (time.perf_counter() - start) * 1e6)
    bound, later = taken[:2], sorted(taken[2:])
    median, p99, worst = later[len(later) // 2], later[len(later) * 99 // 100], later[-1]
    with capsys.disabled():
        told = f"median {median:.1f}, 99 % {p99:.1f}, worst {worst:.0f} us on the host"
        told += f", the first two {bound[0]:.0f} and {bound[1]:.0f}"
        print(f"\n  decode, a cache that grows, {layout}: {told}; {len(first)} kernels", end="")
    assert compiled == []
    assert median <= NEW_LENGTH_US
    assert worst <= NEW_BUCKET_US


def prompt_of(name: str, length: int) -> Callable[[], Any]:
    """A call of attention on new tensors: prompts, one query against keys, packed prompts."""
    like: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    queries = 1 if name == "one query" else length
    if name == "packed":
        tokens = length + length // 2
        q, k, v = (torch.empty(tokens, heads, 128, **like) for heads in (32, 8, 8))
        cu = torch.tensor([0, length, tokens], device=DEVICE, dtype=torch.int32)
        rest = cu, cu, length, length
        return lambda: splitkv.attention_varlen(q, k, v, *rest, causal=True)
    q = torch.empty(1, queries, 32, 128, **like)
    k, v = torch.empty(2, 1, length, 8, 128, **like)
    return lambda: splitkv.attention(q, k, v, causal=True)


@alone
@pytest.mark.parametrize("name", ["prompts", "one query", "packed"])
def test_sequences_of_new_lengths(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """600 lengths in an order of their own, each another than the one before. After a pass that
    compiles and enters every bucket; of each the least time of several passes."""
    lengths = [GROWN_FROM + n * 7 % GROWN_STEPS for n in range(GROWN_STEPS)]
    compiled, taken = list[str](), [math.inf] * GROWN_STEPS
    with torch.no_grad(), triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.fn.__name__)
        for each in range(1 + GROWN_PASSES):
            if each == 1:
                compiled.clear()
            for n, length in enumerate(lengths):
                call = prompt_of(name, length)
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                if each:
                    taken[n] = min(taken[n], (time.perf_counter() - start) * 1e6)
    taken.sort()
    median, p99, worst = taken[len(taken) // 2], taken[len(taken) * 99 // 100], taken[-1]
    with capsys.disabled():
        told = f"median {median:.1f}, 99 % {p99:.1f}, worst {worst:.0f} us on the host"
        print(f"\n  attention of new lengths, {name}: {told}", end="")
    assert compiled == []
    assert worst <= NEW_BUCKET_US


def training_call(name: str) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """A forward that records gradients, and the tensors that it records them for."""
    like: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    lead = (512,) if name == "varlen" else (1, 512)
    q, k, v = (torch.randn(*lead, n, 128, **like).requires_grad_() for n in (32, 8, 8))
    leaves, options = [q, k, v], dict[str, Any]()
    if name == "varlen":
        cu = torch.tensor([0, 200, 512], device=DEVICE, dtype=torch.int32)
        rest = cu, cu.clone(), 312, 312
        return lambda: splitkv.attention_varlen(q, k, v, *rest, causal=True), leaves
    if name == "window":
        options["window_size"] = 127, 0
    if name == "sinks":
        options["sink_logits"] = torch.randn(32, **like).requires_grad_()
        leaves.append(options["sink_logits"])
    if name == "deterministic":
        options["deterministic"] = True
    return lambda: splitkv.attention(q, k, v, causal=True, **options), leaves


class Empty(torch.autograd.Function):
    """Does nothing but what every function of its tensors has autograd do: keeps them, makes a
    result, and gives gradients that were there before."""

    @staticmethod
    def forward(ctx: Any, grads: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*leaves)
        ctx.set_materialize_grads(False)
        ctx.grads = grads
        return torch.empty_like(leaves[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        assert ctx.saved_tensors
        return None, *ctx.grads


TRAINED = "dense", "varlen", "window", "sinks", "deterministic"


@pytest.mark.parametrize("name", TRAINED)
def test_training_before_it_is_timed(name: str) -> None:
    """Of finite numbers, and compiled beside other tests."""
    forward, leaves = training_call(name)
    out = forward()
    found = out, *torch.autograd.grad(out, leaves, torch.randn_like(out))
    assert all(x.isfinite().all() for x in found)


@alone
@pytest.mark.skipif(HERE.capability != (9, 0), reason="the limits are those of an H200's host")
@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Forward with gradients, and its backward, once both are known.

    The limit of a backward is one of what runs in its caller's thread. Autograd has a thread of its
    own for each GPU unless it is told otherwise, and to hand a backward over to that takes longer
    than all else that it does for a function that does nothing. Nobody can change that here, so
    what a backward takes there is printed beside such a function, and has no limit.
    """
    forward, leaves = training_call(name)
    grad = torch.randn_like(forward().detach())
    grads = tuple(torch.zeros_like(x) for x in leaves)

    def step() -> None:
        torch.autograd.grad(forward(), leaves, grad)

    def empty() -> torch.Tensor:
        made: torch.Tensor = Empty.apply(grads, *leaves)
        return made

    def empty_step() -> None:
        torch.autograd.grad(empty(), leaves, grad)

    calls = forward, step, empty, empty_step
    for _ in range(3):
        step()
        empty_step()
    taken, both, alone, both_alone = host_microseconds(*calls, batches=BATCHES // 5)
    backward, floor = both - taken, both_alone - alone
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = host_microseconds(*calls, batches=BATCHES // 5)
    own = one_thread[1] - one_thread[0], one_thread[3] - one_thread[2]
    told = f"forward {taken:.1f} us on the host, of a function that does nothing {alone:.1f}; "
    told += f"backward {backward:.1f} and {floor:.1f}, in one thread {own[0]:.1f} and {own[1]:.1f}"
    with capsys.disabled():
        print(f"\n  training, {name}: {told}", end="")
    assert taken <= FORWARD_US, told
    assert own[0] <= BACKWARD_US, told


@alone
@pytest.mark.parametrize("name", ["one tensor for both scales", "parameter", "no_grad"])
def test_harmless_repeats(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They take what a plain call takes, and little more."""
    given = make_operands(PROBLEMS["plain"], device=DEVICE)
    q, k, v = (given.pop(n) for n in ("q", "k_cache", "v_cache"))
    call: dict[str, Any] = {"cache_seqlens": given["cache_seqlens"]}
    other = dict(call)
    if name == "one tensor for both scales":
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        one, two = torch.ones(2, k.shape[2], device=DEVICE)
        call |= {"k_scale": one, "v_scale": two}
        other |= {"k_scale": one, "v_scale": one}
    tensors = q, k, v
    others = tensors
    if name == "parameter":
        others = torch.nn.Parameter(q, requires_grad=False), k, v
    if name == "no_grad":
        others = q.clone().requires_grad_(), k, v
    with torch.no_grad():
        plain, repeated = host_microseconds(written(tensors, call), written(others, other))
    with capsys.disabled():
        print(f"\n  decode, {name}: {repeated:.1f} us on the host, plain {plain:.1f}", end="")
    assert repeated <= 1.15 * plain
