"""Compiled Triton kernels launched again with as little Python as possible.

`compiled[grid](*args)` runs two Python functions of Triton on every launch, which work out scratch
memory, metadata and hooks and hand them to a C function. Between launches of one kernel on one grid
only the stream and the arguments change. So `bind` lets Triton's own launcher run once with a
recorder in place of the C function, keeps what the recorder was given, and from then on calls the C
function with that.

Where Triton would do more on each launch (scratch memory, instrumentation), or where its launcher
cannot be recorded, `bind` returns None and the caller launches through Triton. So it does while a
launch hook is set, as a profiler does: see `observed`. Written for Triton 3.6, whose C function
takes the arguments one by one, and 3.7 to 3.9, where they are a tuple.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import triton
from triton.compiler.compiler import make_backend

from splitkv.kernels.host.arguments import in_order

Launch = Callable[..., None]
"""`launch(stream, *args)`: args as the kernel's parameters up to the bound tail, addresses for
tensors, and for a tensor descriptor the items of its `TensorMaps`, unpacked."""


_runtime = triton.knobs.runtime
# The hooks in its own two chains, and what has been set in place of its own: without any of these
# none is `observed`. Lists and a dict are asked sooner.
KNOBS = vars(_runtime)
ENTER_HOOKS = getattr(_runtime.launch_enter_hook, "calls", ())
EXIT_HOOKS = getattr(_runtime.launch_exit_hook, "calls", ())


def observed() -> Any:
    """Whether a launch hook of Triton is set: in one of its chains of them, or in place of one."""
    try:
        return _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls
    except AttributeError:
        hooks = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        return any(getattr(hook, "calls", hook) for hook in hooks)


def bind(compiled: Any, grid: tuple[int, int, int], tail: Sequence[Any] = ()) -> Launch | None:
    """A launch of a compiled kernel on a grid, its last arguments always `tail`, without hooks.

    The current device has to be the one that the kernel was compiled for. None: no way is known.
    """
    calling = calling_of(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling
    x, y, z = grid
    tail = tuple(tail)

    def one_by_one(stream: int, *args: Any) -> None:
        function(x, y, z, stream, *fixed, *args, *tail)

    def in_a_tuple(stream: int, *args: Any) -> None:
        function(x, y, z, stream, *fixed, (*args, *tail))

    return holding(compiled, in_a_tuple if as_tuple else one_by_one)


Grid = tuple[int, int, int]
LaunchOn = Callable[[Grid, Sequence[Any]], Launch]
"""`launch_on(grid, tail)`: a launch on the grid whose last arguments are always `tail`."""


def bind_to_grids(compiled: Any) -> LaunchOn | None:
    """Binds launches of a kernel on every grid and with every last arguments, see `bind`. None: no
    way is known. Whoever keeps one holds the kernel, see `holding`."""
    calling = calling_of(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling

    def one_by_one(grid: Grid, tail: Sequence[Any], stream: int, *args: Any) -> None:
        function(*grid, stream, *fixed, *args, *tail)

    def in_a_tuple(grid: Grid, tail: Sequence[Any], stream: int, *args: Any) -> None:
        function(*grid, stream, *fixed, (*args, *tail))

    # made for every length: less than functions of it
    return partial(partial, holding(compiled, in_a_tuple if as_tuple else one_by_one))


Binder = TypeVar("Binder")


class LatestKernel(Generic[Binder]):
    """The latest of the compiled kernels that launches were bound of, and what binds them.

    bind   bind(compiled): what binds launches of a kernel; None: no way is known
    """

    def __init__(self, bind: Callable[[Any], Binder | None]) -> None:
        self.bind = bind
        self.latest: tuple[Any, Binder | None] = (None, None)

    def binder(self, compiled: Any) -> Binder | None:
        """Gives what binds launches of a kernel, made once while that is the latest."""
        known, found = self.latest
        if known is not compiled:
            found = self.bind(compiled)
            self.latest = compiled, found  # at once, as other threads may ask
        return found


def launch_by_name(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: Any
) -> Any:
    """Launches a kernel through Triton with named arguments; what that compiled."""
    return kernel[grid](*in_order(kernel, arguments), enable_fp_fusion=True, **options)


def in_clusters(compiled: Any, size: int, more_shared: int) -> Any:
    """The compiled kernel, launched in clusters: the first axis of its grid counts clusters of
    `size` programs, which are neighbours along it.

    more_shared   bytes of shared memory of each program behind what Triton gave out, from the next
                  multiple of 16 on
    """
    made, metadata = copy.copy(compiled), compiled.metadata
    shared = -(-metadata.shared // 16) * 16 + more_shared
    metadata = metadata._replace(num_ctas=size, shared=shared)
    made.metadata = metadata
    made.packed_metadata = make_backend(metadata.target).pack_metadata(metadata)
    made.module = made.function = made._run = None  # to be loaded with room for so much
    return made


def launch_of(compiled: Any, grid: tuple[int, int, int], tail: Sequence[Any] = ()) -> Launch:
    """Binds a launch, in Triton's own way where there is no other; arguments are addresses."""
    launch = bind(compiled, grid, tail)
    if launch is not None:
        return launch
    run, tail = compiled[grid], tuple(tail)

    def through_triton(stream: int, *args: Any) -> None:
        run(*args, *tail, stream=stream)

    return through_triton


