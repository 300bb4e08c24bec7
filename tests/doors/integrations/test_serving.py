"""What serves models of transformers: drafts, quantised caches, tensor parallelism, and continuous
batching, each against eager attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from models import CONFIGS, both, from_config, left_padding, make_model, tokens  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.cache_utils import Cache, QuantizedLayer  # noqa: E402

from splitkv import reference  # noqa: E402
from splitkv.core.errors import UnsupportedProblem  # noqa: E402
from splitkv.core.masks import Mask  # noqa: E402
from splitkv.integrations import transformers as integration  # noqa: E402
from splitkv.integrations.continuous_batching import (
    PAGED,
    continuous_batching,
    no_mask,
    paged_attention,
)

ONE_EACH = ("llama", "gemma2", "gpt_oss", "mistral")


@pytest.fixture(autouse=True)
def quiet_machine() -> Iterator[None]:
    """One thread: the tensors are too small to share out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    integration.register()
    yield
    torch.set_num_threads(threads)


# Several tokens at once


@pytest.mark.parametrize("name", ONE_EACH)
def test_drafts_of_another_model(name: str) -> None:
    """Assisted decoding: several tokens against the cache, rejected ones are cropped again."""
    model, draft = make_model(name), make_model(name)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    seen: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )

    def run(model: Any) -> torch.Tensor:
        draft.set_attn_implementation(model.config._attn_implementation)
        seen.clear()
        return model.generate(
            tokens(1, 20),
            assistant_model=draft,
            max_new_tokens=14,
            do_sample=False,
            disable_compile=True,
        )

    eager, ours = both(model, run)
    assert torch.equal(eager, ours)
    assert max(seen[1:]) > 1, "expected more than one token a step"


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_drafts_from_the_prompt(name: str) -> None:
    prompt = tokens(1, 8).repeat(1, 4)

    def run(model: Any) -> torch.Tensor:
        return model.generate(
            prompt, prompt_lookup_num_tokens=3, max_new_tokens=10, do_sample=False
        )

    eager, ours = both(make_model(name), run)
    assert torch.equal(eager, ours)


# A cache that is stored in fewer bits


class Int8Layer(QuantizedLayer):
    """A quantised layer of transformers: int8, a scale a tensor."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        scale = tensor.abs().amax() / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor: Any) -> torch.Tensor:
        stored, scale = q_tensor
        return stored * scale


@pytest.mark.parametrize("padded", [False, True], ids=["", "left"])
@pytest.mark.parametrize("name", ["llama", "phi"])
def test_a_quantised_cache(name: str, padded: bool) -> None:
    """What transformers quantises and restores is attended to as any other keys are."""
    model = make_model(name)
    mask = left_padding(20) if padded else torch.ones(3, 20, dtype=torch.int64)

    def run(model: Any) -> torch.Tensor:
        layers = [Int8Layer(residual_length=4) for _ in range(model.config.num_hidden_layers)]
        return model.generate(
            tokens(seqlen=20).masked_fill(mask == 0, 0),
            attention_mask=mask,
            **{integration.CACHE_ARGUMENT: Cache(layers=layers)},
            max_new_tokens=12,
            do_sample=False,
        )

    eager, ours = both(model, run)
    assert torch.equal(eager, ours)


# A share of the heads


@pytest.mark.parametrize("queries", [1, 20], ids=["decode", "prefill"])
def test_heads_of_tensor_parallel_ranks(queries: int) -> None:
    """Each rank has some heads of q, k, v and of the sinks; together they are all heads."""
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((8, queries), (4, 20), (4, 20)))
    sinks = torch.randn(8)
    seen = integration.visible_keys(2, queries, 20, 20 - queries)

    def layer(ranks: int, rank: int) -> torch.Tensor:
        def share(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
            return x.chunk(ranks, dim)[rank]

        out, _ = integration.attention_forward(
            torch.nn.Module(), share(q), share(k), share(v), seen, s_aux=share(sinks, 0)
        )
        return out

    whole = layer(1, 0)
    for ranks in (2, 4):
        parts = [layer(ranks, rank) for rank in range(ranks)]
        torch.testing.assert_close(torch.cat(parts, 2), whole)
    with pytest.raises(ValueError, match=r"s_aux: expected .*num_heads=4.*got .*8"):
        integration.attention_forward(
            torch.nn.Module(), q[:, :4], k[:, :2], v[:, :2], seen, s_aux=sinks
        )


# Continuous batching

# The paged cache of transformers has one head dimension for k and v, and no layers in chunks.
MANAGED = [name for name in CONFIGS if name not in ("deepseek", "llama4")]
PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 30, 9)]


def generate_batch(model: Any) -> list[list[int]]:
    """Four requests of which no more than two fit into a step."""
    results = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=4, num_blocks=64, max_batch_tokens=40, auto_switch_to_flash=False
        ),
        progress_bar=False,
    )
    assert all(results[key].error is None for key in results)
    return [results[f"req_{i}"].generated_tokens for i in range(len(PROMPTS))]


@pytest.fixture
def quiet_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager asks for a package about the machine's memory, which these sizes do not need."""
    monkeypatch.setattr(logging.getLogger("ContinuousBatchingLogger"), "disabled", True)


