"""A whole model of transformers as it is run without any setting: generation and a training step.

    python -m splitkv.lab.bench.eager_model

The model has the shape of Llama-3 8B with `LAYERS` layers and random weights in bf16. `generate`
has its default cache, which grows by concatenation, and runs three times for each shape, in a
process that has run another shape before, with all of the model's kernels compiled ahead by
`splitkv.warmup_model`: the first run shows what a new shape costs. After these
come runs in turns, so that a host whose cores change does not favour one; of these there are the
median and the least, as what else a host does only ever adds. A training step is a forward and a
backward, implementations in turns. Logits are compared first: those of splitkv are to
be about as far from those of eager attention as sdpa's.

In turns runs `nothing`, too: attention that computes nothing and gives the queries back. What it
takes is the rest of the model, which no implementation of attention can take less than.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor

from splitkv.lab.bench.model_step import make_model
from splitkv.runtime.compile_pool import Compiled
from splitkv.runtime.warm_model import Serving, warmup_model

NAMES = ("splitkv", "sdpa")
NOTHING = "nothing"
IN_TURNS = (*NAMES, NOTHING)
LAYERS, RUNS, NEW_TOKENS = 8, 3, 200
TURNS, TURN_TOKENS = 13, 50
WARM_SHAPE = (2, 500)
LONGEST = 4096  # tokens that kernels are compiled for
SHAPES = ((1, 1000), (4, 3000))  # sequences, tokens of each prompt
STEPS, STEP_TOKENS = 50, 512


class Nothing(torch.autograd.Function):
    """Attention that launches nothing: the queries, and gradients that nobody wrote."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries `[B, H, S, D]` as an output `[B, S, H, D]`."""
        ctx.sizes = k.shape, v.shape
        return q.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output's gradient, and room for those of keys and values."""
        k, v = (grads[0].new_empty(size) for size in ctx.sizes)
        return grads[0].transpose(1, 2), k, v


def register_nothing() -> None:
    """Make `attn_implementation=NOTHING` an attention that computes nothing, and no mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def forward(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
        return Nothing.apply(q, k, v), None

    AttentionInterface.register(NOTHING, forward)
    AttentionMaskInterface.register(NOTHING, lambda *_, **__: None)


def compiled_ahead(model: Any) -> Compiled:
    """All that the runs below launch of splitkv, in Triton's cache."""
    batches = tuple(sorted({WARM_SHAPE[0], *(batch for batch, _ in SHAPES)}))
    serving = Serving(("growing",), batch_sizes=batches, max_seqlen=LONGEST, max_seqlen_q=LONGEST)
    return warmup_model(model.config.to_dict(), serving)


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
    """Milliseconds a token of runs in a row, and what compiled in each; then medians in turns."""
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
            works = {name: generation(model, batch, tokens, TURN_TOKENS) for name in IN_TURNS}
            ms = in_turns(model, works, TURNS, TURN_TOKENS)
            print(f"  {batch} x {tokens:5d} in turns: {told(ms)}", flush=True)


def training_table(model: Any) -> None:
    """Milliseconds of a forward and a backward, the median of steps in turns."""
    model.train()
    ids = torch.randint(0, model.config.vocab_size, (1, STEP_TOKENS), device=model.device)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    ms = in_turns(model, dict.fromkeys(IN_TURNS, step), STEPS)
    print(f"training step of 1 x {STEP_TOKENS}: {told(ms)}", flush=True)


def in_turns(
    model: Any, works: dict[str, Callable[[], Any]], rounds: int, parts: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of one of the parts of each implementation's work, in each of so many rounds
    after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for n in range(rounds + 1):
        for name, work in works.items():
            model.set_attn_implementation(name)
            ms = seconds(work) * 1e3 / parts
            if n:
                taken[name].append(ms)
    return taken


def told(ms: dict[str, list[float]]) -> str:
    """Milliseconds of each, and those of all as shares of sdpa's: medians, and the least."""
    return "; ".join(f"{what.__name__} {_shares(ms, what)}" for what in (median, min))


def _shares(ms: dict[str, list[float]], what: Callable[[list[float]], float]) -> str:
    found = {name: what(times) for name, times in ms.items()}
    return ", ".join(f"{name} {x:.3f} ({x / found['sdpa']:.3f})" for name, x in found.items())


def main() -> None:
    import transformers

    from splitkv.integrations import transformers as integration

    integration.register()
    register_nothing()
    model = make_model(num_hidden_layers=LAYERS)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {transformers.__version__}")
    start = time.perf_counter()
    variants = len(compiled_ahead(model).kernels)
    took = time.perf_counter() - start
    print(f"{variants} variants of kernels compiled ahead in {took:.0f} s", flush=True)
    off = ", ".join(f"{name} {x:.3f}" for name, x in logits_off(model).items())
    print(f"logits of a prompt off eager's by: {off}", flush=True)
    with torch.no_grad():
        generate_table(model)
    training_table(model)


if __name__ == "__main__":
    main()
