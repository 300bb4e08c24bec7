"""Compiling what a launcher launches, for GPUs that are not here.

Triton asks its driver which GPU there is and the arguments what they are; here the driver names any
architecture and the tensors are layouts without memory. Everything between a plan and a cubin is
the real thing: the launcher's own arguments, Triton's specialisation of them, ptxas.

A compile takes seconds, so a kernel's tests compile few variants, chosen by `variants`:

    AXES = {"dtype": (...), "head_dims": (...), "mask": (...)}     # what changes the code

    @variants(AXES, most=12, valid=valid, ids=describe)
    def test_sm_90(values): ...                                    # registers, spills, instructions

    @variants({"gpu": ("a100", ...), **AXES}, most=6)              # the others take turns
    def test_other_architectures(values): ...

Every value of an axis is in one of them, and the first ones differ most. That every pair of values
gives the right numbers is for tests/interpreter and tests/gpu, which run covering sets in full. The
newest Triton compiles the first of them: `make test-newest` takes the tests marked `newest`.

What is launched beside the kernel that a test is about, as `combine` is, has tests of its own: it
is `Launched` there, and not compiled.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import codegen
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from splitkv.core.kv import Paged
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels import decode_split
from splitkv.kernels.hopper.decode import kernel as hopper_decode_split
from splitkv.kernels.host import launcher, workspace
from splitkv.planner.registry import kernel_named
from splitkv.rounding import STORED

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ADDRESS = 1 << 20
MODULES: dict[str, Any] = {
    "decode_split": decode_split,
    "hopper_decode_split": hopper_decode_split,
}


@dataclass
class Layout:
    """A tensor on a GPU as far as a launcher and Triton look at it: no memory behind it."""

    shape: Sequence[int]
    dtype: torch.dtype
    row_gap: int = 0  # elements between the rows of the last dimension
    address: int = ADDRESS
    device = torch.device("cuda", 0)
    is_cuda = True

    def stride(self, dim: int | None = None) -> Any:
        sizes = [*self.shape[:-1], self.shape[-1] + self.row_gap]
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        return strides if dim is None else strides[dim]

    def dim(self) -> int:
        return len(self.shape)

    def is_contiguous(self) -> bool:
        """Asked for the strides of a gradient, which are to be these, gaps and all."""
        return True

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, dtype: torch.dtype) -> Layout:
        """Of another type: elements of the last dimension taken together, or taken apart."""
        ratio = dtype.itemsize / self.dtype.itemsize
        shape = *self.shape[:-1], int(self.shape[-1] / ratio)
        return Layout(shape, dtype, int(self.row_gap / ratio), self.address)

    def data_ptr(self) -> int:
        return self.address

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Layout:
        return Layout(shape, dtype or self.dtype)


class AnyGPU:
    """A Triton driver of which only the architecture is asked, a number like 90."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Recorder:
    """Stands in for a kernel: a launch compiles it and nothing runs.

    listens   `ptxas_said` has an answer, also of what Triton has in its cache
    """

    kernel: Any
    compiled: list[Any] = field(default_factory=list)
    listens: bool = False

    @property
    def arg_names(self) -> list[str]:
        return list(self.kernel.arg_names)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.warmup(*args, grid=grid, **options)

        return launch

    def warmup(self, *args: Any, **options: Any) -> Any:
        conversions_of_sm_90()
        with watched(), listening() if self.listens else nullcontext() as said:
            made = self.kernel.warmup(*args, **options)
        if said is not None and made.asm["cubin"] and not keeps_words(made, said.getvalue()):
            self.kernel.device_caches.clear()  # compiled before, by who did not listen
            with listening(again=True) as said:
                made = self.kernel.warmup(*args, **options)
            keeps_words(made, said.getvalue())
        self.compiled.append(made)
        codegen.record(made)
        return made


@dataclass
class Launched:
    """Stands in for a kernel whose code is for another test: of each launch there is a None."""

    kernel: Any
    compiled: list[None] = field(default_factory=list)

    @property
    def arg_names(self) -> list[str]:
        return list(self.kernel.arg_names)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            assert len(args) == len(self.arg_names)
            self.compiled.append(None)

        return launch


@triton.jit
def e4m3_to_bf16(x_ptr, y_ptr):
    offs = tl.arange(0, 128)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(tl.bfloat16))


