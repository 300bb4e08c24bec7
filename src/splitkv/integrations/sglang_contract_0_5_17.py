"""Where releases of SGLang differ, as 0.5.17 and 0.5.18 have it: the server's arguments are written
over as they are resolved, by methods of their own.

`splitkv.integrations.sglang` imports it where SGLang's `ServerArgs` has the method that ADJUSTMENTS
names, and `sglang_contract_0_5_19`, which has the same names, elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ADJUSTMENTS = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
"""What adjusts a server's arguments to the model, and refuses a backend that it cannot have."""


def resolved(arguments: Any) -> Any:
    """A server's arguments with what was decided where none was given."""
    return arguments


def config_of(arguments: Any) -> Any:
    """The configuration of the model that these arguments name, as transformers has it."""
    return arguments.get_model_config().hf_config


@contextmanager
def backends_named(arguments: Any, name: Callable[[str], str]) -> Iterator[None]:
    """Within it ADJUSTMENTS sees the attention backends of prefill and decode by other names."""
    named = arguments._resolved_attention_backends
    arguments._resolved_attention_backends = lambda: tuple(map(name, named()))
    try:
        yield
    finally:
        del arguments._resolved_attention_backends
