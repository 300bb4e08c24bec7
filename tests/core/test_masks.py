"""Bands, matrix and predicate of a mask are one thing, on every small shape."""

from __future__ import annotations

from itertools import product

import pytest

from splitkv.core.masks import Mask

MASKS = [
    *(
        Mask(causal, left, right, sink_tokens)
        for causal, left, right, sink_tokens in product(
            (False, True), (-1, 0, 1, 3, 9), (-1, 0, 2, 9), (0, 1, 2, 5, 20)
        )
    ),
    *(
        Mask(causal, left, right, sink_tokens, chunk)
        for causal, left, right, sink_tokens, chunk in product(
            (False, True), (-1, 1), (-1, 2), (0, 2, 5), (1, 3, 4, 9)
        )
    ),
]
SHAPES = list(product(range(8), range(8)))


def by_hand(mask: Mask, i: int, j: int, seqlen_q: int, seqlen_k: int) -> bool:
    """The wording of the semantics, without the properties of `Mask`."""
    pos = seqlen_k - seqlen_q + i
    if mask.causal and j > pos:
        return False
    if not mask.causal and mask.window_right >= 0 and j > pos + mask.window_right:
        return False
    chunk, own = (n // mask.chunk if mask.chunk else 0 for n in (j, pos))
    if chunk > own:
        return False
    if chunk == own and (mask.window_left < 0 or j >= pos - mask.window_left):
        return True
    return j < mask.sink_tokens


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{m} right={m.window_right}")
def test_bands_and_matrix_agree(mask: Mask) -> None:
    for seqlen_q, seqlen_k in SHAPES:
        matrix = mask.materialize(seqlen_q, seqlen_k)
        assert len(matrix) == seqlen_q
        seen = set()
        for i, row in enumerate(matrix):
            assert row == [by_hand(mask, i, j, seqlen_q, seqlen_k) for j in range(seqlen_k)]
            bands = mask.bands(seqlen_k - seqlen_q + i, seqlen_k)
            assert len(bands) <= mask.num_bands
            assert all(0 <= lo < hi <= seqlen_k for lo, hi in bands)
            keys = [j for lo, hi in bands for j in range(lo, hi)]
            assert keys == [j for j in range(seqlen_k) if row[j]], (seqlen_q, seqlen_k, i)
            seen.update(keys)
        span = mask.span(seqlen_q, seqlen_k)
        assert len(span) <= mask.num_bands
        read = [j for lo, hi in span for j in range(lo, hi)]
        assert read == sorted(seen), (seqlen_q, seqlen_k)
        assert mask.num_keys(seqlen_q, seqlen_k) == len(seen)
        assert mask.num_pairs(seqlen_q, seqlen_k) == sum(map(sum, matrix))


def test_two_bands_do_not_touch() -> None:
    """The gap between the bands is what is not read: touching bands are one."""
    for mask, (seqlen_q, seqlen_k) in product(MASKS, SHAPES):
        for bands in (
            *(mask.bands(pos, seqlen_k) for pos in range(-seqlen_q, seqlen_k)),
            mask.span(seqlen_q, seqlen_k),
        ):
            if len(bands) == 2:
                assert bands[0][1] < bands[1][0]


def test_reads_follow_the_window_and_not_the_cache() -> None:
    mask = Mask(causal=True, window_left=127, sink_tokens=4)
    assert mask.num_keys(1, 1_000_000) == 132
    assert mask.num_keys(16, 1_000_000) == 147
    assert Mask(causal=True).num_keys(1, 1_000_000) == 1_000_000


@pytest.mark.parametrize("mask", [m for m in MASKS if m.chunk], ids=str)
def test_the_longest_is_the_one_with_most_keys(mask: Mask) -> None:
    """Of shorter sequences more keys are read, where theirs end a chunk."""
    for seqlen_q, seqlen_k in product((1, 2, 5), range(30)):
        longest = mask.longest(seqlen_q, seqlen_k)
        most = max(mask.num_keys(seqlen_q, n) for n in range(seqlen_k + 1))
        assert longest <= seqlen_k and mask.num_keys(seqlen_q, longest) == most


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Mask(), "full"),
        (Mask(causal=True), "causal"),
        (Mask(causal=True, window_left=127), "causal window(127, -1)"),
        (Mask(window_left=3, window_right=0), "window(3, 0)"),
        (Mask(causal=True, window_left=7, sink_tokens=4), "causal window(7, -1) sink_tokens(4)"),
        (Mask(causal=True, sink_tokens=4), "causal"),
        (Mask(causal=True, chunk=8192), "causal chunk(8192)"),
        (Mask(True, 7, -1, 4, 16), "causal window(7, -1) chunk(16) sink_tokens(4)"),
    ],
)
def test_prints_what_has_an_effect(mask: Mask, text: str) -> None:
    assert str(mask) == text


@pytest.mark.parametrize("causal", [False, True])
def test_edges_that_nothing_meets_are_left_out(causal: bool) -> None:
    """`within` keeps what every query sees of every shorter sequence, too."""
    for left, right, sinks, chunk in product((-1, 0, 3, 6, 7), (-1, 0, 4, 5), (0, 2), (0, 4)):
        mask = Mask(causal, left, right, sinks, chunk)
        same = mask.within(6, 7)
        for seqlen_q, seqlen_k in product(range(7), range(8)):
            assert same.materialize(seqlen_q, seqlen_k) == mask.materialize(seqlen_q, seqlen_k)
    assert Mask(True, 6, 0, 2).within(6, 7) == Mask(True, -1, 0)
    assert Mask(True, 5, 0, 2).within(6, 7) == Mask(True, 5, 0, 2)
    assert Mask(False, 6, 5).within(6, 7).is_full
    assert Mask(False, 6, 4).within(6, 7) == Mask(False, -1, 4)


def test_arguments_make_the_mask_again() -> None:
    for mask in MASKS:
        assert Mask.of(**mask.arguments) == mask
    far = Mask(True, 1 << 70, 3, 0, 1 << 70)
    assert Mask.of(**far.arguments) == Mask(causal=True, window_right=3)


def test_a_kernel_is_told_of_bounds_that_it_does_not_have() -> None:
    mask = Mask(True, 9, -1, 4, 64)
    assert mask.beyond("sink_tokens", "attention_chunk") == []
    assert mask.beyond("sink_tokens") == ["attention_chunk 64: expected 0"]
    assert mask.beyond() == ["sink_tokens 4: expected 0", "attention_chunk 64: expected 0"]
