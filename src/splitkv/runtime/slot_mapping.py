"""append: keys and values of new tokens written where an engine says, as one launch on a GPU."""

from __future__ import annotations

from torch import Tensor

from splitkv.core.errors import (
    dtype_name,
    expect,
    expect_apart,
    expect_device,
    expect_dtype,
    expect_given_with,
    expect_last_dim_contiguous,
    expect_none_with,
    expect_shape,
    expect_tensor,
)
from splitkv.core.problem import expect_heads
from splitkv.core.scales import QUANTISED
from splitkv.kernels.host.append_call import Append
from splitkv.runtime.append import append as run

APPENDED = ("bfloat16", "float16", "float32")
"""Types of new tokens, and of the caches that hold them as they come."""


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes the keys and values of new tokens into pages, each token into a slot of its own.

    k, v           [tokens, num_kv_heads, head_dim (v: head_dim_v)], bf16, fp16 or fp32
    k_cache        [num_pages, page_size, num_kv_heads, head_dim] of the type of k, or int8,
                   float8_e4m3fn or float8_e5m2 with scales; v_cache likewise. Any strides but the
                   last: of a cache laid out as [num_pages, num_kv_heads, page_size, ..] pass
                   `.transpose(1, 2)`, of keys and values side by side the two slices
    slot_mapping   [slots] int64 or int32 on the device, at most as many as tokens: token n goes to
                   page slot_mapping[n] // page_size, key slot_mapping[n] % page_size. Negative, or
                   past the cache: the token is not written, nor are those past the last slot
    k_scale        fp32 scales of a cache in 8 bits, by which tokens are divided: one, or
                   [num_kv_heads]; or [num_pages, page_size, num_kv_heads], which is written with
                   each token: its largest number over the largest stored value. v_scale likewise,
                   of the same kind

    Two tokens of one slot: which is kept is not said. Nothing synchronises with the host, and a
    call can be captured in a CUDA graph. Records no gradient. Raises ValueError for malformed
    arguments.

    Equivalent PyTorch, without scales::

        keep = slot_mapping >= 0
        pages, keys = slot_mapping[keep] // page_size, slot_mapping[keep] % page_size
        k_cache[pages, keys], v_cache[pages, keys] = k[keep], v[keep]
    """
    for name, x in (("k", k), ("v", v), ("slot_mapping", slot_mapping)):
        expect_tensor(name, x)
    n = slot_mapping.shape[0] if slot_mapping.dim() else 0
    if k.dim() and k.shape[0] > n:
        k = k[:n]
    if v.dim() and v.shape[0] > n:
        v = v[:n]
    call = Append(k, v, k_cache, v_cache, slots=slot_mapping, k_scale=k_scale, v_scale=v_scale)
    run(call, expect_slots)


def expect_slots(call: Append) -> None:
    """A call of `append`, as its docstring has it."""
    x, device = call, call.k.device
    tokens, num_kv_heads, head_dim = expect_shape(
        "k", x.k, tokens=None, num_kv_heads=None, head_dim=None
    )
    head_dim_v = expect_shape("v", x.v, tokens=tokens, num_kv_heads=num_kv_heads, head_dim_v=None)[
        2
    ]
    expect_heads(num_kv_heads, num_kv_heads, head_dim, head_dim_v)
    expect_shape("slot_mapping", x.slots, slots=tokens)
    expect_dtype("slot_mapping", x.slots, "int64", "int32")
    expect_device("slot_mapping", x.slots, device)
    expect_last_dim_contiguous("slot_mapping", x.slots)
    expect_dtype("k", x.k, *APPENDED)
    expect_dtype("v", x.v, dtype_name(x.k))
    expect_device("v", x.v, device)
    pages: dict[str, int | None] = {"num_pages": None, "page_size": None}
    for name, cache, dim in (("k_cache", x.k_cache, head_dim), ("v_cache", x.v_cache, head_dim_v)):
        num_pages, page_size, *_ = expect_shape(
            name, cache, **pages, num_kv_heads=num_kv_heads, head_dim=dim
        )
        pages = {"num_pages": num_pages, "page_size": page_size}
        expect_dtype(name, cache, dtype_name(x.k), *QUANTISED)
        expect_device(name, cache, device)
        expect_last_dim_contiguous(name, cache)
        expect_apart(name, cache)
    stored = dtype_name(x.k_cache)
    expect_dtype("v_cache", x.v_cache, stored)
    of_token = {**pages, "num_kv_heads": num_kv_heads}
    for name, scale in (("k_scale", x.k_scale), ("v_scale", x.v_scale)):
        if stored not in QUANTISED:
            expect_none_with(name, scale, f"a cache of {stored}")
            continue
        expect_given_with(name, scale, f"a cache of {stored}")
        expect_dtype(name, scale, "float32")
        expect_device(name, scale, device)
        assert scale is not None
        if scale.dim() == 3:
            expect_shape(name, scale, **of_token)
            expect_apart(name, scale)
        else:
            ok = scale.dim() < 2 and scale.numel() in (1, num_kv_heads)
            kinds = f"[], [1], [num_kv_heads={num_kv_heads}] or {_shape(of_token)}"
            expect(ok, name, kinds, list(scale.shape))
    if x.k_scale is not None and x.v_scale is not None:
        alike = (x.k_scale.dim() == 3) == (x.v_scale.dim() == 3)
        expect(alike, "v_scale", "one a token as k_scale, or neither", list(x.v_scale.shape))


def _shape(sizes: dict[str, int | None]) -> str:
    return "[" + ", ".join(f"{name}={n}" for name, n in sizes.items()) + "]"
