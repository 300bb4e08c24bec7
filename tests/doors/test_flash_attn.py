"""FlashAttention's functions without a cache: results, gradients and what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv import UnsupportedProblem, flash_attn, reference
from splitkv.core.kv import Contiguous, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.testing import Call, check, expected, make_operands

AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "pack": (0, 2, 3),  # tensors in one
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": ((32, 32), (48, 16), (27, 27), (30, 13)),
    "heads": ((4, 4), (4, 2), (6, 1)),
    "seqlens": ((7, 20), (20, 20), (9, 4)),
    "mask": (Mask(), Mask(True), Mask(True, 5), Mask(False, 3, 2), Mask(True, chunk=6)),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "return_lse": (False, True),
    "strided": (False, True),
}
SCALES = ("q_scale", "k_scale", "v_scale", "products")  # of quantised tensors: it takes none
FLASH2 = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
]
FLASH2.append("return_attn_probs")
DESCALES = ["q_descale", "k_descale", "v_descale"]
FLASH3 = ["softmax_scale", "causal", *DESCALES, "window_size", "attention_chunk", "softcap"]
FLASH3 += ["deterministic", "sm_margin", "return_attn_probs"]
OF_FLASH3 = [*FLASH3, "qv", "num_splits", "pack_gqa"]
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
OF_CACHE = [
    "q",
    "k_cache",
    "v_cache",
    "k",
    "v",
    "rotary_cos",
    "rotary_sin",
    "cache_seqlens",
    "cache_batch_idx",
]
OF_CACHE.append("cache_leftpad")

# (positional arguments of FlashAttention 2.8 in order, further names of FlashAttention-3)
PEERS: dict[str, tuple[list[str], list[str]]] = {
    "flash_attn_func": (["q", "k", "v", *FLASH2], OF_FLASH3),
    "flash_attn_kvpacked_func": (["q", "kv", *FLASH2], []),
    "flash_attn_qkvpacked_func": (["qkv", *FLASH2], [*FLASH3, "num_heads_q"]),
    "flash_attn_varlen_func": (
        ["q", "k", "v", *LENGTHS, *FLASH2, "block_table"],
        [*OF_FLASH3, "seqused_q", "seqused_k"],
    ),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *LENGTHS, *FLASH2], []),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen", *FLASH2], []),
    "flash_attn_with_kvcache": (
        [*OF_CACHE, "block_table", "softmax_scale", "causal", "window_size", "softcap"]
        + ["rotary_interleaved", "alibi_slopes", "num_splits", "return_softmax_lse"],
        ["qv", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", *DESCALES]
        + ["rotary_seqlens", "attention_chunk", "scheduler_metadata", "pack_gqa", "sm_margin"],
    ),
    "get_scheduler_metadata": (
        ["batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"]
        + ["cache_seqlens", "qkv_dtype", "headdim_v", "cu_seqlens_q", "cu_seqlens_k_new"]
        + ["cache_leftpad", "page_size", "max_seqlen_k_new", "causal", "window_size"]
        + ["attention_chunk", "has_softcap", "num_splits", "pack_gqa", "sm_margin"],
        [],
    ),
    "flash_attn_combine": (["out_partial", "lse_partial", "out", "out_dtype"], []),
}
DEFAULTS = {
    "dropout_p": 0.0,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "deterministic": False,
    "return_attn_probs": False,
    "return_softmax_lse": False,
    "rotary_interleaved": True,
    "attention_chunk": 0,
    "sm_margin": 0,
    "max_seqlen_k_new": 0,
    "has_softcap": False,
    "qkv_dtype": torch.bfloat16,
}


@pytest.mark.parametrize("name", PEERS)
def test_arguments_are_those_of_the_peers(name: str) -> None:
    positional, more = PEERS[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == positional
    assert set(more) <= set(parameters)
    for argument, parameter in parameters.items():
        if argument in DEFAULTS and parameter.default is not parameter.empty:
            assert parameter.default == DEFAULTS[argument], argument


def test_every_function_of_the_peers_is_there() -> None:
    assert sorted(flash_attn.__all__) == sorted(PEERS)


def valid(values: cases.Values) -> bool:
    """Packing takes what is packed to be of one shape."""
    packs = values.get("pack", 0)
    same_dims = values.get("head_dims", (1, 1))[0] == values.get("head_dims", (1, 1))[1]
    if packs and not same_dims:
        return False
    heads, seqlens = values.get("heads", (1, 1)), values.get("seqlens", (1, 1))
    return packs != 3 or (heads[0] == heads[1] and seqlens[0] == seqlens[1])


def problem_of(values: cases.Values) -> Problem:
    kind = values["kind"]
    return Problem(
        kind,
        batch=3,
        num_heads=values["heads"][0],
        num_kv_heads=values["heads"][1],
        head_dim=values["head_dims"][0],
        head_dim_v=values["head_dims"][1],
        seqlen_q=values["seqlens"][0],
        seqlen_k=values["seqlens"][1],
        dtype=values["dtype"],
        mask=values["mask"],
        place=Ragged() if kind == "varlen" else Contiguous(),
        score=Score(values["softcap"], values["alibi"]),
        sink_logits=values["sink_logits"],
        lengths="device" if kind == "varlen" else "host",
        return_lse=values["return_lse"],
        needs_grad=True,
    )


def run(pack: int) -> Callable[[Problem, Call], tuple[Tensor, Tensor | None]]:
    """`run=` of `check`: the function that takes so many tensors as one."""

    def call_flash(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        call = dict(call)
        for name in ("sink_tokens", *SCALES):
            del call[name]
        call["s_aux"] = call.pop("sink_logits")
        call["return_softmax_lse"] = call.pop("return_lse")
        varlen = "varlen_" if problem.kind == "varlen" else ""
        if pack:
            names = ("q", "k", "v")[3 - pack :]
            packed = torch.stack([call.pop(n) for n in names], -3)
            call["".join(names)] = packed
        if pack == 3 and varlen:
            for name in ("cu_seqlens", "max_seqlen"):
                call[name] = call.pop(f"{name}_q")
                del call[f"{name}_k"]
        packing = {0: "", 2: "kvpacked_", 3: "qkvpacked_"}[pack]
        result = getattr(flash_attn, f"flash_attn_{varlen}{packing}func")(**call)
        out, lse = result if problem.return_lse else (result, None)
        if lse is not None and problem.sink_logits:
            # The reference leaves the sink out: its LSE, with the error of the one that has it in.
            _, ref = expected(problem, make_like(problem, call, pack))
            assert ref is not None
            own = ref + (lse - torch.logaddexp(ref, call["s_aux"].to(ref.dtype)[:, None]))
            lse = own.to(lse.dtype)
        return out, lse

    return call_flash


def make_like(problem: Problem, call: Call, pack: int) -> Call:
    """The call as the reference takes it."""
    call = dict(call)
    if pack:
        names = ("q", "k", "v")[3 - pack :]
        call |= dict(zip(names, call["".join(names)].unbind(-3), strict=True))
    if problem.kind == "varlen" and pack == 3:
        for name in ("cu_seqlens", "max_seqlen"):
            call |= {f"{name}_q": call[name], f"{name}_k": call[name]}
    return call | dict.fromkeys(SCALES) | {"sink_logits": call["s_aux"]}


@pytest.mark.parametrize(
    "values", cases.pairs(AXES, valid), ids=lambda v: f"{v['kind']}{v['pack']}"
)
def test_outputs_lse_and_gradients(values: cases.Values) -> None:
    problem = problem_of(values)
    if values["pack"] == 3 and problem.kind == "varlen":
        check(problem, run=same_lengths(run(3)), lengths=(20, 20, 20))
        return
    check(problem, run=run(values["pack"]), strided=values["strided"])


def same_lengths(call_flash: Callable[..., Any]) -> Callable[..., Any]:
    """A varlen call whose queries are as long as its keys."""

    def call_with(problem: Problem, call: Call) -> Any:
        total = call["k"].shape[0]
        tokens = torch.randn(total, *call["q"].shape[1:]).to(call["q"].dtype).requires_grad_()
        call["q"], call["cu_seqlens_q"] = tokens, call["cu_seqlens_k"]
        return call_flash(problem, call)

    return call_with


DENSE = Problem(
    "dense",
    batch=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    head_dim_v=16,
    seqlen_q=5,
    seqlen_k=3,
    dtype="float32",
    mask=Mask(True),
)


def flash_call(problem: Problem) -> Call:
    call = make_operands(problem)
    for name in ("sink_tokens", "sink_logits", "return_lse", *SCALES):
        del call[name]
    return call


def test_triple_of_flash_attention_2() -> None:
    """(out, softmax_lse, S_dmask): rows without keys have +inf there; S_dmask is empty."""
    call = flash_call(DENSE)
    out, lse, s_dmask = flash_attn.flash_attn_func(**call, return_attn_probs=True)
    pair = flash_attn.flash_attn_func(**call, return_softmax_lse=True)
    assert torch.equal(out, pair[0]) and s_dmask.numel() == 0
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    assert (lse[..., :2] == torch.inf).all() and (pair[1][..., :2] == -torch.inf).all()
    assert torch.equal(lse[..., 2:], pair[1][..., 2:])
    assert (out[:, :2] == 0).all()


def test_dropout_drops_and_refuses_its_mask() -> None:
    call = flash_call(replace(DENSE, seqlen_q=32, seqlen_k=32, mask=Mask(), head_dim_v=32))
    call |= {"dropout_p": 0.5, "v": torch.eye(32)[None, :, None].expand(2, -1, 2, -1)}
    kept = (flash_attn.flash_attn_func(**call) > 0).float().mean()
    assert 0.4 < kept < 0.6
    with pytest.raises(UnsupportedProblem, match="return_attn_probs: expected False with dropout"):
        flash_attn.flash_attn_func(**call, return_attn_probs=True)


def test_the_sink_is_in_the_lse() -> None:
    call = flash_call(replace(DENSE, seqlen_k=9))
    sink = torch.randn(4)
    plain = flash_attn.flash_attn_func(**call, return_softmax_lse=True)[1]
    for name in ("s_aux", "learnable_sink"):
        lse = flash_attn.flash_attn_func(**call, return_softmax_lse=True, **{name: sink})[1]
        torch.testing.assert_close(lse, torch.logaddexp(plain, sink[:, None]))


def test_qkv_of_different_heads() -> None:
    def packed(problem: Problem, _: Call) -> tuple[Tensor, None]:
        call = flash_call(problem)
        qkv = torch.cat([call.pop(n) for n in "qkv"], 2)
        return flash_attn.flash_attn_qkvpacked_func(qkv, num_heads_q=4, **call), None

    check(replace(DENSE, seqlen_q=6, seqlen_k=6), run=packed)


def test_last_dimension_may_be_strided() -> None:
    def strided(problem: Problem, _: Call) -> tuple[Tensor, None]:
        call = flash_call(problem)
        for name in "qkv":
            call[name] = call[name].transpose(-1, -2).contiguous().transpose(-1, -2)
        return flash_attn.flash_attn_func(**call), None

    check(DENSE, run=strided)


VARLEN = replace(
    DENSE, kind="varlen", batch=3, seqlen_q=7, seqlen_k=12, place=Ragged(), lengths="device"
)


def used_reference(call: Call, used_q: Tensor, used_k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Each sequence on its own; unused queries are 0 and -inf."""
    out = torch.zeros(*call["q"].shape[:2], call["v"].shape[-1])
    lse = torch.full(out.shape[:2], -torch.inf)
    firsts = zip(
        call["cu_seqlens_q"][:-1].tolist(), call["cu_seqlens_k"][:-1].tolist(), strict=True
    )
    lengths = zip(used_q.tolist(), used_k.tolist(), strict=True)
    for b, ((q0, k0), (n_q, n_k)) in enumerate(zip(firsts, lengths, strict=True)):
        slopes = call["alibi_slopes"]
        o, l = reference.attention(
            call["q"][None, q0 : q0 + n_q],
            call["k"][None, k0 : k0 + n_k],
            call["v"][None, k0 : k0 + n_k],
            mask=mask,
            alibi_slopes=None if slopes is None else slopes[b : b + 1],
        )
        assert l is not None
        out[q0 : q0 + n_q], lse[q0 : q0 + n_q] = o[0].float(), l[0].T.float()
    return out, lse.T


