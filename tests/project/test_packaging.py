"""The wheel and the sdist: whole, and installed where nothing else is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pip
import pytest

import splitkv

ROOT = Path(__file__).parents[2]
URL = "https://github.com/splitkv/splitkv"
FILES, PICTURES = f"{URL}/blob/HEAD/", f"{URL}/raw/HEAD/"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
HERE = "{}.{}".format(*sys.version_info)
# pip has the tomli that hatchling takes from elsewhere before Python 3.11.
BORROWED = os.pathsep.join(
    [path for path in sys.path if path.endswith("-packages")]
    + [str(Path(pip.__file__).parent / "_vendor")]
)
OURS = ("PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of the tests and of `make test`
CLEAN = {name: x for name, x in os.environ.items() if name not in OURS}
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Built(NamedTuple):
    sdist: Path
    unpacked: Path
    wheel: Path


def run(*command: object, cwd: Path, code: int = 0, **env: str) -> str:
    """What a command prints, away from these sources but for what PYTHONPATH says."""
    given = [str(part) for part in command]
    done = subprocess.run(given, cwd=cwd, env=CLEAN | env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel is made of what the sdist has, as an installation from it would."""
    to = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "hatchling", "build", "-d", to, "-t")
    run(*build, "sdist", cwd=ROOT)
    (sdist,) = to.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(to)
    unpacked = to / sdist.name.removesuffix(".tar.gz")
    run(*build, "wheel", cwd=unpacked)
    (wheel,) = to.glob("*.whl")
    return Built(sdist, unpacked, wheel)


@pytest.fixture(scope="module")
def metadata(built: Built) -> Message:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def tables() -> str:
    return (ROOT / "pyproject.toml").read_text()


# --- what is in them ---------------------------------------------------------------------------


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="expected a checkout")
def test_an_sdist_has_every_file_that_git_has(built: Built) -> None:
    names = run("git", "ls-files", cwd=ROOT).split("\n")[:-1]
    assert "tests/project/test_packaging.py" in names
    assert [name for name in names if not (built.unpacked / name).is_file()] == []


def test_a_wheel_has_every_file_of_the_package(built: Built) -> None:
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "splitkv").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == wanted and "splitkv/py.typed" in names


@pytest.mark.parametrize("name", ["Makefile", "README.md", ".ci/run"])
def test_what_a_file_names_is_in_the_sdist(name: str, built: Built) -> None:
    words = set(re.findall(r"[\w./-]+", (ROOT / name).read_text()))
    named = {word for word in words if word.strip("./") and (ROOT / word).exists()}
    made = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    named -= {word for word in named if word.split("/")[0] in made}
    assert named and [word for word in named if not (built.unpacked / word).exists()] == []


def test_the_first_commands_are_known_to_make_in_an_sdist(built: Built) -> None:
    """All that they depend on is there; nothing is installed."""
    for target in ("demo", "test"):
        planned = run("make", "-n", target, cwd=built.unpacked)
        assert "-m venv --clear .venv" in planned and "'.[dev]'" in planned
    assert os.access(built.unpacked / ".ci" / "run", os.X_OK)


# --- what they say of themselves ---------------------------------------------------------------


def test_metadata(metadata: Message) -> None:
    assert metadata["Version"] == splitkv.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls["Homepage"] == URL and urls["Documentation"] == f"{FILES}docs/index.md"
    needed = [x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x]
    assert [re.split(r"\W", x)[0] for x in needed] == ["torch", "triton"]
    classifiers = metadata.get_all("Classifier", [])
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert "Environment :: GPU :: NVIDIA CUDA" in classifiers


def test_one_oldest_python(metadata: Message) -> None:
    """Of the metadata, and of the tools that refuse the syntax and the library of newer ones."""
    prefix = "Programming Language :: Python :: 3."
    said = [x.rpartition(" ")[2] for x in metadata.get_all("Classifier", []) if prefix in x]
    assert said == [*PYTHONS] and metadata["Requires-Python"] == f">={PYTHONS[0]}"
    assert re.findall(r"^target-version = \"py3(\d+)\"", tables(), re.M) == ["10"]
    assert re.findall(r"^python_version = \"(.*)\"", tables(), re.M) == [PYTHONS[0]]


