"""Small models of transformers with random weights, and what their attention is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from splitkv.testing import assert_close

WINDOW = 8
COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,  # scores far enough apart that a wrong mask changes the tokens
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
EVEN = {**{n: x for n, x in COMMON.items() if n != "head_dim"}, "hidden_size": 64}
# All experts are active: a choice of experts would turn a rounding error into another model.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
HYBRID = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama4": lambda: Llama4TextConfig(
        **COMMON,
        intermediate_size_mlp=64,
        moe_layers=[],
        no_rope_layers=[1, 0],
        attention_chunk_size=WINDOW,
    ),
    "qwen2": lambda: Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=WINDOW, layer_types=HYBRID
    ),
    "gemma2": lambda: Gemma2Config(
        **COMMON, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=10
    ),
    "qwen3": lambda: Qwen3Config(
        **COMMON, use_sliding_window=True, sliding_window=WINDOW, layer_types=HYBRID
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON, sliding_window=WINDOW, layer_types=HYBRID, query_pre_attn_scalar=10
    ),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=WINDOW),
    "phi": lambda: PhiConfig(**EVEN),
    "phi3": lambda: Phi3Config(**EVEN, sliding_window=WINDOW),
    "deepseek": lambda: DeepseekV3Config(
        **{**EVEN, "num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **{**COMMON, "head_dim": 64}, **EXPERTS, sliding_window=WINDOW, layer_types=HYBRID
    ),
}
HEAD_DIMS = {  # of the models as they are published; the others have theirs in the table above
    **dict.fromkeys(("llama", "llama4", "qwen2", "qwen3", "mistral"), 128),
    **{"gemma2": 256, "gemma3": 256, "phi": 64, "phi3": 96},
}
WINDOWED = ("mistral", "phi3")  # in every layer; the others have a full layer last
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}
SEQLEN = 40


def from_config(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def make_model(name: str, head_dim: int = 0) -> Any:
    """With the head dimension of its configuration here, or another."""
    config = CONFIGS[name]()
    if head_dim:
        config.head_dim = head_dim
        if name in ("phi", "phi3"):  # which have none
            config.hidden_size = head_dim * config.num_attention_heads
    model = from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def tokens(batch: int = 3, seqlen: int = SEQLEN) -> torch.Tensor:
    return torch.randint(3, 99, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def left_padding(seqlen: int = SEQLEN) -> torch.Tensor:
    mask = torch.ones(3, seqlen, dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, : seqlen - 1] = 0
    return mask


def right_padding(seqlen: int = SEQLEN) -> torch.Tensor:
    return left_padding(seqlen).flip(1)


PADDINGS = {"whole": lambda n=SEQLEN: torch.ones(3, n, dtype=torch.int64), "left": left_padding}


def both(model: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `run` gives with eager attention and with splitkv."""
    results = []
    for name in ("eager", "splitkv"):
        model.set_attn_implementation(name)
        results.append(run(model))
    return results[0], results[1]


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Eager attention with a boolean matrix and a softmax in the type of its input.

    The models' own eager attention computes its softmax in float32, or sums the mask to infinity.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attention_mask, float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1)[..., : key.shape[2]].masked_fill(~attention_mask, 0.0)
    return (p @ value).transpose(1, 2), None


def exact_mask(**kwargs: Any) -> torch.Tensor | None:
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**kwargs)


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", exact_mask)


def exactly(model: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A copy of a model in a higher precision."""
    exact = copy.deepcopy(model).to(dtype)
    exact.set_attn_implementation("exact")
    exact.set_experts_implementation("eager")  # the one that runs in float64
    return exact


def assert_same_logits(model: Any, run: Callable[[Any], torch.Tensor]) -> None:
    """The tolerance rule: eager attention in the working precision, and in float64."""
    eager, ours = both(model, run)
    assert_close(ours, run(exactly(model)), eager, name="logits")
