"""The attention backend of vLLM against the definition, in steps as its engine makes them.

The classes of vLLM are its own where it is installed (`make test-vllm`), else those of
tests/support/vllm_contract.py.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_contract as contract
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_contract import adapter

from splitkv import reference
from splitkv.core.device import GPUS
from splitkv.core.masks import Mask
from splitkv.planner.policies.widening import MOST_BYTES
from splitkv.rounding import quantize, scale_of
from splitkv.testing import assert_close

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS, LONGEST = 4, 2, 16, 16, 64, 160
WITHOUT_CACHE = "encoder_only", "encoder"
DTYPE = torch.bfloat16
if contract.REAL:
    from vllm.v1.attention.backend import CommonAttentionMetadata
else:
    CommonAttentionMetadata = contract.CommonAttentionMetadata


@pytest.fixture(autouse=True)
def keys_before_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout by default, which vLLM asks of its configuration."""
    contract.use_layout(monkeypatch, "NHD")


def tokens(count: int, heads: int) -> Tensor:
    """Random queries, keys or values."""
    return torch.randn(count, heads, DIM, dtype=DTYPE)


@dataclass
class Request:
    """A sequence: its blocks, and the keys and values of all of its tokens."""

    blocks: list[int]
    k: Tensor = field(default_factory=lambda: tokens(0, KV_HEADS))
    v: Tensor = field(default_factory=lambda: tokens(0, KV_HEADS))


class Engine:
    """As much of vLLM as a layer sees: a cache, block tables, steps sorted by new tokens."""

    def __init__(self, kv: str = "auto", *, drafted: int = 0, **options: Any) -> None:
        self.draw, self.kv = random.Random(0), kv
        torch.manual_seed(0)
        self.scales = options.pop("scales", (1.0, 1.0))
        self.out_scale: Tensor | None = options.pop("out_scale", None)
        self.layer = contract.layer(*self.scales)
        self.block: int = options.pop("block", BLOCK)
        self.longest: int = options.pop("longest", LONGEST)
        spec = SimpleNamespace(block_size=self.block)
        settings = contract.config(self.longest, 256, drafted, **options.pop("settings", {}))
        device = torch.device("cpu")
        self.builder = adapter.SplitKVMetadataBuilder(spec, ["layer"], settings, device)
        self.impl = adapter.SplitKVImpl(
            HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype=kv, **options.pop("impl", {})
        )
        assert not options
        self.options = self.impl.options
        self.cache = contract.empty_cache(BLOCKS, self.block, KV_HEADS, DIM, kv, DTYPE)
        self.free = list(range(BLOCKS))
        self.draw.shuffle(self.free)

    @property
    def blocks_a_request(self) -> int:
        return -(-self.longest // self.block)

    def request(self, tokens: int = 0) -> Request:
        made = Request([self.free.pop() for _ in range(self.blocks_a_request)])
        if tokens:
            self.step([(made, tokens)])
        return made

    def described(self, new: list[tuple[Request, int]], padded: int = 0, causal: Any = True) -> Any:
        """vLLM's description of a step; `padded`: requests without tokens at its end."""
        counts = [n for _, n in new] + [0] * padded
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = [len(request.k) for request, _ in new] + [0] * padded
        table = torch.zeros(len(counts), self.blocks_a_request, dtype=torch.int32)
        slots = []
        for row, (request, n) in enumerate(new):
            table[row] = torch.tensor(request.blocks)
            for at in range(len(request.k) - n, len(request.k)):
                block, within = divmod(at, self.block)
                slots.append(request.blocks[block] * self.block + within)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            causal=causal,
        )

    def step(
        self,
        new: list[tuple[Request, int]],
        *,
        padded: int = 0,
        extra_rows: int = 0,
        common_prefix: int = 0,
        capture: bool = False,
        causal: bool = True,
    ) -> tuple[Tensor, Any]:
        """One step of these requests and new tokens of each, compared with the definition."""
        for request, n in new:
            request.k = torch.cat([request.k, tokens(n, KV_HEADS)])
            request.v = torch.cat([request.v, tokens(n, KV_HEADS)])
        x = self.described(new, padded, causal)
        rows = x.num_actual_tokens + extra_rows
        q, k, v = (tokens(rows, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out = torch.full_like(q, torch.nan)
        scale = [] if self.out_scale is None else [self.out_scale]
        out = out.to(torch.float8_e4m3fn) if scale else out
        k[: x.num_actual_tokens] = torch.cat([r.k[len(r.k) - n :] for r, n in new])
        v[: x.num_actual_tokens] = torch.cat([r.v[len(r.v) - n :] for r, n in new])
        if capture:
            made = self.builder.build_for_cudagraph_capture(x)
        else:
            made = self.builder.build(common_prefix, x)
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, x.slot_mapping)
        given = self.impl.forward(self.layer, q, k, v, self.cache, made, out, *scale)
        assert given is out
        first = 0
        for request, n in new:
            self.compare(request, q[first : first + n], out[first : first + n], causal)
            first += n
        return out, made

    def compare(self, request: Request, q: Tensor, out: Tensor, causal: bool) -> None:
        """The rows of one request, whose keys are those that its cache can hold."""
        window, options = self.impl.window_size(causal), self.options
        slopes = self.impl.alibi_slopes
        k, v = (
            stored(x, self.kv, s) for x, s in zip((request.k, request.v), self.scales, strict=True)
        )
        results = [
            reference.attention(
                *(x[None].to(dtype) for x in (q, k, v)),
                mask=Mask(causal, *window).within_reach(),
                softmax_scale=options["softmax_scale"],
                softcap=options["softcap"],
                alibi_slopes=slopes,
                sink_logits=options["sink_logits"],
                upcast=False,
            )[0][0]
            for dtype in (torch.float32, DTYPE)
        ]
        if self.out_scale is not None:
            rounded = reference.scaled(results[1], self.out_scale)
            out, results[1] = (x.float() * self.out_scale for x in (out, rounded))
        assert_close(out, *results)


def stored(x: Tensor, kv: str, scale: Any) -> Tensor:
    """What comes back of keys or values that a cache holds."""
    if kv == "auto":
        return x
    by_token = kv.endswith("per_token_head")
    dtype = torch.int8 if kv.startswith("int8") else torch.float8_e4m3fn
    dtype = torch.float8_e5m2 if kv == "fp8_e5m2" else dtype
    of = torch.as_tensor(scale).view(-1, 1)
    by = scale_of(x, (2,), dtype) if by_token else of
    return quantize(x, by, dtype).float() * by


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.06]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "sinks and window": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 33},
}
CACHES: dict[str, tuple[str, tuple[Any, Any]]] = {
    "as it is": ("auto", (1.0, 1.0)),
    "fp8": ("fp8", (0.02, 0.03)),
    "fp8 in e5m2": ("fp8_e5m2", (0.5, 2.0)),
    "fp8 a head": ("fp8_e4m3", ([0.02, 0.01], [0.03, 0.015])),
    "int8 a token and head": ("int8_per_token_head", (1.0, 1.0)),
    "fp8 a token and head": ("fp8_per_token_head", (1.0, 1.0)),
}


