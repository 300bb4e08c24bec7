"""The reasons that a kernel has against a problem."""

from __future__ import annotations

from splitkv.core.device import Device
from splitkv.core.problem import Problem


class Reasons(list[str]):
    """Reasons against a problem, each the line that an `UnsupportedProblem` prints."""

    def expect(self, ok: bool, reason: str) -> None:
        """Adds a reason unless `ok`: what the problem has, and what was expected in its place."""
        if not ok:
            self.append(reason)

    def expect_triton(self, problem: Problem, device: Device) -> None:
        """A device and a type that every kernel in Triton can run with."""
        self.expect(device.kind == "cuda", f"device {device.kind}: expected cuda")
        if device.kind == "cuda":
            newer = device.capability >= (8, 0)
            self.expect(newer, f"device {device.arch}: expected sm_80 or newer")
        known = problem.dtype in ("bfloat16", "float16", "float32")
        self.expect(known, f"dtype {problem.dtype}: expected bfloat16, float16 or float32")


def expect_hopper(device: Device) -> list[str]:
    """The reason against a device that is not sm_90: nothing else of the kernel matters then."""
    hopper = device.kind == "cuda" and device.capability == (9, 0)
    return [] if hopper else [f"device {device.arch}: expected sm_90"]
