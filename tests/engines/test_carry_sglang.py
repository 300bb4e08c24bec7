"""What carries SGLang: the code that stays in libraries, chunks that unpack to what was packed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "carry_sglang"
sys.path.insert(0, str(FOLDER))
import assemble_sglang as carry  # noqa: E402

FORM = (
    "CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS2_1CILi1EEES5_S5_EEENS3_IJ{tile}EEELi{dim}EN7"
    "cutlass{dtype}EfNSA_4arch4Sm90ELb1ELb0ELb{softcap}ELb1ELb{paged}ELb0ELb0ELb0ELb1ELb1ELb0ELb0E"
)
WIDE = "NS4_ILi128EEENS4_ILi96EEENS4_ILi192EEE"


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        ({}, True),
        ({"dtype": "12float_e4m3_t"}, True),
        ({"softcap": 1}, True),
        ({"softcap": 1, "dtype": "12float_e4m3_t"}, False),
        ({"paged": 0}, False),
        ({"dtype": "6half_t"}, False),
        ({"dim": 96}, False),
        ({"tile": WIDE}, False),
    ],
)
def test_kernels_of_flash_attention_that_stay(kernel: dict[str, object], wanted: bool) -> None:
    usual = {"tile": "NS4_ILi128EEES7_S7_", "dim": 128, "dtype": "10bfloat16_t"}
    name = FORM.format(**usual | {"softcap": 0, "paged": 1} | kernel)
    assert carry.flash_is_wanted(b"\x7fELF\0" + name.encode(), (64, 128)) == wanted


def library(*code: tuple[int, bytes]) -> bytes:
    """An ELF file with device code of these GPUs and a section of debugging."""
    entries = b"".join(
        struct.pack("<HHIQ", carry.ELF, 0, 64, len(x)) + struct.pack("<12xI32x", arch) + x
        for arch, x in code
    )
    device = struct.pack("<IHHQ", carry.FATBIN_MAGIC, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.debug_info\0.names\0"
    contents = (".nv_fatbin", device), (".debug_info", b"debug"), (".names", names)
    data, headers = bytearray(64), b""
    for name, content in contents:
        told = names.index(name.encode()), 1, 0, 0, len(data), len(content)
        headers += struct.pack("<IIQQQQ24x", *told)
        data += content
    data[:4] = b"\x7fELF"
    struct.pack_into("<Q", data, 0x28, len(data))
    struct.pack_into("<HHH", data, 0x3A, 64, len(contents), len(contents) - 1)
    return bytes(data) + headers


def test_code_of_other_gpus_and_debugging_go() -> None:
    whole = library((80, b"eighty"), (90, b"ninety"), (100, b"hundred"))
    left = carry.pruned("some.so", whole, (128,))
    assert len(left) == len(whole)
    assert left == whole.replace(b"eighty", bytes(6)).replace(b"hundred", bytes(7)).replace(
        b"debug\0", bytes(6)
    )


def test_kernels_that_go_are_of_another_gpu() -> None:
    unwanted = (
        b"\x7fELF\0"
        + FORM.format(tile="", dim=96, dtype="10bfloat16_t", softcap=0, paged=1).encode()
    )
    whole = library((90, unwanted), (90, b"\x7fELF"))
    left = carry.pruned(carry.FLASH, whole, (128,))
    start, size = carry.sections(left)[".nv_fatbin"]
    (entries,) = carry.containers(left, start, size)
    assert [arch for _, arch, *_ in entries] == [carry.OTHER_ARCH, carry.ARCH]
    assert unwanted not in left


def test_what_is_packed_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = bytes(3 * carry.BLOCK)
    files = {
        "sglang/__init__.py": b"x = 1\n",
        carry.FLASH: b"\x7fELF" + zeros + os.urandom(100_000) + zeros,
        "other/lib.so": b"\x7fELF" + zeros + b"end",
    }
    monkeypatch.setattr(carry, "download", lambda cache: [])
    monkeypatch.setattr(carry, "taken", lambda *_: dict(files))
    given = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path), "--part", "1"]
    monkeypatch.setattr(sys, "argv", ["assemble_sglang.py", *given, "--preset", "1"])
    assert carry.main() == 0
    there = tmp_path / "there"
    command = ["sh", str(tmp_path / "out" / "unpack_sglang.sh"), str(there)]
    told = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, check=True, capture_output=True
    )
    assert f"PYTHONPATH={there}:" in told.stdout.decode()
    assert {name: (there / name).read_bytes() for name in files} == files
    plugin = (there / "splitkv_carried-0.dist-info" / "entry_points.txt").read_text()
    assert "splitkv = splitkv.integrations.sglang:register" in plugin
    assert list((there / "sglang" / "__pycache__").glob("*.pyc"))


def run_with_stand_ins(code: str) -> subprocess.CompletedProcess[str]:
    """Code in a process that has the stand-ins first, as an engine's have."""
    code = (FOLDER / "stubs.py").read_text() + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_stand_ins_are_of_what_nothing_calls() -> None:
    """FlashInfer can be imported, its norms cannot: sgl_kernel then takes its own."""
    ran = run_with_stand_ins(
        "import flashinfer.sampling\n"
        "try:\n    import flashinfer.norm\nexcept ImportError:\n    print('none')\n"
    )
    assert (ran.returncode, ran.stdout) == (0, "none\n"), ran.stderr


def test_stand_ins_refuse_tensors() -> None:
    """A kernel that is not there must not do nothing."""
    ran = run_with_stand_ins(
        "import torch\nfrom flashinfer.sampling import top_k_renorm_probs\n"
        "top_k_renorm_probs(8)\ntop_k_renorm_probs(torch.ones(1), 8)\n"
    )
    wanted = "flashinfer.sampling.top_k_renorm_probs was called, of which there is a stand-in alone"
    assert ran.returncode == 1 and wanted in ran.stderr
