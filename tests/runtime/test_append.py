"""The host's side of `append`: calls recognised, launched again, and traced as an operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from splitkv.kernels import append as kernel
from splitkv.kernels.host import launch
from splitkv.kernels.host.append_call import Append, Result, Rotary, append_in_torch
from splitkv.runtime import append as module
from splitkv.runtime import call_cache
from splitkv.runtime.append import append, append_op
from splitkv.runtime.call_cache import MAX_RECENT, CallCache

STREAM = 5
PLACES = ("contiguous", "rows", "paged", "packed", "slots")


def index(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def call_of(place: str, rotary: bool = True, **changes: Any) -> Append:
    """Two sequences of two new tokens each, with queries to rotate."""
    lead = (4,) if place in ("packed", "slots") else (2, 2)
    k, v, q = torch.randn(*lead, 2, 16), torch.randn(*lead, 2, 8), torch.randn(*lead, 4, 16)
    slabs = (6, 4) if place in ("paged", "slots") else (3, 12)
    given: dict[str, Any] = {"before": index(3, 0)}
    if place == "slots":
        given = {"slots": index(7, -1, 2, 3)}
    elif place == "rows":
        given |= {"rows": index(2, 0), "leftpad": index(1, 0)}
    elif place == "paged":
        given["page_table"] = index(1, 5, 0, 2, 4, 3).view(2, 3)
    elif place == "packed":
        given |= {"cu_seqlens_new": index(0, 3, 4), "cu_seqlens_q": index(0, 3, 4)}
    if rotary:
        angles = torch.rand(20, 4)
        start = index(4, 9, 1, 0) if place == "slots" else index(4, 9)
        given |= {"q": q, "rotary": Rotary(angles.cos(), angles.sin(), start)}
    caches = torch.zeros(*slabs, 2, 16), torch.zeros(*slabs, 2, 8)
    return Append(k, v, *caches, **given)._replace(**changes)


def clone(call: Append) -> Append:
    return call._replace(k_cache=call.k_cache.clone(), v_cache=call.v_cache.clone())


def arguments(call: Append) -> tuple[Any, ...]:
    return (*call.tensors, *((False, 0) if call.rotary is None else call.rotary[3:]))


# The operator


@pytest.mark.parametrize("rotary", [True, False], ids=["rotary", ""])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_registered_right(place: str, rotary: bool) -> None:
    opcheck(append_op, arguments(call_of(place, rotary)))


@pytest.mark.parametrize("rotary", [True, False], ids=["rotary", ""])
@pytest.mark.parametrize("place", PLACES)
def test_compiled(place: str, rotary: bool) -> None:
    """Whole, with slices of a larger cache written in place, and the numbers of an eager call."""
    call = call_of(place, rotary)
    layers = torch.zeros(2, *call.k_cache.shape), torch.zeros(2, *call.v_cache.shape)

    def step(call: Append, k_layers: Tensor, v_layers: Tensor) -> Any:
        return append(call._replace(k_cache=k_layers[1], v_cache=v_layers[1]))

    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    results, wanted = compiled(call, *layers), append(call)
    torch.testing.assert_close(results, wanted)
    assert counter.frame_count == 1
    for made, exact in zip(layers, (call.k_cache, call.v_cache), strict=True):
        assert torch.equal(made[1], exact) and not made[0].any()


def test_inductor_writes_in_place() -> None:
    """Functionalisation does not end in a copy of the cache that nobody sees."""
    call = call_of("paged")
    other, at = clone(call), call.k_cache.data_ptr()
    torch._dynamo.reset()
    compiled = torch.compile(append, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(call), append(other))
    assert call.k_cache.data_ptr() == at and torch.equal(call.k_cache, other.k_cache)


def test_no_gradient_is_recorded() -> None:
    call = call_of("contiguous")
    call.k.requires_grad_()
    for run in (append, torch.compile(append, backend="aot_eager", fullgraph=True)):
        q_out, _ = run(call)
        assert q_out is not None and not q_out.requires_grad
        assert not call.k_cache.requires_grad


# Launched again


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What direct launches get, and a stream."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    yield []


def repeat_of(call: Append, launched: list[tuple[Any, ...]]) -> kernel.AppendRepeat:
    return kernel.AppendRepeat(lambda *args: launched.append(args), call)


def at(*tensors: Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if x is None else x.data_ptr() for x in tensors)


@pytest.mark.parametrize("place", PLACES)
def test_a_call_again(launched: list[tuple[Any, ...]], place: str) -> None:
    """The kernel's parameters up to the bound tail, as addresses."""
    first, x = call_of(place), call_of(place)
    q_out, after = repeat_of(first, launched).call(x.given) or (None, None)
    assert q_out is not None and (q_out.shape, q_out.dtype) == (x.q.shape, x.q.dtype)
    assert (after is None) == (x.before is None)
    cos, sin, start, *_ = x.rotary
    wanted = {
        "new": at(x.k, x.v, x.cu_seqlens_new),
        "store": at(x.k_cache, x.v_cache, x.page_table, x.rows, x.slots),
        "lengths": at(x.before, after, x.leftpad),
        "turn": at(cos, sin, start),
        "queries": at(x.q, q_out, x.cu_seqlens_q),
        "scales": at(x.k_scale, x.v_scale, x.k_mean),
    }
    assert launched == [(STREAM, *wanted.values())]
    assert kernel.append_kv.arg_names[: len(wanted)] == [*wanted]
    tail = kernel.AppendLauncher(x).tail
    assert len(kernel.append_kv.arg_names) == len(wanted) + len(tail)


