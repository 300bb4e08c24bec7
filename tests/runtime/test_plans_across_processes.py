"""A plan made, pickled or compiled in one process does the same in another, which made others."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.core.plan import Plan

COMMON = """
import pickle, sys
from dataclasses import replace
import torch, splitkv
torch.manual_seed(0)
q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 2, 16)
folder = sys.argv[1]
"""
# torch_math where the policy would take torch_sdpa, so that a plan left out shows
SAVE = """
class Model(torch.nn.Module):
    def forward(self, q, k):
        return splitkv.decode(q, k, k, plan=plan), splitkv.attention(q, k, k, plan=dense)

plan = replace(splitkv.plan(q, k, k), kernel="torch_math", why="by hand")
dense = replace(splitkv.plan(q, k, k, dense=True), kernel="torch_math", why="by hand")
for strict in (False, True):
    exported = torch.export.export(Model(), (q, k), strict=strict)
    torch.export.save(exported, f"{folder}/model_{strict}.pt2")
with open(f"{folder}/plans.pkl", "wb") as file:
    pickle.dump((plan, dense), file)
torch.save((Model()(q, k), splitkv.decode(q, k, k)), f"{folder}/results.pt")
"""
LOAD = """
others = [splitkv.plan(torch.randn(b, 2, 8, 32), *2 * [torch.randn(b, 5, 8, 32)]) for b in (3, 4)]
wanted, default = torch.load(f"{folder}/results.pt")
assert not torch.equal(wanted[0], default)
for strict in (False, True):
    model = torch.export.load(f"{folder}/model_{strict}.pt2").module()
    for a, b in zip(model(q, k), wanted):
        assert torch.equal(a, b)
with open(f"{folder}/plans.pkl", "rb") as file:
    plan, dense = pickle.load(file)
assert plan.why == "by hand" and plan.kernel == "torch_math"
def function(q):
    return splitkv.decode(q, k, k, plan=plan), splitkv.attention(q, k, k, plan=dense)
for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
    for a, b in zip(run(q), wanted):
        assert torch.equal(a, b)
print("the same")
"""


def test_saved_in_one_process_and_loaded_in_another(tmp_path: Path) -> None:
    for script in (SAVE, LOAD):
        done = subprocess.run(
            [sys.executable, "-c", COMMON + script, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "the same\n"


Q, K = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 2, 16)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_plan_is_compiled(duplicate: Callable[[Plan], Plan]) -> None:
    """After the plan is gone, while there are plans of other problems."""
    made = replace(splitkv.plan(Q, K, K), kernel="torch_math")
    wanted = splitkv.decode(Q, K, K, plan=made)
    assert not torch.equal(wanted, splitkv.decode(Q, K, K))
    copied = duplicate(made)
    del made
    others = [splitkv.plan(Q[:1], K[:1], K[:1]), splitkv.plan(Q, K, K)]
    compiled = torch.compile(
        lambda q: splitkv.decode(q, K, K, plan=copied), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(Q), wanted)
    assert len(others) == 2


def test_a_graph_is_of_one_plan() -> None:
    """Another plan at the same place is another graph."""
    made = splitkv.plan(Q, K, K)
    plans = [made, replace(made, kernel="torch_math"), made, None]

    def function(q: Tensor, plan: Any) -> Any:
        return splitkv.decode(q, K, K, plan=plan)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for plan in plans:
        assert torch.equal(compiled(Q, plan), function(Q, plan))
