"""The command line: `splitkv demo | explain | bench | sweep | tune | regret | reproduce |
evolve | distil | accuracy | report | trace | warmup | doctor`.

Exit status: 0 done; 1 the answer is no (no kernel can run it, a check of the demo failed); 2 the
question is malformed, said in one line.
"""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Group
from rich.panel import Panel
from rich.table import Column, Table

from splitkv import __version__
from splitkv.core.device import Device, cpu, current
from splitkv.core.errors import (
    expect,
    expect_at_least,
    expect_divides,
    expect_none_with,
    expect_one_of,
    expect_positive,
    expect_size,
)
from splitkv.core.kv import AS_IS, Codec, CodecName, Contiguous, Granularity, Paged, Products
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.scales import DEFAULT_PRODUCTS, DTYPE_BYTES
from splitkv.core.scores import Score
from splitkv.lab import commands
from splitkv.lab.bench import warm
from splitkv.lab.harness.terminal import Lengths, console, expect_here, one_line_errors

if TYPE_CHECKING:
    from splitkv.planner.explanation import Explanation

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(commands.app)
app.command()(warm.warmup)

TYPICAL = Problem("decode", 1, 32, 8, 128, 128, 1, 4096, mask=Mask(causal=True))


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"splitkv {__version__}")
        raise typer.Exit


VersionOption = typer.Option(
    "--version", help="Print the version.", is_eager=True, callback=print_version
)


@app.callback()
def splitkv(version: Annotated[bool, VersionOption] = False) -> None:
    """Attention that shows its decisions: which kernel, how many splits of the keys, and why."""


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="Training steps; else by time.")] = None,
    seconds: Annotated[float, typer.Option(help="Training time.")] = 60.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else what is here.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the data order.")] = 0,
    ranks: Annotated[int, typer.Option(help="Processes that share every sequence.")] = 1,
) -> None:
    """Train a small model, generate with it through splitkv, and print every decision.

    With several ranks: train it in one process and with every sequence spread over them, by each
    exchange, and compare the losses.
    """
    with one_line_errors():
        if steps is not None:
            expect_positive("steps", steps)
        expect_positive("seconds", seconds)
        expect_positive("ranks", ranks)
        if device is not None:
            expect_here(device)
        if ranks > 1:
            expect(seconds == 60.0, "seconds", "none with --ranks; pass --steps", seconds)
            from splitkv.demo.ranks import STEPS, run_ranks

            raise typer.Exit(run_ranks(ranks, steps or STEPS, device=device, seed=seed))
        from splitkv.demo import run

        raise typer.Exit(run(steps=steps, seconds=seconds, device=device, seed=seed))


