"""A training step after the first: its kernels are launched with addresses, and with the same
arguments as through Triton.

Kernels are those that an H200 is asked to run, tensors are the CPU's, and nothing is compiled or
runs: see support/fake_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu import Recorded, fake_gpu, functions_called
from torch import Tensor

import splitkv
from splitkv.kernels.backward.records import Saved
from splitkv.kernels.hopper.backward import launcher as hopper_backward
from splitkv.kernels.hopper.backward.launches import Workspace
from splitkv.kernels.hopper.backward.relaunch import BackwardRelaunch
from splitkv.kernels.host import workspace

HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 128, 16
LEAST_ADDRESS = 1 << 24
# Functions that Python calls for one step in which everything is known: C functions counted, too.
MOST_CALLS = 234


@pytest.fixture
def gpu() -> Iterator[Recorded]:
    with fake_gpu() as recorded:
        yield recorded


def packed(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def dense(tokens: int = TOKENS, **options: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    q, k, v = (packed(2, tokens, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    return partial(splitkv.attention, q, k, v, **{"causal": True} | options), leaves


def varlen() -> tuple[Callable[..., Any], list[Tensor]]:
    q, k, v = (packed(TOKENS, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    cu = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    rest = cu, cu.clone(), TOKENS, TOKENS
    return partial(splitkv.attention_varlen, q, k, v, *rest, causal=True), [q, k, v]


CALLS: dict[str, Callable[[], tuple[Callable[..., Any], list[Tensor]]]] = {
    "dense": dense,
    "varlen": varlen,
    "window": lambda: dense(window_size=(7, 0)),
    "sinks": lambda: dense(sink_logits=packed(HEADS)),
    "deterministic": lambda: dense(deterministic=True),
    "turns": lambda: dense(causal=False, deterministic=True),
    "rows_split": lambda: dense(512, sink_logits=packed(HEADS)),
    "deterministic_rows_split": lambda: dense(512, sink_logits=packed(HEADS), deterministic=True),
}


def named(
    calls: list[tuple[str, tuple[Any, ...]]], tensors: list[Tensor]
) -> list[tuple[str, tuple[Any, ...]]]:
    """The launches with names for addresses: of the tensors, and others as they first appear."""
    names = {x.data_ptr(): f"tensor {n}" for n, x in enumerate(tensors)}

    def name(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(name, x))
        if type(x) is int and x >= LEAST_ADDRESS:
            return names.setdefault(x, f"memory {len(names)}")
        return x

    return [(kernel, name(tuple(_comparable(args)))) for kernel, args in calls]


def _comparable(args: tuple[Any, ...]) -> Iterator[Any]:
    """Hooks and metadata of a launch are none where nobody looks at them."""
    grid_and_stream, rest = args[:4], args[4:]
    yield grid_and_stream
    function, *_ = rest
    yield function
    yield from rest[7:]


@pytest.mark.parametrize("name", CALLS)
def test_a_step_again_is_the_first(name: str, gpu: Recorded) -> None:
    forward, leaves = CALLS[name]()
    grad = torch.randn_like(forward().detach())
    steps = []
    for _ in range(3):
        gpu.calls.clear()
        gpu.through_triton = 0
        out = forward()
        of_forward = len(gpu.calls)
        grads = torch.autograd.grad(out, leaves, grad)
        backward = named(gpu.calls[of_forward:], [*leaves, grad, out, *grads])
        steps.append((backward, gpu.through_triton))
    (first, slow), (second, quick), (third, quick_too) = steps
    assert slow >= 3 and quick == quick_too == 0
    assert [kernel for kernel, _ in first] == [kernel for kernel, _ in second]
    for (kernel, wanted), (_, made), (_, again) in zip(first, second, third, strict=True):
        assert made == wanted, kernel
        assert again == wanted, kernel


def test_one_tensor_as_keys_and_values_is_not_taken_for_two(gpu: Recorded) -> None:
    """The launcher is that of the layout; addresses are by name and not by what they were."""
    q, x, y = packed(2, TOKENS, HEADS, DIM), *(packed(2, TOKENS, HEADS, DIM) for _ in range(2))
    grad = torch.randn(q.shape, dtype=q.dtype)
    for k, v in ((x, x), (x, y), (q, y)):
        gpu.calls.clear()
        out = splitkv.attention(q, k, v)
        torch.autograd.grad(out, [q, *dict.fromkeys((k, v))][:2], grad, allow_unused=True)
        (args,) = (args for kernel, args in gpu.calls if kernel == "hopper_backward")
        maps = [arg[1] for arg in args if isinstance(arg, tuple) and arg[:1] == ("map",)]
        assert maps[:4] == [t.data_ptr() for t in (q, grad, k, v)]


def test_gradients_that_tma_cannot_describe_are_copied(gpu: Recorded) -> None:
    """As those of a sum, which are expanded: strides of 0 in the last dimension; and as those at
    other addresses than multiples of 16."""
    forward, leaves = dense()
    grad = torch.randn_like(forward().detach())
    torch.autograd.grad(forward(), leaves, grad)
    off = torch.randn(grad.numel() + 1, dtype=grad.dtype)[1:].view(grad.shape)
    for given in (grad[:1, :1, :1, :1].expand(grad.shape), off):
        gpu.calls.clear()
        gpu.through_triton = 0
        torch.autograd.grad(forward(), leaves, given)
        assert gpu.through_triton == 0
        (args,) = (args for kernel, args in gpu.calls if kernel == "hopper_backward")
        at = next(arg[1] for arg in args[9:] if isinstance(arg, tuple) and arg[0] == "map")
        assert at % 16 == 0 and at != given.data_ptr()


def test_addresses_that_are_no_multiples_of_16(gpu: Recorded) -> None:
    """They are other specialisations."""
    sinks = torch.randn(HEADS + 1)[1:].requires_grad_()
    forward, leaves = dense(sink_logits=sinks)
    grad = torch.randn_like(forward().detach())
    for _ in range(2):
        out = forward()
        gpu.through_triton = 0
        torch.autograd.grad(out, leaves, grad)
        assert gpu.through_triton == 3


@pytest.mark.parametrize("of_lse", [False, True], ids=["", "of_lse"])
@pytest.mark.parametrize("name", CALLS)
def test_a_backward_is_three_launches(name: str, of_lse: bool, gpu: Recorded) -> None:
    """Also where rows are split among programs, and beside sinks; no operation of torch but
    allocations, which tests fill."""
    forward, leaves = CALLS[name]()
    for _ in range(3):
        out, lse = forward(return_lse=True)
        grads = [torch.randn_like(x.detach()) for x in (out, lse)][: 1 + of_lse]
        gpu.calls.clear()
        torch.autograd.grad([out, lse][: 1 + of_lse], leaves, grads, retain_graph=True)
    kernels = [kernel for kernel, _ in gpu.calls]
    last = "queries" if name.startswith("deterministic") else "finish"
    assert kernels == ["backward_rows", "hopper_backward", f"hopper_backward_{last}"]
    with torch.profiler.profile() as profile:
        torch.autograd.grad([out, lse][: 1 + of_lse], leaves, grads)
    made = {event.name for event in profile.events() if event.name.startswith("aten::")}
    assert made <= {"aten::empty", "aten::empty_strided", "aten::detach", "aten::fill_"}


def test_a_launch_hook_sees_every_launch(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, leaves = dense()
    grad = torch.randn_like(forward().detach())
    for _ in range(2):
        torch.autograd.grad(forward(), leaves, grad)
    monkeypatch.setattr("splitkv.kernels.host.sequence_repeat.observed", lambda: True)
    for module in ("launcher", "relaunch"):
        monkeypatch.setattr(f"splitkv.kernels.hopper.backward.{module}.observed", lambda: True)
    gpu.through_triton = 0
    torch.autograd.grad(forward(), leaves, grad)
    assert gpu.through_triton >= 3


def test_nothing_is_bound_twice(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, leaves = dense()
    grad = torch.randn_like(forward().detach())
    for _ in range(2):
        torch.autograd.grad(forward(), leaves, grad)
    for name in ("GradientCall", "sizes_of", "launches_of", "allocate_backward"):
        monkeypatch.setattr(hopper_backward, name, pytest.fail)
    torch.autograd.grad(forward(), leaves, grad)


def relaunch_of(name: str, gpu: Recorded) -> tuple[BackwardRelaunch, Callable[[], list[Any]]]:
    """What launches the backward of a call again, and a function that has it do so on the same
    tensors and says what was launched."""
    forward, leaves = CALLS[name]()
    for _ in range(2):
        out = forward()
        torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    ctx: Any = out.grad_fn
    (again,) = ctx.launcher.backward_again.values()
    kept, scale, grad = Saved(*ctx.saved_tensors), ctx.scalars[0], torch.ones_like(out)

    def call() -> list[Any]:
        gpu.calls.clear()
        found = again.call(kept, grad, None, scale)
        return named(gpu.calls, [*leaves, grad, out, *(x for x in found if x is not None)])

    return again, call


@pytest.mark.parametrize("name", CALLS)
def test_what_is_launched_follows_the_addresses(
    name: str, gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was kept from a call with the same, or not."""
    again, call = relaunch_of(name, gpu)
    fresh = call()
    addresses = iter(range(1 << 30, 1 << 40, 1 << 12))
    monkeypatch.setattr(Tensor, "data_ptr", lambda x: next(addresses))
    monkeypatch.setattr("splitkv.kernels.hopper.backward.relaunch.MOST_PACKED", 2)
    for _ in range(5):
        launched = call()
        assert [kernel for kernel, _ in launched] == [kernel for kernel, _ in fresh]
        assert len(again.packed) <= 2
    first = 1 << 30
    monkeypatch.setattr(Tensor, "data_ptr", lambda x: first)
    assert call() == call()
    monkeypatch.setattr(again, "pack", pytest.fail)
    assert call() == call()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "too large to keep"])
