"""The commands of the lab: `splitkv bench | sweep | tune | regret | reproduce | evolve | distil |
accuracy | report | trace`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from splitkv.core.errors import (
    expect,
    expect_at_least,
    expect_none_with,
    expect_one_of,
    expect_positive,
)
from splitkv.lab.harness.terminal import Lengths, console, expect_here, one_line_errors, say

if TYPE_CHECKING:
    from splitkv.lab.tune.studies import Effort
    from splitkv.planner.policies import Policy

JOBS = max(1, (os.cpu_count() or 2) - 1)

# Options that several commands have.
AppendJson = Annotated[Path | None, typer.Option("--json", help="Append JSON lines.")]
BackendName = Annotated[str, typer.Option(help="splitkv or fa3.")]
Candidates = Annotated[int, typer.Option(help="Plans of a problem at first.")]
CaseGlobs = Annotated[list[str] | None, typer.Option(help="Names, as globs; else all.")]
Jobs = Annotated[int, typer.Option(help="Processes that compile ahead.")]
MostBytes = Annotated[float, typer.Option(help="Of keys and values of a problem.")]
Peers = Annotated[str, typer.Option(help="all, none, or names with commas.")]
PlotFolder = Annotated[Path | None, typer.Option(help="A folder for pictures.")]
ResumedJson = Annotated[Path | None, typer.Option("--json", help="JSON lines to go on in.")]
Rounds = Annotated[int, typer.Option(help="Replays of a timing.")]
SimulatedGpu = Annotated[str | None, typer.Option(help="A GPU, for the cost model.")]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds past which nothing is begun.")]

app = typer.Typer()
bench = typer.Typer(no_args_is_help=True, help="Measure on the GPU that is here.")
app.add_typer(bench, name="bench")


SUITE_OF = {"decode": "records", "paged": "pages", "quant": "quant"}


@bench.command("decode", help="Time decode beside the read floor and other libraries.")
@bench.command("paged", help="Time decode on pages of every size beside a contiguous cache.")
@bench.command("quant", help="Time decode on int8 and e4m3 keys and values.")
def bench_decode(
    context: typer.Context,
    case: CaseGlobs = None,
    place: Annotated[str, typer.Option(help="contiguous, page16, ... or all.")] = "all",
    suite: Annotated[str | None, typer.Option(help="Named cases; else the command's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of what the suite mixes draws; else 0.")] = None,
    peers: Peers = "all",
    mode: Annotated[str, typer.Option(help="isolated or back-to-back.")] = "isolated",
    warm: Annotated[bool, typer.Option(help="One buffer, which stays in the L2.")] = False,
    policy: Annotated[list[str] | None, typer.Option(help="Repeat to compare.")] = None,
    num_splits: Annotated[int, typer.Option(help="Force it; 0 asks the policy.")] = 0,
    json_path: AppendJson = None,
    plot: PlotFolder = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = JOBS,
) -> None:
    with one_line_errors():
        from splitkv.lab.bench import decode as lab
        from splitkv.lab.harness.peers import parse
        from splitkv.lab.harness.suites import select
        from splitkv.lab.harness.timing import Protocol
        from splitkv.lab.harness.variants import columns, our_variants

        expect_at_least("num_splits", num_splits, 0)
        if seed is not None:
            expect_at_least("seed", seed, 0)
        expect_run(time_limit, jobs)
        suite = suite or SUITE_OF[str(context.info_name)]
        draw = find_plots().draw_all if plot else None
        ours = our_variants(policy or [], num_splits)
        if suite.startswith("seed004") and not (policy or num_splits):
            ours = columns()
        records, status = lab.bench_decode(
            select(case or [], place, suite, seed),
            ours=ours,
            peers=parse(peers),
            protocol=Protocol(mode, warm),
            json_path=json_path,
            time_limit=time_limit,
            jobs=jobs,
            console=console,
        )
        if draw and plot:
            show_drawn(draw(records, plot))
    raise typer.Exit(status)


@bench.command("prefill", help="Time the forward of whole sequences beside other libraries.")
@bench.command("backward", help="Time their gradients beside other libraries.")
@bench.command("varlen", help="Time packed sequences of different lengths beside equal ones.")
def bench_sequences(
    context: typer.Context,
    case: CaseGlobs = None,
    suite: Annotated[str | None, typer.Option(help="Which named cases; else the first.")] = None,
    peers: Peers = "all",
    kernel: Annotated[list[str] | None, typer.Option(help="Force it; repeat to compare.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds of short bursts.")] = False,
    json_path: AppendJson = None,
    plot: PlotFolder = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = JOBS,
) -> None:
    with one_line_errors():
        from splitkv.lab.bench.sequences import run as lab
        from splitkv.lab.bench.sequences.peers import PEERS
        from splitkv.lab.bench.sequences.suites import select
        from splitkv.lab.bench.sequences.timing import QUICK, Pace
        from splitkv.lab.harness.peers import parse

        expect_run(time_limit, jobs)
        command = str(context.info_name)
        draw = find_plots().draw_all if plot else None
        records, status = lab.bench_sequences(
            command,
            select(command, suite, case or []),
            ours=lab.our_variants(kernel or []),
            peers=parse(peers, PEERS),
            pace=QUICK if quick else Pace(),
            json_path=json_path,
            time_limit=time_limit,
            jobs=jobs,
            console=console,
        )
        if draw and plot:
            show_drawn(draw(records, plot))
    raise typer.Exit(status)


@bench.command("ranks", help="Time attention over ranks beside one rank's; under torchrun.")
def bench_ranks(
    case: CaseGlobs = None,
    way: Annotated[list[str] | None, typer.Option(help="Repeat to compare; else all.")] = None,
    rounds: Annotated[int, typer.Option(help="Of each timing.")] = 9,
    shrink: Annotated[int, typer.Option(help="Divide tokens, keys and windows by it.")] = 1,
    json_path: AppendJson = None,
) -> None:
    with one_line_errors():
        import torch.distributed as dist

        from splitkv.lab.bench import ranks as lab

        cases = lab.select(case or [], way or [], shrink)
        device = lab.join()
        status = lab.bench_ranks(
            cases,
            way or [],
            group=dist.group.WORLD,
            device=device,
            rounds=rounds,
            json_path=json_path,
            console=console,
        )[1]
        dist.destroy_process_group()
    raise typer.Exit(status)


@bench.command("host", help="Time what calls take the host, beside other libraries.")
def bench_host(
    case: CaseGlobs = None,
    peers: Peers = "all",
    rounds: Annotated[int, typer.Option(help="Of all libraries, in turns.")] = 5,
    batches: Annotated[int, typer.Option(help="Of calls in a row, a round.")] = 20,
    json_path: AppendJson = None,
) -> None:
    with one_line_errors():
        from splitkv.core.device import current
        from splitkv.lab.bench import host as lab
        from splitkv.lab.harness.peers import parse

        expect_positive("rounds", rounds)
        expect_positive("batches", batches)
        cases, others, here = lab.select(case or []), parse(peers, lab.PEERS), current()
        # elsewhere a call returns when all of it is computed, which is no time of the host
        expect(here.kind == "cuda", "device", "a CUDA GPU", here.name)
        status = lab.bench_host(
            cases,
            others,
            rounds=rounds,
            batches=batches,
            json_path=json_path,
            console=console,
        )[1]
    raise typer.Exit(status)


@app.command()
def sweep(
    case: Annotated[str | None, typer.Option(help="A named case; else the shape below.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences (1).")] = None,
    seqlen_k: Annotated[int | None, typer.Option(help="Keys a sequence (512).")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads (8).")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads (1).")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dimension (128).")] = None,
    page_size: Annotated[int | None, typer.Option(help="Paged keys; else contiguous.")] = None,
    seqlen_q: Annotated[int | None, typer.Option(help="Query tokens a sequence (1).")] = None,
    num_splits: Annotated[int | None, typer.Option(help="The most (64); 0: a tile each.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Repeat; else all that split.")] = None,
    all_tiles: Annotated[bool, typer.Option("--all-tiles", help="Every tile shape.")] = False,
    seqlens: Annotated[str | None, typer.Option(help="Vary the keys: FIRST:LAST:STEP.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Repeat; else all.")] = None,
    backend: BackendName = "splitkv",
    plot: Annotated[Path | None, typer.Option(help="A picture, .png or .svg.")] = None,
    json_path: ResumedJson = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = JOBS,
) -> None:
    """Time a shape under every number of splits, or over many numbers of keys."""
    with one_line_errors():
        from splitkv.lab.tune import sweep as lab
        from splitkv.lab.tune.fa3 import library
        from splitkv.lab.tune.studies import OURS

        expect_run(time_limit, jobs)
        expect_one_of("backend", backend, ("splitkv", "fa3"))
        if backend == "fa3":
            expect_none_with("kernel", kernel or None, "the backend fa3")
            expect_none_with("all_tiles", all_tiles or None, "the backend fa3")
        dims = {
            **{"batch": batch, "num_heads": heads, "num_kv_heads": kv_heads},
            **{"head_dim": head_dim, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k},
            "page_size": page_size,
        }
        options: dict[str, Any] = {
            **{"policies": policies_named(policy), "jobs": jobs, "json_path": json_path},
            **{"time_limit": time_limit, "console": console},
        }
        draw = find_plots().draw if plot else None
        swept = lab.case_to_sweep(case, **dims)
        if seqlens is not None:
            expect_none_with("num_splits", num_splits, "seqlens")
            expect_none_with("kernel", kernel or None, "seqlens")
            expect_none_with("all_tiles", all_tiles or None, "seqlens")
            keys = lab.parse_seqlens(seqlens)
        elif num_splits is not None:
            expect_at_least("num_splits", num_splits, 0)
        with nullcontext(OURS) if backend == "splitkv" else library() as whose:
            if seqlens is None:
                records, lost = lab.sweep(
                    swept,
                    num_splits=64 if num_splits is None else num_splits,
                    kernels=kernel or [],
                    all_tiles=all_tiles,
                    library=whose,
                    **options,
                )
            else:
                records, lost = lab.boundary(swept, keys, library=whose, **options)
        if draw and plot and records:
            draw(records, plot)
    raise typer.Exit(1 if lost else 0)


@app.command()
def tune(
    problems: Annotated[int, typer.Option(help="To draw and measure.")] = 320,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    max_bytes: MostBytes = 1.1e9,
    mixes: Annotated[int, typer.Option(help="To draw besides, in lengths that differ.")] = 0,
    known: Annotated[bool, typer.Option(help="Those of the benchmarks too.")] = True,
    share: Annotated[str, typer.Option(help="k/n: every n-th problem from the k-th.")] = "1/1",
    candidates: Candidates = 16,
    rounds: Annotated[int, typer.Option(help="Replays of the fastest plans.")] = 9,
    table: Annotated[Path | None, typer.Option(help="To write; else the user's.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="To go on in; else beside the table.")
    ] = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = JOBS,
    like: Annotated[
        Path | None, typer.Option(help="Problems and plans of this table, of a GPU much like it.")
    ] = None,
) -> None:
    """Measure problems on this GPU and write the table of the policy `tuned`."""
    with one_line_errors():
        from splitkv.lab.tune import table as lab
        from splitkv.lab.tune.problems import Draw, share_of
        from splitkv.planner.policies import tuned_tables

        status = lab.tune(
            Draw(problems, seed, max_bytes, share_of(share), mixes),
            with_known=known,
            effort=effort(candidates, rounds, time_limit, jobs),
            table_path=table,
            command=f"splitkv tune --problems {problems} --seed {seed} --max-bytes {max_bytes:g} "
            f"--candidates {candidates} --rounds {rounds} --share {share}"
            + f" --mixes {mixes}" * (mixes > 0)
            + ("" if like is None else f" --like {like.name}")
            + ("" if known else " --no-known"),
            jobs=jobs,
            json_path=json_path,
            time_limit=time_limit,
            console=console,
            like=None if like is None else tuned_tables.load(like),
        )
    raise typer.Exit(status)


@app.command()
def regret(
    matrix: Annotated[bool, typer.Option(help="The paper's 160 configurations.")] = True,
    random: Annotated[int, typer.Option(help="Problems drawn beside them.")] = 150,
    mixes: Annotated[int, typer.Option(help="And others whose lengths differ.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the draw; tune's is 0.")] = 1,
    max_bytes: MostBytes = 1.1e9,
    lengths: Annotated[Lengths, typer.Option(help="Who knows the lengths.")] = Lengths.device,
    codec: Annotated[str, typer.Option(help="as_is, int8, fp8 or fp8_e5m2.")] = "as_is",
    share: Annotated[str, typer.Option(help="k/n: every n-th problem from the k-th.")] = "1/1",
    policy: Annotated[list[str] | None, typer.Option(help="Repeat; else waves and tuned.")] = None,
    table: Annotated[Path | None, typer.Option(help="Of tuned; else as it is.")] = None,
    candidates: Candidates = 16,
    rounds: Annotated[int, typer.Option(help="Replays of the fastest plans.")] = 15,
    json_path: ResumedJson = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = JOBS,
) -> None:
    """Time the plans that policies choose beside the fastest that can be found."""
    with one_line_errors():
        from splitkv.core.kv import CodecName
        from splitkv.lab.tune import regret as lab
        from splitkv.lab.tune.problems import Draw, share_of
        from splitkv.planner.policies import tuned, tuned_tables

        expect_at_least("random", random, 0)
        expect_at_least("mixes", mixes, 0)
        expect_one_of("codec", codec, get_args(CodecName))
        policies = policies_named(policy or ["waves", "tuned"])
        if table is not None:
            expect("tuned" in policies, "table", "None without the policy tuned", str(table))
            policies["tuned"] = tuned.with_table(tuned_tables.load(table))
        status = lab.measure_regret(
            Draw(random, seed, max_bytes, share_of(share), mixes),
            with_matrix=matrix,
            lengths=lengths.value,
            codec=cast(CodecName, codec),
            policies=policies,
            effort=effort(candidates, rounds, time_limit, jobs),
            jobs=jobs,
            json_path=json_path,
            time_limit=time_limit,
            console=console,
        )
    raise typer.Exit(status)


@app.command()
def accuracy(
    keys: Annotated[int, typer.Option(help="Of the sequence.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    through: Annotated[
        str, typer.Option(help="reference, which rounds as kernels may; or kernels.")
    ] = "reference",
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
    jobs: Jobs = JOBS,
) -> None:
    """Measure what int8 and e4m3 keys and values cost in accuracy, beside bf16."""
    with one_line_errors():
        from splitkv.lab.bench import accuracy as lab

        expect_at_least("keys", keys, 2 * lab.QUERIES)
        expect_here(device)
        expect_one_of("through", through, lab.THROUGH)
        lab.accuracy(
            keys=keys,
            seed=seed,
            device=device,
            through=through,
            json_lines=as_json,
            jobs=jobs,
            console=console,
        )


@app.command()
def quality(
    model: Annotated[str, typer.Option(help="demo, trained here, or smollm2.")] = "demo",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Results, as of `reproduce`: add to them.")
    ] = None,
) -> None:
    """Measure what 8-bit caches and windows cost a model: perplexity, and needles it finds."""
    with one_line_errors():
        from splitkv.lab.bench import quality as lab

        expect_here(device)
        expect_one_of("model", model, lab.EXAMS)
        lab.quality(model, device, json_path, console)


@app.command()
def reproduce(
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the shapes that claims hang on.")
    ] = False,
    folder: Annotated[Path, typer.Option("--out", help="Results, taken up again.")] = Path(
        "build/reproduce"
    ),
    backend: Annotated[list[str] | None, typer.Option(help="splitkv, fa3; else both.")] = None,
    sequences: Annotated[bool, typer.Option(help="Prefill and backward too.")] = True,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds; what is left is for the next run.")
    ] = None,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Measure nothing; needs no GPU.")
    ] = False,
    jobs: Jobs = JOBS,
) -> None:
    """Take the tables of the library's sources on this GPU, and check their claims and ours."""
    with one_line_errors():
        from splitkv.lab.reproduce import run as lab
        from splitkv.lab.reproduce.agenda import BACKENDS

        if only_report:
            there = (folder / "results.jsonl").is_file()
            expect(there, "out", "a folder with results.jsonl", str(folder))
            lab.conclude(folder, console)
            return
        expect_run(time_limit, jobs)
        status = lab.reproduce(
            folder,
            quick=quick,
            backends=backend or BACKENDS,
            whole_sequences=sequences,
            jobs=jobs,
            time_limit=time_limit,
            console=console,
        )
    raise typer.Exit(status)


