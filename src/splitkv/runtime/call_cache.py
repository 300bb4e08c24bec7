"""The cache of bound calls: a call like an earlier one goes straight to its launcher.

A call is described, planned and bound once for each kind of call. A kind is known by

* the options: every argument that is no tensor, by value and type, as 1, 1.0 and True are equal and
  may not all be allowed; a plan by its identity; and which of the optional tensors are given. The
  caller makes one tuple of them, see `with_types`. What is not hashable is in no cache;
* the layouts of the tensors: shape, strides, element type and device; or what layouts have in
  common, where a call is bound to all of them (`growing.py`);
* whether autograd records: where a tensor requires a gradient, `torch.is_grad_enabled()`.

Addresses and contents are in no key, so neither are lengths nor page tables. Autocast is no part of
a kind: the check below refuses a call for which it has changed, and functions that autocast applies
to cast their tensors before they look a layout up.

A kind is found in two steps. Its options and the length of the first tensor, the batch of an engine
or the tokens of packed prompts, lead to the last few layouts they came with, each with a check of
all tensors in C++, the one that guards torch's compiled graphs. Where none of those fits, or where
torch has no such check, a key of options and layouts decides.

Reading and writing take single operations of a dict, which CPython does one at a time: threads may
bind the same call twice, and never see half of an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands

Bound = TypeVar("Bound")
Result = tuple[Tensor, Tensor | None]
"""(out, lse): lse is None where nobody asked for it."""

MAX_CALLS = 4096  # kinds of calls that a cache holds; past it, it starts afresh
NO_TENSOR = TypeError, AttributeError, IndexError, RuntimeError
"""The errors of asking for a length: of no tensor, one without dimensions, a nested one."""
MAX_RECENT = 8  # layouts that are tried for the same options

Launcher = Callable[[Operands], Result]
"""Runs one plan on operands of one memory layout: what `Kernel.bind` gives.

