"""The cases that every kernel is tested on: axes of a decode problem, and what has gone wrong.

`pairs` covers every pair of values of any two axes with few cases; `EDGES` are named by what is
special about them. A kernel's own `unsupported` decides which of them it sits out. `HOPPER` covers
the pairs that the kernel for Hopper does not sit out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.scores import Score

Values = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]


class Alike(tuple[Any, ...]):
    """Values of an axis that `pairs` takes for one, and the cases that have it take in turn: where
    each has a code of its own to compile and what it does is the same beside any other axis."""


def as_alike(value: Any) -> tuple[Any, ...]:
    """The values that a value of an axis stands for."""
    return value if isinstance(value, Alike) else (value,)


AXES: Axes = {
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": tuple((d, d) for d in (64, 80, 96, 112, 128, 192, 256)) + ((192, 128),),
    "group": (1, 2, 4, 7, 8, 16, 64),
    "num_kv_heads": (1, 2, 3),
    "batch": (1, 2, 3),
    "seqlen_q": (1, 2, 4, 16),
    "seqlen_k": (17, 130, 301),
    "place": (Contiguous(), Paged(1), Paged(16), Paged(48), Paged(64), Paged(256)),
    "mask": (
        Mask(causal=True),
        Mask(),
        Mask(causal=True, window_left=37),
        Mask(causal=True, window_left=20, sink_tokens=5),
        Mask(causal=True, chunk=48),
    ),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "lengths": ("host", "device"),
    "return_lse": (False, True),
}

# What the kernel for Hopper runs, so that no other decides which of it is covered.
HOPPER_AXES: Axes = {
    **AXES,
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((64, 64), (128, 128), (256, 256), (64, 128), (256, 64)),
    "group": (1, Alike((2, 4)), 7, 8, 16, Alike((32, 64))),
    "seqlen_q": (1, 2, 4, 16),
    "place": (Contiguous(), Paged(16), Paged(48), Alike((Paged(64), Paged(256)))),
    "mask": tuple(mask for mask in AXES["mask"] if not mask.chunk),
}
HOPPER_ROWS, HOPPER_NARROW_ROWS = 64, 32  # narrow: quantised, head_dim above 128

CODECS = tuple(
    Codec(name, granularity)
    for name in ("int8", "fp8")
    for granularity in ("tensor", "head", "token")
)
# One scale for all heads is read as one a head is.
CODECS_ALIKE = tuple(
    value
    for name in ("int8", "fp8")
    for value in (Alike((Codec(name, "tensor"), Codec(name, "head"))), Codec(name, "token"))
)
QUANTIZED_AXES: Axes = {
    "codec": CODECS,
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((64, 64), (128, 128), (192, 128)),
    "group": (1, 7, 8),
    "num_kv_heads": (2,),
    "batch": (2,),
    "seqlen_q": (1, 4),
    "seqlen_k": (130,),
    "place": (Contiguous(), Paged(1), Paged(16)),
    "mask": (Mask(causal=True), Mask(causal=True, window_left=20, sink_tokens=5)),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "lengths": ("host", "device"),
    "return_lse": (False, True),
}
# What the kernel for Hopper runs of them.
HOPPER_QUANTIZED_AXES: Axes = {
    **QUANTIZED_AXES,
    "codec": CODECS_ALIKE,
    "head_dims": ((64, 64), (128, 128), (256, 256), (128, 64)),
    "group": (1, 7, 8, 16, 32),
    "products": ("widened", "half"),
    "seqlen_k": (130, 301),
    "place": (Contiguous(), Paged(16), Paged(48), Alike((Paged(64), Paged(256)))),
}
# `AXES` in so few cases that a GPU may compile each of them for several kernels.
FEW_AXES: Axes = {
    **AXES,
    "head_dims": (
        *((64, 64), (128, 128), (256, 256), (192, 128)),
        Alike((d, d) for d in (80, 96, 112, 192)),
    ),
    "group": (1, Alike((2, 4)), 7, 8, 16, 64),
    "place": (Contiguous(), Paged(1), Paged(16), Paged(48), Alike((Paged(64), Paged(256)))),
}


def leading(
    cases: Sequence[Values],
    most: int,
    besides: Sequence[Values] = (),
    work: Callable[[Values], float] = lambda values: 1.0,
) -> tuple[list[Values], int]:
    """`most` of these cases, led by those, as many as the number says, that hold every value.

    Each next case is the one with most values that none before it has, then most pairs, for the
    work that it is.

    besides   cases that are there already: their values and pairs need no other
    """

    def held(case: Values) -> tuple[Values, set[Any], set[frozenset[Any]]]:
        values = {(name, repr(x)) for name, x in case.items()}
        return case, values, set(map(frozenset, combinations(values, 2)))

    rest, there = [held(case) for case in cases], [held(case) for case in besides]
    missing = set().union(*(values for _, values, _ in rest))
    missing -= set().union(*(values for _, values, _ in there))
    paired = set().union(*(pairs for _, _, pairs in there))
    chosen: list[Values] = []
    every = 0
    while rest and len(chosen) < most:
        news = [
            (len(values & missing) / work(case), len(pairs - paired) / work(case))
            for case, values, pairs in rest
        ]
        picked = rest[news.index(max(news))]
        rest.remove(picked)
        chosen.append(picked[0])
        missing -= picked[1]
        paired |= picked[2]
        every = every or len(chosen) * (not missing)
    if missing:
        raise ValueError(f"most: expected enough cases for every value, got {most}: no {missing}")
    return chosen, every


@dataclass(frozen=True)
class Case:
    """A named problem and how its operands are made; `options` go to `make_operands`."""

    name: str
    problem: Problem
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def pairs(axes: Axes, valid: Callable[[Values], bool] = lambda values: True) -> list[Values]:
    """A covering array: every pair of values of two axes is in a case, unless no valid case has it.

    `valid` sees partial cases too and must be monotone: what it refuses stays refused when more
    values are added. Greedy and deterministic. Of values `Alike` any one stands for all.
    """
    if any(isinstance(value, Alike) for values in axes.values() for value in values):
        return _in_turns(axes, valid)
    uncovered: dict[frozenset[tuple[str, int]], None] = {
        frozenset({(a, i), (b, j)}): None
        for a, b in combinations(axes, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    cases = []
    while uncovered:
        seed = next(iter(uncovered))
        chosen = _extend(dict(sorted(seed)), axes, valid, uncovered)
        if chosen is None:  # no valid case has this pair
            del uncovered[seed]
            continue
        for pair in combinations(chosen.items(), 2):
            uncovered.pop(frozenset(pair), None)
        cases.append({name: axes[name][chosen[name]] for name in axes})
    return cases


def _in_turns(axes: Axes, valid: Callable[[Values], bool]) -> list[Values]:
    """`pairs` of axes that have values `Alike`."""
    numbers = {name: range(len(values)) for name, values in axes.items()}
    taken = Counter[tuple[str, Any]]()

    def each(at: Values) -> Iterator[Values]:
        """Every choice of one of those alike, the least used first."""
        options = [
            sorted(as_alike(axes[name][i]), key=lambda value, name=name: taken[name, value])
            for name, i in at.items()
        ]
        return (dict(zip(at, choice, strict=True)) for choice in product(*options))

    found = pairs(numbers, lambda at: any(map(valid, each(at))))
    cases = []
    for at in found:
        cases.append(next(filter(valid, each(at))))
        taken.update(cases[-1].items())
    return cases


def _extend(
    chosen: dict[str, int],
    axes: Axes,
    valid: Callable[[Values], bool],
    uncovered: Mapping[frozenset[tuple[str, int]], None],
) -> dict[str, int] | None:
    """A valid case that contains `chosen`, each further value the one with most new pairs."""
    if not valid({name: axes[name][i] for name, i in chosen.items()}):
        return None
    rest = [name for name in axes if name not in chosen]
    if not rest:
        return chosen

    def gain(i: int) -> tuple[int, int]:
        new = sum(frozenset({(rest[0], i), c}) in uncovered for c in chosen.items())
        # Among equals the values take turns, so that axes met early do not stay at their first.
        return new, -((i - len(uncovered)) % len(axes[rest[0]]))

    for i in sorted(range(len(axes[rest[0]])), key=gain, reverse=True):
        found = _extend(chosen | {rest[0]: i}, axes, valid, uncovered)
        if found is not None:
            return found
    return None


def decode_problem(values: Values) -> Problem:
    """The problem of one combination of values of `AXES` or `QUANTIZED_AXES`."""
    values = dict(values)
    head_dim, head_dim_v = values.pop("head_dims")
    score = Score(softcap=values.pop("softcap"), alibi=values.pop("alibi"))
    num_heads = values["num_kv_heads"] * values.pop("group")
    return Problem(
        kind="decode",
        num_heads=num_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        score=score,
        **values,
    )


def few_rows(values: Values) -> bool:
    """No more rows than the kernel for Hopper takes."""
    narrow = "codec" in values and max(values.get("head_dims", (0,))) > 128
    most = HOPPER_NARROW_ROWS if narrow else HOPPER_ROWS
    return values.get("group", 1) * values.get("seqlen_q", 1) <= most


def pairwise(
    axes: Axes, prefix: str, valid: Callable[[Values], bool] = lambda values: True
) -> Iterator[Case]:
    for n, values in enumerate(pairs(axes, valid)):
        problem = decode_problem(values)
        strided = {"strided": True} if n % 3 == 2 else {}
        yield Case(f"{prefix}{n:02d}", problem, strided)


_PLAIN = Problem(
    kind="decode",
    batch=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
    seqlen_q=1,
    seqlen_k=130,
    mask=Mask(causal=True),
    lengths="device",
    return_lse=True,
)


def _edge(name: str, lengths: Sequence[int] | None = None, **changes: Any) -> Case:
    options = {} if lengths is None else {"lengths": tuple(lengths)}
    return Case(name, replace(_PLAIN, **changes), options)


EDGES: tuple[Case, ...] = (
    _edge("zero_length_sequence", (130, 0)),
    _edge("all_sequences_empty", (0, 0)),
    _edge("all_rows_masked_with_sink_logits", (0, 0), sink_logits=True),
    _edge("zero_length_paged", (0, 130), place=Paged(16), sink_logits=True),
    _edge("more_queries_than_keys", (3, 130), seqlen_q=16),
    _edge("more_queries_than_keys_sink_logits", (0, 5), seqlen_q=16, sink_logits=True),
    _edge("more_queries_than_keys_window", (7, 2), seqlen_q=8, mask=Mask(True, 2, -1, 1)),
    _edge("one_key", (1, 1), seqlen_k=1),
    _edge("one_key_of_many", (1, 130)),
    _edge("seven_heads_per_kv_head", num_heads=28, num_kv_heads=4),
    _edge("seven_heads_per_kv_head_prompt", num_heads=28, num_kv_heads=4, seqlen_q=3),
    _edge("sixty_four_heads_per_kv_head", num_heads=64, num_kv_heads=1, seqlen_q=2),
    _edge("page_size_1", place=Paged(1)),
    _edge("page_size_not_a_power_of_two", place=Paged(3)),
    _edge("page_larger_than_sequence", (5, 130), place=Paged(256)),
    _edge("last_page_full", (64, 128), place=Paged(64), seqlen_k=128),
    _edge("last_page_one_key", (65, 129), place=Paged(64)),
    _edge("window_of_own_key", mask=Mask(causal=True, window_left=0)),
    _edge("window_smaller_than_tile", mask=Mask(causal=True, window_left=3), seqlen_q=4),
    _edge("window_inside_tile_of_keys", (40, 100), mask=Mask(causal=True, window_left=5)),
    _edge("window_larger_than_sequence", mask=Mask(causal=True, window_left=4096)),
    _edge("window_to_the_right", mask=Mask(window_left=9, window_right=2), seqlen_q=8),
    _edge("window_to_the_right_only", mask=Mask(window_right=0), seqlen_q=8),
    _edge("sink_tokens_past_the_end", (130, 9), mask=Mask(True, 20, -1, 500)),
    _edge("sink_tokens_touch_window", (30, 25), mask=Mask(True, 20, -1, 5), seqlen_q=4),
    _edge("sink_tokens_past_causal_edge", (3, 2), mask=Mask(True, 0, -1, 4), seqlen_q=3),
    _edge("sink_tokens_without_window", mask=Mask(True, -1, -1, 4)),
    _edge("sink_tokens_paged", (130, 60), mask=Mask(True, 8, -1, 5), place=Paged(16), seqlen_q=4),
    _edge("chunk_that_begins", (65, 64), mask=Mask(True, chunk=64)),
    _edge("chunk_across_queries", (130, 33), mask=Mask(True, chunk=32), seqlen_q=4),
    _edge("chunk_of_the_future", (130, 30), mask=Mask(chunk=20), seqlen_q=8),
    _edge("chunk_and_window", (130, 60), mask=Mask(True, 9, -1, 3, 16), place=Paged(16)),
    _edge("chunk_before_the_first_key", (3, 130), mask=Mask(True, chunk=4), seqlen_q=16),
    _edge("chunk_larger_than_sequence", mask=Mask(True, chunk=8192)),
    _edge("both_sinks", mask=Mask(True, 20, -1, 4), sink_logits=True, seqlen_q=2),
    _edge("score_modifiers_and_window", score=Score(True, True), mask=Mask(True, 30)),
    _edge("split_edges", (127, 129), seqlen_k=129),
    _edge("one_long_many_short", (1, 700, 3, 2), batch=4, seqlen_k=700),
    _edge("no_lse", return_lse=False, sink_logits=True),
)

PAIRWISE: tuple[Case, ...] = tuple(pairwise(AXES, "pair"))
FEW: tuple[Case, ...] = tuple(pairwise(FEW_AXES, "few"))
HOPPER: tuple[Case, ...] = tuple(pairwise(HOPPER_AXES, "hopper", few_rows))
QUANTIZED: tuple[Case, ...] = tuple(pairwise(QUANTIZED_AXES, "quantized"))
HOPPER_QUANTIZED: tuple[Case, ...] = tuple(
    pairwise(HOPPER_QUANTIZED_AXES, "hopper_quantized", few_rows)
)
DECODE: tuple[Case, ...] = PAIRWISE + QUANTIZED + EDGES
