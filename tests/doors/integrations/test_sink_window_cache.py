"""SinkWindowCache in `generate`, against eager attention on a cache that is cut by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config  # noqa: E402

from splitkv import UnsupportedProblem  # noqa: E402
from splitkv.integrations import transformers as integration  # noqa: E402
from splitkv.integrations.sink_window_cache import SinkWindowCache  # noqa: E402

SINKS, WINDOW, NEW = 3, 8, 14
COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    integration.register()
    yield
    torch.set_num_threads(threads)


def make_model(attention: str = "splitkv") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**COMMON)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def cache_of(model: Any, attention_mask: torch.Tensor | None = None, **sizes: int) -> Any:
    sizes = {"sink_tokens": SINKS, "window": WINDOW, **sizes}
    return SinkWindowCache(model.config, attention_mask=attention_mask, **sizes)


def cut(keys: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    """[B, H, S, D] without the tokens that the next one does not see."""
    if keys.shape[2] < sinks + window:
        return keys
    return torch.cat([keys[:, :, :sinks], keys[:, :, keys.shape[2] - window + 1 :]], 2)


def by_hand(ids: torch.Tensor, sinks: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and the scores of each step: eager attention, the cache cut before each."""
    model = make_model("eager")
    cache, position, scores = DynamicCache(config=model.config), ids.shape[1], []
    new = ids
    with torch.no_grad():
        for _ in range(NEW):
            span = torch.arange(position - new.shape[1], position)[None].expand(len(ids), -1)
            out = model(new, **{integration.CACHE_ARGUMENT: cache}, position_ids=span)
            scores.append(out.logits[:, -1])
            new = scores[-1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
            position += 1
            for layer in cache.layers:
                layer.keys = cut(layer.keys, sinks, window)
                layer.values = cut(layer.values, sinks, window)
    return ids, torch.stack(scores)


def generate(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "output_scores": True, **options}
    given = {"attention_mask": torch.ones_like(ids), **options}
    return model.generate(
        ids, **{integration.CACHE_ARGUMENT: cache}, return_dict_in_generate=True, **given
    )


@pytest.mark.parametrize("attention", ["splitkv", "eager"])
@pytest.mark.parametrize("length", [1, 5, 11, 30])
@pytest.mark.parametrize(("sinks", "window"), [(SINKS, WINDOW), (0, 4), (4, 1)])
def test_generation(length: int, sinks: int, window: int, attention: str) -> None:
    ids = prompts(2, length)
    wanted, scores = by_hand(ids, sinks, window)
    model = make_model(attention)
    cache = cache_of(model, sink_tokens=sinks, window=window)
    result = generate(model, ids, cache)
    assert torch.equal(result.sequences, wanted)
    torch.testing.assert_close(torch.stack(result.scores), scores, rtol=1e-4, atol=1e-4)
    assert cache.layers[0].keys.shape[1] == sinks + window
    assert cache.get_seq_length() == length + NEW - 1


def test_a_small_cache_changes_the_result() -> None:
    ids = prompts(2, 30)
    model = make_model()
    small, large = (generate(model, ids, cache_of(model, window=w)) for w in (2, 100))
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(large.sequences, plain)
    assert not torch.equal(small.sequences, plain)


@pytest.mark.parametrize("attention", ["splitkv", "eager"])
@pytest.mark.parametrize("length", [5, 30])
def test_left_padding(length: int, attention: str) -> None:
    """Every row as if it were alone: its own first tokens are kept, not its padding."""
    ids, pads = prompts(3, length), (0, 3, length - 1)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
        ids[row, :pad] = 0
    model = make_model(attention)
    together = generate(model, ids, cache_of(model, mask), attention_mask=mask)
    for row, pad in enumerate(pads):
        alone = generate(model, ids[row : row + 1, pad:], cache_of(model))
        assert torch.equal(together.sequences[row, pad:], alone.sequences[0])
        actual = torch.stack(together.scores)[:, row]
        wanted = torch.stack(alone.scores)[:, 0]
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_beam_search() -> None:
    model, ids = make_model(), prompts(2, 6)
    options = {"num_beams": 3, "max_new_tokens": 6}
    result = generate(model, ids, cache_of(model, window=100), **options)
    plain = model.generate(ids, do_sample=False, **options)
    assert torch.equal(result.sequences, plain)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with pytest.raises(UnsupportedProblem, match="attention_mask: expected no padding with beam"):
        generate(model, ids, cache_of(model, mask), attention_mask=mask, **options)


def test_what_it_refuses() -> None:
    model, ids = make_model(), prompts(2, 6)
    with pytest.raises(ValueError, match="attention_mask: expected padding on the left only"):
        cache_of(model, torch.tensor([[1, 1, 0]]))
    with pytest.raises(ValueError, match="window: expected more than 0"):
        cache_of(model, window=0)
    sliding = Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(UnsupportedProblem, match="config: expected layers of full attention only"):
        SinkWindowCache(sliding, sink_tokens=1, window=4, attention_mask=None)
    cache = cache_of(model)
    with torch.no_grad():
        model(ids, **{integration.CACHE_ARGUMENT: cache})
        with pytest.raises(UnsupportedProblem, match="input_ids: expected one new token a step"):
            model(ids, **{integration.CACHE_ARGUMENT: cache})
    with pytest.raises(UnsupportedProblem, match="crop: expected a cache that keeps every token"):
        cache.layers[0].crop(1)


def test_reset_starts_again() -> None:
    model, ids = make_model(), prompts(2, 20)
    cache = cache_of(model)
    first = generate(model, ids, cache)
    cache.reset()
    assert torch.equal(generate(model, ids, cache).sequences, first.sequences)


def test_a_reset_cache_keeps_the_step_of_no_other_batch() -> None:
    ring = cache_of(make_model()).ring
    two, three = (ring.slots(0, 20, batch, torch.device("cpu")) for batch in (2, 3))
    assert (two.shape, three.shape) == ((40,), (60,))
    assert torch.equal(three[:40], two)
