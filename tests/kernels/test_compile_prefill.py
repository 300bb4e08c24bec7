"""`prefill` and `backward` compile for every architecture, without a GPU.

As in test_compile.py: what the launchers launch is compiled in the shapes that they would take,
and held to budgets of registers and shared memory. A variant is up to six kernels, so few are
compiled: every value of every axis on sm_90, and every other architecture at least once. A spill
outside a loop is no cost; inside one there is none for the head dimensions of everyday models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import triton
from compiling import AnyGPU, Launched, Layout, Recorder, loops, measure, spilled, variants
from triton.runtime.driver import driver

from splitkv.core.device import GPUS, Device
from splitkv.core.kv import Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import Backward
from splitkv.kernels import prefill
from splitkv.kernels.backward import launcher as backward
from splitkv.kernels.backward import rows as backward_rows
from splitkv.kernels.backward.records import GradientTensors
from splitkv.kernels.backward.rows import statistics
from splitkv.kernels.combine import Partial
from splitkv.kernels.host import sequence_sizes, sequences, workspace
from splitkv.kernels.limits import prefill as limits
from splitkv.kernels.limits.backward import key_configs, query_configs
from splitkv.planner.policies.row_splits import row_splits
from splitkv.planner.registry import completed
from splitkv.rounding import STORED

PLAIN = {"softcap": False, "alibi": False, "sink_logits": False, "dropout": False}
EVERYTHING = {"softcap": True, "alibi": True, "sink_logits": True, "dropout": True}
HEAD_DIMS = cases.AXES["head_dims"]
MASKS = (
    *(Mask(causal=True), Mask(), Mask(True, 128), Mask(True, 4096, -1, 4)),
    Mask(window_left=9, window_right=2),
)
AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": HEAD_DIMS,
    "heads": ((8, 8), (8, 2), (14, 2), (64, 1)),
    "seqlen_q": (4096, 3, 1),
    "mask": MASKS,
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "dropout": (False, True),
    "row_gap": (0, 8),
    "shape": (0, 1, 3),  # which of the configs, the best being 0
}
# Of everyday models: what is compiled to look at its loops, beside the covering sets.
EVERYDAY = tuple(
    {
        **PLAIN,
        **{"kind": "dense", "dtype": "bfloat16", "head_dims": (head_dim, head_dim)},
        **{"heads": (8, 2), "seqlen_q": 4096, "mask": mask, "row_gap": 0, "shape": 0},
    }
    for head_dim, mask in ((128, Mask()), (128, Mask(True)), (64, Mask(True, 128, -1, 4)))
)
CACHE_AXES: cases.Axes = {
    **AXES,
    "kind": ("varlen", "decode"),
    "seqlen_q": (4096, 200, 8, 1),
    "place": (Paged(1), Paged(16), Paged(64), Paged(100), Paged(256)),
    "parts": (1, 2, 40),
    "merge": ("combine", "last"),
}
OTHER_AXES: cases.Axes = {
    "gpu": ("a100", "a10", "l4", "b200", "rtx5090"),
    "kind": AXES["kind"],
    "dtype": AXES["dtype"],
    "head_dims": ((64, 64), (128, 128), (192, 128), (256, 256)),
    "features": (PLAIN, EVERYTHING),
    "mask": (Mask(causal=True), Mask(True, 128, -1, 4)),
}
OTHER_CACHE_AXES: cases.Axes = {"gpu": OTHER_AXES["gpu"], "place": (Paged(16), Paged(128))}
TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")


def work(values: cases.Values) -> float:
    """About the seconds that forward and backward of a combination take to compile."""
    values = {**values, **values.get("features", {})}
    features = values["softcap"] + values["alibi"] + values["dropout"]
    wide = max(values["head_dims"]) > 192
    two_bands, exact = values["mask"].num_bands == 2, values["dtype"] == "float32"
    return 9 + 4 * two_bands + 4 * wide + 3 * exact + 2.3 * features


def problem_of(values: cases.Values) -> tuple[Problem, int]:
    """The problem of a combination, and the gap between rows in memory."""
    defaults = {"heads": (8, 2), "seqlen_q": 4096, "row_gap": 0, "kind": "dense"}
    values = {**defaults, **values.get("features", PLAIN), **values}
    place = Ragged() if values["kind"] == "varlen" else Contiguous()
    cached = "place" in values
    num_heads, num_kv_heads = values["heads"]
    head_dim, head_dim_v = values["head_dims"]
    problem = Problem(
        values["kind"],
        batch=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=values["seqlen_q"],
        seqlen_k=4096,
        dtype=values.get("dtype", "bfloat16"),
        mask=values["mask"],
        place=values.get("place", place),
        score=cases.Score(values["softcap"], values["alibi"]),
        sink_logits=values["sink_logits"],
        dropout=values["dropout"],
        lengths="device" if cached else "host",
        needs_grad=not cached,
        return_lse=True,
    )
    return problem, values["row_gap"]


def operands_of(problem: Problem, row_gap: int) -> Operands:
    """Operands without memory."""
    p, dtype = problem, getattr(torch, problem.dtype)
    stored = STORED.get(p.codec.name, dtype)
    stored_q = stored if p.q_granularity != "none" else dtype
    lead_q: tuple[int, ...] = p.batch, p.seqlen_q
    lead_k: tuple[int, ...] = p.batch, p.seqlen_k
    cu_q = cu_k = lengths = table = None
    if p.kind == "varlen":
        lead_q, lead_k = (p.batch * p.seqlen_q,), (p.batch * p.seqlen_k,)
        cu_q = cu_k = Layout(torch.Size([p.batch + 1]), torch.int32)
    if isinstance(p.place, Paged):
        max_pages = -(-p.seqlen_k // p.place.page_size)
        lead_k, cu_k = (p.batch * max_pages, p.place.page_size), None
        table = Layout(torch.Size([p.batch, max_pages]), torch.int32)
        lengths = Layout(torch.Size([p.batch]), torch.int32)

    def tensor(*shape: int, of: torch.dtype = stored) -> Layout:
        return Layout(torch.Size(shape), of, row_gap)

    def scale(granularity: str, lead: tuple[int, ...], heads: int) -> Layout | None:
        shapes = {"tensor": (1,), "head": (heads,), "token": (*lead, heads)}
        if granularity == "none":
            return None
        return Layout(torch.Size(shapes[granularity]), torch.float32)

    ranges = Layout(torch.Size([p.batch, 3, 2]), torch.int32) if p.bidirectional_ranges else None
    own_sinks = Layout(torch.Size([p.batch]), torch.int32) if p.sequence_sink_tokens else None
    return Operands(
        q=tensor(*lead_q, p.num_heads, p.head_dim, of=stored_q),
        k=tensor(*lead_k, p.num_kv_heads, p.head_dim),
        v=tensor(*lead_k, p.num_kv_heads, p.head_dim_v),
        q_scale=scale(p.q_granularity, lead_q, p.num_heads),
        k_scale=scale(p.codec.granularity, lead_k, p.num_kv_heads),
        v_scale=scale(p.codec.granularity, lead_k, p.num_kv_heads),
        out_scale=Layout((1,), torch.float32) if p.out_scale else None,
        bidirectional_ranges=ranges,
        sequence_sink_tokens=own_sinks,
        cache_seqlens=lengths,
        page_table=table,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        sink_logits=Layout((p.num_heads,), dtype) if p.sink_logits else None,
        alibi_slopes=Layout((p.num_heads,), torch.float32) if p.score.alibi else None,
        softmax_scale=p.head_dim**-0.5,
        softcap=3.0 if p.score.softcap else 0.0,
        dropout_p=0.1 if p.dropout else 0.0,
    )


def partials(like: Layout, acc: int, rows: int) -> Partial:
    return Partial(*(Layout((n,), torch.float32) for n in (acc, rows, rows)))


def forward(
    problem: Problem, device: Device, row_gap: int, config: Config, merged: bool = False
) -> dict[str, Any]:
    """`prefill` of a config; merged: and `combine`, where it leaves partials."""
    x = operands_of(problem, row_gap)
    seed = Layout((), torch.int64) if problem.dropout else None
    plan = completed(Plan(problem, device, "fixed", "prefill", config, "a test"))
    merge = Recorder if merged else Launched
    recorders: dict[str, Any] = {
        "prefill": Recorder(prefill.prefill),
        "combine": merge(sequences.combine),
    }
    major, minor = device.capability
    with (
        mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
        mock.patch.object(prefill, "prefill", recorders["prefill"]),
        mock.patch.object(sequences, "combine", recorders["combine"]),
        mock.patch.object(workspace, "partials", partials),
        mock.patch.object(workspace, "counter_for", lambda _: Layout((4,), torch.int64)),
    ):
        prefill.PrefillLauncher(plan, x).forward(x, seed)
    (kernel,) = recorders["prefill"].compiled
    by_combine = config.num_splits > 1 and config.merge == "combine"
    assert len(recorders["combine"].compiled) == by_combine
    estimate = limits.shared_bytes(problem, config, device)
    assert kernel.metadata.shared <= estimate <= device.smem_per_block
    assert bool(TENSOR_CORE.search(kernel.asm["ptx"])) == (problem.dtype != "float32")
    if row_gap == 0 and problem.head_dim % 8 == 0:
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", kernel.asm["ptx"])
    made = {name: kernel for name, r in recorders.items() for kernel in r.compiled}
    return {name: kernel for name, kernel in made.items() if kernel is not None}


def chosen(configs: Iterator[Config], number: int) -> Config:
    """The config with this number, or the last before."""
    return list(islice(configs, number + 1))[-1]


def compiled(problem: Problem, device: Device, row_gap: int = 0, number: int = 0) -> dict[str, Any]:
    """The kernels of a forward and backward, by name and in order of their launch."""
    x = operands_of(problem, row_gap)
    seed = Layout((), torch.int64) if problem.dropout else None
    config = chosen(limits.configs(problem, device), number)
    plan = completed(Plan(problem, device, "fixed", "prefill", config, "a test"))
    keys = chosen(key_configs(problem, device), number)
    queries = chosen(query_configs(problem, device), number)
    splits = row_splits(problem, device, keys.tile_m, keys.tile_n)
    run = backward.BackwardLauncher(problem, device, Backward(keys, queries, splits))
    names = {
        prefill: ("prefill",),
        backward_rows: ("backward_rows",),
        backward: ("backward_keys", "backward_queries", "backward_finish"),
    }
    recorders = {n: Recorder(getattr(m, n)) for m, held in names.items() for n in held}
    major, minor = device.capability
    with (
        mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
        mock.patch.object(prefill, "prefill", recorders["prefill"]),
        mock.patch.object(backward_rows, "backward_rows", recorders["backward_rows"]),
        mock.patch.multiple(backward, **{n: recorders[n] for n in names[backward]}),
    ):
        prefill.PrefillLauncher(plan, x).forward(x, seed)
        out = Layout(torch.Size([*x.q.shape[:-1], problem.head_dim_v]), x.q.dtype)
        lse = Layout(sequence_sizes.lse_shape(x.q), torch.float32)
        stats = statistics(problem, x, out, lse, out, lse, problem.score.alibi)
        tensors = GradientTensors(x.q, x.k, x.v, out, x.q, x.k, x.v)
        split = run.launch_keys(x, seed, stats, tensors)
        run.launch_queries(x, seed, stats, tensors)
        run.launch_finish(x, stats, tensors, split)
    assert limits.shared_bytes(problem, config, device) <= device.smem_per_block
    (forward,) = recorders["prefill"].compiled
    assert forward.metadata.shared <= limits.shared_bytes(problem, config, device)
    made = {name: recorder.compiled for name, recorder in recorders.items()}
    left = splits.splits > 1 or problem.sink_logits
    assert (len(made["backward_keys"]), len(made["backward_finish"])) == (1, left)
    for name, kernels in made.items():
        for kernel in kernels:
            assert kernel.metadata.shared <= device.smem_per_block, name
            multiplies = name not in ("backward_rows", "backward_finish")
            exact = problem.dtype == "float32"
            assert bool(TENSOR_CORE.search(kernel.asm["ptx"])) == (multiplies and not exact), name
            if multiplies and row_gap == 0 and problem.head_dim % 8 == 0:
                assert re.search(r"cp\.async\.c[ag]\.shared\.global", kernel.asm["ptx"]), name
    return made


def describe(values: cases.Values) -> str:
    dims = "x".join(map(str, values["head_dims"]))
    heads = "{}_{}".format(*values["heads"]) if "heads" in values else ""
    names = (values.get("gpu"), values["kind"], values["dtype"], dims, heads, values["mask"])
    names += (values.get("place"), values.get("parts"))
    return "-".join(str(name).replace(" ", "_") for name in names if name)


def compiled_for_sm_90(values: cases.Values) -> dict[str, Any]:
    problem, row_gap = problem_of(values)
    made = compiled(problem, GPUS["h200"], row_gap, values["shape"])
    for name, kernels in made.items():
        for kernel in map(measure, kernels):
            assert kernel.registers * 32 * kernel.num_warps <= 65536, name
    return made


@variants(AXES, most=6, besides=EVERYDAY, work=work, newest=2, ids=describe)
def test_sm_90(values: cases.Values) -> None:
    compiled_for_sm_90(values)


@variants(OTHER_AXES, most=5, work=work, newest=2, ids=describe)
def test_other_architectures(values: cases.Values) -> None:
    compiled(problem_of(values)[0], GPUS[values["gpu"]])


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[gpu].capability for gpu in OTHER_AXES["gpu"]} | {(9, 0)} == known


def says_arrived(ptx: str) -> bool:
    """Whether a program says that its partials are there, and others wait for that."""
    words = (r"atom\S*\.release", r"(ld|atom)\S*\.acquire")
    found = {bool(re.search(word, ptx)) for word in words}
    assert len(found) == 1
    return found.pop()


@variants(CACHE_AXES, most=8, work=work, newest=2, ids=describe)
def test_pages_and_parts(values: cases.Values) -> None:
    """On sm_90; `combine` starts while `prefill` still runs, and waits for it. Merged inside, the
    last programs wait for the others."""
    problem, row_gap = problem_of(values)
    config = chosen(limits.configs(problem, GPUS["h200"]), values["shape"])
    config = replace(config, num_splits=values["parts"], merge=values["merge"])
    for name, kernel in forward(problem, GPUS["h200"], row_gap, config, merged=True).items():
        found = measure(kernel)
        assert found.registers * 32 * found.num_warps <= 65536, name
        word, cut = "wait" if name == "combine" else "launch_dependents", config.num_splits > 1
        by_combine = cut and config.merge == "combine"
        assert (f"griddepcontrol.{word}" in kernel.asm["ptx"]) == by_combine, name
        assert says_arrived(kernel.asm["ptx"]) == (cut and config.merge == "last"), name


@variants(OTHER_CACHE_AXES, most=5, newest=0, ids=str)
def test_pages_and_parts_on_other_architectures(values: cases.Values) -> None:
    gpu, fixed = GPUS[values["gpu"]], {"kind": "varlen", "head_dims": (128, 128), "seqlen_q": 64}
    problem, _ = problem_of({**fixed, "mask": Mask(True), "place": values["place"]})
    config = replace(chosen(limits.configs(problem, gpu), 0), num_splits=3)
    forward(problem, gpu, 0, config, merged=True)


def local_accesses(cubin: bytes) -> list[int]:
    """Loads from and stores to local memory in each loop, innermost or not."""
    return [len(spilled(body)) for body in loops(cubin)]


@pytest.mark.parametrize("values", EVERYDAY, ids=describe)
def test_loops_do_not_spill(values: cases.Values) -> None:
    """On sm_90; ptxas may leave the loop over masked tiles, which is short, two accesses."""
    for name, kernels in compiled_for_sm_90(values).items():
        for kernel in kernels:
            assert measure(kernel).stack_bytes <= 40, name
            accesses = local_accesses(kernel.asm["cubin"])
            if name in ("prefill", "backward_keys", "backward_queries"):
                assert len(accesses) == 2, f"{name}: expected two loops, got {len(accesses)}"
                assert accesses[0] <= 2 and accesses[1] == 0, f"{name} spills: {accesses}"


@pytest.mark.parametrize("seqlen_q, page_size", [(4096, 1), (4096, 128), (16, 1), (4, 128)])
def test_loops_over_pages_do_not_spill(seqlen_q: int, page_size: int) -> None:
    """On sm_90, in the shape taken for chunks of prompts and for a few rows."""
    values = {"kind": "varlen", "head_dims": (128, 128), "heads": (8, 2), "mask": Mask(True)}
    problem, _ = problem_of({**values, "seqlen_q": seqlen_q, "place": Paged(page_size)})
    config = replace(chosen(limits.configs(problem, GPUS["h200"]), 0), num_splits=2)
    kernel = forward(problem, GPUS["h200"], 0, config)["prefill"]
    assert local_accesses(kernel.asm["cubin"])[-2:] == [0, 0]


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("gpu", GPUS)
def test_something_fits_everywhere(gpu: str, head_dims: tuple[int, int]) -> None:
    """Whatever the type, features and length: as many programs as rows need, and tiles to split."""
    for dtype in ("bfloat16", "float32"):
        for features in (PLAIN, EVERYTHING):
            values = {"head_dims": head_dims, "dtype": dtype, "mask": Mask(True)} | features
            problem, _ = problem_of(values)
            for rows in (1, 20, 4096):
                short = replace(problem, seqlen_q=rows)
                found = list(limits.configs(short, GPUS[gpu]))
                assert found and len(set(found)) == len(found)
                assert all(config.num_splits == 1 for config in found)
                assert next(key_configs(short, GPUS[gpu]))
                assert next(query_configs(short, GPUS[gpu]))
                tiles = [found[0].tile_m, found[0].tile_n]
                assert all(triton.next_power_of_2(n) == n >= 16 for n in tiles)


# Keys and values in 8 bits. Which units multiply can be read off the code: 8-bit ones where
# `products` allows them and the GPU has them; e4m3 is widened from its bits where it has not.
EIGHT_BITS = re.compile(r"\.(s8\.s8|e4m3\.e4m3)|kind::(f8f6f4|i8)")
SIXTEEN_BITS = re.compile(r"\.(bf16\.bf16|f16\.f16)|kind::f16")
QUANTISED_AXES: cases.Axes = {
    "gpu": tuple(GPUS[name] for name in ("h200", "a100", "a10", "l4", "b200", "rtx5090")),
    "codec": cases.CODECS,
    "products": ("widened", "half", "full"),
    "q_granularity": ("none", "token", "head"),
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": ((64, 64), (128, 128), (192, 128), (256, 256)),
    "features": (PLAIN, EVERYTHING),
    "mask": (Mask(causal=True), Mask(True, 128, -1, 4)),
    "kind": ("dense", "varlen", "decode"),
    "place": (None, Paged(1), Paged(16), Paged(64)),
    "seqlen_q": (4096, 3),
    "parts": (1, 3),
    "shape": (0, 1),
}


def valid(values: cases.Values) -> bool:
    """A quantised query works in bf16; dense keys are not in pages, those of a cache always."""
    if values.get("q_granularity", "none") != "none" and values.get("dtype") == "float16":
        return False
    if values.get("q_granularity", "none") != "none" and values.get("dtype") == "float32":
        return False
    if "kind" not in values or "place" not in values:
        return True
    return (values["kind"] == "dense") <= (values["place"] is None) and (
        values["kind"] == "decode"
    ) <= (values["place"] is not None)


def quantised(values: cases.Values) -> Problem:
    values = {"mask": Mask(True), "head_dims": (128, 128), **values}
    names = ("codec", "products", "q_granularity")
    more = {name: values.pop(name) for name in names if name in values}
    if values.get("place") is None:
        values.pop("place", None)
    problem = replace(problem_of(values)[0], needs_grad=False, **more)
    return replace(problem, dropout=problem.dropout and problem.kind != "decode")


def units(ptx: str) -> tuple[bool, bool]:
    """Whether anything is multiplied in 8 bits, and in 16."""
    return bool(EIGHT_BITS.search(ptx)), bool(SIXTEEN_BITS.search(ptx))


def name_of(values: cases.Values) -> str:
    names = ("kind", "codec", "products", "dtype", "head_dims", "place")
    return "-".join(str(values[name]).replace(" ", "_") for name in names)


@variants(QUANTISED_AXES, most=6, valid=valid, newest=0, ids=name_of)
def test_quantised_keys(values: cases.Values) -> None:
    values = dict(values)
    gpu, parts, shape = (values.pop(name) for name in ("gpu", "parts", "shape"))
    problem = quantised(values)
    assert limits.unsupported(problem, gpu) == []
    config = replace(chosen(limits.configs(problem, gpu), shape), num_splits=parts)
    kernel = forward(problem, gpu, 0, config)["prefill"]
    if problem.dtype != "float32":
        wanted = {"widened": (False, True), "half": (True, True), "full": (True, False)}
        chosen_units = prefill.units_of(problem, gpu, config)
        assert units(kernel.asm["ptx"]) == wanted[chosen_units]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gpu", ["a100", "a10"])
def test_e4m3_where_no_instruction_converts_it(gpu: str, dtype: str) -> None:
    """No step spills registers."""
    values = {"kind": "varlen", "dtype": dtype, "place": Paged(16)}
    problem = quantised(values | {"codec": Codec("fp8", "tensor"), "products": "half"})
    config = chosen(limits.configs(problem, GPUS[gpu]), 0)
    kernel = forward(problem, GPUS[gpu], 0, config)["prefill"]
    steps = [body for body in loops(kernel.asm["cubin"]) if any("HMMA" in line for line in body)]
    step = min(steps, key=len)
    assert sum("HMMA" in line for line in step) == 2 * config.tile_n
    assert not spilled(step)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("gpu", ["a100", "a10", "l4", "h200", "b200", "rtx5090"])
def test_units(gpu: str, name: Any) -> None:
    """What `products` allows is used, but for e4m3 where no unit takes it."""
    device, config = GPUS[gpu], Config(tile_m=64, tile_n=64, num_warps=4)
    for products in ("widened", "half", "full"):
        problem = quantised({"codec": Codec(name, "head"), "products": products})
        found = prefill.units_of(problem, device, config)
        known = name == "int8" or device.capability >= (8, 9)
        assert found == (products if known else "widened")
        assert prefill.units_of(replace(problem, dtype="float32"), device, config) == "widened"
        assert prefill.units_of(replace(problem, head_dim=24), device, config) in (found, "half")
        few_rows = prefill.units_of(problem, device, replace(config, tile_m=16))
        assert few_rows == (found if name == "int8" or gpu in ("l4", "rtx5090") else "widened")
    few_keys = quantised({"codec": Codec("int8", "head"), "products": "full"})
    assert prefill.units_of(few_keys, device, replace(config, tile_n=16)) == "half"


@pytest.mark.parametrize("granularity", ["head", "token"])
@pytest.mark.parametrize(("name", "products"), [("int8", "half"), ("fp8", "widened")])
def test_the_defaults_hardly_spill(name: Any, products: Any, granularity: Any) -> None:
    """On sm_90, in the shape for prompts: a few bytes outside the loops."""
    codec = Codec(name, granularity)
    problem = quantised({"codec": codec, "products": products, "seqlen_q": 4096})
    config = chosen(limits.configs(problem, GPUS["h200"]), 0)
    made = measure(forward(problem, GPUS["h200"], 0, config)["prefill"])
    assert made.stack_bytes <= 64


@pytest.mark.parametrize("shape", [(64, 64, 4, 3), (64, 64, 4, 2)], ids=str)
def test_shared_memory_of_tcgen05(shape: tuple[int, int, int, int]) -> None:
    """Of 64 rows on sm_100, whose sums take more than those of mma; what is estimated is enough."""
    problem, device = Problem("dense", 2, 8, 2, 64, 64, 300, 700, mask=Mask(True)), GPUS["b200"]
    config = Config(2, *shape)
    assert config.shape in list(limits.configs(problem, device))
    kernel = forward(problem, device, 0, config)["prefill"]  # which compares the two
    assert limits.shared_bytes(problem, config, device) == kernel.metadata.shared
