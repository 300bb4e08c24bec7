"""Attention on sequences of ever new lengths: one prompt after the other, or an engine's steps, in
which packed sequences are others every time.

A call is found by a check in which lengths, and the strides that follow from them, are free; so is
the number of packed sequences, unless something is asked of each of them or gradients are.
`GrowingSequences` serves all of them: see growing.py.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.host.sequence_sizes import (
    LOG2_E,
    layouts_at,
    result_layouts,
    strides_of,
)
from splitkv.planner.registry import rounded_alike, rounded_up
from splitkv.runtime.call_cache import NO_LENGTHS, NO_TENSOR, Check, Result, check_of
from splitkv.runtime.growing import (
    AHEAD,
    EVERY_ONE,
    Alignment,
    Bucket,
    Growing,
    alignment_of_stride,
    keep,
    pattern_with,
)

SEQUENCES_GROW = "hopper_prefill", "hopper_prefill_quantised", "prefill"
"""The kernels that take every length of whole sequences."""
SEQUENCES_STAY = "hopper_prefill_half", "hopper_prefill_widened"
"""Those that are bound to one length of them; at others of the same call another may be the best.
"""
MAX_AGAIN = 64
"""Layouts that launches alone are kept for, which are soon made. Of more of them to forget one
takes longer than to make it, as by then it has left every cache of the processor."""


class GrowingSequences(Growing):
    """A launcher of attention for sequences of every length, which differ in nothing else.

    problem, operands  of one of the lengths
    mask               that the caller asked for
    plan_for           plan_for(problem, operands): a plan for these operands
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        mask: Mask,
        plan_for: Callable[[Problem, Operands], Plan],
    ) -> None:
        super().__init__(problem, operands, 0, plan_for, SEQUENCES_GROW)
        self.mask = mask
        self.known: OrderedDict[Any, Any] = OrderedDict()  # layouts, and what launches them
        self.return_lse = problem.return_lse
        # kernels of gradients are bound to a number of sequences
        self.any_batch = problem.kind == "varlen" and not problem.needs_grad
        self.latest: tuple[Any, Any] = (None, None)  # the layout, and what launches it
        self.current = NO_SEQUENCES

    def __call__(self, operands: Operands) -> Result:
        """(out, lse or None), on the current stream; of packed operands with the greatest
        lengths."""
        x = operands
        rest = (x.seqlen_q, x.seqlen_k), x.softmax_scale, x.softcap
        return self.launch(x.q, x.k, x.v, optional_of(x), *rest)

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        optional: tuple[Any, ...],
        longest: tuple[Any, Any],
        scale: float,
        softcap: float,
    ) -> Result:
        """Launches a call, through Triton where nothing is compiled for it or somebody observes
        launches.

        optional   the tensors behind v of Operands, in this order
        longest    the greatest lengths of packed queries and keys
        scale      of scores before they are capped
        """
        here = layout_of(q, k, v, optional[3], longest)
        layout, again = self.latest
        ahead = done = None
        if again is None or layout != here:
            again, ahead = self.launch_at(here, (q, k, v, *optional))
        if again is not None:
            capped, most = (scale / softcap, softcap) if softcap else (scale * LOG2_E, None)
            if optional is NO_OPTIONAL:  # the most frequent
                done = again.call(
                    q,
                    k,
                    v,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                    None,
                    capped,
                    most,
                )
            else:
                given = optional[:1] + optional[3:5] + optional[1:3] + optional[7:12]
                done = again.call(q, k, v, *given, capped, most)
        if done is None:
            x = operands_of((q, k, v, *optional), here)
            x.softmax_scale, x.softcap = scale, softcap
            exact = here[0], self.edges(*here[0][:2])
            return self.through_triton(here, self.bucket_of(x, here), self.problem_of(exact), x)
        if ahead is not None:
            self.make_ready(ahead, operands_of((q, k, v, *optional), here))
        return done if self.return_lse else (done[0], None)

    def launch_at(self, here: Any, tensors: tuple[Any, ...]) -> tuple[Any, Bucket | None]:
        """Finds (what launches calls of a layout, the bucket to make ready behind the call), each
        or None, and keeps the former as `latest`.

        here      of `layout_of`
        tensors   of Operands, in their order
        """
        before, again = self.latest[0], self.known.get(here)
        ahead = None
        if again is None:
            bucket, launcher = self.in_bucket(here, tensors)
            if launcher is not None:
                v, out = tensors[2], tensors[3]
                if out is None:
                    again = launcher.at_lengths(here, v.shape)
                else:
                    given = out.shape, out.stride()
                    again = launcher.at_layouts(layouts_at(here, v.shape, given))
            if again is not None:
                keep(self.known, here, again, MAX_AGAIN)
                ahead = following(bucket, before, here[0])
        self.latest = here, again
        return again, ahead

    def in_bucket(self, here: Any, tensors: tuple[Any, ...]) -> Any:
        """Finds (the bucket of a layout, a launcher for it with compiled kernels), or Nones.

        here, tensors   as in `launch_at`
        """
        (queries, keys, batch), (q_shape, _), strides = here
        (of_queries, of_keys, of_batch), found = self.current
        if (
            of_queries[0] <= queries <= of_queries[1]
            and of_keys[0] <= keys <= of_keys[1]
            and of_batch[0] <= batch <= of_batch[1]
            and every_one(self.problem, q_shape, strides)
        ):
            return found
        x = operands_of(tensors, here)
        bucket = self.bucket_of(x, here)
        launcher = None if bucket is None else self.launcher_of(bucket, x)
        if launcher is not None and bucket is not None and bucket[0] is EVERY_ONE:
            left, right = bucket[1][1]
            spans = (
                step_around(queries, self.mask.window_right + 1, right),
                step_around(keys, self.mask.window_left + 1, left),
                rounded_alike(batch) if self.any_batch else (batch, batch),
            )
            self.current = spans, (bucket, launcher)
        return bucket, launcher

    def bucket_of(self, operands: Operands, here: tuple[Any, ...]) -> Bucket | None:
        """The bucket of a call; None where its layout is in none, or its addresses are no multiples
        of 16: another kernel may be for these, of which later calls are to know nothing.

        here   of `layout_of`
        """
        x = operands
        out = 0 if x.out is None else x.out.data_ptr()
        if (x.q.data_ptr() | x.k.data_ptr() | x.v.data_ptr() | out) & 15:
            return None
        alignment = alignment_of_sequences(self.problem, x, here[2])
        if alignment is None:
            return None
        queries, keys, batch = here[0]
        batch = rounded_up(batch) if self.any_batch else batch
        longest = rounded_up(queries), rounded_up(keys), batch
        return alignment, (longest, self.edges(queries, keys))

    def edges(self, queries: int, keys: int) -> tuple[bool, bool]:
        """Which edges of the mask no query meets, left and right: see `Mask.within`."""
        return self.mask.window_left >= keys - 1, self.mask.window_right >= queries - 1

    def problem_of(self, longest: tuple[tuple[int, int, int], tuple[bool, bool]]) -> Problem:
        (queries, keys, batch), (left, right) = longest
        mask = self.mask.without(left=left, right=right)
        return replace(self.problem, batch=batch, seqlen_q=queries, seqlen_k=keys, mask=mask)


