"""Models of transformers with `attn_implementation="splitkv"` against their eager attention."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import fake_gpu
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from models import (  # noqa: E402
    CACHES,
    COMMON,
    CONFIGS,
    HYBRID,
    PADDINGS,
    SEQLEN,
    WINDOW,
    WINDOWED,
    assert_same_logits,
    both,
    exact_attention,
    exactly,
    from_config,
    left_padding,
    make_model,
    right_padding,
    tokens,
)
from transformers import CompileConfig, DynamicCache, Qwen2MoeConfig  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama import modeling_llama as llama  # noqa: E402

import splitkv  # noqa: E402
from splitkv.core.masks import Mask  # noqa: E402
from splitkv.integrations import transformers as integration  # noqa: E402
from splitkv.integrations import visibility  # noqa: E402
from splitkv.runtime import dispatch  # noqa: E402
from splitkv.testing import assert_close  # noqa: E402


@pytest.fixture(autouse=True)
def quiet_machine() -> Iterator[None]:
    """One thread: the tensors are too small to share out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    integration.register()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Every call of the public functions that the integration makes."""
    seen: list[SimpleNamespace] = []

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(SimpleNamespace(name=name, args=args, kwargs=kwargs))
            return function(*args, **kwargs)

        return call

    for name in ("attention", "attention_varlen", "decode"):
        monkeypatch.setattr(splitkv, name, spy(name, getattr(splitkv, name)))
    return seen


# Generation


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", CONFIGS)
def test_generates_the_tokens_of_eager_attention(
    name: str, padding: str, cache: str, calls: list[SimpleNamespace]
) -> None:
    prompt, mask = tokens(seqlen=20), PADDINGS[padding](20)

    def run(model: Any) -> torch.Tensor:
        return model.generate(
            prompt.masked_fill(mask == 0, 0),
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            disable_compile=True,
            cache_implementation=cache if cache == "static" else None,
        )

    eager, ours = both(make_model(name), run)
    assert eager[:, 20:].unique().numel() > 10, "expected tokens that tell models apart"
    assert torch.equal(eager, ours)
    prefill, decode = calls[:2], calls[2:]
    expected = {"attention_varlen"} if padding == "left" else {"attention"}
    assert {call.name for call in prefill} == expected
    assert {call.name for call in decode} == {"decode"}
    assert len(decode) == 2 * 11
    # Left padding is looked up, a static cache has lengths, and a growing one needs neither.
    full = decode[1].kwargs  # the last layer at the first step
    assert ("page_table" in full) == (padding == "left")
    filled = cache == "static" and name in WINDOWED  # the window, by the prompt
    if not filled:
        assert ("cache_seqlens" in full) == (padding == "left" or cache == "static")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_a_default_cache_grows_without_a_new_plan_in_every_step(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a GPU on which nothing runs: what transformers concatenates has strides of its own in
    every step, and layers of one kind share one launcher."""
    model, described = make_model(name).bfloat16(), list[int]()
    model.set_attn_implementation("splitkv")
    describe = dispatch.describe_decode

    def counted(q: Any, k_cache: Any, *rest: Any, **given: Any) -> Any:
        described.append(k_cache.shape[1])
        return describe(q, k_cache, *rest, **given)

    monkeypatch.setattr(dispatch, "describe_decode", counted)
    with fake_gpu() as launched:
        cache, prompt = DynamicCache(config=model.config), tokens(batch=batch, seqlen=300)
        model(prompt, **{integration.CACHE_ARGUMENT: cache})
        for _ in range(40):
            model(prompt[:, :1], **{integration.CACHE_ARGUMENT: cache})
            launched.calls.clear()
        kinds = len({getattr(layer, "sliding_window", None) for layer in cache.layers})
        assert described and max(described) <= 303 and len(described) <= 3 * kinds
        assert launched.through_triton <= 12 * kinds


def test_generates_with_a_compiled_forward_and_a_static_cache() -> None:
    model, mask = make_model("gpt_oss"), left_padding(20)
    compiled = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    results = []
    for name, options in (
        ("eager", {"disable_compile": True}),
        ("splitkv", {"compile_config": compiled}),
    ):
        model.set_attn_implementation(name)
        results.append(
            model.generate(
                tokens(seqlen=20),
                attention_mask=mask,
                max_new_tokens=4,
                do_sample=False,
                cache_implementation="static",
                **options,
            )
        )
    torch.compiler.reset()
    assert torch.equal(*results)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_bfloat16_logits_keep_the_tolerance_rule(name: str, padding: str) -> None:
    model, mask = make_model(name).bfloat16(), PADDINGS[padding]()

    def run(model: Any) -> torch.Tensor:
        cache, logits = DynamicCache(config=model.config), []
        for begin, end in ((0, 38), (38, 39), (39, 40)):
            out = model(
                tokens()[:, begin:end],
                attention_mask=mask[:, :end],
                **{integration.CACHE_ARGUMENT: cache},
            )
            logits.append(out.logits)
        return torch.cat(logits, 1)[mask.bool()]

    eager, ours = both(model, run)
    assert_close(ours, run(exactly(model, torch.float32)), eager, name="logits")


