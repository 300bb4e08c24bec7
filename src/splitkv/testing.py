"""Random operands for a Problem, and the one tolerance of tests, benchmarks and searches.

    call = make_operands(problem, seed=0)          # keyword arguments of the public function
    check(problem, seed=0)                         # run it and compare with the reference

A failed check ends with one line of shell that repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitkv import reference, rounding
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import FAR, Mask
from splitkv.core.problem import Operands, Problem
from splitkv.core.scores import PLAIN, Score

__all__ = [
    "AS_IS",
    "PLAIN",
    "Codec",
    "Contiguous",
    "Mask",
    "Paged",
    "Problem",
    "Ragged",
    "Score",
    "assert_close",
    "assert_lse_close",
    "bind",
    "check",
    "expected",
    "make_operands",
    "quantize",
    "repro",
]

Call = dict[str, Any]
FUNCTION = {"decode": "decode", "dense": "attention", "varlen": "attention_varlen"}
LSE_ATOL = 1e-3
DRAWS = 4
SOFTCAP = 3.0  # of the size of a random score, so that leaving it out shows
DROPOUT_P = 0.2
OUT_SCALE = 0.0043  # of results in e4m3: the largest of those of few keys are past its range
NUM_RANGES = 3  # of a sequence
SPARE_PAGES, SPARE_KEYS, SPARE_DIM = 3, 3, 8
STORED = rounding.STORED


def make_operands(
    problem: Problem,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    lengths: Sequence[int] | None = None,
    zero_length: bool = False,
    strided: bool = False,
    poison: bool = True,
) -> Call:
    """Makes random keyword arguments for the public function that `problem` is a call of.

    The values depend on the seed alone, not on the device.

    lengths      keys of each sequence where they live on the device; by default the first sequence
                 is the longest and the others are anything from 1
    zero_length  the last sequence has no keys
    strided      heads before tokens and gaps between rows, as slices of larger tensors
    poison       cache entries past a sequence's end and gaps hold NaN, unused table entries garbage
    """
    g = torch.Generator().manual_seed(seed)
    keys = _lengths(problem, g, lengths, zero_length)
    call: Call = {
        "softmax_scale": None,
        "softcap": SOFTCAP if problem.score.softcap else 0.0,
        **problem.mask.arguments,
        "alibi_slopes": None,
        "sink_logits": None,
        "return_lse": problem.return_lse,
    }
    if problem.score.alibi:
        call["alibi_slopes"] = torch.rand(problem.num_heads, generator=g) + 0.05
    if problem.sink_logits:
        call["sink_logits"] = 2 * torch.randn(problem.num_heads, generator=g)
    if problem.kind == "decode":
        call |= _decode_operands(problem, g, keys, poison)
    else:
        call |= _dense_operands(problem, g, keys)
        call["dropout_p"] = DROPOUT_P if problem.dropout else 0.0
        call["deterministic"] = problem.deterministic
    if problem.out_scale:
        call["out_scale"] = torch.tensor([OUT_SCALE])
    if problem.sequence_sink_tokens:
        call |= _sink_tokens(problem, g)
    call |= {"q_scale": None, "products": None}
    if problem.codec != AS_IS:
        call["products"] = problem.products
    if problem.q_granularity != "none":
        codec = Codec(problem.codec.name, problem.q_granularity)
        call["q"], call["q_scale"] = quantize(call["q"], codec)
    if strided:
        big = [n for n in ("q", "k", "v", "k_cache", "v_cache") if n in call]
        call |= {n: _strided(call[n], poison) for n in big}
    for name, x in call.items():
        if isinstance(x, Tensor):
            # `to` keeps the strides of dense tensors only; a slice is rebuilt on the device.
            apart = strided and x.dim() > 2 and x.is_floating_point() | (x.dtype == torch.int8)
            x = _strided(x.to(device), poison) if apart else x.to(device)
            differentiable = problem.needs_grad and x.dtype in reference.WORKING
            call[name] = x.requires_grad_() if differentiable and "scale" not in name else x
    return call


def _lengths(
    problem: Problem, g: torch.Generator, lengths: Sequence[int] | None, zero_length: bool
) -> Tensor:
    """Draws or checks the keys of each sequence, int32 on the host."""
    most, batch = problem.seqlen_k, problem.batch
    if problem.lengths == "host" and problem.kind != "varlen":
        if lengths is not None or zero_length:
            raise ValueError("lengths: expected a problem with lengths on the device, got host")
        return torch.full((batch,), most, dtype=torch.int32)
    if lengths is not None:
        if len(lengths) != batch or not all(0 <= n <= most for n in lengths):
            raise ValueError(f"lengths: expected {batch} in 0..{most}, got {tuple(lengths)}")
        return torch.tensor(lengths, dtype=torch.int32)
    keys = torch.randint(min(1, most), most + 1, (batch,), generator=g, dtype=torch.int32)
    keys[:1] = most
    if zero_length:
        keys[-1:] = 0
    return keys


def _random(problem: Problem, g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64).to(getattr(torch, problem.dtype))


def _decode_operands(problem: Problem, g: torch.Generator, keys: Tensor, poison: bool) -> Call:
    batch, heads, most = problem.batch, problem.num_kv_heads, problem.seqlen_k
    table = None
    if isinstance(problem.place, Paged):
        page_size = problem.place.page_size
        per_sequence = max(1, -(-most // page_size))
        num_pages = batch * per_sequence + SPARE_PAGES
        table = torch.randperm(num_pages, generator=g)[: batch * per_sequence].int()
        table = table.view(batch, per_sequence)
        first, rows = torch.arange(per_sequence) * page_size, num_pages
        used = torch.zeros(num_pages, page_size, dtype=torch.bool)
        offsets = first[:, None] + torch.arange(page_size)
        used[table.long()] = offsets < keys[:, None, None]
        if poison:
            garbage = torch.tensor([-1, num_pages, 2**31 - 1, -(2**31)], dtype=torch.int32)
            choice = torch.randint(4, (batch, per_sequence + 2), generator=g)
            padding, table = garbage[choice], torch.nn.functional.pad(table, (0, 2))
            first = torch.nn.functional.pad(first, (0, 2), value=2**31)
            table = torch.where(first < keys[:, None], table, padding)
    else:
        page_size = most + (SPARE_KEYS if problem.lengths == "device" else 0)
        rows = batch
        used = torch.arange(page_size) < keys[:, None]
    call: Call = {
        "q": _random(problem, g, batch, problem.seqlen_q, problem.num_heads, problem.head_dim),
        "cache_seqlens": keys if problem.lengths == "device" else None,
        "page_table": table,
        "max_seqlen_k": most,
    }
    for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
        cache, scale = _stored(problem, g, rows, page_size, heads, dim)
        if poison:
            if scale is not None and scale.dim() == 3:
                scale[~used] = float("nan")
            cache = _fill(cache, ~used)
        call |= {f"{name}_cache": cache, f"{name}_scale": scale}
    return call


def _dense_operands(problem: Problem, g: torch.Generator, keys: Tensor) -> Call:
    if problem.kind == "dense":
        q_shape: tuple[int, ...] = (problem.batch, problem.seqlen_q)
        k_shape: tuple[int, ...] = (problem.batch, problem.seqlen_k)
        call: Call = {}
    else:
        queries = torch.randint(0, problem.seqlen_q + 1, keys.shape, generator=g)
        queries[:1] = problem.seqlen_q
        cu_q, cu_k = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (queries, keys))
        q_shape, k_shape = (int(cu_q[-1]),), (int(cu_k[-1]),)
        call = {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": problem.seqlen_q,
            "max_seqlen_k": problem.seqlen_k,
        }
        if problem.bidirectional_ranges:
            call["bidirectional_ranges"] = _ranges(problem, g)
    call["q"] = _random(problem, g, *q_shape, problem.num_heads, problem.head_dim)
    for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
        shape = *k_shape, problem.num_kv_heads, dim
        call[name], call[f"{name}_scale"] = _stored(problem, g, *shape)
    return call


def _sink_tokens(problem: Problem, g: torch.Generator) -> Call:
    """Draws those of each sequence, up to the mask's bound or past all keys; the last has none, the
    one before as many as there may be."""
    bound = problem.mask.sink_tokens
    most = min(bound, problem.seqlen_k + 9)
    drawn = torch.randint(0, most + 1, (problem.batch,), generator=g, dtype=torch.int32)
    drawn[1:][-2:-1] = min(bound, 2**31 - 1)
    drawn[1:][-1:] = 0
    return {"sink_tokens": drawn, "max_sink_tokens": bound if bound < FAR else None}


def _ranges(problem: Problem, g: torch.Generator) -> Tensor:
    """Draws ranges that may overlap, be empty or go on past the keys; the last sequence sees all of
    its keys, the one before none."""
    bounds = torch.randint(0, problem.seqlen_k + 9, (problem.batch, NUM_RANGES, 2), generator=g)
    ranges = bounds.sort(-1)[0]
    ranges[-2:-1] = 0
    ranges[-1:] = torch.tensor([0, 1 << 30])
    return ranges.int()


def _stored(problem: Problem, g: torch.Generator, *shape: int) -> tuple[Tensor, Tensor | None]:
    """Draws keys or values, and their scales where the problem has a codec.

    Tokens and heads are then of different sizes, so that a wrong scale shows.
    """
    x = _random(problem, g, *shape)
    if problem.codec == AS_IS:
        return x, None
    size = torch.rand(*shape[:-1], 1, generator=g) + 0.5
    size = size * torch.linspace(0.5, 2.0, shape[-2])[:, None]
    return quantize(x.float() * size, problem.codec)


def _fill(x: Tensor, where: Tensor) -> Tensor:
    """Fills x with NaN, or where its type has none with its largest value."""
    if not x.is_floating_point():
        return x.masked_fill(where[..., None, None], torch.iinfo(x.dtype).max)
    if x.element_size() == 1:
        nan = torch.tensor(float("nan")).to(x.dtype).view(torch.uint8).item()
        return x.view(torch.uint8).masked_fill(where[..., None, None], nan).view(x.dtype)
    return x.masked_fill(where[..., None, None], float("nan"))


def _strided(x: Tensor, poison: bool) -> Tensor:
    """Copies x to heads before tokens in memory and `SPARE_DIM` elements between rows."""
    tokens, heads, dim = x.shape[-3:]
    shape = *x.shape[:-3], heads, tokens, dim + SPARE_DIM
    y = torch.zeros(shape, dtype=x.dtype, device=x.device)
    y = _fill(y, torch.ones(y.shape[:-2], dtype=torch.bool, device=x.device)) if poison else y
    y = y.transpose(-2, -3)[..., :dim]
    return y.copy_(x)


def quantize(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Returns x [.., H_kv, D] as stored values and float32 scales [1], [H_kv] or [.., H_kv]."""
    heads, last = x.dim() - 2, x.dim() - 1
    lead = tuple(range(heads))
    dims = {"tensor": (*lead, heads, last), "head": (*lead, last), "token": (last,)}
    stored = STORED[codec.name]
    scale = rounding.scale_of(x, dims[codec.granularity], stored)
    shape = {"tensor": (1,), "head": (x.shape[heads],), "token": x.shape[:-1]}[codec.granularity]
    return rounding.quantize(x, scale, stored), scale.reshape(shape)


