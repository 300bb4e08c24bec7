"""What is given for a tensor, in every public function: arrays, lists, other types and devices.

Each is refused by the name of the argument; a few are taken, as they are all right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import splitkv
from splitkv import flash_attn
from splitkv.cache import PagedKVCache, SinkWindowCache
from splitkv.core.plan import Plan

B, S, H, D = 2, 3, 4, 8
Call = tuple[Callable[..., Any], dict[str, Any]]


def t(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape).to(of)


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


PAGES = {"k_cache": t(5, 4, 2, D), "v_cache": t(5, 4, 2, D), "cache_seqlens": index(3, 4)}
TABLE = torch.zeros(B, 3, dtype=torch.int32)
CACHE = {"q": t(B, 1, H, D), "k_cache": t(B, 16, 2, D), "v_cache": t(B, 16, 2, D)}
DENSE = {"q": t(B, S, H, D), "k": t(B, 6, 2, D), "v": t(B, 6, 2, D)}
BOUNDS = {"cu_seqlens_q": index(0, 3, 6), "cu_seqlens_k": index(0, 4, 10)}
BOUNDS |= {"max_seqlen_q": 3, "max_seqlen_k": 6}  # type: ignore[dict-item]
VARLEN = {"q": t(6, H, D), "k": t(10, 2, D), "v": t(10, 2, D), **BOUNDS}
OF_PAGES = VARLEN | {"k": t(5, 4, 2, D), "v": t(5, 4, 2, D)}
BESIDE = {"sink_logits": t(H), "alibi_slopes": t(H)}
INT8 = {name: t(B, 16, 2, D, of=torch.int8) for name in ("k_cache", "v_cache")}
FP8 = {name: t(B, S, n, D, of=torch.float8_e4m3fn) for name, n in (("q", H), ("k", 2), ("v", 2))}
DESCALES = {f"{x}_descale": t(B, 2) for x in "qkv"}
ROTARY = {"rotary_cos": t(16, 2), "rotary_sin": t(16, 2)}
NEW = {"k": t(B, 1, 2, D), "v": t(B, 1, 2, D), "cache_seqlens": index(3, 4)}
SINK = {"batch": B, "sink_tokens": 1, "window": 8, "num_kv_heads": 2, "head_dim": D}
PAGED = {"num_pages": 8, "page_size": 4, "max_batch": B, "max_seqlen": 16, "num_layers": 1}
PAGED |= {"num_kv_heads": 2, "head_dim": D}
STORED: dict[str, Any] = {"dtype": "int8", "granularity": "head", "smooth_k": True}
PLANNED: dict[str, Any] = dict.fromkeys(("batch_size", "num_heads_kv"), 2) | {"max_seqlen_q": 1}
PLANNED |= {"max_seqlen_k": 24, "num_heads_q": 8, "headdim": 32, "qkv_dtype": torch.float32}
WARMUP: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_seqlen_k": 8}
WARMUP |= {"append": True, "dtype": torch.float32, "rotary_cos": t(16, 4), "rotary_sin": t(16, 4)}


def sink_window(method: str, **how: Any) -> Callable[..., Any]:
    def call(*layer: int, **given: Any) -> Any:
        cache = SinkWindowCache(**SINK, **({"dtype": "fp32"} | how))  # type: ignore[arg-type]
        if method in ("append", "attend"):
            cache.extend(1)
        return getattr(cache, method)(*(() if method == "extend" else (0,)), **given)

    return call


def paged(method: str, **how: Any) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        cache = PagedKVCache(**PAGED, **({"dtype": "fp32"} | how))  # type: ignore[arg-type]
        if method in ("append", "attend"):
            cache.extend([cache.allocate() for _ in range(B)], 1)
        return getattr(cache, method)(0, **given)

    return call


SCALES = {"k_scale": t(2), "v_scale": t(2), "k_mean": t(2, D)}
TOKENS = {"k": t(B, 1, 2, D), "v": t(B, 1, 2, D)}
with_kvcache = flash_attn.flash_attn_with_kvcache
CALLS: dict[str, Call] = {
    "decode": (
        splitkv.decode,
        CACHE | BESIDE | {"cache_seqlens": index(3, 4), "out": t(B, 1, H, D)},
    ),
    "decode, pages": (splitkv.decode, {"q": t(B, 1, H, D), "page_table": TABLE, **PAGES}),
    "decode, int8": (splitkv.decode, CACHE | INT8 | {"k_scale": t(2), "v_scale": t(2)}),
    "decode, int8 q": (
        splitkv.decode,
        INT8
        | {"q": t(B, 1, H, D, of=torch.int8)}
        | {"q_scale": t(H), "k_scale": t(2), "v_scale": t(2)},
    ),
    "attention": (splitkv.attention, DENSE | BESIDE),
    "attention_varlen": (splitkv.attention_varlen, VARLEN | BESIDE),
    "attention_varlen, pages": (
        splitkv.attention_varlen,
        OF_PAGES | {"cu_seqlens_k": None, "page_table": TABLE, "cache_seqlens": index(3, 4)},
    ),
    "merge_states": (
        splitkv.merge_states,
        {"out_a": t(B, S, H, D), "lse_a": t(B, H, S), "out_b": t(B, S, H, D), "lse_b": t(B, H, S)},
    ),
    "quantize_kv": (splitkv.quantize_kv, TOKENS | {"k_mean": t(2, D)}),
    "warmup": (splitkv.warmup, WARMUP),
    "flash_attn_combine": (
        flash_attn.flash_attn_combine,
        {"out_partial": t(2, B, S, H, D), "lse_partial": t(2, B, S, H), "out": t(B, S, H, D)},
    ),
    "flash_attn_func": (
        flash_attn.flash_attn_func,
        DENSE | {"alibi_slopes": t(H), "s_aux": t(H)},
    ),
    "flash_attn_func, fp8": (flash_attn.flash_attn_func, FP8 | DESCALES),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        {"q": t(B, S, H, D), "kv": t(B, S, 2, 2, D)},
    ),
    "flash_attn_qkvpacked_func": (flash_attn.flash_attn_qkvpacked_func, {"qkv": t(B, S, 3, 2, D)}),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        VARLEN
        | {"seqused_q": index(1, 2), "seqused_k": index(1, 2)}
        | {"alibi_slopes": t(H), "learnable_sink": t(H)},
    ),
    "flash_attn_varlen_func, pages": (
        flash_attn.flash_attn_varlen_func,
        OF_PAGES | {"seqused_k": index(1, 2), "block_table": TABLE},
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        {"q": t(6, H, D), "kv": t(10, 2, 2, D), **BOUNDS},
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        {"qkv": t(6, 3, 2, D), "cu_seqlens": index(0, 3, 6), "max_seqlen": 3},
    ),
    "flash_attn_with_kvcache": (
        with_kvcache,
        CACHE
        | NEW
        | ROTARY
        | {"rotary_seqlens": index(1, 2), "cache_batch_idx": index(0, 1)}
        | {"alibi_slopes": t(H), "s_aux": t(H)},
    ),
    "flash_attn_with_kvcache, padded": (
        with_kvcache,
        CACHE | {"cache_seqlens": index(3, 4), "cache_leftpad": index(0, 1)},
    ),
    "flash_attn_with_kvcache, pages": (
        with_kvcache,
        {"q": t(B, 1, H, D), "block_table": TABLE, **PAGES},
    ),
    "flash_attn_with_kvcache, packed": (
        with_kvcache,
        CACHE
        | {"q": t(3, H, D), "cu_seqlens_q": index(0, 1, 3), "max_seqlen_q": 2}
        | {"k": t(3, 2, D), "v": t(3, 2, D), "cu_seqlens_k_new": index(0, 1, 3)}
        | {"cache_seqlens": index(3, 4)},
    ),
    "get_scheduler_metadata": (
        flash_attn.get_scheduler_metadata,
        PLANNED | {"cache_seqlens": index(3, 4), "cu_seqlens_q": index(0, 1, 2)},
    ),
    "SinkWindowCache.append": (sink_window("append"), TOKENS),
    "SinkWindowCache.attend": (sink_window("attend"), {"q": t(B, 1, H, D), "sink_logits": t(H)}),
    "SinkWindowCache.set_scales": (sink_window("set_scales", **STORED), SCALES),
    "SinkWindowCache.calibrate": (sink_window("calibrate", **STORED), TOKENS),
    "SinkWindowCache.extend": (sink_window("extend"), {"leftpad": index(0, 1)}),
    "PagedKVCache.append": (paged("append"), TOKENS),
    "PagedKVCache.attend": (paged("attend"), {"q": t(B, 1, H, D), **BESIDE}),
    "PagedKVCache.set_scales": (paged("set_scales", **STORED), SCALES),
    "PagedKVCache.calibrate": (paged("calibrate", **STORED), TOKENS),
}


def plain(x: Tensor) -> Tensor:
    """Of a type that every layout has."""
    return x if x.element_size() > 1 else x.float()


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "NumPy": lambda x: (x if x.element_size() > 1 else x.float()).numpy(),
    "list": lambda x: x.float().tolist(),
    "string": lambda x: "a",
    "number": lambda x: 1.5,
    "object": lambda x: object(),
    "no dimension": lambda x: x.new_zeros(()),
    "one more": lambda x: x[None],
    "nothing": lambda x: x.flatten()[:0],
    "another device": lambda x: x.to("meta"),
    "int64": lambda x: x.long(),
    "bool": lambda x: x.bool(),
    "complex": lambda x: x.float().to(torch.complex64),
    "sparse": lambda x: plain(x).to_sparse(),
    "compressed": lambda x: COMPRESSED,
    "another library's": lambda x: plain(x).float().to_mkldnn(),
}
with warnings.catch_warnings():  # that it is in beta
    warnings.simplefilter("ignore")
    COMPRESSED = torch.eye(2).to_sparse_csr()
STRIDELESS = ("sparse", "compressed", "another library's")
# A scale of one element may have no dimension; a tensor alone is of its own device.
RIGHT = {("no dimension", f"{x}_descale") for x in "qkv"}
RIGHT |= {("no dimension", "q_scale"), ("no dimension", "k_scale"), ("no dimension", "v_scale")}
RIGHT |= {("another device", "qkv")}
ROWS = [
    (name, argument, how)
    for name, (_, given) in CALLS.items()
    for argument, x in given.items()
    if isinstance(x, Tensor)
    for how in WRONG
    if (how, argument) not in RIGHT
]


@pytest.mark.parametrize("name", CALLS)
def test_the_rest_of_each_call_is_right(name: str) -> None:
    function, given = CALLS[name]
    function(**given)


@pytest.mark.parametrize(("name", "argument", "how"), ROWS, ids=lambda x: x)
def test_refused(name: str, argument: str, how: str) -> None:
    """In the grammar; also where a right call came before."""
    function, given = CALLS[name]
    function(**given)
    with pytest.raises((ValueError, splitkv.UnsupportedProblem)) as caught:
        function(**given | {argument: WRONG[how](given[argument])})
    said = str(caught.value)
    assert ": expected " in said
    if how in ("NumPy", "list"):
        assert said.startswith(f"{argument}: ") or f"  {argument}: " in said
        assert said.endswith(f"; pass torch.as_tensor({argument})") or argument == "cache_seqlens"
    if how in STRIDELESS:
        assert said.startswith(f"{argument}: expected a strided tensor, got layout ")


INDICES = [(name, argument) for name, argument, how in ROWS if how == "int64"]
INDICES = [(n, a) for n, a in INDICES if CALLS[n][1][a].dtype == torch.int32]


@pytest.mark.parametrize(("name", "argument"), INDICES, ids=lambda x: x)
def test_how_to_make_an_int32_of_it(name: str, argument: str) -> None:
    function, given = CALLS[name]
    for dtype in (torch.int64, torch.int16, torch.uint8):
        with pytest.raises(ValueError) as caught:
            function(**given | {argument: given[argument].to(dtype)})
        got = str(dtype).removeprefix("torch.")
        said = f"{argument}: expected dtype int32, got {got}; pass {argument}.int()"
        assert str(caught.value) == said
    with pytest.raises(ValueError, match=f"^{argument}: expected dtype int32, got float32$"):
        function(**given | {argument: given[argument].float()})


OUTS: dict[str, Callable[[], Tensor]] = {
    "one sequence": lambda: t(1, 1, H, D).expand(B, 1, H, D),
    "one head": lambda: t(B, 1, 1, D).expand(B, 1, H, D),
    "overlapping": lambda: t(999).as_strided((B, 1, H, D), (D, D, D, 1)),
}


@pytest.mark.parametrize("out", OUTS)
def test_out_whose_elements_share_memory(out: str) -> None:
    splitkv.decode(**CACHE, out=t(B, 1, H, D))
    with pytest.raises(ValueError, match=r"^out: expected elements that do not share memory, got"):
        splitkv.decode(**CACHE, out=OUTS[out]())


def test_out_with_gaps_and_in_another_order() -> None:
    wanted = splitkv.decode(**CACHE)
    for out in (t(B, 3, 2 * H, D + 8)[:, 1:2, ::2, :D], t(B, H, 1, D).transpose(1, 2)):
        assert splitkv.decode(**CACHE, out=out) is out
        torch.testing.assert_close(out, wanted)


def test_out_that_asks_for_a_gradient() -> None:
    said = r"^out: expected a tensor without a gradient, got .*; pass out.detach\(\), or call with"
    leaf = t(B, 1, H, D).requires_grad_()
    for out in (leaf, leaf * 1):
        splitkv.decode(**CACHE, out=t(B, 1, H, D))
        with torch.no_grad():
            splitkv.decode(**CACHE, out=out)
        with pytest.raises(ValueError, match=said):
            splitkv.decode(**CACHE, out=out)


def test_a_device_that_is_none() -> None:
    for wrong in (t(2), t(2).numpy(), "cpu", torch.device("cpu"), 0, ()):
        for function in (splitkv.plan, splitkv.explain):
            with pytest.raises(ValueError, match=r"^device: expected a splitkv.Device, got"):
                function(*CACHE.values(), device=wrong)
    assert isinstance(splitkv.plan(*CACHE.values()), Plan)


def test_states_of_other_types_merge() -> None:
    a, lse = t(B, S, H, D), t(B, H, S)
    out, merged = splitkv.merge_states(a.bfloat16(), lse.double(), a, lse)
    assert out.dtype == torch.bfloat16 and merged.dtype == torch.float64


@pytest.mark.parametrize("name", ["decode", "attention", "attention_varlen", "with_kvcache"])
def test_tangents_of_forward_mode(name: str) -> None:
    """Nothing in the kernels carries them on; a call like it without one is served before."""
    function, given = {
        "decode": (splitkv.decode, CACHE),
        "attention": (splitkv.attention, DENSE),
        "attention_varlen": (splitkv.attention_varlen, VARLEN),
        "with_kvcache": (with_kvcache, CACHE),
    }[name]
    for _ in range(3):
        function(**given)  # type: ignore[operator]
    with forward_ad.dual_level():
        function(**given)  # type: ignore[operator]
        dual = forward_ad.make_dual(given["q"], given["q"])  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="tensors: expected none with a tangent"):
            function(**given | {"q": dual})  # type: ignore[operator]
    function(**given)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    """Of calls that no earlier one was like: torch's own check of tensors ends the process where it
    compares one of these with another."""
    x = torch.nested.nested_tensor([t(3, 2, D)])
    said = "expected a strided tensor, got layout nested$"
    with pytest.raises(ValueError, match=f"^q: {said}"):
        splitkv.attention(x, x, x, softcap=0.3125)
    with pytest.raises(ValueError, match=f"^q: {said}"):
        splitkv.decode(x, x, x, softcap=0.3125)
    with pytest.raises(ValueError, match=f"^k_cache: {said}"):
        splitkv.decode(t(B, 1, 2, D), x, x, softcap=0.3125)
    with pytest.raises(ValueError, match=f"^q: {said}"):
        flash_attn.flash_attn_func(x, x, x)
    with pytest.raises(ValueError, match=f"^out_a: {said}"):
        splitkv.merge_states(x, x, x, x)