@functools.cache
def conversions_of_sm_90() -> None:
    """Has Triton convert e4m3 as on sm_90 for as long as this process lives.

    Triton chooses its conversions of 8-bit floats when it first meets one and keeps them, whatever
    architecture comes next: what a test compiles would follow from the tests before it. Kernels for
    sm_89 use none of those that only sm_90 has: see `widen` in splitkv/kernels/tile/codec.py.
    """
    knobs = triton.knobs
    stored, wide = Layout((128,), torch.float8_e4m3fn), Layout((128,), torch.bfloat16)
    sm_90 = mock.patch.object(driver, "_active", AnyGPU(90))
    with sm_90, knobs.compilation.scope(), knobs.runtime.scope():
        knobs.compilation.always_compile = True
        knobs.runtime.add_stages_inspection_hook = None
        made = e4m3_to_bf16.warmup(stored, wide, grid=(1,), enable_fp_fusion=True)
    assert "cvt.bf16.f16" in made.asm["ptx"]


WORDS = "ptxas.txt"


@contextmanager
def watched() -> Iterator[None]:
    """Somebody watches what Triton compiles, as profilers do: it writes every argument as JSON."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda **compiled: False
        yield


@contextmanager
def listening(again: bool = False) -> Iterator[StringIO]:
    """What ptxas, the one that Triton calls, says on every kernel compiled meanwhile.

    again   also of those that are in Triton's cache
    """
    knobs = triton.knobs
    with redirect_stdout(StringIO()) as said, knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.compilation.always_compile = again
        knobs.nvidia.dump_ptxas_log = True
        yield said


def keeps_words(compiled: Any, said: str) -> bool:
    """Whether there is what ptxas said on a kernel, now or when it was compiled: beside it, in
    Triton's cache."""
    beside = get_cache_manager(compiled.hash)
    if said:
        beside.put(said, WORDS)
    return beside.get_file(WORDS) is not None


def ptxas_said(compiled: Any) -> str:
    """On a kernel of a recorder that listens: for one, that it has to wait for every wgmma."""
    if not compiled.asm["cubin"]:
        raise codegen.NoMachineCode
    said = Path(str(get_cache_manager(compiled.hash).get_file(WORDS))).read_text()
    assert re.search(r"Used \d+ registers", said), f"ptxas: expected its words, got {said!r}"
    return said


class Reached(Exception):
    """The last stage that is wanted of a compile; its argument is what came out of it."""


@contextmanager
def compiling_up_to(stage: str) -> Iterator[None]:
    """Kernels compiled meanwhile raise `Reached` after this stage: of a large kernel for Hopper
    "ttgir" is there in a quarter of the time."""

    def hook(*of_backend: Any) -> tuple[str, str]:
        if of_backend:
            stages = of_backend[1]
            make = stages[stage]

            def last(*given: Any) -> None:
                raise Reached(str(make(*given)))

            stages[stage] = last
        return stage, stage  # of what is cached, the key and its hash

    knobs = triton.knobs
    with knobs.runtime.scope(), knobs.compilation.scope():
        knobs.runtime.add_stages_inspection_hook = hook
        knobs.compilation.always_compile = True
        yield


@dataclass(frozen=True)
class Compiled:
    """A kernel of a plan, and what ptxas says that a thread and a block of it need."""

    ptx: str = field(repr=False)
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int


