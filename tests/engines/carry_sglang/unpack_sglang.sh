#!/bin/sh
# Unpacks the chunks beside this script into a folder; prints lines that set the environment.
#   eval "$(sh .sglang/unpack_sglang.sh /tmp/sglang)"     from the folder that has src/
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?a folder to unpack into}"
target=$(cd "$1" && pwd)
"${PYTHON:-python3}" - "$here" "$target" <<'PY'
import hashlib, io, json, lzma, os, sys, tarfile, time
from concurrent.futures import ThreadPoolExecutor

here, target = sys.argv[1:]
start = time.time()
manifest = json.load(open(os.path.join(here, "manifest.json")))
for name, size in manifest["sizes"].items():
    path = os.path.join(target, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(size)


def unpack(chunk):
    pieces = []
    for part in manifest["chunks"][chunk]:
        with open(os.path.join(here, part["file"]), "rb") as file:
            pieces.append(file.read())
        if hashlib.sha256(pieces[-1]).hexdigest() != part["sha256"]:
            sys.exit(f"{part['file']}: damaged")
    with lzma.open(io.BytesIO(b"".join(pieces))) as xz, tarfile.open(fileobj=xz, mode="r|") as tar:
        for member in tar:
            name, _, offset = member.name.partition("@")
            if not offset:
                tar.extract(member, target, filter="data")
                continue
            with open(os.path.join(target, name), "r+b") as file:
                file.seek(int(offset))
                file.write(tar.extractfile(member).read())
    print(f"{chunk}: unpacked after {time.time() - start:.1f} s", file=sys.stderr)


with ThreadPoolExecutor() as pool:
    list(pool.map(unpack, manifest["chunks"]))
PY
# An engine is three processes or more: what they import is compiled once. Of templates and files for
# other releases of Python some do not compile, and are not imported.
"${PYTHON:-python3}" -m compileall -qq -j 0 "$target" >&2 || true
echo "export PYTHONPATH=$target:$(pwd)/src\${PYTHONPATH:+:\$PYTHONPATH}"
echo "export TVM_FFI_CACHE_DIR=$target/jit HF_HUB_OFFLINE=1 SGLANG_IS_FLASHINFER_AVAILABLE=0 SGLANG_ENABLE_JIT_DEEPGEMM=0"
