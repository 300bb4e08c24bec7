"""The device functions of `kernels/tile` on their own, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import ceil

import pytest
import torch
import triton
import triton.language as tl

from splitkv.core.masks import Mask
from splitkv.kernels.tile.band import Bounds, all_visible, visited_tiles
from splitkv.kernels.tile.codec import e4m3
from splitkv.kernels.tile.product import add_product_compensated, empty_sum
from splitkv.kernels.tile.score import tanh
from splitkv.kernels.tile.share import Share, batch_share

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
MASKS = (
    *(Mask(), Mask(causal=True), Mask(window_right=2), Mask(window_left=9, window_right=2)),
    *(Mask(True, 0), Mask(True, 20), Mask(True, 20, -1, 5), Mask(True, 3, -1, 40)),
    *(Mask(True, chunk=24), Mask(chunk=7, sink_tokens=3), Mask(True, 20, chunk=32)),
)


@triton.jit
def visit(out_ptr, left, right, sink_tokens, chunk, seqlen_q, keys, TILE_N: tl.constexpr):
    pos, bounds = keys - seqlen_q, Bounds(left, right, sink_tokens, chunk)
    count, near, skip = visited_tiles(bounds, pos, pos + seqlen_q - 1, keys, TILE_N)
    tl.store(out_ptr, count)
    tl.store(out_ptr + 1, near)
    tl.store(out_ptr + 2, skip)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visited_tiles_are_those_with_a_visible_key(mask: Mask) -> None:
    tile_n = 16
    for seqlen_q, keys in product((1, 3, 16), (0, 1, 2, 15, 16, 17, 48, 70)):
        out = torch.zeros(3, dtype=torch.int32)
        visit[(1,)](out, *mask.bounds, seqlen_q, keys, tile_n)
        count, near, skip = out.tolist()
        seen = mask.materialize(seqlen_q, keys)
        tiles = {key // tile_n for row in seen for key, visible in enumerate(row) if visible}
        visited = [i if i < near else i + skip for i in range(count)]
        assert visited == sorted(set(visited)), (seqlen_q, keys)
        assert tiles <= set(visited), (seqlen_q, keys)
        assert len(visited) <= len(tiles) + (not tiles), (seqlen_q, keys)


@triton.jit
def say_visible(out_ptr, left, right, sink_tokens, chunk, seqlen_q, keys, TILE_N: tl.constexpr):
    pos, bounds = keys - seqlen_q, Bounds(left, right, sink_tokens, chunk)
    for i in range((keys + TILE_N - 1) // TILE_N):
        said = all_visible(bounds, pos, pos + seqlen_q - 1, keys, i * TILE_N, TILE_N)
        tl.store(out_ptr + i, tl.cast(said, tl.int32))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_whose_keys_all_rows_see_are_told(mask: Mask) -> None:
    """But for those that only sink tokens make so."""
    tile_n = 16
    banded = replace(mask, sink_tokens=0)
    for seqlen_q, keys in product((1, 3, 16), (1, 15, 16, 17, 48, 70)):
        tiles = range(ceil(keys / tile_n))
        out = torch.full((len(tiles),), -1, dtype=torch.int32)
        say_visible[(1,)](out, *mask.bounds, seqlen_q, keys, tile_n)
        rows = banded.materialize(seqlen_q, keys)
        ends = [(i * tile_n, (i + 1) * tile_n) for i in tiles]
        seen = [b <= keys and all(all(row[a:b]) for row in rows) for a, b in ends]
        assert out.tolist() == [int(x) for x in seen], (seqlen_q, keys)


@triton.jit
def deal(out_ptr, lens_ptr, left, right, programs, batch, TILE_N: tl.constexpr, P2: tl.constexpr):
    offs_b = tl.arange(0, P2)
    rule = Share(None, None, programs), Bounds(left, right, None)
    keys = tl.load(lens_ptr + offs_b, mask=offs_b < batch, other=0)
    parts = batch_share(*rule, keys, batch, 1, 0, 0, offs_b, TILE_N)
    tl.store(out_ptr + offs_b, parts)


@pytest.mark.parametrize("left", [None, 40])
@pytest.mark.parametrize("extra", [1, 5, 132])
@pytest.mark.parametrize(
    "lengths",
    [(0,), (70,), (0, 0, 0), (1, 1000, 1), (500, 500, 500), (16, 17, 31, 32, 33)],
    ids=str,
)
def test_programs_are_dealt_out_by_length(
    lengths: tuple[int, ...], extra: int, left: int | None
) -> None:
    """A sequence gets its share of the programs, rounded up, but no part without a tile."""
    batch, tile_n = len(lengths), 16
    padded, programs = triton.next_power_of_2(batch), batch + extra
    out = torch.full((padded,), -1, dtype=torch.int32)
    lens = torch.tensor([*lengths, *[7] * (padded - batch)], dtype=torch.int32)
    deal[(1,)](out, lens, left, 0, programs, batch, tile_n, padded)
    spans = [Mask(True, -1 if left is None else left).span(1, n) for n in lengths]
    tiles = [sum(-(-hi // tile_n) - lo // tile_n for lo, hi in span) for span in spans]
    shares = [Fraction(n * extra, max(1, sum(tiles))) for n in tiles]
    expected = [max(1, min(ceil(share), n)) for share, n in zip(shares, tiles, strict=True)]
    assert out.tolist() == expected + [0] * (padded - batch)
    assert sum(expected) <= programs


@triton.jit
def apply_tanh(out_ptr, x_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out_ptr + offs, tanh(tl.load(x_ptr + offs)))


def test_tanh_is_exact_to_rounding() -> None:
    magnitudes = torch.logspace(-8, 3, 2048)
    x = torch.cat([magnitudes, -magnitudes])
    out = torch.empty_like(x)
    apply_tanh[(1,)](out, x, x.numel())
    exact = torch.tanh(x.double())
    assert ((out.double() - exact).abs() / exact.abs()).max() < 8 * torch.finfo(x.dtype).eps


@triton.jit
def apply_e4m3(out_ptr, bits_ptr):
    offs = tl.arange(0, 256)
    tl.store(out_ptr + offs, e4m3(tl.load(bits_ptr + offs)))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_every_pattern_of_e4m3() -> None:
    bits, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=torch.float16)
    apply_e4m3[(1,)](out, bits)
    exact = bits.view(torch.float8_e4m3fn).half()
    number = ~exact.isnan()
    assert number.sum() == 254 and out[~number].isnan().all()
    assert torch.equal(out[number].view(torch.int16), exact[number].view(torch.int16))


@triton.jit
def sum_products(out_ptr, a_ptr, b_ptr, count, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = empty_sum(tl.load(a_ptr + offs), SIZE, SIZE)
    for i in range(count):
        a = tl.load(a_ptr + i * SIZE * SIZE + offs)
        b = tl.load(b_ptr + i * SIZE * SIZE + offs)
        total = add_product_compensated(total[0], total[1], a, b)
    tl.store(out_ptr + offs, total[0])


def test_rounding_of_a_compensated_sum_does_not_grow() -> None:
    """Over 1500 tiles, whose partial sums grow: a plain sum of the same is off by far more."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 1500, 16, 16, generator=g)
    out = torch.empty(16, 16)
    sum_products[(1,)](out, a, b, len(a), 16)
    plain = torch.zeros(16, 16)
    for x, y in zip(a, b, strict=True):
        plain += x @ y
    exact = (a.double() @ b.double()).sum(0)
    error, plain_error = ((x.double() - exact).abs().max().item() for x in (out, plain))
    ulp = torch.finfo(torch.float32).eps * exact.max().item()
    assert error <= ulp, error / ulp
    assert plain_error > 8 * ulp, plain_error / ulp
