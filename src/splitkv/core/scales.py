"""Quantised operands: which scales fit them, and what may be multiplied in 8 bits.

Looks at tensors through their attributes alone, as core/problem.py does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

from splitkv.core.errors import (
    dtype_name,
    expect,
    expect_device,
    expect_dtype,
    expect_given_with,
    expect_last_dim_contiguous,
    expect_none_with,
    expect_one_of,
    expect_tensor,
)
from splitkv.core.kv import (
    AS_IS,
    CODECS,
    Codec,
    CodecName,
    Granularity,
    Paged,
    Place,
    Products,
    Ragged,
)

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
QUANTISED: dict[str, CodecName] = {stored.dtype: name for name, stored in CODECS.items()}
DEFAULT_PRODUCTS: dict[CodecName, Products] = {name: x.products for name, x in CODECS.items()}


class Types(NamedTuple):
    """The working type, how keys and values are stored, and the fields of Problem beside it."""

    dtype: str
    codec: Codec  # without a default: torch.compile of torch 2.11 has no source for an object there
    products: Products = "widened"
    q_granularity: Granularity = "none"


def describe_types(
    names: tuple[str, str],
    q: Any,
    k: Any,
    v: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    products: Any,
    place: Place,
    batch: int,
) -> Types:
    """Check the types of q, of keys and values, called `names`, and of their scales."""
    working, stored = dtype_name(q), dtype_name(k)
    expect_device(names[0], k, q.device)
    expect_device(names[1], v, q.device)
    expect_dtype(names[1], v, stored)
    for name, tensor in (("q", q), (names[0], k), (names[1], v)):
        expect_last_dim_contiguous(name, tensor)
    keys = f"a {stored} cache" if names[0] == "k_cache" else f"{stored} keys"
    scales = ("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)
    if stored not in QUANTISED:
        expect_dtype("q", q, *DTYPE_BYTES)
        expect_dtype(names[0], k, working)
        for name, value in (*scales, ("products", products)):
            expect_none_with(name, value, keys)
        return Types(working, AS_IS)
    codec, q_granularity = QUANTISED[stored], AS_IS.granularity
    if working in QUANTISED:
        expect_dtype("q", q, stored)
        expect_given_with("q_scale", q_scale, f"a {working} q")
        rows = ("total_q",) if q.dim() == 3 else ("batch", "seqlen_q")
        q_granularity = expect_scale("q_scale", q_scale, q, (*rows, "num_heads"), batch)
        working = "bfloat16"
    else:
        expect_dtype("q", q, *DTYPE_BYTES, *QUANTISED)
        expect_none_with("q_scale", q_scale, f"a {working} q")
    dims: tuple[str, ...] = ("batch", "seqlen_k")
    if isinstance(place, Paged | Ragged):
        dims = ("num_pages", "page_size") if isinstance(place, Paged) else ("total_k",)
    granularities = []
    for name, scale, tensor in (("k_scale", k_scale, k), ("v_scale", v_scale, v)):
        expect_given_with(name, scale, keys)
        granularities.append(expect_scale(name, scale, tensor, (*dims, "num_kv_heads"), batch))
    expect(
        granularities[0] == granularities[1],
        "v_scale",
        f"the granularity of k_scale ({granularities[0]})",
        granularities[1],
    )
    if products is None:
        products = DEFAULT_PRODUCTS[codec]
    expect_one_of("products", products, get_args(Products))
    return Types(working, Codec(codec, granularities[0]), products, q_granularity)


def expect_scale(
    name: str, scale: Any, tensor: Any, dims: tuple[str, ...], batch: int
) -> Granularity:
    """A scale for `tensor` [.., heads, dim]: one, one a head, or one a token and head.

    dims   names of the sizes of `tensor` but the last. Where there are three, heads may have a
           scale in each of the `batch` sequences: packed tokens leave no way to tell it from one a
           token
    """
    expect_tensor(name, scale)
    expect_dtype(name, scale, "float32")
    expect_device(name, scale, tensor.device)
    shape, sizes = tuple(scale.shape), tuple(tensor.shape)[:-1]
    if math.prod(shape) == 1 and len(shape) <= 1:
        return "tensor"
    if shape == sizes:
        return "token"
    of_sequences = len(dims) == 3
    if shape == sizes[-1:] or (of_sequences and shape == (batch, sizes[-1])):
        return "head"
    named = [f"{dim}={size}" for dim, size in zip(dims, sizes, strict=True)]
    options = ["one element", f"[{named[-1]}]", f"[{', '.join(named)}]"]
    if of_sequences:
        options.insert(2, f"[batch={batch}, {named[-1]}]")
    raise ValueError(
        f"{name}: expected {', '.join(options[:-1])} or {options[-1]}, got {list(shape)}"
    )
