"""A call, without its tensors: the value that policies decide on and caches key on.

`describe_*` are the only places that read and check shapes. They look at tensors through their
attributes alone, so this module needs neither torch nor triton and a `Problem` for any GPU can be
written by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from splitkv.core.errors import (
    MAX_SIZE,
    dtype_name,
    expect,
    expect_apart,
    expect_at_least,
    expect_bool,
    expect_device,
    expect_divides,
    expect_dtype,
    expect_given_with,
    expect_in_range,
    expect_int,
    expect_last_dim_contiguous,
    expect_none_with,
    expect_number,
    expect_positive,
    expect_shape,
    expect_size,
)
from splitkv.core.kv import AS_IS, Codec, Contiguous, Granularity, Paged, Place, Products, Ragged
from splitkv.core.masks import FAR, NUMBERS, Mask
from splitkv.core.options import inside_of
from splitkv.core.scales import DTYPE_BYTES, QUANTISED, describe_types
from splitkv.core.scores import PLAIN, Score
from splitkv.core.values import Value

Kind = Literal["decode", "dense", "varlen"]
OUT_DTYPE = "float8_e4m3fn"  # of an output with a scale
MAX_CUT_TOKENS = 256  # of packed sequences all of which may be cut into parts
FEW_ROWS = 16  # of those that are, beside longer ones
OF_DECODE = frozenset(inside_of("decode"))
OF_SEQUENCES = frozenset(inside_of("attention")) | frozenset(inside_of("attention_varlen"))
FLAGS = (
    *("sink_logits", "return_lse", "dropout", "deterministic", "needs_grad", "early_kv"),
    *("out_scale", "bidirectional_ranges", "sequence_sink_tokens"),
)


@dataclass(frozen=True, slots=True)
class Problem(Value):
    """One attention call: shapes, types and features. Frozen and hashable; holds no tensor.

    kind             decode: few queries against a cache; dense: [B, S, H, D]; varlen: [total, H, D]
    seqlen_q         queries a sequence (decode: exactly; varlen: at most)
    seqlen_k         keys a sequence (an upper bound where the lengths live on the device)
    seqlen_new       decode: new tokens of a sequence, of packed ones on average, that the call
                     writes into the cache before it attends to them; 0: all keys are there
    rotary           beside these, q and the new keys are rotated first
    early_kv         decode: keys and values of earlier tokens, their lengths and page table may be
                     read while the kernel before still runs
    lengths          host: every sequence has seqlen_k keys; device: read from a tensor by the
                     kernel
    dtype            the working type: of the output, and of q where q is not quantised
    products         beside a codec, what may be multiplied in 8 bits; a kernel may compute more
                     exactly than that, never less
    q_granularity    of the scales of a q that is quantised as the keys are; none: it is not
    out_scale        the output is divided by a scale and stored in e4m3
    bidirectional_ranges   varlen: queries see all of the ranges of keys that they stand in, which
                     are read on the device, whatever the mask says
    sequence_sink_tokens   each sequence has sink tokens of its own, whose number is read on the
                     device; the mask has the most of them
    """

    kind: Kind
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    dtype: str = "bfloat16"
    # factories, as torch.compile of torch 2.11 has no source for an object among the defaults
    mask: Mask = field(default_factory=Mask)
    place: Place = field(default_factory=Contiguous)
    codec: Codec = field(default_factory=Codec)
    products: Products = "widened"
    q_granularity: Granularity = "none"
    score: Score = field(default_factory=Score)
    sink_logits: bool = False
    lengths: Literal["host", "device"] = "host"
    return_lse: bool = False
    dropout: bool = False
    deterministic: bool = False
    needs_grad: bool = False
    early_kv: bool = False
    seqlen_new: int = 0
    rotary: bool = False
    out_scale: bool = False
    bidirectional_ranges: bool = False
    sequence_sink_tokens: bool = False

    def __post_init__(self) -> None:
        """Where a tensor has one head, a scale of the tensor is one of the head, and called so."""
        if self.codec.granularity == "tensor" and self.num_kv_heads == 1:
            object.__setattr__(self, "codec", Codec(self.codec.name, "head"))
        if self.q_granularity == "tensor" and self.num_heads == 1:
            object.__setattr__(self, "q_granularity", "head")

    @property
    def appends(self) -> bool:
        """Whether the call is more than attention: `append` and then decode."""
        return self.seqlen_new > 0 or self.rotary

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Packed query rows of one sequence and KV head: query tokens times grouped heads."""
        return self.seqlen_q * self.group

    @property
    def cut_tokens(self) -> int:
        """Tokens of the longest sequences whose keys may be cut into parts.

        Of packed sequences those of prompts are left whole, as their rows are many, so that a part
        takes memory for a few tokens of every sequence and not for all.
        """
        return self.cut_tokens_of(self.seqlen_q)

    def cut_tokens_of(self, seqlen_q: int) -> int:
        """Finds these tokens where so many queries are the most of a sequence."""
        if self.kind == "varlen" and seqlen_q > MAX_CUT_TOKENS:
            return max(1, FEW_ROWS // self.group)
        return seqlen_q

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def out_dtype(self) -> str:
        """The type of the output."""
        return OUT_DTYPE if self.out_scale else self.dtype

    @property
    def out_element_bytes(self) -> int:
        return 1 if self.out_scale else self.element_bytes

    @property
    def kv_element_bytes(self) -> int:
        return self.codec.element_bytes or self.element_bytes

    @property
    def widened(self) -> Problem:
        """The problem that is left when keys, values and queries have been made numbers of the
        working type, and pages one after the other."""
        place = self.place
        if isinstance(place, Paged):
            place = Ragged() if self.kind == "varlen" else Contiguous()
        of_types: dict[str, Any] = {"codec": AS_IS, "products": "widened", "q_granularity": "none"}
        return replace(self, place=place, **of_types)

    @property
    def span(self) -> tuple[tuple[int, int], ...]:
        """The intervals of keys that some query sees: the most that a sequence may have to read."""
        longest = self.seqlen_k
        if self.lengths == "device":
            longest = self.mask.longest(self.seqlen_q, self.seqlen_k)
        if self.bidirectional_ranges:  # may be of all keys
            return ((0, self.seqlen_k),) if min(self.seqlen_q, self.seqlen_k) > 0 else ()
        return self.mask.span(self.seqlen_q, longest)

    @property
    def visible_keys(self) -> int:
        """How many keys these are."""
        return sum(hi - lo for lo, hi in self.span)

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in a sequence of the greatest lengths."""
        return self.mask.num_pairs(self.seqlen_q, self.seqlen_k)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, V and scales of each key that have to be read, at the upper bounds."""
        return self.bytes_of_keys(self.visible_keys)

    def bytes_of_keys(self, keys: int) -> int:
        """Bytes of K, V and scales of so many keys of each sequence."""
        per_head = (self.head_dim + self.head_dim_v) * self.kv_element_bytes
        per_head += 8 if self.codec.granularity == "token" else 0
        return self.batch * keys * self.num_kv_heads * per_head

    def __str__(self) -> str:
        dims = str(self.head_dim)
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        bound = "<=" if self.lengths == "device" else ""
        parts = [
            f"{self.kind}: batch {self.batch}",
            f"heads {self.num_heads}/{self.num_kv_heads}",
            f"head_dim {dims}",
            f"seqlen_q {self.seqlen_q}",
            f"seqlen_k {bound}{self.seqlen_k}",
            self.dtype,
            f"kv {self.place}" + ("" if self.codec == AS_IS else f" {self.codec}"),
            f"mask {self.mask}",
        ]
        if self.codec != AS_IS:
            parts.append(f"products {self.products}")
        if self.q_granularity != "none":
            parts.append(f"q {self.codec.name} per {self.q_granularity}")
        if self.score != PLAIN:
            parts.append(str(self.score))
        if self.appends:
            new = f"{self.seqlen_new} new key" + "s" * (self.seqlen_new != 1)
            parts.append(new + ", rotary" * self.rotary)
        parts += [name.replace("_", " ") for name in FLAGS if getattr(self, name)]
        return ", ".join(parts)


@dataclass(eq=False, slots=True)
class Operands:
    """The tensors and scalars of one call, checked by `describe_*`."""

    q: Any
    k: Any
    v: Any
    out: Any = None
    cache_seqlens: Any = None
    page_table: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    bidirectional_ranges: Any = None
    sequence_sink_tokens: Any = None
    sink_logits: Any = None
    alibi_slopes: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    out_scale: Any = None
    softmax_scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    new: Any = None  # a call of `append` that the kernel does; cache_seqlens are those before it
    starts: Any = None  # of a schedule of the step, see kernels/schedule.py
    seqlen_k: int | None = None  # of the call, where the plan may be for more keys; None: its own
    seqlen_q: int | None = None  # and for more queries


class Options(NamedTuple):
    """The arguments of a call behind its queries, keys and values, but for those about the plan: of
    every function of `core/options.py`. Those with a default here are not in all of them."""

    causal: Any
    window_size: Any
    sink_tokens: Any
    attention_chunk: Any
    sink_logits: Any
    softmax_scale: Any
    softcap: Any
    alibi_slopes: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    products: Any
    return_lse: Any
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    page_table: Any = None
    cache_seqlens: Any = None
    out: Any = None
    out_scale: Any = None
    bidirectional_ranges: Any = None
    max_sink_tokens: Any = None
    sequence_sink_tokens: Any = None
    dropout_p: Any = 0.0
    deterministic: Any = False
    early_kv: Any = False


class _Sizes(NamedTuple):
    """The sizes of a call, as the fields of `Problem` of these names."""

    kind: Kind
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    place: Place


class _Cached(NamedTuple):
    """The sizes of keys and values: how they lie, how many of a sequence there is room for, KV
    heads, columns of v."""

    place: Place
    room: int
    num_kv_heads: int
    head_dim_v: int


def describe_decode(
    q: Any, k_cache: Any, v_cache: Any, *, needs_grad: bool, **options: Any
) -> tuple[Problem, Operands]:
    """Checks every argument of `decode` and names the problem.

    options   the arguments of `Options` that `decode` has
    """
    expect_known("describe_decode", options, OF_DECODE)
    given = Options(**options)
    sizes = _decode_sizes(q, k_cache, v_cache, given)
    return _described(q, k_cache, v_cache, sizes, given, needs_grad)


def describe_attention(
    q: Any, k: Any, v: Any, *, needs_grad: bool, **options: Any
) -> tuple[Problem, Operands]:
    """Checks every argument of `attention` (dense), or of `attention_varlen` with `cu_seqlens_q`.

    options   the arguments of `Options` that one of the two has
    """
    expect_known("describe_attention", options, OF_SEQUENCES)
    given = Options(**options)
    sizes = (_dense_sizes if given.cu_seqlens_q is None else _packed_sizes)(q, k, v, given)
    if dtype_name(k) not in QUANTISED:
        expect_dtype("q", q, *DTYPE_BYTES)
        expect_dtype("k", k, dtype_name(q))
    return _described(q, k, v, sizes, given, needs_grad)


def expect_known(function: str, options: Collection[str], names: Collection[str]) -> None:
    """Refuses options that no function has which `function` describes, as Python does."""
    for name in options:
        if name not in names:
            raise TypeError(f"{function}: got an unexpected argument {name!r}")


def _decode_sizes(q: Any, k_cache: Any, v_cache: Any, given: Options) -> _Sizes:
    """The sizes of a call of `decode`, its tensors of keys and lengths checked."""
    shape_q = expect_shape("q", q, batch=None, seqlen_q=None, num_heads=None, head_dim=None)
    batch = shape_q[0]
    if given.page_table is None:
        cached = _dense_keys(("k_cache", "v_cache"), q, k_cache, v_cache)
    else:
        cached = _paged_keys(("k_cache", "v_cache"), q, k_cache, v_cache, given.page_table, batch)
    seqlen_k = cached.room
    if given.max_seqlen_k is not None:
        expect_int("max_seqlen_k", given.max_seqlen_k)
        expect_in_range("max_seqlen_k", given.max_seqlen_k, 0, cached.room)
        seqlen_k = int(given.max_seqlen_k)
    if given.cache_seqlens is not None:
        expect_shape("cache_seqlens", given.cache_seqlens, batch=batch)
        _expect_index("cache_seqlens", given.cache_seqlens, q.device)
    return _sizes("decode", shape_q, cached, seqlen_k)


def _dense_sizes(q: Any, k: Any, v: Any, given: Options) -> _Sizes:
    """The sizes of a call of `attention`."""
    shape_q = expect_shape("q", q, batch=None, seqlen_q=None, num_heads=None, head_dim=None)
    cached = _dense_keys(("k", "v"), q, k, v)
    return _sizes("dense", shape_q, cached, cached.room)


def _packed_sizes(q: Any, k: Any, v: Any, given: Options) -> _Sizes:
    """The sizes of a call of `attention_varlen`, its offsets and lengths checked."""
    shape_q = expect_shape("q", q, total_q=None, num_heads=None, head_dim=None)
    cu_seqlens_q, page_table = given.cu_seqlens_q, given.page_table
    bounds = expect_shape("cu_seqlens_q", cu_seqlens_q, **{"batch + 1": None})[0]
    expect_positive("cu_seqlens_q.shape[0] (batch + 1)", bounds)
    _expect_index("cu_seqlens_q", cu_seqlens_q, q.device)
    batch = bounds - 1
    if page_table is None:
        expect_none_with("cache_seqlens", given.cache_seqlens, "cu_seqlens_k")
        shape_k = expect_shape("k", k, total_k=None, num_kv_heads=None, head_dim=shape_q[-1])
        of_values = {"total_k": shape_k[0], "num_kv_heads": shape_k[1], "head_dim_v": None}
        head_dim_v = expect_shape("v", v, **of_values)[2]
        expect_shape("cu_seqlens_k", given.cu_seqlens_k, **{"batch + 1": bounds})
        _expect_index("cu_seqlens_k", given.cu_seqlens_k, q.device)
        cached = _Cached(Ragged(), MAX_SIZE, shape_k[1], head_dim_v)
    else:
        expect_none_with("cu_seqlens_k", given.cu_seqlens_k, "a page_table")
        cached = _paged_keys(("k", "v"), q, k, v, page_table, batch)
        expect_given_with("cache_seqlens", given.cache_seqlens, "a page_table")
        expect_shape("cache_seqlens", given.cache_seqlens, batch=batch)
        _expect_index("cache_seqlens", given.cache_seqlens, q.device)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        expect_size(name, getattr(given, name), empty=True)
    if page_table is not None:
        expect_in_range("max_seqlen_k", given.max_seqlen_k, 0, cached.room)
    longest_q, longest_k = int(given.max_seqlen_q), int(given.max_seqlen_k)
    return _sizes("varlen", (batch, longest_q, *shape_q[1:]), cached, longest_k)


def _sizes(kind: Kind, shape_q: Sequence[int], cached: _Cached, seqlen_k: int) -> _Sizes:
    """The _Sizes of a call; shape_q: batch, seqlen_q, num_heads, head_dim."""
    return _Sizes(
        kind=kind,
        batch=shape_q[0],
        num_heads=shape_q[2],
        num_kv_heads=cached.num_kv_heads,
        head_dim=shape_q[3],
        head_dim_v=cached.head_dim_v,
        seqlen_q=shape_q[1],
        seqlen_k=seqlen_k,
        place=cached.place,
    )


def _described(
    q: Any, k: Any, v: Any, sizes: _Sizes, given: Options, needs_grad: bool
) -> tuple[Problem, Operands]:
    """The problem and the operands of a call whose shapes are checked; checks the rest."""
    decodes, device = sizes.kind == "decode", q.device
    names = ("k_cache", "v_cache") if decodes else ("k", "v")
    operands = q, k, v, given.q_scale, given.k_scale, given.v_scale
    types = describe_types(names, *operands, given.products, sizes.place, sizes.batch)
    expect_heads(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.head_dim_v)
    mask = _describe_mask(sizes, given, device)
    if not decodes:
        mask = mask.within(sizes.seqlen_q, sizes.seqlen_k)
    score, scale = _describe_scores(sizes, given, device)
    if given.bidirectional_ranges is not None:
        _expect_ranges(given.bidirectional_ranges, sizes.batch, device)
    _expect_sink_logits(given.sink_logits, sizes.num_heads, device)
    out_dtype = types.dtype
    if given.out_scale is not None:
        expect_out_scale(given.out_scale, device, needs_grad)
        out_dtype = OUT_DTYPE
    if given.out is not None:
        expect_out(given.out, (*q.shape[:-1], sizes.head_dim_v), out_dtype, device)
        if not decodes:
            expect_no_grad_with_out(needs_grad)
    expect_number("dropout_p", given.dropout_p)
    expect(0 <= given.dropout_p < 1, "dropout_p", "from 0 to less than 1", given.dropout_p)
    for name in ("deterministic", "return_lse", "early_kv"):
        expect_bool(name, getattr(given, name))
    on_host = sizes.kind == "dense" or (decodes and given.cache_seqlens is None)
    problem = Problem(
        **sizes._asdict(),
        dtype=types.dtype,
        mask=mask,
        codec=types.codec,
        products=types.products,
        q_granularity=types.q_granularity,
        score=score,
        sink_logits=given.sink_logits is not None,
        lengths="host" if on_host else "device",
        return_lse=given.return_lse,
        dropout=float(given.dropout_p) > 0,
        deterministic=given.deterministic,
        needs_grad=needs_grad,
        early_kv=given.early_kv,
        out_scale=given.out_scale is not None,
        bidirectional_ranges=given.bidirectional_ranges is not None,
        sequence_sink_tokens=given.sequence_sink_tokens is not None and mask.num_bands == 2,
    )
    return problem, Operands(
        q=q,
        k=k,
        v=v,
        out=given.out,
        cache_seqlens=given.cache_seqlens,
        page_table=given.page_table,
        cu_seqlens_q=given.cu_seqlens_q,
        cu_seqlens_k=given.cu_seqlens_k,
        bidirectional_ranges=given.bidirectional_ranges,
        sequence_sink_tokens=given.sequence_sink_tokens,
        sink_logits=given.sink_logits,
        alibi_slopes=given.alibi_slopes,
        q_scale=given.q_scale,
        k_scale=given.k_scale,
        v_scale=given.v_scale,
        out_scale=given.out_scale,
        softmax_scale=scale,
        softcap=float(given.softcap),
        dropout_p=float(given.dropout_p),
        seqlen_k=sizes.seqlen_k if sizes.kind == "decode" else None,
    )


def expect_out(out: Any, shape: tuple[int, ...], dtype: str, device: Any) -> None:
    """A tensor that the result fits into, packed or not."""
    tokens = ("batch", "seqlen_q") if len(shape) == 4 else ("total_q",)
    names = *tokens, "num_heads", "head_dim_v"
    expect_shape("out", out, **dict(zip(names, shape, strict=True)))
    expect_dtype("out", out, dtype)
    expect_device("out", out, device)
    expect_last_dim_contiguous("out", out)
    expect_apart("out", out)


def expect_out_scale(out_scale: Any, device: Any, needs_grad: bool) -> None:
    """The scale of an output in 8 bits, which has no gradient."""
    expect_dtype("out_scale", out_scale, "float32")
    expect_device("out_scale", out_scale, device)
    shape = list(out_scale.shape)
    expect(shape in ([], [1]), "out_scale", "one element, [1] or []", shape)
    hint = "call within torch.no_grad()"
    expect(not needs_grad, "out_scale", "None where a gradient is recorded", "a tensor", hint)


def expect_no_grad_with_out(needs_grad: bool) -> None:
    """Refuses `out` where a gradient is recorded: what is written into it is no part of a graph."""
    hint = "call within torch.no_grad()"
    expect(not needs_grad, "out", "None where a gradient is recorded", "a tensor", hint)


def _dense_keys(names: tuple[str, str], q: Any, k: Any, v: Any) -> _Cached:
    """The sizes of keys and values [batch, seqlen_k, num_kv_heads, ..]."""
    of_keys = {"batch": q.shape[0], "seqlen_k": None, "num_kv_heads": None}
    shape_k = expect_shape(names[0], k, **of_keys, head_dim=q.shape[-1])
    of_values = {"batch": q.shape[0], "seqlen_k": shape_k[1], "num_kv_heads": shape_k[2]}
    head_dim_v = expect_shape(names[1], v, **of_values, head_dim_v=None)[3]
    return _Cached(Contiguous(), shape_k[1], shape_k[2], head_dim_v)


def _paged_keys(
    names: tuple[str, str], q: Any, k: Any, v: Any, page_table: Any, batch: int
) -> _Cached:
    """The sizes of pages of keys and values [num_pages, page_size, num_kv_heads, ..]."""
    of_keys = {"num_pages": None, "page_size": None, "num_kv_heads": None}
    shape_k = expect_shape(names[0], k, **of_keys, head_dim=q.shape[-1])
    of_values = dict(zip(of_keys, shape_k[:3], strict=True))
    head_dim_v = expect_shape(names[1], v, **of_values, head_dim_v=None)[3]
    page_size = shape_k[1]
    expect_positive(f"{names[0]}.shape[1] (page_size)", page_size)
    max_pages = expect_shape("page_table", page_table, batch=batch, max_pages=None)[1]
    _expect_index("page_table", page_table, q.device)
    return _Cached(Paged(page_size), max_pages * page_size, shape_k[2], head_dim_v)


def _expect_index(name: str, tensor: Any, device: Any) -> None:
    expect_dtype(name, tensor, "int32")
    expect_device(name, tensor, device)
    expect_last_dim_contiguous(name, tensor)


def expect_heads(num_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int) -> None:
    expect_positive("head_dim", head_dim)
    expect_positive("head_dim_v", head_dim_v)
    expect_positive("num_kv_heads", num_kv_heads)
    expect_divides("num_heads", num_heads, num_kv_heads=num_kv_heads)
    expect_positive("num_heads", num_heads)


def _describe_mask(sizes: _Sizes, given: Options, device: Any) -> Mask:
    """The mask; of sequences with sink tokens of their own with the most that one may have."""
    numbers = {name: getattr(given, name) for name in NUMBERS}
    own, most = given.sequence_sink_tokens, given.max_sink_tokens
    if own is None:
        hint = "it bounds sink_tokens that are a tensor"
        expect(most is None, "max_sink_tokens", "None beside sink_tokens of one number", most, hint)
    else:
        expect_shape("sink_tokens", own, batch=sizes.batch)
        _expect_index("sink_tokens", own, device)
        if most is not None:
            expect_int("max_sink_tokens", most)
            expect_at_least("max_sink_tokens", most, 0)
        numbers["sink_tokens"] = FAR if most is None else most
    return Mask.of(given.causal, given.window_size, **numbers)


def _expect_ranges(ranges: Any, batch: int, device: Any) -> None:
    name = "bidirectional_ranges"
    expect_shape(name, ranges, batch=batch, ranges=None, **{"(first, end)": 2})
    expect_dtype(name, ranges, "int32")
    expect_device(name, ranges, device)
    if not ranges.is_contiguous():
        strides = list(ranges.stride())
        raise ValueError(
            f"{name}: expected contiguous memory, got strides {strides}; pass {name}.contiguous()"
        )


def _expect_sink_logits(sink_logits: Any, num_heads: int, device: Any) -> None:
    if sink_logits is not None:
        expect_shape("sink_logits", sink_logits, num_heads=num_heads)
        expect_dtype("sink_logits", sink_logits, *DTYPE_BYTES)
        expect_device("sink_logits", sink_logits, device)
        expect_last_dim_contiguous("sink_logits", sink_logits)


def _describe_scores(sizes: _Sizes, given: Options, device: Any) -> tuple[Score, float]:
    """The score modifiers, and the scale with its default."""
    softmax_scale, slopes = given.softmax_scale, given.alibi_slopes
    if softmax_scale is not None:
        expect_number("softmax_scale", softmax_scale)
        expect_positive("softmax_scale", softmax_scale)
    expect_number("softcap", given.softcap)
    expect_at_least("softcap", given.softcap, 0)
    if slopes is not None:
        if len(getattr(slopes, "shape", ())) == 2:
            expect_shape("alibi_slopes", slopes, batch=sizes.batch, num_heads=sizes.num_heads)
        else:
            expect_shape("alibi_slopes", slopes, num_heads=sizes.num_heads)
        expect_dtype("alibi_slopes", slopes, "float32", "float64")
        expect_device("alibi_slopes", slopes, device)
        expect_last_dim_contiguous("alibi_slopes", slopes)
    scale = sizes.head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    return Score(float(given.softcap) > 0, slopes is not None), scale
