"""The mask of a forward pass of transformers, recognised and described without a matrix.

`visible_keys` is registered as the mask function of `transformers.py`, whose attention function
reads what it returns in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils.import_utils import is_tracing

from splitkv.core.errors import UnsupportedProblem, expect

MAX_DECODE_QUERIES = 16


@dataclass(frozen=True)
class Segments:
    """A batch read as one run of tokens, cut where sequences and padding begin and end.

    cu_seqlens_q, cu_seqlens_k [segments + 1] int32: segment i of the queries sees segment i of the
    keys. Padding has segments of its own, so no token moves and no length is read by the host.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    padded: bool = False


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which keys each query of one forward pass sees: what a mask matrix would say, without it.

    shape           of the matrix that this stands for: [batch, 1, q_length, kv_length]
    causal          whether a query sees no key after it
    window_size     keys to the left and right of a query, -1 is unbounded
    chunk           visible keys come in chunks of this many; 0: in one
    length          key slots from this one on are empty
    cache_seqlens   [batch] int32: visible keys a sequence, for decode
    slots           [batch, kv_length] int32: the slots of these keys in order; None: the first ones
    segments        for a padded or packed batch, where decode does not apply
    packing         where rows are packed, if nobody has looked yet: the model's `position_ids` say

    A model may ask for the shape and move it about as it would a matrix. One that computes with it
    does what only a matrix can, and gets UnsupportedProblem.
    """

    shape: tuple[int, int, int, int]
    causal: bool
    window_size: tuple[int, int]
    length: int
    cache_seqlens: Tensor | None = None
    slots: Tensor | None = None
    segments: Segments | None = None
    chunk: int = 0
    packing: Packing | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Visibility:
        """Itself: generation with a static cache asks this of the masks it makes ahead."""
        return self

    def to(self, *_: Any, **__: Any) -> Visibility:
        """Itself: it has no type, and its tensors go to the device of the layer that reads them."""
        return self

    def __getitem__(self, index: Any) -> Visibility:
        """Itself, where a slice leaves nothing out."""
        index = index if isinstance(index, tuple) else (index,)
        for at, part in enumerate(index):
            if part is Ellipsis:
                index = (*index[:at], *[slice(None)] * (5 - len(index)), *index[at + 1 :])
        known = len(index) <= 4 and all(isinstance(part, slice) for part in index)
        whole = known and all(
            part.indices(size) == (0, size, 1)
            for part, size in zip(index, self.shape, strict=False)
        )
        if not whole:
            raise no_matrix(f"[{', '.join(map(shown, index))}]")
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor | int | float):
            raise no_matrix("elements")
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise no_matrix(name)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise no_matrix(getattr(function, "__name__", "a function of torch"))


def _refuse_operator(name: str) -> Callable[..., Any]:
    def refuse(self: Visibility, *_: Any) -> Any:
        raise no_matrix(name)

    return refuse


_BINARY = ("add", "sub", "mul", "truediv", "and", "or", "xor")
for _name in (
    *(f"__{side}{op}__" for side in ("", "r") for op in _BINARY),
    *("__invert__", "__neg__", "__lt__", "__le__", "__gt__", "__ge__", "__setitem__", "__len__"),
    *("__iter__", "__bool__", "__float__", "__int__"),
):
    setattr(Visibility, _name, _refuse_operator(_name.strip("_")))


class Packing:
    """Where the rows of a forward pass are packed, as the first layer that is asked finds out."""

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._segments: Segments | None = None

    def segments(self, position_ids: Tensor, batch: int) -> Segments | None:
        """The sequences that `position_ids` `[batch, length]` begin anew; None: rows are whole.

        Positions of one row are those of every row, as everywhere in transformers.
        """
        if is_compiling() or self._of is not position_ids:
            self._look_at(position_ids, batch)
        return self._segments

    @torch.compiler.disable(reason="whether sequences are packed is data: pass an attention_mask")
    def _look_at(self, position_ids: Tensor, batch: int) -> None:
        begins = position_ids.diff(dim=-1) <= 0
        self._of, self._segments = position_ids, None
        if begins.any():  # the one look that rows take that are whole
            rows = position_ids.shape[0]
            expect(rows in (1, batch), "position_ids", f"[1 or {batch}, length]", position_ids)
            numbers = torch.nn.functional.pad(begins.cumsum(-1), (1, 0))
            self._segments = _segments_of(numbers.expand(batch, -1))


@dataclass(frozen=True)
class Pattern:
    """A mask function of transformers, read: causality, window, chunks and packing."""

    causal: bool = False
    left: int = -1
    right: int = -1
    packed: Tensor | None = None  # [batch, q_length], one number a packed sequence
    chunk: int = 0
    leftpad: Tensor | None = None  # [batch], where the first chunk begins
    remapped: bool = False  # positions are those in a packed sequence


def recognise(mask_function: Callable[..., Any]) -> Pattern:
    """The pattern of a mask function made by `transformers.masking_utils`; others raise."""
    if mask_function is causal_mask_function:
        return Pattern(causal=True)
    if mask_function is bidirectional_mask_function:
        return Pattern()
    return _recognise_closure(mask_function)


@torch.compiler.disable(reason="torch.compile cannot read the window out of a mask function")
def _recognise_closure(mask_function: Callable[..., Any]) -> Pattern:
    maker = getattr(mask_function, "__qualname__", "of no name").partition(".")[0]
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    match maker:
        case "and_masks":
            return _both([recognise(part) for part in cells[0]])
        case "sliding_window_overlay":
            return Pattern(left=cells[0] - 1)
        case "sliding_window_bidirectional_overlay":
            return Pattern(left=cells[0], right=cells[0])
        case "chunked_overlay":
            return Pattern(chunk=cells[0], leftpad=cells[1])
        case "packed_sequence_mask_function":
            return Pattern(packed=cells[0])
        case "remap_positions_for_packed_sequence":
            inner = recognise(next(cell for cell in cells if callable(cell)))
            return replace(inner, remapped=True)
    raise unsupported(
        "attention_mask: expected causal, bidirectional, sliding window, chunks, padding or packed "
        f"sequences, got the mask function {maker}"
    )


def _both(patterns: list[Pattern]) -> Pattern:
    """The pattern that lets through what all do; transformers combines no two windows or
    packings."""
    merged = Pattern()
    for pattern in patterns:
        merged = Pattern(
            merged.causal or pattern.causal,
            max(merged.left, pattern.left),
            max(merged.right, pattern.right),
            pattern.packed if merged.packed is None else merged.packed,
            max(merged.chunk, pattern.chunk),
            pattern.leftpad if merged.leftpad is None else merged.leftpad,
            merged.remapped or pattern.remapped,
        )
    return merged


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | Visibility | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visibility:
    """The mask of one forward pass, also where it hides nothing: no layer has to guess.

    Slot j of the keys holds position `kv_offset + j`, query i stands at `q_offset + i`, and
    `attention_mask` `[batch, positions]` is False at padding. A padding mask is read by the host
    once, as every mask function of transformers does; under tracing it is never read, and a
    pattern that cannot be honoured stops the device instead.
    """
    if isinstance(attention_mask, Visibility):
        return attention_mask
    pattern = recognise(mask_function)
    plain = Visibility(
        (batch_size, 1, q_length, kv_length),
        pattern.causal,
        (pattern.left, pattern.right) if kv_length > pattern.left + 1 else (-1, -1),
        kv_length,
        chunk=pattern.chunk if kv_offset + kv_length > pattern.chunk else 0,
    )
    if pattern.packed is not None:
        segments = _packed_segments(pattern.packed)
        if segments is None:
            return plain
        if plain.chunk and not pattern.remapped:
            raise unsupported(
                f"attention_mask: expected chunks of {plain.chunk} to begin with each packed "
                "sequence, got chunks of whole rows"
            )
        return replace(plain, segments=segments)

    # Keys that exist: a static cache is longer than what it holds.
    filled = q_offset + q_length - kv_offset if pattern.causal else kv_length
    decodes = may_decode(q_length, kv_length) and not torch.is_grad_enabled()
    if isinstance(filled, int) and not decodes:
        plain = replace(plain, length=filled)
    whole = isinstance(filled, int) and filled == plain.length
    # Keys of a chunk that is not all there are visible to none of the queries, and hidden.
    clipped = bool(plain.chunk and kv_offset)
    if attention_mask is None and whole and not clipped:
        looks = pattern.causal and 1 < q_length == kv_length
        return replace(plain, packing=Packing()) if looks else plain
    if whole and not clipped and _hides_nothing(attention_mask, kv_offset, plain.length):
        return plain

    slot = torch.arange(plain.length, device=device)
    valid = (slot < filled).expand(batch_size, -1)
    if attention_mask is not None:
        valid = valid & _padding(attention_mask, kv_offset, plain.length)
    if clipped:
        assert pattern.leftpad is not None
        into_chunk = (kv_offset - pattern.leftpad.to(valid.device)).clamp(min=0) % plain.chunk
        first = (plain.chunk - into_chunk) % plain.chunk
        valid = valid & (slot >= first[:, None])
    start, count = valid.int().argmax(-1), valid.sum(-1)
    run = (slot >= start[:, None]) & (slot < (start + count)[:, None])
    is_run = (valid == run).all()
    if plain.chunk and pattern.leftpad is not None:
        # The keys' chunks begin with the run, or where it begins inside a chunk it is all in that.
        begun = (kv_offset + start - pattern.leftpad.to(valid.device)) % plain.chunk
        is_run = is_run & ((begun == 0) | (begun + count <= plain.chunk) | (count == 0)).all()
    # Decode aligns the last query with the last key: padding may only come before the queries.
    ends = valid[:, :-1] & ~valid[:, 1:] & (slot[:-1] >= filled - q_length) & (slot[1:] < filled)
    is_aligned = ~ends.any()

    windowed = plain.window_size != (-1, -1) or plain.chunk > 0
    needs_alignment = pattern.causal or windowed
    if attention_mask is None and not clipped:
        facts = Facts(all_valid=False, is_run=True, is_aligned=True, from_zero=True)
    elif is_tracing(valid):
        facts = Facts(all_valid=False, is_run=False, is_aligned=True, from_zero=False)
        if decodes and needs_alignment:
            torch._assert_async(is_aligned, "attention_mask: padding after a query")
        if windowed or not decodes:
            torch._assert_async(is_run, "attention_mask: padding between tokens")
    else:
        facts = Facts(*torch.stack([valid.all(), is_run, is_aligned, (start == 0).all()]).tolist())
        decodes = decodes and (facts.is_aligned or not needs_alignment)
        if not facts.is_run and (windowed or not decodes):
            raise unsupported(
                "attention_mask: expected one run of tokens in each row here, got padding between "
                "tokens; pad on the left"
            )
    if facts.all_valid:
        return plain
    if not decodes:
        every_query = not needs_alignment
        segments = _padded_segments(start, count, filled, q_length, plain.length, every_query)
        return replace(plain, segments=segments)
    slots = None
    if not facts.is_run:
        slots = (~valid).byte().argsort(dim=-1, stable=True).int()
    elif not facts.from_zero:
        slots = (start[:, None] + slot).int()
    return replace(plain, cache_seqlens=count.int(), slots=slots)


@dataclass(frozen=True)
class Facts:
    """Facts of a padding mask that the host knows.

    all_valid: nothing is hidden; is_run: one run of tokens a row; is_aligned: no token of the new
    queries is followed by padding; from_zero: every run starts in slot 0.
    """

    all_valid: bool
    is_run: bool
    is_aligned: bool
    from_zero: bool


def may_decode(q_length: int, kv_length: int) -> bool:
    """Whether so many queries are few enough, and have keys before them."""
    return q_length <= MAX_DECODE_QUERIES and kv_length > q_length


def _reached(attention_mask: Tensor, kv_offset: int, length: int) -> Tensor:
    """The columns of a padding mask [batch, positions] that are of the first `length` slots."""
    return attention_mask[:, kv_offset : kv_offset + length]


def _padding(attention_mask: Tensor, kv_offset: int, length: int) -> Tensor:
    """The padding mask over the first `length` slots; positions it does not reach are hidden."""
    expect(attention_mask.ndim == 2, "attention_mask", "[batch, positions]", attention_mask)
    mask = _reached(attention_mask, kv_offset, length).bool()
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]))


def _hides_nothing(attention_mask: Tensor | None, kv_offset: int, length: int) -> bool:
    """Whether the host can know that no slot is padding: one look, as sdpa's mask function takes,
    in the place of all that describes padding. Generation asks before every token."""
    if attention_mask is None or attention_mask.ndim != 2 or is_tracing(attention_mask):
        return False
    mask = _reached(attention_mask, kv_offset, length)
    return mask.shape[1] == length and bool(mask.all())


@torch.compiler.disable(reason="whether sequences are packed is data: pass an attention_mask")
def _packed_segments(ids: Tensor) -> Segments | None:
    return _segments_of(ids)


def _segments_of(ids: Tensor) -> Segments | None:
    """One segment for each run of equal ids `[batch, q_length]` of a row; None: rows are whole."""
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    bounds = first.flatten().nonzero()[:, 0]
    if bounds.numel() == ids.shape[0]:
        return None
    cu_seqlens = torch.nn.functional.pad(bounds, (0, 1), value=ids.numel()).int()
    longest = int(cu_seqlens.diff().max())
    return Segments(cu_seqlens, cu_seqlens, longest, longest)


def _padded_segments(
    start: Tensor,
    count: Tensor,
    filled: int | Tensor,
    q_length: int,
    length: int,
    every_query: bool,
) -> Segments:
    """Four segments a sequence, of which one has both queries and keys: its run of tokens.

    Keys before the run and after it meet no query, queries after it meet no key. Queries before it
    may stay: the alignment at the end of the run puts them before its first key. `every_query`: no
    query is after the run, as in layers where a query's position says nothing (encoders and
    cross-attention).
    """
    batch = torch.arange(start.shape[0], device=start.device)[:, None]
    stop, all_queries = start + count, torch.full_like(start, q_length)
    high = all_queries if every_query else (stop - filled + q_length).clamp(0, q_length)
    all_keys = torch.full_like(start, length)

    def cumulative(*bounds: Tensor) -> Tensor:
        """Bounds within each sequence, as bounds within the batch."""
        of_batch = torch.stack(bounds, -1) + batch * bounds[-1][:, None]
        return torch.nn.functional.pad(of_batch.flatten(), (1, 0)).int()

    return Segments(
        cumulative(torch.zeros_like(start), high, all_queries, all_queries),
        cumulative(start, stop, stop, all_keys),
        q_length,
        length,
        padded=True,
    )


class UnsupportedLayer(UnsupportedProblem):
    """A model of transformers that splitkv cannot serve, with what can be done instead."""

    def __str__(self) -> str:
        named = [reason for kernel, against in self.reasons if not kernel for reason in against]
        said = "\n".join(named) if named else super().__str__()
        return f'{said}\n  attn_implementation="sdpa" (or "eager") runs this model'


class NoMatrix(UnsupportedLayer, AttributeError):
    """A mask is described, and a model asks for what only a matrix has: `hasattr` says no."""


def no_matrix(used: str) -> NoMatrix:
    reason = f"attention_mask: expected a model that hands it on, got one that uses its {used}"
    return NoMatrix(LAYER, ANYWHERE, [("", [reason])])


LAYER, ANYWHERE = "a layer of transformers", "any device"


def unsupported(reason: str) -> UnsupportedLayer:
    return UnsupportedLayer(LAYER, ANYWHERE, [("", [reason])])


def shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a tensor of shape {list(shape)}"