@pytest.mark.parametrize("which", ["k", "k_cache", "before"])
def test_an_address_off_by_a_few_bytes_is_another_kernel(
    launched: list[tuple[Any, ...]], which: str
) -> None:
    call = call_of("contiguous")
    x = getattr(call, which)
    moved = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    assert repeat_of(call, launched).call(call._replace(**{which: moved}).given) is None
    assert not launched


def test_through_triton_while_a_hook_is_set(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of("contiguous")
    monkeypatch.setattr(kernel, "observed", lambda: True)
    assert repeat_of(call, launched).call(call.given) is None and not launched


def test_a_launcher_keeps_what_it_compiled(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call goes through Triton, the second does not."""
    through_triton: list[Any] = []

    class Jitted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: through_triton.append((grid, args)) or "compiled"

    def launch_of(compiled: str, grid: Any, tail: Any) -> launch.Launch:
        assert compiled == "compiled" and grid == through_triton[0][0]
        return lambda *args: launched.append((*args, *tail))

    monkeypatch.setattr(kernel, "append_kv", Jitted())
    monkeypatch.setattr(kernel, "launch_of", launch_of)
    launcher, call = kernel.AppendLauncher(call_of("paged")), call_of("paged")
    for _ in range(3):
        launcher(call, call.given)
    assert len(through_triton) == 1 and len(launched) == 2
    assert launched[0][7:] == through_triton[0][1][6:]


def test_nothing_is_launched_for_no_tokens() -> None:
    none = torch.zeros(0, 2, 16)
    call = call_of("slots", rotary=False, k=none, v=none[..., :8], slots=index())
    assert kernel.AppendLauncher(call)(call, call.given) == (None, None)


# Recognised


@dataclass(frozen=True)
class Bound:
    """In place of a launcher: the call that it was made for, and those that it served."""

    call: Append
    served: list[Append] = field(default_factory=list)

    def __call__(self, call: Append, tensors: list[Tensor]) -> Result:
        assert all(a is b for a, b in zip(call.given, tensors, strict=True))
        self.served.append(call)
        return None, None


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bound]]:
    """The launchers that were made; tensors of a CPU are taken for a GPU's."""
    made: list[Bound] = []
    monkeypatch.setattr(module, "calls", CallCache())
    monkeypatch.setattr(
        kernel, "AppendLauncher", lambda call, early: made.append(Bound(call)) or made[-1]
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    yield made


def test_a_launcher_serves_all_calls_of_its_layout(bound: list[Bound]) -> None:
    calls = [call_of("paged") for _ in range(3)]
    for call in calls:
        append(call)
    (only,) = bound
    assert only.served == calls


def test_one_device_is_not_asked_for(bound: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling ahead has no driver, which a torch with CUDA would look for."""

    def no_driver() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(call_cache, "current_device", no_driver)
    for _ in range(2):
        append(call_of("paged"))
    assert len(bound[0].served) == 2


CHANGES = {
    "a shape": lambda x: x._replace(k=torch.randn(2, 3, 2, 16), v=torch.randn(2, 3, 2, 8)),
    "strides": lambda x: x._replace(k=x.k.transpose(1, 2).contiguous().transpose(1, 2)),
    "a type": lambda x: x._replace(rotary=x.rotary._replace(cos=x.rotary.cos.double())),
    "pairs": lambda x: x._replace(rotary=x.rotary._replace(interleaved=False)),
    "the queries' step": lambda x: x._replace(rotary=x.rotary._replace(q_step=0)),
    "a tensor that is not there": lambda x: x._replace(leftpad=index(0, 0)),
    "another in its place": lambda x: x._replace(leftpad=index(0, 0), rows=None),
    "the start": lambda x: x._replace(rotary=x.rotary._replace(start=None)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_changes_a_call_is_bound_anew(bound: list[Bound], change: Any) -> None:
    call = call_of("contiguous", rows=index(1, 0))
    for made in (call, change(call), call):
        append(made)
    assert [len(x.served) for x in bound] == [2, 1]


def test_a_tensor_given_twice_is_found_by_its_layout(bound: list[Bound]) -> None:
    for _ in range(2):
        k = torch.randn(2, 2, 2, 16)
        caches = torch.zeros(3, 12, 2, 16), torch.zeros(3, 12, 2, 16)
        append(Append(k, k, *caches, before=index(3, 0)))
    assert len(bound) == 1


def test_layouts_in_turns_are_all_known(bound: list[Bound]) -> None:
    """More of them than are tried one by one."""
    for _ in range(2):
        for tokens in range(1, 2 * MAX_RECENT):
            k, v = torch.randn(2, tokens, 2, 16), torch.randn(2, tokens, 2, 8)
            append(call_of("contiguous", k=k, v=v))
    assert [len(x.served) for x in bound] == [2] * len(bound)


def test_calls_that_are_kept_are_bounded(
    bound: list[Bound], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "calls", CallCache(max_calls=6))
    for tokens in range(1, 20):
        k, v = torch.randn(2, tokens, 2, 16), torch.randn(2, tokens, 2, 8)
        append(call_of("contiguous", k=k, v=v))
        assert len(module.calls) <= 6


class Watch(TorchDispatchMode):
    """Sees every operator."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_known_call_is_traced_like_any_other() -> None:
    append(call_of("paged"))
    with Watch() as watch:
        append(call_of("paged"))
    assert "splitkv.append.default" in watch.seen


def test_the_definition_is_what_a_cpu_runs() -> None:
    call = call_of("rows")
    other = clone(call)
    torch.testing.assert_close(append(call), append_in_torch(other))
    assert torch.equal(call.k_cache, other.k_cache) and call.k_cache.any()