# Prompts in parts, padding on any side


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_prompt_in_parts_with_left_padding(
    name: str, cache: str, grad: bool, calls: list[SimpleNamespace]
) -> None:
    mask = left_padding()

    def run(model: Any) -> torch.Tensor:
        store, logits = CACHES[cache](model.config), []
        # Long parts, a few tokens at once (as speculative decoding does), and one.
        for begin, end in ((0, 17), (17, 36), (36, 39), (39, 40)):
            out = model(
                tokens()[:, begin:end],
                attention_mask=mask[:, :end],
                **{integration.CACHE_ARGUMENT: store},
            )
            logits.append(out.logits)
        return torch.cat(logits, 1)[mask.bool()].detach()

    with torch.set_grad_enabled(grad):
        assert_same_logits(make_model(name), run)
    # decode is not differentiable on a GPU
    assert ("decode" in {call.name for call in calls}) == (not grad)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_short_prompt_in_a_static_cache(name: str, calls: list[SimpleNamespace]) -> None:
    mask = left_padding(12)

    def run(model: Any) -> torch.Tensor:
        cache = CACHES["static"](model.config)
        out = model(tokens(seqlen=12), attention_mask=mask, **{integration.CACHE_ARGUMENT: cache})
        return out.logits[mask.bool()]

    assert_same_logits(make_model(name), run)
    assert "decode" in {call.name for call in calls}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_right_padding(name: str, calls: list[SimpleNamespace]) -> None:
    mask = right_padding()

    def run(model: Any) -> torch.Tensor:
        return model(tokens(), attention_mask=mask, use_cache=False).logits[mask.bool()]

    assert_same_logits(make_model(name), run)
    assert {call.name for call in calls} == {"attention_varlen"}


