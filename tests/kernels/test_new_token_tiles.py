"""Which tiles of a split hold new tokens, as the roles of persistent decode on Hopper agree on it.

Gluon cannot be interpreted, so device functions run with numbers in the place of its language.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitkv.kernels.hopper.decode import write_role
from splitkv.kernels.hopper.decode.records import Split
from splitkv.kernels.tile import new
from splitkv.kernels.tile.new import Grown, NewTokens, Tiles

TILE_N = 4
LANGUAGE = SimpleNamespace(maximum=max, minimum=min, where=lambda c, yes, no: yes if c else no)
EVERYWHERE = Tiles(0, 1 << 30, 1, 1 << 30, 0)


@pytest.fixture(scope="module", autouse=True)
def numbers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(write_role, "gl", LANGUAGE)
        patched.setattr(write_role, "length_of", lambda split, step: step)
        patched.setattr(new, "tl", LANGUAGE)
        patched.setattr(new, "reaches", new.reaches.fn)
        yield


def tiles_of(tiles: Tiles) -> list[int]:
    return [
        i if i < tiles.near else i + tiles.skip for i in range(tiles.first, tiles.last, tiles.by)
    ]


@given(
    first=st.integers(0, 6),
    count=st.integers(0, 5),
    by=st.integers(1, 3),
    near=st.integers(0, 4),
    skip=st.integers(0, 4),
    before=st.integers(0, 40),
    added=st.integers(1, 9),
)
def test_tiles_before_new_tokens(
    first: int, count: int, by: int, near: int, skip: int, before: int, added: int
) -> None:
    tiles = Tiles(first, first + count * by, by, near, skip)
    length = Grown(before, added, 0, before + added)
    split = Split(0, 0, tiles, length.keys, 1)
    config = SimpleNamespace(tile_n=TILE_N)
    ahead, rest = write_role.tiles_before_new.fn(split, length, config)
    assert tiles_of(ahead.tiles) + tiles_of(rest.tiles) == tiles_of(tiles)
    assert all((tile + 1) * TILE_N <= before for tile in tiles_of(ahead.tiles))

    tokens = NewTokens(None, None, None, length, EVERYWHERE, None, None, None, None)
    with_new = range(before // TILE_N, (length.keys - 1) // TILE_N + 1)
    if set(with_new) & set(tiles_of(tiles)):
        assert new.has_new.fn(tokens, tiles, TILE_N), "nobody would write them"
