"""A call, without its tensors: the value that policies decide on and caches key on.

`describe_*` are the only places that read and check shapes. They look at tensors through their
attributes alone, so this module needs neither torch nor triton and a `Problem` for any GPU can be
written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from splitkv.core.errors import (
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
from splitkv.core.masks import Mask
from splitkv.core.scales import DTYPE_BYTES, QUANTISED, describe_types
from splitkv.core.scores import PLAIN, Score
from splitkv.core.values import Value

Kind = Literal["decode", "dense", "varlen"]
MAX_CUT_TOKENS = 256  # of packed sequences all of which may be cut into parts
FEW_ROWS = 16  # of those that are, beside longer ones
FLAGS = ("sink_logits", "return_lse", "dropout", "deterministic", "needs_grad", "early_kv")


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
    mask: Mask = Mask()
    place: Place = Contiguous()
    codec: Codec = AS_IS
    products: Products = "widened"
    q_granularity: Granularity = "none"
    score: Score = PLAIN
    sink_logits: bool = False
    lengths: Literal["host", "device"] = "host"
    return_lse: bool = False
    dropout: bool = False
    deterministic: bool = False
    needs_grad: bool = False
    early_kv: bool = False
    seqlen_new: int = 0
    rotary: bool = False

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
        if self.kind == "varlen" and self.seqlen_q > MAX_CUT_TOKENS:
            return max(1, FEW_ROWS // self.group)
        return self.seqlen_q

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_element_bytes(self) -> int:
        return self.codec.element_bytes or self.element_bytes

    @property
    def widened(self) -> Problem:
        """What is left of the problem when keys, values and queries have been made numbers of the
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
        per_head = (self.head_dim + self.head_dim_v) * self.kv_element_bytes
        per_head += 8 if self.codec.granularity == "token" else 0
        return self.batch * self.visible_keys * self.num_kv_heads * per_head

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
    sink_logits: Any = None
    alibi_slopes: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    softmax_scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    new: Any = None  # a call of `append` that the kernel does; cache_seqlens are those before it
    starts: Any = None  # of a schedule of the step, see kernels/schedule.py
    seqlen_k: int | None = None  # of the call, where the plan may be for more keys; None: its own


def describe_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    page_table: Any,
    max_seqlen_k: int | None,
    sink_logits: Any,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    products: Any,
    out: Any,
    return_lse: bool,
    early_kv: bool,
    needs_grad: bool,
    **of_mask: Any,
) -> tuple[Problem, Operands]:
    """Check every argument of `decode` and name the problem.

    of_mask   the arguments of `Mask.of`
    """
    batch, seqlen_q, num_heads, head_dim = expect_shape(
        "q", q, batch=None, seqlen_q=None, num_heads=None, head_dim=None
    )
    place: Place = Contiguous()
    if page_table is None:
        _, capacity, num_kv_heads, _ = expect_shape(
            "k_cache", k_cache, batch=batch, seqlen_k=None, num_kv_heads=None, head_dim=head_dim
        )
        head_dim_v = expect_shape(
            "v_cache",
            v_cache,
            batch=batch,
            seqlen_k=capacity,
            num_kv_heads=num_kv_heads,
            head_dim_v=None,
        )[3]
    else:
        place, capacity, num_kv_heads, head_dim_v = _describe_pages(
            ("k_cache", "v_cache"), q, k_cache, v_cache, page_table, batch
        )
    seqlen_k = capacity
    if max_seqlen_k is not None:
        expect_int("max_seqlen_k", max_seqlen_k)
        expect_in_range("max_seqlen_k", max_seqlen_k, 0, capacity)
        seqlen_k = int(max_seqlen_k)
    if cache_seqlens is not None:
        expect_shape("cache_seqlens", cache_seqlens, batch=batch)
        _expect_index("cache_seqlens", cache_seqlens, q.device)
    of_cache = q, k_cache, v_cache, q_scale, k_scale, v_scale
    types = describe_types(("k_cache", "v_cache"), *of_cache, products, place, batch)
    expect_heads(num_heads, num_kv_heads, head_dim, head_dim_v)
    mask = Mask.of(**of_mask)
    score, scale = _describe_scores(
        num_heads, batch, head_dim, softmax_scale, softcap, alibi_slopes, q.device
    )
    _expect_sink_logits(sink_logits, num_heads, q.device)
    if out is not None:
        expect_out(out, (batch, seqlen_q, num_heads, head_dim_v), types.dtype, q.device)
    expect_bool("return_lse", return_lse)
    expect_bool("early_kv", early_kv)
    problem = Problem(
        kind="decode",
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dtype=types.dtype,
        mask=mask,
        place=place,
        codec=types.codec,
        products=types.products,
        q_granularity=types.q_granularity,
        score=score,
        sink_logits=sink_logits is not None,
        lengths="host" if cache_seqlens is None else "device",
        return_lse=return_lse,
        early_kv=early_kv,
        needs_grad=needs_grad,
    )
    return problem, Operands(
        q=q,
        k=k_cache,
        v=v_cache,
        out=out,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        sink_logits=sink_logits,
        alibi_slopes=alibi_slopes,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        softmax_scale=scale,
        softcap=float(softcap),
        seqlen_k=seqlen_k,
    )


