"""What is done once and not on every call: launches bound, calls recognised, lengths decided for.

Nothing is launched: the C function that Triton would call is a recorder here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import splitkv
from splitkv import reference
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands
from splitkv.core.variants import Plain
from splitkv.kernels.host import (
    allocations,
    decode_repeat,
    launch,
    map_launch,
    sequence_repeat,
    tensor_maps,
    workspace,
)
from splitkv.planner import registry
from splitkv.planner.policies import POLICIES, fixed, waves
from splitkv.runtime import attention, call_cache, dispatch
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import Call, Mask, Paged, Problem, Ragged, assert_close, make_operands

GRID = (4, 2, 3)
H200 = GPUS["h200"]


class CFunction:
    """In place of Triton's C function: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


class OneByOne:
    """A launcher as in Triton 3.6."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, function: Any) -> None:
        self.launch = function

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launch(x, y, z, stream, function, False, True, None, None, *args)


class InATuple(OneByOne):
    """A launcher as in Triton 3.7 and later."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        (*known, metadata, enter, leave), args = rest[:4], rest[4:]
        hooks = metadata, enter, leave
        self.launch(x, y, z, stream, function, False, True, *known, *hooks, None, b"types", args)


class Instrumented(InATuple):
    """Adds an argument of its own to those of the kernel."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        super().__call__(x, y, z, stream, function, *rest, 77)


class Elsewhere(OneByOne):
    """Knows its grid and stream otherwise."""

    def __call__(self, x: int, y: int, z: int, *args: Any) -> None:
        self.launch((x, y, z), *args)


class WithoutHooks(OneByOne):
    """Takes fewer arguments than launchers do."""

    def __call__(self, x: int, y: int, z: int, stream: int) -> None:  # type: ignore[override]
        self.launch(x, y, z, stream)


class NeverLoaded(CompiledKernel):  # type: ignore[misc]
    """Has no module that Triton, from 3.8 on, would unload."""

    def __del__(self) -> None:
        pass


def compiled_with(run: Any, tensordesc_meta: Any = None) -> Any:
    """A compiled kernel of Triton, of which only the launcher is not real."""
    made = object.__new__(NeverLoaded)
    made.__dict__.update(
        _run=run,
        module=None if run is None else object(),
        _module_pid=None,
        function=0xF00,
        packed_metadata=(4, 1, 2048),
        metadata=SimpleNamespace(tensordesc_meta=tensordesc_meta),
        src=None,
        name="kernel",
    )
    return made


def installed(function: Any) -> Any:
    """The launcher of the Triton that is installed, with another C function."""
    run = object.__new__(nvidia.CudaLauncher)
    run.__dict__.update(
        launch=function,
        num_ctas=1,
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=True,
        gsan_enabled=False,
        arg_annotations=["annotations"],
        kernel_signature=b"types",
    )
    return run


@pytest.fixture
def hooks() -> Iterator[Any]:
    """Triton's launch hooks, as they were afterwards."""
    runtime = triton.knobs.runtime
    before = runtime.launch_enter_hook, runtime.launch_exit_hook
    yield runtime
    runtime.launch_enter_hook, runtime.launch_exit_hook = before


