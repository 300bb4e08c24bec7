"""A decode step of a whole model of transformers: tokens a second by each attention implementation.

    python -m splitkv.lab.model_step

The model has the shape of Llama-3 8B and random weights in bf16, its cache is static and holds
random keys and values, and the step is captured in a CUDA graph. An implementation that cannot be
captured has no figure. Beside the figures stand the largest differences of logits from eager
attention's: those of splitkv are to be no larger than those of sdpa.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

NAMES = ("splitkv", "sdpa", "eager")
SHAPES = ((1, 1024), (8, 1024), (1, 32768), (8, 32768))  # batch, keys before the step
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
}
ROOM, ROUNDS, REPLAYS = 64, 3, 15


def make_model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            config = LlamaConfig(**LLAMA_8B)
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def step_of(model: Any, batch: int, context: int) -> tuple[Tensor, float | None]:
    """(logits, seconds of a replay), or None for the time where the step cannot be captured."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context + ROOM)
    g = torch.Generator("cuda").manual_seed(0)
    config = model.config
    for layer in cache.layers:
        shape = batch, config.num_key_value_heads, 1, config.head_dim
        like = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        layer.lazy_initialization(like, like)
        layer.keys.normal_(generator=g)
        layer.values.normal_(generator=g)
    ids = torch.full((batch, 1), 7, device="cuda")
    position_ids = torch.full((batch, 1), context, device="cuda")

    def step() -> Tensor:
        out = model(ids, past_key_values=cache, position_ids=position_ids, use_cache=True)
        logits: Tensor = out.logits
        return logits

    def reset() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    reset()
    logits = step().float()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        reset()
        step()
    torch.cuda.current_stream().wait_stream(side)
    reset()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"{model.config._attn_implementation} is not captured: {error}"[:160], flush=True)
        return logits, None
    times = []
    for _ in range(ROUNDS):
        reset()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / REPLAYS)
    return logits, min(times)


def main() -> None:
    import transformers

    from splitkv.integrations import transformers as integration

    integration.register()
    model = make_model()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {transformers.__version__}")
    print("batch  context " + "".join(f"{name:>10}" for name in NAMES) + "   tokens/s")
    for batch, context in SHAPES:
        rates, logits = [], {}
        for name in NAMES:
            model.set_attn_implementation(name)
            logits[name], seconds = step_of(model, batch, context)
            rates.append("-" if seconds is None else f"{batch / seconds:.1f}")
            torch.cuda.empty_cache()
        off = {n: (x - logits["eager"]).abs().max().item() for n, x in logits.items()}
        row = "".join(f"{rate:>10}" for rate in rates)
        differences = ", ".join(f"{name} {off[name]:.3f}" for name in NAMES[:2])
        print(f"{batch:5d} {context:8d} {row}   off eager by {differences}", flush=True)


if __name__ == "__main__":
    main()
