"""A whole model of transformers as it is run without any setting: generation and a training step.

    python -m splitkv.lab.bench.eager_model

The model has the shape of Llama-3 8B with `LAYERS` layers and random weights in bf16. `generate`
has its default cache, which grows by concatenation, and runs three times for each shape, in a
process that has run another shape before: the first run shows what a new shape costs. A training
step is a forward and a backward, implementations in turns. Logits are compared first: those of
splitkv are to be about as far from those of eager attention as sdpa's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import triton

from splitkv.lab.bench.model_step import make_model

NAMES = ("splitkv", "sdpa")
LAYERS, RUNS, NEW_TOKENS = 8, 3, 200
WARM_SHAPE = (2, 500)
SHAPES = ((1, 1000), (4, 3000))  # sequences, tokens of each prompt
STEPS, STEP_TOKENS = 15, 512


def seconds(work: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def generation(model: Any, batch: int, tokens: int, new: int = NEW_TOKENS) -> Callable[[], Any]:
    """`generate` of so many new tokens after random prompts."""
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=model.device)
    options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}  # nothing is padding
    return lambda: model.generate(ids, **options)


@torch.no_grad()
def logits_off(model: Any) -> dict[str, float]:
    """The largest difference of a prompt's logits from those of eager attention, by each."""
    ids = torch.randint(0, model.config.vocab_size, (1, STEP_TOKENS), device=model.device)
    logits = {}
    for name in ("eager", *NAMES):
        model.set_attn_implementation(name)
        logits[name] = model(ids).logits.float()
    return {name: (logits[name] - logits["eager"]).abs().max().item() for name in NAMES}


def generate_table(model: Any) -> None:
    """Milliseconds a token of three runs in a row, and what compiled in each."""
    compiled = list[str]()
    for name in NAMES:
        model.set_attn_implementation(name)
        generation(model, *WARM_SHAPE)()
    print("generate, ms a token (kernels compiled)")
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.fn.__name__)
        for batch, tokens in SHAPES:
            for name in NAMES:
                model.set_attn_implementation(name)
                work, row = generation(model, batch, tokens), ""
                for _ in range(RUNS):
                    compiled.clear()
                    taken = seconds(work) / NEW_TOKENS * 1e3
                    row += f"{taken:9.3f} ({len(compiled)})"
                print(f"  {batch} x {tokens:5d} {name:8s}{row}", flush=True)


def training_table(model: Any) -> None:
    """Milliseconds of a forward and a backward, the median of steps in turns."""
    model.train()
    ids = torch.randint(0, model.config.vocab_size, (1, STEP_TOKENS), device=model.device)
    taken: dict[str, list[float]] = {name: [] for name in NAMES}

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    for n in range(STEPS + 2):
        for name in NAMES:
            model.set_attn_implementation(name)
            ms = seconds(step) * 1e3
            if n >= 2:
                taken[name].append(ms)
    medians = {name: median(times) for name, times in taken.items()}
    told = ", ".join(f"{name} {ms:.2f}" for name, ms in medians.items())
    ratio = medians["splitkv"] / medians["sdpa"]
    print(f"training step of 1 x {STEP_TOKENS}, ms: {told}; {ratio:.3f}", flush=True)


def main() -> None:
    import transformers

    from splitkv.integrations import transformers as integration

    integration.register()
    model = make_model(num_hidden_layers=LAYERS)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {transformers.__version__}")
    off = ", ".join(f"{name} {x:.3f}" for name, x in logits_off(model).items())
    print(f"logits of a prompt off eager's by: {off}", flush=True)
    with torch.no_grad():
        generate_table(model)
    training_table(model)


if __name__ == "__main__":
    main()
