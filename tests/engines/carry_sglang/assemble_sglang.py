"""Packs an SGLang for a machine with a GPU (sm_90) and without network, in files small enough to
carry: wheels by `pip download`, of these what an engine imports, of compiled operators the code of
that GPU. README.md says more.

    python assemble_sglang.py --out .sglang            needs no GPU and no torch
    python assemble_sglang.py --out .sglang --jit DIR  with kernels that precompile_jit.py made
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
BLOCK = 1 << 16
ARCH = 90
OTHER_ARCH = 80  # of which a GPU of ARCH loads nothing
FATBIN_MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
GLIBC = range(5, 40)

FLASH = "sgl_kernel/flash_ops.abi3.so"
OPERATORS = "sgl_kernel/sm90/common_ops.abi3.so"
ALWAYS = "__init__.py", "registry.py", "utils.py", "deepseek_v2.py"  # drafts import the last
MODELS = "sglang/srt/models/"
LEAVE = (
    *("sglang/multimodal_gen/*", "sglang/test/*", "sglang/benchmark/*", "sglang/eval/*"),
    *("sglang/srt/*/_core.*.so", "sgl_kernel/*_ops*.so", "sgl_kernel/sm100/*"),
    *("sgl_kernel/testing/*", "xgrammar/lib/*", "xgrammar/include/*", "tvm_ffi/src/*"),
    *("tvm_ffi/3rdparty/*/src/*", "tvm_ffi/cython/*", "ninja/data/*", "*/tests/*", "*.pyi"),
    *("*.a", "*.pyx", "*.pxd", "*.c", "transformers/models/*/modular_*", "*.data/headers/*"),
    *("sglang-*/RECORD", "transformers-*/RECORD", "*.dist-info/licenses/*", "*.dist-info/sboms/*"),
)
FIRST = "sglang/", "sgl_kernel/", "triton_kernels/", "transformers/"

Entry = tuple[str, bytes]
"""A file's path and its bytes."""

Code = tuple[int, int, int, int, int]
"""Device code: its kind and GPU, and where its header is, where it itself, and its size."""


def download(cache: Path) -> list[Path]:
    """The wheels of requirements.txt, fetched where `cache` has them not."""
    folder = cache / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [x for x in (HERE / "requirements.txt").read_text().split() if "==" in x]
    found = {x: wheel_of(folder, x) for x in wanted}
    missing = [x for x, path in found.items() if path is None]
    if missing:
        platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC]
        platforms += [f"manylinux{n}_x86_64" for n in (1, 2010, 2014)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        command += [x for name in platforms for x in ("--platform", name)]
        subprocess.run([*command, "--dest", str(folder), *missing], check=True)
    wheels = [wheel_of(folder, x) for x in wanted]
    assert None not in wheels, f"not fetched: {[x for x in wanted if not wheel_of(folder, x)]}"
    return [x for x in wheels if x]


def wheel_of(folder: Path, requirement: str) -> Path | None:
    name, version = requirement.split("==")
    pattern = re.sub(r"[-_.]+", "_", name).lower() + f"-{version}-*.whl"
    found = [x for x in folder.iterdir() if fnmatch.fnmatch(x.name.lower(), pattern)]
    return found[0] if found else None


# Libraries


def sections(data: bytes) -> dict[str, tuple[int, int]]:
    """name -> (offset, size) of a 64-bit ELF file."""
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    table = headers[names][4]
    found = {}
    for name, kind, _, _, offset, length in headers:
        if kind != 8:  # which is without bytes
            at = table + name
            found[data[at : data.index(b"\0", at)].decode()] = offset, length
    return found


def containers(data: bytes, start: int, size: int) -> Iterator[list[Code]]:
    """The entries of each container of device code."""
    at = start
    while at + 16 <= start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN_MAGIC:  # padding
            at += 8
            continue
        entries, p, end = [], at + header, at + header + length
        while p < end:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, p)
            (arch,) = struct.unpack_from("<I", data, p + 28)
            entries.append((kind, arch, p, p + own, payload))
            p += own + payload
        yield entries
        at = end


