"""The reasons that a kernel has against a problem."""

from __future__ import annotations


class Reasons(list[str]):
    """Reasons against a problem, each the line that an `UnsupportedProblem` prints."""

    def expect(self, ok: bool, reason: str) -> None:
        """Adds a reason unless `ok`: what the problem has, and what was expected in its place."""
        if not ok:
            self.append(reason)