def mixed_steps(engine: Engine, steps: int = 6) -> Iterator[tuple[Tensor, Any]]:
    """Random steps: some requests decode, others have a chunk, in vLLM's order; some end."""
    requests = [engine.request(n) for n in (5, 33)]
    for number in range(steps):
        if len(requests) < 5:
            requests.append(engine.request())
        new = []
        for request in requests:
            fresh = not len(request.k)
            n = engine.draw.choice((2, 17, 30)) if fresh or engine.draw.random() < 0.3 else 1
            new.append((request, n))
        new.sort(key=lambda pair: pair[1] > 1)
        yield engine.step(new, padded=number % 3, extra_rows=number % 2 * 3)
        requests = [r for r in requests if len(r.k) < LONGEST - 30]


@pytest.mark.parametrize("layer", LAYERS)
def test_mixed_steps(layer: str) -> None:
    found = list(mixed_steps(Engine(impl=LAYERS[layer])))
    kinds = {(made.step.num_decodes > 0, made.step.rest is not None) for _, made in found}
    assert (True, True) in kinds


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layout", contract.LAYOUTS)
def test_caches(cache: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract.use_layout(monkeypatch, layout)
    kv, scales = CACHES[cache]
    if kv.endswith("per_token_head") and layout in ("LHBNC", "BHLNC"):
        with pytest.raises(NotImplementedError, match="kv_cache: expected a block of a layer in"):
            Engine(kv, scales=scales).request(9)
        return
    engine = Engine(kv, scales=scales)
    heads_first = layout.index("H") < layout.index("N")
    assert (engine.cache.stride(1) > engine.cache.stride(2)) == heads_first
    assert adapter.contract.heads_first(engine.builder.vllm_config) == heads_first
    assert len(list(mixed_steps(engine, 3))) == 3


@dataclass(frozen=True)
class Spec:
    """As much of vLLM's specification of a layer's cache as a backend may adjust."""

    head_size: int
    dtype: torch.dtype
    kv_quant_mode: Any
    head_size_v: int = 48
    state_content_bytes: int | None = None


def test_room_for_scales() -> None:
    """A specification of a cache says how wide its rows are, from vLLM 0.28 on."""
    adjust = adapter.SplitKVBackend.customize_spec
    plain, scaled = (SimpleNamespace(is_per_token_head=on) for on in (False, True))
    spec = Spec(64, torch.int8, scaled)
    assert adjust(spec).state_content_bytes == 64 + 48 + 2 * 4
    for same in (replace(spec, kv_quant_mode=plain), replace(spec, state_content_bytes=7)):
        assert adjust(same) is same


@pytest.mark.parametrize("cache", [name for name in CACHES if name != "as it is"])
def test_sinks_beside_quantised_caches(cache: str) -> None:
    kv, scales = CACHES[cache]
    engine = Engine(kv, scales=scales, impl=LAYERS["sinks and window"])
    assert len(list(mixed_steps(engine, 3))) == 3


def test_a_cache_within_larger_blocks() -> None:
    """Blocks of several layers lie side by side: their stride is larger than their size."""
    for kv in ("auto", "int8_per_token_head"):
        engine = Engine(kv)
        shape, own = engine.cache.shape, engine.cache.permute(0, 2, 1, 3)
        room = own.new_empty(BLOCKS, 3, *own.shape[1:])
        engine.cache = room[:, 1].permute(0, 2, 1, 3)
        assert engine.cache.shape == shape
        assert len(list(mixed_steps(engine, 2))) == 2


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("block", (16, 48, 256))
def test_edges_of_blocks(
    block: int, layout: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that end with a block, one token before and one behind, chunks of one token, and a
    longest sequence that ends within a block."""
    contract.use_layout(monkeypatch, layout)
    kv, scales = CACHES[cache]
    longest = 2 * block + 3
    engine = Engine(kv, scales=scales, block=block, longest=longest, impl=LAYERS["window"])
    a, b, c, d = (engine.request() for _ in range(4))
    _, made = engine.step([(a, 1)])  # nobody decodes, and a prompt is a token: both are the same
    assert made.step.num_decodes == 1 and made.step.rest is None
    engine.step([(d, 1), (b, min(block, 200))])
    engine.step([(a, 1), (d, 1), (c, min(block - 1, 200))], padded=2, extra_rows=3)
    engine.step([(c, 1), (a, 1), (b, 2), (d, block - 2 if block < 200 else 200)])
    for request in (b, c):
        while len(request.k) < longest:
            engine.step([(a, 1), (request, min(longest - len(request.k), 200))])
            a = engine.request(2) if len(a.k) > block else a
    _, made = engine.step([(a, 1), (d, 1)], capture=True)
    assert made.step.max_seqlen_k >= longest


@pytest.mark.parametrize("layer", LAYERS)
def test_drafts_of_other_lengths(layer: str) -> None:
    """Some requests have fewer drafts, or none: in front of the others, behind or between them."""
    engine = Engine(drafted=5, impl=LAYERS[layer])
    a, b, c, d = (engine.request(n) for n in (15, 16, 17, 40))
    orders = ((6, 6, 6, 6), (6, 2, 1, 6), (1, 6, 6, 3), (1, 1, 4, 4), (3, 3, 17, 1), (2, 1, 1, 1))
    for counts in orders:
        engine.step(list(zip((a, b, c, d), counts, strict=True)), padded=1, extra_rows=5)


def test_a_step_without_tokens() -> None:
    """All of its requests are padding, as of a rank that has nothing to do: nothing is written."""
    engine = Engine()
    x = engine.described([(engine.request(3), 1)], padded=1)
    starts = torch.zeros(3, dtype=torch.int32)
    x.query_start_loc, x.query_start_loc_cpu, x.seq_lens = starts, starts, starts[:2]
    x.num_actual_tokens = x.max_query_len = x.max_seq_len = 0
    made, out = engine.builder.build(0, x), torch.full((4, HEADS, DIM), torch.nan)
    q = torch.zeros(4, HEADS, DIM)
    engine.impl.forward(engine.layer, q, q, q, engine.cache, made, out)
    assert out.isnan().all()


def test_padded_requests_of_a_graph() -> None:
    """They have a token each and no keys; their blocks are those of requests that have left."""
    engine = Engine()
    requests = [engine.request(n) for n in (BLOCK, 2 * BLOCK + 1)]
    x = engine.described([(request, 1) for request in requests], padded=2)
    x.query_start_loc = x.query_start_loc_cpu = torch.arange(5, dtype=torch.int32)
    x.num_actual_tokens = 4
    x.block_table_tensor[2:] = torch.tensor([2**31 - 1, -1] * 5)
    made = engine.builder.build_for_cudagraph_capture(x)
    assert made.step.num_decodes == 4
    q = tokens(4, HEADS)
    out = torch.full_like(q, torch.nan)
    engine.impl.forward(engine.layer, q, q, q, engine.cache, made, out)
    for n, request in enumerate(requests):
        engine.compare(request, q[n : n + 1], out[n : n + 1], causal=True)
    assert (out[2:] == 0).all()


@pytest.mark.parametrize("kv", ["auto", "fp8", "int8_per_token_head"])
def test_layers_that_share_keys(kv: str) -> None:
    """One writes none, and reads those of another, as in Gemma 3n; some of both have a window."""
    engine = Engine(kv, scales=(0.02, 0.03) if kv == "fp8" else (1.0, 1.0))
    name = {"kv_sharing_target_layer_name": "layer", "kv_cache_dtype": kv}
    reader = adapter.SplitKVImpl(HEADS, DIM, 0.3, KV_HEADS, sliding_window=20, **name)
    writer, requests = engine.impl, [engine.request(n) for n in (5, 33, 48)]
    for counts in ((1, 1, 1), (1, 1, 9)):
        new = list(zip(requests, counts, strict=True))
        _, made = engine.step(new)
        q = tokens(sum(counts), HEADS)
        out = torch.full_like(q, torch.nan)
        reader.forward(contract.layer(*engine.scales), q, None, None, engine.cache, made, out)
        engine.impl, first = reader, 0
        for request, n in new:
            engine.compare(request, q[first : first + n], out[first : first + n], causal=True)
            first += n
        engine.impl = writer


def test_a_prompt_of_more_tokens_than_are_scheduled() -> None:
    """Drafts in parallel add some to those that the scheduler has counted."""
    engine = Engine()
    engine.builder.max_tokens = 32
    _, made = engine.step([(engine.request(), 90)])
    assert made.step.max_seqlen_q == 90


def test_rows_past_the_tokens_are_left_alone() -> None:
    engine = Engine()
    a, b = engine.request(7), engine.request(20)
    out, _ = engine.step([(a, 1), (b, 1)], padded=2, extra_rows=5)
    assert out[2:].isnan().all() and not out[:2].isnan().any()


def test_steps_of_a_graph() -> None:
    """What is captured serves any length: nothing of the step is a number of its lengths."""
    engine = Engine()
    requests = [engine.request(n) for n in (3, 40, 90)]
    _, made = engine.step([(r, 1) for r in requests], capture=True)
    assert made.step.rest is None and made.step.num_decodes == 3
    assert made.step.max_seqlen_k == LONGEST
    x = engine.described([(r, 1) for r in requests])
    captured = engine.builder.build_for_cudagraph_capture(x).step
    assert captured.cache_seqlens.data_ptr() == x.seq_lens.data_ptr()
    assert captured.page_table.data_ptr() == x.block_table_tensor.data_ptr()


def test_a_graph_of_more_keys_than_a_model_has_tokens() -> None:
    """Cross attention: vLLM asks with the keys of the encoder, which the graph has to serve."""
    engine = Engine()
    engine.builder.max_model_len = 2 * BLOCK
    requests = [engine.request(n) for n in (3, 90)]
    x = engine.described([(r, 1) for r in requests])
    x.max_seq_len = LONGEST
    assert engine.builder.build_for_cudagraph_capture(x).step.max_seqlen_k == LONGEST


def test_warming_up_takes_each_kind_of_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(drafted=2), []
    monkeypatch.setattr(adapter.engine_warmup, "warm_layer", lambda *given: asked.append(given))
    made = partial(adapter.SplitKVImpl, HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype="fp8")
    impls = made(), made(), made(sliding_window=48, sinks=torch.zeros(HEADS)), object()
    layers = {str(n): SimpleNamespace(impl=impl) for n, impl in enumerate(impls)}
    settings = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=20),
        compilation_config=SimpleNamespace(
            static_forward_context=layers, cudagraph_capture_sizes=[1, 3, 64]
        ),
        model_config=SimpleNamespace(dtype=DTYPE),
        parallel_config=SimpleNamespace(world_size=1),
    )
    engine.builder.warm_up([*layers, "elsewhere"], settings, torch.device("cpu"))
    (plain, sizes, _), (windowed, same, _) = asked
    assert sizes == same
    assert sizes.batch_sizes == (1, 2, 3, 4, 8, 16, 20)
    assert sizes.decode_lens == (1, 3)
    assert (sizes.max_tokens, sizes.max_sequences, sizes.max_seqlen_k) == (256, 20, LONGEST)
    assert (plain.codec.name, plain.codec.granularity) == ("fp8", "tensor")
    assert not plain.sink_logits and windowed.sink_logits
    assert plain.arguments["window_size"] == (-1, -1)
    assert windowed.arguments["window_size"] == (47, -1)


def test_builders_of_vllm_note_more_in_a_step() -> None:
    """As those of chunked and of cross attention do; it stays with other block tables."""
    engine = Engine()
    x = engine.described([(engine.request(9), 1)])
    made = engine.builder.build(0, x)
    made.noted = "more"
    moved = engine.builder.update_block_table(made, x.block_table_tensor + 1, x.slot_mapping)
    assert moved.noted == "more"
    assert torch.equal(moved.step.page_table, made.step.page_table + 1)
    assert torch.equal(made.step.page_table, x.block_table_tensor)


@pytest.mark.parametrize("drafted", [1, 4])
def test_speculative_tokens_decode(drafted: int) -> None:
    engine = Engine(drafted=drafted)
    assert engine.builder.reorder_batch_threshold == 1 + drafted
    requests = [engine.request(n) for n in (3, 40, 90)]
    _, made = engine.step([(r, 1 + drafted) for r in requests])
    assert (made.step.num_decodes, made.step.decode_len) == (3, 1 + drafted)
    a, b, c = requests
    _, made = engine.step([(a, 1 + drafted), (b, 1), (c, 1)])
    assert (made.step.num_decodes, made.step.decode_len) == (1, 1 + drafted)
    assert made.step.rest is not None


def test_steps_of_a_draft_model() -> None:
    """One description serves them all: lengths grow where they lie, and schedules are made anew."""
    engine = Engine()
    assert engine.builder.supports_draft_decode_metadata_update
    requests = [engine.request(n) for n in (9, 50)]
    x = engine.described([(request, 1) for request in requests])
    x.max_seq_len = LONGEST
    made = engine.builder.build(0, x, fast_build=True)
    for _ in range(3):
        for request in requests:
            request.k = torch.cat([request.k, tokens(1, KV_HEADS)])
            request.v = torch.cat([request.v, tokens(1, KV_HEADS)])
        now = engine.described([(request, 1) for request in requests])
        x.seq_lens.copy_(now.seq_lens)
        made.step.schedules["of the step before"] = None
        engine.builder.update_draft_decode_metadata(made)
        assert made.step.schedules == {}
        q = tokens(2, HEADS)
        k, v = (torch.cat([getattr(request, name)[-1:] for request in requests]) for name in "kv")
        out = torch.full_like(q, torch.nan)
        engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, now.slot_mapping)
        engine.impl.forward(engine.layer, q, k, v, engine.cache, made, out)
        for n, request in enumerate(requests):
            engine.compare(request, q[n : n + 1], out[n : n + 1], causal=True)
    mixed = engine.builder.build(0, engine.described([(requests[0], 1), (requests[1], 7)]))
    with pytest.raises(NotImplementedError, match="draft step: expected as many new tokens"):
        engine.builder.update_draft_decode_metadata(mixed)


def test_builders_that_derive_lengths_update_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=2, rank_in_group=1)
    monkeypatch.setattr(adapter, "get_dcp_group", lambda: group)

    class Derived(adapter.SplitKVMetadataBuilder):  # type: ignore[name-defined, misc]
        pass

    spec, device = SimpleNamespace(block_size=BLOCK), torch.device("cpu")
    for kind, ranks in ((Derived, 1), (adapter.SplitKVMetadataBuilder, 2)):
        builder = kind(spec, ["layer"], contract.config(ranks=ranks), device)
        assert not builder.supports_draft_decode_metadata_update


@pytest.mark.parametrize(
    ("lengths", "threshold", "found"),
    [
        ([1, 1, 1], 1, (3, 1)),
        ([1, 1, 30], 1, (2, 1)),
        ([30, 40], 1, (0, 1)),
        ([3, 3, 1, 1], 3, (2, 3)),
        ([2], 4, (1, 2)),
        ([], 1, (0, 1)),
    ],
)
def test_which_requests_decode(lengths: list[int], threshold: int, found: tuple[int, int]) -> None:
    assert adapter.decodes_in_front(lengths, threshold) == found


def test_a_padded_request_is_not_taken_for_one_that_decodes() -> None:
    """Two tokens of one request and a padded one are as many as one of each of two."""
    engine = Engine(drafted=1)
    request = engine.request(9)
    _, made = engine.step([(request, 2)], padded=1)
    assert (made.step.num_decodes, made.step.decode_len) == (1, 2)


def test_graph_support() -> None:
    of = adapter.SplitKVMetadataBuilder.get_cudagraph_support
    for drafted, name in ((0, "UNIFORM_BATCH"), (15, "UNIFORM_BATCH"), (16, "UNIFORM_SINGLE")):
        assert of(contract.config(drafted=drafted), None).name.startswith(name)
    assert Engine(drafted=40).builder.reorder_batch_threshold == 16


@pytest.mark.parametrize("layer", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_shared_prefix(layer: str, kv: str) -> None:
    """Keys that all requests share are read apart, and merged with what follows them."""
    engine = Engine(kv, impl=LAYERS[layer], scales=(0.02, 0.03) if kv == "fp8" else (1.0, 1.0))
    first = engine.request(2 * BLOCK)
    requests = [first]
    for n in (1, 7, 30):
        own = engine.request()
        own.blocks[:2] = first.blocks[:2]
        own.k, own.v = first.k[: 2 * BLOCK], first.v[: 2 * BLOCK]
        requests.append(own)
        engine.step([(own, n)])
    engine.step([(first, 3)])
    _, made = engine.step(
        [(r, n) for r, n in zip(requests, (1, 1, 5, 2), strict=True)], common_prefix=2 * BLOCK
    )
    assert made.shared is not None and made.shared.prefix_len == 2 * BLOCK


def test_a_shared_prefix_of_requests_that_are_not_causal() -> None:
    """Tokens see later ones behind the prefix too: it is not read apart."""
    engine = Engine()
    first, own = engine.request(2 * BLOCK), engine.request()
    own.blocks[:2] = first.blocks[:2]
    own.k, own.v = first.k, first.v
    _, made = engine.step([(first, 1), (own, 5)], common_prefix=2 * BLOCK, causal=False)
    assert made.shared is None


def test_when_a_shared_prefix_is_read_apart() -> None:
    ask = Engine().builder.use_cascade_attention
    plain = (False, False, False, 132, 1)
    assert ask(64, [1] * 8, 32, 8, *plain)
    assert not ask(64, [1] * 7, 32, 8, *plain)
    assert not ask(0, [1] * 8, 32, 8, *plain)
    for number in range(3):
        flags = [number == n for n in range(3)]
        assert not ask(64, [1] * 8, 32, 8, *flags, 132, 1)
    assert not ask(64, [1] * 8, 32, 8, False, False, False, 132, 2)


def test_not_causal() -> None:
    for layer in ("plain", "window"):
        engine = Engine(impl=LAYERS[layer])
        requests = [engine.request(n) for n in (9, 50)]
        engine.step([(requests[0], 1), (requests[1], 12)], causal=False)


@pytest.mark.parametrize("kind", WITHOUT_CACHE)
@pytest.mark.parametrize("layer", ["plain", "window"])
def test_encoders(layer: str, kind: str) -> None:
    """Whole sequences in no cache, every token sees all, or those in a window to both sides."""
    engine = Engine(impl=LAYERS[layer] | {"attn_type": kind})
    requests = [engine.request() for _ in range(3)]
    engine.cache = torch.empty(0)
    new = list(zip(requests, (5, 1, 40), strict=True))
    for request, n in new:
        request.k, request.v = tokens(n, KV_HEADS), tokens(n, KV_HEADS)
    x = engine.described(new, causal=False)
    q, out = tokens(46, HEADS), tokens(46, HEADS)
    k, v = (torch.cat([getattr(r, name) for r in requests]) for name in "kv")
    engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, x.slot_mapping)
    engine.impl.forward(engine.layer, q, k, v, engine.cache, engine.builder.build(0, x), out)
    rows = q.split([5, 1, 40]), out.split([5, 1, 40])
    for request, of_q, of_out in zip(requests, *rows, strict=True):
        engine.compare(request, of_q, of_out, False)


def test_profiling_writes_zeros() -> None:
    out = torch.full((3, HEADS, DIM), torch.nan)
    q = torch.randn(3, HEADS, DIM)
    impl = adapter.SplitKVImpl(HEADS, DIM, 0.3, KV_HEADS)
    assert (impl.forward(None, q, q, q, torch.empty(0), None, out) == 0).all()


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_profiling_takes_what_widening_may(kv: str) -> None:
    """A run without metadata, by which vLLM says how much memory is left for caches."""

    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **kwargs or {})
            self.nbytes = max(self.nbytes, made.nbytes)
            return made

    q = torch.empty(3, HEADS, DIM, device="meta")
    impl = adapter.SplitKVImpl(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype=kv)
    with Largest() as largest:
        impl.forward(None, q, q, q, q, None, q)
    assert largest.nbytes == (q.nbytes if kv == "auto" else MOST_BYTES)


@pytest.mark.parametrize("same_bits", [False, True], ids=["", "batch invariant"])
@pytest.mark.parametrize("kv", ["auto", "fp8", "fp8_e5m2", "int8_per_token_head"])
def test_cross_attention(kv: str, same_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of an encoder, which are written with a request's first step; all tokens see all. They
    may be more than a sequence may have tokens, as of Whisper."""
    monkeypatch.setattr(adapter.envs, "VLLM_BATCH_INVARIANT", same_bits)
    scales = (1.0, 1.0) if kv.endswith("head") else (0.02, 0.03)
    scales = (0.5, 2.0) if kv == "fp8_e5m2" else scales
    engine = Engine(kv, scales=scales, impl={"attn_type": "encoder_decoder"})
    engine.builder.max_model_len = 48
    requests = [engine.request() for _ in range(3)]
    keys = 37, 5, LONGEST
    for request, n in zip(requests, keys, strict=True):
        request.k, request.v = tokens(n, KV_HEADS), tokens(n, KV_HEADS)
    x = engine.described(list(zip(requests, keys, strict=True)))
    k, v = torch.cat([r.k for r in requests]), torch.cat([r.v for r in requests])
    for number, new in enumerate(((4, 1, 7), (1, 1, 1))):
        starts = torch.tensor([0, *new]).cumsum(0).int()
        x.query_start_loc = x.query_start_loc_cpu = starts
        x.num_actual_tokens, x.max_query_len, x.causal = sum(new), max(new), False
        made = engine.builder.build(0, x)
        given = (k, v) if number == 0 else (None, None)
        if number == 0:
            engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, x.slot_mapping)
        q = tokens(sum(new), HEADS)
        out = torch.full_like(q, torch.nan)
        engine.impl.forward(engine.layer, q, *given, engine.cache, made, out)
        for n, request in enumerate(requests):
            rows = slice(*starts[n : n + 2].tolist())
            engine.compare(request, q[rows], out[rows], causal=False)
    assert made.step.num_decodes == 3


def test_other_block_tables() -> None:
    """A step described once for groups of caches with tables of their own."""
    engine = Engine()
    requests = [engine.request(n) for n in (9, 50, 33)]
    x = engine.described([(requests[0], 1), (requests[1], 1), (requests[2], 7)])
    made = engine.builder.build(0, x)
    other = x.block_table_tensor.flip(1)
    moved = engine.builder.update_block_table(made, other, x.slot_mapping)
    again = engine.builder.build(0, x.__class__(**{**vars(x), "block_table_tensor": other}))
    assert torch.equal(moved.step.page_table, again.step.page_table)
    assert torch.equal(moved.step.rest.page_table, again.step.rest.page_table)
    assert torch.equal(moved.step.rest.cu_seqlens_q, again.step.rest.cu_seqlens_q)


# --- ranks that share the keys of a sequence ---------------------------------------------------


class Meeting:
    """Collectives between threads, each of them a rank: what all of them gave."""

    def __init__(self, ranks: int) -> None:
        self.given: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def of(self, rank: int, x: Any) -> list[Any]:
        self.given[rank] = x
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


@dataclass
class Group:
    """As much of vLLM's group of ranks as a layer sees."""

    meeting: Meeting
    rank_in_group: int
    world_size: int

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.meeting.of(self.rank_in_group, x), dim)