@pytest.mark.parametrize("name", MANAGED)
def test_continuous_batching(name: str, quiet_manager: None) -> None:
    model = make_model(name)
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
        wanted.append(out[0, len(prompt) :].tolist())
    model.set_attn_implementation("splitkv")
    with continuous_batching(model) as same:
        assert same is model
        assert generate_batch(model) == wanted
    assert type(model.config._attn_implementation) is str
    assert model.config._attn_implementation == "splitkv"
    ids = torch.tensor([PROMPTS[0]])  # and ordinary generation again
    assert model.generate(ids, max_new_tokens=6, do_sample=False)[0, 5:].tolist() == wanted[0]


def test_a_forward_pass_without_the_manager_raises() -> None:
    model = make_model("llama")
    model.set_attn_implementation("splitkv")
    with continuous_batching(model), pytest.raises(ValueError, match="cache: expected"):
        model(tokens())
    with continuous_batching(model), pytest.raises(UnsupportedProblem, match="attention_mask"):
        model(tokens(), attention_mask=left_padding())


def test_keys_that_the_layer_has_given_to_the_cache() -> None:
    """From transformers 5.24 on a layer updates the cache, and hands on what that gave."""
    keys, q = [9, 6], torch.randn(1, 4, 5, 16)
    k, v = (torch.randn(1, 2, sum(keys), 16) for _ in "kv")
    ends = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 9, 15])}
    given = {name: x.int() for name, x in ends.items()} | {"max_length_q": 3, "max_length_k": 9}
    of_manager = {"read_index": [q], "write_index": [q], "block_table": None, "is_causal": True}
    out, _ = paged_attention(torch.nn.Module(), q, k, v, None, **given, **of_manager)
    of_both = zip(*(x.split(n, 2) for x, n in ((q, [2, 3]), (k, keys), (v, keys))), strict=True)
    wanted = [
        reference.attention(*(x.transpose(1, 2) for x in one), mask=Mask(True))[0]
        for one in of_both
    ]
    torch.testing.assert_close(out, torch.cat(wanted, 1).float())


def test_a_layer_that_says_it_sees_every_key_is_refused() -> None:
    """transformers asks for no mask beside a paged cache, so only the layer tells."""
    layer, q = torch.nn.Module(), torch.randn(1, 2, 3, 16)
    layer.is_causal = False
    with pytest.raises(UnsupportedProblem, match="is_causal: expected causal layers"):
        paged_attention(layer, q, q, q, None, write_index=[q], is_causal=True)


def test_a_model_of_another_implementation_is_refused() -> None:
    model = from_config(CONFIGS["llama"]())
    refused = pytest.raises(ValueError, match="model: expected .*splitkv.*got 'eager'")
    with refused, continuous_batching(model):
        pass


def test_pages_that_the_cache_itself_would_read_are_refused() -> None:
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(ValueError, match="block_table: expected None"):
        paged_attention(torch.nn.Module(), q, q, q, None, cache=object(), block_table=q)


def test_layers_that_are_not_causal_are_refused() -> None:
    from transformers.masking_utils import bidirectional_mask_function

    with pytest.raises(UnsupportedProblem, match="expected causal layers"):
        no_mask(mask_function=bidirectional_mask_function)


def test_the_name_is_one_that_managers_take() -> None:
    from transformers.utils.generic import is_flash_attention_requested

    requested: Callable[..., bool] = is_flash_attention_requested
    assert requested(requested_attention_implementation=PAGED)
    assert not requested(requested_attention_implementation=PAGED, version=[2, 3])
    assert not requested(requested_attention_implementation=str(PAGED))
    assert "kv" in PAGED and "sdpa" not in PAGED
