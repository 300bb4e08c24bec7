"""Batches whose lengths differ, as an engine has in every step: the suite `mixes`.

Five shapes of servers, each with four distributions of lengths, and as many again drawn with a
seed; each beside as many bytes in equal lengths, contiguous and in pages of 16, in bf16 and with
e4m3 caches. A name says the situation: `b64_16000_h8x1_d128_one_long` is 64 sequences of up to
16000 keys, 8 query heads on one KV head of 128. Those that are drawn begin with `mix`, the seed and
their number, so that a name alone is enough to make the case in another process.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged, Place
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.scales import DEFAULT_PRODUCTS
from splitkv.lab.harness.cases import Case

DRAWN = 20
SHORTEST = 17  # keys
BATCH, LONGEST = (2, 256), (512, 1 << 17)  # drawn evenly on a logarithmic scale
HEADS = ((8, 1), (16, 2), (32, 8), (40, 8), (64, 8), (16, 16))  # query heads, KV heads
HEAD_DIMS = (64, 128, 128, 128, 256)
CAPACITY_BYTES = 8 << 30  # of keys and values in bf16, were every sequence as long as the longest
PLACES: tuple[Place, ...] = (Contiguous(), Paged(16))


class Shape(NamedTuple):
    """A batch: so many sequences of up to so many keys."""

    batch: int
    longest: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def capacity_bytes(self) -> int:
        """Bytes of keys and values in bf16, were every sequence as long as the longest."""
        return 4 * self.batch * self.longest * self.num_kv_heads * self.head_dim


SHAPES = (
    Shape(64, 16000, 8, 1, 128),
    Shape(128, 8000, 64, 8, 64),
    Shape(32, 30000, 32, 8, 128),
    Shape(16, 4000, 32, 8, 128),
    Shape(128, 2000, 32, 8, 128),
)
Draw = Callable[[Shape, random.Random], list[int]]
"""The lengths of a batch; the longest is `Shape.longest`."""


def lognormal(shape: Shape, rng: random.Random) -> list[int]:
    """Median of a twelfth of the longest, sigma 1.2, and one as long as the longest."""
    drawn = [rng.lognormvariate(math.log(shape.longest / 12), 1.2) for _ in range(shape.batch - 1)]
    return [*(min(shape.longest, max(SHORTEST, round(x))) for x in drawn), shape.longest]


def uniform(shape: Shape, rng: random.Random) -> list[int]:
    """Anything from 64 to the longest, which one is."""
    drawn = [rng.randint(min(64, shape.longest), shape.longest) for _ in range(shape.batch - 1)]
    return [*drawn, shape.longest]


def bimodal(shape: Shape, rng: random.Random) -> list[int]:
    """Every eighth as long as the longest, the others 300 to 430 keys."""
    short = min(430, shape.longest)
    drawn = [rng.randint(min(300, short), short) for _ in range(shape.batch)]
    return [shape.longest if i % 8 == 0 else keys for i, keys in enumerate(drawn)]


def one_long(shape: Shape, rng: random.Random) -> list[int]:
    """One as long as the longest, the others a fortieth."""
    return [max(SHORTEST, shape.longest // 40)] * (shape.batch - 1) + [shape.longest]


DISTRIBUTIONS: Mapping[str, Draw] = {
    draw.__name__: draw for draw in (lognormal, uniform, bimodal, one_long)
}


def lengths_of(shape: Shape, draw: Draw, seed: int) -> tuple[int, ...]:
    """Lengths in an order of their own, together a multiple of the batch."""
    rng = random.Random(seed)
    lengths = draw(shape, rng)
    over = sum(lengths) % shape.batch
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i])[:-1][::-1]:
        less = min(over, lengths[i] - 1)  # of the longest but one first; the longest stays
        lengths[i] -= less
        over -= less
    rng.shuffle(lengths)
    return tuple(lengths)


def drawn(seed: int) -> Iterator[tuple[str, Shape, str]]:
    """(beginning of its name, shape, distribution) of `DRAWN` batches."""
    rng, number = random.Random(seed), 0
    while number < DRAWN:
        batch, longest = (round(math.exp(rng.uniform(*map(math.log, x)))) for x in (BATCH, LONGEST))
        shape = Shape(batch, longest, *rng.choice(HEADS), rng.choice(HEAD_DIMS))
        name = rng.choice(tuple(DISTRIBUTIONS))
        if shape.capacity_bytes <= CAPACITY_BYTES:
            yield f"mix{seed}_{number:02d}_", shape, name
            number += 1


def pair(
    name: str, shape: Shape, lengths: tuple[int, ...], place: Place, codec: Codec
) -> list[Case]:
    """The batch in equal lengths of as many bytes, and as it is, beside that."""
    ending = "" if codec == AS_IS else f"_{codec.name}"
    ending += f"_page{place.page_size}" if isinstance(place, Paged) else ""

    def problem(keys: int) -> Problem:
        dims = (shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim)
        return Problem(
            *("decode", *dims, 1, keys),
            mask=Mask(causal=True),
            place=place,
            lengths="device",
            codec=codec,
            products=DEFAULT_PRODUCTS.get(codec.name, "widened"),
        )

    equal = f"{name}_equal{ending}"
    each = sum(lengths) // shape.batch
    return [
        Case(equal, problem(each)),
        Case(f"{name}{ending}", problem(shape.longest), lengths, beside=equal),
    ]


def mixes(seed: int = 0) -> Iterator[Case]:
    """The cases of the suite: those of `SHAPES` are the same for every seed."""
    fixed = (("", shape, name) for shape, name in product(SHAPES, DISTRIBUTIONS))
    for i, (beginning, shape, name) in enumerate((*fixed, *drawn(seed))):
        heads = f"h{shape.num_heads}x{shape.num_kv_heads}_d{shape.head_dim}"
        whole = f"{beginning}b{shape.batch}_{shape.longest}_{heads}_{name}"
        lengths = lengths_of(shape, DISTRIBUTIONS[name], seed + i if beginning else i)
        shared = Codec("fp8", "head" if shape.num_kv_heads > 1 else "tensor")
        for place, codec in product(PLACES, (AS_IS, shared)):
            yield from pair(whole, shape, lengths, place, codec)


def drawn_with(name: str) -> int | None:
    """The seed of a case that was drawn, by its name; None for any other."""
    found = re.match(r"mix(\d+)_\d\d_", name)
    return int(found[1]) if found else None