def merged(out: Tensor, lse: Tensor, group: Group, return_lse: bool) -> tuple[Tensor, Tensor]:
    """vLLM's merge of all ranks' (out [tokens, heads, dim], lse [tokens, heads]), own heads."""
    assert return_lse and lse.is_contiguous()
    given = group.meeting.of(group.rank_in_group, (out.double(), lse.double()))
    outs, lses = zip(*given, strict=True)
    total = torch.stack(lses).logsumexp(0)
    weights = [(x - total).exp().nan_to_num(0.0) for x in lses]
    made = sum(x * w[..., None] for x, w in zip(outs, weights, strict=True))
    own = slice(HEADS * group.rank_in_group, HEADS * (group.rank_in_group + 1))
    return made[:, own].to(out.dtype), total[:, own].float()


class RankedEngine:
    """Ranks of one KV head and HEADS query heads each, which have every sequence's keys in turn."""

    def __init__(
        self, ranks: int, interleave: int, kv: str, patch: pytest.MonkeyPatch, **impl: Any
    ) -> None:
        torch.manual_seed(0)
        self.kv, self.ranks, self.interleave = kv, ranks, interleave
        self.scales = (1.0, 1.0) if kv == "auto" else (0.02, 0.03)
        self.layer, meeting = contract.layer(*self.scales), Meeting(ranks)
        patch.setattr(adapter.contract, "cp_lse_ag_out_rs", merged)
        device, spec = torch.device("cpu"), SimpleNamespace(block_size=BLOCK)
        settings = contract.config(LONGEST, 256, ranks=ranks, interleave=interleave)
        self.sinks = torch.randn(ranks * HEADS) if impl.pop("sinks", False) else None
        self.impls, self.builders, self.caches = [], [], []
        for rank in range(ranks):
            group = Group(meeting, rank, ranks)
            patch.setattr(adapter, "get_dcp_group", lambda group=group: group)
            own = None if self.sinks is None else self.sinks[HEADS * rank : HEADS * (rank + 1)]
            made = adapter.SplitKVImpl.__new__(adapter.SplitKVImpl)
            made.dcp_world_size = ranks
            made.__init__(HEADS, DIM, 0.3, 1, kv_cache_dtype=kv, sinks=own, **impl)  # type: ignore[misc]
            self.impls.append(made)
            builder = adapter.SplitKVMetadataBuilder(spec, ["layer"], settings, device)
            self.builders.append(builder)
            self.caches.append(contract.empty_cache(BLOCKS, BLOCK, 1, DIM, kv, DTYPE))
        self.sequences: list[Request] = []

    def slots(self, rank: int, request: Request, first: int) -> list[int]:
        """As vLLM computes them: of tokens of other ranks -1."""
        found = []
        for at in range(first, len(request.k)):
            turn, within = divmod(at, self.interleave)
            mine = turn % self.ranks == rank
            held = turn // self.ranks * self.interleave + within
            found.append(request.blocks[held // BLOCK] * BLOCK + held % BLOCK if mine else -1)
        return found

    def step(self, new: list[tuple[Request, int]], *, capture: bool = False) -> list[Any]:
        """One step on all ranks, compared with the definition; the metadata of each."""
        keys = []
        for request, n in new:
            keys.append((tokens(n, 1), tokens(n, 1)))
            request.k = torch.cat([request.k, keys[-1][0]])
            request.v = torch.cat([request.v, keys[-1][1]])
        k, v = (torch.cat(x) for x in zip(*keys, strict=True))
        starts = torch.tensor([0, *(n for _, n in new)]).cumsum(0).int()
        lengths = torch.tensor([len(r.k) for r, _ in new], dtype=torch.int32)
        q = tokens(len(k), self.ranks * HEADS)
        outs, metadata = torch.full_like(q, torch.nan), [None] * self.ranks

        def run(rank: int) -> None:
            slots = [slot for r, n in new for slot in self.slots(rank, r, len(r.k) - n)]
            x = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=len(new),
                num_actual_tokens=len(k),
                max_query_len=max(n for _, n in new),
                max_seq_len=int(lengths.max()),
                block_table_tensor=torch.tensor([r.blocks for r, _ in new], dtype=torch.int32),
                slot_mapping=torch.tensor(slots, dtype=torch.int64),
                seq_lens_cpu_upper_bound=lengths,
            )
            if capture:
                x.dcp_local_seq_lens = adapter.get_dcp_local_seq_lens(
                    lengths, self.ranks, rank, self.interleave
                )
            builder, impl, cache = (x[rank] for x in (self.builders, self.impls, self.caches))
            builder.rank = rank
            made = builder.build_for_cudagraph_capture(x) if capture else builder.build(0, x)
            own = slice(HEADS * rank, HEADS * (rank + 1))
            impl.do_kv_cache_update(self.layer, k, v, cache, x.slot_mapping)
            impl.forward(self.layer, q[:, own], k, v, cache, made, outs[:, own])
            metadata[rank] = made

        with ThreadPoolExecutor(self.ranks) as pool:
            list(pool.map(run, range(self.ranks)))
        for n, (request, count) in enumerate(new):
            rows = slice(*starts[n : n + 2].tolist())
            self.compare(request, count, q[rows], outs[rows])
        return metadata

    def compare(self, request: Request, count: int, q: Tensor, out: Tensor) -> None:
        """New tokens of a prompt are read as they come, all others as they are stored."""
        held = [
            stored(x, self.kv, s).to(x.dtype)
            for x, s in zip((request.k, request.v), self.scales, strict=True)
        ]
        if count > 1:
            for x, new in zip(held, (request.k, request.v), strict=True):
                x[-count:] = new[-count:]
        options = self.impls[0].options
        results = [
            reference.attention(
                *(x[None].to(dtype) for x in (q, *held)),
                mask=Mask(True),
                softmax_scale=0.3,
                softcap=options["softcap"],
                sink_logits=self.sinks,
                upcast=False,
            )[0][0]
            for dtype in (torch.float32, DTYPE)
        ]
        assert_close(out, *results)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("layer", [{}, {"sinks": True}, {"logits_soft_cap": 5.0}], ids=str)
def test_ranks_that_share_keys(
    layer: dict[str, Any], ranks: int, interleave: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RankedEngine(ranks, interleave, kv, monkeypatch, **layer)
    contract.use_layout(monkeypatch, "HND")
    places = iter(torch.randperm(BLOCKS).tolist())
    a, b, c = (Request([next(places) for _ in range(LONGEST // BLOCK)], *nothing()) for _ in "abc")
    made = engine.step([(a, 33), (b, 5)])
    assert all(x.whole for x in made)
    engine.step([(a, 1), (c, 1), (b, 20)])
    made = engine.step([(a, 1), (b, 1), (c, 30)])
    assert made[0].step.num_decodes == 2 and made[0].step.rest is not None and not made[0].whole
    made = engine.step([(a, 1), (b, 1), (c, 1)], capture=True)
    assert all(x.step.num_decodes == 3 and x.step.rest is None for x in made)
    most = -(-LONGEST // (ranks * interleave)) * interleave
    assert all(most <= x.step.max_seqlen_k <= LONGEST for x in made)


def nothing() -> tuple[Tensor, Tensor]:
    """Keys and values of a request on ranks, as yet."""
    return tokens(0, 1), tokens(0, 1)


def test_a_draft_whose_keys_every_rank_has() -> None:
    """Its cache is not shared out, as vLLM says from 0.31 on in its specification."""
    settings, device = contract.config(ranks=2), torch.device("cpu")
    spec = SimpleNamespace(block_size=BLOCK, dcp_sharded=False)
    builder = adapter.SplitKVMetadataBuilder(spec, ["layer"], settings, device)
    assert (builder.ranks, builder.rank) == (1, 0)


def test_ranks_have_no_chunks() -> None:
    """vLLM's own builder finds chunks in tables of all keys, and asks nobody whether there are."""
    settings, device = contract.config(ranks=2), torch.device("cpu")
    spec = SimpleNamespace(block_size=BLOCK, attention_chunk_size=32)
    with pytest.raises(NotImplementedError, match="attention_chunk_size: expected None with ranks"):
        adapter.SplitKVMetadataBuilder(spec, ["layer"], settings, device)
    assert adapter.SplitKVMetadataBuilder(spec, ["layer"], contract.config(), device).ranks == 1


def test_graphs_of_ranks() -> None:
    """Of single tokens: drafts are read with the step's own keys, in as many launches as it has."""
    of = adapter.SplitKVMetadataBuilder.get_cudagraph_support
    assert of(contract.config(drafted=4, ranks=2), None).name == "UNIFORM_SINGLE_TOKEN_DECODE"


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ({"sliding_window": 20}, "sliding_window"),
        ({"alibi_slopes": [0.5, 0.25, 0.125, 0.06]}, "alibi_slopes"),
        ({"attn_type": "encoder_decoder"}, "cross attention"),
    ],
)
def test_what_ranks_refuse(
    layer: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}: expected none with ranks that share"):
        RankedEngine(2, 1, "auto", monkeypatch, **layer)


# --- what the engine asks, and what is refused -------------------------------------------------


def test_what_is_supported() -> None:
    backend = adapter.SplitKVBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.get_impl_cls() is adapter.SplitKVImpl
    assert backend.get_builder_cls() is adapter.SplitKVMetadataBuilder
    assert not backend.forward_includes_kv_cache_update
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]
    sizes = [n for n in range(1, 600) if backend.supports_head_size(n)]
    assert sizes == list(range(16, 257, 16))
    for major, ok in ((7, False), (8, True), (9, True), (12, True)):
        assert backend.supports_compute_capability(SimpleNamespace(major=major)) == ok
    kinds = "decoder", "encoder_only", "encoder", "encoder_decoder"
    assert all(backend.supports_attn_type(kind) for kind in kinds)
    assert not backend.supports_attn_type("linear")
    assert not backend.is_mla()
    kinds = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "bfloat16")
    assert all(backend.supports_kv_cache_dtype(kv) for kv in kinds)
    assert not any(backend.supports_kv_cache_dtype(kv) for kv in ("fp8_inc", "nvfp4"))
    other = backend.supports_combination(128, torch.bfloat16, "float16", 16)
    assert other == "kv_cache_dtype: expected auto, fp8 or torch.bfloat16, got float16"
    assert backend.supports_combination(128, torch.bfloat16, "fp8", 16) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_type": "linear"}, "attn_type: expected decoder, encoder_decoder, .* got linear"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype: expected auto, float16, .* got nvfp4"),
    ],
)
def test_layers_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        adapter.SplitKVImpl(HEADS, DIM, 0.3, KV_HEADS, **options)


