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
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import triton
from triton.compiler.compiler import make_backend

from splitkv.kernels.host import workspace
from splitkv.kernels.host.arguments import in_order

Layout = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of a tensor."""
Launch = Callable[..., None]
"""`launch(stream, *args)`: args as the kernel's parameters up to the bound tail, addresses for
tensors, and for a tensor descriptor the items of its `TensorMaps`, unpacked."""

MAX_MAPS = 4096  # tensor maps kept, of about 400 bytes each; past it the cache starts afresh
MAX_OPERANDS = MAX_MAPS // 4  # of whole sequences in one layout; past it these start afresh
_runtime = triton.knobs.runtime
# The hooks in its own two chains, and what has been set in place of its own: without any of these
# none is `observed`. Lists and a dict are asked sooner.
_set = vars(_runtime)
_entered = getattr(_runtime.launch_enter_hook, "calls", ())
_left = getattr(_runtime.launch_exit_hook, "calls", ())


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
    calling = _calling(compiled)
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
    calling = _calling(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling

    def one_by_one(grid: Grid, tail: Sequence[Any], stream: int, *args: Any) -> None:
        function(*grid, stream, *fixed, *args, *tail)

    def in_a_tuple(grid: Grid, tail: Sequence[Any], stream: int, *args: Any) -> None:
        function(*grid, stream, *fixed, (*args, *tail))

    # made for every length: less than functions of it
    return partial(partial, holding(compiled, in_a_tuple if as_tuple else one_by_one))


LaunchWith = Callable[[Sequence[Any], Any, Any], Launch]
"""`launch_with(tail, k_maps, v_maps)`: a launch whose last arguments are always `tail`, and which
takes K and V as the items of these maps of their addresses."""


def bind_to_maps(compiled: Any, grid: tuple[int, int, int]) -> LaunchWith | None:
    """Binds launches of a kernel that takes q, k and v, these as descriptors, and a page table:
    `launch(stream, at_q, (at_k, at_v, at_table), *args)`, as `Repeat` launches a split. None: no
    way is known. Whoever keeps one holds the kernel, see `holding`.
    """
    calling = _calling(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling
    x, y, z = grid

    def one_by_one(tail: Sequence[Any], k_maps: Any, v_maps: Any) -> Launch:
        def launch(stream: int, at_q: int, kv: tuple[int, int, int | None], *args: Any) -> None:
            at_k, at_v, at_table = kv
            k, v = k_maps[at_k], v_maps[at_v]
            function(x, y, z, stream, *fixed, at_q, *k, *v, at_table, *args, *tail)

        return launch

    def in_a_tuple(tail: Sequence[Any], k_maps: Any, v_maps: Any) -> Launch:
        def launch(stream: int, at_q: int, kv: tuple[int, int, int | None], *args: Any) -> None:
            at_k, at_v, at_table = kv
            k, v = k_maps[at_k], v_maps[at_v]
            function(x, y, z, stream, *fixed, (at_q, *k, *v, at_table, *args, *tail))

        return launch

    return in_a_tuple if as_tuple else one_by_one


LengthLaunch = Callable[..., None]
"""`launch(length, at_layout, stream, *args)`: a Launch for caches of this length, which is among
its last arguments; at_layout: what their layout changes, such as a `CacheMaps`."""
CacheMaps = tuple[
    tuple[Sequence[Any], Sequence[Any]], dict[Any, tuple[Any, ...]], tuple[Layout, Layout]
]
"""(around, known, layouts): the arguments before the length and those behind it; what the kernel
takes of caches and page tables that are known by their addresses; and the layouts of K and V for
others. A plain tuple, as one is made for every length of caches that are made anew."""


def bind_to_lengths(
    compiled: Any, grid: tuple[int, int, int], tiles: tuple[Tile, Tile]
) -> LengthLaunch | None:
    """Binds a launch of a kernel as `bind_to_maps` has them, for caches that grow: its at_layout is
    a `CacheMaps`. None: no way is known.

    tiles   of K and V
    """
    calling = _calling(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling
    x, y, z = grid

    def one_by_one(
        length: int, layout: CacheMaps, stream: int, at_q: int, kv: Any, *args: Any
    ) -> None:
        before, behind = layout[0]
        caches = layout[1].get(kv) or make_maps(tiles, layout, kv)
        function(x, y, z, stream, *fixed, at_q, *caches, *args, *before, length, *behind)

    def in_a_tuple(
        length: int, layout: CacheMaps, stream: int, at_q: int, kv: Any, *args: Any
    ) -> None:
        before, behind = layout[0]
        caches = layout[1].get(kv) or make_maps(tiles, layout, kv)
        rest = at_q, *caches, *args, *before, length, *behind
        function(x, y, z, stream, *fixed, rest)

    return holding(compiled, in_a_tuple if as_tuple else one_by_one)


def make_maps(
    tiles: tuple[Tile, Tile], layout: CacheMaps, kv: tuple[int, int, int | None]
) -> tuple[Any, ...]:
    """Asks the driver for maps of K and V at these addresses, and keeps them as a kernel takes
    them: each as of `TensorMaps`, and the address of a page table."""
    known, ((shape, strides), (shape_v, strides_v)) = layout[1:]
    ((fill, box), (fill_v, box_v)), (at_k, at_v, table) = tiles, kv
    k = fill(at_k, *box, shape, strides, 0), *shape, *strides
    v = fill_v(at_v, *box_v, shape_v, strides_v, 0), *shape_v, *strides_v
    if len(known) >= MAX_MAPS:
        known.clear()
    made = known[kv] = *k, *v, table
    return made


OperandBox = tuple[int, "Tile", Any]
"""(operand, tile, box): which of (q, k, v, out) a descriptor is of, the tile that the kernel is
compiled for, and a box, whose `layout(shape, strides)` gives both as TMA is to see them, alike for
all of one `length`."""
OperandMaps = tuple[dict["OperandAddresses", tuple[Any, ...]], Sequence[Layout]]
"""(known, layouts): what the kernel takes of operands that are known by their addresses; and the
layouts of q, k, v and out, for others."""
LaunchLayout = tuple[Grid, Sequence[Any], OperandMaps]
"""(grid, tail, maps): the last arguments of a launch on the grid are always `tail`. A plain tuple,
as one is made for every length."""
LaunchAt = Callable[[LaunchLayout], Launch]
"""Gives a launch, as `Sequences` has it."""


def bind_to_descriptors(compiled: Any, boxes: Sequence[OperandBox | None]) -> LaunchAt | None:
    """Binds launches of a kernel whose first arguments are descriptors, or None, of these boxes,
    and which knows no ALiBi. None: no way is known. Whoever keeps one holds the kernel, see
    `holding`.
    """
    calling = _calling(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling

    def one_by_one(
        layout: LaunchLayout, stream: int, at: Any, memory: Any, row: Any, *args: Any
    ) -> None:
        grid, tail, maps = layout
        operands = maps[0].get(at) or make_operand_maps(boxes, maps, at)
        function(*grid, stream, *fixed, *operands, *memory, row[0], *args, *tail)

    def in_a_tuple(
        layout: LaunchLayout, stream: int, at: Any, memory: Any, row: Any, *args: Any
    ) -> None:
        grid, tail, maps = layout
        operands = maps[0].get(at) or make_operand_maps(boxes, maps, at)
        function(*grid, stream, *fixed, (*operands, *memory, row[0], *args, *tail))

    # made for every length: less than functions of it
    return partial(partial, in_a_tuple if as_tuple else one_by_one)


def make_operand_maps(
    boxes: Sequence[OperandBox | None], maps: OperandMaps, at: OperandAddresses
) -> tuple[Any, ...]:
    """Asks the driver for maps of operands at these addresses, and keeps them as a kernel takes
    them: each as of `TensorMaps`, or None."""
    known, layouts = maps
    made: list[Any] = []
    before = of = seen = None
    for described in boxes:
        if described is None:
            made.append(None)
            continue
        operand, (fill, (swizzle, size, element, tile)), box = described
        given, length = layouts[operand], box.length
        if seen is None or given is not before or length != of:
            before, of, seen = given, length, box.layout(*given)
        shape, strides = seen
        made += fill(at[operand], swizzle, size, element, tile, shape, strides, 0), *shape, *strides
    if len(known) >= MAX_OPERANDS:
        known.clear()
    found = known[at] = tuple(made)
    return found


def launch_by_name(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: Any
) -> Any:
    """Launches a kernel through Triton with named arguments; what that compiled."""
    return kernel[grid](*in_order(kernel, arguments), enable_fp_fusion=True, **options)


class AddressLaunch(NamedTuple):
    """A launch of a compiled kernel with addresses: `function(*pack(per_call))`.

    pack       the arguments of the function, of which nothing else is part than per_call: the
               stream, and addresses in the order of the names that the launch was bound with, None
               for a tensor that is not there. Whoever launches with the same again may keep them
    """

    function: Callable[..., Any]
    pack: Callable[[Sequence[Any]], tuple[Any, ...]]


class KernelLaunch(NamedTuple):
    """A launch of a kernel to which tensors are given by name.

    arguments   all but those of tensors, by the kernel's parameters
    pointers    the parameters that are pointers or descriptors, and the names of tensors for them;
                for a record of pointers one of names, of which the first is there if any is
    layouts     of those that are descriptors: `shape` and `strides` of the tensor, and `descriptor`
                to describe one
    options     of Triton
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    pointers: Mapping[str, Any]
    layouts: Mapping[str, Any]
    options: Mapping[str, Any]

    def through_triton(self, tensors: Mapping[str, Any]) -> Any:
        """Launches it; what Triton compiled."""
        arguments = dict(self.arguments)
        for parameter, name in self.pointers.items():
            if isinstance(name, tuple):
                record: Any = type(name)
                items = [tensors.get(item) for item in name]
                arguments[parameter] = None if items[0] is None else record(*items)
            else:
                x, layout = tensors.get(name), self.layouts.get(parameter)
                if x is not None and layout is not None:
                    x = layout.descriptor(x)
                arguments[parameter] = x
        return launch_by_name(self.kernel, self.grid, arguments, **self.options)


