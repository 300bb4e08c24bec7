"""Every model type of transformers against its eager attention: `make test-models`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from model_types import OUTCOMES  # noqa: E402
from sweeping import outcome_of  # noqa: E402


@pytest.mark.filterwarnings("ignore")  # of transformers' models
@pytest.mark.parametrize("model_type", OUTCOMES)
def test_equal_or_refused(model_type: str, record_property: Callable[[str, object], None]) -> None:
    outcome = outcome_of(model_type)
    record_property("outcome", str(outcome))
    assert outcome.kind == OUTCOMES[model_type], outcome
