"""Steps of `generate` replayed, as the benchmark of a whole model does: the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from models import make_model  # noqa: E402

from splitkv.integrations import transformers as integration  # noqa: E402
from splitkv.lab.bench.model_step import NAMES, Steps, filled_cache  # noqa: E402

CONTEXT, TOKENS = 20, 8


def run_again(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """What a graph does, on a CPU: the same inputs and the same place for the result."""
    out = run()
    return lambda: out.logits.copy_(run().logits), out


def generated(model: Any, cache: Any) -> torch.Tensor:
    for layer in cache.layers:
        layer.cumulative_length.fill_(CONTEXT)
    ids = torch.full((2, CONTEXT + 1), 7, device=model.device)
    how = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    tokens: torch.Tensor = model.generate(
        ids, **{integration.CACHE_ARGUMENT: cache}, disable_compile=True, **how
    )
    return tokens[:, CONTEXT + 1 :]


def check(model: Any, name: str, **capture: Any) -> None:
    integration.register()
    model.set_attn_implementation(name)
    cache = filled_cache(model.config, 2, CONTEXT, model.lm_head.weight)
    wanted = generated(model, cache)
    assert wanted.unique().numel() > TOKENS // 2, "expected tokens that tell steps apart"
    calls = []
    with Steps(model, cache, **capture) as steps:
        forward, steps.run = steps.run, lambda **x: calls.append(x) or forward(**x)
        for _ in range(2):
            assert torch.equal(generated(model, cache), wanted)
    assert len(steps.known) <= 2 and steps.replay is not None
    if not capture:
        assert len(calls) <= 3 * len(steps.known), "expected replays"
    assert "forward" not in vars(model)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_give_the_same_tokens(name: str) -> None:
    check(make_model("llama"), name, capture=run_again)
