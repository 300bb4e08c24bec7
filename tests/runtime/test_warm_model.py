"""A model is warm: what its serving launches is found without a GPU, bounded, and complete.

Kernels are asked for as on an H200 and none is compiled, but for one in a process of its own.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import splitkv
from splitkv.core.device import Device
from splitkv.flash_attn import flash_attn_with_kvcache
from splitkv.kernels.host.append_call import Rotary
from splitkv.kernels.host.compile_only import Variants, compile_only
from splitkv.kernels.host.stand_in import stand_in
from splitkv.planner import registry
from splitkv.runtime import append as append_calls
from splitkv.runtime import dispatch, serving_shapes, warm_record
from splitkv.runtime.compile_pool import compile_calls
from splitkv.runtime.model_config import attention_sizes
from splitkv.runtime.serving_shapes import Shape
from splitkv.runtime.warm_model import Serving, calls_of
from splitkv.runtime.warmup import Model

H200 = Device.named("h200")
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
LONGEST, BATCHES = 512, (1, 8, 64)
SERVED = Serving(batch_sizes=BATCHES, max_seqlen=LONGEST, max_seqlen_q=LONGEST)
TOGETHER = (1, 4)  # prompts
STEPS = 1000
# What a day of these batches and lengths asks for. Each is a second and a half of a core.
MOST = {
    "decode_all_warps": 60,
    "decode_producer": 6,
    "combine": 18,
    "hopper_prefill": 24,
    "prefill": 16,
    "append_kv": 2,
    "backward_rows": 3,
    "hopper_backward": 4,
    "hopper_backward_finish": 4,
}


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls and choices of these tests are nobody else's."""
    yield
    for module in (dispatch, append_calls):
        module.calls.clear()
    registry._choices.clear()


@pytest.fixture(scope="module")
def warm() -> dict[str, str]:
    """The variants that `warmup_model` would compile: name -> kernel."""
    variants = Variants()
    few = mock.patch.object(serving_shapes, "PROMPTS_TOGETHER", TOGETHER)
    with few, compile_only(H200, variants):
        for model, shapes in calls_of(attention_sizes(LLAMA), SERVED, H200):
            for shape in shapes:
                model.call_of(shape).run()
    return variants.asked


def models() -> dict[str, Model]:
    paged, growing, packed = (m for m, _ in calls_of(attention_sizes(LLAMA), SERVED, H200))
    return {"paged": paged, "growing": growing, "packed": packed}


def test_variants_are_few(warm: dict[str, str]) -> None:
    found = Counter(warm.values())
    assert found.keys() == MOST.keys()
    assert {name: n for name, n in found.items() if n > MOST[name]} == {}


def random_shape(r: random.Random) -> tuple[str, Shape]:
    """One call of a day: steps mostly, of any length, prompts, appends, and now and then a step of
    training."""
    batch, keys = r.choice(BATCHES), int(2 ** r.uniform(0, 9))
    kind = r.choices(["step", "prompt", "dense", "packed", "slots", "train"], [8, 1, 1, 1, 1, 1])[0]
    if kind == "step":
        return r.choice(["paged", "growing"]), Shape("step", batch, 1, keys)
    if kind == "slots":
        return "paged", Shape("slots", 1, r.randint(1, 400), 0)
    together = r.choice(TOGETHER)
    if kind == "train":
        how = r.choice(["dense", "packed"])
        return "packed", Shape(how, together, keys, keys, trains=True)  # type: ignore[arg-type]
    if kind == "prompt":
        return "paged", Shape("prompt", together, keys, r.randint(keys, LONGEST))
    return "growing" if kind == "dense" else "packed", Shape(kind, together, keys, keys)  # type: ignore[arg-type]


def test_serving_what_is_warm_compiles_nothing(warm: dict[str, str]) -> None:
    """Whatever the lengths: what is not warm would be compiled here, and fails."""
    r, by_name, cold = random.Random(0), models(), Counter[str]()

    def compiles(variant: str) -> bool:
        if variant not in warm:
            cold[f"{variants.asked[variant]} of {shape}"] += 1
        return False

    variants = Variants(wanted=compiles)
    with compile_only(H200, variants):
        for _ in range(STEPS):
            name, shape = random_shape(r)
            by_name[name].call_of(shape).run()
    assert len(variants.asked) > 60
    assert cold == Counter()


KINDS = "paged", "growing"
IN_8_BITS = replace(
    SERVED,
    caches=tuple(f"{kind}:{s}" for s in ("int8:head", "fp8:token") for kind in KINDS),
    batch_sizes=(1, 8),
    max_seqlen=256,
    max_seqlen_q=16,
    training=False,
)


def test_serving_caches_of_8_bits_compiles_nothing_that_is_not_warm() -> None:
    variants = Variants()
    few = mock.patch.object(serving_shapes, "PROMPTS_TOGETHER", (1,))
    with few, compile_only(H200, variants):
        works = list(calls_of(attention_sizes(LLAMA), IN_8_BITS, H200))[:-1]  # but for packed ones
        for model, shapes in works:
            for shape in shapes:
                model.call_of(shape).run()
        assert [str(model.codec) for model, _ in works] == [
            *["int8 per head"] * 2,
            *["fp8 per token"] * 2,
        ]
        warm = set(variants.asked)
        assert {"append_kv", "decode_all_warps"} <= {*variants.asked.values()}
        r = random.Random(0)
        for _ in range(300):
            model, _ = r.choice(works)
            keys = int(2 ** r.uniform(0, 8))
            shape = Shape("step", r.choice((1, 8)), 1, keys)
            if model.page_size and r.random() < 0.3:
                tokens = r.randint(1, 16)
                prompt = Shape("prompt", 1, tokens, r.randint(tokens, 256))
                shape = r.choice((prompt, Shape("slots", 1, r.randint(1, 400), 0)))
            model.call_of(shape).run()
    assert {variants.asked[name] for name in {*variants.asked} - warm} == set()


