"""A model of random weights in a real SGLang: its tokens beside transformers, and its time a step.

    python tests/engines/sglang_engine.py check --models llama,gpt_oss --backends splitkv,triton
    python tests/engines/sglang_engine.py bench --shapes 8x2048,1x32768+15x1024 --backends ...
    python tests/engines/sglang_engine.py engine ...      what these start, each in its process

`check` needs an SGLang of any device, `bench` one with a GPU. On a CPU (SGLANG_USE_CPU_ENGINE=1)
SGLang's own Triton kernels have to run in the interpreter (TRITON_INTERPRET=1), and `torch_native`
is the backend to compare with.

`check` prints of each backend and model how many of its greedy tokens are those that transformers
in fp32 would choose, and the largest difference of their log-probabilities; it exits with 1 where
splitkv is further off than --tolerance, or has fewer tokens right than another backend less 2 %.
With a cache in 8 bits, transformers' keys and values are rounded to it as they are stored. With
--draft a model of the same weights drafts that many tokens, which are then verified.

`bench` prints of each backend and shape, as 8x2048 for eight prompts of 2048 tokens, milliseconds
until all prompts have their first token, the first time and later, and a step of what follows.

Every row is printed, and with --rows FILE appended to that, as soon as it is there; a backend that
does not run, or has no end after --limit seconds, leaves the others to run. Several of these may
share a GPU: with --turns FILE one is timed only while none of the others has work for it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_runs import add_options, saved_by, start, tell
from small_models import LENGTHS, MODELS, SHAPES, compare, prompts, save_model, save_shape

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# an engine that failed would wait a minute for somebody to look at it
os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")
OURS = "splitkv"
FIXED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@contextmanager
def turn(o: argparse.Namespace, alone: bool) -> Iterator[None]:
    """A stretch of work for the GPU; `alone`: while no other process has such a stretch."""
    if not o.turns:
        yield
        return
    with open(o.turns, "w") as file:
        with open(f"{o.turns}.next", "w") as following:  # who waits is not overtaken
            fcntl.flock(following, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def engine(o: argparse.Namespace, **more: Any) -> Any:
    """SGLang with the backend that is asked for."""
    import torch
    from sglang import Engine

    # of mixtures of experts the runner that has the layout of weights that is native
    options: dict[str, Any] = {"moe_runner_backend": "triton"}
    sizes = numbers(o.graphs) if torch.cuda.is_available() else []
    if torch.cuda.is_available():
        options["mem_fraction_static"] = o.memory
    else:
        options |= {"device": "cpu", "disable_overlap_schedule": True}
    if sizes:
        options["cuda_graph_bs_decode"] = sizes
    if o.draft:
        options |= {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": o.model,
            "speculative_draft_attention_backend": o.draft_backend,
            "speculative_eagle_topk": 1,
            "speculative_num_steps": o.draft,
            "speculative_num_draft_tokens": o.draft + 1,
        }
    made = Engine(
        model_path=o.model,
        skip_tokenizer_init=True,
        attention_backend=o.backend,
        page_size=o.page,
        kv_cache_dtype=o.kv,
        dtype=o.dtype,
        context_length=o.context,
        chunked_prefill_size=o.chunk,
        max_running_requests=o.most,
        disable_radix_cache=not o.shared,
        disable_cuda_graph=not sizes,
        disable_prefill_cuda_graph=True,
        disable_hybrid_swa_memory=not o.window_pool,
        sampling_backend="pytorch",
        grammar_backend="none",
        log_level=o.log,
        random_seed=0,
        **options | more,
    )
    backend = made.server_args.attention_backend
    assert backend == o.backend, f"attention_backend: expected {o.backend}, got {backend}"
    return made


def run_engine(o: argparse.Namespace) -> None:
    """One engine: its tokens and log-probabilities into a file, or its times printed."""
    if o.save:
        made = engine(o, max_total_tokens=8192)
        asked = prompts(list(LENGTHS), o.shared)
        told = FIXED | {"max_new_tokens": o.tokens}
        with turn(o, alone=False):
            if o.shared:  # so that the others find its pages
                made.generate(input_ids=asked[:1], sampling_params=told)
            done = made.generate(input_ids=asked, sampling_params=told, return_logprob=True)
        found = [x["meta_info"]["output_token_logprobs"] for x in done]
        ids = [[token for _, token, _ in x] for x in found]
        logprobs = [[logprob for logprob, _, _ in x] for x in found]
        Path(o.save).write_text(json.dumps([asked, ids, logprobs]))
    else:
        shapes = o.shapes.split(",")
        # with room for what the scheduler keeps free, and for engines beside this one
        most = max(sum(n + o.tokens + 64 for n in lengths_of(x)) for x in shapes) * 5 // 4
        made = engine(o, load_format="dummy", max_total_tokens=most // o.page * o.page)
        for shape in shapes:
            with turn(o, alone=True):
                row = times(made, o, shape)
            tell(o, row)
    made.shutdown()


def times(made: Any, o: argparse.Namespace, shape: str) -> dict[str, Any]:
    """The times of a shape: of new prompts until the first token, the first time and after that,
    and of a step behind them, whose keys are then cached."""

    def seconds(tokens: int, asked: list[list[int]]) -> float:
        told = FIXED | {"max_new_tokens": tokens}
        start = time.perf_counter()
        made.generate(input_ids=asked, sampling_params=told)
        return time.perf_counter() - start

    lengths = lengths_of(shape)
    first = []
    for number in range(o.prompts or 1 + o.repeats):  # the first compiles what was not warmed up
        made.flush_cache()
        asked = prompts(lengths, seed=number)
        first.append(seconds(1, asked))
    seconds(8, asked)
    few, many = (min(seconds(n, asked) for _ in range(o.repeats)) for n in (8, 8 + o.tokens))
    row: dict[str, Any] = {"backend": o.backend, "shape": shape, "kv": o.kv, "page": o.page}
    row |= {"policy": os.environ.get("SPLITKV_DECODE_POLICY", "")}
    row |= {"ms_first_time": round(first[0] * 1e3, 3)}
    if first[1:]:
        row |= {"ms_to_first_token": round(min(first[1:]) * 1e3, 3)}
    return row | {"ms_a_step": round((many - few) / o.tokens * 1e3, 4)}


def lengths_of(shape: str) -> list[int]:
    """Keys of each prompt: 2x100+1x7 are 100, 100 and 7."""
    parts = [[int(n) for n in part.split("x")] for part in shape.split("+")]
    return [keys for count, keys in parts for _ in range(count)]


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def check(o: argparse.Namespace) -> int:
    """Compares every backend with transformers; how many are not as they should be."""
    wrong, folder = 0, Path(o.folder)
    for name in o.models.split(","):
        model = save_model(name, folder, o.dtype)
        found: dict[str, float] = {}
        for backend in o.backends.split(","):
            row = {"model": name, "backend": backend, "kv": o.kv, "page": o.page, "draft": o.draft}
            save = folder / f"{name}-{backend}.json"
            saved = saved_by(__file__, o, save, backend=backend, model=model)
            if saved is None:
                tell(o, row | {"failed": "did not run"})
                wrong += backend == OURS
                continue
            right, tokens, worst = compare(model, o.kv, *saved)
            found[backend] = right / tokens
            row |= {"right": right, "tokens": tokens, "logprobs_within": round(worst, 5)}
            tell(o, row)
            wrong += backend == OURS and worst > o.tolerance
        ours = found.pop(OURS, 1.0)
        wrong += any(ours < other - 0.02 for other in found.values())
    return wrong


def bench(o: argparse.Namespace) -> int:
    """Times every backend; whether one did not run."""
    model = save_shape(o.shape, Path(o.folder), o.layers, o.dtype)
    shapes = [lengths_of(shape) for shape in o.shapes.split(",")]
    changed = {
        "model": model,
        "save": "",
        "most": max(map(len, shapes)),
        "graphs": ",".join(map(str, sorted({len(lengths) for lengths in shapes}))),
        "context": max(map(max, shapes)) + o.tokens + 64,
        "shared": 1,  # so that a step is timed behind keys that are cached
    }
    codes = [start(__file__, o, backend=backend, **changed) for backend in o.backends.split(",")]
    return int(any(codes))


def main() -> int:
    said = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=said)
    parser.add_argument("verb", choices=("check", "bench", "engine"))
    parser.add_argument("--models", default="llama,qwen2,gemma2,gpt_oss")
    parser.add_argument("--backends", default=OURS)
    parser.add_argument("--backend", default=OURS)
    parser.add_argument("--model", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "sglang_engine"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--graphs", default="1,2,4,8")
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--window-pool", type=int, default=1)
    parser.add_argument("--draft", type=int, default=0)
    parser.add_argument("--draft-backend", default="triton")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--shapes", default="1x8192,8x8192,32x2048,1x32768+15x1024")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=0, help="times; 0: one more than --repeats")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--log", default="error")
    parser.add_argument("--turns", default="", help="a file by which processes take turns")
    add_options(parser)
    o = parser.parse_args()
    assert set(o.models.split(",")) <= set(MODELS), f"models: expected {', '.join(MODELS)}"
    Path(o.folder).mkdir(parents=True, exist_ok=True)
    if o.verb == "engine":
        run_engine(o)
        return 0
    return min(check(o), 1) if o.verb == "check" else bench(o)


if __name__ == "__main__":
    sys.exit(main())
