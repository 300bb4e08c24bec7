"""One case: drawn, called twice, judged."""

from __future__ import annotations

import os
import traceback
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuzz.catalogue import drawn_by
from fuzz.draw import Draw, Drawn, same_bits
from fuzz.malformed import Accepted, Rejected
from fuzz.oracle import Wrong
from splitkv.core.errors import UnsupportedProblem

GOOD = ("equal", "refused", "rejected", "accepted")
BAD = ("wrong", "raw error", "no question")


class Outcome(NamedTuple):
    """equal: right; refused: UnsupportedProblem; rejected: a malformed call, as it should be;
    accepted: one that may be meant. wrong; raw error: an exception of another kind, or one that is
    not in the package's words; no question: the case itself is at fault."""

    name: str
    outcome: str
    text: str


def outcome_of(seed: int, index: int, where: str, group: int, only: str = "") -> Outcome:
    d = Draw(seed, index, where, group)
    torch.manual_seed(index)
    try:
        drawn = drawn_by(d, only)
    except Exception:
        return Outcome("drawing", "no question", traceback.format_exc())
    outcome, text = judged(drawn)
    return Outcome(drawn.name, outcome, text)


def judged(drawn: Drawn) -> tuple[str, str]:
    try:
        attempt(drawn)
    except UnsupportedProblem as error:
        return "refused", reasons(error)
    except Rejected as error:
        return "rejected", str(error)
    except Accepted as error:
        return "accepted", str(error)
    except Wrong as error:
        return "wrong", f"{error}\n{described(drawn)}"
    except Exception as error:
        kind = "no question" if "not a question" in str(error) else "raw error"
        lines = "".join(traceback.format_exception(error)[-7:])
        return kind, f"{lines}{described(drawn)}"
    return "equal", ""


def attempt(drawn: Drawn) -> None:
    """Twice: the first call goes the long way, the second is known."""
    kept = {n: x.detach().clone() for n, x in tensors_of(drawn).items() if n not in drawn.writes}
    strides = {n: x.stride() for n, x in tensors_of(drawn).items()}
    result = drawn.function(**drawn.kwargs)
    if drawn.again:
        first = [x.detach().clone() for x in parts_of(result)]
        again = drawn.function(**drawn.kwargs)
        for x, y in zip(first, parts_of(again), strict=True):
            if not same_bits(x, y.detach()):
                raise Wrong("the second call gave other bits than the first")
    drawn.judge(result)
    for name, x in kept.items():
        now = drawn.kwargs[name]
        if not same_bits(x, now.detach()) or strides[name] != now.stride():
            raise Wrong(f"{name}: expected an argument that stays as it is")


def tensors_of(drawn: Drawn) -> dict[str, Tensor]:
    return {name: x for name, x in drawn.kwargs.items() if isinstance(x, Tensor)}


def parts_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [x for x in result if isinstance(x, Tensor)]
    return []


def described(drawn: Drawn) -> str:
    """The call, tensors by their shapes."""

    def shown(x: Any) -> str:
        if isinstance(x, Tensor) and (x.is_sparse or x.is_meta):
            return f"{x.layout} {x.dtype} {list(x.shape)} on {x.device}"
        if isinstance(x, Tensor):
            grad = " grad" if x.requires_grad else ""
            small = f" {x.tolist()}" if x.dim() == 1 and x.numel() < 12 else ""
            kind = str(x.dtype).removeprefix("torch.")
            strides = "" if x.is_contiguous() else f" strides {list(x.stride())}"
            return f"{kind}{list(x.shape)}{strides}{grad}{small}"
        return repr(x)[:300]

    arguments = ", ".join(f"{name}={shown(x)}" for name, x in drawn.kwargs.items())
    return f"  {drawn.name}({arguments})"


def reasons(error: UnsupportedProblem) -> str:
    """Without what is of one problem alone."""
    last = [f"{kernel}: {'; '.join(against)}" for kernel, against in error.reasons]
    return last[-1] if last else str(error)


def is_lost() -> bool:
    """Whether the GPU answers no longer, after which every case of this process fails."""
    if os.environ.get("FUZZ_NO_CUDA") or not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False