def test_steps_that_are_refused() -> None:
    engine = Engine(impl=LAYERS["window"])
    request, flags = engine.request(3), torch.ones(1, dtype=torch.bool)
    out, layer = torch.empty(1, HEADS, DIM), contract.layer()
    rest = out, out, engine.cache
    x = engine.described([(request, 1)], causal=flags)
    made = engine.builder.build(0, x)
    with pytest.raises(NotImplementedError, match="causal: expected one flag for all requests"):
        engine.impl.forward(layer, out, *rest, made, out)
    x.mm_req_doc_ranges = {0: [(0, 2)]}
    with pytest.raises(NotImplementedError, match="causal: expected one flag beside images"):
        engine.builder.build(0, x)
    x.causal = True
    made = engine.builder.build(0, x)
    layer.mm_prefix_clamp_sliding_window = True
    with pytest.raises(NotImplementedError, match="ranges: expected none beside a window"):
        engine.impl.forward(layer, out, *rest, made, out)
    for kind in ("encoder_only", "encoder", "encoder_decoder"):
        other = adapter.SplitKVImpl(HEADS, DIM, 0.3, KV_HEADS, attn_type=kind)
        with pytest.raises(NotImplementedError, match="attn_type: expected .*decoder"):
            other.forward(layer, out, *rest, made, out)
    engine.builder.rswa, x.rswa_prefix_lens = True, torch.ones(1)
    with pytest.raises(NotImplementedError, match="rswa_prefix_lens: expected none"):
        engine.builder.build(0, x)
    with pytest.raises(NotImplementedError, match="output_block_scale: expected None"):
        engine.impl.forward(None, out, out, out, engine.cache, None, out, None, torch.ones(1))


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(("kv", "layer"), [("auto", "plain"), ("fp8", "sinks")])
def test_output_in_8_bits(kv: str, layer: str, shape: tuple[int, ...]) -> None:
    """Of requests that decode and prompts, behind a shared prefix too, and without metadata."""
    scale = torch.full(shape, 0.02)
    scales = (0.02, 0.03) if kv == "fp8" else (1.0, 1.0)
    engine = Engine(kv, impl=LAYERS[layer], scales=scales, out_scale=scale)
    assert len(list(mixed_steps(engine, 4))) == 4
    engine = Engine(kv, impl=LAYERS[layer], scales=scales, out_scale=scale)
    first, own = engine.request(2 * BLOCK), engine.request()
    own.blocks[:2] = first.blocks[:2]
    own.k, own.v = first.k, first.v
    _, made = engine.step([(first, 1), (own, 5)], common_prefix=2 * BLOCK)
    assert made.shared is not None
    q, out = tokens(2, HEADS), torch.full((2, HEADS, DIM), 0x7F, dtype=torch.uint8)
    stored = out.view(torch.float8_e4m3fn)
    engine.impl.forward(engine.layer, q, q, q, engine.cache, None, stored, scale)
    assert (out == 0).all()