@torch.no_grad()
def test_decode_after_right_padding_skips_the_gap() -> None:
    mask = torch.cat([right_padding(36), torch.ones(3, 4, dtype=torch.int64)], 1)
    positions = (mask.cumsum(1) - 1).clamp(0)

    def run(model: Any) -> torch.Tensor:
        cache, logits = DynamicCache(config=model.config), []
        for begin, end in ((0, 36), (36, 37), (37, 40)):
            out = model(
                tokens()[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                **{integration.CACHE_ARGUMENT: cache},
            )
            logits.append(out.logits)
        return torch.cat(logits, 1)[mask.bool()]

    assert_same_logits(make_model("llama"), run)


class Count(TorchDispatchMode):
    """Counts operations, and those whose result the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += 1
        aten = torch.ops.aten
        self.read += func in (aten._local_scalar_dense.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_positions_of_whole_rows_are_looked_at_once() -> None:
    """Training has them in every forward, and the GPU waits for whoever looks."""
    packing, whole = visibility.Packing(), torch.arange(SEQLEN).expand(3, -1)
    with Count() as count:
        assert all(packing.segments(whole, 1) is None for _ in range(8))
    assert count.read == 1 and count.asked <= 8
    found = packing.segments(torch.arange(8).repeat(2)[None], 1)
    assert found is not None and found.cu_seqlens_q.tolist() == [0, 8, 16]


def test_a_mask_that_hides_nothing_is_looked_at_once() -> None:
    """Generation has such a mask before every token: what describes padding is not worked out."""
    mask = torch.ones(4, 96, dtype=torch.bool)
    with torch.no_grad(), Count() as count:
        seen = visibility.visible_keys(4, 1, 96, 95, attention_mask=mask)
    assert (seen.cache_seqlens, seen.slots, seen.segments, seen.length) == (None, None, None, 96)
    assert count.asked <= 4
    mask[2, :5] = False
    with torch.no_grad():
        seen = visibility.visible_keys(4, 1, 96, 95, attention_mask=mask)
    assert seen.cache_seqlens is not None
    assert seen.cache_seqlens.tolist() == [96, 96, 91, 96]


def test_padding_in_the_middle_raises_where_it_cannot_be_honoured() -> None:
    mask = torch.ones(3, SEQLEN, dtype=torch.int64)
    mask[1, 5:9] = 0
    model = make_model("llama")
    model.set_attn_implementation("splitkv")
    with pytest.raises(splitkv.UnsupportedProblem, match="padding between tokens; pad on the left"):
        model(tokens(), attention_mask=mask, use_cache=False)
    # A window counts the gap as distance: a decode step that only skipped it would be wrong.
    with pytest.raises(splitkv.UnsupportedProblem, match="padding between tokens"), torch.no_grad():
        integration.visible_keys(
            3, 1, SEQLEN, SEQLEN - 1, 0, sliding_window_causal_mask_function(8), mask.bool()
        )


@torch.no_grad()
def test_query_padding_after_the_cache_is_aligned() -> None:
    """A sequence whose new tokens end in padding: its last token is not the last key."""
    mask = torch.ones(3, SEQLEN, dtype=torch.int64)
    mask[1, 38:] = 0

    def run(model: Any) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        first = model(tokens()[:, :35], **{integration.CACHE_ARGUMENT: cache}).logits
        rest = model(
            tokens()[:, 35:], attention_mask=mask, **{integration.CACHE_ARGUMENT: cache}
        ).logits
        return torch.cat([first, rest], 1)[mask.bool()]

    assert_same_logits(make_model("gpt_oss"), run)


@torch.no_grad()
def test_encoder_with_padding_on_both_sides() -> None:
    mask = left_padding()
    mask[0, -5:] = 0

    def run(model: Any) -> torch.Tensor:
        out = model(tokens(), attention_mask=mask, use_cache=False, is_causal=False)
        return out.logits[mask.bool()]

    assert_same_logits(make_model("llama"), run)
    assert_same_logits(make_model("gemma2"), run)


def test_a_window_that_only_the_mask_knows_is_honoured() -> None:
    """Qwen2-MoE hands its layers the windowed mask but not `sliding_window`."""
    config = Qwen2MoeConfig(
        **COMMON,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=HYBRID,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    assert_same_logits(from_config(config), lambda m: m(tokens(), use_cache=False).logits.detach())


# Training


@pytest.mark.parametrize("padding", ["whole", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_eager_attention(name: str, padding: str) -> None:
    mask = right_padding() if padding == "right" else PADDINGS[padding]()
    # A token is predicted from the one before it, which has to be a token too.
    labels = tokens().masked_fill(mask * torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0, -100)
    model = make_model(name).train()

    def run(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(tokens(), attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    exact = exactly(model)
    eager, ours = both(model, run)
    reference = run(exact)
    assert ours.keys() == eager.keys() == reference.keys()
    assert any(n.endswith("sinks") for n in ours) == (name == "gpt_oss")
    # By module: the error of a bias of two elements says too little of the working precision's.
    for module in {n.rpartition(".")[0] for n in reference}:
        a, ref, pt = (
            torch.cat([x.flatten() for n, x in of.items() if n.rpartition(".")[0] == module])
            for of in (ours, reference, eager)
        )
        assert_close(a, ref, pt, factor=3.0, name=f"gradients of {module}")


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradient_checkpointing(name: str, reentrant: bool, calls: list[SimpleNamespace]) -> None:
    """A second forward in the backward: the same gradients, one more call a layer."""
    model, mask = make_model(name).train(), left_padding()
    model.set_attn_implementation("splitkv")
    labels = tokens().masked_fill(mask == 0, -100)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        before = len(calls)
        model(tokens(), attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        assert len(calls) - before == 2 * (1 + checkpointing)
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(grad is not None for grad in grads[0].values())
    torch.testing.assert_close(grads[0], grads[1])


def test_dropout_is_handed_on(calls: list[SimpleNamespace]) -> None:
    model = make_model("llama").train()
    model.set_attn_implementation("splitkv")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    first, second = (model(tokens(), use_cache=False).logits for _ in range(2))
    assert {call.kwargs["dropout_p"] for call in calls} == {0.5}
    assert not torch.equal(first, second)


# Mixed precision


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", CONFIGS)
def test_trains_under_autocast(name: str, padding: str) -> None:
    """float32 weights as `Trainer(bf16=True)` has them: gradients as near as eager attention's."""
    mask = PADDINGS[padding]()
    labels = tokens().masked_fill(mask * torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0, -100)
    model = make_model(name).train()

    def run(model: Any, autocast: bool = True) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(tokens(), attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    eager, ours = both(model, run)
    model.set_attn_implementation("eager")
    reference = run(model, autocast=False)
    assert ours.keys() == eager.keys() == reference.keys()
    a, ref, pt = (
        torch.cat([of[n].flatten() / reference[n].abs().max() for n in reference])
        for of in (ours, reference, eager)
    )
    assert_close(a, ref, pt, factor=3.0, name="gradients")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_queries_of_a_model_in_fewer_bits_are_cast(dtype: torch.dtype) -> None:
    """Layer norms that are kept in float32, as PEFT does, as by FlashAttention's path."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=dtype))
    query, key = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    seen = integration.visible_keys(1, 5, 5)
    out, _ = integration.attention_forward(layer, query, key, key.to(dtype), seen)
    exact, _ = integration.attention_forward(layer, *(x.to(dtype) for x in (query, key, key)), seen)
    assert out.dtype == dtype and torch.equal(out, exact)


# Packed sequences

LENGTHS = (11, 17, 12)


def separate(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    parts = input_ids.split(LENGTHS, 1)
    return torch.cat([model(part, use_cache=False).logits for part in parts], 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_are_those_of_separate_ones(name: str) -> None:
    """Also where the model makes its mask without `position_ids`, as gpt-oss does."""
    model, positions = make_model(name), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    runs = {
        "separate": lambda m: separate(m, tokens(1)),
        "packed": lambda m: m(tokens(1), position_ids=positions, use_cache=False).logits,
    }
    weights = torch.randn(1, SEQLEN, 99)
    results = {}
    exact = exactly(model)
    for what, of in {"pt": (model, "separate"), "ours": (model, "packed")}.items():
        of[0].set_attn_implementation("splitkv")
        results[what] = gradients_and_logits(of[0], runs[of[1]], weights)
    reference = gradients_and_logits(exact, runs["separate"], weights)
    for part, factor in (("logits", 2.0), ("gradients", 3.0)):
        a, ref, pt = (of[part] for of in (results["ours"], reference, results["pt"]))
        assert_close(a, ref, pt, factor=factor, name=part)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_packed_positions_of_one_row_are_those_of_every_row(name: str) -> None:
    model, positions = make_model(name), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    model.set_attn_implementation("splitkv")
    with torch.no_grad():
        one, each = (
            model(tokens(), position_ids=given, use_cache=False).logits
            for given in (positions, positions.expand(3, -1))
        )
        assert torch.equal(one, each)
        torch.testing.assert_close(one, separate(model, tokens()), rtol=1e-4, atol=1e-4)


def test_positions_of_another_number_of_rows_are_refused() -> None:
    packed = torch.arange(4).repeat(2, 2)
    with pytest.raises(ValueError, match=r"position_ids: expected \[1 or 3, length\]"):
        visibility.Packing().segments(packed, 3)


def gradients_and_logits(
    model: Any, run: Callable[[Any], torch.Tensor], weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = run(model)
    (logits * weights).sum().backward()
    # Each over its largest element.
    grads = [p.grad / p.grad.abs().max() for p in model.parameters() if p.grad is not None]
    return {"logits": logits.detach(), "gradients": torch.cat([g.flatten() for g in grads])}


def test_a_row_of_one_sequence_is_not_cut(calls: list[SimpleNamespace]) -> None:
    """Positions that go on, in steps of any size or from anywhere, begin nothing anew."""
    model = make_model("gpt_oss")
    model.set_attn_implementation("splitkv")
    for positions in (torch.arange(SEQLEN) + 5, torch.arange(SEQLEN) * 2):
        model(tokens(1), position_ids=positions[None], use_cache=False)
    assert {call.name for call in calls} == {"attention"}


def test_packed_position_ids() -> None:
    packed = torch.cat([torch.arange(n) for n in LENGTHS])
    positions = torch.stack([packed, torch.arange(SEQLEN), packed])

    def run(model: Any) -> torch.Tensor:
        return model(tokens(), position_ids=positions, use_cache=False).logits.detach()

    assert_same_logits(make_model("llama"), run)
    assert_same_logits(make_model("gemma2"), run)


@pytest.mark.parametrize("name", CONFIGS)
def test_lengths_of_packed_sequences(name: str, calls: list[SimpleNamespace]) -> None:
    model = make_model(name)
    model.set_attn_implementation("splitkv")
    bounds = torch.tensor([0, 11, 28, 40])
    packed = model(
        tokens(1),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=17,
        max_length_k=17,
        use_cache=False,
    ).logits
    assert {call.name for call in calls} == {"attention_varlen"}
    alone = [model(part, use_cache=False).logits for part in tokens(1).split(LENGTHS, 1)]
    exact = [exactly(model)(part, use_cache=False).logits for part in tokens(1).split(LENGTHS, 1)]
    assert_close(packed, torch.cat(exact, 1), torch.cat(alone, 1), name="logits")


# What the mask function says


@pytest.mark.parametrize(
    ("mask_function", "matrix"),
    [
        (causal_mask_function, lambda q, k: k <= q),
        (bidirectional_mask_function, lambda q, k: k >= 0),
        (sliding_window_causal_mask_function(3), lambda q, k: (k <= q) & (k > q - 3)),
        (sliding_window_bidirectional_mask_function(3), lambda q, k: abs(q - k) <= 3),
        (
            chunked_causal_mask_function(4, torch.zeros(1)),
            lambda q, k: (k <= q) & (k // 4 == q // 4),
        ),
    ],
)
def test_recognises_what_transformers_makes(
    mask_function: Callable[..., Any], matrix: Callable[..., Any]
) -> None:
    pattern = visibility.recognise(mask_function)
    q, k = torch.arange(9)[:, None], torch.arange(9)[None, :]
    ours = Mask(pattern.causal, pattern.left, pattern.right, chunk=pattern.chunk).visible(q, k)
    assert torch.equal(ours.expand(9, 9), matrix(q, k).expand(9, 9))


@pytest.mark.parametrize(
    ("mask_function", "maker"),
    [
        (or_masks(causal_mask_function, bidirectional_mask_function), "or_masks"),
        (and_masks(causal_mask_function, lambda b, h, q, k: q != k), "<lambda>"),
    ],
)
def test_refuses_masks_that_it_cannot_say(mask_function: Callable[..., Any], maker: str) -> None:
    with pytest.raises(splitkv.UnsupportedProblem, match=f"got the mask function {maker}"):
        integration.visible_keys(1, 9, 9, mask_function=mask_function)


@torch.no_grad()
@pytest.mark.parametrize(("kv_offset", "q_length"), [(0, 1), (0, 9), (8, 1), (11, 1), (11, 6)])
@pytest.mark.parametrize("pads", [(0, 0), (0, 3)], ids=str)
def test_chunks_count_from_the_first_token(
    kv_offset: int, q_length: int, pads: tuple[int, int]
) -> None:
    """Left padding is no part of a chunk, and a cache that has dropped keys begins inside one."""
    chunk, kept = 8, 8 - 1 if kv_offset else 20
    keys = kept + q_length
    q, k, v = (torch.randn(2, n, keys, 16) for n in (4, 2, 2))
    q = q[:, :, -q_length:]
    leftpad = torch.tensor(pads)
    padding = torch.arange(kv_offset + keys) >= leftpad[:, None]
    rule = chunked_causal_mask_function(chunk, leftpad)
    attention_mask = padding if any(pads) else None
    where = (2, q_length, keys, kv_offset + kept, kv_offset)
    seen = integration.visible_keys(*where, rule, attention_mask)
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, seen, is_causal=True)
    key = kv_offset + torch.arange(keys)
    pos = kv_offset + kept + torch.arange(q_length)
    batch = torch.arange(2)[:, None, None, None]
    visible = rule(batch, 0, pos[:, None], key) & (key >= leftpad[:, None, None, None])
    exact = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x.to(dtype) for x in (q, k, v)), visible, enable_gqa=True
        ).transpose(1, 2)
        for dtype in (torch.float64, torch.float32)
    ]
    assert_close(out, *exact)


def test_chunks_after_a_gap_are_those_of_the_row() -> None:
    """A prompt padded on the right, of which the cache has kept the padding alone, goes on inside a
    chunk: new tokens that reach the next one are refused, others are right."""
    model, prompt = make_model("llama4"), 20
    mask = torch.ones(3, prompt + 12, dtype=torch.int64)
    mask[1, 5:prompt] = 0

    def run(model: Any, steps: tuple[int, ...]) -> torch.Tensor:
        cache, out, begin = DynamicCache(config=model.config), [], 0
        with torch.no_grad():
            for step in (prompt, *steps):
                end = begin + step
                given = {"attention_mask": mask[:, :end], integration.CACHE_ARGUMENT: cache}
                out.append(model(tokens()[:, begin:end], **given).logits)
                begin = end
        logits = torch.cat(out, 1)
        return logits[mask[:, : logits.shape[1]].bool()]

    for steps in ((1,) * 6, (2,) * 6, (4, 4)):  # the next chunk begins at 24
        torch.testing.assert_close(*both(model, lambda m, n=steps: run(m, n)))
    with pytest.raises(splitkv.UnsupportedProblem, match="padding between tokens"):
        run(model, (5,))


@torch.no_grad()
def test_no_padding_is_said_by_a_value() -> None:
    """Of causality alone, and of nothing hidden at all: a layer is left nothing to guess."""
    ones = torch.ones(2, 30, dtype=torch.bool)
    window = sliding_window_causal_mask_function(16)
    for rule, causal in ((causal_mask_function, True), (bidirectional_mask_function, False)):
        for mask in (None, ones):
            seen = integration.visible_keys(2, 30, 30, mask_function=rule, attention_mask=mask)
            assert (seen.causal, seen.window_size, seen.length) == (causal, (-1, -1), 30)
            assert seen.segments is seen.cache_seqlens is seen.slots is None
    for sizes in ((1, 30, 29), (1, 16, 29, 14)):
        seen = integration.visible_keys(2, *sizes, mask_function=window, attention_mask=ones)
        assert seen.cache_seqlens is None
    seen = integration.visible_keys(2, 30, 30, mask_function=window, attention_mask=ones)
    assert seen.window_size == (15, -1) and seen.segments is None


@torch.no_grad()
def test_padding_is_skipped_and_not_read() -> None:
    """Left padding in a cache: no key is moved, and what stands there does not matter."""
    batch, seqlen, heads, dim = 2, 20, 2, 16
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(batch, heads, seqlen, dim, generator=g) for _ in range(2))
    query = torch.randn(batch, 2 * heads, 1, dim, generator=g)
    mask = torch.ones(batch, seqlen, dtype=torch.bool)
    mask[1, :13] = False
    seen = integration.visible_keys(batch, 1, seqlen, seqlen - 1, attention_mask=mask)
    assert seen is not None and seen.cache_seqlens is not None
    assert seen.cache_seqlens.tolist() == [20, 7]
    pages = integration._pages(key.transpose(1, 2), integration._pitch(key.transpose(1, 2)))
    assert pages.data_ptr() == key.data_ptr()
    layer = torch.nn.Module()
    poisoned = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in (key, value)]
    out, weights = integration.attention_forward(layer, query, *poisoned, seen)
    assert weights is None
    for b, first in enumerate((0, 13)):
        keys, values = (x[b : b + 1, :, first:].transpose(1, 2) for x in (key, value))
        alone = splitkv.attention(query[b : b + 1].transpose(1, 2), keys, values)
        torch.testing.assert_close(out[b : b + 1], alone)


@torch.no_grad()
def test_outputs_at_padding_are_zero() -> None:
    mask = left_padding(20).bool()
    mask[0, -4:] = False
    seen = integration.visible_keys(3, 20, 20, attention_mask=mask)
    query, key = torch.randn(3, 4, 20, 16), torch.randn(3, 2, 20, 16)
    out, _ = integration.attention_forward(torch.nn.Module(), query, key, key, seen)
    assert torch.equal(out.abs().sum((2, 3)) > 0, mask)


@pytest.mark.parametrize("seqlen_q", [5, 20], ids=["few", "many"])
@torch.no_grad()
def test_cross_attention_lets_every_query_see_the_tokens(seqlen_q: int) -> None:
    mask = left_padding(30).bool()
    seen = integration.visible_keys(
        3, seqlen_q, 30, mask_function=bidirectional_mask_function, attention_mask=mask
    )
    query, key = torch.randn(3, 4, seqlen_q, 16), torch.randn(3, 2, 30, 16)
    out, _ = integration.attention_forward(torch.nn.Module(), query, key, key, seen)
    matrix = mask[:, None, None, :].expand(3, 1, seqlen_q, 30)
    expected, _ = exact_attention(torch.nn.Module(), query, key, key, matrix, scaling=0.25)
    torch.testing.assert_close(out, expected)


# A layer that is given no mask at all


class Layer(torch.nn.Module):
    num_key_value_groups = 2

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def without_a_mask(
    function: Callable[..., Any], of_module: bool | None, queries: int, **said: Any
) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, queries, 16, generator=g)
    key, value = (torch.randn(1, 2, 9, 16, generator=g) for _ in range(2))
    scaling = {"scaling": 0.25}
    out: torch.Tensor = function(Layer(of_module), query, key, value, None, **scaling, **said)[0]
    return out


@pytest.mark.parametrize("queries", [1, 5, 9])
@pytest.mark.parametrize("said", [None, True, False], ids=str)
@pytest.mark.parametrize("of_module", [None, True, False], ids=str)
@torch.no_grad()
def test_without_a_mask_a_layer_does_what_eager_and_sdpa_agree_on(
    of_module: bool | None, said: bool | None, queries: int
) -> None:
    """Eager attention knows no `is_causal`: if the call says so, sdpa alone is asked."""
    call = (of_module, queries)
    asked = {} if said is None else {"is_causal": said}
    sdpa = without_a_mask(sdpa_attention_forward, *call, **asked)
    eager = without_a_mask(llama.eager_attention_forward, *call)
    if torch.allclose(sdpa, eager, atol=1e-4) or (said and queries == 9):
        ours = without_a_mask(integration.attention_forward, *call, **asked)
        torch.testing.assert_close(ours, sdpa)
    else:
        assert queries > 1
        with pytest.raises(splitkv.UnsupportedProblem, match="attention_mask: expected a mask"):
            without_a_mask(integration.attention_forward, *call, **asked)


@torch.no_grad()
def test_a_window_without_a_mask_is_refused_where_it_hides_a_key() -> None:
    call = (integration.attention_forward, False, 9)
    with pytest.raises(splitkv.UnsupportedProblem, match="sliding_window: expected a mask from"):
        without_a_mask(*call, sliding_window=8)
    wide = without_a_mask(*call, sliding_window=9)
    assert torch.equal(wide, without_a_mask(*call))


@pytest.mark.parametrize("of_module", [True, False, None], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_sides"])
@torch.no_grad()
def test_the_mask_alone_says_what_is_causal(causal: bool, of_module: bool | None) -> None:
    """Whatever the layer has for `is_causal`, in its class or among its arguments."""
    rule = causal_mask_function if causal else bidirectional_mask_function
    seen = integration.visible_keys(1, 20, 20, mask_function=rule)
    query, key = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16)
    matrix = torch.ones(20, 20, dtype=torch.bool)
    matrix = matrix.tril() if causal else matrix
    expected, _ = exact_attention(torch.nn.Module(), query, key, key, matrix, scaling=0.25)
    for said in ({}, {"is_causal": not causal}):
        out, _ = integration.attention_forward(Layer(of_module), query, key, key, seen, **said)
        torch.testing.assert_close(out, expected)


# What cannot be honoured raises


def layer_call(**kwargs: Any) -> Any:
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    mask = kwargs.pop("attention_mask", integration.visible_keys(1, 5, 5))
    return integration.attention_forward(torch.nn.Module(), q, k, k, mask, **kwargs)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("position_bias", torch.zeros(1, 4, 5, 5)),
        ("output_attentions", True),
        ("cache", object()),
        ("head_mask", torch.ones(4)),
        ("attention_mask", torch.zeros(1, 1, 5, 5)),
        ("attention_mask", torch.ones(1, 5, dtype=torch.bool)),
    ],
)
def test_refuses_arguments_that_change_the_result(argument: str, value: Any) -> None:
    with pytest.raises(splitkv.UnsupportedProblem, match=f"{argument}: expected"):
        layer_call(**{argument: value})


def test_ignores_arguments_that_change_nothing() -> None:
    torch.manual_seed(0)
    plain, _ = layer_call()
    torch.manual_seed(0)
    out, _ = layer_call(use_cache=True, position_ids=torch.arange(5)[None], output_attentions=False)
    assert torch.equal(plain, out)


def test_refuses_half_of_the_lengths() -> None:
    with pytest.raises(ValueError, match="cu_seq_lens_k: expected a value with cu_seq_lens_q, max"):
        layer_call(cu_seq_lens_q=torch.tensor([0, 5]))


def test_refuses_lengths_beside_padding() -> None:
    bounds = {"cu_seq_lens_q": torch.tensor([0, 5]), "cu_seq_lens_k": torch.tensor([0, 5])}
    mask = torch.tensor([[False, True, True, True, True]])
    seen = integration.visible_keys(1, 5, 5, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask: expected no padding beside cu_seq_lens"):
        layer_call(attention_mask=seen, **bounds, max_length_q=5, max_length_k=5)


def test_refuses_dropout_with_a_cache() -> None:
    with torch.no_grad():
        seen = integration.visible_keys(1, 5, 9, 4, attention_mask=torch.arange(9)[None] > 2)
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16)
    with pytest.raises(ValueError, match=r"dropout: expected 0.0 with a key-value cache, got 0.5"):
        integration.attention_forward(torch.nn.Module(), q, k, k, seen, dropout=0.5)


def test_refuses_a_mask_of_another_shape() -> None:
    with torch.no_grad():
        seen = integration.visible_keys(1, 1, 9, 4)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[1, 1, 5, 5\]"):
        layer_call(attention_mask=seen)


def test_refuses_a_four_dimensional_mask_of_the_user() -> None:
    model = make_model("llama")
    model.set_attn_implementation("splitkv")
    with pytest.raises(splitkv.UnsupportedProblem, match="attention_mask: expected"):
        model(tokens(), attention_mask=torch.ones(3, 1, SEQLEN, SEQLEN).bool(), use_cache=False)


def test_a_mask_is_no_matrix_to_compute_with() -> None:
    """A model with attention of its own: what it does to the mask is refused, not a traceback."""
    seen = integration.visible_keys(2, 5, 5)
    scores = torch.zeros(2, 4, 5, 5)
    uses: list[Callable[[], Any]] = [
        lambda: scores + seen,
        lambda: seen + scores,
        lambda: scores.masked_fill(seen, 0.0),
        lambda: torch.where(seen, scores, 0.0),
        lambda: torch.cat([seen, seen]),
        lambda: 1.0 - seen,
        lambda: seen == 0,
        lambda: seen != torch.zeros(()),
        lambda: seen.all(),
        lambda: seen.dtype,
        lambda: seen[:, 0],
        lambda: seen[:, :, :, :3],
        lambda: seen[:, None],
        lambda: seen.expand(2, 4, 5, 5),
        lambda: bool(seen),
        lambda: ~seen,
        lambda: len(seen),
    ]
    for use in uses:
        with pytest.raises(splitkv.UnsupportedProblem, match="attention_mask: expected a model"):
            use()
            raise AssertionError(use.__code__.co_firstlineno)
    assert seen[:, :, :, :5] is seen[..., :].to("cpu") is seen.contiguous()
    assert (seen.dim(), seen.size(0), tuple(seen.size())) == (4, 2, (2, 1, 5, 5))
    assert not hasattr(seen, "dtype") and copy.copy(seen).shape == seen.shape


def test_a_refusal_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layer's, and of the kernels'."""

    def refuse(*_: Any, **__: Any) -> None:
        raise splitkv.UnsupportedProblem("a problem", "a device", [("kernel", ["its reason"])])

    with pytest.raises(splitkv.UnsupportedProblem, match='attn_implementation="sdpa"'):
        layer_call(position_bias=torch.zeros(1))
    monkeypatch.setattr(splitkv, "attention", refuse)
    with pytest.raises(splitkv.UnsupportedProblem, match='its reason\n.*tion="sdpa"') as refused:
        layer_call()
    assert refused.value.reasons == (("kernel", ("its reason",)),)


@pytest.mark.parametrize("size", [1, 2])
def test_refuses_verls_ulysses(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl exchanges heads for parts of a sequence inside FlashAttention, and nowhere else."""
    verl = SimpleNamespace(get_ulysses_sequence_parallel_world_size=lambda: size)
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", verl)
    model = make_model("llama")
    model.set_attn_implementation("splitkv")
    if size == 1:
        model(tokens(), use_cache=False)
        return
    with pytest.raises(splitkv.UnsupportedProblem, match="sequence_parallel_size: expected 1, got"):
        model(tokens(), use_cache=False)


def test_refuses_a_name_that_transformers_reads_as_another() -> None:
    with pytest.raises(ValueError, match="name: expected a name without"):
        integration.register("flash_splitkv")


# torch.compile


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left"])
@torch.no_grad()
def test_compiles_with_the_mask_in_the_graph(padded: bool) -> None:
    mask = left_padding() if padded else torch.ones(3, SEQLEN, dtype=torch.int64)
    model = make_model("llama")
    model.set_attn_implementation("splitkv")
    expected = model(tokens(), attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    logits = compiled(tokens(), attention_mask=mask, use_cache=False).logits
    torch.compiler.reset()
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])


@torch.no_grad()
def test_compiles_a_windowed_model_without_a_mask() -> None:
    model = make_model("gpt_oss")
    model.set_attn_implementation("splitkv")
    expected = model(tokens(), use_cache=False).logits
    logits = torch.compile(model, backend="eager")(tokens(), use_cache=False).logits
    torch.compiler.reset()
    torch.testing.assert_close(logits, expected)
