"""The attention backend of SGLang against the definition, in batches as its scheduler has them."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_contract as contract
import torch
from fake_gpu import compilations, fake_gpu
from sglang_contract import ForwardMode, adapter
from torch import Tensor

from splitkv import reference
from splitkv.core.device import Device
from splitkv.core.masks import Mask
from splitkv.integrations import engine_warmup
from splitkv.testing import assert_close

HEADS, KV_HEADS, DIM, CONTEXT, REQUESTS = 4, 2, 16, 160, 6
WINDOWED = 96  # keys of a request that the pool of layers with a window has, on average
DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 5,
}
DTYPE = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def tokens(count: int, heads: int) -> Tensor:
    return torch.randn(count, heads, DIM, dtype=DTYPE)


class Engine:
    """As much of SGLang as a backend sees: a pool, the slots of each request, batches."""

    def __init__(self, page_size: int = 1, dtype: torch.dtype = DTYPE, **more: Any) -> None:
        torch.manual_seed(0)
        self.draw, self.page_size = random.Random(0), page_size
        self.sinks = more.pop("sinks", None)
        self.layer = contract.layer(HEADS, KV_HEADS, DIM, **more.pop("layer", {}))
        pool = contract.Pool(REQUESTS * CONTEXT, page_size, KV_HEADS, DIM, dtype)
        windowed = more.pop("windowed", None)
        if windowed is not None:
            own = contract.Pool(REQUESTS * WINDOWED, page_size, KV_HEADS, DIM, dtype)
            pool = contract.TwoPools(pool, own, windowed)
        self.runner = contract.runner(pool, REQUESTS, CONTEXT, page_size, **more)
        self.backend = adapter.SplitKVAttnBackend(self.runner)
        pages = list(range(1, 1 + REQUESTS * CONTEXT // page_size))
        self.draw.shuffle(pages)
        slots = torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)
        self.slots = slots.view(REQUESTS, CONTEXT)
        self.runner.req_to_token_pool.req_to_token.copy_(self.slots)
        self.pool, self.window_pages = pool, list(range(1, 1 + REQUESTS * WINDOWED // page_size))
        self.k = [tokens(0, KV_HEADS) for _ in range(REQUESTS)]
        self.v = [tokens(0, KV_HEADS) for _ in range(REQUESTS)]

    def batch(self, mode: ForwardMode, new: dict[int, int], host: bool = True) -> Any:
        """SGLang's description of a batch of these requests and new tokens of each."""
        for request, n in new.items():
            self.k[request] = torch.cat([self.k[request], tokens(n, KV_HEADS)])
            self.v[request] = torch.cat([self.v[request], tokens(n, KV_HEADS)])
        self.map_window(new)
        verified = mode == ForwardMode.TARGET_VERIFY
        drafts = max(new.values()) if verified else 0
        lengths = torch.tensor([len(self.k[request]) - drafts for request in new])
        counts = torch.tensor(list(new.values()))
        where = [
            self.slots[request, len(self.k[request]) - n : len(self.k[request])]
            for request, n in new.items()
        ]
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(new),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone() if host else None,
            req_pool_indices=torch.tensor(list(new)),
            extend_seq_lens=counts,
            extend_seq_lens_cpu=counts.tolist(),
            out_cache_loc=torch.cat(where),
            spec_info=SimpleNamespace(draft_token_num=drafts) if verified else None,
        )

    def map_window(self, new: dict[int, int]) -> None:
        """As SGLang's allocator: pages of the other pool for those with new tokens, and none any
        more for those that have left the window of all of them."""
        if not isinstance(self.pool, contract.TwoPools):
            return
        size, window = self.page_size, self.layer.sliding_window_size
        for request, n in new.items():
            length = len(self.k[request])
            seen = max(length - n - window, 0) // size if self.layer.layer_id else 0
            pages = self.pool.mapping[self.slots[request, ::size]]
            for page in range(-(-length // size)):
                slots, held = self.slots[request, page * size : (page + 1) * size], pages[page]
                if page < seen and held:
                    self.window_pages.append(int(held) // size)
                    self.pool.mapping[slots] = 0
                elif page >= seen and not held:
                    first = self.window_pages.pop(0) * size
                    self.pool.mapping[slots] = torch.arange(first, first + size)

    def run(self, x: Any, new: dict[int, int], padded: int = 0) -> Tensor:
        """A layer of the batch, compared with the definition."""
        n = sum(new.values())
        q = tokens(n + padded, HEADS)
        k, v = (
            torch.cat([t[r][len(t[r]) - c :] for r, c in new.items()]) for t in (self.k, self.v)
        )
        decodes = x.forward_mode.is_decode()
        forward = self.backend.forward_decode if decodes else self.backend.forward_extend
        flat = q.view(n + padded, HEADS * DIM)
        out = forward(flat, k, v, self.layer, x, sinks=self.sinks)
        assert out.shape == flat.shape
        first = 0
        for request, count in new.items():
            self.compare(request, q[first : first + count], out[first : first + count])
            first += count
        return out

    def compare(self, request: int, q: Tensor, out: Tensor) -> None:
        layer = self.layer
        causal = layer.attn_type == adapter.AttentionType.DECODER
        options = self.backend.options_of(layer, causal)
        mask = Mask(causal, *options.pop("window_size")).within_reach()
        held = self.k[request], self.v[request]
        stored = self.runner.token_to_kv_pool.dtype
        if stored in (E4M3, E5M2):
            scales = (1.0 if x is None else x for x in (layer.k_scale, layer.v_scale))
            pairs = zip(held, scales, strict=True)
            held = tuple((x / s).to(stored).float() * s for x, s in pairs)
        results = [
            reference.attention(
                *(x[None].to(dtype) for x in (q, *held)),
                **options,
                mask=mask,
                sink_logits=self.sinks,
                upcast=False,
            )[0][0]
            for dtype in (torch.float32, DTYPE)
        ]
        assert_close(out.view(-1, HEADS, DIM), *results)

    def step(self, mode: ForwardMode, new: dict[int, int], **how: Any) -> Tensor:
        x = self.batch(mode, new, how.pop("host", True))
        self.backend.init_forward_metadata(x)
        return self.run(x, new, **how)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"layer": {"sliding_window_size": 19}},
    "softcap": {"layer": {"logit_cap": 5.0}},
    "sinks": {"sinks": SINKS},
    "not causal": {"layer": {"attn_type": adapter.AttentionType.ENCODER_ONLY}},
    "fp8": {"dtype": E4M3},
    "fp8 in e5m2": {"dtype": E5M2},
    "fp8 with scales": {
        "dtype": E4M3,
        "layer": {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor([0.03])},
    },
    "the same bits": {"enable_deterministic_inference": True},
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer", LAYERS)
def test_batches(layer: str, page_size: int) -> None:
    """Prompts, prompts behind a prefix, tokens one by one, both at once."""
    engine = Engine(page_size, **LAYERS[layer])
    engine.step(ForwardMode.EXTEND, {0: 5, 3: 40, 1: 1})
    engine.step(ForwardMode.DECODE, {3: 1, 0: 1}, padded=2)
    engine.step(ForwardMode.EXTEND, {3: 30, 2: 17}, padded=3)
    engine.step(ForwardMode.MIXED, {4: 21, 3: 1, 0: 1}, host=False)
    engine.step(ForwardMode.DECODE, dict.fromkeys(range(5), 1), host=False)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer_id", [0, 1])
def test_a_pool_of_layers_with_a_window(layer_id: int, page_size: int) -> None:
    """Layer 1 has a window and a pool of its own, whose pages are taken from tokens that left it;
    layer 0 has the slots of the requests."""
    own = {"layer_id": layer_id} | ({"sliding_window_size": 19} if layer_id else {})
    engine = Engine(page_size, layer=own, windowed=(1,))
    engine.step(ForwardMode.EXTEND, {0: 5, 3: 40, 1: 90})
    engine.step(ForwardMode.DECODE, {3: 1, 0: 1}, padded=2)
    engine.step(ForwardMode.EXTEND, {3: 50, 2: 17, 1: 2}, padded=3)
    engine.step(ForwardMode.MIXED, {4: 90, 3: 1, 0: 1}, host=False)
    for _ in range(20):
        engine.step(ForwardMode.DECODE, dict.fromkeys(range(5), 1))
    engine.backend.init_cuda_graph_state(8, 8)
    x = engine.batch(ForwardMode.DECODE, {0: 1, 1: 1})
    engine.backend.init_forward_metadata_out_graph(x, in_capture=True)
    kept = engine.backend.step, engine.backend.window_step, engine.backend.window_slots
    engine.run(x, {0: 1, 1: 1})
    for requests in ((0, 1), (3, 0)):
        new = dict.fromkeys(requests, 1)
        x = engine.batch(ForwardMode.DECODE, new)
        engine.backend.init_forward_metadata_out_graph(x)
        backend = engine.backend
        backend.step, backend.window_step, backend.window_slots = kept
        engine.run(x, new)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer", ["plain", "window", "sinks", "fp8", "the same bits"])
def test_chains_of_drafts(layer: str, page_size: int) -> None:
    """Lengths are those before the drafts; of these the next batch keeps some."""
    engine = Engine(page_size, **LAYERS[layer], **DRAFTS)
    engine.step(ForwardMode.EXTEND, {0: 5, 3: 40, 1: 70})
    drafted = {0: 5, 3: 5, 1: 5}
    for host in (True, False):
        engine.step(ForwardMode.TARGET_VERIFY, drafted, host=host, padded=2)
        for request, kept in ((0, 1), (3, 4), (1, 5)):
            length = len(engine.k[request]) - 5 + kept
            engine.k[request] = engine.k[request][:length]
            engine.v[request] = engine.v[request][:length]
    engine.backend.init_cuda_graph_state(4, 20)
    x = engine.batch(ForwardMode.TARGET_VERIFY, {1: 5, 0: 5})
    engine.backend.init_forward_metadata_out_graph(x, in_capture=True)
    captured = engine.backend.step
    engine.run(x, {1: 5, 0: 5})
    x = engine.batch(ForwardMode.TARGET_VERIFY, {3: 5, 0: 5})
    engine.backend.init_forward_metadata_out_graph(x)
    engine.backend.step = captured
    engine.run(x, {3: 5, 0: 5})


@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs(page_size: int) -> None:
    """Every replay reads the addresses of the capture, which have its own lengths and pages."""
    engine = Engine(page_size)
    engine.step(ForwardMode.EXTEND, {0: 5, 3: 40, 1: 90})
    engine.backend.init_cuda_graph_state(8, 8)
    assert engine.backend.get_cuda_graph_seq_len_fill_value() == 1
    x = engine.batch(ForwardMode.DECODE, {0: 1, 1: 1})
    engine.backend.init_forward_metadata_out_graph(x, in_capture=True)
    captured = engine.backend.step
    engine.run(x, {0: 1, 1: 1})
    for requests in ((0, 1), (3, 0), (1, 3)):
        new = dict.fromkeys(requests, 1)
        x = engine.batch(ForwardMode.DECODE, new)
        engine.backend.init_forward_metadata_out_graph(x)
        engine.backend.init_forward_metadata_in_graph(x)
        assert engine.backend.step.max_seqlen_k == captured.max_seqlen_k
        engine.backend.step = captured
        engine.run(x, new)


@pytest.mark.parametrize("policy", ["", "waves"])
def test_the_policy_of_requests_that_decode(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scheduled`, as in vLLM, or that of the environment."""
    if policy:
        monkeypatch.setenv("SPLITKV_DECODE_POLICY", policy)
    engine = Engine()
    engine.step(ForwardMode.EXTEND, {0: 5, 3: 40})
    engine.step(ForwardMode.DECODE, {0: 1, 3: 1})
    (plans,) = engine.backend.plans.values()
    made = [(plan.policy, plan.problem.kind) for plan in plans._made.values() if plan]
    assert made == [(policy or "scheduled", "decode")]


def test_graphs_of_other_batches_are_refused() -> None:
    engine = Engine()
    engine.backend.init_cuda_graph_state(4, 4)
    x = engine.batch(ForwardMode.EXTEND, {0: 3})
    with pytest.raises(NotImplementedError, match="expected DECODE or TARGET_VERIFY, got EXTEND"):
        engine.backend.init_forward_metadata_out_graph(x)


def with_model(engine: Engine, *kinds: dict[str, Any]) -> Any:
    """The runner of an engine, with a model of layers that differ from the engine's by these."""
    model = torch.nn.Module()
    for number, kind in enumerate(kinds):
        layer = adapter.RadixAttention.__new__(adapter.RadixAttention)
        torch.nn.Module.__init__(layer)
        vars(layer).update(vars(engine.layer) | kind)
        model.add_module(str(number), layer)
    engine.runner.model, engine.runner.dtype = model, DTYPE
    return engine.runner


def test_each_kind_of_layer_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[Any, ...]]()
    monkeypatch.setattr(engine_warmup, "warm_layer", lambda *given: asked.append(given))
    engine = Engine(16, E5M2, chunked_prefill_size=100, **DRAFTS)
    windowed, encoder = {"sliding_window_size": 7}, adapter.AttentionType.ENCODER_ONLY
    runner = with_model(engine, {}, windowed, {"layer_id": 2}, {"attn_type": encoder})
    runner.model.sinks = torch.nn.Parameter(SINKS)
    engine.backend.warm_up(runner)
    kinds = [kind for kind, _, _ in asked]
    assert [kind.arguments["window_size"] for kind in kinds] == [(-1, -1), (7, -1)]
    assert all(kind.sink_logits and kind.codec.name == "fp8_e5m2" for kind in kinds)
    assert {sizes for _, sizes, _ in asked} == {
        engine_warmup.Sizes((1, 2, 4, 6), 100, 6, CONTEXT, (1, 5), appends=False)
    }


def test_steps_after_warming_up_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for a GPU of the table and nothing runs: see support/fake_gpu.py."""
    gpu = Device.named("h200")
    monkeypatch.setattr(engine_warmup, "current", lambda: gpu)
    monkeypatch.setattr(Engine, "compare", lambda *_: None)
    engine = Engine(16, chunked_prefill_size=64)
    with fake_gpu("h200"), torch.no_grad():
        engine.backend.warm_up(with_model(engine, {}))
        with compilations() as compiled:
            engine.step(ForwardMode.EXTEND, {0: 5, 3: 40, 1: 19})
            engine.step(ForwardMode.EXTEND, {1: 64})
            engine.step(ForwardMode.DECODE, {0: 1, 1: 1})
            engine.step(ForwardMode.MIXED, {0: 1, 1: 1, 2: 33, 3: 1})
            engine.step(ForwardMode.DECODE, {0: 1, 1: 1, 2: 1, 3: 1})
        assert compiled == []


def test_idle() -> None:
    engine = Engine()
    x = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    engine.backend.init_forward_metadata(x)
    assert engine.backend.step is None
    q = torch.empty(0, HEADS * DIM, dtype=DTYPE)
    assert engine.backend.forward_extend(q, None, None, engine.layer, x).shape == q.shape


def test_the_same_bits_have_plans() -> None:
    engine = Engine(enable_deterministic_inference=True)
    engine.step(ForwardMode.EXTEND, {0: 5, 3: 40})
    engine.step(ForwardMode.DECODE, {0: 1, 3: 1})
    plans = engine.backend.plans[0]._made.values()
    assert {(plan.policy, plan.problem.kind) for plan in plans} == {
        ("batch_invariant", "varlen"),
        ("batch_invariant", "decode"),
    }
    assert {plan.problem.seqlen_k for plan in plans} == {CONTEXT}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"use_mla_backend": True}, "use_mla_backend: expected False, got True"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: expected False, got True"),
        ({"prefill_aware_swa": True}, "prefill_aware_swa: expected False, got True"),
        ({"enable_unified_memory": True}, "enable_unified_memory: expected False, got True"),
        ({"dcp_size": 2}, "dcp_size: expected 1, got 2"),
        (DRAFTS | {"speculative_algorithm": "NGRAM"}, "speculative_algorithm: .*, got NGRAM"),
        (DRAFTS | {"speculative_eagle_topk": 4}, "speculative_eagle_topk: expected 1, got 4"),
        (
            DRAFTS | {"speculative_num_draft_tokens": 17},
            "speculative_num_draft_tokens: expected at most 16, got 17",
        ),
        (
            {"enable_deterministic_inference": True, "disable_radix_cache": False},
            "disable_radix_cache: expected True with deterministic inference, got False",
        ),
        (
            {"enable_deterministic_inference": True, "chunked_prefill_size": 8192},
            "chunked_prefill_size: expected -1 with deterministic inference, got 8192",
        ),
        ({"dtype": torch.int8}, "kv_cache_dtype: expected auto, fp8_e4m3 or fp8_e5m2, got torch"),
    ],
)
def test_what_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        Engine(**more)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"is_cross_attention": True}, "is_cross_attention: expected False"),
        ({"logit_cap": 3.0, "logit_capping_method": "none"}, "logit_capping_method: expected tanh"),
        ({"xai_temperature_len": 9}, "xai_temperature_len: expected none"),
    ],
)
def test_layers_that_are_refused(layer: dict[str, Any], message: str) -> None:
    engine = Engine(layer=layer)
    with pytest.raises(NotImplementedError, match=message):
        engine.step(ForwardMode.EXTEND, {0: 5})
    with pytest.raises(NotImplementedError, match="rel_bias: expected None, got int"):
        engine.backend.forward_extend(None, None, None, engine.layer, None, rel_bias=3)


def test_register() -> None:
    for _ in range(2):
        adapter.register()
    assert adapter.ATTENTION_BACKEND_CHOICES.count("splitkv") == 1
    if not contract.REAL:
        assert {"splitkv": adapter.SplitKVAttnBackend} == contract.BACKENDS
        hooked = adapter.contract.ADJUSTMENTS, adapter.admit_for_sinks, "around"
        assert [hooked] == contract.HOOKS
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    (entry,) = re.findall(r'entry-points."sglang.srt.plugins"]\nsplitkv = "([^"]+)"', project)
    assert entry == f"{adapter.__name__}:register"


class Arguments(SimpleNamespace):
    """A server's arguments, asked for their backends as either release asks."""

    def get_model_config(self) -> Any:
        return SimpleNamespace(hf_config=SimpleNamespace(architectures=[self.model]))

    def _resolved_attention_backends(self) -> tuple[str, str]:
        return self.attention_backend, self.decode_attention_backend


@pytest.mark.parametrize("release", contract.releases)
@pytest.mark.parametrize("model", ["GptOssForCausalLM", "LlamaForCausalLM"])
def test_the_list_of_backends_that_have_sinks(
    model: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has `triton`; the names are as they were before and afterwards, also where it raises."""
    differing, seen = contract.releases[release], list[tuple[str, str]]()
    monkeypatch.setattr(adapter, "contract", differing)
    arguments = Arguments(
        model=model,
        attention_backend="splitkv",
        prefill_attention_backend=None,
        decode_attention_backend="fa3",
    )
    if contract.REAL:
        monkeypatch.setattr(differing, "config_of", lambda x: x.get_model_config().hf_config)

    def asked() -> tuple[str, str]:
        if release == "0_5_17":
            return arguments._resolved_attention_backends()
        backends: tuple[str, str] = differing.model_hook.attention_backends_of(arguments)
        return backends

    def adjust(x: Any) -> None:
        seen.append(asked())
        raise AssertionError("as SGLang does")

    with pytest.raises(AssertionError, match="as SGLang does"):
        adapter.admit_for_sinks(adjust, arguments)
    assert seen == [("triton" if model == adapter.SINKS else "splitkv", "fa3")]
    assert asked() == ("splitkv", "fa3")
    assert differing.resolved(arguments).attention_backend == "splitkv"