def test_a_workspace_stays_with_its_stream_where_it_is_small(
    kept: bool, gpu: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr("splitkv.kernels.hopper.backward.relaunch.MOST_KEPT", 1000)
    again, call = relaunch_of("dense", gpu)
    workspace.release()
    call()
    if not kept:
        assert workspace.held_bytes() == 0
        return
    (buffer,) = again.buffers.values()
    at, numel, _ = buffer
    assert at == list(again.packed)[-1][-1] and again.numel <= numel < 2 * again.numel
    call()
    assert [*again.buffers.values()] == [buffer]
    in_graph = []

    def made(device: Any, numel: int, captured: bool) -> workspace.Buffer:
        in_graph.append((numel, captured))
        memory = torch.empty(numel)
        return memory.data_ptr(), numel, memory

    monkeypatch.setattr(again, "capturing", lambda: True)
    monkeypatch.setattr(workspace, "make_buffer", made)
    call()
    assert in_graph == [(again.numel, True)] and [*again.buffers.values()] == [buffer]


def test_tensors_that_were_changed_in_place_are_refused(gpu: Recorded) -> None:
    for changed in range(4):
        forward, leaves = CALLS["sinks"]()
        out = forward()
        with torch.no_grad():
            leaves[changed].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_tensors_that_hooks_have_saved_elsewhere_have_strides_of_their_own(gpu: Recorded) -> None:
    """As `save_on_cpu` brings slices back without the gaps between; and slices without hooks have
    theirs, before and after."""
    qkv = packed(2, TOKENS, HEADS + 2 * KV_HEADS, DIM)
    parts = qkv.split((HEADS, KV_HEADS, KV_HEADS), 2)
    grad = torch.randn(2, TOKENS, HEADS, DIM, dtype=qkv.dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks
    for moved in (False, False, True, True, False):
        with hooks(Tensor.contiguous, lambda x: x) if moved else nullcontext():
            out = splitkv.attention(*parts)
        gpu.calls.clear()
        (found,) = torch.autograd.grad(out, qkv, grad)
        assert found.shape == qkv.shape
        (args,) = (args for kernel, args in gpu.calls if kernel == "hopper_backward")
        maps = [n for n, x in enumerate(args) if isinstance(x, tuple) and x[:1] == ("map",)]
        for n, x in zip((maps[0], *maps[2:4]), parts, strict=True):
            strides = x.contiguous().stride() if moved else x.stride()
            assert args[n + 1 : n + 9] == (*x.shape, *strides)


def test_a_gradient_of_the_lse_in_another_type_is_converted(gpu: Recorded) -> None:
    q, k, v = (x.detach() for x in dense()[1])
    out, lse = splitkv.attention(q, k, v, return_lse=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        grad_lse = torch.zeros_like(lse, dtype=dtype)
        gpu.calls.clear()
        splitkv.distributed.attention_backward(out, q, k, v, out, lse, grad_lse=grad_lse)
        (args,) = (args for kernel, args in gpu.calls if kernel == "backward_rows")
        given = [x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,))]
        assert (grad_lse.data_ptr() in given) == (dtype == torch.float32)


def test_the_lse_is_a_result_of_autograd_where_it_is_asked_for(gpu: Recorded) -> None:
    forward, leaves = dense()
    for _ in range(2):
        out, lse = forward(return_lse=True)
        assert lse.requires_grad and lse.grad_fn is out.grad_fn
        grads = torch.autograd.grad(lse, leaves, torch.ones_like(lse))
        assert [x.shape for x in grads] == [x.shape for x in leaves]


def test_a_transform_of_functorch_is_refused_by_torch(gpu: Recorded) -> None:
    """Which says what it needs."""
    forward, _ = dense()
    for _ in range(2):
        forward()
    gpu.calls.clear()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: x * forward().float().sum())(torch.ones(()))
    assert gpu.calls == []