@pytest.mark.parametrize("use_q", [False, True], ids=["", "q"])
@pytest.mark.parametrize("use_k", [False, True], ids=["", "k"])
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_unused_tokens(use_q: bool, use_k: bool, alibi: bool) -> None:
    """seqused_q and seqused_k: what is after them is not seen, and gets no gradient."""
    call = flash_call(replace(VARLEN, needs_grad=True))
    call["alibi_slopes"] = torch.rand(3, 4) if alibi else None
    lengths_q, lengths_k = call["cu_seqlens_q"].diff(), call["cu_seqlens_k"].diff()
    used_q = (lengths_q - torch.tensor([2, 0, 1])).clamp(min=0).int() if use_q else lengths_q
    used_k = (lengths_k - torch.tensor([0, 5, 100])).clamp(min=0).int() if use_k else lengths_k
    given = {"seqused_q": used_q if use_q else None, "seqused_k": used_k if use_k else None}
    out, lse = flash_attn.flash_attn_varlen_func(**call, **given, return_softmax_lse=True)
    ref, ref_lse = used_reference(call, used_q, used_k, Mask(True))
    torch.testing.assert_close(out, ref, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-5, atol=1e-5)
    leaves = [call[n] for n in "qkv"]
    cotangent = torch.randn_like(out)
    wanted = torch.autograd.grad(ref, leaves, cotangent)
    for actual, exact in zip(torch.autograd.grad(out, leaves, cotangent), wanted, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("use_q", [False, True], ids=["", "seqused_q"])
@pytest.mark.parametrize("lengths", ["cu_seqlens_k", "seqused_k"])
def test_paged_varlen(name: str, use_q: bool, lengths: str) -> None:
    """The keys of packed sequences, put into pages."""
    call = flash_call(VARLEN)
    used_k = call["cu_seqlens_k"].diff()
    used_q = call["cu_seqlens_q"].diff()
    if use_q:
        used_q = (used_q - 1).clamp(min=0)
    ref, ref_lse = used_reference(call, used_q, used_k, Mask(True))
    page_size, table = 5, torch.randperm(9).view(3, 3).int()
    for x in "kv":
        pages = torch.full((9, page_size, 2, 16), torch.nan)
        for b in range(3):
            first, last = call["cu_seqlens_k"][b : b + 2].tolist()
            for n in range(last - first):
                pages[table[b, n // page_size], n % page_size] = call[x][first + n]
        call[x] = pages
    given: dict[str, Any] = {name: table, "seqused_q": used_q.int() if use_q else None}
    if lengths == "seqused_k":
        given |= {"cu_seqlens_k": None, "seqused_k": used_k}
    call |= given
    out, lse = flash_attn.flash_attn_varlen_func(**call, return_softmax_lse=True)
    torch.testing.assert_close(out, ref, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_combine(packed: bool, dtype: torch.dtype) -> None:
    """Parts of the keys, merged, are all of them; a part without keys may hold anything."""
    problem = replace(DENSE, seqlen_q=5, seqlen_k=12, mask=Mask())
    call = flash_call(problem)
    wanted, wanted_lse = flash_attn.flash_attn_func(**call, return_softmax_lse=True)
    parts = []
    for keys in (slice(0, 5), slice(5, 6), slice(6, 12)):
        part = call | {"k": call["k"][:, keys], "v": call["v"][:, keys]}
        parts.append(flash_attn.flash_attn_func(**part, return_softmax_lse=True))
    outs = torch.stack([out for out, _ in parts] + [torch.full_like(wanted, torch.nan)])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    lses = torch.cat([lses, torch.full_like(lses[:1], -torch.inf)])
    if packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    target = torch.empty(outs.shape[1:], dtype=dtype)
    for given in ({"out_dtype": dtype}, {"out": target}):
        out, lse = flash_attn.flash_attn_combine(outs, lses, **given)
        assert out.dtype == dtype and lse.stride(-2) == 1
        rtol = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out.view_as(wanted).float(), wanted, rtol=rtol, atol=1e-5)
        torch.testing.assert_close(lse.reshape(2, 5, 4), wanted_lse.transpose(1, 2))
    assert out is target
    out, lse = flash_attn.flash_attn_combine(outs[-1:], lses[-1:])
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_combine_is_differentiable() -> None:
    outs = torch.randn(3, 2, 5, 4, 8, requires_grad=True)
    lses = torch.randn(3, 2, 5, 4)
    lses[0] = -torch.inf
    lses.requires_grad_()
    out, lse = flash_attn.flash_attn_combine(outs, lses)
    grads = torch.autograd.grad(out.sum() + lse.sum(), [outs, lses])
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0] == 0).all() and (grads[0][1] != 0).any()


def test_hints_do_not_change_the_result() -> None:
    call = flash_call(DENSE)
    hints = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8}
    wanted = flash_attn.flash_attn_func(**call)
    assert torch.equal(flash_attn.flash_attn_func(**call, **hints), wanted)


