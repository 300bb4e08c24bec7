"""`warmup` without a GPU: what its calls are given, and that Triton takes it for the real thing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import MODULES, AnyGPU
from torch import Tensor
from triton.runtime.driver import driver

import splitkv
from splitkv.cache.quantize import quantize_kv
from splitkv.core.device import Device
from splitkv.core.kv import AS_IS, Codec
from splitkv.kernels import append as append_kernel
from splitkv.kernels import prefill, widen
from splitkv.kernels.hopper.decode import kernel as hopper_decode_split
from splitkv.kernels.hopper.prefill import half as hopper_prefill_half
from splitkv.kernels.hopper.prefill import kernel as hopper_prefill
from splitkv.kernels.hopper.prefill import launch as hopper_launch
from splitkv.kernels.hopper.prefill import quantised as hopper_prefill_quantised
from splitkv.kernels.host import launcher, sequences, workspace
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.planner.registry import KERNELS, kernel_named, make_plan
from splitkv.runtime import warmup as ahead
from splitkv.runtime.warmup import Call, Model, standing_in

RUN: dict[str, Any] = {
    **MODULES,
    "prefill": prefill,
    "hopper_prefill": hopper_prefill,
    "hopper_prefill_quantised": hopper_prefill_quantised,
    "hopper_prefill_half": hopper_prefill_half,
}
CPU = torch.device("cpu")
H200 = Device.named("h200")
CODECS = [AS_IS, *(Codec(n, g) for n, g in product(("int8", "fp8"), ahead.GRANULARITIES))]
SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "max_seqlen_k": 200}


def model_of(codec: Codec = AS_IS, **changes: Any) -> Model:
    given: dict[str, Any] = {
        **{"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "head_dim_v": 64},
        **{"dtype": torch.bfloat16, "codec": codec, "page_size": None, "longest": 200},
        **{"cache_seqlens": True, "append": False, "rotary": None, "sink_logits": False},
        **{"alibi_slopes": False, "num_splits": 0, "device": CPU, "arguments": {}},
    }
    return Model(**given | changes)


def real(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In the place of `standing_in`."""
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("keys", [1, 16, 100, 1001, 1 << 20])
@pytest.mark.parametrize("heads", [1, 2, 5, 8, 17, 32])
@pytest.mark.parametrize("dim", [(), (1,), (40,), (128,)], ids=str)
def test_strides_are_taken_for_those_of_a_cache(
    keys: int, heads: int, dim: tuple[int, ...]
) -> None:
    shape = 6, keys, heads, *dim
    x = standing_in(shape, torch.float32, CPU)
    wanted = torch.empty(shape, device="meta")
    assert x.shape == wanted.shape
    assert [(n == 1, n % 16 == 0) for n in x.stride()] == [
        (n == 1, n % 16 == 0) for n in wanted.stride()
    ]
    assert x.untyped_storage().nbytes() <= 4 * (17 * (keys + 6) + heads * math.prod(dim))


