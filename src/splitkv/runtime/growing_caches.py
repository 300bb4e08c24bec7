"""Decode on contiguous caches of ever new lengths, as of one with a key more in every step.

A call is found by a check in which the length of the caches, and the strides that follow from it,
are free; `GrowingCaches` serves all of them: see growing.py.

Slices of a larger cache have one map of TMA for all lengths of a bucket, with the bound of the
longest of them: what is behind a length is memory of the same cache, which kernels mask as they do
where lengths are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.host.lengths import CacheLayout
from splitkv.planner.registry import rounded_up
from splitkv.runtime.call_cache import NO_TENSOR, Check, Result, check_of
from splitkv.runtime.growing import (
    AHEAD,
    EVERY_ONE,
    Alignment,
    Bucket,
    Growing,
    alignment_of_stride,
    pattern_with,
)

GROWS = "decode_split", "hopper_decode_split"
"""The kernels that take every length of a cache up to that of their plan."""

Ends = tuple[int, int]
"""Bytes from the first of K, and of V, to the last of the longest caches of a bucket."""
Served = tuple[Any, Any, Any]
"""What a layout changes of a launch, the launch of the splits, and what repeats a call with it."""
NOT_SERVED: Served = (None, None, None)


def capacity_of(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Keys that there is room for in each sequence of a cache; -1: of what is no cache."""
    try:
        keys: int = k_cache.shape[1]
        return keys if page_table is None else keys * page_table.shape[1]
    except NO_TENSOR:  # describing says what is not right
        return -1


