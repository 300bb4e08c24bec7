"""A model of random weights in a real vLLM: its tokens beside transformers, and its time a step.

    python tests/engines/vllm_engine.py check --models llama,gpt_oss --backends CUSTOM,FLASH_ATTN
    python tests/engines/vllm_engine.py bench --cases 8x8192,one_long,beside --backends ...
    python tests/engines/vllm_engine.py soak --requests 2000 --blocks 1200 --backends ...
    python tests/engines/vllm_engine.py engine ...      what these start, in processes of their own

`check` and `soak` need a vLLM of any device, `bench` one with a GPU. With its build for CPUs the
backend stands in the place of CPU_ATTN, which is the only one that is taken there.

`check` prints of each backend and model how many of its greedy tokens are those that transformers
in fp32 would choose, and the largest difference of their log-probabilities; it exits with 1 where
splitkv is further off than --tolerance, or has fewer tokens right than another backend less 2 %.
With a cache in 8 bits, transformers' keys and values are rounded to it as they are stored, so that
what is left is not of the cache. Of an encoder it is the states of its tokens that are compared.
With --shared all prompts begin alike, and find those blocks cached: written before, or --together,
by a request of the same step. With --ranks so many GPUs share the keys (the model `mqa`).

`bench` makes a model of the shape of --shape, random weights, and prints for every case of --cases
a line of JSON: milliseconds a step in which all requests decode, the least of --repeats runs of
--tokens steps, milliseconds until every request had its first token, and, taken from a profile of
some more steps, how long in a step any kernel is busy, and how long none but of attention: one
that begins early waits beside the one before. A case is
`BATCHxKEYS` or a name of MIXES: requests of different lengths; `beside` has a prompt in chunks
beside requests that decode, and its first token is what counts.

`soak` serves requests of random lengths, some behind the same beginning, with so few blocks that
some have to wait and begin anew, by every backend of the list, and by the second in other batches,
too. It prints how far each is from transformers in fp32, and what share of its tokens is before the
first that differs from the second's, see differences.py, and exits with 1 where the first backend's
is smaller than that of every other, less 2 %.

Every row is printed, and with --rows FILE appended to that, as soon as it is there; a backend that
does not run, or has no end after --limit seconds, leaves the others to run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from differences import Run, compare_runs, compare_with_fp32
from engine_runs import add_options, covered, saved_by, start, tell
from small_models import (
    ENCODERS,
    LENGTHS,
    MODELS,
    SHAPES,
    VOCABULARY,
    compare,
    compare_states,
    prompts,
    save_encoder,
    save_model,
    save_shape,
)

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def lognormal(requests: int, median: float, longest: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    lengths = (int(draw.lognormvariate(0, 1) * median) for _ in range(requests))
    return [min(max(n, 16), longest) for n in lengths]


MIXES: dict[str, list[int]] = {
    "three_long": [16000, 400, 400, 400] * 3 + [400] * 4,
    "one_long": [600] * 15 + [24000],
    "one_of_64": [500] * 63 + [100000],
    "lognormal16": lognormal(16, 2048, 30000, seed=1),
    "lognormal64": lognormal(64, 4000, 100000, seed=2),
    "uniform32": [random.Random(3).randrange(100, 20000) for _ in range(32)],
    "beside": lognormal(31, 4000, 30000, seed=4),
}
"""Of each mix how many keys its requests begin with."""
PROFILED = 8  # steps that are profiled
HEADROOM = 1024  # tokens that a request may be given past its prompt
BESIDE = 32000  # tokens of the prompt that is computed beside the requests of `beside`
ATTENDS = re.compile(
    "decode_|combine|schedule|append_kv|prefill|merge_states|flash|reshape_and_cache|unified_attention"
    "|reduce_segments|prepare_varlen|mha|PagedKVCache|MergeStates"
)
"""Finds the names of kernels that attend, merge, plan or write the cache, of all backends."""


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
        if o.cache:  # in the place of measuring what is left, beside other engines
            options["kv_cache_memory_bytes"] = o.cache << 20
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
    if o.ranks > 1:  # which share the keys of the one KV head that they all have
        options |= {"tensor_parallel_size": o.ranks, "decode_context_parallel_size": o.ranks}
        options |= {"disable_custom_all_reduce": True}
    options |= {"skip_tokenizer_init": True, "max_model_len": o.max_model_len}
    return LLM(
        model=o.model,
        kv_cache_dtype=o.kv,
        dtype=o.dtype,
        block_size=o.page,
        enable_prefix_caching=bool(o.shared),
        **options | more,
    )


FIXED: dict[str, Any] = {"temperature": 0, "detokenize": False, "ignore_eos": True}


def run_engine(o: argparse.Namespace) -> None:
    """One engine: what it makes of requests into a file, or its times printed."""
    if o.save:
        run = answers if o.requests else states if is_encoder(o.model) else tokens
        Path(o.save).write_text(json.dumps(run(o)))
        return
    llm = engine(
        o, load_format="dummy", max_num_seqs=max(o.most, 8), max_num_batched_tokens=o.max_tokens
    )
    for case in o.cases.split(","):
        row = {"backend": o.backend, "policy": os.environ.get("SPLITKV_DECODE_POLICY", "")}
        row |= {"shape": o.shape, "case": case, "kv": o.kv, "page": o.page}
        tell(o, row | Serving(llm.llm_engine, case, o).times())


def is_encoder(model: str) -> bool:
    return Path(model).name in ENCODERS


def tokens(o: argparse.Namespace) -> list[Any]:
    """[prompts, of each the tokens that follow, and their log-probabilities, what attends, what
    else there is to tell]"""
    from vllm import SamplingParams

    llm = engine(o, max_num_batched_tokens=o.max_tokens, max_num_seqs=8)
    asked = prompts(list(LENGTHS), o.shared)
    told = SamplingParams(max_tokens=o.tokens, logprobs=1, **FIXED)
    if o.shared and not o.together:  # so that the others find its blocks
        llm.generate(given(asked[:1]), told, use_tqdm=False)
    made = llm.generate(given(asked), told, use_tqdm=False)
    done, cached = [x.outputs[0] for x in made], [x.num_cached_tokens for x in made]
    ids = [list(x.token_ids) for x in done]
    logprobs = [
        [step[token].logprob for step, token in zip(x.logprobs, chosen, strict=True)]
        for x, chosen in zip(done, ids, strict=True)
    ]
    return [asked, ids, logprobs, impl_of(llm), {"cached": sum(cached)} if o.shared else {}]


def states(o: argparse.Namespace) -> list[Any]:
    """[prompts, of each the states of its tokens, what attends, nothing]"""
    from vllm import PoolingParams
    from vllm.config import PoolerConfig

    more = {"runner": "pooling", "pooler_config": PoolerConfig(task="token_embed")}
    o.graphs = ""  # an encoder has no steps that decode
    llm = engine(o, skip_tokenizer_init=False, max_model_len=512, max_num_seqs=8, **more)
    asked, told = prompts(list(LENGTHS)), PoolingParams(use_activation=False)
    done = llm.encode(given(asked), told, pooling_task="token_embed", use_tqdm=False)
    return [asked, [x.outputs.data.tolist() for x in done], impl_of(llm), {}]


def answers(o: argparse.Namespace) -> list[Any]:
    """Of each request of `soak` its tokens, as a run of differences.py."""
    from vllm import SamplingParams

    more = {"num_gpu_blocks_override": o.blocks} if o.blocks else {}
    llm = engine(o, max_num_batched_tokens=o.max_tokens, max_num_seqs=o.most, **more)
    asked, lengths = requests(o)
    told = [SamplingParams(max_tokens=n, logprobs=2, **FIXED) for n in lengths]
    run = []
    for x in llm.generate(given(asked), told, use_tqdm=False):
        ids, steps = list(x.outputs[0].token_ids), x.outputs[0].logprobs
        chosen = [step[token].logprob for step, token in zip(steps, ids, strict=True)]
        best = [sorted((y.logprob for y in step.values()), reverse=True) for step in steps]
        run.append({"ids": ids, "logprobs": chosen, "gaps": [x[0] - x[1] for x in best]})
    return run


class Serving:
    """Requests that an engine serves, one step after the other."""

    def __init__(self, engine: Any, case: str, o: argparse.Namespace) -> None:
        self.engine, self.case, self.options = engine, case, o
        self.served: dict[str, int] = {}
        """Of every request how many tokens it has been given."""

    def add(self, lengths: list[int]) -> list[str]:
        """Asks for more tokens than will be waited for; the requests' names."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        told = SamplingParams(
            temperature=0,
            max_tokens=self.options.max_model_len - max(lengths),
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        names = []
        for number, prompt in enumerate(given(prompts(lengths)), len(self.served)):
            name = f"{self.case}-{number}"
            self.engine.add_request(name, prompt, told)
            names.append(name)
        self.served |= dict.fromkeys(names, 0)
        return names

    def until(self, names: list[str], tokens: int) -> float:
        """Serves until each of these has so many tokens more; how many seconds that took."""
        start, wanted = time.perf_counter(), {n: self.served[n] + tokens for n in names}
        while any(self.served[name] < most for name, most in wanted.items()):
            for x in self.engine.step():
                if x.finished:
                    raise RuntimeError(f"request {x.request_id} ended after its last token")
                self.served[x.request_id] += len(x.outputs[0].token_ids)
        return time.perf_counter() - start

    def times(self) -> dict[str, Any]:
        """What the case takes, in milliseconds."""
        o, lengths = self.options, lengths_of(self.case)
        cache = self.engine.vllm_config.cache_config
        room = cache.num_gpu_blocks * cache.block_size
        if sum(lengths) + HEADROOM * len(lengths) > room:
            return {"left_out": f"the cache has room for {room} keys"}
        names = self.add(lengths)
        row = {"ms_to_first_token": self.until(names, 1) * 1e3}
        self.until(names, 8)
        if self.case == "beside":
            first = min(self.until(self.add([BESIDE + n]), 1) for n in range(o.repeats))
            row = {"ms_to_first_token": first * 1e3}
            self.add([BESIDE])
        else:
            steps = min(self.until(names[:1], o.tokens) for _ in range(o.repeats)) / o.tokens
            row["ms_a_step"] = steps * 1e3
        row |= self.profile(names[0])
        self.engine.abort_request(list(self.served))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return row

    def profile(self, name: str) -> dict[str, Any]:
        """How long kernels of a step are busy on a GPU, by the next steps of this request."""
        import torch

        if not torch.cuda.is_available():
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            self.until([name], PROFILED)
        on_gpu = (x for x in seen.events() if x.device_type.name == "CUDA")
        busy = [(x.name, x.time_range.start, x.time_range.end) for x in on_gpu]
        kernels = covered([span for _, *span in busy])
        others = covered([span for name, *span in busy if not ATTENDS.search(name)])
        row: dict[str, Any] = {"ms_kernels": kernels / PROFILED / 1e3}
        row["ms_attention"] = (kernels - others) / PROFILED / 1e3
        if self.options.kernels:
            attending = [x for x in seen.key_averages() if ATTENDS.search(x.key)]
            total = {x.key[:60]: x.self_device_time_total / PROFILED / 1e3 for x in attending}
            row["kernels"] = total
        return row


