"""vLLM's caches of keys and values: the types that are served, and where in memory they lie.

A cache is [blocks, heads, keys, 2 * head_dim] in any strides but the last, keys beside values. With
a scale a token and head it is laid out within a block as all keys, all values, the scales of the
keys, those of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitkv.core.kv import AS_IS, Codec
from splitkv.core.scales import QUANTISED
from splitkv.integrations.serving import Pages

SCALED = {
    **dict.fromkeys(("fp8", "fp8_e4m3"), torch.float8_e4m3fn),
    "fp8_e5m2": torch.float8_e5m2,
}
SCALED_BY_TOKEN = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
AS_THEY_ARE = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SCALE_BYTES = 4


def codec_of(kv_cache_dtype: str) -> Codec:
    """How keys and values are stored, and what has a scale of its own."""
    stored = (SCALED | SCALED_BY_TOKEN).get(kv_cache_dtype)
    if stored is None:
        return AS_IS
    name = QUANTISED[str(stored).removeprefix("torch.")]
    return Codec(name, "token" if kv_cache_dtype in SCALED_BY_TOKEN else "tensor")


def strided(x: Tensor) -> Tensor:
    """x with the strides of memory in dimensions of one, as a single KV head: torch leaves these as
    they come, and TMA reads only multiples of 16 bytes."""
    steps = list(x.stride())
    for i in reversed(range(x.dim() - 1)):
        if x.shape[i] == 1:
            steps[i] = steps[i + 1] * x.shape[i + 1]
    return x.as_strided(x.shape, steps)


def planes(kv_cache: Tensor, stored: torch.dtype) -> Pages:
    """The pages of a cache with a scale a token and head.

    kv_cache   [blocks, heads, keys, 2 * (head_dim + 4)] of one byte each, of which only the place
               of each block is taken: within it lie all keys, all values, the fp32 scales of the
               keys and those of the values, each [keys, heads, ..]
    """
    (blocks, heads), (keys, width) = kv_cache.shape[:2], kv_cache.shape[2:]
    dim = width // 2 - SCALE_BYTES
    step, first = kv_cache.stride(0), kv_cache.storage_offset()
    if kv_cache.element_size() != 1 or step % SCALE_BYTES or first % SCALE_BYTES:
        raise NotImplementedError(
            "kv_cache: expected bytes, and blocks at multiples of 4 of them, got "
            f"{kv_cache.dtype} and blocks of {step} from {first} on"
        )
    within = zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True)
    if sum((n - 1) * stride for n, stride in within) >= heads * keys * width:
        raise NotImplementedError(
            "kv_cache: expected a block of a layer in one piece, got strides "
            f"{list(kv_cache.stride())} of {list(kv_cache.shape)}"
        )
    raw, of_keys = kv_cache.view(torch.uint8), keys * heads * dim
    rows, steps = (blocks, keys, heads, dim), (step, heads * dim, dim, 1)
    k = raw.as_strided(rows, steps, first).view(stored)
    v = raw.as_strided(rows, steps, first + of_keys).view(stored)
    words = torch.empty(0, dtype=torch.float32, device=kv_cache.device)
    words = words.set_(kv_cache.untyped_storage())
    shape, steps_of_scales = (blocks, keys, heads), (step // SCALE_BYTES, heads, 1)
    at = (first + 2 * of_keys) // SCALE_BYTES
    k_scale = words.as_strided(shape, steps_of_scales, at)
    v_scale = words.as_strided(shape, steps_of_scales, at + keys * heads)
    return Pages(k, v, k_scale, v_scale)