GRID_AND_STREAM, STREAM_AT = (0, 0, 0, 0), 3
"""The first arguments of the C function where it takes them one by one, to be filled in."""


class AddressKernel:
    """A compiled kernel, to be launched with addresses and with the arguments of other lengths.

    launch    what it was compiled for
    calling   how to call it, see `_calling`
    names     of the addresses that a launch is given
    present   those of tensors that there are
    """

    def __init__(
        self,
        launch: KernelLaunch,
        compiled: Any,
        calling: Any,
        names: Sequence[str],
        present: Container[str],
    ) -> None:
        self.compiled, self.calling = compiled, calling
        fixed, as_tuple = calling[1:]
        number = {name: n for n, name in enumerate(names, 1)}  # behind the stream
        # the grid, the stream and what follows it come first, or where these are one tuple are none
        # of the arguments
        self.template: list[Any] = [] if as_tuple else [*GRID_AND_STREAM, *fixed]
        self.place: dict[str, int] = {}  # of the arguments there
        # of the template, and of what is given in each call
        self.pointers: list[tuple[int, int]] = [] if as_tuple else [(STREAM_AT, 0)]
        self.records: list[tuple[int, Callable[[Sequence[Any]], tuple[Any, ...]]]] = []
        self.maps: list[tuple[str, Tile, int, int]] = []
        for parameter in launch.kernel.arg_names:
            name, layout = launch.pointers.get(parameter), launch.layouts.get(parameter)
            at = len(self.template)
            if name is None:
                self.template.append(launch.arguments[parameter])
                self.place[parameter] = at
                continue
            self.template.append(None)
            if isinstance(name, tuple):
                if name[0] in present:
                    self.records.append((at, itemgetter(*(number[item] for item in name))))
            elif name not in present:
                continue
            elif layout is None:
                self.pointers.append((at, number[name]))
            else:
                tile = tile_of(compiled, len(self.maps))
                self.maps.append((parameter, tile, at, number[name]))
                self.template += [*layout.shape, *layout.strides]

    def bind(self, launch: KernelLaunch) -> AddressLaunch:
        """Binds it to the grid, arguments and layouts of a launch for which it would be compiled
        alike."""
        function, fixed, as_tuple = self.calling
        x, y, z = (*launch.grid, 1, 1)[:3]
        template, place = self.template.copy(), self.place
        if not as_tuple:
            template[:STREAM_AT] = x, y, z
        for parameter, value in launch.arguments.items():
            template[place[parameter]] = value
        maps: list[tuple[int, int, MapsOfLength]] = []
        for parameter, tile, at, n in self.maps:
            layout = launch.layouts[parameter]
            shape, strides = layout.shape, layout.strides
            template[at + 1 : at + 1 + 2 * len(shape)] = [*shape, *strides]
            maps.append((at, n, MapsOfLength(tile, shape, strides)))
        pointers, records = self.pointers, self.records

        def pack(per_call: Sequence[Any]) -> tuple[Any, ...]:
            args = template.copy()
            for at, n in pointers:
                args[at] = per_call[n]
            for at, n, kept in maps:
                args[at] = kept[per_call[n]][0]
            for at, items in records:
                args[at] = items(per_call)
            if as_tuple:
                args = [x, y, z, per_call[0], *fixed, tuple(args)]
            return tuple(args)

        return AddressLaunch(function, holding(self.compiled, pack))