def caches_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Which of the tensors of a call on contiguous caches have a length, and in which dimension:
    keys and values, and scales of each token."""
    lengths = tensors[1].shape[:3]
    scales = [n for n, x in enumerate(tensors) if n > 2 and x.shape == lengths]
    return dict.fromkeys((1, 2, *scales), 1)


def pattern_of_caches(tensors: Sequence[Tensor]) -> Any:
    """The pattern of calls that differ in the length of their caches alone; None: they are not
    contiguous caches of one length.

    tensors   q, k_cache, v_cache and the optional ones, none of them a page table
    """
    try:
        if len(tensors[1].shape) != 4 or tensors[1].shape[:3] != tensors[2].shape[:3]:
            return None
        grow = caches_of(tensors)
        if len(grow) > 2 and tensors[1].shape[1] == 1:  # a single scale may be the tensor's
            return None
        return pattern_with(tensors, grow)
    except NO_TENSOR:  # describing says what is not right
        return None


def check_of_caches(tensors: Sequence[Tensor]) -> Check | None:
    """A check for tensors like these, but for the length of caches and the strides that follow from
    it; None where torch has none."""
    grow = caches_of(tensors)
    check = check_of(tensors, any_length=grow)
    if check is None:
        return None
    scales = [*grow][2:]

    dim, dim_v = tensors[1].shape[3], tensors[2].shape[3]

    def caches_fit(q: Any, k: Any, v: Any, *rest: Any) -> bool:
        # all but the length is known to be the same, and elements are counted sooner than it is
        return check(q, k, v, *rest) and k.numel() * dim_v == v.numel() * dim > 0

    def scales_fit(*tensors: Any) -> bool:
        if not caches_fit(*tensors):
            return False
        length: int = tensors[1].shape[1]
        for n in scales:  # kernels have one set of strides for scales of keys and of values
            same = tensors[n].stride() == tensors[scales[0]].stride()
            if tensors[n].shape[1] != length or not same:
                return False
        return length > 1

    fits = scales_fit if scales else caches_fit
    return fits if fits(*tensors) else None


class GrowingCaches(Growing):
    """A launcher of decode for contiguous caches of every length, which differ in nothing else.

    A call with a new length takes as little as there is to do:

    * `latest` serves it, if it is a slice of a larger cache as the call before was: the strides are
      the same, and the launch takes the length;
    * else a launch is made for its strides, with maps of TMA of just this length or, where the
      memory goes on, of the longest of its bucket. `current` has what makes it, for a bucket of
      strides that are multiples of 16; others are found in `buckets`.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        num_splits: int,
        plan_for: Callable[[Problem, Operands], Plan],
    ) -> None:
        super().__init__(problem, operands, num_splits, plan_for, GROWS)
        self.by_token = problem.codec.granularity == "token"
        # ((first length, last length), strides, ends) of caches whose memory goes on to the ends,
        # if there are any, and what serves them
        self.latest: tuple[tuple[tuple[int, int], Any, Ends | None], Served] = NO_CACHES, NOT_SERVED
        # strides that came again, with the longest caches of their bucket, and the ends of these
        self.ends: tuple[Any, Ends | None] = (None, None)
        self.current = NO_BUCKET

    def repeat(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        cache_seqlens: Tensor | None,
        page_table: Tensor | None,
        sink_logits: Tensor | None,
        alibi_slopes: Tensor | None,
        q_scale: Tensor | None,
        k_scale: Any,
        v_scale: Any,
        softmax_scale: float,
        softcap: float,
    ) -> Result | None:
        """Launches the call as a `Relaunch`, with the same arguments; None where the whole has to
        be called instead."""
        length = k.shape[1]
        strides = k.stride(), v.stride(), k_scale.stride() if self.by_token else None
        latest, (layout, launch, call) = self.latest
        (first, last), of_latest, ends = latest
        ahead = None
        if (
            not first <= length <= last
            or of_latest != strides
            or not (ends is None or both_reach(k, v, ends))
        ):
            tensors = q, k, v, out, alibi_slopes, q_scale, k_scale, v_scale
            found = self.launch_at((length, strides), tensors)
            if found is None:
                return None
            (layout, launch, call), ahead = found
        # written out, as in `Repeat.call`
        done: Result | None = call(
            q,
            k,
            v,
            out,
            cache_seqlens,
            page_table,
            sink_logits,
            alibi_slopes,
            q_scale,
            k_scale,
            v_scale,
            softmax_scale,
            softcap,
            split=launch,
            length=length,
            layout=layout,
        )
        if ahead is not None and done is not None:
            tensors = q, k, v, out, alibi_slopes, q_scale, k_scale, v_scale
            self.make_ready(ahead, of_layout(*tensors))
        return done

    def launch_at(
        self, here: CacheLayout, tensors: tuple[Any, ...]
    ) -> tuple[Served, Bucket | None] | None:
        """Finds (what serves caches of this layout, the bucket to make ready behind the call or
        None), and keeps the former as `latest`. None: nothing is compiled for them.

        tensors   of the call, as `of_layout` takes them
        """
        (length, strides), k, v = here, tensors[1], tensors[2]
        of_k, of_v, scales = strides
        first, longest, found = self.current
        every = of_k[0] | of_k[1] | of_k[2] | of_v[0] | of_v[1] | of_v[2]
        if not first <= length <= longest or every & 15 or every >> 31 or scales is not None:
            longest = rounded_up(length)
            found = self.in_bucket(here, longest, tensors)
        if found is None:
            return None
        layout_at, launch, call = found
        room, soon, last, ends = 0, longest - AHEAD, length, None
        if self.latest[0][1] == strides:  # not so in any step of caches that are made anew
            at = longest, strides
            known, ends = self.ends
            if known != at:
                ends = end_of(k, longest), end_of(v, longest)
                self.ends = at, ends
            if ends is not None and both_reach(k, v, ends):
                room = longest
                if scales is None and length < soon:
                    last = soon
        served = layout_at(here, room), launch, call
        self.latest = ((length, last), strides, ends if room else None), served
        if length <= soon:
            return served, None
        following = alignment_of(here, k.element_size()), rounded_up(longest + 1)
        return served, None if following in self.buckets else following

    def in_bucket(
        self, here: CacheLayout, longest: int, tensors: tuple[Any, ...]
    ) -> tuple[Any, Any, Any] | None:
        """Finds what launches the splits of caches of every layout, see `CacheLaunch`, and what
        repeats a call, in the bucket of this one. None: nothing is compiled for that.

        longest   of the bucket. One of strides that are multiples of 16 is the current one from
                  then on
        tensors   as in `launch_at`
        """
        bucket = alignment, longest = alignment_of(here, tensors[1].element_size()), longest
        launcher = self.buckets.get(bucket)
        if launcher is None:
            launcher = self.launcher_of(bucket, of_layout(*tensors))
        if launcher is None or launcher.at_lengths is None:
            return None
        found = *launcher.at_lengths, launcher.repeat
        if alignment is EVERY_ONE:
            self.current = here[0], longest, found
        return found

    def __call__(self, operands: Operands) -> Result:
        """(out, lse or None), on the current stream, through Triton where nothing is compiled for
        these operands or somebody observes launches."""
        x = operands
        per_call = x.cache_seqlens, x.page_table, x.sink_logits, x.alibi_slopes
        tensors = x.q, x.k, x.v, x.out, *per_call, x.q_scale, x.k_scale, x.v_scale
        done = self.repeat(*tensors, x.softmax_scale, x.softcap)
        if done is not None:
            return done
        x.seqlen_k = length = x.k.shape[1]
        scales = x.k_scale.stride() if self.by_token and x.k_scale is not None else None
        here = length, (x.k.stride(), x.v.stride(), scales)
        longest, bucket = rounded_up(length), None
        if not (x.k.data_ptr() | x.v.data_ptr()) & 15:  # else another kernel may be for these
            bucket = alignment_of(here, x.k.element_size()), longest
        return self.through_triton(here, bucket, self.problem_of(longest), x)

    def problem_of(self, longest: int) -> Problem:
        return replace(self.problem, seqlen_k=longest)