@app.command()
def evolve(
    folder: Annotated[Path, typer.Option("--out", help="Results, taken up again.")] = Path(
        "build/evolve"
    ),
    workload: Annotated[str, typer.Option(help="chat, long_context or a JSON file.")] = "chat",
    backend: BackendName = "splitkv",
    simulate: SimulatedGpu = None,
    generations: Annotated[int, typer.Option(help="At most; proposals of a model.")] = 40,
    population: Annotated[int, typer.Option(help="Of an island.")] = 16,
    islands: Annotated[int, typer.Option(help="Populations of their own.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    rounds: Rounds = 9,
    fitness: Annotated[str, typer.Option(help="Time of: attention, or an output token.")] = (
        "attention"
    ),
    start: Annotated[list[Path] | None, typer.Option(help="Candidates to begin with.")] = None,
    proposer: Annotated[str, typer.Option(help="offline or openevolve.")] = "offline",
    model: Annotated[str | None, typer.Option(help="Of openevolve's endpoint.")] = None,
    api_base: Annotated[str | None, typer.Option(help="URL of the endpoint.")] = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = JOBS,
) -> None:
    """Search for a better split policy on this GPU, as Python files that can be read."""
    with one_line_errors():
        lab = find_evolve()
        from splitkv.lab.evolve.search import Settings
        from splitkv.lab.evolve.setup import Setup

        expect_run(time_limit, jobs)
        expect_at_least("population", population, 4)
        expect_positive("islands", islands)
        expect_at_least("generations", generations, 0)
        expect_at_least("rounds", rounds, 2)
        status = lab.evolve(
            folder,
            Setup(workload, backend, simulate, rounds, fitness),
            Settings(population, islands, seed, fitness),
            generations=generations,
            time_limit=time_limit,
            starts=start or [],
            proposer=lab.Proposer(proposer, model, api_base),
            jobs=jobs,
            console=console,
        )
    raise typer.Exit(status)


@app.command()
def distil(
    folder: Annotated[Path, typer.Argument(help="Of `splitkv evolve`.")],
    workload: Annotated[str, typer.Option(help="As it was searched.")] = "chat",
    backend: BackendName = "splitkv",
    simulate: SimulatedGpu = None,
    rounds: Rounds = 9,
    time_limit: TimeLimit = None,
) -> None:
    """Simplify the best candidate to a rule within 1 %, as a file and a table."""
    with one_line_errors():
        lab = find_evolve()
        from splitkv.lab.evolve.setup import Setup

        expect_run(time_limit, 0)
        setup = Setup(workload, backend, simulate, rounds)
        status = lab.distil(folder, setup, time_limit, console)
    raise typer.Exit(status)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Files that --json wrote.")],
    plot: Annotated[
        Path | None, typer.Option(help="A folder for pictures, or FILE.svg or .png for a sweep.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="One page of tables and pictures.")] = None,
) -> None:
    """Print measured results as Markdown tables; needs no GPU."""
    with one_line_errors():
        from splitkv.lab.overview import report as as_markdown
        from splitkv.lab.report.sections import read

        records = read(results)
        text = as_markdown(records)
        if plot:
            plots = find_plots()
            if plot.suffix in plots.ENDINGS:
                plots.draw(records, plot)
            else:
                plots.draw_all(records, plot)
        if html:
            find_plots()
            from splitkv.lab.overview import page

            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page(records), encoding="utf-8")
        typer.echo(text)


@app.command()
def trace(
    model: Annotated[str, typer.Option(help="A folder, a config.json or a name.")],
    new_tokens: Annotated[str, typer.Option(help="How many to generate: N,N,...")] = "64,512",
    attention: Annotated[
        list[str] | None, typer.Option(help="Implementation; repeat to compare. Else splitkv.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 30,
    layers: Annotated[int | None, typer.Option(help="Only so many; else all.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the model.")] = "bfloat16",
) -> None:
    """Show which attention kernels a model of transformers runs in prefill and decode, and why."""
    with one_line_errors():
        try:
            from splitkv.lab.bench import trace as lab
        except ModuleNotFoundError as error:
            message = f"expected splitkv[transformers] installed, got no {error.name}"
            raise ValueError(f"trace: {message}") from None
        from splitkv.core.device import current

        lab.trace(
            model,
            attention or ["splitkv"],
            lab.parse_new_tokens(new_tokens),
            batch=batch,
            prompt=prompt,
            layers=layers,
            dtype=dtype,
            device=current(),
            console=console,
        )


def expect_run(time_limit: float | None, jobs: int) -> None:
    """The options that every measuring command has."""
    if time_limit is not None:
        expect_positive("time_limit", time_limit)
    expect_at_least("jobs", jobs, 0)


def effort(candidates: int, rounds: int, time_limit: float | None, jobs: int) -> Effort:
    """The options that commands made of studies have."""
    from splitkv.lab.tune.studies import Effort

    expect_run(time_limit, jobs)
    expect_positive("candidates", candidates)
    expect_at_least("rounds", rounds, 2)
    return Effort(candidates, rounds)


def find_plots() -> Any:
    """`lab.plots`, where matplotlib is installed."""
    try:
        return import_module("splitkv.lab.report.plots")
    except ModuleNotFoundError as error:
        raise ValueError(f"plot: expected splitkv[lab] installed, got no {error.name}") from None


def show_drawn(paths: list[Path]) -> None:
    """Say where pictures are."""
    say(console, "\n".join(map(str, paths)))


def find_evolve() -> Any:
    """`lab.evolve.run`, where its library is installed."""
    try:
        from splitkv.lab.evolve import run
    except ModuleNotFoundError as error:
        raise ValueError(f"evolve: expected splitkv[lab] installed, got no {error.name}") from None
    return run


def policies_named(names: list[str] | None) -> dict[str, Policy]:
    """The policies with these names, or all; FILE.py: a candidate of `splitkv evolve`."""
    from splitkv.planner.registry import POLICIES

    found = {}
    for name in names or POLICIES:
        if name.endswith(".py"):
            from splitkv.lab.evolve.candidate import policy_of

            expect(Path(name).is_file(), "policy", "a file that is there", name)
            found[name] = policy_of(Path(name))
        else:
            expect_one_of("policy", name, POLICIES)
            found[name] = POLICIES[name]
    return found
