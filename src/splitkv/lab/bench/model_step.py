"""Decode of a whole model of transformers: tokens a second by each attention implementation.

    python -m splitkv.lab.bench.model_step

The model has the shape of Llama-3 8B and random weights in bf16; its cache is static and holds
random keys and values. `generate` runs on, and every step that it takes is replayed from one CUDA
graph, which gets the mask as transformers makes it ahead of a step: that of eager attention and of
sdpa is a matrix. A second figure is that of the graph alone, without what transformers does between
steps. Beside the figures stand the largest differences of logits from eager attention's: those of
splitkv are to be no larger than those of sdpa.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from splitkv.testing import captured

NAMES = ("splitkv", "sdpa", "eager")
SHAPES = ((1, 1024), (8, 1024), (1, 32768), (8, 32768))  # batch, keys before the first step
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
}
ROOM, TOKENS, REPLAYS = 64, 32, 15

Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""(replay, result) of a function, whose result a replay overwrites."""


class Steps:
    """A model's forward in whose place every call of one token a sequence is replayed.

    with Steps(model, cache) as steps:
        model.generate(..., cache=cache, disable_compile=True)

    Calls with other inputs have a graph of their own.
    """

    def __init__(self, model: Any, cache: Any, capture: Capture = captured) -> None:
        self.model, self.cache, self.capture = model, cache, capture
        self.run: Callable[..., Any] = model.forward
        self.known: dict[Any, tuple[dict[str, Tensor], Callable[[], None], Any]] = {}
        self.replay: Callable[[], None] | None = None  # of the latest call

    def __enter__(self) -> Steps:
        def forward(*args: Any, **inputs: Any) -> Any:
            return self.run(*args, **inputs) if args else self(**inputs)

        forward.__dict__["__wrapped__"] = self.run  # generate reads the signature
        self.model.forward = forward
        return self

    def __exit__(self, *_: object) -> None:
        del self.model.forward

    def __call__(self, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] != 1:
            return self.run(**inputs)
        tensors = dict(tensors_of({n: x for n, x in inputs.items() if x is not self.cache}))
        kind = tuple((name, x.shape) for name, x in tensors.items())
        if kind not in self.known:
            self.known[kind] = tensors, *self._captured(inputs)
        mine, self.replay, out = self.known[kind]
        for name, x in tensors.items():
            mine[name].copy_(x)
        self.replay()
        return out

    def _captured(self, inputs: dict[str, Any]) -> tuple[Callable[[], None], Any]:
        """The tensors of these inputs become the graph's. What is run for it writes the keys that
        its first replay writes again."""
        layers = self.cache.layers
        lengths = [layer.cumulative_length.clone() for layer in layers]

        def put_back() -> None:
            for layer, length in zip(layers, lengths, strict=True):
                layer.cumulative_length.copy_(length)

        self.run(**inputs)  # compiles
        put_back()
        captured = self.capture(lambda: self.run(**inputs))
        put_back()
        return captured


def tensors_of(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in masks and other inputs of a forward pass, by where they are."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from tensors_of(value, f"{name}.{key}")
    elif is_dataclass(x):
        for field in fields(x):
            yield from tensors_of(getattr(x, field.name), f"{name}.{field.name}")


def filled_cache(config: Any, batch: int, context: int, like: Tensor) -> Any:
    """A static cache that holds `context` random keys and values of each sequence."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=context + ROOM)
    g = torch.Generator(like.device).manual_seed(0)
    for layer in cache.layers:
        some = like.new_empty(batch, config.num_key_value_heads, 1, config.head_dim)
        layer.lazy_initialization(some, some)
        layer.keys.normal_(generator=g)
        layer.values.normal_(generator=g)
        layer.cumulative_length.fill_(context)
    return cache


def make_model(**changes: Any) -> Any:
    """A model of Llama-8B's shape with random weights, on the GPU; what its configuration has
    else is in `changes`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            config = LlamaConfig(**LLAMA_8B | changes)
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def measure(model: Any, batch: int, context: int) -> tuple[Tensor, float, float]:
    """(logits of a step, tokens a second by generate, and by the graph alone)."""
    from splitkv.integrations.transformers import CACHE_ARGUMENT

    cache = filled_cache(model.config, batch, context, model.lm_head.weight)
    ids = torch.full((batch, context + 1), 7, device=model.device)

    def reset() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    def seconds(work: Callable[[], Any]) -> float:
        reset()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def generate() -> None:
        model.generate(
            ids,
            **{CACHE_ARGUMENT: cache},
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            disable_compile=True,
        )

    with Steps(model, cache) as steps:
        generate()
        generated = batch * TOKENS / seconds(generate)
        replay = steps.replay
        assert replay is not None
        replayed = batch * REPLAYS / seconds(lambda: [replay() for _ in range(REPLAYS)])
    reset()
    position_ids = ids[:, :1] * 0 + context
    logits = model(ids[:, -1:], **{CACHE_ARGUMENT: cache}, position_ids=position_ids).logits
    return logits.float(), generated, replayed


def main() -> None:
    import transformers

    from splitkv.integrations import transformers as integration

    integration.register()
    model = make_model()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {transformers.__version__}")
    print("tokens/s: generate (the graph alone)")
    print("batch  context " + "".join(f"{name:>18}" for name in NAMES))
    for batch, context in SHAPES:
        row, logits = "", {}
        for name in NAMES:
            model.set_attn_implementation(name)
            logits[name], *rates = measure(model, batch, context)
            row += f"{rates[0]:>9.1f} ({rates[1]:6.1f})"
            torch.cuda.empty_cache()
        off = {n: (x - logits["eager"]).abs().max().item() for n, x in logits.items()}
        differences = ", ".join(f"{name} {off[name]:.3f}" for name in NAMES[:2])
        print(f"{batch:5d} {context:8d} {row}   off eager by {differences}", flush=True)


if __name__ == "__main__":
    main()
