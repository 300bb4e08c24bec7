"""Calls whose lengths change: of decode on a cache with a key more in every step, of attention on
one prompt after the other, of an engine's steps, in which packed sequences are others every time.

A call is known by the layouts of its tensors, so that each length of tensors without a page table
is another kind of call. What a length changes is little: plans are made for buckets of lengths,
kernels take the exact one as a run-time integer, as they do strides, and only the maps of TMA hold
both. So the second time that a call differs from an earlier one in nothing but lengths, it is bound
as a `GrowingCall`, or as `GrowingSequences`, which serves every length from then on. It is found by
a check in which lengths, and the strides that follow from them, are free; so is the number of
packed sequences, unless something is asked of each of them or gradients are.

What Triton compiles for strides by value is part of what a bucket is known by: whether they are 1,
multiples of 16, or more than 32 bits hold. So are edges of a mask that no query meets.

Slices of a larger cache have one map of TMA for all lengths of a bucket, with the bound of the
longest of them: what is behind a length is memory of the same cache, which kernels mask as they do
where lengths are on the device.

What a bucket takes on the host, ten times a new length, is done in the last steps of the bucket
before, a part in each of them, behind the launches of the step itself: its problem, the plan, the
binding of a kernel, the arguments in the order of that, `combine` and what both are compiled for,
the launches. A bucket that is entered in another way takes all of it at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.host.lengths import CacheLayout
from splitkv.kernels.host.sequence_sizes import (
    LOG2_E,
    layouts_at,
    result_layouts,
    strides_of,
)
from splitkv.planner.registry import (
    kernel_named,
    plan_at_length,
    rounded_alike,
    rounded_up,
)
from splitkv.runtime.call_cache import (
    NO_LENGTHS,
    NO_TENSOR,
    Check,
    Launcher,
    Result,
    check_of,
    layout,
)

GROWS = "decode_split", "hopper_decode_split"
"""The kernels that take every length of a cache up to that of their plan."""
SEQUENCES_GROW = "hopper_prefill", "hopper_prefill_quantised", "prefill"
"""Those that take every length of whole sequences."""
SEQUENCES_STAY = "hopper_prefill_half", "hopper_prefill_widened"
"""Those that are bound to one length of them; at others of the same call another may be the best.
"""


MAX_KNOWN = 256  # layouts that launchers are kept for; past it, the first are forgotten
MAX_AGAIN = 64
"""Layouts that launches alone are kept for, which are soon made. Of more of them to forget one
takes longer than to make it, as by then it has left every cache of the processor."""
AHEAD = 8
"""Keys before the end of a bucket from which on the next one is made ready."""
Alignment = tuple[Any, ...]
"""What kernels are compiled for of strides."""
Bucket = tuple[Alignment, Any]
"""What a plan and its kernels are for: an alignment, and the longest sequences."""


Ends = tuple[int, int]
"""Bytes from the first of K, and of V, to the last of the longest caches of a bucket."""
Served = tuple[Any, Any, Any]
"""What a layout changes of a launch, the launch of the splits, and what repeats a call with it."""
NOT_SERVED: Served = (None, None, None)


class InOrder(NamedTuple):
    """A launcher of which the arguments of the first kernel are in order."""

    launcher: Any


class Ready(NamedTuple):
    """A launcher that only lacks its kernels, and their key in `compiled`."""

    launcher: Any
    key: Hashable


compiled: dict[Hashable, tuple[Any, Any]] = {}
"""What Triton compiled for growing calls, an attention kernel and `combine` or None: by the types
and alignments of what they were given, and by the `variant` of the launcher."""


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


def pattern_of(tensors: Sequence[Tensor]) -> Any:
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


def pattern_with(
    tensors: Sequence[Tensor], lengths: Mapping[int, int], rows: Collection[int] = ()
) -> Any:
    """The layouts of tensors but for lengths, which some have in a dimension, and for the first
    dimension of `rows`; and whether they require a gradient, which a check sees, too."""

    def of(n: int, x: Tensor) -> Any:
        whole = layout(x)
        if n in lengths:
            return _with_free_length(whole, lengths[n])
        return (whole[0][1:], *whole[1:]) if n in rows else whole

    return tuple((of(n, x), x.requires_grad) for n, x in enumerate(tensors))


def _with_free_length(of: Any, dim: int) -> Any:
    shape, strides = of[:2]
    if dim == 0:  # packed
        return shape[1:], (strides[0], strides[2:]), of[2:]
    return (shape[0], shape[2:]), (strides[1], strides[3:]), of[2:]


def check_of_any_length(tensors: Sequence[Tensor]) -> Check | None:
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


class Growing(ABC):
    """A launcher for calls of every length, which differ in nothing else.

    problem, operands  of one of the lengths
    num_splits         that the caller forces, or 0
    plan_for           plan_for(problem, operands): a plan for these operands
    kernels            names of those that take every length
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        num_splits: int,
        plan_for: Callable[[Problem, Operands], Plan],
        kernels: tuple[str, ...],
    ) -> None:
        self.problem, self.num_splits, self.plan_for = problem, num_splits, plan_for
        self.kernels, self.types = kernels, types_of(operands)
        self.plans: dict[Alignment, Plan] = {}  # of the first length of each
        self.buckets: dict[Bucket, Any] = {}  # launchers
        self.ahead: dict[Bucket, Any] = {}  # what `make_ready` has got to
        self.bound: OrderedDict[Any, Launcher] = OrderedDict()  # to one layout in its bucket

    @abstractmethod
    def problem_of(self, longest: Any) -> Problem:
        """The problem of the longest sequences of a bucket."""

    def through_triton(
        self, here: Any, bucket: Bucket | None, problem: Problem, operands: Operands
    ) -> Result:
        """Binds a launcher to this one layout, which compiles what it needs, and keeps that.

        bucket    None: nothing is kept
        problem   that the launcher is bound to
        """
        x = operands
        launcher = self.bound.get((here, bucket))
        if launcher is not None:
            return launcher(x)
        if bucket is None:
            plan = self.plan_for(problem, x)
        else:
            plan = replace(self.planned(bucket[0], self.problem_of(bucket[1]), x), problem=problem)
        made: Any = kernel_named(plan.kernel).bind(plan, x)
        keep(self.bound, (here, bucket), made, MAX_KNOWN)
        result: Result = made(x)
        if bucket is not None and plan.kernel in self.kernels and made.compiled is not None:
            compiled[self.types, bucket[0], made.variant()] = made.compiled
            self.buckets[bucket] = made
            self.ahead.pop(bucket, None)
        return result

    def launcher_of(self, bucket: Bucket, operands: Operands) -> Any:
        """A launcher for a bucket that has compiled kernels; None where there are none."""
        while bucket not in self.buckets and self.make_ready(bucket, operands):
            pass
        return self.buckets.get(bucket)

    def make_ready(self, bucket: Bucket, operands: Operands) -> bool:
        """Takes one of six steps to a launcher for a bucket: describes its problem, plans it, binds
        that, puts its arguments in order, has it say which kernels it needs, and keep them where
        they were compiled for others. Whether another can follow.

        Of the operands it takes the layout, so that each step may have those of another call.
        """
        alignment, more = bucket[0], True
        made: Any = self.ahead.pop(bucket, None)  # no other thread takes this step meanwhile
        if made is None:
            if alignment not in self.plans or bucket in self.buckets:
                return False
            made = self.problem_of(bucket[1])
        elif isinstance(made, Problem):
            made = self.planned(alignment, made, operands)
            more = made.kernel in self.kernels
        elif isinstance(made, Plan):
            more = made.kernel in self.kernels
            made = kernel_named(made.kernel).bind(made, operands) if more else made
        elif isinstance(made, InOrder):
            made = Ready(made.launcher, (self.types, alignment, made.launcher.variant()))
        elif not isinstance(made, Ready):
            made.put_in_order()
            made = InOrder(made)
        else:
            more, kernels = False, compiled.get(made.key)
            if kernels is not None:
                made.launcher.keep(*kernels, operands)
                self.buckets[bucket] = made.launcher
                return False
        self.ahead[bucket] = made
        return more

    def planned(self, alignment: Alignment, problem: Problem, operands: Operands) -> Plan:
        """The plan of the longest sequences of a bucket, whose problem it is given."""
        known, x = self.plans.get(alignment), operands
        if known is not None and not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            plan = plan_at_length(known, problem, self.num_splits)
            return kernel_named(plan.kernel).refit(plan, x) if x.q.is_cuda else plan
        plan = self.plan_for(problem, x)
        if not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            self.plans[alignment] = plan
        return plan


