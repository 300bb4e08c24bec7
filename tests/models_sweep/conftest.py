"""Prints what became of each model type."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "nodeid")]
    said = {
        r.nodeid.partition("[")[2].rstrip("]"): str(dict(r.user_properties)["outcome"])
        for r in reports
        if "outcome" in dict(r.user_properties)
    }
    terminalreporter.section("model types")
    for model_type, outcome in sorted(said.items(), key=lambda pair: (pair[1], pair[0])):
        terminalreporter.line(f"{model_type:<28} {outcome}")
    kinds = Counter(outcome.split()[0] for outcome in said.values())
    terminalreporter.line(", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))
