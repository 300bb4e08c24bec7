"""The reasons that a kernel has against a problem."""

from __future__ import annotations

from splitkv.core.device import Device
from splitkv.core.kv import Paged, Place
from splitkv.core.problem import Problem


class Reasons(list[str]):
    """Reasons against a problem, each the line that an `UnsupportedProblem` prints.

    What names a value of the problem is appended where it is a reason, and not put into words
    before: a plan asks every kernel, and most problems have nothing against most of them.
    """

    def expect(self, ok: bool, reason: str) -> None:
        """Adds a reason unless `ok`: what the problem has, and what was expected in its place."""
        if not ok:
            self.append(reason)

    def expect_triton(self, problem: Problem, device: Device) -> None:
        """A device and a type that every kernel in Triton can run with."""
        if device.kind != "cuda":
            self.append(f"device {device.kind}: expected cuda")
        elif device.capability < (8, 0):
            self.append(f"device {device.arch}: expected sm_80 or newer")
        if problem.dtype not in ("bfloat16", "float16", "float32"):
            self.append(f"dtype {problem.dtype}: expected bfloat16, float16 or float32")

    def expect_16_bits(self, problem: Problem) -> None:
        """A type that the kernels for Hopper have code for."""
        if problem.dtype not in ("bfloat16", "float16"):
            self.append(f"dtype {problem.dtype}: expected bfloat16 or float16")

    def expect_pages(self, place: Place) -> None:
        """Pages, if any, that TMA can copy from."""
        if isinstance(place, Paged) and place.page_size % 16:
            self.append(f"page_size {place.page_size}: expected a multiple of 16")


def expect_hopper(device: Device) -> list[str]:
    """The reason against a device that is not sm_90: nothing else of the kernel matters then."""
    hopper = device.kind == "cuda" and device.capability == (9, 0)
    return [] if hopper else [f"device {device.arch}: expected sm_90"]
