"""What tests of calls whose lengths change share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gpu import compilations


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The kernels that Triton compiles, or loads from its cache, during a test."""
    with compilations() as made:
        yield made
