"""Records of what a warm-up has compiled, beside it in Triton's cache, and whether it is still
what would be looked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton
from triton import knobs

from splitkv.core.device import Device

FOLDER = "splitkv-warm"


@dataclass(frozen=True, slots=True)
class WarmRecord:
    """A warm-up of a model.

    kernels   variants that it compiled; there: those that are in the cache now
    current   by these sources of the kernels and this Triton
    """

    model: str
    arch: str
    kernels: int
    there: int
    current: bool

    def __str__(self) -> str:
        state = "" if self.current else "; of other sources or another Triton, to be made again"
        return f"{self.model} on {self.arch}: {self.there} of {self.kernels} kernels{state}"


def cache_folder(out: str | os.PathLike[str] | None = None) -> Path:
    """Triton's cache, or what is given in its place."""
    return Path(out if out is not None else knobs.cache.dir)


def write_record(
    model: str, gpu: Device, folders: dict[str, str], out: str | os.PathLike[str] | None = None
) -> Path:
    """Writes what was compiled for a model, in the place of an earlier record of the same."""
    place = cache_folder(out) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{model} {gpu.arch}".encode()).hexdigest()[:16]
    path = place / f"{digest}.json"
    record = {"model": model, "arch": gpu.arch, "made_of": made_of(), "folders": folders}
    path.write_text(json.dumps(record, indent=1))
    return path


def records(out: str | os.PathLike[str] | None = None) -> Iterator[WarmRecord]:
    """The records of what is warm."""
    home = cache_folder(out)
    for path in sorted((home / FOLDER).glob("*.json")):
        try:
            found = json.loads(path.read_text())
            folders = found["folders"].values()
            there = sum((home / folder).is_dir() for folder in folders)
            current = found["made_of"] == made_of()
            yield WarmRecord(found["model"], found["arch"], len(folders), there, current)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a file of somebody else's


@cache
def made_of() -> str:
    """A hash of the kernels' sources and of Triton's version."""
    digest = hashlib.sha256(triton.__version__.encode())
    kernels = Path(__file__).parents[1] / "kernels"
    for path in sorted(kernels.rglob("*.py")):
        digest.update(path.relative_to(kernels).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