@app.command()
def explain(
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head dimension of queries and keys.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Of values, if another.")] = None,
    seqlen_q: Annotated[int, typer.Option(help="Query tokens a sequence.")] = 1,
    seqlen_k: Annotated[int, typer.Option(help="Keys a sequence.")] = 4096,
    dtype: Annotated[str, typer.Option(help="Type of queries, keys and values.")] = "bfloat16",
    stored: Annotated[
        str, typer.Option(help="Keys and values: as_is, int8, fp8 or fp8_e5m2.")
    ] = "as_is",
    scales: Annotated[
        str | None, typer.Option(help="Of 8 bits: one a tensor, head (default) or token.")
    ] = None,
    products: Annotated[
        str | None,
        typer.Option(help="In 8 bits: none (widened), q . k (half), p . v too (full)."),
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Paged keys; else contiguous.")] = None,
    causal: Annotated[bool, typer.Option(help="No key after a query's own position.")] = True,
    window: Annotated[str, typer.Option(help="LEFT,RIGHT; -1 is unbounded.")] = "-1,-1",
    sink_tokens: Annotated[int, typer.Option(help="First keys that stay visible.")] = 0,
    attention_chunk: Annotated[int, typer.Option(help="Keys of a chunk; 0: no chunks.")] = 0,
    sink_logits: Annotated[bool, typer.Option(help="A learnable sink logit per head.")] = False,
    softcap: Annotated[bool, typer.Option(help="Scores capped by tanh.")] = False,
    alibi: Annotated[bool, typer.Option(help="ALiBi slopes.")] = False,
    lengths: Annotated[Lengths, typer.Option(help="Who knows the lengths.")] = Lengths.host,
    new_keys: Annotated[int, typer.Option(help="Keys a sequence that are appended first.")] = 0,
    rotary: Annotated[bool, typer.Option(help="They and the queries are rotated first.")] = False,
    num_splits: Annotated[int, typer.Option(help="Force it; 0 asks the policy.")] = 0,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU by name, or cpu; else the one here.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Repeat to compare.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show which kernel runs a decode call, how it is split, and why, for any known GPU."""
    with one_line_errors():
        expect_size("batch", batch)
        expect_size("heads", heads)
        expect_size("kv_heads", kv_heads)
        expect_divides("heads", heads, kv_heads=kv_heads)
        expect_size("head_dim", head_dim)
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        expect_size("head_dim_v", head_dim_v)
        expect_size("seqlen_q", seqlen_q)
        expect_size("seqlen_k", seqlen_k, empty=True)
        expect_one_of("dtype", dtype, DTYPE_BYTES)
        expect_at_least("sink_tokens", sink_tokens, 0)
        expect_at_least("attention_chunk", attention_chunk, 0)
        expect_size("new_keys", new_keys, empty=True)
        expect_at_least("num_splits", num_splits, 0)
        if page_size is not None:
            expect_size("page_size", page_size)
        codec = codec_of(stored, scales, products)
        left, right = parse_window(window)
        problem = Problem(
            kind="decode",
            batch=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            dtype=dtype,
            mask=Mask(causal, left, right, sink_tokens, attention_chunk).within_reach(),
            place=Contiguous() if page_size is None else Paged(page_size),
            codec=codec,
            products=products or DEFAULT_PRODUCTS.get(codec.name, "widened"),  # type: ignore[arg-type]
            score=Score(softcap, alibi),
            sink_logits=sink_logits,
            lengths=lengths.value,
            seqlen_new=new_keys,
            rotary=rotary,
        )
        device = find_device(gpu)
        from splitkv.planner.explanation import explain as explain_problem
        from splitkv.planner.registry import POLICIES

        names = policy or ["waves"]
        for name in names:
            expect_one_of("policy", name, POLICIES)
        explanation = explain_problem(problem, device, names, num_splits)
    if as_json:
        typer.echo(json.dumps(explanation.as_dict(), indent=2))
    else:
        show(explanation)
    raise typer.Exit(0 if explanation.plans else 1)


def codec_of(stored: Any, scales: Any, products: Any) -> Codec:
    """The codec that the options of `explain` name."""
    expect_one_of("stored", stored, get_args(CodecName))
    if stored == "as_is":
        expect_none_with("scales", scales, "keys stored as_is")
        expect_none_with("products", products, "keys stored as_is")
        return AS_IS
    scales, known = scales or "head", get_args(Granularity)
    expect_one_of("scales", scales, [name for name in known if name != AS_IS.granularity])
    if products is not None:
        expect_one_of("products", products, get_args(Products))
    return Codec(stored, scales)


@app.command()
def doctor(
    check: Annotated[bool, typer.Option(help="Answers and bandwidth, in 20 seconds.")] = True,
) -> None:
    """Say what is installed, which GPU is here, which kernels can run, and if they are right."""
    from splitkv.planner.explanation import explain as explain_problem
    from splitkv.planner.policies import DEFAULT

    for name, value in versions().items():
        typer.echo(f"{name:<8} {value}")
    explanation = explain_problem(TYPICAL, current(), policies=(DEFAULT,))
    typer.echo()
    show(explanation)
    failed = not explanation.plans
    if check:
        from splitkv.lab.bench.doctor import self_check

        typer.echo()
        for name, said in self_check(current()):
            typer.echo(f"{name:<28} {said}")
            failed |= said.startswith("FAIL")
    raise typer.Exit(1 if failed else 0)


def versions() -> dict[str, str]:
    """The versions that a measurement or a bug report names."""
    found = {"python": platform.python_version(), "splitkv": __version__}
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["driver"] = driver_version()
    found["device"] = str(current())
    return found


def driver_version() -> str:
    """The NVIDIA driver's version, or `none`."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else "none"


def find_device(gpu: str | None) -> Device:
    """The device named, or the one that torch sees here."""
    if gpu is None:
        return current()
    return cpu() if gpu.lower() == "cpu" else Device.named(gpu)


def parse_window(text: str) -> tuple[int, int]:
    """`LEFT,RIGHT` as two numbers of keys."""
    try:
        left, right = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"window: expected LEFT,RIGHT as integers, got {text!r}") from None
    expect_at_least("window left", left, -1)
    expect_at_least("window right", right, -1)
    return left, right


def show(explanation: Explanation) -> None:
    """Tables on a terminal, plain text anywhere else."""
    if console.is_terminal:
        console.print(render(explanation))
    else:
        typer.echo(str(explanation))


def folded(*header: str, **style: Any) -> Table:
    """A table whose cells are never cut short, as two policies might look alike then."""
    return Table(*(Column(name, overflow="fold") for name in header), **style)


def render(explanation: Explanation) -> Group:
    """The explanation as rich tables: the question, the kernels, the plans, the reasons."""
    kernels = folded("kernel", "", box=None, pad_edge=False)
    for name, reason in explanation.kernel_rows():
        kernels.add_row(f"[bold]{name}[/]", reason)
    question = Panel(f"{explanation.problem}\non {explanation.device}", title="problem")
    if not explanation.plans:
        return Group(question, kernels, "[red]no kernel can run this problem here[/]")
    header, *rows = explanation.plan_rows()
    plans = folded(*header)
    for row in rows:
        plans.add_row(*row)
    why = folded("policy", "why", box=None, pad_edge=False)
    for name, reason in explanation.why_rows():
        why.add_row(f"[bold]{name}[/]", reason)
    return Group(question, kernels, plans, why)
