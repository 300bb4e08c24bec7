"""`warm_layers`: compiles on all cores and loads what an engine's steps launch, before its first
request.

    layer = Layer(num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, ..)
    warm_layers([layer], Sizes.of(captured=(1, 2, 4), max_sequences=64, max_tokens=8192, ..))

Adapters call it once for the layers that share a block table, when they know the sizes of steps.
SPLITKV_ENGINE_WARMUP=0 leaves it out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitkv.core.device import current
from splitkv.integrations.serving import Pages, Plans, Step, attend, bound_of, bound_of_new
from splitkv.kernels.host.append_call import Rotary
from splitkv.runtime.compile_pool import Compiled, compile_calls
from splitkv.runtime.serving_shapes import Shape, append_shapes
from splitkv.runtime.warmup import Call, Model

SWITCH = "SPLITKV_ENGINE_WARMUP"  # names an environment variable, as engines pass no options
MOST_PROCESSES = 16  # each imports torch, and there are some 40 kernels
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """The steps that an engine may make.

    batch_sizes   sequences of steps that decode
    decode_lens   new tokens of each of these
    max_tokens    new tokens of a step; max_sequences: sequences of one
    max_seqlen_k  keys of the longest sequence
    appends       whether `append` writes the new keys; False: the engine does
    """

    batch_sizes: tuple[int, ...]
    max_tokens: int
    max_sequences: int
    max_seqlen_k: int
    decode_lens: tuple[int, ...] = (1,)
    appends: bool = True

    @classmethod
    def of(
        cls, captured: Iterable[int], *, max_sequences: int, decode_len: int = 1, **others: Any
    ) -> Sizes:
        """Sizes of an engine whose steps have any number of sequences.

        captured    batch sizes of its CUDA graphs, which may be more than there are sequences
        decode_len  the most new tokens of a sequence that decodes: with drafted ones
        others      max_tokens, max_seqlen_k and appends
        """
        sizes = {n for n in captured if n <= max_sequences} | {*powers(max_sequences)}
        lens = tuple(sorted({1, decode_len}))
        return cls(tuple(sorted(sizes)), max_sequences=max_sequences, decode_lens=lens, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Model):
    """A layer of an engine: a `Model` whose lengths are on the device, whose keys come rotated, and
    are in its cache before it attends.

    Its keys and values lie side by side in one cache, [pages, keys, heads, 2 * head_dim], or with
    `heads_first` [pages, heads, keys, 2 * head_dim]; with `apart` in one each, [pages, keys, heads,
    head_dim]. `policy` as of `Plans`.
    """

    cache_seqlens: bool = True
    append: bool = False
    rotary: Rotary | None = None
    sink_logits: bool = False
    alibi_slopes: bool = False
    num_splits: int = 0
    heads_first: bool = False
    apart: bool = False
    policy: str = ""

    @property
    def slot_type(self) -> torch.dtype:
        return torch.int64  # of vLLM's slot mappings

    def caches(self, rows: int, keys: int) -> tuple[Tensor, Tensor]:
        if self.apart:
            return Model.caches(self, rows, keys)
        lead = (self.num_kv_heads, keys) if self.heads_first else (keys, self.num_kv_heads)
        both = self.cache((rows, *lead, 2 * self.head_dim), self.stored)
        both = both.transpose(1, 2) if self.heads_first else both
        return both[..., : self.head_dim], both[..., self.head_dim :]

    def call_of(self, shape: Shape) -> Call:
        """Sequences that decode, the prompts of others, or new keys: as adapters make the call."""
        if shape.kind == "slots":
            return Model.call_of(self, shape)
        assert self.page_size is not None
        decodes = shape.batch if shape.kind == "step" else 0
        tokens = shape.batch * shape.seqlen_q if decodes else shape.seqlen_q
        step = Step.of(
            self.index(shape.batch + 1),
            self.index(shape.batch) + 1,
            self.pages(shape.batch, shape.seqlen_k),
            num_decodes=decodes,
            decode_len=shape.seqlen_q,
            num_tokens=tokens,
            max_seqlen_q=shape.seqlen_q,
            max_seqlen_k=shape.seqlen_k,
        )
        q = self.zeros(tokens, self.num_heads, self.head_dim)
        out = self.zeros(tokens, self.num_heads, self.head_dim_v)
        k, v = self.caches(1, self.page_size)
        pages = Pages(k, v, **self.scales(1, self.page_size))
        options = self.arguments | dict.fromkeys(("sink_logits", "alibi_slopes")) | self.beside()
        plans = Plans(self.policy, ["decode"])
        run = partial(attend, q, pages, step, out, options, plans)
        return Call(None, None, run)


def warm_layers(layers: Iterable[Layer], sizes: Sizes, engines: int = 1) -> None:
    """`warm_layer` for each kind of layer among these once, on all cores.

    engines   processes of the engine that do so on this host at the same time

    Layers of the policy `batch_invariant` are left out: steps have plans of it for prompts, too.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return
    processes = max((os.cpu_count() or 1) // engines, 1)
    kinds = {repr(layer): layer for layer in layers if layer.policy != "batch_invariant"}
    for kind in kinds.values():
        warm_layer(kind, sizes, processes)


def warm_layer(model: Model, sizes: Sizes, processes: int | None = None) -> Compiled | None:
    """Compiles and loads the kernels that steps of these sizes launch for a layer.

    model      the layer, on the device that serves
    processes  that compile; None: one a core, MOST_PROCESSES at most

    What cannot be compiled is logged, and is compiled where it is needed. None: processes that
    compile could not be started, or ended.
    """
    there, processes = replace(model, gpu=current()), processes or os.cpu_count() or 1
    shapes = list(shapes_of(sizes))
    try:
        made = compile_calls([(there, shapes)], processes=min(processes, MOST_PROCESSES))
    except (OSError, RuntimeError) as error:
        logger.warning("splitkv: nothing is compiled ahead: %s", error)
        return None
    for failure in made.failures:
        logger.warning("splitkv: not compiled ahead: %s", failure)
    with torch.no_grad():
        for shape in dict.fromkeys(shape for _, shape in made.first_calls.values()):
            model.call_of(shape).run()
    logger.info("splitkv: %d kernels are compiled for %s", len(made.kernels), sizes)
    return made


def shapes_of(sizes: Sizes) -> Iterator[Shape]:
    """The calls of steps, by the bounds that adapters give them."""
    keys = bounds(sizes.max_seqlen_k)
    for batch in sizes.batch_sizes:
        for length in sizes.decode_lens:
            for most in keys:
                yield Shape("step", batch, length, most)
    for batch in powers(sizes.max_sequences):
        for tokens in powers(sizes.max_tokens):
            for most in keys:
                if most >= tokens:
                    yield Shape("prompt", batch, bound_of_new(tokens, sizes.max_tokens), most)
    if sizes.appends:
        yield from append_shapes()


def bounds(most: int) -> list[int]:
    """The values of `bound_of`, rising."""
    found, n = list[int](), 1
    while not found or found[-1] < most:
        found.append(bound_of(n, most))
        n = found[-1] + 1
    return found


def powers(most: int) -> list[int]:
    """1, 2, 4, .. below a number, and that."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]
