"""Text that is on every machine: the standard library's sources and the licence of Python."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 128  # ASCII; everything else becomes a question mark


def corpus(max_chars: int = 1_500_000) -> str:
    """Text that is one for one Python: the licence, then modules in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    licences = [library / "LICENSE.txt", library.parent / "LICENSE.txt"]
    files = [f for f in licences if f.is_file()][:1] + sorted(library.glob("*.py"))
    parts, size = [], 0
    for file in files:
        if size >= max_chars:
            break
        parts.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
    text = "\n".join(parts)[:max_chars]
    if len(text) < 10_000:
        raise ValueError(
            f"standard library: expected source files in {library}, got {len(text)} characters"
        )
    return text


def encode(text: str) -> Tensor:
    """`[characters]` int64, one token a character."""
    return torch.tensor(list(text.encode("ascii", errors="replace")), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode("ascii")