def captured(
    run: Callable[[], Any], warm: Callable[[], Any] | None = None, *, mode: str = "global"
) -> tuple[Callable[[], None], Any]:
    """Captures `run` in a CUDA graph; returns (replay, result), and a replay overwrites the result.

    As torch asks for, `warm`, by default `run` itself, is called on a side stream before: that
    compiles, loads and allocates. `mode` is torch's `capture_error_mode`: "thread_local" where
    other threads use the GPU, as that of NCCL does.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (warm or run)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        result = run()
    return graph.replay, result


def expected(
    problem: Problem,
    call: Call,
    *,
    upcast: bool = True,
    draw: int = 0,
    products: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes (out, lse) of a call by definition, which rounds nothing. With an out_scale, out is
    the numbers that its e4m3 stand for, cut off where they end.

    upcast     False: the run in working precision, which rounds what `products` says
    draw       above 0: reorders the head dimension, for other rounding errors of the same result
    products   default: those of the problem
    """
    working = getattr(torch, problem.dtype)
    names = {"decode": ("cache_seqlens", "page_table", "max_seqlen_k"), "dense": ()}
    names["varlen"] = "cu_seqlens_q", "cu_seqlens_k"
    scales = ("q_scale", "k_scale", "v_scale")
    kv = ("k_cache", "v_cache") if problem.kind == "decode" else ("k", "v")
    common = ["softmax_scale", "softcap", "alibi_slopes", "sink_logits"]
    if problem.bidirectional_ranges:
        names["varlen"] += ("bidirectional_ranges",)
    if problem.sequence_sink_tokens:
        common.append("sink_tokens")
    kwargs = {n: call[n] for n in ("q", *kv, *names[problem.kind], *scales, *common)}
    if draw:
        g = torch.Generator().manual_seed(draw)
        order = torch.randperm(problem.head_dim, generator=g).to(call["q"].device)
        kwargs |= {n: reference.take(call[n], ..., order) for n in ("q", kv[0])}
    function = getattr(reference, FUNCTION[problem.kind])
    dtype = reference.compute_dtype(working, upcast)
    products = products or ("widened" if upcast else problem.products)
    out, lse = function(mask=problem.mask, upcast=dtype, products=products, **kwargs)
    if problem.out_scale:
        scale = call["out_scale"]
        most = rounding.LARGEST[torch.float8_e4m3fn] * scale
        out = out.clamp(-most, most) if upcast else _numbers(reference.scaled(out, scale), scale)
    return out, lse


