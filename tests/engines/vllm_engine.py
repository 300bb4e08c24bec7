"""A model of random weights in a real vLLM: its tokens beside transformers, and its time a step.

    python tests/engines/vllm_engine.py check --models llama,gpt_oss --backends CUSTOM,FLASH_ATTN
    python tests/engines/vllm_engine.py bench --batch 1,8 --keys 2048,8192 --backends ...
    python tests/engines/vllm_engine.py soak --requests 2000 --blocks 1200 --backends ...
    python tests/engines/vllm_engine.py engine ...      what these start, in processes of their own

`check` and `soak` need a vLLM of any device, `bench` one with a GPU. With its build for CPUs the
backend stands in the place of CPU_ATTN, which is the only one that is taken there.

`check` prints of each backend and model how many of its greedy tokens are those that transformers
in fp32 would choose, and the largest difference of their log-probabilities; it exits with 1 where
splitkv is further off than --tolerance, or has fewer tokens right than another backend less 2 %.
With a cache in 8 bits, transformers' keys and values are rounded to it as they are stored, so that
what is left is not of the cache.

`soak` serves requests of random lengths, some behind the same beginning, with so few blocks that
some have to wait and begin anew, by the first backend of the list, by the second, and by that in
other batches. It prints how many tokens each pair of runs shares before the first that differs, and
exits with 1 where the backends share fewer than the two runs of the second do, less 2 %.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from small_models import LENGTHS, MODELS, VOCABULARY, compare, prompts, save_model, save_shape

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def engine(o: argparse.Namespace, **more: Any) -> Any:
    """vLLM with the backend that is asked for."""
    import torch
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.is_available():
        if o.backend == "CUSTOM":  # also where the project is not installed
            importlib.import_module("splitkv.integrations.vllm").register()
        sizes = [int(n) for n in o.graphs.split(",") if n]
        options |= {"attention_backend": o.backend, "gpu_memory_utilization": o.memory}
        if sizes:  # decode steps in full graphs; nothing is compiled
            graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
            options |= {"enforce_eager": False, "compilation_config": {"mode": 0, **graphs}}
    elif o.backend == "CUSTOM":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        path = "splitkv.integrations.vllm.SplitKVBackend"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
    if o.speculate:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": o.speculate,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    return LLM(
        model=o.model,
        skip_tokenizer_init=True,
        max_model_len=o.max_model_len,
        kv_cache_dtype=o.kv,
        dtype=o.dtype,
        block_size=o.page,
        enable_prefix_caching=bool(o.shared),
        **options | more,
    )


def run_engine(o: argparse.Namespace) -> None:
    """One engine: its tokens and log-probabilities into a file, or its times printed."""
    from vllm import SamplingParams

    fixed = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    if o.save and not o.requests:
        llm = engine(o, max_num_batched_tokens=o.max_tokens, max_num_seqs=8)
        asked = given(prompts(list(LENGTHS), o.shared))
        told = SamplingParams(max_tokens=o.tokens, logprobs=1, **fixed)
        if o.shared:  # so that the others find its blocks
            llm.generate(asked[:1], told, use_tqdm=False)
        done = [x.outputs[0] for x in llm.generate(asked, told, use_tqdm=False)]
        ids = [list(x.token_ids) for x in done]
        logprobs = [
            [step[token].logprob for step, token in zip(x.logprobs, chosen, strict=True)]
            for x, chosen in zip(done, ids, strict=True)
        ]
        impl = impl_of(llm)
        told_of = [x["prompt_token_ids"] for x in asked]
        Path(o.save).write_text(json.dumps([told_of, ids, logprobs, impl]))
        return
    if o.requests:
        more = {"num_gpu_blocks_override": o.blocks} if o.blocks else {}
        llm = engine(o, max_num_batched_tokens=o.max_tokens, max_num_seqs=o.most, **more)
        asked, lengths = requests(o)
        told = [SamplingParams(max_tokens=n, **fixed) for n in lengths]
        done = llm.generate(asked, told, use_tqdm=False)
        Path(o.save).write_text(json.dumps([list(x.outputs[0].token_ids) for x in done]))
        return
    llm = engine(o, load_format="dummy", max_num_seqs=max(o.most, 8))
    for batch in numbers(o.batch):
        for keys in numbers(o.keys):
            asked = given(prompts([keys] * batch))

            def seconds(tokens: int, asked: Any = asked) -> float:
                told = SamplingParams(max_tokens=tokens, min_tokens=tokens, **fixed)
                start = time.perf_counter()
                llm.generate(asked, told, use_tqdm=False)
                return time.perf_counter() - start

            seconds(4)
            first, few, many = (
                min(seconds(n) for _ in range(o.repeats)) for n in (1, 8, 8 + o.tokens)
            )
            row = {"backend": o.backend, "batch": batch, "keys": keys, "kv": o.kv, "page": o.page}
            row |= {"ms_a_step": (many - few) / o.tokens * 1e3, "ms_to_first_token": first * 1e3}
            print(json.dumps(row), flush=True)


def given(asked: list[list[int]]) -> list[dict[str, list[int]]]:
    """Prompts as vLLM takes them."""
    return [{"prompt_token_ids": tokens} for tokens in asked]


def impl_of(llm: Any) -> str:
    """The class that attends in the engine's layers."""

    def ask(worker: Any) -> str:
        context = worker.vllm_config.compilation_config.static_forward_context
        layers = (layer for layer in context.values() if hasattr(layer, "kv_cache"))
        kinds = {type(layer.impl).__name__ for layer in layers}
        return ",".join(sorted(kinds))

    return str(llm.llm_engine.collective_rpc(ask)[0])