def alignment_of(here: CacheLayout, element_size: int) -> Alignment:
    """The alignment of strides that kernels are compiled and plans made for."""
    length, (k, v, scales) = here
    every = k[0] | k[1] | k[2] | v[0] | v[1] | v[2]
    if not every & 15 and every < 1 << 31:
        alignment = EVERY_ONE
    else:
        every_one = *k[:3], *v[:3]  # TMA can describe multiples of 16 bytes
        alignment = (*((alignment_of_stride(x), x * element_size % 16 == 0) for x in every_one),)
    if scales is None:
        return alignment
    # copied in bulk where they lie in one piece of multiples of 16 bytes
    in_bulk = scales[0] % 4 == 0, length * scales[1] % 4 == 0
    return alignment, in_bulk, max(scales) >> 31 > 0


def end_of(x: Tensor, keys: int) -> int:
    """The bytes behind the first of a contiguous cache that so many keys of each sequence take."""
    sizes = x.shape[0], keys, *x.shape[2:]
    last = sum((n - 1) * step for n, step in zip(sizes, x.stride(), strict=True))
    taken: int = (last + 1) * x.element_size()
    return taken


def both_reach(k: Tensor, v: Tensor, ends: Ends) -> bool:
    """Whether the memory of contiguous caches goes on to these ends, as that of slices does. Asked
    in every call, as caches with one layout may be in different memory."""
    k_end, v_end = ends
    size = k.element_size()  # v has the same type
    reach: bool = (
        k_end + k.storage_offset() * size <= k.untyped_storage().nbytes()
        and v_end + v.storage_offset() * size <= v.untyped_storage().nbytes()
    )
    return reach


def of_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Operands:
    """Operands of the length of these caches to plan for and to bind: the tensors whose strides a
    launcher is bound to."""
    operands = Operands(q, k, v, out, alibi_slopes=alibi_slopes)
    operands.q_scale, operands.k_scale, operands.v_scale = q_scale, k_scale, v_scale
    operands.seqlen_k = k.shape[1]
    return operands


NO_CACHES = (1, 0), None, None
NO_BUCKET: tuple[int, int, Any] = (1, 0, None)
"""The first length that came, the longest, and what `GrowingCaches.in_bucket` finds: none."""
