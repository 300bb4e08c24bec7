"""Which keys a query may see: one or two intervals of key positions a row.

A query of a sequence with `seqlen_q` queries and `seqlen_k` keys stands at key position
`pos = seqlen_k - seqlen_q + i` (bottom-right alignment). Every mask here is a union of at most two
half-open intervals, the bands: `[0, sink_tokens)` and the window around `pos`, which may end where
the chunk of `pos` does. Kernels receive the bounds of the bands, never a matrix; `materialize()` is
the matrix, for tests and pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from splitkv.core.errors import MAX_SIZE, expect, expect_at_least, expect_bool, expect_int
from splitkv.core.values import Value

UNBOUNDED = -1
FAR = MAX_SIZE + 1  # keys: no sequence is as long, and kernels add edges to positions in 32 bits
NUMBERS = {"sink_tokens": "sink_tokens", "attention_chunk": "chunk"}
"""Arguments of the public functions that are a number of keys, 0 where they say nothing, and the
fields of `Mask` that they become."""


class MaskBounds(NamedTuple):
    """The bounds of the keys that a query sees, relative to it: see `Mask`; None: no bound."""

    left: int | None
    right: int | None
    sink_tokens: int | None
    chunk: int | None


@dataclass(frozen=True, slots=True)
class Mask(Value):
    """A causal, windowed, chunked or full mask; `window_size` counts keys to each side, -1 is
    unbounded.

    causal       a query sees no key after its own position
    window_left  keys from `pos - window_left`, inclusive; -1: from the first key
    window_right keys to `pos + window_right`, inclusive; -1: to the last key
    sink_tokens  the first keys stay visible whatever the window's left edge says (StreamingLLM)
    chunk        positions go in chunks of this many, and a query sees its own only; 0: one chunk
    """

    causal: bool = False
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    sink_tokens: int = 0
    chunk: int = 0

    @classmethod
    def of(cls, causal: Any, window_size: Any, **numbers: Any) -> Mask:
        """Checks the arguments of a public function, and makes a mask without edges that are FAR.

        numbers   each of NUMBERS
        """
        expect_bool("causal", causal)
        expect_window(window_size)
        for side, keys in zip(("left", "right"), window_size, strict=True):
            expect_int(f"window_size {side}", keys)
            expect_at_least(f"window_size {side}", keys, UNBOUNDED)
        for name in NUMBERS:
            expect_int(name, numbers[name])
            expect_at_least(name, numbers[name], 0)
        left, right = map(int, window_size)
        fields = {NUMBERS[name]: int(keys) for name, keys in numbers.items()}
        return cls(causal, left, right, **fields).within_reach()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a public function that make this mask."""
        numbers = {name: getattr(self, field) for name, field in NUMBERS.items()}
        window_size = self.window_left, self.window_right
        return {"causal": self.causal, "window_size": window_size, **numbers}

    def beyond(self, *numbers: str) -> list[str]:
        """Reasons against a mask of a kernel that has causality, windows and these of NUMBERS."""
        beyond = {name: field for name, field in NUMBERS.items() if name not in numbers}
        given = ((name, getattr(self, field)) for name, field in beyond.items())
        return [f"{name} {keys}: expected 0" for name, keys in given if keys]

    @property
    def left(self) -> int | None:
        """Keys visible before the query's own position; None where unbounded."""
        return None if self.window_left == UNBOUNDED else self.window_left

    @property
    def right(self) -> int | None:
        """Keys visible after the query's own position; None where unbounded."""
        if self.causal:
            return 0
        return None if self.window_right == UNBOUNDED else self.window_right

    @property
    def num_bands(self) -> int:
        return 2 if self.sink_tokens and (self.chunk or self.left is not None) else 1

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None and not self.chunk

    @property
    def bounds(self) -> MaskBounds:
        """The bounds of the bands, each None where it bounds nothing."""
        sink_tokens = self.sink_tokens if self.num_bands == 2 else None
        return MaskBounds(self.left, self.right, sink_tokens, self.chunk or None)

    def within_reach(self) -> Mask:
        """Drops edges that are `FAR`."""
        left, right = (UNBOUNDED if x >= FAR else x for x in (self.window_left, self.window_right))
        chunk = 0 if self.chunk >= FAR else self.chunk
        return Mask(self.causal, left, right, min(self.sink_tokens, FAR), chunk)

    def within(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """Drops the edges that none of at most so many queries and keys meets: a window as long
        as the sequence is causal or full."""
        near = self.window_left >= seqlen_k - 1, self.window_right >= seqlen_q - 1
        return self.without(left=near[0], right=near[1])

    def without(self, *, left: bool, right: bool) -> Mask:
        """Drops edges of the window that no query meets."""
        window_left, window_right = self.window_left, self.window_right
        sink_tokens = self.sink_tokens
        if left:
            window_left = UNBOUNDED
            sink_tokens = sink_tokens if self.chunk else 0
        if right and not self.causal:
            window_right = UNBOUNDED
        return Mask(self.causal, window_left, window_right, sink_tokens, self.chunk)

    def window(self, pos: int, seqlen_k: int) -> tuple[int, int]:
        """The second band of a query at key position `pos`, sink tokens aside; may be empty."""
        hi = seqlen_k if self.right is None else min(seqlen_k, pos + self.right + 1)
        lo = 0 if self.left is None else max(0, pos - self.left)
        if self.chunk:
            start = pos // self.chunk * self.chunk
            lo, hi = max(lo, start), min(hi, start + self.chunk)
        return lo, hi

    def bands(self, pos: int, seqlen_k: int) -> tuple[tuple[int, int], ...]:
        """The disjoint, non-empty intervals `[lo, hi)` that a query at key position `pos` sees."""
        lo, hi = self.window(pos, seqlen_k)
        bands = [(0, min(self.sink_tokens, lo, hi))] if self.num_bands == 2 else []
        if bands and self.sink_tokens >= lo:
            bands, lo = [], 0
        bands.append((lo, hi))
        return tuple((a, b) for a, b in bands if a < b)

    def span(self, seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, int], ...]:
        """The disjoint intervals of keys that some query sees: what has to be read."""
        return _span(self, seqlen_q, seqlen_k)

    def longest(self, seqlen_q: int, seqlen_k: int) -> int:
        """Finds the length up to `seqlen_k` of which `seqlen_q` queries see most keys.

        With chunks that is not the greatest: they see the fewest right after one begins.
        """
        if not self.chunk:
            return seqlen_k
        before = max(seqlen_q, 1) - 1  # the first query ends its chunk, the others begin the next
        whole = max(0, seqlen_k - before) // self.chunk * self.chunk
        ending = min(whole + before, seqlen_k)
        return max(seqlen_k, ending, key=lambda n: self.num_keys(seqlen_q, n))

    def num_keys(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many keys are seen by at least one query: what decode has to read."""
        if self.left is None and not self.chunk and seqlen_q > 0:
            return max(seqlen_k, 0)
        return sum(b - a for a, b in self.span(seqlen_q, seqlen_k))

    def num_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many pairs there are of a query and a key that it sees."""
        first, chunk = seqlen_k - seqlen_q, self.chunk
        if not chunk:
            return self._pairs_from(0, first, seqlen_q, seqlen_k)
        seen = 0
        for start in range(max(first, 0) // chunk * chunk, seqlen_k, chunk):
            end, begin = min(start + chunk, seqlen_k), max(start, first)
            seen += self._pairs_from(start, begin - start, end - begin, end - start)
        return seen

    def _pairs_from(self, start: int, first: int, count: int, keys: int) -> int:
        """Counts pairs of the queries at `first, first + 1, ..` after `start` with the `keys` keys
        from there on, and with sink tokens before it."""
        seen = keys * count
        if self.right is not None:
            seen = clamped_sum(first + self.right + 1, count, keys)
        if self.left is not None:
            seen -= clamped_sum(first - self.left, count, keys)
            near = max(min(self.sink_tokens - start, keys), 0)
            seen += clamped_sum(first - self.left, count, near)
        return seen + min(self.sink_tokens, start) * count

    def visible(self, pos: Any, key: Any, sink_tokens: Any = None) -> Any:
        """The mask as a predicate, on integers or on broadcastable integer tensors.

        sink_tokens   in the place of the mask's own, which are then no more than a bound of these
        """
        near = self.sink_tokens if sink_tokens is None else sink_tokens
        seen: Any = key >= 0
        if self.right is not None:
            seen = seen & (key <= pos + self.right)
        if self.left is not None:
            seen = seen & ((key >= pos - self.left) | (key < near))
        if self.chunk:
            start = pos - pos % self.chunk
            seen = seen & (key < start + self.chunk)
            seen = seen & ((key >= start) | (key < near))
        return seen

    def materialize(self, seqlen_q: int, seqlen_k: int) -> list[list[bool]]:
        """The mask as `[seqlen_q][seqlen_k]` booleans, True where visible."""
        shift = seqlen_k - seqlen_q
        return [
            [bool(self.visible(i + shift, j)) for j in range(seqlen_k)] for i in range(seqlen_q)
        ]

    def __str__(self) -> str:
        parts = ["causal"] if self.causal else []
        if self.left is not None or (self.right is not None and not self.causal):
            parts.append(f"window({self.window_left}, {self.window_right})")
        if self.chunk:
            parts.append(f"chunk({self.chunk})")
        if self.num_bands == 2:
            most = "any" if self.sink_tokens >= FAR else self.sink_tokens
            parts.append(f"sink_tokens({most})")
        return " ".join(parts) or "full"


def expect_window(window_size: Any) -> None:
    """Raises for what is no pair, of whatever."""
    pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    expect(pair, "window_size", "(left, right)", window_size)


@lru_cache(maxsize=1024)  # a policy asks for the same ones with every shape of tile that it weighs
def _span(mask: Mask, seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, int], ...]:
    if seqlen_q <= 0 or seqlen_k <= 0:
        return ()
    first, last = seqlen_k - seqlen_q, seqlen_k - 1
    hi = max(0, mask.window(last, seqlen_k)[1])
    lo = min(mask.window(first, seqlen_k)[0], hi)
    bands = [(0, min(mask.sink_tokens, hi))] if mask.num_bands == 2 else []
    if bands and mask.sink_tokens >= lo:
        bands, lo = [], 0
    bands.append((lo, hi))
    return tuple((a, b) for a, b in bands if a < b)


def clamped_sum(first: int, count: int, most: int) -> int:
    """The sum of the integers `first, first + 1, ..`, each at least 0 and at most `most`."""
    low, high = (min(max(edge - first, 0), count) for edge in (0, most))
    return (high - low) * (2 * first + low + high - 1) // 2 + (count - high) * most