def requests(o: argparse.Namespace) -> tuple[list[dict[str, list[int]]], list[int]]:
    """(prompts, how many tokens are asked for after each): a third has one of four beginnings."""
    draw = random.Random(2)

    def tokens(most: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, most))]

    longest = o.max_model_len - o.tokens
    beginnings, asked = [tokens(longest // 2) for _ in range(4)], []
    for number in range(o.requests):
        shared = beginnings[draw.randrange(4)] if number % 3 == 0 else []
        asked.append({"prompt_token_ids": shared + tokens(longest // 2)})
    return asked, [draw.randrange(1, o.tokens + 1) for _ in asked]


def soak(o: argparse.Namespace) -> int:
    """Compares two backends with each other, and the second with itself in other batches."""
    ours, theirs = o.backends.split(",")
    folder, name = Path(o.folder), o.models.split(",")[0]
    model, most, runs = save_model(name, folder, o.dtype), o.most or 64, []
    for number, (backend, seqs) in enumerate(((ours, most), (theirs, most), (theirs, most // 3))):
        save = folder / f"soak-{number}.json"
        save.unlink(missing_ok=True)
        how = {"backend": backend, "model": model, "save": str(save), "most": seqs}
        if start(o, **how, shared=1) or not save.exists():
            print(f"{backend}: did not run", flush=True)
            return 1
        runs.append(json.loads(save.read_text()))

    def share(a: list[list[int]], b: list[list[int]]) -> float:
        same = 0
        for x, y in zip(a, b, strict=True):
            pairs = enumerate(zip(x, y, strict=True))
            same += next((n for n, (one, other) in pairs if one != other), len(x))
        return same / sum(map(len, a))

    between, within = share(runs[0], runs[1]), share(runs[1], runs[2])
    tokens = sum(map(len, runs[0]))
    print(
        f"{name}, {o.requests} requests, {tokens} tokens: {ours} and {theirs} share {between:.4f}"
    )
    print(f"{theirs} in other batches shares {within:.4f} with itself", flush=True)
    return int(between < within - 0.02)


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def start(o: argparse.Namespace, **changed: Any) -> int:
    """Starts an engine with these options, in a process of its own."""
    given = vars(o) | changed | {"verb": "engine"}
    verb = given.pop("verb")
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return subprocess.run([sys.executable, __file__, verb, *arguments]).returncode


def check(o: argparse.Namespace) -> int:
    """Compares every backend with transformers; how many are not as they should be."""
    wrong, folder = 0, Path(o.folder)
    for name in o.models.split(","):
        model = save_model(name, folder, o.dtype)
        found: dict[str, tuple[float, float]] = {}
        for backend in o.backends.split(","):
            save = folder / f"{name}-{backend}.json"
            save.unlink(missing_ok=True)
            if start(o, backend=backend, model=model, save=str(save)) or not save.exists():
                print(f"{name} {backend}: did not run", flush=True)
                wrong += backend == "CUSTOM"
                continue
            asked, ids, logprobs, impl = json.loads(save.read_text())
            right, tokens, worst = compare(model, o.kv, asked, ids, logprobs)
            found[backend] = right / tokens, worst
            print(
                f"{name} {backend} ({impl}): {right} of {tokens} tokens as transformers in fp32, "
                f"log-probabilities within {worst:.2g}",
                flush=True,
            )
            wrong += backend == "CUSTOM" and (worst > o.tolerance or impl != "SplitKVImpl")
        ours = found.pop("CUSTOM", (1.0, 0.0))
        wrong += any(ours[0] < other[0] - 0.02 for other in found.values())
    return wrong


def main() -> int:
    said = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=said)
    parser.add_argument("verb", choices=("check", "bench", "soak", "engine"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--backends", default="CUSTOM")
    parser.add_argument("--backend", default="CUSTOM")
    parser.add_argument("--model", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "vllm_engine"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--graphs", default="1,2,4,8")
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--keys", default="2048,8192")
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--heads", default="32,8")
    parser.add_argument("--layers", type=int, default=16)
    o = parser.parse_args()
    Path(o.folder).mkdir(parents=True, exist_ok=True)
    if o.verb == "engine":
        run_engine(o)
        return 0
    if o.verb == "check":
        return min(check(o), 1)
    if o.verb == "soak":
        o.requests = o.requests or 2000
        return soak(o)
    most, longest = max(numbers(o.batch)), max(numbers(o.keys))
    length = max(o.max_model_len, longest + o.tokens + 64)
    graphs = ",".join(sorted({str(n) for n in numbers(o.batch)}, key=int))
    heads, kv_heads = numbers(o.heads)
    model = save_shape(Path(o.folder), heads, kv_heads, o.layers, o.dtype)
    codes = [
        start(
            o,
            backend=backend,
            model=model,
            most=most,
            max_model_len=length,
            graphs=graphs,
            save="",
        )
        for backend in o.backends.split(",")
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
