"""The kernels of the read floor compile."""

from __future__ import annotations

import pytest
import torch
from compiling import AnyGPU
from results import FLOOR, MACHINE
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.lab.bench import decode as bench
from splitkv.lab.harness import floor, timing


def test_kernels_compile_for_hopper() -> None:
    from splitkv.lab.harness import read_tma

    x = torch.zeros(4096, floor.COLUMNS, dtype=torch.bfloat16)
    before = driver._active
    driver.set_active(AnyGPU(90))
    try:
        made = [timing.write_q.warmup(x, x, 1024, BLOCK=1024, num_warps=4, grid=(1,))]
        for tile, num_warps, _ in floor.LOAD_SETTINGS:
            words = x.view(torch.int32)
            options = {"TILE": tile, "num_warps": num_warps, "grid": (1,)}
            made.append(floor.read_loads.warmup(words, words, 64, 1 << 20, **options))
            assert "ld.global.v4" in made[-1].asm["ptx"]
        for rows, in_flight, _ in read_tma.SETTINGS:
            shape = [rows, floor.COLUMNS]
            layout = read_tma.gl.NVMMASharedLayout.get_default_for(shape, read_tma.gl.bfloat16)
            rows_of_x = read_tma.TensorDescriptor.from_tensor(x, shape, layout)
            options = {"IN_FLIGHT": in_flight, "num_warps": 4, "grid": (1,)}
            made.append(read_tma.read_tma.warmup(rows_of_x, 64, **options))
            assert made[-1].asm["ptx"].count("cp.async.bulk.tensor") >= 2
    finally:
        driver._active = before
    for rows, in_flight, programs in read_tma.SETTINGS:
        tile_bytes = rows * floor.COLUMNS * 2
        assert in_flight * tile_bytes <= GPUS["h200"].smem_per_block
        assert programs * in_flight * tile_bytes <= GPUS["h200"].smem_per_sm
    assert all(compiled.asm["cubin"] for compiled in made)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "current", lambda: GPUS["h200"])
    monkeypatch.setattr(bench, "facts", lambda: MACHINE)
    monkeypatch.setattr(bench.Floors, "__call__", lambda self, num_bytes: FLOOR)
