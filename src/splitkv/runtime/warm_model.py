"""`warmup_model`: everything that serving and training a model launch, compiled on all cores before
its first call, for a GPU that may not be there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from splitkv.core.device import Device, current
from splitkv.core.errors import expect, expect_one_of, expect_size
from splitkv.core.kv import AS_IS, CODECS, Codec
from splitkv.runtime import serving_shapes
from splitkv.runtime.compile_pool import Compiled, Progress, Work, compile_calls
from splitkv.runtime.model_config import AttentionSizes, attention_sizes
from splitkv.runtime.serving_shapes import ENGINE_BATCHES, Shape
from splitkv.runtime.warm_record import write_record
from splitkv.runtime.warmup import GRANULARITIES, Model

CacheKind = Literal["paged", "growing", "static"]


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served and trained.

    caches        paged: lengths on the device; growing: contiguous, as long as there are keys, as
                  transformers has it; static: contiguous, lengths on the device. In 8 bits with
                  the codec and what has a scale of its own: "paged:int8:head", "growing:fp8:token"
    page_size     of the paged one
    batch_sizes   sequences of a step
    max_seqlen    keys of the longest sequence; None: as the model says
    max_seqlen_q  tokens of the longest prompt or training sequence
    sink_logits   a learnable sink logit a head
    training      forward and backward, too
    """

    caches: tuple[str, ...] = ("paged", "growing")
    page_size: int = 16
    batch_sizes: tuple[int, ...] = ENGINE_BATCHES
    max_seqlen: int | None = None
    max_seqlen_q: int = 8192
    sink_logits: bool = False
    training: bool = True


SERVING = Serving()
CODEC_OF = {
    "": AS_IS,
    **{f":{name}:{per}": Codec(name, per) for name in CODECS for per in GRANULARITIES},
}
CACHES = {
    f"{kind}{stored}": (kind, codec)
    for stored, codec in CODEC_OF.items()
    for kind in get_args(CacheKind)
}
"""The values of `Serving.caches`."""


def warmup_model(
    model: Mapping[str, Any] | str | os.PathLike[str],
    serving: Serving = SERVING,
    *,
    gpu: str | Device | None = None,
    out: str | os.PathLike[str] | None = None,
    processes: int | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Compiled:
    """Compiles what decode, prefill, append and backward of a model launch, on all cores.

    model      a `config.json` of Hugging Face as a mapping, its path or that of its folder
    serving    how it is served: kinds of caches, batch sizes, lengths
    gpu        a name of `splitkv.core.device.GPUS` or a Device; None: the one that is here
    out        a folder in the place of Triton's cache, to be named by TRITON_CACHE_DIR when serving
    processes  that compile; None: one a core
    progress   progress(what, done, of) after each part of the work

    Every call is made on tensors without memory, by processes that launch nothing: no GPU is asked
    for. A process that serves the model with this cache compiles nothing for the batch sizes given,
    any lengths, and tensors that begin at multiples of 16 bytes. `splitkv doctor` lists what is
    warm.

    Returns a `Compiled`: what was needed, and its folders in the cache. Raises ValueError for a
    configuration that does not say what attention has to know, or without a GPU.
    """
    device = gpu if isinstance(gpu, Device) else current() if gpu is None else Device.named(gpu)
    hint = "name the GPU that it is for"
    expect(device.kind == "cuda", "gpu", "a GPU", device.name, hint)
    for kind in serving.caches:
        expect_one_of("serving.caches", kind, CACHES)
    sizes = attention_sizes(model)
    if processes is not None:
        expect_size("processes", processes)
    works = list(calls_of(sizes, serving, device))
    made = compile_calls(works, processes=processes, out=out, progress=progress)
    write_record(str(sizes), device, made.folders, out)
    return made


def calls_of(sizes: AttentionSizes, serving: Serving, gpu: Device) -> Iterator[Work]:
    """The calls of a model, by what they have in common."""
    longest = serving.max_seqlen or sizes.max_seqlen
    prompt = min(serving.max_seqlen_q, longest)
    for window in sizes.windows:
        arguments = {"window_size": window, "softcap": sizes.softcap}
        for kind, codec in (CACHES[cache] for cache in serving.caches):
            model = _model(sizes, serving, longest, gpu, kind, arguments)
            shapes = list(serving_shapes.decode_shapes(serving.batch_sizes, longest))
            if kind == "paged":
                shapes += serving_shapes.prompt_shapes("prompt", prompt, longest)
                shapes += serving_shapes.append_shapes()
            elif codec == AS_IS:  # a prompt is attended to before it is stored
                shapes += serving_shapes.prompt_shapes("dense", prompt, longest)
            yield replace(model, codec=codec), shapes
        model = _model(sizes, serving, longest, gpu, "static", arguments)
        yield model, _packed_and_trained(serving, prompt)


def _packed_and_trained(serving: Serving, prompt: int) -> Sequence[Shape]:
    shapes = list(serving_shapes.prompt_shapes("packed", prompt, prompt))
    return shapes + list(serving_shapes.training_shapes(prompt) if serving.training else ())


def _model(
    sizes: AttentionSizes,
    serving: Serving,
    longest: int,
    gpu: Device,
    kind: CacheKind,
    arguments: dict[str, Any],
) -> Model:
    return Model(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim,
        dtype=getattr(torch, sizes.dtype),
        codec=AS_IS,
        page_size=serving.page_size if kind == "paged" else None,
        longest=longest,
        cache_seqlens=kind != "growing",
        append=False,
        rotary=None,
        sink_logits=serving.sink_logits,
        alibi_slopes=False,
        num_splits=0,
        device=torch.device("cuda", 0),
        arguments=arguments,
        gpu=gpu,
    )