def address_kernel(
    launch: KernelLaunch, compiled: Any, names: Sequence[str], present: Container[str]
) -> AddressKernel | None:
    """The AddressKernel of what Triton compiled for a launch; None: no way is known."""
    calling = None if compiled is None else _calling(compiled)
    return None if calling is None else AddressKernel(launch, compiled, calling, names, present)


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


Held = TypeVar("Held", bound=Callable[..., Any])


def holding(compiled: Any, launch: Held) -> Held:
    """The launch, and with it the kernel: Triton 3.9 unloads one that nobody holds."""
    launch.__dict__["kernel"] = compiled
    return launch


_Calling = tuple[Callable[..., Any], tuple[Any, ...], bool]
_callings: WeakKeyDictionary[Any, _Calling | None] = WeakKeyDictionary()


def _calling(compiled: Any) -> _Calling | None:
    """Triton's C function, what it is given between stream and arguments, and whether these are one
    tuple. None where calling it so is not known to be all that Triton's launcher does.
    """
    try:
        return _callings[compiled]
    except KeyError:
        found = _callings[compiled] = _recorded(compiled)
        return found


def _recorded(compiled: Any) -> _Calling | None:
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


class JustAddresses(dict[int, tuple[Any, ...]]):
    """In the place of `TensorMaps`, for a kernel that takes a pointer there."""

    def __missing__(self, address: int) -> tuple[Any, ...]:
        return (address,)


