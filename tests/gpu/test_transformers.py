"""Models of transformers on the GPU in bf16: logits by the tolerance rule, graphs, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import DEVICE, in_pairs

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from lab.bench import test_model_step as model_step  # noqa: E402
from models import (  # noqa: E402
    CACHES,
    CONFIGS,
    HEAD_DIMS,
    PADDINGS,
    both,
    exactly,
    make_model,
    tokens,
)

from splitkv.integrations import transformers as integration  # noqa: E402
from splitkv.testing import assert_close  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


STEPS = {"name": tuple(CONFIGS), "cache": tuple(CACHES), "padding": tuple(PADDINGS)}


@pytest.mark.parametrize(tuple(STEPS), in_pairs(STEPS))
def test_logits(name: str, cache: str, padding: str) -> None:
    check_logits(make_model(name), cache, padding)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", HEAD_DIMS)
def test_logits_with_the_models_own_head_dims(name: str, padding: str) -> None:
    """By the kernels that such heads take, which are others than those of small ones."""
    check_logits(make_model(name, HEAD_DIMS[name]), "static", padding)


@torch.no_grad()
def check_logits(model: Any, cache: str, padding: str) -> None:
    """A prompt, a few tokens at once, and one."""
    model, mask = model.to(DEVICE, torch.bfloat16), PADDINGS[padding]().to(DEVICE)

    def run(model: Any) -> torch.Tensor:
        store, logits = CACHES[cache](model.config), []
        for begin, end in ((0, 36), (36, 39), (39, 40)):
            ids = tokens()[:, begin:end].to(DEVICE)
            out = model(ids, attention_mask=mask[:, :end], **{integration.CACHE_ARGUMENT: store})
            logits.append(out.logits)
        return torch.cat(logits, 1)[mask.bool()]

    eager, ours = both(model, run)
    assert_close(ours, run(exactly(model, torch.float32)), eager, name="logits")


@pytest.mark.long
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradients(name: str, padding: str) -> None:
    """Of attention with the models' own head dimensions."""
    model = make_model(name, HEAD_DIMS.get(name, 0)).to(DEVICE, torch.bfloat16).train()
    mask = PADDINGS[padding]().to(DEVICE)
    labels = tokens().to(DEVICE).masked_fill(mask == 0, -100)

    def run(model: Any) -> torch.Tensor:
        model.zero_grad()
        ids = tokens().to(DEVICE)
        model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        grads = [p.grad.flatten().float() for n, p in model.named_parameters() if "q_proj" in n]
        return torch.cat(grads)

    eager, ours = both(model, run)
    assert_close(ours, run(exactly(model, torch.float32).train()), eager, factor=3.0, name="grads")


@torch.no_grad()
def test_a_step_with_a_static_cache_in_a_graph() -> None:
    """Nothing is read by the host: a captured step serves the following ones."""
    model = make_model("llama").to(DEVICE, torch.bfloat16)
    model.set_attn_implementation("splitkv")
    token = torch.full((3, 1), 7, device=DEVICE)

    def steps(replay: bool) -> list[torch.Tensor]:
        cache = CACHES["static"](model.config)
        model(tokens(seqlen=20).to(DEVICE), **{integration.CACHE_ARGUMENT: cache})
        logits = [model(token, **{integration.CACHE_ARGUMENT: cache}).logits.clone()]
        if not replay:
            return logits + [
                model(token, **{integration.CACHE_ARGUMENT: cache}).logits for _ in range(3)
            ]
        lengths = [layer.cumulative_length.clone() for layer in cache.layers]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(token, **{integration.CACHE_ARGUMENT: cache}).logits
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.cumulative_length.copy_(length)
        for _ in range(3):
            graph.replay()
            logits.append(out.clone())
        return logits

    for actual, wanted in zip(steps(True), steps(False), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", model_step.NAMES)
def test_generate_by_replayed_steps(name: str) -> None:
    """As the benchmark of a whole model does it."""
    model_step.check(make_model("llama").to(DEVICE), name)


@torch.no_grad()
def test_prompt_in_parts_with_a_static_cache() -> None:
    model = make_model("llama").to(DEVICE, torch.bfloat16)

    def run(model: Any) -> torch.Tensor:
        store = CACHES["static"](model.config)
        parts = ((0, 17), (17, 36), (36, 40))
        return torch.cat(
            [
                model(tokens()[:, a:b].to(DEVICE), **{integration.CACHE_ARGUMENT: store}).logits
                for a, b in parts
            ],
            1,
        )

    eager, ours = both(model, run)
    assert_close(ours, run(exactly(model, torch.float32)), eager, name="logits")