class GrowingCall(Growing):
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


def keep(known: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Keeps a value in the place of the first where there are many: to forget all of them at once
    takes as long as a hundred calls."""
    while len(known) >= most:
        known.popitem(last=False)
    known[key] = value


def types_of(operands: Operands) -> Hashable:
    """The types of a call that kernels are compiled for, and the device that they are loaded on."""
    x = operands
    tensors = x.q, x.k, x.v, x.cache_seqlens, x.sink_logits, x.alibi_slopes, x.q_scale, x.k_scale
    types = [None if tensor is None else tensor.dtype for tensor in tensors]
    present = [y is not None for y in (x.page_table, x.cu_seqlens_q, x.cu_seqlens_k)]
    return x.q.device, (*types, *present), bool(x.softcap)


def alignment_of(here: CacheLayout, element_size: int) -> Alignment:
    """The alignment of strides that kernels are compiled and plans made for."""
    length, (k, v, scales) = here
    every = k[0] | k[1] | k[2] | v[0] | v[1] | v[2]
    if not every & 15 and every < 1 << 31:
        alignment = EVERY_ONE
    else:
        every_one = *k[:3], *v[:3]  # TMA can describe multiples of 16 bytes
        alignment = (*((_alignment(x), x * element_size % 16 == 0) for x in every_one),)
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
"""The first length that came, the longest, and what `GrowingCall.in_bucket` finds: none."""


def _alignment(stride: int) -> int:
    """A number for each kind of stride that Triton compiles for."""
    return 3 * (stride >> 31 > 0) + (stride == 1) + 2 * (stride % 16 == 0)


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
EVERY_ONE: Alignment = ("multiples of 16",)


def _alignment_by_stride(problem: Problem, operands: Operands) -> Alignment | None:
    x, found = operands, []
    for tensor in (x.q, x.k, x.v):
        size, strides = tensor.element_size(), strides_of(tensor)
        for stride in strides:
            found += [_alignment(stride), stride * size % 16 == 0]
    for tensor in (x.k, x.v):
        if MOST_KEYS * tensor.stride(-3) + tensor.stride(-2) >= 1 << 31:
            return None
    out = None if x.out is None else (x.out.shape, x.out.stride())
    found += [_alignment(stride) for stride in result_layouts(problem, x.q.shape, out).out_strides]
    return tuple(found)
