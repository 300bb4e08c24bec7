"""Pictures of the dated tables that measurements/ keeps, whose JSON lines are not kept.

    python -m splitkv.lab.report.kept_tables measurements

draws `decode-times.svg` and `prefill-times.svg` into measurements/plots: time over work, with the
floor as a line, from the tables of benchmarks.md and prefill.md. The table of decode is the one
that `splitkv bench decode` prints; it has the fastest peer of each case and no other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from splitkv.core.errors import expect
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import OURS
from splitkv.lab.harness.suites import CASES
from splitkv.lab.report.bench_plots import times
from splitkv.lab.report.markdown import columns
from splitkv.lab.report.plots import save

WHERE = re.compile(
    r"^(?P<gpu>NVIDIA [^,]+), driver (?P<driver>[^,]+), torch (?P<torch>[^,]+), "
    r"triton (?P<triton>[^;]+); (?P<dtype>\w+), (?P<protocol>[^;]+); "
    r"(?P<commit>\w+), (?P<date>[\d-]+)$",
    re.M,
)
PEAK = re.compile(r"matrix peak in the same\s+rounds (\d+) to (\d+) TFLOP/s")
SEQUENCES = re.compile(r"(\d+) x (\d+), (\d+)/\d+")  # batch x length, heads q/kv
BEST = "fastest of the other libraries"
PEERS = ("FlashAttention-3", "cuDNN", "FlashAttention-2")  # of prefill, as its columns are named


def first_table(text: str) -> tuple[Record, list[dict[str, str]]]:
    """The machine that the first line of provenance names, and the rows of the table below it."""
    found = WHERE.search(text)
    expect(found is not None, "measurements", "a line of GPU, versions, commit and day", "none")
    assert found is not None
    said = found.groupdict()
    machine: Record = {n: x for n, x in said.items() if n not in ("torch", "triton")}
    machine["versions"] = {name: said[name] for name in ("torch", "triton")}
    lines = text[found.end() :].lstrip("\n").split("\n\n")
    table = next((part for part in lines if part.startswith("|")), "")
    return machine, columns(table.splitlines())


def decode_times(text: str) -> list[Record]:
    """Records of ours and of the fastest peer, for each case of the table of decode."""
    machine, rows = first_table(text)
    records = []
    for row in rows:
        case = CASES[row["case"]]
        shape = {"place": str(case.problem.place)}
        common: Record = {"suite": "decode", "case": case.name, "shape": shape}
        common |= {**machine, "kernel": "", "kv_bytes": case.kv_bytes}
        common["floor_us"] = float(row["floor us"])
        records.append({**common, "library": OURS, "us": float(row["ours us"])})
        records.append({**common, "library": BEST, "us": float(row["us"])})
    return records


def prefill_times(text: str) -> list[Record]:
    """Records of every library, for each case of the table of prefill, which has TFLOP/s.

    The floor is the middle of the range of matrix peaks that the text gives.
    """
    machine, rows = first_table(text)
    head_dim = int(machine["protocol"].removeprefix("head_dim "))
    peaks = PEAK.search(text)
    expect(peaks is not None, "measurements", "the range of matrix peaks", "none")
    assert peaks is not None
    peak = (float(peaks[1]) + float(peaks[2])) / 2
    records = []
    for row in rows:
        name, mask = row["batch x length, heads q/kv"], row[""]
        batch, length, heads = map(int, SEQUENCES.findall(name)[0])
        flops = 4 * batch * heads * length**2 * head_dim // (2 if mask == "causal" else 1)
        common: Record = {"suite": "prefill", "case": f"{name} {mask}", "direction": "forward"}
        common |= {**machine, "kernel": "", "flops": flops, "floor_us": flops / peak / 1e6}
        common |= {"panel": f"forward, {mask}"}
        for library in (OURS, *PEERS):
            records.append({**common, "library": library, "us": flops / float(row[library]) / 1e6})
    return records


def draw(folder: Path) -> Iterator[Path]:
    """Draws both pictures into `folder`/plots, and yields their paths."""
    for page, name, read in (
        ("benchmarks.md", "decode-times.svg", decode_times),
        ("prefill.md", "prefill-times.svg", prefill_times),
    ):
        path = folder / "plots" / name
        save(times(read((folder / page).read_text(encoding="utf-8"))), path)
        yield path


def main(arguments: Sequence[str]) -> None:
    expect(len(arguments) == 1, "kept_tables", "the folder measurements", " ".join(arguments))
    for path in draw(Path(arguments[0])):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
