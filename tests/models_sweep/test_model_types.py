"""Every model type of transformers against its eager attention: `make test-models`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from model_types import OUTCOMES  # noqa: E402
from sweeping import eager_of, generation_of, outcome_of  # noqa: E402


@pytest.mark.filterwarnings("ignore")  # of transformers' models
@pytest.mark.parametrize("model_type", OUTCOMES)
def test_equal_or_refused(model_type: str, record_property: Callable[[str, object], None]) -> None:
    outcome = outcome_of(model_type)
    record_property("outcome", str(outcome))
    assert outcome.kind == OUTCOMES[model_type], outcome


EQUAL = [model_type for model_type, kind in OUTCOMES.items() if kind == "equal"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", EQUAL)
def test_generates_what_eager_attention_does(model_type: str) -> None:
    """Encoders that are no decoders make a mask of the new token alone and keep the others in the
    cache: what eager attention then broadcasts is refused."""
    model = eager_of(model_type)
    if not model.can_generate():
        return
    for name, said in generation_of(model_type).items():
        encoder = not getattr(model.config, "is_decoder", True)
        assert said == "equal" or (encoder and "as the queries and keys" in said), (name, said)
