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


def commit() -> str:
    """The commit of the sources, or their sha256 where there is no repository."""
    sources = Path(splitkv.__file__).parent
    git = [
        "git",
        "-C",
        str(sources),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        digest = hashlib.sha256()
        for path in sorted(sources.rglob("*.py")):
            digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
        return f"sha256:{digest.hexdigest()[:12]}"