def _numbers(out: Tensor, out_scale: Tensor) -> Tensor:
    return rounding.dequantize(out, out_scale, torch.float32)


def bind(problem: Problem, call: Call) -> Operands:
    """Makes the operands that a kernel is launched with for a call."""
    names = Operands.__dataclass_fields__.keys() & call.keys()
    tensors = {n: call[n] for n in names - {"softmax_scale", "q", "k", "v"}}
    if problem.sequence_sink_tokens:
        tensors["sequence_sink_tokens"] = call["sink_tokens"]
    k, v = ("k_cache", "v_cache") if problem.kind == "decode" else ("k", "v")
    scale = call["softmax_scale"] or problem.head_dim**-0.5
    return Operands(q=call["q"], k=call[k], v=call[v], softmax_scale=scale, **tensors)


def check(
    problem: Problem,
    *,
    seed: int = 0,
    device: str = "cpu",
    run: Callable[[Problem, Call], tuple[Tensor, Tensor | None]] | None = None,
    **options: Any,
) -> None:
    """Runs a problem on random operands and holds out, lse and gradients to the tolerance rule.

    Where there are few rows, one run is a poor measure of what the working precision costs, so the
    rule gets the worst of `DRAWS` runs.
    `run(problem, call)` returns (out, lse or None); by default it is the public function. `options`
    are those of `make_operands`.
    """
    if problem.dropout:
        raise ValueError("dropout: expected False, got True; two random masks do not compare")
    call = make_operands(problem, seed=seed, device=device, **options)
    out, lse = (run or _public)(problem, call)
    ref, ref_lse = expected(problem, call)
    pts = [expected(problem, call, upcast=False, draw=i)[0] for i in range(DRAWS)]
    try:
        _expect_dtype("out", out, torch.float8_e4m3fn if problem.out_scale else pts[0].dtype)
        out = _numbers(out, call["out_scale"]) if problem.out_scale else out
        assert_close(out, ref, _furthest(pts, ref))
        if problem.return_lse:
            assert lse is not None and ref_lse is not None, "lse: expected a tensor, got None"
            _expect_dtype("lse", lse, torch.float32)
            rounded = None
            if problem.products != "widened":
                rounded = expected(problem, call, products="half")[1]
            assert_lse_close(lse, ref_lse, rounded=rounded)
        if problem.needs_grad:
            names = [n for n in ("q", "k", "v", "k_cache", "v_cache", "sink_logits") if n in call]
            names = [n for n in names if call[n] is not None and call[n].requires_grad]
            g = torch.Generator().manual_seed(seed)
            cotangent = torch.randn(out.shape, generator=g).to(out)
            leaves = [call[n] for n in names]
            grads = [torch.autograd.grad(x, leaves, cotangent.to(x)) for x in (out, ref, *pts)]
            for name, actual, exact, *draws in zip(names, *grads, strict=True):
                furthest = _furthest(draws, exact)
                assert_close(actual, exact, furthest, factor=3.0, name=f"d{name}")
    except AssertionError as error:
        line = repro(problem, seed, device=device, **options)
        raise AssertionError(f"{error}\n  {problem}\n  {line}") from None


