"""What every kind of call is drawn from: two streams of numbers, sizes, tensors, memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from fuzz.oracle import LARGEST, Asked

HALF = (torch.bfloat16, torch.float16)
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
GRANULARITIES = ("tensor", "head", "sequence", "token")


@dataclass
class Drawn:
    """A call and how its result is judged.

    judge   raises `Wrong`
    writes  arguments whose memory the call writes into; all others have to stay as they are
    again   whether a second call has to give the same bits
    """

    name: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    judge: Callable[[Any], None]
    writes: tuple[str, ...] = ()
    again: bool = True
    refusable: bool = True


@dataclass(frozen=True)
class Sizes:
    """The most of everything."""

    batch: int
    seqlen_k: tuple[int, ...]  # one of these bounds is drawn first
    dims: tuple[int, ...]
    groups: tuple[int, ...]
    kv_heads: int
    seqlen_q: int
    rows: int  # queries times heads, over the batch


SIZES = {
    "interpret": Sizes(2, (5, 20, 50), (16, 32), (1, 2, 3), 2, 20, 64),
    "cpu": Sizes(4, (5, 70, 300), (16, 32, 64, 80, 128, 24, 8, 7), (1, 2, 3, 4, 7, 8), 3, 70, 2000),
    "cuda": Sizes(
        9,
        (20, 300, 700, 2500),
        (64, 128, 128, 256, 32, 80, 96, 16, 192, 112),
        (1, 2, 3, 4, 5, 7, 8, 16, 32),
        3,
        300,
        6000,
    ),
}


@dataclass
class Draw:
    """The variant is shared by the cases of a group: what kernels are compiled for. All that is
    asked of it is asked before, and in one order; the rest is the case's own."""

    seed: int
    index: int
    where: str
    group: int
    variant: Random = field(init=False)
    rng: Random = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.variant = Random(f"{self.seed}-variant-{self.index // self.group}")
        self.rng = Random(f"{self.seed}-{self.index}")
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(60))

    @property
    def device(self) -> str:
        return "cuda" if self.where == "cuda" else "cpu"

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.where]

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(dtype).to(self.device)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def index_of(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def length(self, most: int | None = None) -> int:
        """Of keys: small ones are as likely as large ones, 0 and the bound are met."""
        bound = self.rng.choice(self.sizes.seqlen_k) if most is None else most
        return self.rng.choice(
            (bound, *[self.rng.randint(0, bound)] * 3, min(bound, self.rng.randint(0, 1)))
        )


@dataclass(frozen=True)
class Shape:
    """What the tensors of a call look like; of the variant but for the number of heads."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    dim: int
    dim_v: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def shape(d: Draw, dtypes: Sequence[torch.dtype] | None = None) -> Shape:
    v = d.variant
    floats = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    dtype = v.choice(dtypes or floats)
    dim = v.choice(d.sizes.dims)
    dim_v = v.choice((dim, dim, dim, v.choice(d.sizes.dims)))
    group = v.choice(d.sizes.groups)
    kv_heads = d.rng.randint(1, d.sizes.kv_heads if group < 16 else 1)
    return Shape(dtype, kv_heads, group, dim, dim_v)


@dataclass(frozen=True)
class Modifiers:
    """Arguments that all functions of attention have, and what they ask for.

    own_sinks   sink tokens of each sequence; none: as many for all
    """

    asked: Asked
    kwargs: dict[str, Any]
    own_sinks: tuple[int, ...] = ()

    def sinks_of(self, sequence: int) -> int | None:
        return self.own_sinks[sequence] if self.own_sinks else None


SINKS = (-3, 2**31 - 1)  # of a sequence, none and all
MASKS = ("full", "causal", "causal", "window", "both", "right", "sink_tokens", "chunk")


def modifiers(d: Draw, of: Shape, batch: int, *, own_sinks: bool = False) -> Modifiers:
    """The mask, the scores and the sink. ALiBi slopes may be of sequences; with `own_sinks` so may
    sink tokens."""
    v, r = d.variant, d.rng
    kind = v.choice(MASKS)
    of_each = own_sinks and v.random() < (0.5 if kind in ("sink_tokens", "chunk") else 0.1)
    softcap, alibi, sink, scaled = (v.random() < p for p in (0.2, 0.2, 0.25, 0.2))
    of_sequences, default_causal = v.random() < 0.5, v.random() < 0.5
    left = r.choice((0, r.randint(0, 20), r.randint(0, 300)))
    right = r.choice((0, r.randint(0, 20)))
    causal = kind == "causal" or (kind in ("window", "sink_tokens", "chunk") and default_causal)
    window = {"window": (left, -1), "both": (left, right), "right": (-1, right)}.get(kind, (-1, -1))
    tokens = chunk = 0
    if kind == "sink_tokens":
        window, tokens = (left, r.choice((-1, right))), r.randint(1, 40)
    if kind == "chunk":
        chunk, tokens = r.choice((1, r.randint(1, 40))), r.choice((0, 0, r.randint(1, 9)))
    kwargs: dict[str, Any] = {"causal": causal}
    if window != (-1, -1) or d.chance(0.1):
        kwargs["window_size"] = window
    if tokens or d.chance(0.1):
        kwargs["sink_tokens"] = tokens
    own: tuple[int, ...] = ()
    if of_each:
        own = tuple(r.choice((0, tokens, *SINKS, r.randint(1, 60))) for _ in range(batch))
        kwargs["sink_tokens"] = d.index_of(own)
        if d.chance(0.4):
            kwargs["max_sink_tokens"] = max(0, *own, 0) + r.choice((0, r.randint(1, 9)))
    if chunk or d.chance(0.1):
        kwargs["attention_chunk"] = chunk
    scale = None
    if scaled:
        kwargs["softmax_scale"] = scale = r.choice((1.0, 0.1, 0.05 + r.random()))
    if softcap:
        kwargs["softcap"] = r.choice((3.0, 1.0 + 20 * r.random()))
    if alibi:
        lead = (batch,) if of_sequences and batch else ()
        kwargs["alibi_slopes"] = d.rand(*lead, of.heads) + 0.05
    if sink:
        logits = d.randn(of.heads) * r.choice((1.0, 2.0, 8.0))
        kwargs["sink_logits"] = logits.to(r.choice((torch.float32, of.dtype)))
    asked = Asked(causal, window, tokens, chunk, scale, float(kwargs.get("softcap", 0.0)))
    return Modifiers(asked, kwargs, own)


def slopes_of(kwargs: dict[str, Any], sequence: int) -> Tensor | None:
    slopes = kwargs.get("alibi_slopes")
    return slopes if slopes is None or slopes.dim() == 1 else slopes[sequence]


def ranges_of(d: Draw, keys: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """For each sequence as many ranges of keys, in any order, which may be empty, overlap, begin
    before the first key and go on past the last."""
    number = d.rng.randint(0, 3)

    def one(n: int) -> tuple[int, int]:
        edges = d.rng.randint(-2, n + 3), d.rng.randint(0, n + 3)
        return d.rng.choice((edges, (min(edges), max(edges)), (0, 1 << 30), (0, 0)))

    return [tuple(one(n) for _ in range(number)) for n in keys]


def out_scale_of(d: Draw) -> Tensor:
    """By which the largest results are past the range, or none."""
    scale = d.rand(1) * d.rng.choice((0.002, 0.05)) + 0.001
    return scale.reshape(()) if d.chance(0.3) else scale


# Memory


def poison(x: Tensor) -> Tensor:
    """NaN, or the largest integer, everywhere."""
    if x.dtype == torch.float8_e4m3fn:
        x.view(torch.uint8).fill_(0x7F)
        return x
    return x.fill_(127 if x.dtype == torch.int8 else float("nan"))


def strided(d: Draw, x: Tensor, gap: int = 8) -> Tensor:
    """The same values with NaN between rows, and of [.., tokens, heads, dim] heads before tokens;
    or a slice from the middle of something larger."""
    if x.dim() < 3:
        return x
    if d.chance(0.5):
        *rest, tokens, heads, dim = x.shape
        y = poison(torch.empty(*rest, heads, tokens, dim + gap, dtype=x.dtype, device=x.device))
        y = y.transpose(-2, -3)[..., :dim]
    else:
        bigger = x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + gap
        y = poison(torch.empty(bigger, dtype=x.dtype, device=x.device))
        y = y[1:-1, ..., : x.shape[-1]]
    bytes_of(y).copy_(bytes_of(x))
    return y


def bytes_of(x: Tensor) -> Tensor:
    """8-bit floats as bytes, which every device moves."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.dtype != torch.bool else x


def same_bits(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.element_size() == 1 or not x.is_floating_point():
        return torch.equal(bytes_of(x), bytes_of(y))
    return torch.equal(x.nan_to_num(12345.0), y.nan_to_num(12345.0)) and torch.equal(
        x.isnan(), y.isnan()
    )


# Keys and values in 8 bits


@dataclass(frozen=True)
class Stored:
    """What is stored, its scale as it is given, and its scale for each token and head."""

    x: Tensor
    scale: Tensor
    each: Tensor

    @property
    def exact(self) -> Tensor:
        return self.x.float().double() * self.each.double()[..., None]


def quantised(d: Draw, x: Tensor, kind: str, granularity: str) -> Stored:
    """x [B, S, H, D] or [T, H, D] as stored values; the scales differ between heads and tokens, so
    that a wrong one shows. A scale a sequence is of dense ones only."""
    stored = STORED[kind]
    heads = x.shape[-2]
    sizes = {
        "tensor": (1,),
        "head": (heads,),
        "sequence": (x.shape[0], heads),
        "token": x.shape[:-1],
    }[granularity]
    scale = (d.rand(*sizes) + 0.5) * (3.0 / LARGEST[stored])
    each = scale
    if granularity == "sequence":
        each = scale[:, None]
    each = each.expand(x.shape[:-1])
    y = (x.float() / each[..., None]).clamp(-LARGEST[stored], LARGEST[stored])
    y = y.round() if stored == torch.int8 else y
    if granularity == "tensor" and d.chance(0.3):
        scale = scale.reshape(())
    return Stored(y.to(stored), scale, each)