def variants(
    axes: cases.Axes,
    *,
    most: int,
    valid: Callable[[cases.Values], bool] = lambda values: True,
    besides: Sequence[cases.Values] = (),
    work: Callable[[cases.Values], float] = lambda values: 1.0,
    newest: int | None = None,
    ids: Callable[[cases.Values], str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrizes `values` with at most so many cases that hold every value of every axis.

    besides   what another test compiles, held to the same: its values need no other case
    work      what a case takes to compile, against others
    newest    how many of them are marked so; by default those that hold every value
    """
    chosen, every = cases.leading(cases.pairs(axes, valid), most, besides, work)
    marked = every if newest is None else newest
    marks = [[pytest.mark.newest] if n < marked else [] for n in range(len(chosen))]
    params = [
        pytest.param(values, marks=mark, id=ids and ids(values))
        for values, mark in zip(chosen, marks, strict=True)
    ]
    return pytest.mark.parametrize("values", params)


def layouts(problem: Problem, row_gap: int = 0, address: int = ADDRESS) -> Operands:
    """Operands of a decode problem, without memory; `row_gap` as in slices of larger tensors.

    address   of k and v
    """
    dtype, p = getattr(torch, problem.dtype), problem
    stored = STORED.get(p.codec.name, dtype)
    table = None
    slabs, slab = p.batch, p.seqlen_k
    if isinstance(p.place, Paged):
        table = Layout((p.batch, -(-p.seqlen_k // p.place.page_size)), torch.int32)
        slabs, slab = math.prod(table.shape), p.place.page_size
    scales = {"tensor": (1,), "head": (p.num_kv_heads,), "token": (slabs, slab, p.num_kv_heads)}
    scale = q_scale = None
    if p.codec.granularity in scales:
        scale = Layout(scales[p.codec.granularity], torch.float32)
    of_q = {"tensor": (1,), "head": (p.num_heads,), "token": (p.batch, p.seqlen_q, p.num_heads)}
    if p.q_granularity in of_q:
        q_scale = Layout(of_q[p.q_granularity], torch.float32)
    q_type = dtype if q_scale is None else stored
    return Operands(
        q=Layout((p.batch, p.seqlen_q, p.num_heads, p.head_dim), q_type, row_gap),
        k=Layout((slabs, slab, p.num_kv_heads, p.head_dim), stored, row_gap, address),
        v=Layout((slabs, slab, p.num_kv_heads, p.head_dim_v), stored, row_gap, address),
        out=Layout((p.batch, p.seqlen_q, p.num_heads, p.head_dim_v), getattr(torch, p.out_dtype)),
        page_table=table,
        cache_seqlens=Layout((p.batch,), torch.int32) if p.lengths == "device" else None,
        sequence_sink_tokens=Layout((p.batch,), torch.int32) if p.sequence_sink_tokens else None,
        sink_logits=Layout((p.num_heads,), dtype) if p.sink_logits else None,
        alibi_slopes=Layout((p.num_heads,), torch.float32) if p.score.alibi else None,
        q_scale=q_scale,
        k_scale=scale,
        v_scale=scale,
        out_scale=Layout((1,), torch.float32) if p.out_scale else None,
        softmax_scale=p.head_dim**-0.5,
        softcap=3.0 if p.score.softcap else 0.0,
    )


def tensor(*shape: int, of: torch.dtype = torch.float32, row_gap: int = 0) -> Any:
    """For what takes tensors by themselves."""
    return Layout(torch.Size(shape), of, row_gap)


def layouts_in_8_bits(problem: Problem) -> Operands:
    """Operands of a problem of any kind with quantised keys, without memory."""
    stored = STORED[problem.codec.name]
    p = problem
    lead, keys, cu, table = (p.batch, p.seqlen_q), (p.batch, p.seqlen_k), None, None
    if p.kind == "varlen":
        lead, keys = (p.batch * p.seqlen_q,), (p.batch * p.seqlen_k,)
        cu = Layout((p.batch + 1,), torch.int32)
    if isinstance(p.place, Paged):
        table = Layout((p.batch, -(-p.seqlen_k // p.place.page_size)), torch.int32)
        keys = (table.shape[0] * table.shape[1], p.place.page_size)
    cached = p.kind == "decode" or table is not None
    shapes = {"tensor": (1,), "head": (p.num_kv_heads,), "token": (*keys, p.num_kv_heads)}
    q_type, q_scale = getattr(torch, p.dtype), None
    if p.q_granularity == "token":
        q_type, q_scale = stored, Layout(torch.Size([*lead, p.num_heads]), torch.float32)
    of_keys = Layout(torch.Size(shapes[p.codec.granularity]), torch.float32)
    return Operands(
        q=Layout(torch.Size([*lead, p.num_heads, p.head_dim]), q_type),
        k=Layout(torch.Size([*keys, p.num_kv_heads, p.head_dim]), stored),
        v=Layout(torch.Size([*keys, p.num_kv_heads, p.head_dim]), stored),
        cache_seqlens=Layout((p.batch,), torch.int32) if cached else None,
        page_table=table,
        cu_seqlens_q=cu,
        cu_seqlens_k=None if table is not None else cu,
        q_scale=q_scale,
        k_scale=of_keys,
        v_scale=of_keys,
        softmax_scale=p.head_dim**-0.5,
        softcap=3.0 if p.score.softcap else 0.0,
    )


def compile_plan(
    plan: Plan,
    row_gap: int = 0,
    address: int = ADDRESS,
    new: Callable[[Operands], Any] = lambda operands: None,
    besides: Container[str] = (),
) -> dict[str, Any]:
    """The kernels that the plan's kernel launches, for the GPU of the plan; `layouts` has more.

    new       of the operands, the call of `append` that the kernel does
    besides   names of kernels whose code is for another test: None where they are launched
    """
    major, minor = plan.device.capability
    kernels = {"decode_split": decode_split.decode_split, "combine": launcher.combine}
    recorders: dict[str, Any] = {
        name: Launched(kernel) if name in besides else Recorder(kernel)
        for name, kernel in kernels.items()
    }
    entries = {
        name: Recorder(hopper_decode_split.entry_point(name))
        for name in hopper_decode_split.ENTRIES
    }
    operands, on_host = layouts(plan.problem, row_gap, address), torch.empty(0)
    operands.new = new(operands)
    partials = workspace.partials  # slices of a buffer: theirs is real
    with ExitStack() as patches:
        for name, recorder in recorders.items():
            module = MODULES.get(name, launcher)
            patches.enter_context(mock.patch.object(module, name, recorder))
        patches.enter_context(
            mock.patch.object(hopper_decode_split, "entry_point", entries.__getitem__)
        )
        for patch in (
            mock.patch.object(workspace, "partials", lambda like, *n: partials(on_host, *n)),
            mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", int, create=True),
            mock.patch.object(hopper_decode_split, "in_clusters", mock.MagicMock()),
            mock.patch.object(launcher.DecodeLauncher, "keep", mock.Mock()),
        ):
            patches.enter_context(patch)
        kernel_named(plan.kernel).bind(plan, operands)(operands)
    every = [*recorders.items(), *(("hopper_decode_split", entry) for entry in entries.values())]
    return {
        name: None if made is None else measure(made)
        for name, recorder in every
        for made in recorder.compiled
    }


def measure(compiled: Any) -> Compiled:
    assert overwritten_barriers(compiled.asm["ptx"]) == []
    registers, stack = resources(compiled.asm["cubin"])
    meta = compiled.metadata
    return Compiled(compiled.asm["ptx"], meta.num_warps, registers, stack, meta.shared)


def overwritten_barriers(ptx: str) -> list[int]:
    """Addresses in shared memory of barriers that are initialised where something else is stored.

    Triton reuses the memory of a barrier that nobody waits at for what it hands to the roles of
    warps, with nothing between: whichever lands last stays, mostly the right one.
    """
    at = dict.fromkeys(re.findall(r"mov\.[bu]32\s+(%r\d+), global_smem;", ptx), 0)
    for register, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx):
        if at.get(base) == 0:
            at[register] = int(offset)
    bars = re.findall(r"mbarrier\.init\.shared(?:::cta)?\.b64 \[(%r\d+)\]", ptx)
    stores = re.findall(r"st\.shared\.(?:v(\d)\.)?[bfu](\d+)\s+\[global_smem\+(\d+)\]", ptx)
    taken = {
        int(first) + byte
        for count, bits, first in stores
        for byte in range(int(count or 1) * int(bits) // 8)
    }
    return [at[bar] for bar in bars if not taken.isdisjoint(range(at[bar], at[bar] + 8))]


def dumped(cubin: bytes, option: str) -> str:
    """What cuobjdump says of machine code."""
    if not cubin:
        raise codegen.NoMachineCode
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread: spilled registers are in local memory."""
    told = dumped(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    assert found, f"cuobjdump: expected the use of resources, got {told}"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def instructions(cubin: bytes) -> list[tuple[int, str]]:
    """(address, instruction) of the machine code."""
    text = dumped(cubin, "-sass")
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    return [(int(address, 16), line) for address, line in found]


def meetings(cubin: bytes, number: int) -> list[bool]:
    """Of each wait at a barrier of the hardware, whether the cubin lists it among those of which
    several may be one meeting. Where roles meet at one that is not, synccheck reports it."""
    text = dumped(cubin, "-elf")
    found = re.search(r"EIATTR_COOP_GROUP_INSTR_OFFSETS\s.*\s+Value:((?:\s+0x[0-9a-f]+)*)", text)
    listed = {int(at, 16) for at in found[1].split()} if found else set()
    wait = re.compile(rf"BAR\.SYNC\S* {number:#x},")
    return [at in listed for at, line in instructions(cubin) if wait.search(line)]


def loops(cubin: bytes) -> list[list[str]]:
    """The instructions of every loop, those of loops inside it among them."""
    lines = instructions(cubin)
    jumps = [(at, re.search(r"BRA\S* .*?0x([0-9a-f]+)", line)) for at, line in lines]
    spans = [(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) < at]
    return [[line for at, line in lines if first <= at <= last] for first, last in spans]


def spilled(body: Sequence[str]) -> list[str]:
    """The instructions that load and store registers that were spilled."""
    return [line for line in body if re.search(r"\b(LDL|STL)\b", line)]


def key_loops(cubin: bytes, products: int, warpgroups: int) -> list[list[str]]:
    """The loops over keys, one a warpgroup: of those with so many products, the shortest."""
    found = [body for body in loops(cubin) if sum("GMMA" in line for line in body) == products]
    return sorted(found, key=len)[:warpgroups]
