"""Facts of a call that all ranks know without looking at a tensor: who holds which positions, what
is visible, and how it is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from splitkv.core.errors import (
    dtype_name,
    expect,
    expect_at_least,
    expect_bool,
    expect_device,
    expect_divides,
    expect_dtype,
    expect_int,
    expect_last_dim_contiguous,
    expect_one_of,
    expect_shape,
    expect_size,
    expect_tensor,
)
from splitkv.core.masks import Mask, expect_window
from splitkv.core.problem import expect_heads
from splitkv.core.scales import DTYPE_BYTES
from splitkv.distributed.groups import Facts, ranks_of
from splitkv.distributed.layout import Layout, every_piece, expect_layout

Exchange = Literal["heads", "keys", "ring"]
EXCHANGES = get_args(Exchange)


class SequenceOptions(TypedDict, total=False):
    """Arguments of `attention` and `attention_varlen` that say what the scores are, as those of
    `splitkv.attention`."""

    causal: bool
    window_size: tuple[int, int]
    sink_tokens: int
    attention_chunk: int
    sink_logits: Tensor | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float
    deterministic: bool
    return_lse: bool


DEFAULTS: dict[str, Any] = {
    "causal": False,
    "window_size": (-1, -1),
    "sink_tokens": 0,
    "attention_chunk": 0,
    "sink_logits": None,
    "softmax_scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "dropout_p": 0.0,
    "deterministic": False,
    "return_lse": False,
}


@dataclass(frozen=True)
class Spread:
    """A sequence, or packed sequences, over the ranks of a group.

    rank, size   this rank, and how many there are
    tokens       on each rank; `total` on all
    max_seqlen   tokens of the longest sequence at most
    mask         within the longest sequence
    alibi        whether scores depend on distances
    packed       whether sequences are packed; else every rank has its part of each of a batch
    """

    exchange: Exchange
    layout: Layout
    rank: int
    size: int
    tokens: int
    max_seqlen: int
    mask: Mask
    alibi: bool
    packed: bool

    @property
    def total(self) -> int:
        return self.size * self.tokens

    @property
    def pieces(self) -> tuple[tuple[range, ...], ...]:
        """Positions of the tokens of each rank, as they lie in its tensors."""
        return every_piece(self.size, self.tokens, self.layout)

    @property
    def in_rounds(self) -> bool:
        """Whether a ring goes round: where a window bounds what a rank sees, it does not."""
        mask = self.mask
        unbounded = mask.left is None and not mask.chunk and mask.right in (0, None)
        return self.exchange == "ring" and unbounded


class Call(NamedTuple):
    """The tensors of a call on this rank.

    q, k, v      [tokens, heads, dim], or [batch, tokens, heads, dim]
    cu_seqlens   [batch + 1] int32 of all tokens of all ranks; None: not packed
    options      every argument of `splitkv.attention`
    packed       whether the call is of `attention_varlen`
    """

    group: dist.ProcessGroup
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    options: dict[str, Any]
    packed: bool


def facts_of(call: Call, max_seqlen: Any, exchange: Any, layout: Any) -> Facts:
    """The facts that have to be the same on every rank."""
    facts: Facts = {"exchange": exchange, "layout": layout, "max_seqlen": max_seqlen}
    tensors: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v}
    if call.packed:
        tensors["cu_seqlens"] = call.cu_seqlens
    for name, x in {**tensors, **call.options}.items():
        facts[name] = _seen(x) if isinstance(x, Tensor) else x
    return facts


def _seen(x: Tensor) -> str:
    recorded = torch.is_grad_enabled() and x.requires_grad
    wants = " with a gradient" if recorded else ""
    return f"{list(x.shape)} {dtype_name(x)} on {x.device.type}{wants}"


def checked(call: Call, max_seqlen: Any, exchange: Any, layout: Any) -> Spread:
    """The Spread of a call; ValueError for what is malformed."""
    rank, size = ranks_of(call.group)
    packed = call.packed
    expect_one_of("exchange", exchange, EXCHANGES)
    if layout is None:
        layout = "zigzag" if exchange == "ring" else "contiguous"
    expect_layout(layout)
    tokens, num_heads, num_kv_heads = _expect_tensors(call, packed)
    if packed:
        expect_size("max_seqlen", max_seqlen, empty=True)
    if layout == "zigzag":
        even = "an even number of tokens a rank with layout='zigzag'"
        expect(tokens % 2 == 0, "q", even, tokens)
    if exchange == "heads":
        expect_divides("num_heads", num_heads, ranks=size)
    options = call.options
    hint = "every rank would drop other weights than one process does"
    dropout = options["dropout_p"]
    expect(dropout == 0, "dropout_p", "0 over the ranks of a group", dropout, hint)
    longest = int(max_seqlen) if packed else size * tokens
    mask = _mask_of(options).within(longest, longest)
    alibi = options["alibi_slopes"] is not None
    spread = Spread(exchange, layout, rank, size, tokens, longest, mask, alibi, packed)
    if alibi and spread.in_rounds:
        slopes = options["alibi_slopes"]
        trained, each = slopes.requires_grad, packed and slopes.dim() == 2
        hint = "pass exchange='heads' or exchange='keys'"
        expect(not trained, "alibi_slopes", "no gradient of them in a ring", "one", hint)
        expect(not each, "alibi_slopes", "[num_heads] in a ring of packed sequences", slopes, hint)
        # The LSE of a pair of pieces comes with a constant that fp32 rounds as it rounds distances.
        halves = call.q.element_size() <= 2
        expect(halves, "q", "16 bits with alibi_slopes in a ring", dtype_name(call.q), hint)
    return spread


def _expect_tensors(call: Call, packed: bool) -> tuple[int, int, int]:
    """(tokens of a rank, query heads, KV heads)."""
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        local = not isinstance(x, DTensor)
        expect(local, name, "this rank's part", "a DTensor", f"pass {name}.to_local()")
    outer: dict[str, int | None] = {} if packed else {"batch": None}
    q_dims = {**outer, "tokens": None, "num_heads": None, "head_dim": None}
    shape = expect_shape("q", call.q, **q_dims)
    outer = dict(zip(outer, shape, strict=False))
    tokens, num_heads, head_dim = shape[-3:]
    of_k = expect_shape("k", call.k, **outer, tokens=tokens, num_kv_heads=None, head_dim=head_dim)
    num_kv_heads = of_k[-2]
    sizes = {**outer, "tokens": tokens, "num_kv_heads": num_kv_heads}
    head_dim_v = expect_shape("v", call.v, **sizes, head_dim_v=None)[-1]
    expect_heads(num_heads, num_kv_heads, head_dim, head_dim_v)
    expect_dtype("q", call.q, *DTYPE_BYTES)
    for name, x in (("k", call.k), ("v", call.v)):
        expect_dtype(name, x, dtype_name(call.q))
        expect_device(name, x, call.q.device)
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        expect_last_dim_contiguous(name, x)
    if packed:
        expect_shape("cu_seqlens", call.cu_seqlens, **{"batch + 1": None})
        expect_dtype("cu_seqlens", call.cu_seqlens, "int32")
        expect_device("cu_seqlens", call.cu_seqlens, call.q.device)
    for name in ("sink_logits", "alibi_slopes"):
        x = call.options[name]
        if x is not None:
            expect_tensor(name, x)
            expect(x.dim() > 0 and x.shape[-1] == num_heads, name, f"[num_heads={num_heads}]", x)
    return tokens, num_heads, num_kv_heads


def _mask_of(options: dict[str, Any]) -> Mask:
    expect_bool("causal", options["causal"])
    window = options["window_size"]
    expect_window(window)
    sides = {"window_size left": window[0], "window_size right": window[1]}
    for name, keys in sides.items():
        expect_int(name, keys)
        expect_at_least(name, keys, -1)
    for name in ("sink_tokens", "attention_chunk"):
        expect_int(name, options[name])
        expect_at_least(name, options[name], 0)
    numbers = map(int, (*window, options["sink_tokens"], options["attention_chunk"]))
    return Mask(options["causal"], *numbers).within_reach()


def of_heads(options: dict[str, Any], parts: tuple[int, ...], *index: int) -> dict[str, Any]:
    """The options, with sink logits and slopes of some of the heads: those at `index` of the heads
    as an array of `parts`."""
    found = dict(options)
    for name in ("sink_logits", "alibi_slopes"):
        x = options[name]
        if x is not None:
            where = (..., *index, slice(None))
            found[name] = x.unflatten(-1, (*parts, -1))[where].contiguous()
    return found


def tokens_first(x: Tensor) -> Tensor:
    """[tokens, (batch,) heads, dim] of [(batch,) tokens, heads, dim]."""
    return x.movedim(-3, 0)


def tokens_last(x: Tensor) -> Tensor:
    """[(batch,) tokens, heads, dim] of [tokens, (batch,) heads, dim]."""
    return x.movedim(0, -3)
