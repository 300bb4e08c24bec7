"""`splitkv trace`: small models on the CPU, and a profile of a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core.device import GPUS, cpu
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from models import CONFIGS, WINDOW  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

from splitkv.lab.bench import trace  # noqa: E402

LAYERS, PROMPT, NEW = 2, 5, 6
GPU = torch.autograd.DeviceType.CUDA
HOST = torch.autograd.DeviceType.CPU


def config(tmp_path: Path, name: str = "llama") -> str:
    path = tmp_path / f"{name}.json"
    CONFIGS[name]().to_json_file(path)
    return str(path)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["trace", *args])


@pytest.mark.parametrize("attention", ["eager", "sdpa", "splitkv"])
def test_every_call_is_noted_whatever_serves_it(attention: str) -> None:
    model = trace.make_model(CONFIGS["llama"](), attention, "float32", "cpu")
    before = AttentionInterface.get_interface
    calls, ran = trace.run(model, 2, PROMPT, NEW)
    assert AttentionInterface.get_interface is before
    lengths = [(p.seqlen_q, p.seqlen_k) for p in calls[::LAYERS]]
    assert lengths == [(PROMPT, PROMPT), *((1, PROMPT + i) for i in range(1, NEW))]
    assert all(p == q for p, q in zip(calls[::LAYERS], calls[1::LAYERS], strict=True))
    assert calls[0] == Problem(
        *("dense", 2, 4, 2, 16, 16, PROMPT, PROMPT), dtype="float32", mask=Mask(True)
    )
    assert {launch.call for launch in ran} == set(range(len(calls)))
    found = {row.kernel for row in trace.rows(calls, ran)}
    serves = "aten::softmax" if attention == "eager" else "aten::scaled_dot_product_attention"
    assert serves in found and "aten::linear" not in found


def test_windows_and_sinks_are_part_of_what_was_asked() -> None:
    model = trace.make_model(CONFIGS["gpt_oss"](), "eager", "float32", "cpu")
    calls, _ = trace.run(model, 1, PROMPT, 2)
    assert {p.sink_logits for p in calls} == {True}
    assert {p.mask.window_left for p in calls} == {-1, WINDOW - 1}


def test_the_command_sets_the_reasons_beside_the_kernels(tmp_path: Path) -> None:
    given = ["--model", config(tmp_path), "--new-tokens", "3,2", "--prompt", "4"]
    done = run(*given, "--attention", "splitkv", "--attention", "eager", "--layers", "1")
    assert done.exit_code == 0, done.output
    heads = [line for line in done.stdout.splitlines() if " tokens, batch 1" in line]
    assert [head.split(",")[0] for head in heads] == [
        *("splitkv: 4 + 3 tokens", "splitkv: 4 + 2 tokens"),
        *("eager: 4 + 3 tokens", "eager: 4 + 2 tokens"),
    ]
    reasons = [line for line in done.stdout.splitlines() if line.startswith("* ")]
    starts = [line.split(": ")[0] for line in reasons]
    assert starts[:3] == ["* decode, 5 keys", "* decode, 6 keys", "* prefill, 4 keys"]
    assert all(": torch_" in line for line in reasons)


class Event(NamedTuple):
    """What the profiler's raw events answer."""

    what: str
    device: Any
    start: int
    duration: int
    correlation: int = 0

    def name(self) -> str:
        return self.what

    def device_type(self) -> Any:
        return self.device

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def correlation_id(self) -> int:
        return self.correlation


