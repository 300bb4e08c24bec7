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


def test_what_is_constant_in_a_graph_is_marked_as_torch_marks_it() -> None:
    import torch

    from splitkv.runtime import dispatch

    def probe() -> None: ...

    assert (
        vars(torch.compiler.assume_constant_result(probe)).items()
        <= vars(dispatch._handle_at).items()
    )
