"""`splitkv demo`: train a small model with splitkv, generate with it, and show every decision.

1. train        splitkv.attention forwards and backwards, the loss as it falls
2. generate     prefill through splitkv.attention, then cached decode through splitkv.decode
3. check        the same tokens from plain PyTorch, without a cache
4. plan         what was decided at each phase, for this machine and for an H200
5. time         on a GPU machine: splitkv.decode against torch SDPA
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

import splitkv
from splitkv.core.device import GPUS, Device, cpu, current
from splitkv.core.masks import Mask
from splitkv.demo import text
from splitkv.demo.model import Model, Shape, generate, generate_eager, splitkv_attend
from splitkv.testing import captured

if TYPE_CHECKING:
    from rich.console import Console

BATCH, LEARNING_RATE = 8, 4e-3
PROMPT_LENGTHS, NUM_TOKENS = (17, 30, 45, 64), 64
HELD_OUT = 0.05  # of the text, its end


def run(
    steps: int | None = None,
    seconds: float = 60.0,
    device: str | None = None,
    seed: int = 0,
    shape: Shape | None = None,
) -> int:
    """Run the demo; 0: the loss fell and splitkv's tokens are those of plain PyTorch, else 1.

    steps     train this many steps; None: for `seconds`
    device    cpu or cuda; None: what is here
    """
    try:
        from rich.console import Console
    except ImportError:
        print("splitkv demo needs rich: pip install 'splitkv[lab]'")
        return 1
    threads = torch.get_num_threads()
    # The tensors are small: on a busy machine, threads cost more in waiting than they bring.
    torch.set_num_threads(1)
    try:
        return _run(Console(), shape or Shape(), steps, seconds, device, seed)
    finally:
        torch.set_num_threads(threads)


def _run(
    console: Console,
    shape: Shape,
    steps: int | None,
    seconds: float,
    device: str | None,
    seed: int,
) -> int:
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    machine = current() if on.type == "cuda" else cpu()
    torch.manual_seed(seed)
    model = Model(shape).to(on)

    console.rule("[bold]1. train")
    tokens = text.encode(text.corpus())
    cut = int(len(tokens) * (1 - HELD_OUT))
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"{count / 1e6:.2f} M parameters, {shape.num_layers} layers, heads {shape.num_heads}/"
        f"{shape.num_kv_heads}, head_dim {shape.head_dim}, a sink logit a head, every other layer "
        f"sees {shape.window} tokens\n{cut / 1e6:.2f} M characters of this Python's standard "
        f"library, on {machine}"
    )
    before = held_out_loss(model, tokens[cut:])
    done, took = train(console, model, tokens[:cut], steps, seconds, seed)
    after = held_out_loss(model, tokens[cut:])
    fell = after < before
    console.print(
        f"{done} steps in {took:.0f} s; loss on text it has not seen: {before:.3f} -> {after:.3f} "
        f"nats a character ({_verdict(fell, 'it fell', 'it did not fall')})"
    )

    console.rule("[bold]2. generate")
    prompts, lengths = make_prompts(tokens[cut:], on)
    generate(model, prompts, lengths, 2)  # a kernel is compiled when it is first used
    begin = time.perf_counter()
    ours = generate(model, prompts, lengths, NUM_TOKENS).cpu()
    ours_took = time.perf_counter() - begin
    for prompt, length, continuation in zip(prompts.cpu(), lengths.tolist(), ours, strict=True):
        plain: dict[str, Any] = {"markup": False, "highlight": False}
        console.print(text.decode(prompt[:length]), style="dim", end="", **plain)
        console.print(text.decode(continuation), style="bold", **plain)
        console.print()

    console.rule("[bold]3. check")
    begin = time.perf_counter()
    eager = generate_eager(model, prompts, lengths, NUM_TOKENS).cpu()
    eager_took = time.perf_counter() - begin
    same = bool((ours == eager).all())
    console.print(
        f"{len(lengths)} prompts of {', '.join(map(str, PROMPT_LENGTHS))} characters, "
        f"{NUM_TOKENS} tokens each: prefill and cached decode {ours_took:.1f} s, plain PyTorch "
        f"without a cache {eager_took:.1f} s\n"
        + _verdict(same, "all tokens are equal", f"{int((ours != eager).sum())} tokens differ")
    )

    console.rule("[bold]4. plan")
    show_plans(console, shape, list(dict.fromkeys([machine, GPUS["h200"]])))
    timed = True
    if on.type == "cuda":
        console.rule("[bold]5. time")
        timed = show_times(console)
    return 0 if fell and same and timed else 1


def _verdict(ok: bool, yes: str, no: str) -> str:
    return f"[bold green]{yes}[/]" if ok else f"[bold red]{no}[/]"


def train(
    console: Console, model: Model, tokens: Tensor, steps: int | None, seconds: float, seed: int
) -> tuple[int, float]:
    """Trains with a progress bar; returns the steps done and the seconds taken."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("step {task.fields[step]}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    begin, step, loss, progress = time.perf_counter(), 0, math.nan, 0.0
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=1.0, step=0, loss=math.nan, rate=0.0)
        while progress < 1.0:
            warm_up, decay = min(1.0, (step + 1) / 20), 0.55 + 0.45 * math.cos(math.pi * progress)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * warm_up * decay
            value = loss_of(model, batch_of(tokens, model.shape.context, g))
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            elapsed = time.perf_counter() - begin
            progress = elapsed / seconds if steps is None else step / steps
            loss = value.item() if step == 1 else 0.95 * loss + 0.05 * value.item()
            rate = step * BATCH * model.shape.context / elapsed
            bar.update(task, completed=min(1.0, progress), step=step, loss=loss, rate=rate)
            if step == 1 or step % 50 == 0:
                bar.console.print(f"step {step:>5}  loss {loss:.3f}")
    return step, time.perf_counter() - begin


