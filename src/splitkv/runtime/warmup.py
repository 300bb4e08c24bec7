"""`warmup`: the calls that a model will make, made before it serves, which then never compiles.

Triton compiles a kernel once for integers that are multiples of 16, once for those that are not,
and once more for 1. What stands in for a cache here has strides that it does not tell from the real
ones, and no memory for the keys; see `standing_in`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from splitkv.core.device import Device
from splitkv.core.errors import (
    expect,
    expect_bool,
    expect_device,
    expect_dtype,
    expect_given_with,
    expect_in_range,
    expect_none_with,
    expect_one_of,
    expect_shape,
    expect_size,
)
from splitkv.core.kv import AS_IS, CODECS, Codec, CodecName, Granularity
from splitkv.core.options import defaults_of, options_of, tensors_of
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem, describe_attention, describe_decode
from splitkv.core.scales import DTYPE_BYTES
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.kernels.host.stand_in import stand_in
from splitkv.planner.registry import decided_lengths
from splitkv.runtime.append import append as append_tokens
from splitkv.runtime.append_decode import append_and_decode, appending
from splitkv.runtime.attention import attention, attention_varlen
from splitkv.runtime.decode import decode
from splitkv.runtime.dispatch import plan_for, torch_device
from splitkv.runtime.serving_shapes import Shape

GRANULARITIES = [name for name in get_args(Granularity) if name != AS_IS.granularity]
TOTAL = 16  # tokens of packed prompts
WITH_APPEND = options_of("append_and_decode")
MADE_HERE = *tensors_of("append_and_decode"), "out_scale"
PACKED = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
DECODE_DEFAULTS, VARLEN_DEFAULTS = defaults_of("decode"), defaults_of("attention_varlen")


class Call(NamedTuple):
    """A call that serving will make: what it asks, of which operands, None of `append` alone; how
    it is run, and the tokens of packed prompts."""

    problem: Problem | None
    operands: Operands | None
    run: Callable[[], Any]
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """Facts that the calls of a model have in common; the fields are arguments of `warmup`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    codec: Codec
    page_size: int | None
    longest: int
    cache_seqlens: bool
    append: bool
    rotary: Rotary | None
    sink_logits: bool
    alibi_slopes: bool
    num_splits: int
    device: torch.device
    arguments: dict[str, Any]
    gpu: Device | None = None  # in the place of the device, which then may not be there

    @property
    def totals(self) -> tuple[int, ...]:
        """Numbers of tokens of packed prompts: any one, as kernels are compiled for all, but for
        the one scale of one token and head, which is taken for that of a tensor."""
        of_tokens = self.page_size is None and self.codec.granularity == "token"
        return (TOTAL, 1) if of_tokens and self.num_kv_heads == 1 else (TOTAL,)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.gpu is not None:
            return stand_in(shape, dtype or self.dtype, self.gpu)
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def index(self, *shape: int) -> Tensor:
        return self.zeros(*shape, dtype=torch.int32)

    @property
    def slot_type(self) -> torch.dtype:
        """The type of the slots that new tokens are written into."""
        return torch.int32

    @property
    def stored(self) -> torch.dtype:
        """The type of keys and values."""
        if self.codec == AS_IS:
            return self.dtype
        stored: torch.dtype = getattr(torch, CODECS[self.codec.name].dtype)
        return stored

    def caches(self, rows: int, keys: int) -> tuple[Tensor, Tensor]:
        """k and v [rows, keys, num_kv_heads, ..]."""
        lead, dtype = (rows, keys, self.num_kv_heads), self.stored
        k = self.cache((*lead, self.head_dim), dtype)
        return k, self.cache((*lead, self.head_dim_v), dtype)

    def cache(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Tensors that stand in for a cache of this shape."""
        if self.gpu is not None:
            return stand_in(shape, dtype, self.gpu)
        return standing_in(shape, dtype, self.device)

    def scales(self, *lead: int) -> dict[str, Tensor]:
        """k_scale and v_scale of tokens [*lead, num_kv_heads]; none of what is not quantised."""
        if self.codec == AS_IS:
            return {}
        heads = self.num_kv_heads
        shapes = {"tensor": (1,), "head": (heads,), "token": (*lead, heads)}
        scale = self.cache(shapes[self.codec.granularity], torch.float32)
        return {"k_scale": scale, "v_scale": scale}

    def beside(self) -> dict[str, Tensor]:
        """The sink logits and slopes."""
        given = {}
        if self.sink_logits:
            given["sink_logits"] = self.zeros(self.num_heads)
        if self.alibi_slopes:
            given["alibi_slopes"] = self.zeros(self.num_heads, dtype=torch.float32)
        return given

    def pages(self, batch: int, seqlen_k: int) -> Tensor:
        """A table of as many pages as so many keys need, all of them the one that there is."""
        assert self.page_size is not None
        return self.index(batch, -(-seqlen_k // self.page_size))

    def step(self, batch: int, seqlen_q: int, seqlen_k: int) -> Call:
        """A call of decode, or of `append` and decode."""
        q = self.zeros(batch, seqlen_q, self.num_heads, self.head_dim)
        given = DECODE_DEFAULTS | self.arguments | self.beside()
        if self.page_size is None:
            # `longest` keys lie between sequences, however few of them are looked at
            k, v = (x[:, :seqlen_k] for x in self.caches(batch, self.longest))
            scales = self.scales(batch, self.longest)
            if self.codec.granularity == "token":
                scales = {name: x[:, :seqlen_k] for name, x in scales.items()}
        else:
            k, v = self.caches(1, self.page_size)
            scales = self.scales(1, self.page_size)
            given["page_table"] = self.pages(batch, seqlen_k)
        given |= scales
        lengths = None
        if self.cache_seqlens:  # before the new keys, or with one
            lengths = self.index(batch) if self.append else self.index(batch) + 1
        described = given | {"cache_seqlens": lengths}
        problem, operands = describe_decode(q, k, v, needs_grad=False, **described)
        if not self.append:
            run = partial(decode, q, k, v, **described, num_splits=self.num_splits)
            return Call(problem, operands, run)
        call = Append(
            self.zeros(batch, seqlen_q, self.num_kv_heads, self.head_dim),
            self.zeros(batch, seqlen_q, self.num_kv_heads, self.head_dim_v),
            k,
            v,
            before=lengths,
            page_table=given["page_table"],
            q=None if self.rotary is None else q,
            rotary=self.rotary,
            **scales,
        )
        of_call = {name: x for name, x in given.items() if name in WITH_APPEND}
        run = partial(append_and_decode, call, q, k, v, **of_call, num_splits=self.num_splits)
        return Call(appending(problem, call), operands, run)

    def prompt(self, batch: int, seqlen_q: int, seqlen_k: int, total: int) -> Call:
        """A call of attention_varlen with sequences of up to so many tokens, all of them empty;
        none of the `total` tokens that there is room for is in one."""
        q = self.zeros(total, self.num_heads, self.head_dim)
        own = {name: x for name, x in self.arguments.items() if name in VARLEN_DEFAULTS}
        given = VARLEN_DEFAULTS | {"causal": True} | own | self.beside()
        given |= {"cu_seqlens_q": self.index(batch + 1), "cu_seqlens_k": None}
        if self.page_size is None:
            k, v = (x[0] for x in self.caches(1, total))
            given |= {"cu_seqlens_k": self.index(batch + 1), **self.scales(total)}
        else:
            k, v = self.caches(1, self.page_size)
            given |= {"page_table": self.pages(batch, seqlen_k), "cache_seqlens": self.index(batch)}
            given |= self.scales(1, self.page_size)
        given |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
        problem, operands = describe_attention(q, k, v, needs_grad=False, **given)
        return Call(problem, operands, partial(attention_varlen, q, k, v, **given), total)

    def sequences(self, shape: Shape) -> Call:
        """A call of `attention`, or packed of `attention_varlen`, causal; where the shape is one of
        training, its backward too."""
        heads, kv_heads = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        values = self.num_kv_heads, self.head_dim_v
        lead_q: tuple[int, ...] = (shape.batch, shape.seqlen_q)
        lead_k: tuple[int, ...] = (shape.batch, shape.seqlen_k)
        packed: dict[str, Any] = dict.fromkeys(PACKED)
        if shape.packed:
            lead_q = lead_k = (shape.seqlen_q,)
            cu = self.index(shape.batch + 1)
            packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            packed |= {"max_seqlen_q": shape.seqlen_q, "max_seqlen_k": shape.seqlen_q}
        q, k = self.zeros(*lead_q, *heads), self.zeros(*lead_k, *kv_heads)
        v = self.zeros(*lead_k, *values)
        names = VARLEN_DEFAULTS if shape.packed else defaults_of("attention")
        own = {name: x for name, x in self.arguments.items() if name in names}
        given = names | {"causal": True} | own | self.beside()
        leaves = [x for x in (q, k, v, given["sink_logits"]) if x is not None]
        if shape.trains:
            for x in leaves:
                x.requires_grad_()
        function = attention_varlen if shape.packed else attention
        described: dict[str, Any] = dict.fromkeys(VARLEN_DEFAULTS) | given | packed
        described.pop("plan", None)
        problem, operands = describe_attention(q, k, v, needs_grad=shape.trains, **described)
        arguments = given | (packed if shape.packed else {})
        forward = partial(function, q, k, v, **arguments)
        run = partial(_forward_and_backward, forward, leaves) if shape.trains else forward
        return Call(problem, operands, run, shape.seqlen_q if shape.packed else None)

    def slots(self, tokens: int) -> Call:
        """A call of `append` by slots, as `PagedKVCache` makes it."""
        size = self.page_size or 1
        k, v = self.caches(1, size)
        call = Append(
            self.zeros(tokens, self.num_kv_heads, self.head_dim),
            self.zeros(tokens, self.num_kv_heads, self.head_dim_v),
            k,
            v,
            slots=self.zeros(tokens, dtype=self.slot_type),
            **self.scales(1, size),
        )
        return Call(None, None, partial(append_tokens, call))

    def call_of(self, shape: Shape) -> Call:
        """The call of a shape."""
        if shape.kind == "step":
            return self.step(shape.batch, shape.seqlen_q, shape.seqlen_k)
        if shape.kind == "prompt":
            return self.prompt(shape.batch, shape.seqlen_q, shape.seqlen_k, shape.seqlen_q)
        if shape.kind == "slots":
            return self.slots(shape.seqlen_q)
        return self.sequences(shape)


def _forward_and_backward(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> None:
    with torch.enable_grad():
        out = forward()
        torch.autograd.grad(out, leaves, torch.empty_like(out))


def standing_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones of this shape with strides that Triton takes for those of a contiguous tensor.

    The first two of four dimensions, or of a scale's three, are sequences or pages and their keys:
    their strides are the remainders of the real ones by 16, or 17 where that would be 1 and they
    are not. Nearly always these are 0, and all keys one; a key never takes more than 17 elements.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if len(shape) > 2:
        strides[:2] = map(alike, strides[:2])
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return torch.ones(1 + last, device=device).to(dtype).as_strided(shape, strides)


def alike(stride: int) -> int:
    """The smallest stride that is 1, or a multiple of 16, where this one is."""
    rest = stride % 16
    return rest + 16 if rest == 1 and stride != 1 else rest


def warmup(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_seqlen_k: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    stored: str = "as_is",
    granularity: str | None = None,
    batch_sizes: Sequence[int] = (1,),
    seqlens_q: Sequence[int] = (1,),
    max_seqlen_q: int | None = None,
    page_size: int | None = None,
    cache_seqlens: bool = True,
    append: bool = False,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    sink_logits: bool = False,
    alibi_slopes: bool = False,
    device: torch.device | str | int | None = None,
    **arguments: Any,
) -> list[Plan]:
    """Compile and load the kernels that a model will need, so that serving never compiles.

    max_seqlen_k   the longest cache; every shorter length that is decided by itself is planned too,
                   as the policy may choose other tiles for it
    batch_sizes    and seqlens_q: every combination is warmed up
    dtype          of q, and of a cache that is stored as it is
    stored         how the cache is: "as_is", "int8", "fp8" or "fp8_e5m2"
    granularity    of the scales of all but the first, as `quantize_kv` makes them: "tensor", "head"
                   or "token"; None: "token", or "head" with `append`
    max_seqlen_q   also prompts of up to so many tokens, for `attention_varlen`: packed, or with
                   `page_size` in pages. None: no prompts
    page_size      of a paged cache; None: contiguous
    append         the new keys and values come with the call, as many as q has tokens: the k and v
                   of `flash_attn_with_kvcache`
    rotary_cos     and rotary_sin, rotary_interleaved: with `append`, those that will be given
    cache_seqlens, sink_logits, alibi_slopes    whether those tensors will be given
    device         default: the GPU if there is one
    arguments      other arguments of `decode`, and of prompts where they have them: causal,
                   window_size, sink_tokens, softcap, products, return_lse, ...

    Tensors are taken to be contiguous, caches to have room for max_seqlen_k keys, and all to begin
    at multiples of 16 bytes. Not covered: `attention`, gradients, a q in 8 bits, scales of each
    sequence's heads where keys are appended, and cache_batch_idx, cache_leftpad, cu_seqlens_k_new
    and rotary_seqlens of `flash_attn_with_kvcache`. `PagedKVCache` appends by slots: without
    `append` this is for its `attend`, and `PagedKVCache.warmup` for its `append`.

    Returns the different plans. Needs no memory for a cache. Sizes are less than 2**30. Raises
    ValueError for malformed arguments, UnsupportedProblem where no kernel can.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch_device(device)
    expect(isinstance(dtype, torch.dtype), "dtype", "a torch.dtype", dtype)
    expect_one_of("dtype", str(dtype).removeprefix("torch."), DTYPE_BYTES)
    flags = {"cache_seqlens": cache_seqlens, "append": append, "sink_logits": sink_logits}
    flags |= {"alibi_slopes": alibi_slopes, "rotary_interleaved": rotary_interleaved}
    for name, flag in flags.items():
        expect_bool(name, flag)
    num_heads = _size("num_heads", num_heads)
    num_kv_heads = _size("num_kv_heads", num_kv_heads)
    head_dim = _size("head_dim", head_dim)
    head_dim_v = head_dim if head_dim_v is None else _size("head_dim_v", head_dim_v)
    max_seqlen_k = _size("max_seqlen_k", max_seqlen_k)
    max_seqlen_q = None if max_seqlen_q is None else _size("max_seqlen_q", max_seqlen_q)
    page_size = None if page_size is None else _size("page_size", page_size)
    batch_sizes, seqlens_q = _sizes("batch_sizes", batch_sizes), _sizes("seqlens_q", seqlens_q)
    num_splits = arguments.pop("num_splits", 0)
    for name, value in arguments.items():
        expect_one_of("argument of decode", name, DECODE_DEFAULTS)
        if name in MADE_HERE:
            expect_none_with(name, value, "warmup, which makes tensors itself")
    if append:
        expect(cache_seqlens, "cache_seqlens", "True with append", cache_seqlens)
        expect_none_with("out", arguments.get("out"), "append")
        early = arguments.get("early_kv", False)
        expect(early is False, "early_kv", "False with append", early)
    model = Model(
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim_v,
        dtype,
        _expect_codec(stored, granularity, append),
        page_size,
        max_seqlen_k,
        cache_seqlens,
        append,
        _expect_rotary(rotary_cos, rotary_sin, rotary_interleaved, append, head_dim, dtype, device),
        sink_logits,
        alibi_slopes,
        num_splits,
        device,
        arguments,
    )
    if max_seqlen_q is not None:
        expect_in_range("max_seqlen_q", max_seqlen_q, 1, max_seqlen_k)
    plans, done = dict[Any, Plan](), set()
    for call in _calls(model, batch_sizes, seqlens_q, max_seqlen_q):
        assert call.problem is not None and call.operands is not None
        splits = num_splits if call.problem.kind == "decode" else 0
        made = plan_for(call.problem, call.operands, None, splits)
        seqlen_q = made.problem.seqlen_q if made.problem.kind == "decode" else 0
        choice = replace(made.problem, seqlen_q=seqlen_q, seqlen_k=0), made.kernel, made.config
        plans.setdefault(choice, made)
        if compiles(model.device) and (choice, call.total) not in done:
            done.add((choice, call.total))
            call.run()
    return list(plans.values())


def _size(name: str, value: Any) -> int:
    """A size as Python's own integer."""
    expect_size(name, value)
    return int(value)


def _sizes(name: str, values: Any) -> tuple[int, ...]:
    several = isinstance(values, Sequence) and not isinstance(values, str)
    expect(several, name, "a sequence of integers", values)
    return tuple(_size(name, value) for value in values)


def compiles(device: torch.device) -> bool:
    """Whether what runs there is compiled before."""
    return bool(device.type != "cpu")


def _calls(
    model: Model, batch_sizes: Sequence[int], seqlens_q: Sequence[int], max_seqlen_q: int | None
) -> Iterator[Call]:
    for batch in batch_sizes:
        for seqlen_q in seqlens_q:
            for seqlen_k in decided_lengths(model.longest):
                if seqlen_k:
                    yield model.step(batch, seqlen_q, seqlen_k)
        for tokens in () if max_seqlen_q is None else decided_lengths(max_seqlen_q):
            if tokens:
                keys = tokens if model.page_size is None else model.longest
                for total in model.totals:
                    yield model.prompt(batch, tokens, keys, total)


def _expect_codec(stored: Any, granularity: Any, append: bool) -> Codec:
    expect_one_of("stored", stored, get_args(CodecName))
    if stored == AS_IS.name:
        expect_none_with("granularity", granularity, "a cache stored as_is")
        return AS_IS
    if granularity is None:
        granularity = "head" if append else "token"
    expect_one_of("granularity", granularity, GRANULARITIES)
    one = not append or granularity != "token"
    expect(one, "granularity", "'tensor' or 'head' with append", granularity)
    return Codec(stored, granularity)


def _expect_rotary(
    cos: Any, sin: Any, interleaved: bool, append: bool, head_dim: int, dtype: Any, device: Any
) -> Rotary | None:
    if not append:
        for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
            expect_none_with(name, x, "append=False")
    if cos is None:
        expect_none_with("rotary_sin", sin, "no rotary_cos")
        return None
    expect_given_with("rotary_sin", sin, "rotary_cos")
    rows, half = expect_shape("rotary_cos", cos, seqlen_ro=None, **{"rotary_dim / 2": None})
    expect_shape("rotary_sin", sin, seqlen_ro=rows, **{"rotary_dim / 2": half})
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        expect_dtype(name, x, str(dtype).removeprefix("torch."), "float32")
        expect_device(name, x, device)
    expect_in_range("rotary_cos.shape[1] (rotary_dim / 2)", half, 1, head_dim // 2)
    return Rotary(cos, sin, None, interleaved)