@pytest.mark.parametrize("codec", CODECS[1:], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_scales_are_those_of_quantize_kv(codec: Codec, heads: int) -> None:
    x = torch.randn(3, 7, heads, 64)
    stored = quantize_kv(x, x, codec.name, codec.granularity)
    model = model_of(codec, num_kv_heads=heads)
    assert model.caches(3, 7)[0].dtype == stored.k.dtype
    for scale in model.scales(3, 7).values():
        assert scale.shape == stored.k_scale.shape
        assert scale.dtype == torch.float32 and bool((scale == 1).all())


@dataclass
class Keys:
    """Stands in for a kernel: notes what Triton would compile, and nothing is."""

    kernel: Any
    found: set[str] = field(default_factory=set)

    @property
    def arg_names(self) -> list[str]:
        return list(self.kernel.arg_names)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.warmup(*args, grid=grid, **options)

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        binder = self.kernel.device_caches[90][-1]
        _, specialization, options = binder(*args, debug=False, **options)
        self.found.add(f"{self.kernel.__name__} {specialization} {options}")


@contextmanager
def keys_of_kernels() -> Iterator[dict[str, Keys]]:
    """What decode and append compile for an H200 meanwhile."""
    places = [(module, name) for name, module in RUN.items() if name != "hopper_decode_split"]
    places += [(append_kernel, "append_kv"), (widen, "widen_rows")]
    merging = launcher, sequences
    keys = {name: Keys(getattr(module, name)) for module, name in places}
    keys["combine"] = Keys(launcher.combine)
    entries = {
        name: Keys(hopper_decode_split.entry_point(name)) for name in hopper_decode_split.ENTRIES
    }
    for entry in entries.values():
        entry.found = entries["all_warps"].found
    keys["hopper_decode_split"] = entries["all_warps"]
    places += [(module, "combine") for module in merging]
    on_host, partials = torch.empty(0), workspace.partials
    with ExitStack() as patches:
        for module, name in places:
            patches.enter_context(mock.patch.object(module, name, keys[name]))
        for patch in (
            mock.patch.object(workspace, "partials", lambda like, *n: partials(on_host, *n)),
            mock.patch.object(driver, "_active", AnyGPU(90)),
            mock.patch.object(hopper_decode_split, "in_clusters", mock.MagicMock()),
            mock.patch.object(hopper_launch, "in_clusters", mock.MagicMock()),
            mock.patch.object(hopper_launch.HopperLauncher, "keep", lambda *_: None),
            mock.patch.object(launcher.DecodeLauncher, "keep", lambda *_: None),
            mock.patch.object(hopper_decode_split, "entry_point", entries.__getitem__),
        ):
            patches.enter_context(patch)
        yield keys


def compiled_for(call: Call) -> dict[str, set[str]]:
    """Of each kernel, what a call needs of it on an H200, run by each kernel that can."""
    new = call.run.args[0] if isinstance(call.run.args[0], Append) else None  # type: ignore[attr-defined]
    with keys_of_kernels() as keys:
        for kernel in KERNELS:
            if kernel.name not in (*RUN, "hopper_prefill_widened") or kernel.unsupported(
                call.problem, H200
            ):
                continue
            made = make_plan(
                call.problem, H200, unfit=lambda other, k=kernel: [""] if other is not k else []
            )
            call.operands.new = new if made.config.appends else None
            kernel_named(made.kernel).bind(made, call.operands)(call.operands)
        if new is not None:
            append_kernel.AppendLauncher(new).dispatch(new)
    return {name: x.found for name, x in keys.items()}


def cases() -> Iterator[Any]:
    turns = torch.ones(256, 16), torch.ones(256, 16)
    for codec, page_size, append in product(CODECS, (None, 16, 3), (False, True)):
        if codec.granularity == "token" and append:
            continue
        for heads, dim, longest in ((1, 80, 203), (2, 128, 201), (8, 64, 200), (3, 72, 200)):
            rotary = Rotary(*turns) if append and heads > 1 else None
            options = {"num_kv_heads": heads, "longest": longest, "page_size": page_size}
            options |= {"num_heads": max(8, 3 * heads), "head_dim": dim, "head_dim_v": dim}
            options |= {"append": append, "rotary": rotary}
            name = f"{codec}-{page_size}-{'append' if append else 'there'}-{heads}"
            yield pytest.param(codec, options, id=name)


@pytest.mark.parametrize(("codec", "options"), [*cases()])
def test_triton_compiles_for_a_real_cache_what_it_has(
    codec: Codec, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(codec, **options)
    shapes = (1, 1, options["longest"]), (3, 2, 64)
    prompts = (1, 190, 190), (3, 50, options["longest"])
    of_prompts = [
        [compiled_for(model.prompt(*shape, total)) for total in model.totals] for shape in prompts
    ]
    had = [compiled_for(model.step(*shape)) for shape in shapes]
    monkeypatch.setattr(ahead, "standing_in", real)
    assert had == [compiled_for(model.step(*shape)) for shape in shapes]
    for found, shape in zip(of_prompts, prompts, strict=True):
        for total in (320, 333, 16, 17):
            assert compiled_for(model.prompt(*shape, total)) == found[0]
        assert compiled_for(model.prompt(*shape, 1)) == found[-1]
        assert found[0]["prefill"]
        widened = codec != AS_IS and options["head_dim"] in (64, 128)
        assert bool(found[0]["widen_rows"]) == widened
    for_decode = "prefill" if options["head_dim"] % 16 else "decode_split"
    assert all(found[for_decode] for found in had)
    assert all(bool(found["append_kv"]) == options["append"] for found in had)


@pytest.mark.parametrize("codec", [AS_IS, Codec("int8", "head"), Codec("fp8", "tensor")], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("append", [False, True])
def test_a_call_is_that_of_a_model(codec: Codec, page_size: int | None, append: bool) -> None:
    """Its result, on real memory, is that of the same call by who serves."""
    model = model_of(codec, page_size=page_size, append=append, longest=32, sink_logits=True)
    with mock.patch.object(ahead, "standing_in", real):
        call = model.step(2, 1, 32)
    result = call.run()
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == (2, 1, 8, 64) and out.dtype == torch.bfloat16
    assert call.problem.codec == codec and call.problem.appends == append
    assert call.problem.sink_logits


def test_plans_of_what_will_be_served() -> None:
    turns = torch.ones(200, 32)
    given = SIZES | {"batch_sizes": (1, 3), "seqlens_q": (1, 4), "stored": "int8", "page_size": 16}
    given |= {"append": True, "rotary_cos": turns, "rotary_sin": turns, "products": "full"}
    plans = splitkv.warmup(**given, max_seqlen_q=100)
    kinds = [(p.problem.kind, p.problem.batch, p.problem.seqlen_new) for p in plans]
    of_decode = [("decode", batch, new) for batch in (1, 3) for new in (1, 4)]
    prompts = [("varlen", batch, 0) for batch in (1, 3)]
    assert kinds == [*of_decode[:2], prompts[0], *of_decode[2:], prompts[1]]
    for made in plans:
        assert made.problem.codec == Codec("int8", "head") and made.problem.products == "full"
        assert made.problem.rotary == (made.problem.kind == "decode") and made.problem.mask.causal


def test_prompts_within_a_window_are_other_kernels() -> None:
    plans = splitkv.warmup(**SIZES, max_seqlen_q=200, window_size=(64, 0))
    prompts = [made.problem for made in plans if made.problem.kind == "varlen"]
    assert [(p.seqlen_q, p.mask.window_left) for p in prompts] == [(200, 64), (64, -1)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["decode", "append_and_decode", "attention_varlen"])
def test_every_plan_is_run_where_something_is_compiled(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = mock.Mock()
    monkeypatch.setattr(ahead, kind, runs)
    monkeypatch.setattr(ahead, "compiles", lambda _: device == "cuda")
    options: dict[str, Any] = {"append": kind == "append_and_decode", "return_lse": True}
    if kind == "attention_varlen":
        options |= {"max_seqlen_q": 100, "page_size": 8}
    with mock.patch.object(ahead, "standing_in", real):
        plans = splitkv.warmup(**SIZES, **options)
    of_kind = {"attention_varlen": "varlen"}.get(kind, "decode")
    count = sum(made.problem.kind == of_kind for made in plans)
    assert runs.call_count == (count if device == "cuda" else 0)
    for call in runs.call_args_list:
        assert call.kwargs["return_lse"] is True


@pytest.mark.parametrize("stored", ["as_is", "int8", "fp8"])
def test_no_memory_for_a_cache(stored: str) -> None:
    """16 million keys of 8 heads would be 32 GB."""
    model = model_of(Codec(stored, "token") if stored != "as_is" else AS_IS, longest=1 << 20)  # type: ignore[arg-type]
    call = model.step(16, 1, 1 << 20)
    held = [call.operands.k, call.operands.v, call.operands.k_scale]
    assert sum(x.untyped_storage().nbytes() for x in held if x is not None) < 64 << 20
