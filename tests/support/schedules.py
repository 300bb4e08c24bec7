"""The schedule of a decode step in plain Python: what kernels/schedule.py is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitkv.core.masks import Mask


@dataclass(frozen=True)
class Split:
    """Tiles of a sequence and head tile that one program has: `count` of them, `by` apart."""

    program: int
    sequence: int
    head_tile: int
    tile: int
    count: int
    by: int = 1

    @property
    def tiles(self) -> range:
        return range(self.tile, self.tile + self.count * self.by, self.by)


def num_tiles(mask: Mask, keys: int, seqlen_q: int, tile_n: int) -> int:
    """Tiles of a sequence that some query token sees, one at least."""
    seen: set[int] = set()
    for lo, hi in mask.span(seqlen_q, keys):
        seen.update(range(lo // tile_n, -(-hi // tile_n)))
    return max(1, len(seen))


def ranges(tiles: Sequence[int], head_tiles: int, programs: int, of_split: int) -> list[Split]:
    """The splits of all programs by contiguous ranges; tiles [batch], one at least. What a split
    costs stands before its tiles."""
    places = [
        (b, h, tile)
        for b, n in enumerate(tiles)
        for h in range(head_tiles)
        for tile in range(-of_split, n)
    ]
    each, more = divmod(len(places), programs)
    found, first = [], 0
    for program in range(programs):
        own = places[first : first + each + (program < more)]
        first += len(own)
        tiles_of: dict[tuple[int, int], list[int]] = {}
        for b, h, tile in own:
            if tile >= 0:
                tiles_of.setdefault((b, h), []).append(tile)
        for (b, h), mine in tiles_of.items():
            found.append(Split(program, b, h, mine[0], len(mine)))
    return found


def proportional(tiles: Sequence[int], programs: int) -> list[Split]:
    """The splits of all programs in proportion to tiles, the largest first."""
    total, spare = sum(tiles), programs - len(tiles)
    a_tile = (spare << 40) // total
    splits = [max(min((n * a_tile + (1 << 40) - 1) >> 40, n), 1) for n in tiles]
    sizes = [-(-n // by) for n, by in zip(tiles, splits, strict=True)]
    greatest = -(-total // spare)
    halved = [sum(size * by <= greatest for by in (2, 4, 8)) for size in sizes]
    found: list[Split] = []
    for b in sorted(range(len(tiles)), key=lambda b: (halved[b], b)):
        for first in range(splits[b]):
            count = len(range(first, tiles[b], splits[b]))
            found.append(Split(len(found), b, 0, first, count, splits[b]))
    return found


def expect_cover(splits: Sequence[Split], tiles: Sequence[int], head_tiles: int) -> None:
    """Every tile of every sequence and head tile is in one split."""
    places = [(x.sequence, x.head_tile, tile) for x in splits for tile in x.tiles]
    every = {
        (b, h, tile) for b, n in enumerate(tiles) for h in range(head_tiles) for tile in range(n)
    }
    assert len(places) == len(every) and set(places) == every


def cut_apart(splits: Sequence[Split], tiles: Sequence[int]) -> dict[tuple[int, int], list[Split]]:
    """The splits of each sequence and head tile that has several, in order."""
    found: dict[tuple[int, int], list[Split]] = {}
    for split in splits:
        if split.count < tiles[split.sequence]:
            found.setdefault((split.sequence, split.head_tile), []).append(split)
    return found


def merged(splits: Sequence[Split], tiles: Sequence[int], programs: int) -> list[int]:
    """Of every program the number of splits that are merged where it has the second; else 0."""
    found = [0] * programs
    for own in cut_apart(splits, tiles).values():
        assert [x.program for x in own] == [*range(own[0].program, own[0].program + len(own))]
        found[own[1].program] = len(own)
    return found


def slot_of(split: Split, programs: int) -> int:
    """Where the partial of a split is stored: tile/walk.py on the host."""
    return split.program + programs * (split.tile == 0)


def expect_slots_apart(splits: Sequence[Split], tiles: Sequence[int], programs: int) -> None:
    """No two partials have a slot, and those of a sequence and head tile are where the program of
    the second looks for them."""
    taken: list[int] = []
    for own in cut_apart(splits, tiles).values():
        second = own[1].program
        places = [second - 1 + n + programs * (n == 0) for n in range(len(own))]
        assert [slot_of(x, programs) for x in own] == places
        taken += places
    assert len(taken) == len(set(taken)) and all(0 <= slot < 2 * programs for slot in taken)
