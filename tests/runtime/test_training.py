"""A training step after the first: its kernels are launched with addresses, and with the same
arguments as through Triton.

Kernels are compiled for an H200, tensors are the CPU's, and nothing runs: see support/fake_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import Recorded, fake_gpu, functions_called
from torch import Tensor

import splitkv
from splitkv.kernels.backward.records import GradientTensors, Stats
from splitkv.kernels.hopper.backward import launcher as hopper_backward
from splitkv.kernels.hopper.backward.relaunch import BackwardRelaunch, Workspace
from splitkv.kernels.host import relaunch

HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 128, 16
LEAST_ADDRESS = 1 << 24
# Functions that Python calls for one step in which everything is known: C functions counted, too.
MOST_CALLS = 300


@pytest.fixture
def gpu() -> Iterator[Recorded]:
    with fake_gpu() as recorded:
        yield recorded


def packed(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def dense(**options: Any) -> tuple[Callable[[], Tensor], list[Tensor]]:
    q, k, v = (packed(2, TOKENS, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    return lambda: splitkv.attention(q, k, v, causal=True, **options), leaves


def varlen() -> tuple[Callable[[], Tensor], list[Tensor]]:
    q, k, v = (packed(TOKENS, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    cu = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    rest = cu, cu.clone(), TOKENS, TOKENS
    return lambda: splitkv.attention_varlen(q, k, v, *rest, causal=True), [q, k, v]


CALLS: dict[str, Callable[[], tuple[Callable[[], Tensor], list[Tensor]]]] = {
    "dense": dense,
    "varlen": varlen,
    "window": lambda: dense(window_size=(7, 0)),
    "sinks": lambda: dense(sink_logits=packed(HEADS)),
    "deterministic": lambda: dense(deterministic=True),
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


def test_gradients_that_tma_cannot_describe_go_through_triton(gpu: Recorded) -> None:
    """As those of a sum, which are expanded: strides of 0 in the last dimension."""
    forward, leaves = dense()
    for _ in range(2):
        gpu.through_triton = 0
        torch.autograd.grad(forward().sum(), leaves)
        assert gpu.through_triton >= 3


def test_addresses_that_are_no_multiples_of_16(gpu: Recorded) -> None:
    """They are other specialisations, and of q, k and v another kernel."""
    forward, leaves = dense()
    grad = torch.randn_like(forward().detach())
    for _ in range(2):
        torch.autograd.grad(forward(), leaves, grad)
    off = torch.randn(grad.numel() + 1, dtype=grad.dtype)[1:].view(grad.shape)
    gpu.through_triton = 0
    torch.autograd.grad(forward(), leaves, off)
    assert gpu.through_triton >= 3


def test_a_launch_hook_sees_every_launch(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, leaves = dense()
    grad = torch.randn_like(forward().detach())
    for _ in range(2):
        torch.autograd.grad(forward(), leaves, grad)
    monkeypatch.setattr(relaunch, "observed", lambda: True)
    monkeypatch.setattr("splitkv.kernels.hopper.backward.relaunch.observed", lambda: True)
    gpu.through_triton = 0
    torch.autograd.grad(forward(), leaves, grad)
    assert gpu.through_triton >= 3


def test_nothing_is_bound_twice(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, leaves = dense()
    grad = torch.randn_like(forward().detach())
    for _ in range(2):
        torch.autograd.grad(forward(), leaves, grad)
    for name in ("tokens_descriptor", "statistics", "allocate_gradients", "lane_tiling"):
        monkeypatch.setattr(hopper_backward, name, pytest.fail)
    torch.autograd.grad(forward(), leaves, grad)


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


def test_pieces_of_the_workspace_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    sizes = {"clear": 8192, "total": 33, "delta": 33, "weight": 33, "sink_sums": 70, "split": 5}
    made = {name: torch.empty(n) for name, n in sizes.items()}
    stats = Stats(*(made.get(name) for name in ("total", "delta", "", "", "weight", "sink_sums")))
    sums, turns = made["clear"][:8000], made["clear"][8000:8100]
    x: Any = type("X", (), {"q": made["total"], "sink_logits": made["total"]})
    workspace = Workspace(made["clear"], sums, turns, stats, made["split"])
    grads = GradientTensors(*[made["total"]] * 7)
    found = BackwardRelaunch([], x, grads, workspace)
    assert found.offsets.pop("sums") == found.offsets["clear"]
    assert found.offsets.pop("turns") == found.offsets["clear"] + 8000
    ends = [(offset, offset + sizes[name]) for name, offset in found.offsets.items()]
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    assert ends[-1][1] <= found.new_memory().numel()
    assert all(offset % 4 == 0 for offset, _ in ends)
    assert "sink_sums" not in found.offsets and found.new_sink_sums is not None
    assert found.new_sink_sums().shape == made["sink_sums"].shape


def test_few_torch_operations_make_the_gradient_of_sinks(gpu: Recorded) -> None:
    """Those that add up and round what a kernel leaves: nothing is cut out of a workspace."""
    forward, leaves = CALLS["sinks"]()
    grad = torch.randn_like(forward().detach())
    for _ in range(2):
        torch.autograd.grad(forward(), leaves, grad)
    out = forward()
    with torch.profiler.profile() as profile:
        torch.autograd.grad(out, leaves, grad)
    made = [event.name for event in profile.events() if event.name.startswith("aten::")]
    outer = [
        name for name in made if name in ("aten::slice", "aten::view", "aten::sum", "aten::to")
    ]
    assert outer == ["aten::sum", "aten::to"]
