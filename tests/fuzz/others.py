"""Functions that are not attention: quantising, merging, planning, explaining, warming up."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import torch
from torch import Tensor

import splitkv
from fuzz.draw import STORED, Draw, Drawn, shape, strided
from fuzz.oracle import LARGEST, Wrong, expect_close, over
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.flash_attn import get_scheduler_metadata
from splitkv.planner.policies import POLICIES

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_kv(d: Draw) -> Drawn:
    v = d.variant
    kind, granularity = v.choice(("int8", "fp8")), v.choice(("tensor", "head", "token"))
    smooth = v.choice(("", "", "smooth_k", "k_mean"))
    of = shape(d, TYPES)
    lead: tuple[int, ...] = (d.rng.randint(0, 3), d.length())
    if d.chance(0.3):
        lead = (d.length(),)
    if smooth == "smooth_k" and 0 in lead:
        smooth = ""
    k = d.randn(*lead, of.kv_heads, of.dim, dtype=of.dtype) + d.rng.choice((0, 3))
    x = d.randn(*lead, of.kv_heads, of.dim_v, dtype=of.dtype) * d.rng.choice((1, 0, 1e-3))
    if d.chance(0.2):
        k, x = strided(d, k), strided(d, x)
    kwargs: dict[str, Any] = {"k": k, "v": x, "dtype": kind, "granularity": granularity}
    if smooth == "smooth_k":
        kwargs["smooth_k"] = True
    elif smooth:
        kwargs["k_mean"] = d.randn(of.kv_heads, of.dim)

    def judge(result: Any) -> None:
        stored = STORED[kind]
        mean = result.k_mean
        if smooth == "smooth_k":
            wanted = k.float().mean(tuple(range(len(lead))))
            if not torch.allclose(mean, wanted, rtol=1e-3, atol=1e-3):
                raise Wrong("k_mean: expected the mean key")
        elif smooth != "k_mean" and mean is not None:
            raise Wrong("k_mean: expected None")
        for name, given in (("k", k), ("v", x)):
            y = given.float() - (mean if name == "k" and mean is not None else 0)
            codes, scale = getattr(result, name), getattr(result, f"{name}_scale")
            shapes = {"tensor": (1,), "head": (of.kv_heads,), "token": tuple(y.shape[:-1])}
            if codes.dtype != stored or codes.shape != y.shape or not codes.is_contiguous():
                raise Wrong(f"{name}: expected {stored} {list(y.shape)}")
            if tuple(scale.shape) != shapes[granularity]:
                raise Wrong(f"{name}_scale: expected {shapes[granularity]}, got {scale.shape}")
            if not y.numel():
                continue
            dims = {"token": (-1,), "head": (*range(len(lead)), -1), "tensor": None}[granularity]
            most = y.abs().amax() if dims is None else y.abs().amax(dims)
            wanted = over(most, LARGEST[stored]).clamp(min=2.0**-100)
            if not torch.allclose(scale, wanted.expand_as(scale), rtol=1e-6, atol=0):
                raise Wrong(f"{name}_scale: expected the largest value over {LARGEST[stored]}")
            each = scale.double().expand(y.shape[:-1])[..., None]
            error = (codes.double() * each - y.double()).abs()
            bound = each / 2 if stored == torch.int8 else y.double().abs() / 16 + each * 2**-10
            if (error > bound * 1.0001).any() or error.isnan().any():
                raise Wrong(f"{name}: expected the nearest stored values")

    return Drawn("quantize_kv", splitkv.quantize_kv, kwargs, judge)


def merge_states(d: Draw) -> Drawn:
    of = shape(d, TYPES)
    batch, tokens = d.rng.randint(0, 3), d.rng.randint(0, 9)
    dense = d.chance(0.6)
    shape_of = (batch, tokens, of.heads, of.dim) if dense else (tokens, of.heads, of.dim)
    rows = (batch, of.heads, tokens) if dense else (of.heads, tokens)
    kwargs: dict[str, Any] = {}
    for name in "ab":
        lse = d.randn(*rows) * d.rng.choice((1, 10))
        lse = lse.masked_fill(d.rand(*rows) < 0.2, float("-inf"))
        out = d.randn(*shape_of, dtype=of.dtype)
        unseen = (lse == float("-inf")).transpose(-1, -2)[..., None]
        kwargs |= {f"out_{name}": out.masked_fill(unseen, 0.0), f"lse_{name}": lse}

    def judge(result: Any) -> None:
        out, lse = result
        wide = torch.stack([kwargs["lse_a"], kwargs["lse_b"]]).double()
        total = wide.logsumexp(0)
        weights = (wide - total.nan_to_num(neginf=0.0)).exp().transpose(-1, -2)[..., None]
        outs = torch.stack([kwargs["out_a"], kwargs["out_b"]])
        ref = (weights * outs.double()).sum(0)
        pt = (weights.float() * outs.float()).sum(0).to(of.dtype)
        expect_close("out", out, ref, [pt])
        near = torch.where(lse.double() == total, 0.0, (lse.double() - total).abs())
        if near.isnan().any() or (near.numel() and near.max() > 1e-4):
            raise Wrong("lse: expected the log of the sum of both")

    return Drawn("merge_states", splitkv.merge_states, kwargs, judge)


def append(d: Draw) -> Drawn:
    """Tokens into slots of pages, some of them nowhere."""
    v, of = d.variant, shape(d, TYPES)
    kind, by = v.choice(("", "int8", "fp8")), v.choice(("token", "head", "tensor"))
    pages, size, tokens = d.rng.randint(1, 5), d.rng.choice((1, 4, 16)), d.rng.randint(0, 9)
    stored = STORED[kind] if kind else of.dtype
    heads = d.chance(0.3)

    def cache(dim: int) -> Any:
        lead = (pages, of.kv_heads, size) if heads else (pages, size, of.kv_heads)
        made = torch.zeros(*lead, dim, device=d.device).to(stored)
        return made.transpose(1, 2) if heads else made

    kwargs: dict[str, Any] = {
        "k": d.randn(tokens, of.kv_heads, of.dim, dtype=of.dtype),
        "v": d.randn(tokens, of.kv_heads, of.dim_v, dtype=of.dtype),
        "k_cache": cache(of.dim),
        "v_cache": cache(of.dim_v),
    }
    slots = d.rng.sample(range(-9, pages * size + 9), min(tokens, pages * size + 18))
    slots += [-1] * (tokens - len(slots))
    index = d.rng.choice((torch.int64, torch.int32))
    kwargs["slot_mapping"] = torch.tensor(slots, dtype=index, device=d.device)
    names = ("k_scale", "v_scale") if kind else ()
    for name in names:
        sizes = {"token": (pages, size, of.kv_heads), "head": (of.kv_heads,), "tensor": (1,)}
        kwargs[name] = d.rand(*sizes[by]) + 0.01

    def judge(result: Any) -> None:
        kept = [
            (n, *divmod(slot, size)) for n, slot in enumerate(slots) if 0 <= slot < pages * size
        ]
        for name in "kv":
            held, scale = kwargs[f"{name}_cache"], kwargs.get(f"{name}_scale")
            for n, page, key in kept:
                x = held[page, key].float()
                if scale is not None:
                    x = x * (scale[page, key] if by == "token" else scale)[:, None]
                error = (x - kwargs[name][n].float()).abs()
                most = kwargs[name][n].float().abs().amax() * 0.07
                past = scale is not None and by != "token"  # what is past the largest is cut
                if not past and (error > most if kind else error > 0).any():
                    raise Wrong(f"{name}_cache: expected token {n} on page {page}")

    writes = ("k_cache", "v_cache", *(names if by == "token" else ()))
    return Drawn("append", splitkv.append, kwargs, judge, writes)


def problem(d: Draw) -> Problem:
    """Any, also of no tensor that fits into memory."""
    r = d.rng
    kind = r.choice(("decode", "decode", "dense", "varlen"))
    kv_heads, group = r.randint(1, 8), r.choice((1, 2, 4, 7, 8, 16))
    dim = r.choice((64, 128, 256, r.randint(1, 300)))
    codec: dict[str, Any] = {}
    if r.random() < 0.3:
        name = r.choice(("int8", "fp8"))
        codec = {"codec": Codec(name, r.choice(("tensor", "head", "token")))}
    left = r.choice((-1, r.randint(0, 5000)))
    mask = Mask(r.random() < 0.6, left, r.choice((-1, r.randint(0, 9))), r.choice((0, 0, 4)))
    place: Any = r.choice((Contiguous(), Paged(16), Paged(r.randint(1, 300))))
    return Problem(
        kind,
        r.choice((1, r.randint(0, 300))),
        kv_heads * group,
        kv_heads,
        dim,
        r.choice((dim, dim, 128)),
        r.choice((1, r.randint(0, 16))) if kind == "decode" else r.randint(0, 5000),
        r.choice((r.randint(0, 600), r.randint(0, 1 << 20))),
        r.choice(("bfloat16", "float16", "float32")),
        mask=mask,
        place=place if kind == "decode" else Contiguous(),
        lengths=r.choice(("host", "device")),
        return_lse=r.random() < 0.5,
        needs_grad=kind != "decode" and r.random() < 0.3,
        **codec,
    )


def plans(d: Draw) -> Drawn:
    """plan and explain, of problems without tensors, for GPUs that are not here."""
    of = problem(d)
    device = GPUS[d.rng.choice([*GPUS])] if d.chance(0.8) else None
    policy = d.rng.choice([*POLICIES])
    splits = d.rng.choice((0, 0, d.rng.randint(1, 300)))
    kwargs: dict[str, Any] = {"problem": of, "policy": policy, "num_splits": splits}
    if device is not None:
        kwargs["device"] = device

    def run(**kwargs: Any) -> Any:
        plan = splitkv.plan(**kwargs)
        told = str(splitkv.explain(of, device=device, policies=(policy,), num_splits=splits))
        return plan, told

    def judge(result: Any) -> None:
        plan, told = result
        if plan.problem != of or not plan.why or not plan.kernel:
            raise Wrong(f"plan: expected one of the problem, got {plan}")
        if plan.kernel not in told or not str(splitkv.explain(plan)):
            raise Wrong("explain: expected the kernel of the plan")
        json.dumps(plan.as_dict())
        for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
            if copied != plan or str(copied) != str(plan) or copied.config != plan.config:
                raise Wrong("plan: expected a copy that is equal")
        if splits and plan.config.num_splits > splits:
            raise Wrong(f"num_splits: expected at most {splits}, got {plan.config.num_splits}")

    return Drawn("plan, explain", run, kwargs, judge)


def warmup(d: Draw) -> Drawn:
    """Plans of a model's calls; on a GPU the calls themselves, so seldom there."""
    r, of = d.rng, shape(d, TYPES)
    kwargs: dict[str, Any] = {
        "num_heads": of.heads,
        "num_kv_heads": of.kv_heads,
        "head_dim": of.dim,
        "max_seqlen_k": r.randint(1, 5000) if d.where == "cpu" else r.randint(1, 60),
        "batch_sizes": [r.randint(1, 4) for _ in range(r.randint(1, 2))],
        "seqlens_q": [r.randint(1, 4)],
        "dtype": of.dtype,
        "device": d.device,
        "append": r.random() < 0.4,
    }
    if of.dim != of.dim_v:
        kwargs["head_dim_v"] = of.dim_v
    if r.random() < 0.5:
        kwargs["page_size"] = r.choice((1, 16, r.randint(1, 100)))
    if r.random() < 0.3 and of.dtype != torch.float32:
        kwargs |= {"stored": r.choice(("int8", "fp8")), "granularity": r.choice(("head", "tensor"))}
    if r.random() < 0.3:
        kwargs["sink_logits"] = True
    if r.random() < 0.3:
        kwargs["alibi_slopes"] = True

    def judge(result: Any) -> None:
        if not result or any(not isinstance(x, splitkv.Plan) for x in result):
            raise Wrong(f"warmup: expected plans, got {result}")

    return Drawn("warmup", splitkv.warmup, kwargs, judge)