# --- launches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [OneByOne, InATuple, installed])
def test_a_bound_launch_is_triton_s_own(
    launcher: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_active", SimpleNamespace())
    function = CFunction()
    compiled = compiled_with(launcher(function))
    args, tail = (0x1000, (0x2000, None), 0.5), (7, None, 128)
    compiled[GRID](*args, *tail, stream=99)
    launch_again = launch.bind(compiled, GRID, list(tail))
    assert launch_again is not None
    launch_again(99, *args)
    ordinary, again = function.calls
    assert again[:4] == (*GRID, 99)
    assert again[-1] == tail[-1] or again[-1] == (*args, *tail)
    assert len(ordinary) == len(again)
    # Triton passes hooks that are empty, and metadata for them.
    runtime = triton.knobs.runtime
    for a, b in zip(ordinary, again, strict=True):
        hook = a is runtime.launch_enter_hook or a is runtime.launch_exit_hook
        assert a == b or (b is None and (hook or hasattr(a, "extras")))


def test_what_is_bound_stays_loaded() -> None:
    compiled = compiled_with(OneByOne(CFunction()))
    launch_again = launch.bind(compiled, GRID)
    assert launch_again is not None and launch_again.kernel is compiled  # type: ignore[attr-defined]


def scratch_of(name: str) -> Callable[[Any], Any]:
    def launcher(function: Any) -> Any:
        run = OneByOne(function)
        setattr(run, name, 64)
        return run

    return launcher


@pytest.mark.parametrize(
    "launcher",
    [
        scratch_of("global_scratch_size"),
        scratch_of("profile_scratch_size"),
        Instrumented,
        Elsewhere,
        WithoutHooks,
        lambda function: SimpleNamespace(launch=function),
        lambda function: OneByOne(lambda *args: function(*args)),  # somebody watches the launches
    ],
    ids=["global", "profile", "instrumented", "elsewhere", "fewer", "unknown", "wrapped"],
)
def test_what_is_not_known_goes_through_triton(launcher: Callable[[Any], Any]) -> None:
    function = CFunction()
    compiled = compiled_with(launcher(function))
    assert launch.bind(compiled, GRID, (1, 2)) is None
    assert map_launch.bind_to_maps(compiled, GRID) is None
    tile = tensor_maps.Tile(lambda *args: None, (0, 2, 1, [1]))
    assert map_launch.bind_to_lengths(compiled, GRID, (tile, tile)) is None
    assert function.calls == []


def test_through_triton() -> None:
    function = CFunction()
    compiled = compiled_with(Instrumented(function))
    launch.launch_of(compiled, GRID, (1, 2))(5, 0x1000)
    assert function.calls[0][:4] == (*GRID, 5)
    assert function.calls[0][-1] == (0x1000, 1, 2, 77)


def test_hooks_are_seen_while_they_are_set(hooks: Any) -> None:
    def hook(metadata: Any) -> None:
        raise AssertionError("nothing is launched")

    assert not launch.observed()
    for chain in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        chain.add(hook)
        assert launch.observed()
        chain.remove(hook)
        assert not launch.observed()
    hooks.launch_exit_hook = hook
    assert launch.observed()
    hooks.launch_exit_hook = hooks.launch_enter_hook = None
    assert not launch.observed()


# --- tensor maps -------------------------------------------------------------------------------

META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver is asked to make maps of; a map is the name of its number."""
    asked: list[tuple[Any, ...]] = []

    def fill(*args: Any) -> str:
        asked.append(args)
        return f"map {len(asked)}"

    names = "fill_tma_descriptor", "fill_tma_descriptor_tiled"
    utils = SimpleNamespace(**dict.fromkeys(names, fill))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(tensor_maps, "_made", [])
    return asked


def described(x: Tensor) -> list[Any]:
    """What Triton makes of the descriptor of a tensor."""
    descriptor = TensorDescriptor.from_tensor(x, META["block_size"])
    more = nvidia.make_tensordesc_arg.__code__.co_argcount - 2
    return list(nvidia.make_tensordesc_arg(descriptor, META, *([None] * more)))


def test_a_tensor_map_is_triton_s_own(filled: list[tuple[Any, ...]]) -> None:
    x = torch.zeros(512, 256, dtype=torch.bfloat16)[:, :128]
    compiled = compiled_with(installed(CFunction()), [None, META])
    maps = tensor_maps.TensorMaps(tensor_maps.tile_of(compiled, 1), x.shape, x.stride())
    ours, theirs = maps[x.data_ptr()], described(x)
    assert ours[1:] == tuple(theirs[1:]) == (512, 128, 256, 1)
    assert [list(a) if isinstance(a, list | tuple | torch.Size) else a for a in filled[0]] == [
        list(a) if isinstance(a, list | tuple | torch.Size) else a for a in filled[1]
    ]


def maps_of(compiled: Any, index: int, length: int) -> tensor_maps.TensorMaps:
    return tensor_maps.TensorMaps(tensor_maps.tile_of(compiled, index), (length, 128), (128, 1))


def test_a_tensor_map_is_made_once(filled: list[tuple[Any, ...]]) -> None:
    compiled = compiled_with(installed(CFunction()), [META])
    keys, values = (maps_of(compiled, 0, n) for n in (512, 256))
    first = keys[0x1000]
    assert keys[0x1000] is first and len(filled) == 1
    assert keys[0x2000] != first and len(filled) == 2
    assert values[0x1000] != first and len(filled) == 3
    assert (keys[0x1000], len(filled)) == (first, 3)


def test_tensor_maps_are_bounded(
    filled: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_maps, "MAX_MAPS", 5)
    compiled = compiled_with(installed(CFunction()), [META])
    several = [maps_of(compiled, 0, n) for n in (8, 16)]
    for i in range(1, 30):
        assert several[i % 2][i << 12][1:] == (8 << i % 2, 128, 128, 1)
        assert 0 < sum(len(maps) for maps in several) <= 5


@pytest.mark.parametrize("launcher", [OneByOne, InATuple])
def test_a_launch_with_descriptors_is_bound_to_what_triton_wraps(
    launcher: Callable[[Any], Any], filled: list[tuple[Any, ...]]
) -> None:
    function = CFunction()

    def expanding(*args: Any) -> None:
        function(*args)

    compiled = compiled_with(launcher(expanding), [META, META])
    of_triton = compiled_with(installed(function), [META, META])
    maps = [
        tensor_maps.TensorMaps(tensor_maps.tile_of(of_triton, i), (512 >> i, 128), (128, 1))
        for i in range(2)
    ]
    by_hand = launch.bind(compiled, GRID, (64,))
    launch_with = map_launch.bind_to_maps(compiled, GRID)
    assert by_hand is not None and launch_with is not None
    bound = launch_with((64,), *maps)
    by_hand(3, 0x10, *maps[0][0x20], *maps[1][0x30], None, "lens")
    bound(3, 0x10, (0x20, 0x30, None), "lens")
    last = function.calls[1][-1]
    args = last if isinstance(last, tuple) else function.calls[1][-14:]
    keys, values = ("map 1", 512, 128, 128, 1), ("map 2", 256, 128, 128, 1)
    assert args == (0x10, *keys, *values, None, "lens", 64)
    assert function.calls[0] == function.calls[1] and function.calls[1][:4] == (*GRID, 3)
    tiles = tensor_maps.tile_of(of_triton, 0), tensor_maps.tile_of(of_triton, 1)
    at_length = map_launch.bind_to_lengths(compiled, GRID, tiles)
    assert at_length is not None and at_length.kernel is compiled  # type: ignore[attr-defined]
    of_k, of_v = (((512 >> i, 128), (128, 1)) for i in range(2))
    layout: map_launch.CacheMaps = ((), ()), {}, (of_k, of_v)
    for _ in range(2):  # maps are made once
        at_length(64, layout, 3, 0x10, (0x20, 0x30, None), "lens")
    assert len(filled) == 4 and filled[2:] == filled[:2]
    renamed = tuple({"map 1": "map 3", "map 2": "map 4"}.get(x, x) for x in args)
    last = function.calls[2][-1]
    assert (last if isinstance(last, tuple) else function.calls[2][-14:]) == renamed
    assert function.calls[2] == function.calls[3]


@pytest.mark.parametrize("launcher", [OneByOne, InATuple, installed])
def test_a_launch_with_descriptors_first(
    launcher: Callable[[Any], Any], filled: list[tuple[Any, ...]]
) -> None:
    function = CFunction()
    of_triton = compiled_with(installed(function), [META, META])
    q_tile, k_tile = (tensor_maps.tile_of(of_triton, i) for i in range(2))
    compiled = compiled_with(launcher(function), [META, META])
    seen = SimpleNamespace(layout=lambda shape, strides: (shape, strides), length=None)
    boxes = [(0, q_tile, seen), None, (1, k_tile, seen), None, None, (3, q_tile, seen)]
    launch_at = map_launch.bind_to_descriptors(compiled, boxes)
    assert launch_at is not None
    of_q, of_k = (((512 >> i, 128), (128, 1)) for i in range(2))
    bound = launch_at((GRID, (64,), ({}, (of_q, of_k, of_k, of_q))))
    for _ in range(2):  # maps are made once
        memory = (0x40, 0x41), None, 0x42, (0x43, None)
        bound(3, (0x20, 0x30, 0x30, 0x20), memory, (0x50, None), (None, 0x60), 0.5)
    q, k = ("map 1", 512, 128, 128, 1), ("map 2", 256, 128, 128, 1)
    of_maps = *q, None, *k, None, None, "map 3", *q[1:]
    given = (*of_maps, (0x40, 0x41), None, 0x42, (0x43, None), 0x50, (None, 0x60), 0.5)
    for call in function.calls:
        last = call[-1]
        args = last if isinstance(last, tuple) else call[-len(given) - 1 :]
        assert call[:4] == (*GRID, 3) and args == (*given, 64)
    assert len(filled) == 3
    instrumented = compiled_with(Instrumented(function), [META])
    assert map_launch.bind_to_descriptors(instrumented, boxes) is None


def test_maps_of_operands_are_bounded(
    filled: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_launch, "MAX_OPERANDS", 5)
    tile = tensor_maps.tile_of(compiled_with(installed(CFunction()), [META]), 0)
    seen = SimpleNamespace(layout=lambda shape, strides: (shape, strides), length=None)
    known: dict[Any, tuple[Any, ...]] = {}
    for at in range(16, 320, 16):
        layouts = [((8, 128), (128, 1))]
        made = map_launch.make_operand_maps([(0, tile, seen)], (known, layouts), (at, 0, 0, 0))
        assert made[1:] == (8, 128, 128, 1) and known[at, 0, 0, 0] is made
        assert 0 < len(known) <= 5


# --- a call again ------------------------------------------------------------------------------

STREAM = 5


class Launched:
    """The two launches of a call: what they were given, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.between: Callable[[], Any] = lambda: None

    def split(self, *args: Any) -> None:
        self.calls.append(args)
        self.between()

    def merge(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of a GPU as a repeated call asks for: a stream, whether it is captured, memory."""
    state = SimpleNamespace(stream=STREAM, captured=False)
    functions = {
        "_cuda_getCurrentRawStream": lambda device: state.stream,
        "_cuda_isCurrentStreamCapturing": lambda: state.captured,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)

    def make_buffer(device: int, numel: int, captured: bool = False) -> workspace.Buffer:
        memory = torch.empty(numel if captured else 1 << (numel - 1).bit_length())
        return memory.data_ptr(), memory.numel(), memory

    guards = torch._C._dynamo.guards
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
    monkeypatch.setattr(workspace, "make_buffer", make_buffer)
    monkeypatch.setattr(workspace, "_buffers", {})
    monkeypatch.setattr(workspace, "_counters", {})
    monkeypatch.setattr(workspace, "_of_streams", {})
    zeros = functools.partial(torch.zeros, dtype=torch.int64)
    monkeypatch.setattr(workspace, "_zeros", lambda device, numel, captured: zeros(numel))
    return state


def repeat_of(
    launched: Launched, rows: int = 12, merged: bool = True, key_scales: bool = False
) -> decode_repeat.Repeat:
    return decode_repeat.Repeat(
        launched.split,
        launched.merge if merged else None,
        torch.device("cuda", 0),
        torch.bfloat16,
        (2, 1, 4, 32),
        (2, 4, 1),
        32 * rows,
        rows,
        key_scales=key_scales,
    )


def tensors() -> dict[str, Any]:
    q, k, v = torch.zeros(2, 1, 4, 32), torch.zeros(2, 9, 2, 32), torch.zeros(2, 9, 2, 32)
    rest = ("out", "lens", "table", "sink", "slopes", "q_scale", "k_scale", "v_scale")
    return {"q": q, "k": k, "v": v, **dict.fromkeys(rest)}


def at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@pytest.mark.parametrize("names", [(), ("lens",), ("table", "sink"), ("lens", "slopes", "out")])
@pytest.mark.parametrize("merged", [True, False])
def test_a_call_again(gpu: SimpleNamespace, names: tuple[str, ...], merged: bool) -> None:
    launched, given = Launched(), tensors()
    given |= {name: torch.zeros(4, 8) for name in names}
    out, lse = repeat_of(launched, merged=merged).call(*given.values(), 0.5, 0.0)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 1, 4, 32), torch.bfloat16, True) or (
        out is given["out"]
    )
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 1), torch.float32, True)
    q, k, v, _, lens, table, sink, slopes, *_ = (at(x) for x in given.values())
    split, *merges = launched.calls
    final = out.data_ptr(), lse.data_ptr(), None
    assert split[:5] == (STREAM, q, (k, v, table), lens, final)
    assert split[6:9] == ((sink, slopes, None, None), None, None)
    assert split[9] == pytest.approx(0.5 / torch.log(torch.tensor(2.0)).item())
    assert split[10] is None
    if not merged:
        assert split[5] is None and not merges
        return
    acc, m, l = split[5]
    assert (m - acc, l - m) == (4 * 32 * 12, 4 * 32)
    assert merges == [(STREAM, split[5], final, lens, sink)]


def test_a_call_again_with_softcap(gpu: SimpleNamespace) -> None:
    launched = Launched()
    repeat_of(launched).call(*tensors().values(), 0.5, 4.0)
    assert launched.calls[0][9:] == (0.125, 4.0)


@pytest.mark.parametrize("quantised_q", [True, False])
@pytest.mark.parametrize("a_key", [True, False])
def test_a_call_again_with_scales(gpu: SimpleNamespace, a_key: bool, quantised_q: bool) -> None:
    """One a key or one a head: which of the two arguments of the kernel takes them."""
    launched, given = Launched(), tensors()
    given |= {"k_scale": torch.ones(4, 4), "v_scale": torch.ones(4, 4)}
    given |= {"q_scale": torch.ones(4, 4)} if quantised_q else {}
    repeat_of(launched, key_scales=a_key).call(*given.values(), 0.5, 0.0)
    row, head_scales, key_scales = launched.calls[0][6:9]
    assert row == (None, None, at(given["q_scale"]), None)
    assert (key_scales if a_key else head_scales) == (at(given["k_scale"]), at(given["v_scale"]))
    assert (head_scales if a_key else key_scales) is None


@pytest.mark.parametrize("merged", [False, True])
def test_a_call_again_with_a_scale_of_the_output(gpu: SimpleNamespace, merged: bool) -> None:
    launched, out_scale = Launched(), torch.ones(1)
    repeat = repeat_of(launched, merged=merged)
    out, lse = repeat.call(*tensors().values(), 0.5, 0.0, out_scale=out_scale)
    final = out.data_ptr(), lse.data_ptr(), out_scale.data_ptr()
    split, *merges = launched.calls
    assert split[4] == final and [merge[2] for merge in merges] == [final] * merged
    odd = torch.ones(8)[1:2]
    assert repeat.call(*tensors().values(), 0.5, 0.0, out_scale=odd) is None


@pytest.mark.parametrize("merged", [False, True])
def test_a_call_again_with_sink_tokens_of_each_sequence(gpu: SimpleNamespace, merged: bool) -> None:
    launched, numbers = Launched(), torch.zeros(2, dtype=torch.int32)
    repeat = repeat_of(launched, merged=merged)
    repeat.call(*tensors().values(), 0.5, 0.0, sequence_sink_tokens=numbers)
    assert launched.calls[0][6] == (None, None, None, numbers.data_ptr())
    odd = torch.zeros(8, dtype=torch.int32)[1:3]
    assert repeat.call(*tensors().values(), 0.5, 0.0, sequence_sink_tokens=odd) is None


def test_a_call_again_without_lse(gpu: SimpleNamespace) -> None:
    launched = Launched()
    repeat = repeat_of(launched)
    repeat.new_lse = None
    assert repeat.call(*tensors().values(), 0.5, 0.0)[1] is None
    assert launched.calls[0][4][1] is None


@pytest.mark.parametrize("name", tensors())
def test_an_address_off_by_a_few_bytes_is_another_kernel(gpu: SimpleNamespace, name: str) -> None:
    launched, given = Launched(), tensors()
    if name.endswith("_scale"):
        given |= {"k_scale": torch.ones(4), "v_scale": torch.ones(4)}
    given[name] = torch.zeros(1000)[1:]
    assert repeat_of(launched).call(*given.values(), 0.5, 0.0) is None
    assert launched.calls == []


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_call_again_goes_through_triton_while_a_hook_is_set(
    name: str, gpu: SimpleNamespace, hooks: Any
) -> None:
    launched = Launched()
    repeat = repeat_of(launched)

    def hook(metadata: Any) -> None:
        raise AssertionError("nothing is launched")

    chain = getattr(hooks, name)
    chain.add(hook)
    assert repeat.call(*tensors().values(), 0.5, 0.0) is None and launched.calls == []
    chain.remove(hook)
    assert repeat.call(*tensors().values(), 0.5, 0.0) is not None
    launched.calls.clear()
    setattr(hooks, name, hook)
    assert repeat.call(*tensors().values(), 0.5, 0.0) is None and launched.calls == []
    setattr(hooks, name, None)
    assert repeat.call(*tensors().values(), 0.5, 0.0) is not None


SEQUENCES = ("q", "k", "v", "out", "cu_q", "cu_k", "lens", "table", "sink", "slopes")
SEQUENCES += ("q_scale", "k_scale", "v_scale")


def sequences_of(launched: Launched, merge: str | None = "combine") -> sequence_repeat.Sequences:
    """With partials, unless `merge` is None."""
    results = ((9, 4, 32), (128, 32, 1)), ((4, 9), (9, 1))
    shapes = results[0][0], results[1][0]
    memory = allocations.Allocations(None, torch.device("cuda", 0), torch.bfloat16, *shapes, 0, 0)
    return sequence_repeat.Sequences(
        launched.split,
        launched.merge if merge == "combine" else None,
        None,
        memory,
        results,
        allocations.NO_PARTIALS if merge is None else workspace.layout(32 * 12, 12),
    )


@pytest.mark.parametrize(
    "names",
    [(), ("cu_q", "cu_k"), ("cu_q", "lens", "table", "sink", "out"), ("k_scale", "v_scale")],
)
@pytest.mark.parametrize("merge", ["combine", "last", None])
def test_a_call_of_sequences_again(
    gpu: SimpleNamespace, names: tuple[str, ...], merge: str | None
) -> None:
    launched, call = Launched(), dict.fromkeys(SEQUENCES)
    call |= {name: torch.zeros(4, 8) for name in ("q", "k", "v", *names)}
    made = sequences_of(launched, merge).call(*call.values(), 0.5, None)
    assert made is not None
    out, lse = made
    assert out is call["out"] or (out.shape, out.dtype) == ((9, 4, 32), torch.bfloat16)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((4, 9), torch.float32, True)
    q, k, v, _, *others = (at(x) for x in call.values())
    split, *merges = launched.calls
    final = out.data_ptr(), lse.data_ptr(), None
    stream, maps, memory, *rest = split
    of_final, partial, counter, lengths = memory
    assert (stream, maps, of_final) == (STREAM, (q, k, v, final[0]), final)
    assert lengths == (*others[:4], None)
    assert rest == [tuple(others[4:6]), tuple(others[6:]), 0.5, None]
    if merge is None:
        assert partial is counter is None and not merges
        return
    acc, m, l = partial
    assert (m - acc, l - m) == (4 * 32 * 12, 4 * 32)
    by_combine = merge == "combine"
    assert merges == [(STREAM, partial, final, others[0], others[4])] * by_combine
    assert (counter is None) == by_combine
    gpu.captured = True
    sequences_of(launched, merge).call(*call.values(), 0.5, None)
    _, partial_in_graph, counter_in_graph, _ = launched.calls[1 + by_combine][2]
    assert partial_in_graph != partial and workspace.held_bytes() == 4 * 512
    assert by_combine or counter_in_graph != counter


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_off_by_a_few_bytes_are_another_kernel(gpu: SimpleNamespace, name: str) -> None:
    launched, call = Launched(), dict.fromkeys(SEQUENCES)
    scales = ("k_scale", "v_scale") if name.endswith("scale") else ()
    call |= {name: torch.zeros(4, 8) for name in ("q", "k", "v", *scales)}
    call[name] = torch.zeros(1000)[1:]
    assert sequences_of(launched).call(*call.values(), 0.5, None) is None
    assert launched.calls == []


def test_partials_stay_where_they_are(gpu: SimpleNamespace) -> None:
    """One buffer a stream, which grows with the largest call."""
    small, large = Launched(), Launched()
    calls = repeat_of(small), repeat_of(large, rows=1200)
    for i in (0, 0, 1, 0, 1):
        calls[i].call(*tensors().values(), 0.5, 0.0)
    of_small = [call[5][0] for call in small.calls[::2]]
    of_large = [call[5][0] for call in large.calls[::2]]
    assert of_small[0] == of_small[1] and of_small[2] == of_large[0] == of_large[1]
    assert workspace.held_bytes() == 4 * 65536  # 1200 rows of 34
    gpu.stream = 6
    calls[0].call(*tensors().values(), 0.5, 0.0)
    assert small.calls[-1][0] == 6 and small.calls[-1][1][0] != of_small[2]
    assert workspace.held_bytes() == 4 * (65536 + 512)
    workspace.release()
    assert workspace.held_bytes() == 0


def test_counters_are_those_of_a_stream_or_of_one_captured_launch(gpu: SimpleNamespace) -> None:
    eager = [workspace.counter(0, stream).data_ptr() for stream in (5, 6, 5, 6)]
    graph = [workspace.counter(0, 5, captured=True).data_ptr() for _ in range(3)]
    assert eager[:2] == eager[2:] and len({*eager, *graph}) == 5
    room = 8 * workspace.WIDTH
    assert all(abs(a - b) % room == 0 for a in eager for b in graph)


def test_counters_that_are_used_up_or_not_there(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph makes its own, which it clears; outside of one many are made at once."""
    made: list[tuple[int, bool]] = []

    def zeros(device: int, numel: int, captured: bool) -> torch.Tensor:
        made.append((numel, captured))
        return torch.zeros(numel, dtype=torch.int64)

    monkeypatch.setattr(workspace, "_zeros", zeros)
    monkeypatch.setattr(workspace, "MAX_COUNTERS", 2)
    workspace.counter(0, 5, captured=True)
    for stream in (5, 6, 5):
        workspace.counter(0, stream)
    workspace.counter(0, 5, captured=True)
    workspace.counter(0, 7)
    few, many = (workspace.WIDTH, True), (2 * workspace.WIDTH, False)
    assert made == [few, many, few, many]


def test_a_graph_has_partials_of_its_own(gpu: SimpleNamespace) -> None:
    launched = Launched()
    repeat = repeat_of(launched)
    repeat.call(*tensors().values(), 0.5, 0.0)
    held = workspace.held_bytes()
    gpu.captured = True
    repeat.call(*tensors().values(), 0.5, 0.0)
    gpu.captured = False
    repeat.call(*tensors().values(), 0.5, 0.0)
    eager, graph, again = (call[5][0] for call in launched.calls[::2])
    assert eager == again != graph
    assert workspace.held_bytes() == held


def test_the_default_stream_is_not_asked_whether_it_is_captured(gpu: SimpleNamespace) -> None:
    """No graph can be of it."""
    launched = Launched()
    gpu.stream, gpu.captured = 0, None
    repeat_of(launched).call(*tensors().values(), 0.5, 0.0)
    assert list(workspace.buffers(0)) == [0]


def test_a_call_between_the_launches_of_another_has_its_own_partials(gpu: SimpleNamespace) -> None:
    """As when another thread calls on the same stream, before the first one has merged."""
    outer, inner = Launched(), Launched()
    one, other = repeat_of(outer), repeat_of(inner)
    one.call(*tensors().values(), 0.5, 0.0)
    outer.between = lambda: other.call(*tensors().values(), 0.5, 0.0)
    one.call(*tensors().values(), 0.5, 0.0)
    alone, split, merge = outer.calls[0], *outer.calls[2:]
    assert alone[5] == split[5] == merge[1]
    assert inner.calls[0][5] == inner.calls[1][1] != split[5]


# --- calls recognised --------------------------------------------------------------------------

DECODE = Problem(
    "decode", 2, 4, 2, 32, 32, 2, 24, "float32", mask=Mask(True), lengths="device", return_lse=True
)


@pytest.fixture
def described_calls(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems of calls that had to be described, from here on."""
    found: list[Problem] = []
    describe = dispatch.describe_decode

    def spy(*args: Any, **kwargs: Any) -> Any:
        problem, operands = describe(*args, **kwargs)
        found.append(problem)
        return problem, operands

    monkeypatch.setattr(dispatch, "describe_decode", spy)
    monkeypatch.setattr(dispatch, "calls", CallCache())
    return found


def strided(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wider(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


def sink() -> Tensor:
    return torch.tensor([0.1, 0.2, 0.3, 0.4])


CHANGES: dict[str, Callable[[Call], Any]] = {
    "fewer keys": lambda call: {
        name: call[name][:, : call["max_seqlen_k"]] for name in ("k_cache", "v_cache")
    },
    "strides of q": lambda call: {"q": strided(call["q"])},
    "strides of keys": lambda call: {"k_cache": strided(call["k_cache"])},
    "strides of values": lambda call: {"v_cache": wider(call["v_cache"])},
    "one sequence": lambda call: {
        name: call[name][:1] for name in ("q", "k_cache", "v_cache", "cache_seqlens")
    },
    "type": lambda call: {name: call[name].half() for name in ("q", "k_cache", "v_cache")},
    "lengths of the host": lambda call: {"cache_seqlens": None},
    "mask": lambda call: {"causal": False},
    "window": lambda call: {"window_size": (3, -1)},
    "sink tokens": lambda call: {"window_size": (3, -1), "sink_tokens": 2},
    "scale": lambda call: {"softmax_scale": 0.01},
    "softcap": lambda call: {"softcap": 2.0},
    "bound": lambda call: {"max_seqlen_k": 23},
    "sink logits": lambda call: {"sink_logits": sink()},
    "slopes": lambda call: {"alibi_slopes": sink()},
    "both": lambda call: {"sink_logits": sink(), "alibi_slopes": sink()},
    "out": lambda call: {"out": torch.full_like(call["q"], torch.nan)},
    "strided out": lambda call: {"out": strided(torch.full_like(call["q"], torch.nan))},
    "no lse": lambda call: {"return_lse": False},
    "splits": lambda call: {"num_splits": 2},
    "paged": lambda call: {"page_table": torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)},
    "gradient": lambda call: {"q": call["q"].clone().requires_grad_()},
    "plan": lambda call: {"plan": splitkv.plan(DECODE)},
    "int8": lambda call: {
        **{name: (9 * call[name]).to(torch.int8) for name in ("k_cache", "v_cache")},
        **{name: torch.tensor(0.1) for name in ("k_scale", "v_scale")},
    },
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("check", [True, False], ids=["", "without torch's check"])
def test_what_changes_a_call_is_described_anew(
    change: str,
    check: bool,
    described_calls: list[Problem],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not check:
        monkeypatch.setattr(call_cache, "_TensorGuards", None)
    call = make_operands(DECODE, poison=False)
    changed = call | CHANGES[change](call)
    for _ in range(2):
        splitkv.decode(**call)
    assert len(described_calls) == 1
    results = [splitkv.decode(**changed) for _ in range(2)]
    assert len(described_calls) == 2
    monkeypatch.setattr(dispatch, "calls", CallCache())
    results.append(splitkv.decode(**changed))
    assert len(described_calls) == 3 and described_calls[1] == described_calls[2]
    first, *others = (r if isinstance(r, tuple) else (r,) for r in results)
    for other in others:
        assert len(other) == len(first)
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        assert other[0].requires_grad == first[0].requires_grad


DENSE = Problem("dense", 2, 4, 2, 32, 32, 6, 24, "float32", mask=Mask(True), return_lse=True)
VARLEN = replace(DENSE, kind="varlen", place=Ragged(), lengths="device")
OF_SEQUENCES: dict[str, Callable[[Call], Any]] = {
    "strides of q": lambda call: {"q": wider(call["q"])},
    "fewer keys": lambda call: {name: call[name][:, :12] for name in ("k", "v")},
    "type": lambda call: {name: call[name].half() for name in ("q", "k", "v")},
    "mask": lambda call: {"causal": False},
    "sink tokens": lambda call: {"window_size": (3, -1), "sink_tokens": 2},
    "scale": lambda call: {"softmax_scale": 0.01},
    "softcap": lambda call: {"softcap": 2.0},
    "sink logits": lambda call: {"sink_logits": sink()},
    "slopes": lambda call: {"alibi_slopes": sink()},
    "no lse": lambda call: {"return_lse": False},
    "deterministic": lambda call: {"deterministic": True},
    "gradient": lambda call: {"q": call["q"].clone().requires_grad_()},
    "plan": lambda call: {"plan": splitkv.plan(DENSE)},
}


@pytest.fixture
def described_sequences(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """As `described_calls` for `attention` and `attention_varlen`."""
    found: list[Problem] = []
    describe = attention.describe_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        problem, operands = describe(*args, **kwargs)
        found.append(problem)
        return problem, operands

    monkeypatch.setattr(attention, "describe_attention", spy)
    monkeypatch.setattr(dispatch, "calls", CallCache())
    return found


@pytest.mark.parametrize("change", OF_SEQUENCES)
@pytest.mark.parametrize("check", [True, False], ids=["", "without torch's check"])
def test_what_changes_a_call_of_sequences_is_described_anew(
    change: str,
    check: bool,
    described_sequences: list[Problem],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not check:
        monkeypatch.setattr(call_cache, "_TensorGuards", None)
    call = make_operands(DENSE, poison=False)
    changed = call | OF_SEQUENCES[change](call)
    for _ in range(2):
        splitkv.attention(**call)
    assert len(described_sequences) == 1
    results = [splitkv.attention(**changed) for _ in range(2)]
    assert len(described_sequences) == 2
    monkeypatch.setattr(dispatch, "calls", CallCache())
    results.append(splitkv.attention(**changed))
    first, *others = (r if isinstance(r, tuple) else (r,) for r in results)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        assert other[0].requires_grad == first[0].requires_grad


def test_packed_sequences_and_pages_are_recognised(described_sequences: list[Problem]) -> None:
    call = make_operands(VARLEN, poison=False)
    pages = {name: call[name][:24].view(6, 4, 2, 32) for name in ("k", "v")}
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    lens = torch.tensor([9, 12], dtype=torch.int32)
    pages |= {"page_table": table, "cache_seqlens": lens, "cu_seqlens_k": None, "max_seqlen_k": 12}
    wanted = [splitkv.attention_varlen(**call | more)[0] for more in ({}, pages)]
    lens += torch.tensor([-2, 0], dtype=torch.int32)  # contents are in no key
    for more, before in zip(({}, pages), wanted, strict=True):
        again = splitkv.attention_varlen(**call | more)[0]
        assert torch.equal(again, before) == (not more)
    assert [p.place for p in described_sequences] == [Ragged(), Paged(4)]
    for longer in (23, 24):
        splitkv.attention_varlen(**call | {"max_seqlen_k": longer})
    assert [p.seqlen_k for p in described_sequences[2:]] == [23]


def test_scales_of_sequences_are_those_of_the_call(described_sequences: list[Problem]) -> None:
    codec = Codec("int8", "head")
    stored = replace(DENSE, dtype="bfloat16", codec=codec, products="widened")
    call = make_operands(stored, poison=False)
    first = splitkv.attention(**call)
    larger = call | {name: 2 * call[name] for name in ("k_scale", "v_scale")}
    results = [splitkv.attention(**larger) for _ in range(2)]
    assert len(described_sequences) == 1
    changed = {"products": "half"}, {"k_scale": call["k_scale"][:1], "v_scale": call["v_scale"][:1]}
    for number, more in enumerate(changed):
        splitkv.attention(**call | more)
        assert len(described_sequences) == 2 + number
    dispatch.calls.clear()
    results.append(splitkv.attention(**larger))
    for out, lse in results:
        assert torch.equal(out, results[-1][0]) and torch.equal(lse, results[-1][1])
        assert not torch.equal(lse, first[1])


def test_gradients_of_sequences_are_asked_for_when_they_are_recorded(
    described_sequences: list[Problem],
) -> None:
    call = make_operands(DENSE, poison=False)
    call["q"].requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            assert not splitkv.attention(**call)[0].requires_grad
        out = splitkv.attention(**call)[0]
        (grad,) = torch.autograd.grad(out.sum(), call["q"])
        assert grad.abs().sum() > 0
    assert [p.needs_grad for p in described_sequences] == [False, True]


def test_malformed_sequences_after_good_ones_are_refused() -> None:
    call = make_operands(DENSE, poison=False)
    splitkv.attention(**call)
    for wrong in ({"window_size": [1]}, {"q": [1.0]}, {"q": None}, {"plan": "waves"}):
        for _ in range(2):
            with pytest.raises(ValueError, match="expected"):
                splitkv.attention(**call | wrong)


def test_a_tensor_changed_in_place_is_another_layout(described_calls: list[Problem]) -> None:
    q, k, v = torch.randn(2, 1, 4, 32), torch.randn(2, 24, 2, 32), torch.randn(2, 24, 2, 32)
    wanted = splitkv.decode(q, k, v)
    k.data = strided(k)
    assert_close(splitkv.decode(q, k, v), reference.decode(q, k, v)[0], wanted)
    assert [p.seqlen_k for p in described_calls] == [24, 24]
    k.set_(k.contiguous().untyped_storage(), 0, (2, 24, 2, 32), (24 * 64, 64, 32, 1))
    assert torch.equal(splitkv.decode(q, k, v), wanted)
    assert len(described_calls) == 2  # the layout of the first call
    fewer = splitkv.decode(q, *(x.reshape(-1)[: 2 * 12 * 64].view(2, 12, 2, 32) for x in (k, v)))
    for x in (k, v):
        x.resize_(2, 12, 2, 32)
    assert torch.equal(splitkv.decode(q, k, v), fewer)
    assert [p.seqlen_k for p in described_calls] == [24, 24, 12]


def test_a_malformed_call_after_a_good_one_is_refused() -> None:
    call = make_operands(DECODE, poison=False)
    for _ in range(2):
        splitkv.decode(**call)
    for wrong in (
        {"window_size": [1]},
        {"window_size": ([1], 2)},
        {"softmax_scale": float("nan")},
        {"q": [1.0]},
        {"q": None},
        {"cache_seqlens": call["cache_seqlens"].long()},
        {"plan": "waves"},
        {"num_splits": -1},
        {"out": call["q"].double()},
    ):
        with pytest.raises(ValueError, match="expected"):
            splitkv.decode(**call | wrong)
        with pytest.raises(ValueError, match="expected"):
            splitkv.decode(**call | wrong)


def test_gradients_are_asked_for_when_they_are_recorded(described_calls: list[Problem]) -> None:
    """A launcher bound without them is not taken with them, whichever comes first."""
    call = make_operands(DECODE, poison=False)
    learned = call | {"sink_logits": torch.nn.Parameter(sink())}
    fixed_sink = call | {"sink_logits": sink()}
    for _ in range(3):
        for given, recorded in ((fixed_sink, False), (learned, True)):
            with torch.no_grad():
                assert not splitkv.decode(**given)[0].requires_grad
            assert splitkv.decode(**given)[0].requires_grad == recorded
            with torch.inference_mode():
                assert splitkv.decode(**given)[0].is_inference()
    assert [p.needs_grad for p in described_calls] == [False, True]


class Watch(TorchDispatchMode):
    """The names of the operators that pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_known_call_is_traced_like_any_other() -> None:
    call = make_operands(DECODE, poison=False)
    for _ in range(2):
        wanted = splitkv.decode(**call)
    with Watch() as watch:
        splitkv.decode(**call)
    assert "splitkv.decode.default" in watch.seen

    def out_of(q: Tensor) -> Tensor:
        return splitkv.decode(**call | {"q": q})[0]

    traced = torch.fx.experimental.proxy_tensor.make_fx(out_of)(call["q"])
    assert "splitkv.decode" in traced.code
    assert torch.equal(traced(call["q"]), wanted[0])


def test_a_tensor_given_twice(described_calls: list[Problem]) -> None:
    """Each has a check of its own, and one launcher."""
    q, k = torch.randn(2, 1, 4, 32), torch.randn(2, 24, 2, 32)
    wanted = splitkv.decode(q, k, k.clone())
    for _ in range(3):
        assert torch.equal(splitkv.decode(q, k, k), wanted)
    (recent,) = dispatch.calls.recent.values()
    assert (len(described_calls), len(recent)) == (1, 2)
    assert len({id(bound) for _, _, bound in recent}) == 1
    assert splitkv.decode(q, k, k, out=q) is q
    assert torch.equal(q, wanted)


def test_layouts_in_turns_are_all_known(described_calls: list[Problem]) -> None:
    """More of them than are tried one by one."""
    calls = [
        make_operands(replace(DECODE, seqlen_k=n), poison=False) | {"max_seqlen_k": None}
        for n in range(20, 20 + call_cache.MAX_RECENT + 5)
    ]
    for _ in range(3):
        for call in calls:
            assert splitkv.decode(**call)[0].shape == call["q"].shape
    assert len(described_calls) == len(calls)
    assert max(map(len, dispatch.calls.recent.values())) == call_cache.MAX_RECENT


class Sooner:
    """A launcher that can repeat a call after the first."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        self.slow: list[Operands] = []
        self.fast: list[tuple[Any, ...]] = []
        self.answer: Any = ("out", "lse")
        self.repeat: Any = None
        LAUNCHERS.append(self)

    def __call__(self, operands: Operands) -> Any:
        self.slow.append(operands)
        self.repeat = self.call
        return operands.q, operands.q

    def call(self, *args: Any) -> Any:
        self.fast.append(args)
        return self.answer


LAUNCHERS: list[Sooner] = []


def test_a_launcher_repeats_a_call_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = registry.kernel_named("torch_sdpa")
    kernel = replace(sdpa, unsupported=lambda problem, device: [], bind=Sooner)
    monkeypatch.setattr(registry, "KERNELS", (kernel,))
    monkeypatch.setattr(dispatch, "calls", CallCache())
    call = make_operands(DECODE, poison=False) | {"sink_logits": sink(), "softcap": 3.0}
    splitkv.decode(**call)
    (launcher,) = LAUNCHERS
    assert (len(launcher.slow), len(launcher.fast)) == (1, 0)
    assert splitkv.decode(**call) == ("out", "lse")
    assert (len(launcher.slow), len(launcher.fast)) == (1, 1)
    names = "q", "k_cache", "v_cache", "out", "cache_seqlens", "page_table", "sink_logits"
    assert all(x is call.get(name) for x, name in zip(launcher.fast[0], names, strict=False))
    assert launcher.fast[0][7:] == (*[None] * 4, call["softmax_scale"] or 32**-0.5, 3.0)
    launcher.answer = None
    assert splitkv.decode(**call)[0] is call["q"]
    assert (len(launcher.slow), len(launcher.fast)) == (2, 2)
    # as on the first of several GPUs
    for options, entries in dispatch.calls.recent.items():
        dispatch.calls.recent[options] = tuple(
            (fits, grad_mode, replace(bound, device=0)) for fits, grad_mode, bound in entries
        )
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda n: nullcontext(entered.append(n)))
    for current, counts in ((0, (3, 3)), (1, (4, 3))):
        monkeypatch.setattr(call_cache, "current_device", lambda current=current: current)
        assert splitkv.decode(**call)[0] is call["q"]
        assert (len(launcher.slow), len(launcher.fast)) == counts
    assert entered == [0]


def quantised_call(batch: int) -> Call:
    problem = replace(DECODE, batch=batch, dtype="bfloat16", codec=Codec("int8", "head"))
    call = make_operands(problem, poison=False)
    return call | {"v_scale": call["k_scale"]}  # one tensor, given twice


HARMLESS: dict[str, Callable[[], list[Call]]] = {
    "one tensor as k_scale and v_scale": lambda: [quantised_call(2)],
    "one cache as keys and values": lambda: [
        call | {"v_cache": call["k_cache"]} for call in [make_operands(DECODE, poison=False)]
    ],
    "parameters": lambda: [
        make_operands(replace(DECODE, sink_logits=True), poison=False)
        | {"sink_logits": torch.nn.Parameter(sink(), requires_grad=False)}
    ],
    "what needs a gradient": lambda: [
        call | {"q": call["q"].clone().requires_grad_()}
        for call in [make_operands(DECODE, poison=False)]
    ],
    "batches of an engine": lambda: [
        make_operands(replace(DECODE, batch=n), poison=False) for n in range(1, 40)
    ],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_repeats_are_relaunched(
    name: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second time on nothing looks a layout up, let alone describes it."""
    sdpa = registry.kernel_named("torch_sdpa")
    kernel = replace(sdpa, unsupported=lambda problem, device: [], bind=Sooner)
    monkeypatch.setattr(registry, "KERNELS", (kernel,))
    monkeypatch.setattr(dispatch, "calls", CallCache())
    calls = HARMLESS[name]()
    with mode():
        for call in calls:
            splitkv.decode(**call)
        monkeypatch.setattr(dispatch, "run_decode", pytest.fail)
        for _ in range(2):
            for call in calls:
                assert splitkv.decode(**call) == ("out", "lse")


# --- lengths decided for -----------------------------------------------------------------------

SERVED = Problem("decode", 1, 32, 8, 128, 128, 1, 4096, mask=Mask(causal=True))


def test_lengths_are_rounded_up_by_little() -> None:
    steps = set()
    for n in range(9000):
        rounded = registry.rounded_up(n)
        assert n <= rounded <= n + n / 16
        assert registry.rounded_up(rounded) == rounded
        steps.add(rounded)
    for low in (32, 64, 512, 4096):
        assert len([n for n in steps if low < n <= 2 * low]) == 16
    assert {1 << k for k in range(13)} <= steps and set(range(33)) <= steps


def numbers_of(plan: Plan) -> Config:
    """The config that a policy chose, without what the kernel alone can choose."""
    return replace(plan.config, variant=Plain())


@pytest.mark.parametrize("policy", registry.BY_TIME)
@pytest.mark.parametrize("place", [Paged(16), SERVED.place], ids=str)
def test_a_plan_is_the_policy_s_for_the_rounded_length(policy: str, place: Any) -> None:
    for n in (17, 100, 543, 544, 545, 5001, 70_000):
        problem = replace(SERVED, seqlen_k=n, place=place)
        made = splitkv.plan(problem, device=H200, policy=policy)
        rounded = registry.rounded_up(n)
        candidates = [
            kernel for kernel in registry.KERNELS if not kernel.unsupported(problem, H200)
        ]
        wanted = POLICIES[policy](replace(problem, seqlen_k=rounded), H200, candidates)
        assert (made.problem, made.policy) == (problem, policy)
        assert (made.kernel, numbers_of(made)) == (wanted.kernel, wanted.config)
        note = f"; decided as for {rounded} keys" if rounded != n else ""
        assert made.why == wanted.why + note
        (explained,) = splitkv.explain(problem, device=H200, policies=(policy,)).plans
        assert explained == made


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in registry.BY_TIME])
def test_a_rule_is_followed_to_the_key(policy: str) -> None:
    for n in (513, 529, 545, 601):
        problem = replace(SERVED, seqlen_k=n)
        made = splitkv.plan(problem, device=H200, policy=policy)
        candidates = [
            kernel for kernel in registry.KERNELS if not kernel.unsupported(problem, H200)
        ]
        wanted = POLICIES[policy](problem, H200, candidates)
        assert (made.kernel, numbers_of(made)) == (wanted.kernel, wanted.config)
        assert made.why == wanted.why


def test_a_growing_cache_is_decided_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """`decode` itself, with a key more in every step."""
    asked: list[int] = []

    def choose(problem: Problem, *rest: Any) -> Any:
        asked.append(problem.seqlen_k)
        return waves.choose(problem, *rest)

    monkeypatch.setitem(POLICIES, registry.DEFAULT, choose)
    monkeypatch.setattr(dispatch, "calls", CallCache())
    q = torch.randn(1, 1, 4, 16)
    cache = torch.randn(2, 1, 2, 200, 16)
    for n in range(129, 201):
        k, v = (x[:, :, :n].contiguous().transpose(1, 2) for x in cache)  # as transformers has it
        assert splitkv.decode(q, k, v).isfinite().all()
    assert asked == sorted({registry.rounded_up(n) for n in range(129, 201)})


def test_choices_are_kept_for_named_policies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(registry, "_choices", {})  # those of other tests may fill it

    def choose(problem: Problem, *rest: Any) -> Any:
        asked.append(problem.seqlen_k)
        return waves.choose(problem, *rest)

    problem = replace(SERVED, seqlen_k=600)
    for _ in range(2):
        made = splitkv.plan(problem, device=H200, policy=choose)
        assert made.why.startswith("waves: 600 keys")
    assert asked == [600, 600]  # a function of the caller's may change its mind
    monkeypatch.setitem(POLICIES, registry.DEFAULT, choose)
    splits = set()
    for num_splits in (0, 3, 0, 3):
        splits.add(splitkv.plan(problem, device=H200, num_splits=num_splits).config.num_splits)
        splits.add(splitkv.plan(problem, device=GPUS["l4"], num_splits=num_splits).policy)
    assert asked == [600, 600, 608, 608]  # one for each device
    assert {3, "fixed", registry.DEFAULT} <= splits


def test_choices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_CHOICES", 4)
    monkeypatch.setattr(registry, "_choices", {})
    for n in range(1, 20):
        made = splitkv.plan(replace(SERVED, seqlen_k=n), device=H200, num_splits=1)
        assert made.problem.seqlen_k == n
        assert 0 < len(registry._choices) <= 4


def test_a_split_size_of_the_caller_s_is_exact() -> None:
    for n in (577, 600, 608, 640, 641):
        problem = replace(SERVED, seqlen_k=n)
        made = splitkv.plan(problem, device=H200, policy=fixed.with_split_size(64))
        assert made.config.num_splits == -(-n // 64)