def batch_of(tokens: Tensor, context: int, g: torch.Generator) -> Tensor:
    """`[BATCH, context + 1]` pieces of the text, from anywhere."""
    start = torch.randint(len(tokens) - context, (BATCH, 1), generator=g)
    return tokens[start + torch.arange(context + 1)]


def loss_of(model: Model, batch: Tensor) -> Tensor:
    """Mean nats a character, each predicted from those before it."""
    batch = batch.to(model.head.weight.device)
    positions = torch.arange(batch.shape[1] - 1, device=batch.device)
    logits = model(batch[:, :-1], positions, splitkv_attend)
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Model, tokens: Tensor) -> float:
    g = torch.Generator().manual_seed(0)
    batches = [batch_of(tokens, model.shape.context, g) for _ in range(4)]
    return sum(loss_of(model, b).item() for b in batches) / len(batches)


def make_prompts(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Held-out pieces of different lengths, padded on the right, and their lengths."""
    longest = max(PROMPT_LENGTHS)
    lengths = torch.tensor(PROMPT_LENGTHS, dtype=torch.int32)
    first = torch.arange(len(PROMPT_LENGTHS)) * (len(tokens) // len(PROMPT_LENGTHS))
    prompts = tokens[first[:, None] + torch.arange(longest)]
    prompts[torch.arange(longest) >= lengths[:, None]] = 0
    return prompts.to(device), lengths.to(device)


def problems(shape: Shape) -> Iterator[tuple[str, splitkv.Problem]]:
    """(phase and layer, problem) for all that the demo asks of splitkv."""
    prompts, longest = len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)
    capacity = longest + NUM_TOKENS
    # kind, batch, seqlen_q, seqlen_k, lengths, needs_grad
    phases: dict[str, tuple[Any, ...]] = {
        "train": ("dense", BATCH, shape.context, shape.context, "host", True),
        "prefill": ("dense", prompts, longest, longest, "host", False),
        "decode": ("decode", prompts, 1, capacity, "device", False),
    }
    for phase, (kind, batch, seqlen_q, seqlen_k, lengths, needs_grad) in phases.items():
        for layer, (left, right) in (("window", (shape.window - 1, 0)), ("full", (-1, -1))):
            problem = splitkv.Problem(
                kind=kind,
                batch=batch,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                head_dim_v=shape.head_dim,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                dtype="float32",
                mask=Mask(causal=True, window_left=left, window_right=right),
                sink_logits=True,
                lengths=lengths,
                needs_grad=needs_grad,
            )
            yield f"{phase}, {layer}", problem


def show_plans(console: Console, shape: Shape, machines: list[Device]) -> None:
    """Each phase's kernel on each machine, then the decision of the last one in full."""
    from rich.table import Table

    table = Table("phase, layer", *(machine.name for machine in machines))
    for name, problem in problems(shape):
        table.add_row(name, *(_decision(problem, machine) for machine in machines))
    console.print(table)
    server = replace(
        problem,
        batch=1,
        num_heads=TIMED_HEADS,
        num_kv_heads=TIMED_KV_HEADS,
        head_dim=TIMED_HEAD_DIM,
        head_dim_v=TIMED_HEAD_DIM,
        seqlen_k=8192,
        dtype="bfloat16",
    )
    shown = [(name, problem, machine) for machine in machines]
    shown.append(("decode as gpt-oss-120b does it", server, machines[-1]))
    for title, question, machine in shown:
        console.print(f"\n[bold]{title}, on {machine.name}")
        explanation = splitkv.explain(question, device=machine)
        console.print(str(explanation), markup=False, highlight=False)


def _decision(problem: splitkv.Problem, device: Device) -> str:
    try:
        plan = splitkv.plan(problem, device=device)
    except splitkv.UnsupportedProblem as error:
        return "none: " + "; ".join(f"{kernel}: {why[0]}" for kernel, why in error.reasons)
    splits = plan.config.num_splits
    return plan.kernel if splits == 1 else f"{plan.kernel}, {splits} splits"


# (batch, keys): gpt-oss heads, from one chat to a busy server
TIMED = ((1, 8192), (1, 65536), (8, 8192), (32, 8192))
TIMED_HEADS, TIMED_KV_HEADS, TIMED_HEAD_DIM = 64, 8, 64


def show_times(console: Console) -> bool:
    """Times bf16 decode against torch SDPA, each in a CUDA graph over caches larger than the L2.

    Returns False, and shows no time, where the results differ by more than the tolerance rule.
    """
    from rich.table import Table

    from splitkv.testing import assert_close

    heads = f"heads {TIMED_HEADS}/{TIMED_KV_HEADS}, head_dim {TIMED_HEAD_DIM}, bf16"
    table = Table("batch", "keys", "splitkv.decode", "torch SDPA", "ratio", title=heads)
    for batch, seqlen in TIMED:
        size = (batch, seqlen, TIMED_KV_HEADS, TIMED_HEAD_DIM)
        copies = 1 + 2 * current().l2_bytes // (4 * math.prod(size))
        kw: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        q = torch.randn(batch, 1, TIMED_HEADS, TIMED_HEAD_DIM, **kw)
        caches = [(torch.randn(size, **kw), torch.randn(size, **kw)) for _ in range(copies)]
        ours = [partial(splitkv.decode, q, k, v) for k, v in caches]
        theirs = [partial(_sdpa, q, k, v) for k, v in caches]
        exact = _sdpa(*(x.double() for x in (q, *caches[0])))
        try:
            assert_close(ours[0](), exact, theirs[0]())
        except AssertionError as error:
            console.print(f"[bold red]batch {batch}, {seqlen} keys: {error}", markup=True)
            return False
        a, b = seconds_a_call(ours), seconds_a_call(theirs)
        cells = (f"{batch}", f"{seqlen}", f"{a * 1e6:.1f} us", f"{b * 1e6:.1f} us", f"{b / a:.2f}x")
        table.add_row(*cells)
    console.print(table)
    return True


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def seconds_a_call(calls: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """Median time of one of `calls`, captured together in a CUDA graph."""
    replay = captured(lambda: [call() for call in calls])[0]
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[repeats // 2]