def flash_is_wanted(code: bytes, heads: tuple[int, ...]) -> bool:
    """Whether kernels are those of FlashAttention-3 over small pages, for bf16 and e4m3 and
    these dimensions of heads, or the few that it launches beside any."""
    found = re.search(rb"CollectiveMainloopFwdSm90\w+", code)
    if not found:
        return code[:4] == b"\x7fELF"
    form = r"(.*?)Li(\d+)EN\w{0,9}?\d\d?(bfloat16_t|half_t|float_e4m3_t)EfN\w*?4Sm90E((?:Lb[01]E)+)"
    told = re.search(form, found[0].decode())
    assert told, f"a template of other arguments: {found[0].decode()}"
    tile, dim, dtype, flags = told.groups()
    causal, local, softcap, varlen, paged, *_ = [x == "1" for x in re.findall(r"Lb(.)E", flags)]
    if int(dim) == 128 and "Li192E" in tile:  # of keys; such have 128 of values
        return False
    wanted = paged and int(dim) in heads and dtype != "half_t"
    return wanted and not (softcap and dtype == "float_e4m3_t")


def pruned(path: str, data: bytes, heads: tuple[int, ...]) -> bytes:
    """A library without debugging sections and other GPUs' code: zeros stand for them."""
    made = bytearray(data)
    there = sections(data)
    for name, (offset, size) in there.items():
        if name.startswith(".debug"):
            made[offset : offset + size] = bytes(size)
    kept = 0
    for entries in containers(data, *there.get(".nv_fatbin", (0, 0))):
        native = any(kind == ELF and arch == ARCH for kind, arch, *_ in entries)
        for kind, arch, header, offset, size in entries:
            own = kind == ELF and arch == ARCH
            if own and path == FLASH:
                own = flash_is_wanted(data[offset : offset + size], heads)
                if not own:  # the driver must not take zeros for code
                    struct.pack_into("<I", made, header + 28, OTHER_ARCH)
            if own or (kind == PTX and not native and arch <= ARCH):
                kept += size
            else:
                made[offset : offset + size] = bytes(size)
    if kept:
        print(f"{path}: {kept / MIB:.1f} MiB of device code", flush=True)
    return bytes(made)


def extents(path: str, data: bytes) -> Iterator[Entry]:
    """The stretches of a file that are not zeros, as `path@offset`."""
    start, zeros = -1, bytes(BLOCK)
    for at in range(0, len(data) + BLOCK, BLOCK):
        piece = data[at : at + BLOCK]
        filled = bool(piece) and piece != zeros[: len(piece)]
        if filled and start < 0:
            start = at
        elif not filled and start >= 0:
            yield f"{path}@{start}", data[start:at]
            start = -1


# What is taken


def models_of(wheel: zipfile.ZipFile, names: list[str]) -> set[str]:
    """These models' files, and those of models that they import, folders of models whole."""
    found: set[str] = set()
    left = [MODELS + x for x in (*ALWAYS, *(f"{name}.py" for name in names))]
    there = set(wheel.namelist())
    while left:
        path = left.pop()
        if path in there and path not in found:
            found.add(path)
            source = wheel.read(path).decode()
            for name in re.findall(r"sglang\.srt\.models\.([\w.]+)", source):
                own = MODELS + name.split(".")[0]
                left += [f"{own}.py", *(x for x in there if x.startswith(f"{own}/"))]
    return found


def is_left(name: str) -> bool:
    if name in (FLASH, OPERATORS):
        return False
    return name.endswith("/") or any(fnmatch.fnmatch(name, x) for x in LEAVE)


def taken(wheels: list[Path], models: list[str], heads: tuple[int, ...]) -> dict[str, bytes]:
    """The files to carry, by their paths."""
    files: dict[str, bytes] = {}
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            own = models_of(wheel, models) if path.name.startswith("sglang-") else set()
            for name in wheel.namelist():
                if is_left(name) or (name.startswith(MODELS) and name not in own):
                    continue
                data = wheel.read(name)
                files[name] = pruned(name, data, heads) if data[:4] == b"\x7fELF" else data
    return files


# Chunks