def lengths_of(case: str) -> list[int]:
    """How many keys each request of a case begins with."""
    if case in MIXES:
        return MIXES[case]
    batch, keys = (int(n) for n in case.split("x"))
    return [keys] * batch


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


def requests(o: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """(prompts, how many tokens are asked for after each): a third has one of four beginnings."""
    draw = random.Random(2)

    def drawn(most: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, most))]

    longest = o.max_model_len - o.tokens
    beginnings, asked = [drawn(longest // 2) for _ in range(4)], []
    for number in range(o.requests):
        shared = beginnings[draw.randrange(4)] if number % 3 == 0 else []
        asked.append(shared + drawn(longest // 2))
    return asked, [draw.randrange(1, o.tokens + 1) for _ in asked]


def soak(o: argparse.Namespace) -> int:
    """Compares backends with the second, and that with itself in other batches."""
    backends, folder = o.backends.split(","), Path(o.folder)
    name, most = o.models.split(",")[0], o.most or 64
    model, reference = save_model(name, folder, o.dtype), backends[1]
    again = f"{reference} in other batches"
    asked = requests(o)[0][: o.against]
    runs: dict[str, Run] = {}
    shares: dict[str, float] = {}
    for number, run in enumerate((*backends, again)):
        how = {"backend": reference if run == again else run, "model": model, "shared": 1}
        how["most"] = most // 3 if run == again else most
        saved = saved_by(__file__, o, folder / f"soak-{number}.json", **how)
        row = {"soak": name, "requests": o.requests, "run": run}
        if saved is None:
            tell(o, row | {"failed": "did not run"})
            continue
        runs[run] = saved
        tell(o, row | compare_with_fp32(model, asked, saved))
        for other in [x for x in runs if reference in runs and x not in (reference, *shares)]:
            found = compare_runs(runs[other], runs[reference])
            shares[other] = found["share"]
            tell(o, row | {"run": other, "as": reference} | found)
    ours = shares.pop(backends[0], 0.0)
    return int(len(shares) < len(backends) - 1 or ours < min(shares.values()) - 0.02)


def check(o: argparse.Namespace) -> int:
    """Compares every backend with transformers; how many are not as they should be."""
    wrong, folder = 0, Path(o.folder)
    for name in o.models.split(","):
        encoder = name in ENCODERS
        model = (save_encoder if encoder else save_model)(name, folder, o.dtype)
        found: dict[str, float] = {}
        for backend in o.backends.split(","):
            row = {"model": name, "backend": backend, "kv": o.kv, "page": o.page}
            row |= {"draft": o.speculate, "ranks": o.ranks}
            save = folder / f"{name}-{backend}.json"
            saved = saved_by(__file__, o, save, backend=backend, model=model)
            if saved is None:
                tell(o, row | {"failed": "did not run"})
                wrong += backend == "CUSTOM"
                continue
            *results, impl, more = saved
            row |= {"impl": impl} | more
            if encoder:
                worst = compare_states(model, *results)
                tell(o, row | {"states_within": round(worst, 5)})
            else:
                right, tokens, worst = compare(model, o.kv, *results)
                found[backend] = right / tokens
                row |= {"right": right, "tokens": tokens}
                tell(o, row | {"logprobs_within": round(worst, 5)})
            wrong += backend == "CUSTOM" and (worst > o.tolerance or impl != "SplitKVImpl")
        ours = found.pop("CUSTOM", 1.0)
        wrong += any(ours < other - 0.02 for other in found.values())
    return wrong


def main() -> int:
    said = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=said)
    parser.add_argument("verb", choices=("check", "bench", "soak", "engine"))
    parser.add_argument("--models", default=",".join((*MODELS, *ENCODERS)))
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
    parser.add_argument("--cache", type=int, default=0, help="MiB; else what --memory leaves")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--together", type=int, default=0, help="no request before the others")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the keys")
    parser.add_argument("--against", type=int, default=200, help="requests beside fp32")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--cases", default="1x8192,8x8192,32x2048,three_long,one_long,beside")
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0)
    add_options(parser)
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
    cases = [lengths_of(case) for case in o.cases.split(",")]
    sizes = sorted({len(lengths) for lengths in cases})
    length = max(o.max_model_len, max(map(max, cases)) + HEADROOM)
    if "beside" in o.cases:
        length = max(length, BESIDE + HEADROOM)
    changed = {
        "model": save_shape(o.shape, Path(o.folder), o.layers, o.dtype),
        "most": max(sizes) + (o.repeats + 1) * ("beside" in o.cases),
        "max_model_len": length,
        "graphs": ",".join(map(str, sizes)),
        "save": "",
    }
    codes = [start(__file__, o, backend=backend, **changed) for backend in o.backends.split(",")]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
