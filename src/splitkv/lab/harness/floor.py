"""The read floor: how long this GPU takes to read so many bytes and do nothing else.

Attention over that many bytes of keys and values cannot be faster. Measured by the same protocol as
the calls it is compared with, the best of a few tile sizes and occupancies: on Hopper by TMA into
shared memory, elsewhere (and where Gluon is not) by loads into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.core.device import Device, current
from splitkv.lab.harness.timing import Protocol, Stopwatch, Timing, one_line, rotation

COLUMNS = 128  # bf16: rows of 256 bytes, as keys of head_dim 128
ROUNDS = 11
# (elements of a tile, warps, programs an SM)
LOAD_SETTINGS = (
    (4096, 4, 2),
    (4096, 4, 4),
    (8192, 4, 4),
    (8192, 8, 2),
    (16384, 8, 2),
    (16384, 8, 4),
)


@dataclass(frozen=True, slots=True)
class Floor:
    """The best time, and what read: `tma 64x12x1`, `load 8192x8x2`, with its setting."""

    timing: Timing
    by: str

    def as_record(self) -> dict[str, Any]:
        """The floor as records hold it."""
        return {"us": self.timing.us, "spread_us": self.timing.spread_us, "by": self.by}


@triton.jit
def read_loads(x_ptr, out_ptr, num_tiles, size, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.int32)
    for n in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        offs = tl.cast(n, tl.int64) * TILE + tl.arange(0, TILE)  # [TILE]
        total ^= tl.load(x_ptr + offs, mask=offs < size, other=0)
    # A store that the compiler cannot rule out, or it would leave the loads out.
    tl.store(out_ptr + tl.arange(0, TILE), total, mask=total == 0x5EED)


def load_reader(
    buffers: Sequence[Tensor], num_sms: int, setting: tuple[int, int, int]
) -> Callable[[int], Any]:
    """`read(i)` reads buffers[i] once, through registers."""
    tile, num_warps, programs_an_sm = setting
    words = [x.view(torch.int32).flatten() for x in buffers]
    out = torch.zeros(tile, dtype=torch.int32, device=buffers[0].device)
    size = words[0].numel()
    num_tiles = -(-size // tile)
    grid = (min(num_sms * programs_an_sm, num_tiles),)

    def read(i: int) -> None:
        read_loads[grid](words[i], out, num_tiles, size, TILE=tile, num_warps=num_warps)

    return read


@dataclass
class Floors:
    """Floors of one run, each number of bytes measured once."""

    protocol: Protocol
    known: dict[int, Floor] = field(default_factory=dict)

    def __call__(self, num_bytes: int) -> Floor:
        if num_bytes not in self.known:
            protocol = replace(self.protocol, rounds=min(ROUNDS, self.protocol.rounds))
            self.known[num_bytes] = measure_floor(num_bytes, protocol, current())
        return self.known[num_bytes]


def measure_floor(num_bytes: int, protocol: Protocol, device: Device) -> Floor:
    """The read floor of the GPU that is here; raises RuntimeError where no reader runs."""
    count = rotation(num_bytes, device.l2_bytes, protocol.warm)
    rows = -(-num_bytes // (2 * COLUMNS))
    buffers = torch.randn(count, rows, COLUMNS, device="cuda", dtype=torch.bfloat16)
    q = torch.empty(count, 1024, device="cuda", dtype=torch.bfloat16)
    watch = Stopwatch(protocol, torch.zeros_like(q[0]), q)
    failures = []
    for name, settings, make in readers(device):
        found = []
        for setting in settings:
            try:
                replay = watch.capture(make(buffers.unbind(), device.num_sms, setting))
            except Exception as error:  # a setting that this GPU has no room for
                failures.append(f"{name} {setting}: {one_line(error)}")
                torch.cuda.synchronize()
                continue
            timing = watch.time({name: replay})[name]
            found.append(Floor(timing, f"{name} {'x'.join(map(str, setting))}"))
        if found:
            return min(found, key=lambda floor: floor.timing.us)
    raise RuntimeError(f"no reader runs: {'; '.join(failures)}")


def readers(device: Device) -> list[tuple[str, Sequence[tuple[int, int, int]], Callable[..., Any]]]:
    """(name, settings, maker) of what can read here, the first that runs is the floor."""
    loads = ("load", LOAD_SETTINGS, load_reader)
    if device.capability != (9, 0):
        return [loads]
    try:
        from splitkv.lab.harness import read_tma
    except ImportError:  # this Triton has no Gluon, or another one
        return [loads]
    return [("tma", read_tma.SETTINGS, read_tma.reader), loads]