A launcher may have an attribute `repeat`, a `Relaunch` or None, which is None until the kernels of
a first call are compiled. Whoever has the tensors at hand calls that instead, without `Operands`.
"""


class Relaunch(Protocol):
    """Launches compiled kernels again with the least of Python.

    Returns None, having done nothing, where the call has to go through the launcher: an address
    that is no multiple of 16, which is another specialisation of the kernels, or a launch hook.

    new   a call of `append` whose tokens the kernel writes first, where the plan has it so
    """

    def __call__(
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
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        softmax_scale: float,
        softcap: float,
        new: Any = None,
        out_scale: Tensor | None = None,
        sequence_sink_tokens: Tensor | None = None,
    ) -> Result | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class BoundCall:
    """A launcher, and what a call of its kind takes besides tensors.

    relaunches   the launcher has an attribute `repeat`
    device       the index that has to be current; None on a CPU and where no other GPU is
    plan         the caller's, kept alive here, so that its identity stays its own
    """

    launcher: Launcher
    relaunches: bool
    device: int | None
    softmax_scale: float
    plan: Plan | None

    @classmethod
    def of(cls, launcher: Launcher, operands: Operands, plan: Plan | None) -> BoundCall:
        """The call of a launcher for operands that were described."""
        device = device_to_enter(operands.q)
        return cls(launcher, hasattr(launcher, "repeat"), device, operands.softmax_scale, plan)

    def __call__(self, operands: Operands) -> Result:
        if self.device is None:
            return self.launcher(operands)
        result: Result = launch_on(self.device, self.launcher, operands)
        return result


NEW: Any = object()
"""In the place of what is kept for calls of a pattern, the first time that one comes."""
Check = Callable[..., bool]
Entry = tuple[Check, bool | None, Bound]
"""(fits, grad_mode, bound): a check of all tensors, what torch.is_grad_enabled() has to be, or None
where no tensor requires a gradient, and what serves the call."""


class CallCache(Generic[Bound]):
    """Bound calls by their options and the layouts of their tensors, as the module says.

    recent   (options, length of the first tensor) -> the last entries that came with them, the
             latest first; for reading. Instead of the length None, where it may be any
    """

    def __init__(self, max_calls: int = MAX_CALLS, max_recent: int = MAX_RECENT) -> None:
        self.recent: dict[Any, tuple[Entry[Bound], ...]] = {}
        self._by_layout: dict[Any, tuple[Check | None, Bound]] = {}
        self._by_pattern: dict[Any, tuple[Check | None, Bound | None] | None] = {}
        self._alike: dict[Any, None] = {}
        self._max_calls, self._max_recent = max_calls, max_recent

    def __len__(self) -> int:
        of_layouts = max(len(self._by_layout), len(self._by_pattern), len(self._alike))
        return max(len(self.recent), of_layouts)

    def clear(self) -> None:
        """Forget every call."""
        self._by_layout.clear()
        self._by_pattern.clear()
        self._alike.clear()
        self.recent.clear()

    def match(self, options: Any, tensors: Sequence[Any], any_first: bool = False) -> Bound | None:
        """The call among the latest of these options that the tensors fit.

        None under a dispatch mode, which is to see a call that is not cached, and where tensors may
        have tangents, which no check of them sees.

        any_first   among those that were bound to any length of the first tensor
        """
        try:
            first = None if any_first else tensors[0].shape[0]
            seen = dispatch_modes() or forward_ad._current_level >= 0
            recent = () if seen else self.recent.get((options, first), ())
        except NO_TENSOR:  # describing says what is not right
            return None
        for fits, grad_mode, bound in recent:
            if fits(*tensors) and (grad_mode is None or grad_mode is torch.is_grad_enabled()):
                return bound
        return None

    def get_or_bind(self, options: Any, tensors: Sequence[Any], bind: Callable[[], Bound]) -> Bound:
        """The call of these options and layouts, or the one that `bind` makes; it is kept."""
        try:
            key = options, _recorded(tensors), *map(layout, tensors)
            kept = self._by_layout.get(key)
        except (AttributeError, TypeError):  # describing says what is not right
            return bind()
        fits, bound = (None, bind()) if kept is None else kept
        if fits is None or not fits(*tensors):
            fits = check_of(tensors)
        self._make_room()
        self._by_layout[key] = fits, bound
        self._add(options, tensors, fits, bound)
        return bound

    def is_another(self, options: Any, tensors: Sequence[Any]) -> bool:
        """Whether there was a call like this one but for the first of its options, and none like
        this one."""
        try:
            key = _recorded(tensors), *map(layout, tensors)
            known, alike = (options, *key) in self._by_layout, (options[1:], *key)
            if alike in self._alike:
                return not known
        except (AttributeError, TypeError):  # describing says what is not right
            return False
        self._make_room()
        self._alike[alike] = None
        return False

    def get_or_bind_alike(
        self,
        options: Any,
        tensors: Sequence[Any],
        pattern: Any,
        check: Callable[[Sequence[Any]], Check | None],
        bind: Callable[[], Bound | None],
        any_first: bool = False,
    ) -> Bound | None:
        """The call of these options and all layouts of a pattern, which `bind` makes when such a
        call comes a second time; None the first time, and where there is none.

        check       of the tensors, for a check of all layouts of the pattern
        any_first   the first tensor has another length in each of them
        """
        key = options, pattern
        kept: tuple[Check | None, Bound | None] | None
        try:
            kept = self._by_pattern.get(key, NEW)
        except TypeError:  # describing says what is not right
            return None
        if kept is NEW:
            self._make_room()
            self._by_pattern[key] = None
            return None
        if kept is None:
            fits = check(tensors)
            bound = None if fits is None else bind()
            kept = self._by_pattern[key] = fits, bound
        fits, bound = kept
        if fits is None or bound is None:
            return None
        if not fits(*tensors):  # one may be given twice, or made in torch.inference_mode
            fits = check(tensors)
            if fits is None:
                return None
        self._add(options, tensors, fits, bound, any_first)
        return bound

    def add(self, options: Any, tensors: Sequence[Any], bound: Bound) -> None:
        """Keep a call as the latest of its options, where torch has a check of its tensors."""
        self._make_room()
        self._add(options, tensors, check_of(tensors), bound)

    def _add(
        self,
        options: Any,
        tensors: Sequence[Any],
        fits: Check | None,
        bound: Bound,
        any_first: bool = False,
    ) -> None:
        if fits is None:
            return
        needs_grad = any(x.requires_grad for x in tensors)
        grad_mode = torch.is_grad_enabled() if needs_grad else None
        if not tensors[0].dim():  # it has no length
            return
        key = options, None if any_first else tensors[0].shape[0]
        others = [
            entry
            for entry in self.recent.get(key, ())
            if entry[1] is not grad_mode or not entry[0](*tensors)
        ]
        latest = fits, grad_mode, bound
        self.recent[key] = (latest, *others[: self._max_recent - 1])

    def _make_room(self) -> None:
        if len(self) >= self._max_calls:
            self.clear()


_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)  # int: no CUDA
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


NO_LENGTHS: Mapping[int, int] = {}
FREE_STRIDES = {0: (1,), 1: (0, 2)}
"""The strides that may be any with the length of the first or second dimension."""


def check_of(
    tensors: Sequence[Tensor],
    any_length: Mapping[int, int] = NO_LENGTHS,
    any_rows: Collection[int] = (),
) -> Check | None:
    """A check for tensors just like these, the same one in the same places; None where torch has
    none.

    any_length   the tensors that may have any length, and in which dimension: strides that follow
                 from it may be any, too
    any_rows     those that may have any first dimension, with the strides that they have
    """
    if _TensorGuards is None:
        return None
    firsts = {id(x): n for n, x in reversed([*enumerate(tensors)])}
    places = sorted(firsts.values())
    distinct = [tensors[n] for n in places]  # torch's check refuses a tensor that is given twice
    sizes = strides = None
    if any_length:
        free = [any_length.get(n, 0 if n in any_rows else None) for n in places]
        sizes = [
            _with_none(x.shape, () if dim is None else (dim,))
            for x, dim in zip(distinct, free, strict=True)
        ]
        strides = [
            _with_none(x.stride(), FREE_STRIDES[any_length[n]] if n in any_length else ())
            for x, n in zip(distinct, places, strict=True)
        ]
    guards = _TensorGuards(*distinct, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Check = guards.check
    if not check(*distinct):
        return None
    if len(places) == len(tensors):
        return check
    pairs = [(n, firsts[id(x)]) for n, x in enumerate(tensors) if firsts[id(x)] != n]
    return _check_with_repeats(check, places, pairs)


def _with_none(numbers: Sequence[int], places: Sequence[int]) -> list[int | None]:
    return [None if n in places else x for n, x in enumerate(numbers)]


def _check_with_repeats(
    check: Check, places: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> Check:
    """A check of tensors of which those of each pair are one; `check` is of those at the places."""

    def fits(*tensors: Any) -> bool:
        for n, first in pairs:
            if tensors[n] is not tensors[first]:
                return False
        return check(*[tensors[n] for n in places])

    return fits


def layout(x: Tensor | None) -> Any:
    """The layout of a tensor that a launcher is bound to: everything but address and contents.

    Raises TypeError for a tensor that has no strides.
    """
    if x is None:
        return None
    if x.is_nested or x.layout is not torch.strided:  # the former ends the process when asked
        raise TypeError("no strides")
    return x.shape, x.stride(), x.dtype, x.device


def with_types(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options as a cache knows them: the values and the type of each."""
    return values + tuple(map(type, values))


def _recorded(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def device_to_enter(x: Tensor) -> int | None:
    """The index of a GPU that has to be made current; None where there is only one device."""
    return x.device.index if x.is_cuda and torch.cuda.device_count() > 1 else None


def launch_on(device: int | None, launcher: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the launcher with this device current."""
    if device is None or device == current_device():
        return launcher(*arguments)
    with torch.cuda.device(device):
        return launcher(*arguments)
