"""One pool of ranks for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes; a call takes the first few."""
    with Ranks(4) as pool:
        yield pool