def test_output_in_8_bits_of_a_sequence_without_a_cache() -> None:
    impl = adapter.SplitKVImpl(HEADS, DIM, 0.3, HEADS, attn_type="encoder_only")
    q, k, v = (tokens(7, HEADS) for _ in range(3))
    engine, scale = Engine(), torch.tensor(0.02)
    made = engine.builder.build(0, engine.described([(engine.request(7), 7)], causal=False))
    out = torch.empty(7, HEADS, DIM, dtype=torch.float8_e4m3fn)
    impl.forward(engine.layer, q, k, v, engine.cache, made, out, scale)
    wide = reference.attention(*(x[None].float() for x in (q, k, v)), softmax_scale=0.3)[0][0]
    assert torch.equal(out.view(torch.uint8), reference.scaled(wide, scale).view(torch.uint8))


def test_where_output_in_8_bits_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on Hopper, whose kernels for prompts store 16 bits."""
    static = adapter.kFp8StaticTensorSym
    for gpu, served in (("a100", True), ("h100", False), ("b200", True)):
        monkeypatch.setattr(adapter, "current", lambda gpu=gpu: GPUS[gpu])
        assert adapter.SplitKVImpl(4, 64, 1.0).fused_output_quant_supported(static) is served
    assert not adapter.SplitKVImpl(4, 64, 1.0).fused_output_quant_supported("dynamic")


def attend_by_ranges(engine: Engine, new: list[tuple[Request, int]], **of_step: Any) -> Any:
    """A step whose description is changed, compared with the definition of its ranges."""
    for request, n in new:
        request.k = torch.cat([request.k, tokens(n, KV_HEADS)])
        request.v = torch.cat([request.v, tokens(n, KV_HEADS)])
    x, ranges = engine.described(new, **of_step.pop("described", {})), of_step.pop("ranges")
    vars(x).update(of_step)
    q = tokens(x.num_actual_tokens, HEADS)
    k, v = (torch.cat([getattr(r, name)[-n:] for r, n in new]) for name in "kv")
    out = torch.full_like(q, torch.nan)
    made = engine.builder.build(0, x)
    engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, x.slot_mapping)
    engine.impl.forward(engine.layer, q, k, v, engine.cache, made, out)
    keys = [len(request.k) for request, _ in new]
    results = [
        reference.attention_varlen(
            q.to(dtype),
            *(torch.cat([getattr(r, name) for r, _ in new]).to(dtype) for name in "kv"),
            x.query_start_loc,
            torch.tensor([0, *keys]).cumsum(0).int(),
            mask=Mask(True, engine.impl.left),
            bidirectional_ranges=torch.tensor(ranges, dtype=torch.int32),
            softmax_scale=0.3,
            upcast=False,
        )[0]
        for dtype in (torch.float32, DTYPE)
    ]
    assert_close(out, *results)
    return made


@pytest.mark.parametrize("layer", ["plain", "window"])
def test_images(layer: str) -> None:
    """Tokens of an image see each other, also across a window; decodes stay decodes."""
    engine = Engine(impl=LAYERS[layer])
    first, second, third = (engine.request() for _ in range(3))
    ranges = {0: [], 1: [(2, 9), (12, 30)], 2: [(0, 17)]}
    wanted = [[[0, 0], [0, 0]], [[2, 10], [12, 31]], [[0, 18], [0, 0]]]
    engine.step([(first, 5)])
    new = [(first, 1), (second, 40), (third, 20)]
    made = attend_by_ranges(engine, new, mm_req_doc_ranges=ranges, ranges=wanted)
    assert made.ranged == "images" and made.step.num_decodes == 1
    for _ in range(2):  # behind their images
        new = [(first, 1), (second, 1), (third, 1)]
        made = attend_by_ranges(engine, new, mm_req_doc_ranges=ranges, ranges=wanted)
        assert made.step.num_decodes == 3 and made.step.rest is None
    nothing = {0: [], 1: [], 2: []}
    made = attend_by_ranges(engine, new, mm_req_doc_ranges=nothing, ranges=[[[0, 0]]] * 3)
    assert made.ranged == ""


def test_images_beside_drafts() -> None:
    """A few tokens may be drafts or end an image: they go where ranges are seen."""
    engine = Engine(drafted=3)
    first, second = engine.request(6), engine.request(6)
    new, ranges = [(first, 4), (second, 4)], {0: [(7, 9)]}
    wanted = [[[7, 10]], [[0, 0]]]
    made = attend_by_ranges(engine, new, mm_req_doc_ranges=ranges, ranges=wanted)
    assert made.step.num_decodes == 0
    settings = contract.config(drafted=3)
    settings.model_config.is_mm_prefix_lm = True
    support = adapter.SplitKVMetadataBuilder.get_cudagraph_support(settings, None)
    assert support.name == "UNIFORM_SINGLE_TOKEN_DECODE"


def test_a_causal_flag_a_request() -> None:
    engine = Engine()
    first, second, third = (engine.request(3) for _ in range(3))
    flags = torch.tensor([True, False, True])
    wanted = [[[0, 0]], [[0, 1 << 30]], [[0, 0]]]
    new = [(first, 1), (second, 9), (third, 7)]
    made = attend_by_ranges(engine, new, described={"causal": flags}, ranges=wanted)
    assert made.ranged == "requests" and made.causal is True


def test_a_block_of_a_layer_in_one_piece() -> None:
    """Heads of several layers side by side, as some connectors have them: only where keys and
    values are read through strides."""
    for kv, ok in (("auto", True), ("fp8", True), ("int8_per_token_head", False)):
        engine = Engine(kv, scales=(0.02, 0.03))
        shape = list(engine.cache.shape)
        room = engine.cache.new_empty(BLOCKS, KV_HEADS, 3, *shape[2:])
        engine.cache = room[:, :, 1]
        if ok:
            assert len(list(mixed_steps(engine, 2))) == 2
            continue
        with pytest.raises(NotImplementedError, match="kv_cache: expected a block of a layer in"):
            engine.request(9)


def test_strides_of_one_head() -> None:
    """torch keeps any stride of a dimension of one; a kernel that reads by TMA cannot."""
    impl = adapter.SplitKVImpl(HEADS, DIM, 0.3, 1)
    cache = torch.zeros(BLOCKS, BLOCK, 2 * DIM).as_strided(
        (BLOCKS, 1, BLOCK, 2 * DIM), (BLOCK * 2 * DIM, 1, 2 * DIM, 1)
    )
    pages = impl.pages(contract.layer(), cache)
    for x in (pages.k, pages.v):
        assert x.shape == (BLOCKS, BLOCK, 1, DIM)
        assert x.stride() == (BLOCK * 2 * DIM, 2 * DIM, DIM, 1)
    assert pages.v.data_ptr() - pages.k.data_ptr() == DIM * cache.element_size()


def test_prompts_in_part_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="kv_sharing_fast_prefill: expected False"):
        Engine(settings={"kv_sharing_fast_prefill": True})


ASKED = "Backend", "Impl", "MetadataBuilder"


def rows_of_guide() -> list[tuple[str, str, str]]:
    """(what, whether, how to ask) of the table in docs/serving.md."""
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    table = page.partition("| | served | asked |")[2].partition("\n\n")[0]
    return re.findall(r"^\| (.+?) \| (yes|no) \| `(.+)` \|$", table, re.M)


@pytest.mark.parametrize(("what", "served", "asked"), rows_of_guide(), ids=lambda text: text[:40])
def test_guide(what: str, served: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cudagraph_support(drafted: int) -> str:
        settings = contract.config(drafted=drafted)
        return adapter.SplitKVMetadataBuilder.get_cudagraph_support(settings, None).name

    def fused_output_quant(asked: SimpleNamespace) -> bool:
        gpu = replace(GPUS["a100"], capability=(asked.major, asked.minor))
        monkeypatch.setattr(adapter, "current", lambda: gpu)
        impl = adapter.SplitKVImpl(4, 64, 1.0)
        served: bool = impl.fused_output_quant_supported(adapter.kFp8StaticTensorSym)
        return served

    orders = {}
    for layout in ("NHD", "HND"):
        contract.use_layout(monkeypatch, layout)
        orders[Engine().cache.stride()] = layout
    known = {
        **{f"SplitKV{x}": getattr(adapter, f"SplitKV{x}") for x in ASKED},
        **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")},
        "capability": lambda major, minor: SimpleNamespace(major=major, minor=minor),
        "cudagraph_support": cudagraph_support,
        "fused_output_quant": fused_output_quant,
        "layouts": orders.values(),
    }
    assert bool(eval(asked, known)) == (served == "yes"), what


def test_guide_has_a_table() -> None:
    assert len(rows_of_guide()) > 20


def test_contracts_have_the_same_names() -> None:
    """One of them is imported, by what vLLM has."""
    folder = Path(adapter.__file__).parent
    files = [folder / f"vllm_contract_{release}.py" for release in ("0_26", "0_29")]
    assert Path(adapter.contract.__file__) in files
    lists = [re.findall(r"^__all__ = .*", file.read_text(), re.M) for file in files]
    assert lists[0] == lists[1] != []
    assert all(hasattr(adapter.contract, name) for name in adapter.contract.__all__)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point names it; it may be called twice."""
    registered: dict[Any, str] = {}
    monkeypatch.setattr(adapter, "register_backend", registered.__setitem__)
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    (entry,) = re.findall(r'entry-points."vllm.general_plugins"]\nsplitkv = "([^"]+)"', project)
    module, _, function = entry.partition(":")
    for _ in range(2):
        getattr(import_module(module), function)()
    ((member, path),) = registered.items()
    assert member.name == "CUSTOM"
    assert path == f"{adapter.__name__}.SplitKVBackend" == f"{module}.SplitKVBackend"