def test_window_in_a_tensor() -> None:
    call = flash_call(DENSE) | {"causal": False}
    wanted = flash_attn.flash_attn_func(**call | {"window_size": (2, 1)})
    window = torch.tensor([2, 1])
    assert torch.equal(flash_attn.flash_attn_func(**call | {"window_size": window}), wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_lengths_in_tensors(dtype: torch.dtype) -> None:
    """As `cu_seqlens.diff().max()` gives them."""
    call = flash_call(VARLEN)
    wanted = flash_attn.flash_attn_varlen_func(**call)
    for bounds in (lambda n: torch.tensor(n, dtype=dtype), lambda n: torch.tensor([n])):
        given = {n: bounds(call[n]) for n in ("max_seqlen_q", "max_seqlen_k")}
        assert torch.equal(flash_attn.flash_attn_varlen_func(**call | given), wanted)


def every_other(x: Tensor) -> Tensor:
    """The same numbers, with others between them along the last dimension."""
    return torch.stack([x, x + 1], -1)[..., 0]


@pytest.mark.parametrize("used", [False, True], ids=["", "used"])
def test_lengths_may_be_strided(used: bool) -> None:
    call, names = flash_call(VARLEN), ["cu_seqlens_q", "cu_seqlens_k"]
    if used:
        names += ["seqused_q", "seqused_k"]
        call |= {f"seqused_{n}": call[f"cu_seqlens_{n}"].diff() - 1 for n in "qk"}
    strided = {name: every_other(call[name]) for name in names}
    wanted = flash_attn.flash_attn_varlen_func(**call)
    assert torch.equal(flash_attn.flash_attn_varlen_func(**call | strided), wanted)
