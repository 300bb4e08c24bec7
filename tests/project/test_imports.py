"""Importing the package is cheap, and its public names are what they say."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

import splitkv

PUBLIC_FUNCTIONS = (
    "attention",
    "attention_varlen",
    "decode",
    "explain",
    "merge_states",
    "plan",
    "warmup",
)
PUBLIC_CLASSES = ("Device", "Plan", "Problem", "UnsupportedProblem")
OPTIONAL = {"sglang", "vllm", "transformers", "typer", "rich", "matplotlib"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_little_to_torch() -> None:
    code = (
        "import time, torch\n"
        "start = time.process_time()\n"
        "import splitkv\n"
        "print(time.process_time() - start)\n"
    )
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_import_leaves_the_heavy_modules_alone() -> None:
    heavy = json.loads(
        run(
            "import json, sys, splitkv\n"
            "heavy = ['triton', 'transformers', 'matplotlib', 'typer', 'rich', 'numpy']\n"
            "print(json.dumps([name for name in heavy if name in sys.modules]))\n"
        )
    )
    assert heavy == []


@pytest.mark.parametrize(
    "name",
    [
        "cache.PagedKVCache",
        "flash_attn.flash_attn_func",
        "integrations.torch_sdpa.register",
        "reference.apply_sink_logits",
    ],
)
def test_modules_are_there_when_asked_for(name: str) -> None:
    assert run(f"import splitkv\nprint(callable(splitkv.{name}))") == "True\n"


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_public_functions(name: str) -> None:
    assert callable(getattr(splitkv, name))
    assert name in splitkv.__all__
    assert name in dir(splitkv)


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_public_classes(name: str) -> None:
    assert isinstance(getattr(splitkv, name), type)
    assert name in splitkv.__all__


def test_no_module_has_the_name_of_a_public_function() -> None:
    # Importing such a module would put it in the function's place.
    modules = {module.name for module in pkgutil.iter_modules(splitkv.__path__)}
    assert modules.isdisjoint(splitkv.__all__)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        splitkv.no_such_name  # noqa: B018


def test_every_module_imports() -> None:
    for module in pkgutil.walk_packages(splitkv.__path__, "splitkv."):
        if module.name == "splitkv.__main__":
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert (error.name or "").split(".")[0] in OPTIONAL, module.name


def test_the_first_use_does_not_load_torch_s_compiler() -> None:
    """It takes longer than all else; who compiles loads it then."""
    code = (
        "import sys, splitkv\n"
        "splitkv.decode, splitkv.attention, splitkv.plan, splitkv.warmup\n"
        "assert 'torch._dynamo' not in sys.modules, 'loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_plan_is_made_without_triton() -> None:
    """By the public function, and by what describes the tensors of a call, too."""
    code = """
import sys, torch, splitkv
problem = splitkv.Problem("decode", 2, 16, 2, 128, 128, 1, 8192, lengths="device")
for gpu in ("h200", "a100"):
    print(splitkv.plan(problem, device=splitkv.Device.named(gpu)).kernel)
print(splitkv.plan(torch.zeros(1, 1, 4, 64), torch.zeros(1, 9, 2, 64), torch.zeros(1, 9, 2, 64)))
for function in (splitkv.decode, splitkv.attention, splitkv.append, splitkv.make_schedule):
    assert callable(function)
assert "triton" not in sys.modules, "loaded"
"""
    assert run(code).startswith("hopper_decode_split\ndecode_split\n")


# What is loaded when the launcher of a first call is bound, and what is not.
BIND = """
import json, sys, torch
from splitkv.core.device import Device
from splitkv.core.problem import describe_attention, describe_decode
from splitkv.kernels.host.stand_in import stand_in
from splitkv.core.options import defaults_of
from splitkv.runtime import dispatch
from splitkv import decode, attention
name, gpu = sys.argv[1], Device.named(sys.argv[2])
queries = 1 if name == "decode" else 512
q = stand_in((4, queries, 32, 128), torch.bfloat16, gpu)
k, v = (stand_in((4, 512, 8, 128), torch.bfloat16, gpu) for _ in "kv")
given = dispatch.apart(defaults_of(name))
for made_by in ("num_splits", "plan", "schedule"):
    given.pop(made_by, None)
if name == "decode":
    given["cache_seqlens"] = stand_in((4,), torch.int32, gpu)
described = describe_decode if name == "decode" else describe_attention
problem, operands = described(q, k, v, needs_grad=False, **given)
dispatch.bind(problem, operands, None)
print(json.dumps([x for x in sys.modules if x.startswith(("splitkv.", "triton."))]))
"""
KERNELS = {
    "decode": ("decode_split", "decode_persistent", "hopper.decode"),
    "attention": ("prefill", "hopper.prefill"),
    "other calls": ("append", "backward", "hopper.backward", "merge_states", "quantize", "widen"),
}


@pytest.mark.parametrize(
    ("name", "gpu", "entry"),
    [
        ("decode", "a100", "decode_split"),
        ("decode", "h200", "hopper.decode.kernel_all_warps"),
        ("attention", "a100", "prefill"),
        ("attention", "h200", "hopper.prefill.kernel"),
    ],
)
def test_a_first_call_loads_its_own_kernels(name: str, gpu: str, entry: str) -> None:
    """Device code is parsed where it is imported, so that each kernel takes milliseconds."""
    done = subprocess.run([sys.executable, "-c", BIND, name, gpu], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)
    loaded = {x.removeprefix("splitkv.kernels.") for x in modules if "splitkv.kernels." in x}
    assert entry in loaded
    others = [kernel for call, of in KERNELS.items() if call != name for kernel in of]
    small = {"backward", "backward.records"}  # what a forward keeps for its gradients
    found = {x for x in loaded - small for kernel in others if f"{x}.".startswith(f"{kernel}.")}
    assert found == set()
    if name == "decode":
        assert loaded.isdisjoint({"decode_persistent", "host.step", "combine_slots", "schedule"})
    if gpu == "a100":
        device_code = {x for x in loaded if x.startswith("hopper.") and "tma_limits" not in x}
        assert device_code <= {"hopper.primitives"}
        assert not any(x.startswith("triton.experimental.gluon") for x in modules)


def test_what_is_constant_in_a_graph_is_marked_as_torch_marks_it() -> None:
    import torch

    from splitkv.runtime import dispatch

    def probe() -> None: ...

    assert (
        vars(torch.compiler.assume_constant_result(probe)).items()
        <= vars(dispatch._handle_at).items()
    )
