"""Facts of the machine and the sources that every record of a run has."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

import splitkv
from splitkv.core.device import current
from splitkv.lab.harness.timing import nvidia_smi


def facts() -> dict[str, Any]:
    """Facts of the machine and the sources that every record of a run has."""
    here = current()
    driver = nvidia_smi("driver_version") if here.kind == "cuda" else []
    return {
        "gpu": here.name,
        "driver": driver[0] if driver else "unknown",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "commit": commit(),
    }


DIRTY = "-dirty"


def commit() -> str:
    """The commit of the sources, with their sha256 where they are not those of the commit, and that
    alone where there is no repository: studies that go on take results of the same name for theirs.
    """
    sources = Path(splitkv.__file__).parent
    git = [
        "git",
        "-C",
        str(sources),
        "describe",
        "--always",
        f"--dirty={DIRTY}",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        told = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"sha256:{digest(sources)}"
    return f"{told}:{digest(sources)}" if told.endswith(DIRTY) else told


def digest(sources: Path) -> str:
    """The first 12 digits of the sha256 of the Python files in a folder, by their names and what
    they hold."""
    found = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        found.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]
