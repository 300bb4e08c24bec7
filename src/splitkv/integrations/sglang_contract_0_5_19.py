"""Where releases of SGLang differ, as 0.5.19 to 0.5.23 have it: the server's arguments stay as they
were given, what is decided lies over them, and functions of a module decide.

`splitkv.integrations.sglang` imports it where SGLang's `ServerArgs` has not the method that
`sglang_contract_0_5_17` hooks, which has the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.arg_groups import model_hook
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

ADJUSTMENTS = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
"""What adjusts a server's arguments to the model, and refuses a backend that it cannot have."""


def resolved(arguments: Any) -> Any:
    """A server's arguments with what was decided where none was given."""
    return resolved_view(arguments)


def config_of(arguments: Any) -> Any:
    """The configuration of the model that these arguments name, as transformers has it."""
    return model_config_of(arguments).hf_config


@contextmanager
def backends_named(arguments: Any, name: Callable[[str], str]) -> Iterator[None]:
    """Within it ADJUSTMENTS sees the attention backends of prefill and decode by other names."""
    named = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda of: tuple(map(name, named(of)))
    try:
        yield
    finally:
        model_hook.attention_backends_of = named