optional_of = attrgetter(*(field.name for field in fields(Operands)[3:16]))
"""The tensors of Operands behind q, k and v."""
NO_OPTIONAL = (None,) * 13
"""Those of a call that has none of them."""


def layout_of(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: tuple[Any, Any]
) -> tuple[Any, ...]:
    """The CallLayout of tensors.

    starts    of packed queries
    longest   of these the greatest lengths
    """
    shapes = q_shape, k_shape = q.shape, k.shape
    if starts is None:
        lengths = q_shape[1], k_shape[1], q_shape[0]
    else:
        lengths = longest + (starts.shape[0] - 1,)
    return lengths, shapes, (q.stride(), k.stride(), v.stride())


def operands_of(tensors: tuple[Any, ...], here: tuple[Any, ...]) -> Operands:
    """Operands of the lengths of a layout."""
    x = Operands(*tensors)
    x.seqlen_q, x.seqlen_k = here[0][:2]
    return x


NO_SEQUENCES: tuple[tuple[Any, Any, Any], Any] = ((1, 0), (1, 0), (1, 0)), None
"""(first and last queries, keys and sequences of a bucket), what `in_bucket` finds there: none."""


def step_around(number: int, edge: int, within: bool) -> tuple[int, int]:
    """(first, last) of the numbers that are rounded up alike, and that are at most `edge` if they
    are to be within it, else more."""
    first, last = rounded_alike(number)
    return (first, min(last, edge)) if within else (max(first, edge + 1), last)


def following(bucket: Bucket, before: Any, lengths: tuple[int, int, int]) -> Bucket | None:
    """The bucket to make ready behind a call near the end of one, where keys grow by one.

    before   the layout of the call before, or None
    """
    alignment, ((queries, keys, batch), edges) = bucket
    now, length, sequences = lengths
    if length <= keys - AHEAD or before is None or before[0] != (now, length - 1, sequences):
        return None
    return alignment, ((queries, rounded_up(keys + 1), batch), edges)


def lengths_of_tensors(packed: bool, paged: bool, out: bool) -> dict[int, int]:
    """Which of the tensors of a call of attention have a length, and in which dimension: q, keys
    and values where they are in no pages, and the output where it is given, the fourth."""
    grow = [0, *(() if paged else (1, 2)), *((3,) if out else ())]
    return dict.fromkeys(grow, 0 if packed else 1)


