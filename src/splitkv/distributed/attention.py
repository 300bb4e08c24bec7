"""attention and attention_varlen of sequences whose tokens several ranks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from splitkv.core.errors import expect_bool, expect_one_of
from splitkv.distributed.collectives import SumOfGradients
from splitkv.distributed.groups import agree, group_of
from splitkv.distributed.heads import attend_heads
from splitkv.distributed.keys import attend_keys
from splitkv.distributed.layout import Layout
from splitkv.distributed.ring import attend_ring
from splitkv.distributed.spread import DEFAULTS, Call, Exchange, SequenceOptions, checked, facts_of
from splitkv.distributed.window import attend_window, reaches_one_rank
from splitkv.runtime.autocast import as_autocast, without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

ParameterGradients = Literal["summed", "own"]
_SHARED = "sink_logits", "alibi_slopes"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    exchange: Exchange = "heads",
    layout: Layout | None = None,
    parameter_gradients: ParameterGradients = "summed",
    **options: Unpack[SequenceOptions],
) -> Any:
    """`splitkv.attention` of a batch of sequences, of each of which every rank holds some tokens.

    q     [batch, tokens, num_heads, head_dim], of as many tokens on every rank; fp16, bf16, fp32,
          fp64
    k, v  [batch, tokens, num_kv_heads, head_dim (v: head_dim_v)], of the same tokens and dtype

    Everything else as `attention_varlen`. Returns out [batch, tokens, num_heads, head_dim_v], and
    with `return_lse` the LSE [batch, num_heads, tokens] fp32, of this rank's tokens. Raises as
    that.

    Equivalent PyTorch: `splitkv.attention` of the tokens of all ranks in their order, of whose
    result each rank has the rows of its own tokens.
    """
    given = _given("attention", options)
    call = Call(group_of(group, device_mesh), *as_autocast(q, k, v), None, given, packed=False)
    return _run(call, None, (exchange, layout), parameter_gradients)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    group: ProcessGroup | None = ...,
    device_mesh: DeviceMesh | None = ...,
    exchange: Exchange = ...,
    layout: Layout | None = ...,
    parameter_gradients: ParameterGradients = ...,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    group: ProcessGroup | None = ...,
    device_mesh: DeviceMesh | None = ...,
    exchange: Exchange = ...,
    layout: Layout | None = ...,
    parameter_gradients: ParameterGradients = ...,
    **options: Unpack[SequenceOptions],
) -> Any: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    group: ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    exchange: Exchange = "heads",
    layout: Layout | None = None,
    parameter_gradients: ParameterGradients = "summed",
    **options: Unpack[SequenceOptions],
) -> Any:
    """`splitkv.attention_varlen` of packed sequences whose tokens the ranks of a group hold.

    q            [tokens, num_heads, head_dim], of as many tokens on every rank; fp16, bf16, fp32,
                 fp64. Sequences may begin and end anywhere, also within a rank's tokens
    k, v         [tokens, num_kv_heads, head_dim (v: head_dim_v)], of the same tokens and dtype
    cu_seqlens   [batch + 1] int32 on the device, of the tokens of all ranks in their order, the
                 same on every rank; never read by the host. Tokens after the last sequence, as of
                 padding, see nothing and give 0
    max_seqlen   upper bound of the lengths of sequences
    group        whose ranks hold the tokens; or `device_mesh`, a DeviceMesh of one dimension
    exchange     "heads" (Ulysses): each rank gets its share of the heads of all tokens; num_heads
                 is a multiple of the ranks, and KV heads are repeated where they do not divide.
                 "keys": each rank gets the keys that its tokens see. "ring": the keys of one rank
                 after the other, in two buffers; with a window or chunks, which bound what is seen,
                 as "keys"
    layout       which tokens a rank holds: "contiguous", or "zigzag" (see `shard`); None: "zigzag"
                 for a ring, else "contiguous"
    parameter_gradients  of sink logits and ALiBi slopes, which every rank has whole: "summed" over
                 the ranks, or "own", what this rank's tokens or heads make of them, for who sums or
                 averages the gradients of all parameters anyway (DDP, FSDP over this group, too)
    options      causal, window_size, sink_tokens, attention_chunk, sink_logits, softmax_scale,
                 softcap, alibi_slopes, deterministic and return_lse as those of
                 `splitkv.attention`. `dropout_p` has to be 0; a ring without a window
                 takes ALiBi slopes [num_heads] beside q of 16 bits and finds no gradient
                 of them

    Masks and distances are those of the whole sequences. Differentiable; every rank has to call
    backward too. Transfers run beside the computation. The first call of a kind compares what the
    ranks are about to do, and waits for that; no other does. torch.compile leaves the call out of
    its graph.

    Returns out [tokens, num_heads, head_dim_v], and with `return_lse` the natural LSE without the
    sinks [num_heads, tokens] fp32, of this rank's tokens.

    Raises ValueError, the same on every rank, for malformed arguments and where ranks differ in the
    shapes and options of the first call of a kind; UnsupportedProblem where no kernel can.

    Equivalent PyTorch: `splitkv.attention_varlen` of the tokens of all ranks in their order, of
    whose result each rank has the rows of its own tokens.
    """
    given = _given("attention_varlen", options)
    call = Call(group_of(group, device_mesh), *as_autocast(q, k, v), cu_seqlens, given, packed=True)
    return _run(call, max_seqlen, (exchange, layout), parameter_gradients)


def _given(function: str, options: Any) -> dict[str, Any]:
    for name in options:
        expect_one_of(f"argument of {function}", name, tuple(DEFAULTS))
    return {**DEFAULTS, **options}


@torch.compiler.disable  # what ranks agree on, and wait for, is no part of a graph
def _run(call: Call, max_seqlen: Any, way: tuple[Any, Any], parameter_gradients: Any) -> Any:
    """The call, by an exchange and a layout."""
    facts = facts_of(call, max_seqlen, *way) | {"parameter_gradients": parameter_gradients}

    def check() -> Any:
        ways = ("summed", "own")
        expect_one_of("parameter_gradients", parameter_gradients, ways)
        expect_bool("return_lse", call.options["return_lse"])
        return checked(call, max_seqlen, *way)

    spread = agree(call.group, facts, check, call.q)
    if parameter_gradients == "summed":
        call = call._replace(options=_summed(call))
    if spread.exchange == "heads":
        attend: Any = attend_heads
    elif reaches_one_rank(spread):
        attend = attend_window
    else:
        attend = attend_ring if spread.in_rounds else attend_keys
    with without_autocast(call.q):
        out, lse = attend(call, spread)
    return (out, lse) if call.options["return_lse"] else out


def _summed(call: Call) -> dict[str, Any]:
    """The options, with parameters whose gradients are summed over the ranks."""
    options = dict(call.options)
    for name in _SHARED:
        if options[name] is not None:
            options[name] = SumOfGradients.apply(options[name], call.group)
    return options
