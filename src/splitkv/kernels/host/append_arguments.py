"""A call of `append` as decode kernels take it that write the new tokens themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from splitkv.kernels.tile.new import Growth, New, Turn
from splitkv.kernels.tile.visit import Strides
from splitkv.rounding import is_of_tokens

if TYPE_CHECKING:
    from splitkv.core.problem import Operands


def fixed_arguments(operands: Operands) -> dict[str, Any]:
    """The arguments of new tokens that never change from call to call: sizes and strides."""
    call, rotary = operands.new, operands.new.rotary
    return {
        "seqlen_new": call.k.shape[1] if call.cu_seqlens_new is None else 0,
        "capacity": call.capacity,
        "slabs": operands.k.shape[0],
        "rotary_rows": rotary.cos.shape[0] if rotary else 0,
        "q_step": rotary.q_step if rotary else 0,
        "new_k_strides": Strides(*token_strides(call.k, call.cu_seqlens_new)),
        "new_v_strides": Strides(*token_strides(call.v, call.cu_seqlens_new)),
        "new_scale_strides": Strides(*new_scale_strides(call.k_scale, call.k_cache)),
        "stride_cos": rotary.cos.stride(0) if rotary else 0,
        "stride_sin": rotary.sin.stride(0) if rotary else 0,
    }


NO_NEW_TOKENS = dict.fromkeys(
    (
        *("growth", "new", "turn", "seqlen_new", "capacity", "slabs", "rotary_rows", "q_step"),
        *("new_k_strides", "new_v_strides", "new_scale_strides", "stride_cos", "stride_sin"),
    )
)
"""The arguments of a kernel that could append, where nothing is appended."""


class TokenTiles(NamedTuple):
    """Compile-time values of new tokens.

    rotary_dim   columns that are rotated, 0: none; pair: columns between the two of a pair
    tile_t       tokens that are written at once: one a warp, or four where there are more
    """

    rotary_dim: int = 0
    pair: int = 1
    tile_t: int = 0


def token_tiles(operands: Operands) -> TokenTiles:
    """The TokenTiles of a call that appends."""
    call, rotary = operands.new, operands.new.rotary
    rotary_dim = 2 * rotary.cos.shape[1] if rotary else 0
    pair = 1 if rotary is None or rotary.interleaved else rotary_dim // 2
    return TokenTiles(rotary_dim, pair, 4 if call.tokens_a_sequence <= 4 else 16)


def pointers(call: Any, k: Any, v: Any) -> dict[str, Any]:
    """The arguments of a call that appends which change: growth, new and turn, k and v being the
    caches as the kernel reads them."""
    caches = codes(k, call.k_cache), codes(v, call.v_cache)
    cos, sin, start = (None, None, None) if call.rotary is None else call.rotary[:3]
    return {
        "growth": Growth(call.cu_seqlens_new, call.leftpad),
        "new": New(call.k, call.v, *caches, call.k_scale, call.v_scale),
        "turn": Turn(cos, sin, start),
    }


def unfit(operands: Operands) -> list[str]:
    """The reasons why decode kernels cannot do a call of `append`: they have no arguments for
    it."""
    call, reasons = operands.new, []
    if call.slots is not None:
        reasons.append("slots: expected none")
    if call.k_mean is not None:
        reasons.append("k_mean: expected none")
    if call.k_scale is not None:
        steps = [new_scale_strides(x, call.k_cache) for x in (call.k_scale, call.v_scale)]
        if is_of_tokens(call.k_scale, call.k_cache):
            reasons.append("k_scale: expected none a token")
        elif steps[0] != steps[1]:
            reasons.append(f"v_scale: expected the strides of k_scale {steps[0]}, got {steps[1]}")
    return reasons


def codes(x: Any, cache: Any) -> Any:
    """x in the type of the cache that it is, e4m3 as bytes: the bits are made in the kernel."""
    import torch

    dtype = torch.uint8 if cache.dtype == torch.float8_e4m3fn else cache.dtype
    return x if x.dtype == dtype else x.view(dtype)


def token_strides(x: Any, cu_seqlens: Any) -> tuple[int, int, int]:
    """Elements between sequences, tokens and heads; tokens of packed sequences are counted through.

    Packed tokens without cu_seqlens are a sequence each.
    """
    if x.dim() == 4:
        sequence, token, head = x.stride()[:3]
        return sequence, token, head
    token, head = x.stride()[:2]
    return (token, 0, head) if cu_seqlens is None else (0, token, head)


def new_scale_strides(scale: Any, cache: Any) -> tuple[int, int | None, int]:
    """Elements between slabs, or sequences, tokens and heads; tokens None: one for all."""
    if scale is None:
        return 0, None, 0
    if is_of_tokens(scale, cache):
        slab, token, head = scale.stride()
        return slab, token, head
    steps = [0 if n == 1 else step for n, step in zip(scale.shape, scale.stride(), strict=True)]
    return (steps[0] if scale.dim() == 2 else 0), None, (steps[-1] if steps else 0)