def _furthest(pts: Sequence[Tensor], ref: Tensor) -> Tensor:
    """Returns the run with the largest error."""
    if ref.numel() == 0:
        return pts[0]
    return max(pts, key=lambda pt: (pt.detach().double() - ref.double()).abs().max().item())


def _public(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
    import splitkv

    result = getattr(splitkv, FUNCTION[problem.kind])(**call)
    return result if problem.return_lse else (result, None)


def repro(problem: Problem, seed: int, *, device: str = "cpu", **options: Any) -> str:
    """Writes one line of shell that checks the problem again."""
    given = {"device": device} if device != "cpu" else {}
    arguments = "".join(f", {n}={x!r}" for n, x in (given | options).items())
    return f'python -c "from splitkv.testing import *; check({problem!r}, seed={seed}{arguments})"'


def assert_close(
    out: Tensor, ref: Tensor, pt: Tensor, *, factor: float = 2.0, name: str = "out"
) -> None:
    """Asserts max|out - ref| <= factor * max|pt - ref| + 2 * max|(ref + 0.3 - 0.3) - ref|.

    `ref` is computed in a higher precision than `out`, `pt` in the same. The second term is what
    one rounding in the type of `out` can do, or of `pt` where that is finer: a result that was
    rounded to fewer bits than its run in working precision is held to that. NaN never passes.
    """
    for what, x in ((name, out), (f"{name}, working precision", pt)):
        assert x.shape == ref.shape, f"{what}: expected {list(ref.shape)}, got {list(x.shape)}"
        assert x.is_floating_point(), f"{what}: expected a floating dtype, got {x.dtype}"
    if out.numel() == 0:
        return
    finer = min(out.dtype, pt.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    rounded = ref.detach().to(finer)
    rounding = ((rounded + 0.3 - 0.3) - rounded).double().abs().max().item()
    a, b, c = (x.detach().double() for x in (out, ref, pt))
    bound = factor * (c - b).abs().max().item() + 2 * rounding
    assert bound < float("inf"), f"{name}: expected a finite reference, its bound is {bound}"
    error = (a - b).abs()
    error = torch.where(error.isnan(), float("inf"), error)
    if error.max().item() <= bound:
        return
    index = _worst(error)
    raise AssertionError(
        f"{name}: expected an error of at most {bound:.3e} "
        f"({factor:g} x the working precision's {(c - b).abs().max().item():.3e} + rounding), "
        f"got {error[index].item():.3e} at {list(index)}: {a[index].item():.6g} "
        f"for {b[index].item():.6g} (working precision {c[index].item():.6g}); "
        f"{int((error > bound).sum())} of {error.numel()} elements are past it, "
        f"{int(a.isnan().sum())} are NaN"
    )


def assert_lse_close(
    lse: Tensor, ref: Tensor, *, rounded: Tensor | None = None, name: str = "lse"
) -> None:
    """Asserts that infinities are equal and the rest within an absolute 1e-3. NaN never passes.

    rounded   the LSE by queries in 8 bits, where a kernel may round them: the error may be twice as
              much more as that of the worst element, as in `assert_close`
    """
    assert lse.shape == ref.shape, f"{name}: expected {list(ref.shape)}, got {list(lse.shape)}"
    if lse.numel() == 0:
        return
    a, b = lse.detach().double(), ref.detach().double()
    assert not b.isnan().any(), f"{name}: expected a reference without NaN"
    bound = LSE_ATOL
    if rounded is not None:
        c = rounded.detach().double()
        bound += 2 * torch.where(c == b, 0.0, (c - b).abs()).max().item()
        assert bound < float("inf"), f"{name}: expected a finite reference, its bound is {bound}"
    error = torch.where(a == b, 0.0, (a - b).abs())  # equal infinities differ by NaN
    error = torch.where(error.isnan(), float("inf"), error)
    if error.max().item() <= bound:
        return
    index = _worst(error)
    raise AssertionError(
        f"{name}: expected an error of at most {bound:g}, got {error[index].item():.3e} "
        f"at {list(index)}: {a[index].item():.6g} for {b[index].item():.6g}; "
        f"{int((error > bound).sum())} of {error.numel()} elements are past it"
    )


def _expect_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    assert x.dtype == dtype, f"{name}: expected {dtype}, got {x.dtype}"


def _worst(error: Tensor) -> tuple[int, ...]:
    """Finds the index of the largest element."""
    flat = int(error.argmax())
    index = []
    for size in reversed(error.shape):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))
