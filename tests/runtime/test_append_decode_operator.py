"""Appending and attending as one operator, for what traces a call or looks into it."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from appending import AXES, Step, step, valid
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.flash_attn import flash_attn_with_kvcache, kv_cache
from splitkv.runtime import append_decode
from splitkv.runtime.append_decode import append_and_decode, append_decode_op
from splitkv.runtime.call_cache import CallCache

NAMES = ("q", "k_cache", "v_cache")
VALUES = [v for v in cases.pairs(AXES, valid) if not v["leftpad"]]
PLACES = (Contiguous(), Paged(16))


def made(values: cases.Values, place: Any, **changes: Any) -> Step:
    changes = {"dtype": "float32", "mask": Mask(True), "lengths": "device", **changes}
    return step(Problem("decode", 3, 4, 2, 32, 48, 2, 70, place=place, **changes), values)


def run(x: Step) -> Any:
    arguments = {n: t for n, t in x.call.items() if n not in (*NAMES, "cache_seqlens")}
    return append_and_decode(x.new, *(x.call[name] for name in NAMES), **arguments)


def caches(x: Step) -> list[torch.Tensor]:
    return [x.call[name].nan_to_num(9) for name in NAMES[1:]]


def compiled(function: Any) -> tuple[Any, list[str]]:
    """What is compiled whole, and the operators of this package in its graph."""
    torch._dynamo.reset()
    found: list[str] = []

    def look(graph: Any, inputs: Any) -> Any:
        targets = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        found.extend(target for target in targets if target.startswith("splitkv"))
        return lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(function, fullgraph=True, backend=look), found


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("values", VALUES[:4], ids=lambda v: v["new"])
def test_it_is_registered_right(
    place: Any, values: cases.Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, given = made(values, place, return_lse=True), []

    def recorder(*arguments: Any) -> Any:
        given.append(arguments)
        return append_decode_op(*arguments)

    monkeypatch.setattr(append_decode, "append_decode_op", recorder)
    monkeypatch.setattr(append_decode, "is_plain", lambda *tensors: False)
    monkeypatch.setattr(append_decode, "calls", CallCache())
    run(x)
    (arguments,) = given
    opcheck(append_decode_op, arguments)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("values", VALUES, ids=lambda v: v["new"])
def test_compiled(values: cases.Values, place: Any) -> None:
    """One operator, whole, with the numbers of an eager call, in the caches too."""
    a, b = (made(values, place, return_lse=True) for _ in range(2))
    step_of, found = compiled(run)
    for result, wanted in zip(step_of(a), run(b), strict=True):
        assert torch.equal(result, wanted)
    assert all(map(torch.equal, caches(a), caches(b)))
    assert found == ["splitkv.append_decode.default"]


@pytest.mark.parametrize("codec", [Codec("int8", "head"), Codec("fp8", "tensor")], ids=str)
def test_compiled_with_a_quantised_cache(codec: Codec) -> None:
    a, b = (made(VALUES[0], PLACES[0], codec=codec) for _ in range(2))
    step_of, found = compiled(run)
    assert torch.equal(step_of(a)[0], run(b)[0])
    for name in NAMES[1:]:
        bits = (x.call[name].view(torch.uint8) for x in (a, b))
        assert torch.equal(*bits)
    assert found == ["splitkv.append_decode.default"]


def flash_call(seqlen_q: int, rows: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    angles = torch.rand(64, 8)
    call = {
        "q": torch.randn(2, seqlen_q, 4, 16),
        "k": torch.randn(2, seqlen_q, 2, 16),
        "v": torch.randn(2, seqlen_q, 2, 16),
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
        "cache_seqlens": torch.tensor([3, 9], dtype=torch.int32),
        "causal": True,
        "k_cache": torch.randn(5, 64, 2, 16),
        "v_cache": torch.randn(5, 64, 2, 16),
    }
    if rows:
        call["cache_batch_idx"] = torch.tensor([3, 1], dtype=torch.int32)
    return call


@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("rows", [False, True])
def test_flash_attn_with_kvcache_compiles_whole(seqlen_q: int, rows: bool) -> None:
    a, b = flash_call(seqlen_q, rows), flash_call(seqlen_q, rows)
    function, found = compiled(flash_attn_with_kvcache)
    assert torch.equal(function(**a), flash_attn_with_kvcache(**b))
    assert torch.equal(a["k_cache"], b["k_cache"])
    assert found == ["splitkv.append_decode.default"]


def test_padding_on_the_left_compiles_whole() -> None:
    a, b = flash_call(1, False), flash_call(1, False)
    for call in (a, b):
        call["cache_leftpad"] = torch.tensor([2, 5], dtype=torch.int32)
        call["k_cache"] = torch.randn(9, 64, 2, 16, generator=torch.Generator().manual_seed(1))[4:]
    function, found = compiled(flash_attn_with_kvcache)
    assert torch.equal(function(**a), flash_attn_with_kvcache(**b))
    assert torch.equal(a["k_cache"], b["k_cache"])
    assert found == ["splitkv.append.default", "splitkv.decode.default"]


def test_one_graph_for_any_capacity() -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    function = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=graphs, dynamic=True)
    for capacity in (64, 48, 40):
        a, b = flash_call(1, False), flash_call(1, False)
        for call in (a, b):
            call |= {n: call[n][:, :capacity].clone() for n in ("k_cache", "v_cache")}
        assert torch.equal(function(**a), flash_attn_with_kvcache(**b))
    assert graphs.frame_count <= 2


def test_compiled_once_whatever_eager_calls_were_made() -> None:
    """What they leave behind guards no graph, and breaks none."""
    function, found = compiled(flash_attn_with_kvcache)
    for seqlen_q in (1, 2, 3):
        a, b = flash_call(1, True), flash_call(1, True)
        assert torch.equal(function(**a), flash_attn_with_kvcache(**b))
        flash_attn_with_kvcache(**flash_call(seqlen_q, False))
    assert found == ["splitkv.append_decode.default"]


@pytest.mark.parametrize(
    ("seqlen_q", "packed"), [(1, False), (16, False), (17, False), (64, False), (17, True)]
)
def test_compiled_in_pieces(seqlen_q: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may break where the call is described: the rest is compiled then."""
    a, b = flash_call(seqlen_q, False), flash_call(seqlen_q, False)
    if packed:
        bounds = torch.arange(3, dtype=torch.int32) * seqlen_q
        of_q = {"q": a["q"].flatten(0, 1), "cu_seqlens_q": bounds, "max_seqlen_q": seqlen_q}
        a, b = a | of_q, b | of_q
    wanted = flash_attn_with_kvcache(**b)
    torch._dynamo.reset()
    monkeypatch.setattr(kv_cache, "_problem", torch._dynamo.disable(kv_cache._problem))
    function = torch.compile(flash_attn_with_kvcache, backend="eager")
    assert torch.equal(function(**a), wanted)
    assert torch.equal(a["k_cache"], b["k_cache"])