def launch_latest(
    launches: LatestKernel[LaunchOn], compiled: Any, grid: Grid, tail: Sequence[Any]
) -> Launch:
    """Binds a launch as `launch_of` does, of a kernel that others were bound of before."""
    launch_on = launches.binder(compiled)
    return launch_of(compiled, grid, tail) if launch_on is None else launch_on(grid, tail)


Held = TypeVar("Held", bound=Callable[..., Any])


def holding(compiled: Any, launch: Held) -> Held:
    """The launch, and with it the kernel: Triton 3.9 unloads one that nobody holds."""
    launch.__dict__["kernel"] = compiled
    return launch


Calling = tuple[Callable[..., Any], tuple[Any, ...], bool]
_callings: WeakKeyDictionary[Any, Calling | None] = WeakKeyDictionary()


def calling_of(compiled: Any) -> Calling | None:
    """Triton's C function, what it is given between stream and arguments, and whether these are one
    tuple. None where calling it so is not known to be all that Triton's launcher does.
    """
    try:
        return _callings[compiled]
    except KeyError:
        found = _callings[compiled] = _recorded(compiled)
        return found


def _recorded(compiled: Any) -> Calling | None:
    run, recorded = compiled.run, []
    function = _c_function(compiled)
    scratch = ("global_scratch_size", "profile_scratch_size")
    if function is None or any(getattr(run, name, None) != 0 for name in scratch):
        return None
    start, no_hooks = tuple(object() for _ in ("x", "y", "z", "stream")), (None, None, None)
    args = object(), object()
    recorder = copy.copy(run)
    recorder.launch = lambda *args: recorded.append(args)
    try:
        recorder(*start, compiled.function, compiled.packed_metadata, *no_hooks, *args)
    except (AttributeError, TypeError):
        return None
    if len(recorded) != 1 or recorded[0][:4] != start:
        return None
    rest = recorded[0][4:]
    if rest[-1:] == (args,):
        return function, rest[:-1], True
    return (function, rest[:-2], False) if rest[-2:] == args else None


def _c_function(compiled: Any) -> Callable[..., Any] | None:
    """The C function that Triton's launcher calls, or wraps in order to build tensor
    descriptors."""
    launch = getattr(compiled.run, "launch", None)
    found = [launch]
    if isinstance(launch, FunctionType) and getattr(compiled.metadata, "tensordesc_meta", None):
        found = [cell.cell_contents for cell in launch.__closure__ or ()]
    found = [x for x in found if callable(x) and not isinstance(x, FunctionType)]
    return found[0] if len(found) == 1 else None