@pytest.mark.parametrize("name", CALLS)
def test_a_step_takes_few_function_calls(name: str, gpu: Recorded) -> None:
    """Counted, as times depend on the machine."""

    forward, leaves = CALLS[name]()
    grad = torch.randn_like(forward().detach())

    def step() -> None:
        torch.autograd.grad(forward(), leaves, grad)

    for _ in range(3):
        step()
    assert functions_called(step) <= MOST_CALLS


def test_pieces_of_the_workspace_lie_apart() -> None:
    pieces = Workspace()
    sizes = {"clear": 8192, "total": 33, "delta": 33, "sink_sums": 70, "split": 5}
    for name, numel in sizes.items():
        pieces.add(name, numel)
    pieces.add_inside("turns", "clear", 8000, 100)
    views = pieces.views(torch.zeros(pieces.numel))
    assert {name: x.numel() for name, x in views.items()} == sizes | {"turns": 100}
    turns = views.pop("turns")
    assert turns.dtype == torch.int32
    for number, x in enumerate(views.values(), 1):
        x += number
        assert x.data_ptr() % 128 == views["clear"].data_ptr() % 128
    turns.zero_()
    assert all((x == number).all() for number, x in enumerate(views.values(), 1) if number > 1)
    assert views["clear"].sum() == 8092
