"""The PTX of every compile case, against a committed list: what moves or renames code changes none.

Tests that compile (compiling.py) say here what came out. Each of them fails where that is not in
the list of its Triton, tests/golden/codegen. `make codegen` compiles the same cases up to PTX and
compares the list as a whole, so that a case that vanished shows, too:

    make codegen                              every case, on both Tritons
    make codegen KERNEL=hopper_decode_split   those of a kernel
    make codegen UPDATE=1                     rewrites the list
    make codegen DUMP=build/before            writes what is hashed, for `diff -r` of two trees

A line is a case: exact, opcodes, architecture, kernel, test. `exact` is a hash of all that
`normalise` leaves; `opcodes` is one of how often each opcode is there, so that where only `exact`
differs, instructions are in another order or have other operands. Names are there for the reader:
a case whose test or kernel was renamed is found by its architecture and hash.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest

LISTS = Path(__file__).parents[1] / "golden" / "codegen"
PROPERTY = "codegen"  # of a test's report, which a worker sends to who started it
# What is launched with a kernel and not in its PTX.
METADATA = ("num_warps", "num_ctas", "cluster_dims", "shared", "tmem_size", "global_scratch_size")
METADATA += ("launch_pdl", "launch_cooperative_grid")

REGISTER = re.compile(r"%[a-z]{1,2}\d+\b")
PREFIX = re.compile(r"([{}]|[$\w]+:(?!:)) ?")  # of a statement: a block begins or ends, a label
WORD = re.compile(r"[$%\w]+")
PARAMETER = re.compile(r"\b\w+_param_\d+\b")
READ = re.compile(r"ld\.param|cvta|mov\S* \S+, \w+_param_\d+$")
# Two operands that may change places: which is first may follow the order of arguments.
COMMUTATIVE = re.compile(
    r"((?:@\S+ )?(?:add|mul|mad|fma|and|or|xor|min|max)\.\S+ [^,]+, )"
    r"([^,{}]+), ([^,{}]+)((?:, .*)?)$"
)


class NoMachineCode(Exception):
    """A test looks at machine code where kernels are compiled up to PTX: all of it is compiled."""


@dataclass(frozen=True, order=True)
class Case:
    """What one kernel is compiled to in one test."""

    kernel: str
    arch: str
    test: str
    exact: str
    opcodes: str

    def __str__(self) -> str:
        return f"{self.exact} {self.opcodes} {self.arch} {self.kernel} {self.test}"

    @property
    def name(self) -> tuple[str, str, str]:
        return self.kernel, self.arch, self.test


def statements(ptx: str) -> Iterator[str]:
    """What stands before each semicolon, without comments, debug information and declarations of
    registers; labels and braces of blocks by themselves."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    text = re.sub(r"^\s*\.section\s+\S+\s*\{[^}]*\}", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*\.(loc|file|version)\b[^\n]*", "", text, flags=re.MULTILINE)
    text = re.sub(r"\.reg\s+\.\w+\s+%\w+<\d+>;", "", text)
    text = re.sub(r"^\{", ";", text, flags=re.MULTILINE)  # of a function
    for statement in text.split(";"):
        rest = " ".join(statement.split())
        while found := PREFIX.match(rest):
            yield found[1]
            rest = rest[found.end() :]
        if rest:
            yield rest


def opcode(statement: str) -> str:
    """mnemonic with its modifiers, or a directive"""
    return re.sub(r"^@!?[%$\w]+ ", "", statement).split(" ", 1)[0]