def metadata(d: Draw) -> Drawn:
    of = shape(d, TYPES)
    batch = d.rng.randint(1, 9)
    lengths: Tensor = d.index_of([d.rng.randint(0, 300) for _ in range(batch)])
    kwargs: dict[str, Any] = {
        "batch_size": batch,
        "max_seqlen_q": d.rng.randint(1, 20),
        "max_seqlen_k": d.rng.choice((300, d.rng.randint(0, 1 << 18))),
        "num_heads_q": of.heads,
        "num_heads_kv": of.kv_heads,
        "headdim": of.dim,
        "cache_seqlens": lengths,
        "qkv_dtype": of.dtype,
        "headdim_v": of.dim_v,
        "page_size": d.rng.choice((None, 1, 16, 77)),
        "max_seqlen_k_new": d.rng.choice((0, 1, 5)),
        "causal": d.chance(0.6),
        "has_softcap": d.chance(0.2),
        "num_splits": d.rng.choice((0, 0, d.rng.randint(1, 100))),
        "sm_margin": d.rng.choice((0, 0, 3 if d.where == "cuda" else 0)),
    }

    def judge(result: Any) -> None:
        if not isinstance(result, splitkv.Plan) or result.problem.batch != batch:
            raise Wrong(f"get_scheduler_metadata: expected a Plan, got {result}")

    return Drawn("get_scheduler_metadata", get_scheduler_metadata, kwargs, judge)
