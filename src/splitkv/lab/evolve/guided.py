"""Candidates proposed by a language model, through OpenEvolve (extra `splitkv[evolve]`).

Any endpoint that speaks OpenAI's protocol will do. OpenEvolve asks it for changes to a policy and
keeps its own islands and archive; every candidate is evaluated, rejected and written down as those
of the offline search are, in the same files. The key is read from `OPENAI_API_KEY`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from splitkv.lab.evolve.evaluate import Evaluator
from splitkv.lab.evolve.grammar import Slots
from splitkv.lab.evolve.search import Found, Search, Settings
from splitkv.lab.evolve.setup import made_again
from splitkv.lab.harness.lines import Lines

SYSTEM = """You improve a Python function that decides how a GPU computes attention for one token.
It returns (num_splits, pack_gqa, sm_margin, tile), or None to leave a problem to a good default.
num_splits: into how many parts the keys of a sequence are cut; more parts use more of the GPU and
cost a merge. tile: (tile_n, num_warps, num_stages), one of {tiles}, or None.
{fixed}
The score is the default's time over the policy's on {counted}. A policy that is more than 1 %
slower than the default on any held-out problem scores 0: return None where you know no better.
Keep the signature; only `math` may be imported; no while, try, class or f-string."""
START = """# EVOLVE-BLOCK-START
def policy(batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim, page_size, num_sms):
    if batch > 1 or seqlen_k > 512:
        return None
    num_splits = 16 if seqlen_k < 256 else 12
    return num_splits, True, 0, None
# EVOLVE-BLOCK-END
"""
EVALUATOR = '''"""What OpenEvolve calls for every candidate of this folder."""
from splitkv.lab.evolve.guided import judge


def evaluate(path):
    return judge({folder!r}, path)
'''
_searches: dict[str, Search] = {}


def run(
    folder: Path,
    evaluator: Evaluator,
    slots: Slots,
    iterations: int,
    *,
    model: str,
    api_base: str,
    about: dict[str, Any],
) -> Found:
    """So many proposals. `about`: what `again` needs to make the evaluator in another process."""
    from openevolve import run_evolution
    from openevolve.config import Config, LLMModelConfig

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guided.json").write_text(json.dumps(about))
    program, evaluation = folder / "start.py", folder / "evaluator.py"
    program.write_text(START)
    evaluation.write_text(EVALUATOR.format(folder=str(folder)))
    config = Config()
    key = os.environ.get("OPENAI_API_KEY", "none")
    config.llm.models = [LLMModelConfig(name=model, api_base=api_base, api_key=key, weight=1.0)]
    config.llm.evaluator_models = config.llm.models
    config.evaluator.parallel_evaluations = 1  # one GPU
    config.evaluator.cascade_evaluation = False
    # One worker for all, which with a limit is spawned: a forked one would inherit the CUDA context
    # of this process and a sandbox whose reader is a thread that does not live there.
    config.max_tasks_per_child = iterations + 1
    config.prompt.system_message = instructions(evaluator, slots)
    run_evolution(
        str(program),
        str(evaluation),
        config=config,
        iterations=iterations,
        output_dir=str(folder / "openevolve"),
        cleanup=False,
    )
    search = Search(folder, evaluator, slots, Settings())
    search.take_up()
    return search.found


def instructions(evaluator: Evaluator, slots: Slots) -> str:
    """The instructions to the language model."""
    ours = "pack_gqa has to be True and sm_margin 0."
    if slots.apart:
        apart = ", ".join(map(str, slots.apart))
        ours = "pack_gqa: query heads share a tile, or not, which only the tiles "
        ours += f"{apart} allow; sm_margin has to be 0."
    theirs = "pack_gqa: query heads share a tile; sm_margin: SMs left free. tile has to be None."
    return SYSTEM.format(
        tiles=", ".join(map(str, slots.tiles)) or "None",
        fixed=ours if slots.tiles else theirs,
        counted=", ".join(case.name for case in evaluator.workload.counted),
    )


def judge(folder: str, path: str) -> dict[str, Any]:
    """Metrics of a candidate: `combined_score`, 0 where it is rejected, and why."""
    if folder not in _searches:
        evaluator, slots = made_again(json.loads((Path(folder) / "guided.json").read_text()))
        _searches[folder] = Search(Path(folder), evaluator, slots, Settings())
    search = _searches[folder]
    search.lines = Lines(search.lines.path)  # another process may have added to it
    search.take_up()
    with search.lines:
        found = search.add(Path(path).read_text(), "proposed by a model", (), 0)[1]
    score = 0.0 if found.reason or not found.ratio else 1 / found.ratio
    metrics: dict[str, Any] = {"combined_score": score}
    if found.reason:
        metrics["error"] = found.reason
    return metrics