def describe_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    cache_seqlens: Any = None,
    sink_logits: Any,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    products: Any,
    dropout_p: float,
    deterministic: bool,
    out: Any = None,
    return_lse: bool,
    needs_grad: bool,
    **of_mask: Any,
) -> tuple[Problem, Operands]:
    """Check every argument of `attention` (dense), or of `attention_varlen` with `cu_seqlens_q`.

    of_mask   the arguments of `Mask.of`
    """
    place: Place = Contiguous()
    if cu_seqlens_q is None:
        kind: Kind = "dense"
        batch, seqlen_q, num_heads, head_dim = expect_shape(
            "q", q, batch=None, seqlen_q=None, num_heads=None, head_dim=None
        )
        _, seqlen_k, num_kv_heads, _ = expect_shape(
            "k", k, batch=batch, seqlen_k=None, num_kv_heads=None, head_dim=head_dim
        )
        head_dim_v = expect_shape(
            "v", v, batch=batch, seqlen_k=seqlen_k, num_kv_heads=num_kv_heads, head_dim_v=None
        )[3]
    else:
        kind = "varlen"
        _, num_heads, head_dim = expect_shape("q", q, total_q=None, num_heads=None, head_dim=None)
        bounds = expect_shape("cu_seqlens_q", cu_seqlens_q, **{"batch + 1": None})[0]
        expect_positive("cu_seqlens_q.shape[0] (batch + 1)", bounds)
        _expect_index("cu_seqlens_q", cu_seqlens_q, q.device)
        batch = bounds - 1
        if page_table is None:
            expect_none_with("cache_seqlens", cache_seqlens, "cu_seqlens_k")
            total_k, num_kv_heads, _ = expect_shape(
                "k", k, total_k=None, num_kv_heads=None, head_dim=head_dim
            )
            head_dim_v = expect_shape(
                "v", v, total_k=total_k, num_kv_heads=num_kv_heads, head_dim_v=None
            )[2]
            expect_shape("cu_seqlens_k", cu_seqlens_k, **{"batch + 1": bounds})
            _expect_index("cu_seqlens_k", cu_seqlens_k, q.device)
            place, capacity = Ragged(), None
        else:
            expect_none_with("cu_seqlens_k", cu_seqlens_k, "a page_table")
            place, capacity, num_kv_heads, head_dim_v = _describe_pages(
                ("k", "v"), q, k, v, page_table, batch
            )
            expect_given_with("cache_seqlens", cache_seqlens, "a page_table")
            expect_shape("cache_seqlens", cache_seqlens, batch=batch)
            _expect_index("cache_seqlens", cache_seqlens, q.device)
        for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            expect_size(name, length, empty=True)
        assert max_seqlen_q is not None and max_seqlen_k is not None
        if capacity is not None:
            expect_in_range("max_seqlen_k", max_seqlen_k, 0, capacity)
        seqlen_q, seqlen_k = int(max_seqlen_q), int(max_seqlen_k)
    if dtype_name(k) not in QUANTISED:
        expect_dtype("q", q, *DTYPE_BYTES)
        expect_dtype("k", k, dtype_name(q))
    operands = q, k, v, q_scale, k_scale, v_scale
    types = describe_types(("k", "v"), *operands, products, place, batch)
    expect_heads(num_heads, num_kv_heads, head_dim, head_dim_v)
    mask = Mask.of(**of_mask)
    mask = mask.within(seqlen_q, seqlen_k)
    score, scale = _describe_scores(
        num_heads, batch, head_dim, softmax_scale, softcap, alibi_slopes, q.device
    )
    _expect_sink_logits(sink_logits, num_heads, q.device)
    if out is not None:
        expect_out(out, (*q.shape[:-1], head_dim_v), types.dtype, q.device)
        expect_no_grad_with_out(needs_grad)
    expect_number("dropout_p", dropout_p)
    expect(0 <= dropout_p < 1, "dropout_p", "from 0 to less than 1", dropout_p)
    expect_bool("deterministic", deterministic)
    expect_bool("return_lse", return_lse)
    problem = Problem(
        kind=kind,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dtype=types.dtype,
        mask=mask,
        place=place,
        codec=types.codec,
        products=types.products,
        q_granularity=types.q_granularity,
        score=score,
        sink_logits=sink_logits is not None,
        lengths="device" if kind == "varlen" else "host",
        return_lse=return_lse,
        dropout=float(dropout_p) > 0,
        deterministic=deterministic,
        needs_grad=needs_grad,
    )
    return problem, Operands(
        q=q,
        k=k,
        v=v,
        out=out,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sink_logits=sink_logits,
        alibi_slopes=alibi_slopes,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        softmax_scale=scale,
        softcap=float(softcap),
        dropout_p=float(dropout_p),
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


def expect_no_grad_with_out(needs_grad: bool) -> None:
    """What is written into `out` is no part of a graph."""
    hint = "call within torch.no_grad()"
    expect(not needs_grad, "out", "None where a gradient is recorded", "a tensor", hint)


def _describe_pages(
    names: tuple[str, str], q: Any, k: Any, v: Any, page_table: Any, batch: int
) -> tuple[Paged, int, int, int]:
    """(place, most keys a sequence, KV heads, head_dim_v) of pages of keys and values."""
    num_pages, page_size, num_kv_heads, _ = expect_shape(
        names[0], k, num_pages=None, page_size=None, num_kv_heads=None, head_dim=q.shape[-1]
    )
    head_dim_v = expect_shape(
        names[1],
        v,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim_v=None,
    )[3]
    expect_positive(f"{names[0]}.shape[1] (page_size)", page_size)
    max_pages = expect_shape("page_table", page_table, batch=batch, max_pages=None)[1]
    _expect_index("page_table", page_table, q.device)
    return Paged(page_size), max_pages * page_size, num_kv_heads, head_dim_v


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


def _expect_sink_logits(sink_logits: Any, num_heads: int, device: Any) -> None:
    if sink_logits is not None:
        expect_shape("sink_logits", sink_logits, num_heads=num_heads)
        expect_dtype("sink_logits", sink_logits, *DTYPE_BYTES)
        expect_device("sink_logits", sink_logits, device)
        expect_last_dim_contiguous("sink_logits", sink_logits)


def _describe_scores(
    num_heads: int,
    batch: int,
    head_dim: int,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Any,
    device: Any,
) -> tuple[Score, float]:
    """The score modifiers, and the scale with its default."""
    if softmax_scale is not None:
        expect_number("softmax_scale", softmax_scale)
        expect_positive("softmax_scale", softmax_scale)
    expect_number("softcap", softcap)
    expect_at_least("softcap", softcap, 0)
    if alibi_slopes is not None:
        if len(getattr(alibi_slopes, "shape", ())) == 2:
            expect_shape("alibi_slopes", alibi_slopes, batch=batch, num_heads=num_heads)
        else:
            expect_shape("alibi_slopes", alibi_slopes, num_heads=num_heads)
        expect_dtype("alibi_slopes", alibi_slopes, "float32", "float64")
        expect_device("alibi_slopes", alibi_slopes, device)
        expect_last_dim_contiguous("alibi_slopes", alibi_slopes)
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    return Score(float(softcap) > 0, alibi_slopes is not None), scale