def pack(name: str, entries: list[Entry], cache: Path, preset: int) -> Path:
    """A tar of these files under xz, made where `cache` has it not."""
    digest = hashlib.sha256(repr((preset, [x for x, _ in entries])).encode())
    for _, data in entries:
        digest.update(data)
    path = cache / f"{name}-{digest.hexdigest()[:16]}.tar.xz"
    if path.exists():
        return path
    total = sum(len(data) for _, data in entries)
    window = min(max(total, MIB), 192 * MIB)  # as such code repeats itself far apart
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": window},
    ]
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")  # another run may pack the same
    with (
        lzma.open(unfinished, "wb", filters=filters) as xz,
        tarfile.open(fileobj=xz, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for member, data in entries:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    unfinished.rename(path)
    print(f"{name}: {total / MIB:.0f} MiB in {path.stat().st_size / MIB:.1f}", flush=True)
    return path


def chunk_of(name: str) -> str:
    if name == FLASH:
        return "flash"
    if name == OPERATORS or name.startswith("jit/"):
        return "operators"
    return "sglang" if name.startswith(FIRST) else "packages"


def own_files(plugin: str) -> dict[str, bytes]:
    """The stand-ins, and an entry point of the backend, which need not be installed."""
    info = "splitkv_carried-0.dist-info"
    return {
        "sitecustomize.py": (HERE / "stubs.py").read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: splitkv-carried\nVersion: 0\n",
        f"{info}/entry_points.txt": f"[sglang.srt.plugins]\nsplitkv = {plugin}\n".encode(),
    }


def main() -> int:
    said = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=said)
    parser.add_argument("--out", type=Path, default=Path(".sglang"), help="where chunks go")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "carry-sglang")
    parser.add_argument("--models", default="llama,qwen2,qwen3,gemma2,gpt_oss")
    parser.add_argument("--heads", default="64,128", help="dimensions of FlashAttention-3's heads")
    parser.add_argument("--jit", type=Path, help="folder that precompile_jit.py filled")
    parser.add_argument("--plugin", default="splitkv.integrations.sglang:register")
    parser.add_argument("--preset", type=int, default=6, help="of xz: 1 is fast, 9 small")
    parser.add_argument("--part", type=int, default=15, help="MiB of a file at most")
    o = parser.parse_args()
    heads = tuple(int(n) for n in o.heads.split(","))
    carried = taken(download(o.cache), o.models.split(","), heads) | own_files(o.plugin)
    for path in sorted(o.jit.glob("*/*.so")) if o.jit else ():
        carried[f"jit/{path.relative_to(o.jit)}"] = path.read_bytes()
    chunks: dict[str, list[Entry]] = {}
    sizes: dict[str, int] = {}
    for name, data in sorted(carried.items(), key=lambda x: (Path(x[0]).suffix, x[0])):
        mine = chunks.setdefault(chunk_of(name), [])
        if data[:4] == b"\x7fELF":
            sizes[name] = len(data)
            mine.extend(extents(name, data))
        else:
            mine.append((name, data))
    made = o.cache / "chunks"
    made.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        jobs = {x: pool.submit(pack, x, files, made, o.preset) for x, files in chunks.items()}
    paths = {name: job.result() for name, job in jobs.items()}
    publish(paths, sizes, o.out, o.part * MIB)
    return 0


def publish(paths: dict[str, Path], sizes: dict[str, int], out: Path, part: int) -> None:
    """Cuts chunks into files of at most `part` bytes, and says in manifest.json what they are."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    listed: dict[str, list[dict[str, str]]] = {}
    for name, path in paths.items():
        data = path.read_bytes()
        for number, at in enumerate(range(0, len(data), part)):
            piece, file = data[at : at + part], f"{name}.tar.xz.{number}"
            (out / file).write_bytes(piece)
            said = {"file": file, "sha256": hashlib.sha256(piece).hexdigest()}
            listed.setdefault(name, []).append(said)
    (out / "manifest.json").write_text(json.dumps({"chunks": listed, "sizes": sizes}, indent=1))
    shutil.copyfile(HERE / "unpack_sglang.sh", out / "unpack_sglang.sh")
    total = sum(x.stat().st_size for x in out.iterdir())
    print(f"{len(list(out.iterdir()))} files of {total / MIB:.1f} MiB in {out}")


if __name__ == "__main__":
    sys.exit(main())