JUST_ADDRESSES = JustAddresses()


class Tile(NamedTuple):
    """The tile of a tensor descriptor that a kernel is compiled for.

    fill    the driver's function that makes a map
    box     in its terms: swizzle, bytes of an element, its type, elements along each dimension
    """

    fill: Callable[..., Any]
    box: tuple[Any, int, int, Any]


def tile_of(compiled: Any, index: int) -> Tile:
    """The Tile of a kernel's descriptor of this number."""
    meta = compiled.metadata.tensordesc_meta[index]
    assert not meta["fp4_padded"] and not meta.get("is_im2col"), f"plain tiles only, got {meta}"
    driver = sys.modules[type(compiled.run).__module__]
    element_type = driver.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None)  # from Triton 3.7 on
    box = meta["swizzle"], meta["elem_size"], element_type, meta["block_size"]
    return Tile(fill or utils.fill_tma_descriptor, box)


class TensorMaps(dict[int, tuple[Any, ...]]):
    """Arguments of the C function in the place of one tensor descriptor, made once an address.

    shape, strides   of the tensor, in elements; the last stride is 1

    `maps[address]` is (CUtensorMap, *shape, *strides). A map holds an address and a layout and no
    memory, so it stays right when the memory is freed and taken again. Out of bounds reads 0.
    """

    __slots__ = "fill", "given", "layout"

    def __init__(self, tile: Tile, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.fill = tile.fill
        self.given, self.layout = (*tile.box, shape, strides, 0), (*shape, *strides)

    def __missing__(self, address: int) -> tuple[Any, ...]:
        """Asks the driver for a map, and keeps it among all."""
        made = self.fill(address, *self.given), *self.layout
        if len(_made) >= MAX_MAPS:
            kept = _made[:]  # another thread may add to it
            del _made[: len(kept)]
            for maps, other in kept:
                maps.pop(other, None)
        _made.append((self, address))
        self[address] = made
        return made


_made: list[tuple[TensorMaps, int]] = []  # all maps that are kept


class MapsOfLength(dict[int, tuple[Any, ...]]):
    """In the place of `TensorMaps`, for tensors that have this length for a while: they are
    forgotten with it. There is one of every length, so it is made in little time."""

    __slots__ = "shape", "strides", "tile"

    def __init__(self, tile: Tile, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.tile, self.shape, self.strides = tile, shape, strides

    def __missing__(self, address: int) -> tuple[Any, ...]:
        (fill, box), shape, strides = self.tile, self.shape, self.strides
        if len(self) >= MAX_MAPS:
            self.clear()
        made = self[address] = fill(address, *box, shape, strides, 0), *shape, *strides
        return made


class Allocations:
    """Memory of a call that is relaunched: new results, and the partials of its stream.

    merge        as the class says, or None: one part each, or merged where they are made
    lse_shape    None: no LSE is wanted
    acc, rows    elements and rows of the partials

    `call` gives (out, lse or None), or None where the call has to go through Triton: an address is
    not a multiple of 16, which is another specialisation of the kernels, or a launch hook is set.
    Belongs to one device, which has to be current.
    """

    def __init__(
        self,
        merge: Launch | None,
        device: torch.device,
        dtype: torch.dtype,
        out_shape: Sequence[int],
        lse_shape: Sequence[int] | None,
        acc: int,
        rows: int,
    ) -> None:
        self.merge, self.dtype = merge, dtype
        self.empty = workspace.empty_strided(device)
        self.new_out = workspace.allocation(out_shape, dtype, device)
        self.new_lse: Any = None
        if lse_shape is not None:
            self.new_lse = workspace.allocation(lse_shape, torch.float32, device)
        self.device = device.index
        self.current_stream = torch._C._cuda_getCurrentRawStream
        self.capturing = torch._C._cuda_isCurrentStreamCapturing
        self.buffers, self.make_buffer = workspace.buffers(device.index), workspace.make_buffer
        self.counter = workspace.counter
        self.m_at, self.l_at, self.numel = workspace.layout(acc, rows)
        self.unread: int | None = None  # where results go that nobody reads, see workspace.py

    def take_buffer(
        self, stream: int, captured: Any, layout: tuple[int, int, int] | None = None
    ) -> tuple[Any, tuple[int, int, int]]:
        """A buffer for the partials, the stream's own where no graph is captured, which gets it
        back in `buffers` after the call; and the addresses of acc, m and l in it.

        layout   of `workspace.layout`; None: that of this call
        """
        m_at, l_at, numel = layout or (self.m_at, self.l_at, self.numel)
        buffer: Any = None if captured else self.buffers.pop(stream, None)
        if buffer is None or buffer[1] < numel:
            buffer = self.make_buffer(self.device, numel, captured)
        at = buffer[0]
        return buffer, (at, at + m_at, at + l_at)


class Repeat(Allocations):
    """A split-KV decode call: allocate, split, merge.

    split       split(stream, at_q, (at_k, at_v, at_table), at_lens, final, partial,
                (at_sink, at_slopes, at_q_scale, at_sink_tokens), head_scales, key_scales, scale,
                softcap), all of them addresses or None; final is (at_out, at_lse, at_out_scale);
                partial is (at_acc, at_m, at_l), or None without a merge; scales are (at_k_scale,
                at_v_scale); scale and softcap as in tile/score.py
    merge       merge(stream, partial, final, at_lens, at_sink)
    key_scales  scales of K and V are one a key, not one a head
    """

    def __init__(
        self, split: Launch, merge: Launch | None, *rest: Any, key_scales: bool = False
    ) -> None:
        super().__init__(merge, *rest)
        self.split, self.key_scales = split, key_scales
        self.partial: tuple[int, int, int] = (0, 0, 0)  # of the last call

    def call(
        self,
        q,
        k,
        v,
        out,
        lens,
        table,
        sink,
        slopes,
        q_scale,
        k_scale,
        v_scale,
        scale,
        softcap,
        new=None,
        out_scale=None,
        sequence_sink_tokens=None,
        split: LengthLaunch | None = None,
        length: int = 0,
        layout: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(out, lse or None), or None; split: another launch of the splits, for caches of this
        length and layout."""
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        given = at_q | at_k | at_v
        at_out = at_lens = at_table = at_sink = at_slopes = at_q_scale = at_out_scale = None
        at_sink_tokens = None
        of_heads = of_keys = None
        if out is not None:
            at_out = out.data_ptr()
            given |= at_out
        if lens is not None:
            at_lens = lens.data_ptr()
            given |= at_lens
        if table is not None:
            at_table = table.data_ptr()
            given |= at_table
        if sink is not None:
            at_sink = sink.data_ptr()
            given |= at_sink
        if slopes is not None:
            at_slopes = slopes.data_ptr()
            given |= at_slopes
        if k_scale is not None:
            of_cache = k_scale.data_ptr(), v_scale.data_ptr()
            given |= of_cache[0] | of_cache[1]
            of_heads, of_keys = (None, of_cache) if self.key_scales else (of_cache, None)
            if q_scale is not None:
                at_q_scale = q_scale.data_ptr()
                given |= at_q_scale
        if out_scale is not None:
            at_out_scale = out_scale.data_ptr()
            given |= at_out_scale
        if sequence_sink_tokens is not None:
            at_sink_tokens = sequence_sink_tokens.data_ptr()
            given |= at_sink_tokens
        if new is not None:
            appended, bits = addresses_of(new, at_k, at_v)
            given |= bits
        if given & 15 or _entered or _left or (_set and observed()):
            return None
        if out is None:
            out = self.new_out()
            at_out = out.data_ptr()
        lse = at_lse = None
        if self.new_lse is not None:
            lse = self.new_lse()
            at_lse = lse.data_ptr()
        if softcap:
            scale /= softcap
        else:
            scale, softcap = scale * 1.4426950408889634, None
        stream, merge = self.current_stream(self.device), self.merge
        kv, row = (at_k, at_v, at_table), (at_sink, at_slopes, at_q_scale, at_sink_tokens)
        final = at_out, at_lse, at_out_scale
        partial: tuple[int, int, int] | None = None
        if merge is not None:
            captured = stream and self.capturing()  # stream 0, the default, cannot be
            buffer: Any = None if captured else self.buffers.pop(stream, None)
            if buffer is None or buffer[1] < self.numel:
                buffer = self.make_buffer(self.device, self.numel, captured)
            at, kept = buffer[0], self.partial
            if kept[0] != at:
                kept = self.partial = at, at + self.m_at, at + self.l_at
            partial = kept
        # written out, as unpacking takes longer than the call
        if split is not None:
            split(
                length,
                layout,
                stream,
                at_q,
                kv,
                at_lens,
                final,
                partial,
                row,
                of_heads,
                of_keys,
                scale,
                softcap,
            )
        elif new is None:
            self.split(
                stream, at_q, kv, at_lens, final, partial, row, of_heads, of_keys, scale, softcap
            )
        else:
            scales = of_heads, of_keys, scale, softcap
            self.split(stream, at_q, kv, at_lens, final, partial, row, *scales, *appended)
        if merge is None:
            return out, lse
        if new is None:
            merge(stream, partial, final, at_lens, at_sink)
        else:
            merge(stream, partial, final, at_lens, at_sink, appended[0])
        if not captured:
            self.buffers[stream] = buffer
        return out, lse


def addresses_of(call: Any, at_k: int, at_v: int) -> tuple[tuple[Any, ...], int]:
    """(growth, new, turn) of a call of `append` to the caches at_k and at_v as addresses, and all
    their bits."""
    rotary = (None, None, None) if call.rotary is None else call.rotary[:3]
    growth, new, turn = (
        [None if x is None else x.data_ptr() for x in tensors]
        for tensors in (
            (call.cu_seqlens_new, call.leftpad),
            (call.k, call.v, call.k_scale, call.v_scale),
            rotary,
        )
    )
    bits = 0
    for at in (*growth, *new, *turn):
        bits |= at or 0
    new[2:2] = at_k, at_v
    return (tuple(growth), tuple(new), tuple(turn)), bits


OperandAddresses = tuple[int, int, int, int]
"""The addresses of (q, k, v, out); a plain tuple, as every call makes one."""
LaunchMemory = tuple[Any, Any, int | None, tuple[int | None, ...]]
"""(final, partial, counter, lengths): the addresses of (out, lse, None), of partials or None, of
counters where the launch merges them, and of (cu_seqlens_q, cu_seqlens_k, cache_seqlens,
page_table, a schedule of items)."""


class ItemLaunches(NamedTuple):
    """Launches of a call by a schedule of items, which lies behind its partials.

    schedule   schedule(stream, at_items, at_cu_seqlens_q, at_cache_seqlens)
    merge      merge(stream, partial, (at_out, at_lse, None), at_items, at_sink)
    numel      32-bit integers of the schedule
    """

    schedule: Launch
    merge: Launch
    numel: int


class Sequences:
    """Attention of whole sequences: allocate, launch, merge.

    launch   launch(stream, operands, memory, (at_sink, at_slopes), scales, scale, softcap), see
             `OperandAddresses` and `LaunchMemory`; scales are the addresses of those of (q, k, v)
    merge    merge(stream, partial, (at_out, at_lse, None), at_cu_seqlens_q, at_sink)
    items    ItemLaunches in the place of `merge`, or None
    memory   that calls of every length share
    results  layouts of out and lse, this None where nobody reads it: then it goes where all such go
    layout   of the partials, see `workspace.layout`

    There may be one of each length, so each has little of its own.
    """

    __slots__ = "items", "items_at", "launch", "layout", "lse", "memory", "merge", "out"

    def __init__(
        self,
        launch: Launch,
        merge: Launch | None,
        items: ItemLaunches | None,
        memory: Allocations,
        results: tuple[Layout, Layout | None],
        layout: tuple[int, int, int],
    ) -> None:
        self.launch, self.merge, self.memory = launch, merge, memory
        (self.out, self.lse), self.layout = results, layout
        self.items, self.items_at = items, 0
        if items is not None:  # its schedule has room behind the partials
            m_at, l_at, numel = layout
            first = -(-numel // 4) * 4  # 16 bytes
            self.items_at, self.layout = 4 * first, (m_at, l_at, first + items.numel)

    def with_launch(self, launch: Launch) -> Sequences:
        """Another, of which only the first launch differs; this one has no schedule."""
        results = self.out, self.lse
        return Sequences(launch, self.merge, None, self.memory, results, self.layout)

    def call(
        self,
        q,
        k,
        v,
        out,
        cu_q,
        cu_k,
        lens,
        table,
        sink,
        slopes,
        q_scale,
        k_scale,
        v_scale,
        scale,
        softcap,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        given = at_q | at_k | at_v
        at_cu_q = at_cu_k = at_lens = at_table = at_sink = at_slopes = None
        scales: tuple[int | None, int | None, int | None] = NO_SCALES
        if cu_q is not None:
            at_cu_q = cu_q.data_ptr()
            given |= at_cu_q
        if cu_k is not None:
            at_cu_k = cu_k.data_ptr()
            given |= at_cu_k
        if lens is not None:
            at_lens = lens.data_ptr()
            given |= at_lens
        if table is not None:
            at_table = table.data_ptr()
            given |= at_table
        if sink is not None:
            at_sink = sink.data_ptr()
            given |= at_sink
        if slopes is not None:
            at_slopes = slopes.data_ptr()
            given |= at_slopes
        if k_scale is not None:
            at_q_scale = None
            if q_scale is not None:
                at_q_scale = q_scale.data_ptr()
                given |= at_q_scale
            at_k_scale, at_v_scale = k_scale.data_ptr(), v_scale.data_ptr()
            given |= at_k_scale | at_v_scale
            scales = at_q_scale, at_k_scale, at_v_scale
        if out is not None:
            given |= out.data_ptr()
        if given & 15 or _entered or _left or (_set and observed()):
            return None
        memory, merge = self.memory, self.merge
        if out is None:
            out = memory.empty(*self.out, memory.dtype)
        lse, at_lse = None, memory.unread
        if self.lse is not None:
            lse = memory.empty(*self.lse, torch.float32)
            at_lse = lse.data_ptr()
        at_out = out.data_ptr()
        stream = memory.current_stream(memory.device)
        operands, final = (at_q, at_k, at_v, at_out), (at_out, at_lse, None)
        lengths = at_cu_q, at_cu_k, at_lens, at_table, None
        rest = (at_sink, at_slopes), scales, scale, softcap
        if not self.layout[2]:
            self.launch(stream, operands, (final, None, None, lengths), *rest)
            return out, lse
        captured = stream and memory.capturing()
        buffer, partial = memory.take_buffer(stream, captured, self.layout)
        items = self.items
        if items is not None:
            at_items = buffer[0] + self.items_at
            items.schedule(stream, at_items, at_cu_q, at_lens)
            lengths = *lengths[:4], at_items
            self.launch(stream, operands, (final, partial, None, lengths), *rest)
            items.merge(stream, partial, final, at_items, at_sink)
        elif merge is None:
            count = memory.counter(memory.device, stream, captured).data_ptr()
            self.launch(stream, operands, (final, partial, count, lengths), *rest)
        else:
            self.launch(stream, operands, (final, partial, None, lengths), *rest)
            merge(stream, partial, final, at_cu_q, at_sink)
        if not captured:
            memory.buffers[stream] = buffer
        return out, lse


NO_SCALES = None, None, None
NO_PARTIALS = 0, 0, 0