def rows_of_sequences(
    tensors: Sequence[Tensor], by_name: Mapping[str, Tensor | None]
) -> dict[int, int]:
    """Which of the tensors of a packed call have a row for each sequence, and how many more than
    there are sequences; none where a tensor has such rows that no kernel takes another number of.

    by_name   the optional tensors
    """
    try:
        for name in OWN_ROWS:
            x = by_name.get(name)
            if x is not None and x.dim() == 2:
                return {}
        starts = [x for x in map(by_name.get, ROWS_OF_STARTS) if x is not None]
        others = [x for x in map(by_name.get, ROWS_OF_SEQUENCES) if x is not None]
        rows = {id(x): 1 for x in starts} | {id(x): 0 for x in others}
        return {n: rows[id(x)] for n, x in enumerate(tensors) if id(x) in rows}
    except NO_TENSOR:  # describing says what is not right
        return {}


ROWS_OF_STARTS = "cu_seqlens_q", "cu_seqlens_k"
ROWS_OF_SEQUENCES = "cache_seqlens", "page_table"
OWN_ROWS = "alibi_slopes", "q_scale", "k_scale", "v_scale"


def pattern_of_sequences(
    tensors: Sequence[Tensor],
    lengths: Mapping[int, int],
    rows: Collection[int] = (),
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Any:
    """The pattern of calls of attention that differ in lengths alone, and in how many sequences
    there are; None: there is none.

    lengths   of `lengths_of_tensors`; rows: of `rows_of_sequences`
    scales    of queries and of keys: of each token they have a length, too, and no kernel is bound
              to any
    """
    try:
        dims = 3 if lengths[0] == 0 else 4
        if any(len(tensors[n].shape) != dims for n in lengths):
            return None
        for n, scale in enumerate(scales):
            if n in lengths and scale is not None and scale.shape == tensors[n].shape[:-1]:
                return None
        return pattern_with(tensors, lengths, rows)
    except NO_TENSOR:  # describing says what is not right
        return None


def check_of_sequences(
    tensors: Sequence[Tensor], lengths: Mapping[int, int], rows: Mapping[int, int] = NO_LENGTHS
) -> Check | None:
    """A check for tensors like these, but for lengths and the strides that follow from them, and
    for the number of sequences; None where torch has none.

    lengths   of `lengths_of_tensors`; the output has to be contiguous; rows: of `rows_of_sequences`
    """
    check = check_of(tensors, any_length=lengths, any_rows=rows)
    if check is None:
        return None
    dim, of_keys, of_out = lengths[0], 1 in lengths, 3 in lengths
    k_step, v_step = (math.prod(x.shape[:dim] + x.shape[dim + 1 :]) for x in tensors[1:3])
    counted = [*rows.items()]

    def fits(*tensors: Any) -> bool:
        if not check(*tensors):
            return False
        # all but lengths is known to be the same, and elements are counted sooner than a length is
        if not tensors[0].numel():
            return False
        if of_keys and not tensors[1].numel() * v_step == tensors[2].numel() * k_step > 0:
            return False
        if counted:
            batch = tensors[counted[0][0]].shape[0] - counted[0][1]
            if batch < 1:
                return False
            for n, more in counted:
                if tensors[n].shape[0] != batch + more:
                    return False
        if not of_out:
            return True
        q, out = tensors[0], tensors[3]
        return bool(out.shape[dim] == q.shape[dim] and out.is_contiguous())

    return fits if fits(*tensors) else None


def alignment_of_sequences(
    problem: Problem, operands: Operands, strides: Sequence[Any]
) -> Alignment | None:
    """Finds the alignment of strides of a call of attention, those of q, k and v, and of its
    output; None where offsets inside a tile of keys may need more than 32 bits."""
    if every_one(problem, operands.q.shape, strides):
        return EVERY_ONE
    return _alignment_by_stride(problem, operands)


def every_one(problem: Problem, q_shape: Sequence[int], strides: Sequence[Any]) -> bool:
    """Whether strides of q, k and v, and of the output, are multiples of 16 that are not far."""
    q, k, v = strides
    inner = q[-3] | k[-3] | v[-3]  # of tokens, the first where these are packed
    outer = q[0] | k[0] | v[0] | q[-2] | k[-2] | v[-2]
    row = problem.num_heads * problem.head_dim_v
    out = row * q_shape[-3]  # of a sequence, or of all
    aligned = not (outer | inner | row | problem.head_dim_v) & 15
    return aligned and inner < NEAR and outer < FAR and out < FAR


NEAR, FAR = 1 << 22, 1 << 30
"""Strides of tokens and others with which offsets inside a tile have 32 bits."""
MOST_KEYS = 128
"""Keys of a tile, at most."""


def _alignment_by_stride(problem: Problem, operands: Operands) -> Alignment | None:
    x, found = operands, []
    for tensor in (x.q, x.k, x.v):
        size, strides = tensor.element_size(), strides_of(tensor)
        for stride in strides:
            found += [alignment_of_stride(stride), stride * size % 16 == 0]
    for tensor in (x.k, x.v):
        if MOST_KEYS * tensor.stride(-3) + tensor.stride(-2) >= 1 << 31:
            return None
    out = None if x.out is None else (x.out.shape, x.out.stride())
    found += [
        alignment_of_stride(stride)
        for stride in result_layouts(problem, x.q.shape, out).out_strides
    ]
    return tuple(found)
