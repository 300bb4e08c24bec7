"""Small models of random weights, and what transformers in fp32 says of the tokens of an engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from splitkv.integrations.transformers import CACHE_ARGUMENT
from splitkv.rounding import quantize, scale_of

VOCABULARY = 512
LENGTHS = 5, 33, 120, 300, 17, 64
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": 48}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 48, "query_pre_attn_scalar": 32}
        | {"tie_word_embeddings": True, "attn_logit_softcapping": 20.0}
        | {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 2, "tie_word_embeddings": True}),
    "mqa": ("LlamaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 32, "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"intermediate_size": 128, "swiglu_limit": 7.0},
    ),
}
"""Of each model the class of its configuration and what it has beside COMMON."""
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {"max_position_embeddings": 512}),
}
"""Models without a cache, whose result is a state of each token."""

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama8b": (
        *("LlamaConfig", "LlamaForCausalLM"),
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        | {"max_position_embeddings": 1 << 18, "rms_norm_eps": 1e-5},
    ),
    "gpt_oss_20b": (
        *("GptOssConfig", "GptOssForCausalLM"),
        {"num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4}
        | {"hidden_size": 2880, "intermediate_size": 2880, "sliding_window": 128}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
        | {"max_position_embeddings": 1 << 18},
    ),
    "tiny": (
        *("LlamaConfig", "LlamaForCausalLM"),
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 16},
    ),
}
"""Of each shape the class of its configuration, that of its model, and its sizes."""


def save_model(name: str, folder: Path, dtype: str = "float32") -> str:
    """Writes a small model whose distributions are sharp, in this type; the folder."""
    torch.manual_seed(0)
    config_class, own = MODELS[name]
    config = getattr(transformers, config_class)(**COMMON | own)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    for key, x in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(x)
    model.to(getattr(torch, dtype)).save_pretrained(folder / name)
    return str(folder / name)


def save_encoder(name: str, folder: Path, dtype: str) -> str:
    """Writes a small encoder in this type, and a tokenizer, which vLLM asks for; the folder."""
    torch.manual_seed(0)
    config_class, own = ENCODERS[name]
    config = getattr(transformers, config_class)(**COMMON | own)
    model = transformers.AutoModel.from_config(config, add_pooling_layer=False)
    model.to(getattr(torch, dtype)).save_pretrained(folder / name)
    words = {str(n): n for n in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    named = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0")
    named.save_pretrained(folder / name)
    return str(folder / name)


def save_shape(shape: str, folder: Path, layers: int, dtype: str) -> str:
    """Writes the configuration of a model of a shape, with so many layers if not 0; the folder."""
    import transformers

    config_class, architecture, own = SHAPES[shape]
    own = own | ({"num_hidden_layers": layers} if layers else {})
    config = getattr(transformers, config_class)(**own, bos_token_id=1, eos_token_id=2)
    config.architectures, config.dtype = [architecture], dtype
    path = folder / f"{shape}-{layers}"
    config.save_pretrained(path)
    return str(path)


def prompts(lengths: list[int], shared: int = 0, seed: int = 1) -> list[list[int]]:
    """Random tokens; the first `shared` of all prompts are the same."""
    draw = random.Random(seed)
    prefix = [draw.randrange(3, VOCABULARY) for _ in range(shared)]
    made = []
    for length in lengths:
        own = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        made.append(prefix + own)
    return made


def stored_in(kv: str) -> Any:
    """A cache of transformers that gives back keys and values as one of these bits does, or None:
    as they are."""
    if kv == "auto":
        return None
    dtype = torch.int8 if kv.startswith("int8") else torch.float8_e4m3fn
    dtype = torch.float8_e5m2 if kv == "fp8_e5m2" else dtype

    def rounded(x: torch.Tensor) -> torch.Tensor:
        """x [batch, heads, keys, dim], by scales of 1 or of a token and head."""
        by = scale_of(x, (3,), dtype) if kv.endswith("per_token_head") else torch.ones(1)
        return quantize(x, by, dtype).float() * by

    class Rounding(DynamicCache):
        def update(self, k: Any, v: Any, *where: Any, **more: Any) -> tuple[Any, Any]:
            return super().update(rounded(k), rounded(v), *where, **more)

    return Rounding()


def logprobs_of(
    loaded: Any, prompt: list[int], chosen: list[int], cache: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what a model of transformers has as log-probabilities of the tokens chosen after a prompt,
    the tokens that it would choose there)."""
    with torch.no_grad():
        given = torch.tensor([prompt + chosen], device=loaded.device)
        logits = loaded(given, **{CACHE_ARGUMENT: cache}).logits[0].cpu()
    of_chosen = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return of_chosen.gather(1, torch.tensor(chosen)[:, None])[:, 0], of_chosen.argmax(-1)


def compare(
    model: str, kv: str, asked: list[list[int]], ids: list[list[int]], logprobs: list[list[float]]
) -> tuple[int, int, float]:
    """(tokens that transformers in fp32 would choose, tokens, the largest difference of their
    log-probabilities) of an engine's greedy tokens after these prompts.

    kv   the engine's type of caches, in whose bits transformers' keys and values are rounded
    """
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    worst, right, tokens = 0.0, 0, 0
    for prompt, chosen, own in zip(asked, ids, logprobs, strict=True):
        wanted, best = logprobs_of(loaded, prompt, chosen, stored_in(kv))
        worst = max(worst, (wanted - torch.tensor(own)).abs().max().item())
        right += int((best == torch.tensor(chosen)).sum())
        tokens += len(chosen)
    return right, tokens, worst


def compare_states(model: str, asked: list[list[int]], states: list[list[list[float]]]) -> float:
    """The largest difference of an encoder's states from those of transformers in fp32, as a share
    of the largest of a token."""
    loaded = AutoModel.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", add_pooling_layer=False
    )
    worst = 0.0
    for prompt, own in zip(asked, states, strict=True):
        with torch.no_grad():
            wanted = loaded(torch.tensor([prompt])).last_hidden_state[0]
        apart = (wanted - torch.tensor(own)).abs().amax(1) / wanted.abs().amax(1)
        worst = max(worst, apart.max().item())
    return worst