def normalise(ptx: str) -> tuple[list[str], list[str]]:
    """Statements, and those of them that read parameters, by names in order of their first use.

    Registers, labels, functions, parameters and what inline assembly declares are renumbered. What
    reads a parameter counts where its value is used: the order of arguments changes nothing, and
    one that is not used is not there.
    """
    entries = [re.sub(r"\((?=\s*(\.param|\))).*?\)", "()", s) for s in statements(ptx)]
    reads = [bool(READ.match(s)) for s in entries]
    body = [s for s, read in zip(entries, reads, strict=True) if not read]
    prologue = [s for s, read in zip(entries, reads, strict=True) if read]

    declared = {s[:-1] for s in body if s.endswith(":")}
    declared |= set(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([$\w]+)", ptx))
    declared |= set(re.findall(r"\.b8\s+([$\w]+)\[", ptx))
    for names in re.findall(r"\.reg\s+\.\w+\s+([\w, ]+)", " ; ".join(body)):
        declared |= {name.strip() for name in names.split(",")}
    used = Counter(word for s in body for word in WORD.findall(s))
    body = [s for s in body if not (s.endswith(":") and used[s[:-1]] == 1)]
    numbers: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def rename(match: re.Match[str]) -> str:
        word = match[0]
        if word not in numbers:
            if PARAMETER.fullmatch(word):
                kind = "param"
            elif REGISTER.fullmatch(word):
                kind = word.rstrip("0123456789")
            elif word in declared:
                kind = "$"
            else:
                return word
            numbers[word] = f"{kind}{counts[kind]}"
            counts[kind] += 1
        return numbers[word]

    lines = []
    for s in body:
        if swaps := COMMUTATIVE.match(s):
            known = sorted(swaps.group(2, 3), key=lambda x: natural(numbers.get(x, "~")))
            s = f"{swaps[1]}{', '.join(known)}{swaps[4]}"
        lines.append(WORD.sub(rename, s))
    parameters: list[str] = []
    while True:  # from what the body uses to what that is made of
        ready = {
            number: s
            for s in prologue
            for number in [min((numbers.get(r, "~") for r in outputs(s)), key=natural)]
            if number != "~"
        }
        if not ready:
            break
        for number in sorted(ready, key=natural):
            prologue.remove(ready[number])
            parameters.append(WORD.sub(rename, ready[number]))
    return lines, parameters


def outputs(statement: str) -> list[str]:
    """Registers that a statement writes: before the first comma, or all in the first braces."""
    first = re.search(r"\{[^}]*\}|[^,]*", statement[len(opcode(statement)) :])
    return REGISTER.findall(first[0]) if first else []


def natural(name: str) -> tuple[str, int]:
    digits = re.search(r"\d+$", name)
    return name.rstrip("0123456789"), int(digits[0]) if digits else 0


def hashed(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def normalised(compiled: Any) -> tuple[str, str]:
    """The text that is hashed of a kernel, and that of its opcodes."""
    body, parameters = normalise(compiled.asm["ptx"])
    meta = compiled.metadata
    launched = [f"{name} = {getattr(meta, name, None)}" for name in METADATA]
    shapes = sorted(map(str, getattr(meta, "tensordesc_meta", None) or []))
    opcodes = Counter(map(opcode, body))
    counted = [f"{name} {count}" for name, count in sorted(opcodes.items())]
    return "\n".join([*launched, *shapes, *body, *parameters]), "\n".join([*launched, *counted])


COMPILED: list[tuple[str, str, Any]] = []  # of the test that runs: kernel, architecture, what


def record(compiled: Any) -> None:
    arch = compiled.metadata.target.arch
    COMPILED.append((compiled.metadata.name, f"sm_{arch}", compiled))


def read(path: Path) -> list[Case]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.split(" ", 4) for line in lines if not line.startswith("#"))
    return [Case(kernel, arch, test, e, o) for e, o, arch, kernel, test in found]


def write(path: Path, found: Iterable[Case]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{case}\n" for case in sorted(found)))


def differences(listed: Iterable[Case], found: Iterable[Case]) -> tuple[list[str], int]:
    """What differs, a line a case, and how many were only renamed."""
    gone = sorted((Counter(listed) - Counter(found)).elements())
    new = sorted((Counter(found) - Counter(listed)).elements())
    renamed = 0
    for case in list(gone):
        same = [x for x in new if (x.arch, x.exact) == (case.arch, case.exact)]
        if same:
            gone.remove(case)
            new.remove(min(same, key=lambda x: x.name != case.name))
            renamed += 1
    lines = []
    for case in gone:
        other = next((x for x in new if x.name == case.name), None)
        if other is None:
            lines.append(f"vanished: {' '.join(case.name)}")
            continue
        new.remove(other)
        same = case.opcodes == other.opcodes
        what = "order or operands differ" if same else "opcodes differ"
        lines.append(f"{what}: {' '.join(case.name)}")
    return lines + [f"new: {' '.join(case.name)}" for case in new], renamed


def triton_list() -> Path:
    import triton

    return LISTS / f"triton-{triton.__version__}.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(
        "codegen", "the PTX of every compile case, see tests/support/codegen.py"
    )
    group.addoption("--codegen", choices=("check", "update"), help="compile up to PTX, compare")
    group.addoption("--codegen-kernel", default="", help="cases of a kernel alone")
    group.addoption("--codegen-dump", default="", help="a folder for what is hashed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--codegen"):
        return
    kernel = config.getoption("--codegen-kernel")
    kernels = {case.kernel for path in LISTS.glob("*.txt") for case in read(path)}
    if kernel and kernel not in kernels:
        raise pytest.UsageError(f"kernel: expected one of {', '.join(sorted(kernels))}")
    # Kernels without machine code are nobody else's, and stay there for the next time.
    build = Path(__file__).parents[2] / "build" / "codegen"
    os.environ["TRITON_CACHE_DIR"] = str(build / triton_list().stem)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    import triton

    def hook(*of_backend: Any) -> tuple[str, str]:
        if of_backend:
            of_backend[1]["cubin"] = lambda ptx, metadata: b""
        return "ptx", "ptx"

    triton.knobs.runtime.add_stages_inspection_hook = hook


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kernel = config.getoption("--codegen-kernel")
    if kernel:
        tests = {case.test for case in read(triton_list()) if case.kernel == kernel}
        kept = [item for item in items if item.name in tests]
        config.hook.pytest_deselected(items=[item for item in items if item.name not in tests])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Notes what a test compiles; outside of `make codegen` that has to be in the list."""
    COMPILED.clear()
    mode = pyfuncitem.config.getoption("--codegen")
    try:
        result = yield
    except NoMachineCode:
        result = True
    finally:
        found = cases_of(pyfuncitem) if COMPILED else []
        pyfuncitem.user_properties += [(PROPERTY, astuple(case)) for case in found]
    if found and not mode:
        listed = read(triton_list())
        known = {(case.arch, case.exact) for case in listed}
        other = [
            f"{case.kernel} {case.arch}" for case in found if (case.arch, case.exact) not in known
        ]
        said = "compiles to PTX that is not in the list: see `make codegen`"
        assert not (listed and other), f"{', '.join(other)} {said}"
    return result


def cases_of(test: pytest.Function) -> list[Case]:
    found = []
    folder = test.config.getoption("--codegen-dump")
    for n, (kernel, arch, compiled) in enumerate(COMPILED):
        text, opcodes = normalised(compiled)
        case = Case(kernel, arch, test.name, hashed([text]), hashed([opcodes]))
        found.append(case)
        if folder:
            stem = re.sub(r"[^\w.-]+", "_", f"{test.path.stem}.{test.name}.{n}")
            into = Path(folder) / triton_list().stem / f"{kernel}-{arch}" / f"{stem[:200]}.ptx"
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_text(text + "\n")
    COMPILED.clear()
    return found


FOUND: list[Case] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        FOUND.extend(Case(*values) for name, values in report.user_properties if name == PROPERTY)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    mode, kernel = config.getoption("--codegen"), config.getoption("--codegen-kernel")
    if not mode or hasattr(config, "workerinput"):
        return
    path = triton_list()
    listed, found = read(path), FOUND
    others: list[Case] = []
    if kernel:
        others = [case for case in listed if case.kernel != kernel]
        listed = [case for case in listed if case.kernel == kernel]
        found = [case for case in found if case.kernel == kernel]
    lines, renamed = differences(listed, found)
    said = [f"{path.stem}: {len(found)} cases, {len(lines)} differ, {renamed} renamed", *lines]
    if mode == "update" and not session.testsfailed:
        write(path, [*others, *found])
    elif lines or session.testsfailed or not (found or kernel):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif not found:  # of a kernel that this Triton has no case of
        session.exitstatus = pytest.ExitCode.OK
    config.stash[REPORT] = said


REPORT = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
