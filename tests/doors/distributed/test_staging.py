"""What runs on a GPU that two ranks share, on a CPU: the same cases, and the same way through host
memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rank_cases import CACHES, SEQUENCES, CacheSizes, Sizes, compare, operands, shared_cache
from rank_tasks import cache, sequence
from ranks import Ranks

HALF = torch.bfloat16
SHORT = Sizes(320, (0, 30, 30, 200, 280, 310), 16, 16)
FEW_KEYS = CacheSizes(8, 2, 16, 208, 16)


@pytest.fixture(scope="module")
def through_host() -> Iterator[Ranks]:
    with Ranks(2, staged=True) as pool:
        yield pool


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str, through_host: Ranks) -> None:
    way, packed, options = SEQUENCES[name]
    call = operands(options, (8, 2), packed=packed, dtype=HALF, sizes=SHORT)
    compare(call, way["layout"], through_host.run(sequence, 2, way, call))


@pytest.mark.parametrize("name", CACHES)
def test_caches(name: str, through_host: Ranks) -> None:
    case, options = CACHES[name]
    shared = shared_cache(case | {"size": 2}, options, dtype=HALF, sizes=FEW_KEYS)
    shared.compare(through_host.run(cache, 2, shared.way, shared.calls))
