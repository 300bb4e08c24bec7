"""Rings of the ring-flash-attn package around this package's attention.

    from splitkv.integrations import ring_flash_attn
    ring_flash_attn.register()

    from ring_flash_attn import zigzag_ring_flash_attn_func      # as it was, and no flash_attn

That package calls four private functions of flash_attn 2.8, which give the partial result of a
block of keys, and a block's gradients from the result of all. Here they are, in that call shape;
`register` puts them where it keeps flash_attn's. Another ring that calls flash_attn's can have them
from here.

What it is that a ring asks of them is for its authors to say: ring-flash-attn hands a window to
every block as it is, and is right with one only in its `llama3_` functions. Sinks it has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from splitkv.api import attention, attention_varlen
from splitkv.core.errors import expect
from splitkv.runtime.backward import AttentionGradients, attention_backward

INTERFACE = "flash_attn.flash_attn_interface"
Forward = tuple[Tensor, Tensor, None, None]


def register() -> None:
    """Make ring_flash_attn run on this package; flash_attn need not be installed.

    Raises ModuleNotFoundError where ring_flash_attn is not installed.
    """
    with _interface():
        import_module("ring_flash_attn")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "ring_flash_attn":
            for private, function in FUNCTIONS.items():
                if hasattr(module, private):
                    setattr(module, private, function)


@contextmanager
def _interface() -> Iterator[None]:
    """While ring_flash_attn is imported: flash_attn's module, or one that has these functions."""
    if find_spec("flash_attn") is not None:
        yield
        return
    package, interface = ModuleType("flash_attn"), ModuleType(INTERFACE)
    vars(interface).update(FUNCTIONS)
    sys.modules |= {"flash_attn": package, INTERFACE: interface}
    try:
        yield
    finally:
        del sys.modules["flash_attn"], sys.modules[INTERFACE]


def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> Forward:
    """(out, softmax_lse, None, None) of dense q [batch, seqlen_q, num_heads, head_dim] over a block
    of keys.

    softmax_lse [batch, num_heads, seqlen_q] fp32, natural, -inf for a row without keys, so that it
    merges; the other two are of dropout. Raises ValueError for dropout.
    """
    out, lse = attention(q, k, v, **_options(locals()), return_lse=True)
    return out, lse, None, None


def flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: None = None,
    leftpad_k: None = None,
    seqused_k: None = None,
    zero_tensors: bool = False,
) -> Forward:
    """(out, softmax_lse, None, None) of packed q [total_q, num_heads, head_dim] over a block of
    keys.

    softmax_lse [num_heads, total_q]; the rest as `flash_attn_forward`. zero_tensors changes nothing
    here, as every element is written. Raises ValueError for a block table, padding or used lengths.
    """
    given = locals()
    for name in ("block_table", "leftpad_k", "seqused_k"):
        expect(given[name] is None, name, "None", given[name])
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attention_varlen(q, k, v, *lengths, **_options(given), return_lse=True)
    return out, lse, None, None


def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: None = None,
) -> None:
    """Write the gradients of a block of keys into dq, dk and dv, from out and softmax_lse over all
    keys; see `splitkv.distributed.attention_backward`. What flash_attn returns besides, for who
    debugs it, is not made.
    """
    given = locals()
    options = _options(given) | {"deterministic": deterministic}
    found = attention_backward(dout, q, k, v, out, softmax_lse, **options)
    _write(found, given)


def flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: None = None,
    zero_tensors: bool = False,
) -> None:
    """Write the gradients of a block of packed keys; the rest as `flash_attn_backward`."""
    given = locals()
    options = _options(given) | {"deterministic": deterministic}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        options[name] = given[name]
    found = attention_backward(dout, q, k, v, out, softmax_lse, **options)
    _write(found, given)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `attention` that say what the scores are."""
    dropped = given["dropout_p"]
    expect(not dropped, "dropout_p", "0: other ranks would drop other weights", dropped)
    expect(not given.get("return_softmax"), "return_softmax", "False without dropout", True)
    state = given.get("rng_state")
    expect(state is None, "rng_state", "None without dropout", state)
    names = "softmax_scale", "causal", "softcap", "alibi_slopes"
    window = given["window_size_left"], given["window_size_right"]
    return {name: given[name] for name in names} | {"window_size": window}


def _write(found: AttentionGradients, given: dict[str, Any]) -> None:
    """The gradients where they are asked for."""
    for name in ("q", "k", "v"):
        given[f"d{name}"].copy_(getattr(found, name))


FUNCTIONS: dict[str, Any] = {
    "_flash_attn_forward": flash_attn_forward,
    "_flash_attn_varlen_forward": flash_attn_varlen_forward,
    "_flash_attn_backward": flash_attn_backward,
    "_flash_attn_varlen_backward": flash_attn_varlen_backward,
}
"""By flash_attn's names."""