def test_oldest_versions_are_those_tested(metadata: Message) -> None:
    """`make test-oldest` installs the least versions of what is needed at run time."""
    pinned = (ROOT / "constraints-oldest.txt").read_text()
    found = re.findall(r"^(\w+)==(\S+)$", pinned, re.M)
    least = [x for x in metadata.get_all("Requires-Dist", []) if "extra" not in x]
    assert sorted(f"{name}>={version.removesuffix('.0')}" for name, version in found) == sorted(
        least
    )


def links(text: str) -> Iterator[str]:
    return (match[1] for match in LINK.finditer(re.sub(r"```.*?```", "", text, flags=re.S)))


def test_readme_on_a_package_index(metadata: Message) -> None:
    """The README, its links to files of the project absolute and of files that there are."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    text, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert isinstance(text, str)
    assert text.replace(FILES, "").replace(PICTURES, "").strip() == readme.strip()
    shown = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)
    assert all(target.startswith(PICTURES) for target in shown)  # the files, not pages about them
    assert text.count("](" + PICTURES) == len(shown) == readme.count("![")
    targets = list(links(text))
    assert len(targets) == len(list(links(readme))) > 5
    for target in targets:
        assert target.startswith(("https://", "#")), target
        for start in (FILES, PICTURES):
            if target.startswith(start):
                assert (ROOT / target.removeprefix(start).partition("#")[0]).is_file(), target


# --- installed ---------------------------------------------------------------------------------


def interpreters() -> dict[str, str]:
    """Those that are here, on the path or of pyenv; this one is among them."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {HERE: sys.executable}
    for version in PYTHONS:
        named = f"python{version}"
        for path in (
            shutil.which(named),
            *map(str, sorted(pyenv.glob(f"{version}.*/bin/{named}"))),
        ):
            if path is not None and version not in found and runs(path):
                found[version] = path
    return dict(sorted(found.items()))


def runs(python: str) -> bool:
    """It may be a name without an interpreter behind it, or one without its library."""
    return subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0


INTERPRETERS = interpreters()


USE = """
import torch, splitkv
q, k, v = torch.randn(1, 1, 28, 128), torch.randn(1, 600, 4, 128), torch.randn(1, 600, 4, 128)
print(splitkv.decode(q, k, v).shape, splitkv.explain(q, k, v), splitkv.__file__)
"""


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", INTERPRETERS)
def test_installed_where_nothing_else_is(
    version: str, kind: str, built: Built, tmp_path: Path
) -> None:
    """pip and what builds are borrowed from here, and so is torch once the rest has been seen."""
    run(INTERPRETERS[version], "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python, command = tmp_path / "env/bin/python", tmp_path / "env/bin/splitkv"
    alone = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    quick = ("--no-compile", "--disable-pip-version-check", "--root-user-action=ignore")
    install = (python, "-m", "pip", "install", *alone, *quick)
    run(*install, getattr(built, kind), cwd=tmp_path, PYTHONPATH=BORROWED)

    said = f"splitkv {splitkv.__version__}\n"
    assert run(command, "--version", cwd=tmp_path) == said
    assert run(python, "-m", "splitkv", "--version", cwd=tmp_path) == said
    look = "import sys, splitkv; print(splitkv.__file__, 'torch' in sys.modules)"
    assert run(python, "-c", look, cwd=tmp_path).split() == [
        str(next((tmp_path / "env/lib").glob("python*/site-packages/splitkv/__init__.py"))),
        "False",
    ]
    refused = run(command, "explain", cwd=tmp_path, code=1)
    assert refused == "splitkv: the command line needs typer: pip install 'splitkv[lab]'\n"
    if version in (PYTHONS[0], PYTHONS[-1]) and kind == "wheel":
        compile_all = ("-W", "error", "-m", "compileall", "-q", tmp_path / "env/lib")
        run(python, *compile_all, cwd=tmp_path)
    if version == HERE and kind == "wheel":
        used = run(python, "-c", USE, cwd=tmp_path, PYTHONPATH=BORROWED)
        assert "torch.Size([1, 1, 28, 128])" in used and f"{tmp_path}/env/lib" in used
        assert run(command, "--version", cwd=tmp_path, PYTHONPATH=BORROWED) == said