SPLITKV = "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>, true>(Flash_fwd_params)"
PROFILE = [
    Event(f"{trace.RANGE}0", HOST, 100, 50),
    Event(f"{trace.RANGE}0", GPU, 1000, 500, 7),
    Event("cudaLaunchKernel", HOST, 110, 5, 1),
    Event("cudaMemcpyAsync", HOST, 115, 5, 9),
    Event("void flash_fwd_kernel<Traits>(Flash_fwd_params)", GPU, 1000, 3000, 1),
    Event("Memcpy DtoD", GPU, 1000, 3000, 9),
    Event("cuLaunchKernelEx", HOST, 160, 5, 2),  # a projection, between two calls
    Event("gemm", GPU, 5000, 9000, 2),
    Event(f"{trace.RANGE}1", HOST, 200, 50),
    Event("cuLaunchKernelEx", HOST, 240, 5, 3),
    Event("cudaLaunchKernelExC", HOST, 245, 5, 4),
    Event(SPLITKV, GPU, 20000, 4000, 3),  # long after its call was over on the host
    Event("hopper_decode_split", GPU, 30000, 2500, 4),
]
ASKED = [
    Problem("dense", 1, 28, 4, 128, 128, 30, 30, mask=Mask(True)),
    Problem("decode", 1, 28, 4, 128, 128, 1, 600, mask=Mask(True)),
]


def test_a_kernel_belongs_to_the_call_that_launched_it() -> None:
    found = list(trace.launches(PROFILE, on_gpu=True))
    assert [(launch.call, trace.short(launch.name), launch.us) for launch in found] == [
        *((0, "flash_fwd_kernel", 3.0), (1, "flash_fwd_splitkv_kernel", 4.0)),
        (1, "hopper_decode_split", 2.5),
    ]
    rows = trace.rows(ASKED, found)
    assert [row.cells()[:5] for row in rows] == [
        ["prefill", "flash_fwd_kernel", "30", "1", "3.00"],
        ["decode", "flash_fwd_splitkv_kernel", "600", "1", "4.00"],
        ["decode", "hopper_decode_split", "600", "1", "2.50"],
    ]
    assert rows[2].what == "splitkv: hopper_decode_split"
    assert rows[1].what.startswith("FlashAttention-2 for a cache")
    assert len(trace.rows(ASKED, found, least=0.5)) == 2


def test_the_rule_of_flash_attention_2_explains_its_kernels() -> None:
    found = list(trace.launches(PROFILE, on_gpu=True))
    short, long = trace.reasons(ASKED, found, "sdpa", GPUS["h200"])[::-1]
    assert short.startswith("prefill, 30 keys: FlashAttention-2's rule, ")
    assert long.startswith("decode, 600 keys: FlashAttention-2's rule, ") and "split" in long
    ours = trace.reasons(ASKED, found, "splitkv", GPUS["h200"])
    assert ours[0].startswith("decode, 600 keys: hopper_decode_split, tuned: ")
    assert trace.reasons(ASKED, [], "sdpa", cpu()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--new-tokens", "a"], "new_tokens: expected N,N,..., got 'a'"),
        (["--new-tokens", "0"], "new_tokens: expected more than 0, got 0"),
        (["--layers", "3"], "layers: expected at most 2, as the model has, got 3"),
        (["--layers", "0"], "layers: expected more than 0, got 0"),
        (["--batch", "0"], "batch: expected more than 0, got 0"),
        (["--prompt", "1"], "prompt: expected more than 1 token, got 1"),
        (["--dtype", "int8"], "dtype: expected 'bfloat16', "),
        (["--attention", "flash_attention_9"], "attention: expected one that this model can have"),
        (["--model", "no/where.json"], "model: expected a configuration that is there"),
    ],
)
def test_what_cannot_be_traced(args: list[str], message: str, tmp_path: Path) -> None:
    done = run("--model", config(tmp_path), *args)
    assert done.exit_code == 2 and done.stderr.splitlines()[-1].startswith(f"splitkv: {message}")


def test_a_configuration_says_which_model_it_is_of(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 4}))
    done = run("--model", str(path))
    assert done.exit_code == 2
    assert "model: expected a configuration with model_type" in done.stderr


def test_a_folder_is_read_as_its_configuration(tmp_path: Path) -> None:
    CONFIGS["qwen2"]().save_pretrained(tmp_path)
    found = trace.config_of(str(tmp_path), 1)
    assert found.model_type == "qwen2" and len(found.layer_types) == 1
