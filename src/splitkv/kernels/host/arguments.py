"""Arguments of kernels by name: a dict, put in order once by the kernel's own parameter names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from splitkv.kernels.host.cache_keys import settle_key
from splitkv.kernels.host.compile_lock import one_at_a_time


def prepared(kernel: Any) -> Any:
    """The kernel, about to be launched through Triton: its key is settled, and one thread at a time
    compiles it."""
    return one_at_a_time(settle_key(kernel))


def in_order(kernel: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments in the order of the parameters of a kernel, which is `prepared`.

    AssertionError where one is missing, or where the kernel has no parameter of that name.
    """
    prepared(kernel)
    names = kernel.arg_names
    if arguments.keys() != set(names):  # some kernels are launched so in every call
        missing = [name for name in names if name not in arguments]
        unknown = [name for name in arguments if name not in names]
        raise AssertionError(
            f"arguments of {kernel.__name__}: missing {missing}, unknown {unknown}"
        )
    return tuple(map(arguments.__getitem__, names))


def tail_in_order(
    kernel: Any, per_call: Sequence[str], fixed: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments that never change, in the order of the kernel's parameters, which begin with
    those of each call, in just this order; AssertionError otherwise."""
    names = tuple(kernel.arg_names)
    assert names[: len(per_call)] == tuple(per_call), (
        f"arguments of {kernel.__name__}: expected {list(per_call)} first, "
        f"got {list(names[: len(per_call)])}"
    )
    every = in_order(kernel, {**dict.fromkeys(per_call), **fixed})
    assert not set(per_call) & set(fixed), f"arguments of {kernel.__name__}: given twice"
    return every[len(per_call) :]


def specialised(
    kernel: Any, arguments: Iterable[tuple[str, Any]], alike: Collection[str] = ()
) -> tuple[Hashable, ...]:
    """The arguments by name as far as Triton compiles for them: of run-time integers only whether
    there are any, and so of those that are `alike`, as strides are among what it is asked of."""
    free = {*getattr(kernel, "do_not_specialize", ()), *alike}  # the interpreter's has none
    return tuple([value is None if name in free else value for name, value in arguments])


class Tail:
    """The last arguments of a kernel, which do not change from call to call while lengths do not.

    alike     names of those that lengths change and Triton compiles for, as strides: what compares
              two kernels knows that these are alike
    lengths   names of all that `changed` is given, in its order
    """

    def __init__(
        self,
        kernel: Any,
        per_call: Sequence[str],
        fixed: Mapping[str, Any],
        alike: Collection[str],
        lengths: Sequence[str] = (),
    ) -> None:
        self.kernel, self.arguments = kernel, tail_in_order(kernel, per_call, fixed)
        self.place = {name: n for n, name in enumerate(kernel.arg_names[len(per_call) :])}
        self.alike, self.lengths = alike, lengths

    def variant(self) -> Hashable:
        """A key of the code that Triton compiles for these arguments."""
        named = zip(self.place, self.arguments, strict=True)
        return self.kernel, *specialised(self.kernel, named, self.alike)

    @cached_property
    def in_place(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Puts those of a length, which are behind all, into the places that they are for."""
        behind = {name: len(self.place) + n for n, name in enumerate(self.lengths)}
        assert behind.keys() <= self.place.keys(), f"no such arguments in {[*self.place]}"
        return itemgetter(*(self.place | behind).values())

    def changed(self, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """The arguments with others of a length in the place of these."""
        return self.in_place(self.arguments + arguments)  # sooner than with stars