@pytest.mark.parametrize("page_size", [None, 16])
def test_new_tokens_by_a_schedule_are_warm(page_size: int | None) -> None:
    """The default has a schedule of so large caches, whose programs write them."""
    table = stand_in((1 << 15, 64), torch.bfloat16, H200)
    rotary = Rotary(table, table, None, interleaved=False)
    served = {"page_size": page_size, "longest": 1 << 15, "append": True, "rotary": rotary}
    model, variants = replace(models()["paged"], cache_seqlens=True, **served), Variants()
    with compile_only(H200, variants):
        model.call_of(Shape("step", 64, 1, 1 << 15)).run()
        warm = set(variants.asked)
        k, v = model.caches(64 if page_size is None else 100, page_size or 1 << 15)
        pages = {} if page_size is None else {"page_table": model.pages(64, 1 << 15)}
        new = model.zeros(64, 1, model.num_kv_heads, 128)
        q, lens = model.zeros(64, 1, model.num_heads, 128), model.index(64)
        turns = {"rotary_cos": table, "rotary_sin": table, "rotary_interleaved": False}
        for _ in range(2):
            flash_attn_with_kvcache(
                q, k, v, new, new, cache_seqlens=lens, causal=True, **pages, **turns
            )
    assert {*variants.asked.values()} == {"decode_walk", "combine_slots"}
    assert set(variants.asked) == warm


def test_integers_are_no_variants() -> None:
    """Lengths, batches and strides that are 1, odd or multiples of 16, of one plan."""
    variants = Variants()
    with compile_only(H200, variants):
        for batch, room in ((1, 640), (1, 641), (3, 655), (16, 1024), (5, 1)):
            q = stand_in((batch, 1, 32, 128), torch.bfloat16, H200)
            cache = stand_in((100, 16, 8, 128), torch.bfloat16, H200)
            table = stand_in((batch, room), torch.int32, H200)
            lens = stand_in((batch,), torch.int32, H200)
            for longest in (1, 15, 16):
                given: dict[str, Any] = {"page_table": table, "cache_seqlens": lens}
                splitkv.decode(q, cache, cache, **given, max_seqlen_k=longest, num_splits=1)
    assert Counter(variants.asked.values()) == {"decode_all_warps": 1}


def test_what_is_compiled_lies_in_the_cache(tmp_path: Path) -> None:
    """In a process of its own, for another GPU; the second time it is found there."""
    model = models()["paged"]
    told: list[tuple[str, int, int]] = []
    for _ in range(2):
        made = compile_calls(
            [(model, [Shape("slots", 1, 4, 4)])],
            processes=1,
            out=tmp_path,
            progress=lambda *told_of: told.append(told_of),
        )
        assert (made.calls, list(made.kernels.values()), made.failures) == (1, ["append_kv"], ())
        (folder,) = made.folders.values()
        files = {path.name: path for path in (tmp_path / folder).iterdir()}
        assert {"append_kv.cubin", "append_kv.ptx"} <= files.keys()
        stamp = files["append_kv.cubin"].stat().st_mtime_ns
    assert files["append_kv.cubin"].stat().st_mtime_ns == stamp
    assert told == [("plans", 1, 1), ("kernels", 1, 1)] * 2
    warm_record.write_record("a model", H200, made.folders, tmp_path)
    (record,) = warm_record.records(tmp_path)
    assert str(record) == "a model on sm_90: 1 of 1 kernels"
    for path in files.values():
        path.unlink()
    (tmp_path / folder).rmdir()
    (record,) = warm_record.records(tmp_path)
    assert (record.there, record.current) == (0, True)


def test_a_record_of_other_sources_says_so(tmp_path: Path) -> None:
    path = warm_record.write_record("a model", H200, {"a": "b"}, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"made_of": "others"}))
    (path.parent / "other.json").write_text("[]")
    (record,) = warm_record.records(tmp_path)
    assert "of other sources" in str(record)


# --- configurations ----------------------------------------------------------------------------


def test_sizes_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for given in (LLAMA, tmp_path, tmp_path / "config.json", {"text_config": LLAMA}):
        sizes = attention_sizes(given)
        assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (32, 8, 128)
        assert sizes.windows == ((-1, -1),) and sizes.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window": 4096}, ((4095, 0),)),
        ({"sliding_window": 4096, "use_sliding_window": False}, ((-1, -1),)),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
            ((127, 0), (-1, -1)),
        ),
    ],
)
def test_windows_of_a_configuration(more: dict[str, Any], windows: Any) -> None:
    assert attention_sizes(LLAMA | more).windows == windows


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "model.num_attention_heads: expected a number"),
        (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads: expected a multiple"),
        (LLAMA | {"torch_dtype": "int4"}, "torch_dtype: expected .bfloat16"),
        (7, "model: expected a configuration"),
        ("/nowhere/config.json", "model: expected the path of a JSON file"),
    ],
)
def test_malformed_configurations(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attention_sizes(config)


def test_without_a_gpu_one_has_to_be_named() -> None:
    with pytest.raises(ValueError, match="gpu: expected a GPU"):
        splitkv.warmup_model(LLAMA, gpu=splitkv.core.device.CPU)
    for caches in ("ring", "paged:int8", "paged:as_is", "paged:"):
        with pytest.raises(ValueError, match=r"serving.caches: expected .paged.*paged:int8:head"):
            splitkv.warmup_model(LLAMA, Serving(caches=(caches,)), gpu="h200")
