"""Kernels to which tensors are given by name: launched through Triton, and once it has compiled
them with addresses."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from splitkv.kernels.host.launch import calling_of, holding, launch_by_name
from splitkv.kernels.host.tensor_maps import MapsOfLength, Tile, tile_of


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
    calling = None if compiled is None else calling_of(compiled)
    return None if calling is None else AddressKernel(launch, compiled, calling, names, present)