# --- batch invariance --------------------------------------------------------------------------


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch has a plan of the policy, for bounds that no batch changes."""
    monkeypatch.setattr(adapter.envs, "VLLM_BATCH_INVARIANT", True)
    engine = Engine()
    for _, made in mixed_steps(engine, 4):
        assert (made.step.max_seqlen_q, made.step.max_seqlen_k) == (256, LONGEST)
    plans = engine.impl.plans._made.values()
    assert plans and {plan.policy for plan in plans} == {"batch_invariant"}
    assert {plan.problem.kind for plan in plans} == {"decode", "varlen"}
    assert len({plan.config for plan in plans if plan.problem.kind == "decode"}) == 1
    assert not engine.builder.use_cascade_attention(64, [1] * 8, 4, 2, *[False] * 3, 1, 1)


def test_the_policy_of_requests_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_DECODE_POLICY", "scheduled")
    engine = Engine()
    for _ in mixed_steps(engine, 4):
        pass
    plans = engine.impl.plans._made.values()
    assert {(plan.policy, plan.problem.kind) for plan in plans} == {("scheduled", "decode")}


def test_a_policy_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_DECODE_POLICY", "best")
    with pytest.raises(ValueError, match="policy: expected 'waves', .* got 'best'"):
        list(mixed_steps(Engine(), 4))


def test_batch_invariance_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.envs, "VLLM_BATCH_INVARIANT", True)
    engine = Engine()
    impl = adapter.SplitKVImpl(HEADS, DIM, 0.3, HEADS, attn_type="encoder_only")
    for counts in ((7,), (5, 90, 1)):
        new = [(engine.request(n), n) for n in counts]
        made = engine.builder.build(0, engine.described(new, causal=False))
        q, k, v = (tokens(sum(counts), HEADS) for _ in range(3))
        out = torch.full_like(q, torch.nan)
        impl.forward(engine.layer, q, k, v, engine.cache, made, out)
        for x in zip(*(x.split(counts) for x in (q, k, v, out)), strict=True):
            q_, k_, v_ = (y[None].float() for y in x[:3])
            wide = reference.attention(q_, k_, v_, softmax_scale=0.3)[0][0]
            torch.testing.assert_close(x[3].double(), wide.double(), rtol=2e-2, atol=2e-2)
    plans = impl.plans._made.values()
    assert {(plan.policy, plan.problem.kind) for plan in plans} == {("batch_invariant", "varlen")}
    assert {(plan.problem.seqlen_q, plan.problem.seqlen_k) for plan in plans} == {(256, 256)}


@pytest.mark.parametrize("name", ["enable_chunked_prefill", "enable_prefix_caching"])
def test_batch_invariance_needs_whole_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.envs, "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(ValueError, match=f"{name}: expected False with VLLM_BATCH_INVARIANT"):
        Engine(settings={name: True})
