"""Facts of a model that attention needs, from the configuration it is published with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitkv.core.errors import expect, expect_divides, expect_one_of, expect_size
from splitkv.core.scales import DTYPE_BYTES

WIDEST_CONTEXT = 32768  # of a configuration that says none, and at most unless asked for


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The attention layers of a model.

    windows   the window_size of each kind of layer
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_seqlen: int
    windows: tuple[tuple[int, int], ...]
    softcap: float

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.name}, {heads}, {self.dtype}, up to {self.max_seqlen} keys"


def attention_sizes(config: Mapping[str, Any] | str | os.PathLike[str]) -> AttentionSizes:
    """The AttentionSizes of a model.

    config   a `config.json` of Hugging Face, its path, or that of the folder it lies in; of a model
             of more than text, the part for text counts

    Raises ValueError where it does not say how many heads there are, or what they measure.
    """
    given, name = _read(config)
    text = given.get("text_config")
    if isinstance(text, Mapping):
        given = {**given, **text}
    heads = _size(given, "num_attention_heads")
    kv_heads = _size(given, "num_key_value_heads", heads)
    expect_divides("num_attention_heads", heads, num_key_value_heads=kv_heads)
    head_dim = given.get("head_dim") or _size(given, "hidden_size") // heads
    expect_size("head_dim", head_dim)
    dtype = str(given.get("dtype") or given.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    expect_one_of("torch_dtype", dtype, DTYPE_BYTES)
    longest = _size(given, "max_position_embeddings", WIDEST_CONTEXT)
    softcap = float(given.get("attn_logit_softcapping") or 0.0)
    return AttentionSizes(
        name=str(given.get("_name_or_path") or given.get("model_type") or name),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(head_dim),
        dtype=dtype,
        max_seqlen=min(longest, WIDEST_CONTEXT),
        windows=_windows(given),
        softcap=softcap,
    )


def _read(config: Any) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, "model"
    named = isinstance(config, str | os.PathLike)
    expect(named, "model", "a configuration, or the path of its JSON", config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model: expected the path of a JSON file, got {path}: {error}") from None
    expect(isinstance(given, dict), "model", "a JSON object", type(given).__name__)
    return given, path.resolve().parent.name


def _size(given: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value: Any = given.get(name)
    value = default if value is None else value
    expect(value is not None, f"model.{name}", "a number", value)
    expect_size(f"model.{name}", value)
    return int(value)


def _windows(given: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    full, window = (-1, -1), given.get("sliding_window")
    if not window or given.get("use_sliding_window") is False:
        return (full,)
    sliding = int(window) - 1, 0
    kinds = given.get("layer_types")
    if kinds is None:
        return (sliding,)
    found = dict.fromkeys(sliding if kind == "sliding_attention" else full for kind in kinds)
    return tuple(found)
