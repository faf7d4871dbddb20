"""`evenly`: the commands, and how their errors end.

Commands import what they need when they are called, so that `evenly --help` starts at once.
"""

from __future__ import annotations

import gc
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from evenly.cli.tables import print_wrapped
from evenly.errors import EvenlyError, UserError
from evenly.launcher.signals import end_with_code, named_signals

# Objects until garbage is collected: at Python's own 700 that takes a fifth of the time in which torch is imported.
ALLOCATIONS = 20_000

app = typer.Typer(
    name="evenly",
    help="Train any PyTorch model on any number of devices, with the numbers of one device.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.py", help="File that defines job() -> evenly.Job.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="A setting of job(); repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Skipped = Annotated[
    int, typer.Option(min=0, metavar="N", help="Go on without up to N batches whose loss or gradient is not finite.")
]
Devices = Annotated[int | None, typer.Option(min=1, help="Ranks on this machine (default: all GPUs, else CPU cores).")]

Clusters = Annotated[
    list[str],
    typer.Option(
        metavar="TEXT", help="For example 4x8xH100, local or FILE.toml (default of a job: local). Several are compared."
    ),
]
Prices = Annotated[
    list[float], typer.Option(metavar="MONEY", help="Of a device for an hour: of each --cluster, or of all.")
]
Tokens = Annotated[float | None, typer.Option(metavar="N", help="Tokens of the whole run, for its time and cost.")]

PlanText = Annotated[
    str | None,
    typer.Option(help="How to split, for example zero3 or tensor=2; auto seeks the fastest that fits (default: ddp)."),
]
SaveTo = Annotated[
    Path | None, typer.Option(metavar="DIR2", help="A second folder, to which every checkpoint is copied.")
]
Snapshots = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Keep the state in memory every N steps, for ranks that fail.")
]
SecretFile = Annotated[
    Path | None, typer.Option(help="The same random words on all machines (default: EVENLY_SECRET).")
]
Nodes = Annotated[
    str, typer.Option(metavar="N|MIN:MAX", help="Machines that take part; 2:4 goes on with those that are left.")
]
StallLimit = Annotated[
    float | None,
    typer.Option(
        min=1, metavar="SECONDS", help="End the run when a rank stands still longer (default: 180, 540 at first)."
    ),
]
MeasuredCluster = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="What `evenly bench` measured here, for --plan auto to go by."),
]
KeepPlan = Annotated[
    bool, typer.Option("--keep-plan", help="Where there is no room, end, and do not go on under another plan.")
]
Log = Annotated[
    list[str],
    typer.Option(
        "--log",
        metavar="LOGGER",
        help="Also log to tensorboard, wandb=PROJECT, mlflow=EXPERIMENT or csv (a table); repeatable.",
    ),
]
RayWorkerRange = Annotated[
    str | None, typer.Option("--ray", metavar="N|MIN:MAX", help="On so many workers of a Ray cluster, each a rank.")
]
NodeCount = Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Machines that take part.")]
NodeRank = Annotated[int, typer.Option(min=0, help="Number of this machine, from 0.")]
Rendezvous = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where machine 0 listens.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors and warnings.")]
AutoResume = Annotated[
    bool, typer.Option("--autoresume", help="Go on if --out has a checkpoint, else begin: the same command each time.")
]
Restarts = Annotated[
    int, typer.Option(min=0, metavar="N", help="Start again from the newest checkpoint after up to N failures an hour.")
]


@app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def run_command(
    context: typer.Context,
    job: JobFile,
    plan: PlanText = None,
    devices: Devices = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/NAME-N).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run (default: the job's).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest sound checkpoint.")] = False,
    autoresume: AutoResume = False,
    step: Annotated[int | None, typer.Option(min=0, help="Go on from the checkpoint of this step.")] = None,
    skip_nonfinite: Skipped = 0,
    check: Annotated[bool, typer.Option("--check", help="Compare what ranks ask for before each collective.")] = False,
    stall_limit: StallLimit = None,
    save_to: SaveTo = None,
    snapshot: Snapshots = None,
    restarts: Restarts = 0,
    keep_plan: KeepPlan = False,
    cluster: MeasuredCluster = None,
    settings: Settings = [],  # noqa: B006  (typer copies it)
    log: Log = [],  # noqa: B006
    nodes: Nodes = "1",
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    secret_file: SecretFile = None,
    ray: RayWorkerRange = None,
    quiet: Quiet = False,
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """Train a job. A file that calls evenly.start owns its loop and runs as a script. Its arguments follow `--`."""
    from evenly.launcher.rounds import NodeRange

    _run(
        job=job,
        arguments=[*context.args],
        plan=plan,
        devices=devices,
        out=out,
        steps=steps,
        resume=resume or step is not None,
        step=step,
        skip_nonfinite=skip_nonfinite,
        check=check,
        stall_limit_s=stall_limit,
        settings=settings,
        nodes=NodeRange.parse(nodes),
        node_rank=node_rank,
        rendezvous=rendezvous,
        secret_file=secret_file,
        json_only=json_only,
        save_to=save_to,
        snapshot=snapshot,
        restarts=restarts,
        keep_plan=keep_plan,
        cluster=cluster,
        log=log,
        quiet=quiet,
        autoresume=autoresume,
        ray=None if ray is None else NodeRange.parse(ray, "--ray"),
    )


def _run(**asked: Any) -> None:
    """asked: the fields of a `RunRequest`."""
    from evenly.cli.run import RunRequest

    request = RunRequest(**asked)
    if request.ray is not None:
        from evenly.cli.run_ray import run_on_ray

        raise typer.Exit(run_on_ray(request, request.ray))
    from evenly.cli.run import run
    from evenly.cli.run_nodes import run_on_nodes
    from evenly.cli.run_rank import run_as_rank

    raise typer.Exit(run(request, run_on_nodes, run_as_rank))


@app.command("submit", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def submit_command(
    context: typer.Context,
    job: JobFile,
    slurm: Annotated[bool, typer.Option("--slurm", help="To Slurm, by sbatch.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="To Kubernetes, as a JobSet, by kubectl.")] = False,
    ray: Annotated[str, typer.Option("--ray", metavar="ADDRESS", help="To Ray, at http://HEAD:8265.")] = "",
    workers: Annotated[str, typer.Option(metavar="N|MIN:MAX", help="Ranks, each a worker (Ray).")] = "",
    nodes: Nodes = "1",
    devices: Annotated[int | None, typer.Option(min=1, metavar="N", help="GPUs to ask for on each machine.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The devices are CPU cores.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run, seen by all machines.")] = None,
    time: Annotated[str | None, typer.Option(metavar="LIMIT", help="Of one attempt, as Slurm has it: 8:00:00.")] = None,
    stop_before: Annotated[
        int, typer.Option(min=10, metavar="SECONDS", help="For the last step and its checkpoint, before the end.")
    ] = 120,
    sbatch: Annotated[
        list[str], typer.Option("--sbatch", metavar="OPTION", help="Also of sbatch, such as account=me; repeatable.")
    ] = [],  # noqa: B006
    image: Annotated[str, typer.Option(help="With the job, its libraries and evenly (Kubernetes).")] = "",
    volume: Annotated[str, typer.Option(metavar="CLAIM", help="For the run's folder, under /runs (Kubernetes).")] = "",
    name: Annotated[str, typer.Option(help="Of the JobSet, and the run's folder (default: the job's).")] = "",
    namespace: Annotated[str, typer.Option(help="Of Kubernetes.")] = "default",
    print_only: Annotated[bool, typer.Option("--print", help="Print it, and submit nothing.")] = False,
    debug: Debug = False,
) -> None:
    """Hand a run to a scheduler; options of `evenly run` follow `--`. It goes on when its time is over, until done."""
    from evenly.cli.submit import SubmitOptions, submit

    options = SubmitOptions(
        job=job,
        slurm=slurm,
        kubernetes=kubernetes,
        ray=ray,
        workers=workers,
        nodes=nodes,
        devices=devices,
        cpu=cpu,
        out=out,
        time=time,
        stop_before_s=stop_before,
        sbatch=sbatch,
        image=image,
        volume=volume,
        name=name,
        namespace=namespace,
        print_only=print_only,
        arguments=context.args,
    )
    raise typer.Exit(submit(options))


@app.command("verify")
def verify_command(
    job: JobFile,
    plans: Annotated[str, typer.Option(help="Plans, separated by semicolons.")] = "single;ddp",
    devices: Annotated[
        int | None, typer.Option(min=1, help="World of plans without sizes (default: the smallest).")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 3,
    dtype: Annotated[str, typer.Option(help="Precision to compare in.")] = "float64",
    keep_casts: Annotated[bool, typer.Option("--keep-casts", help="Leave casts to float32 as they are.")] = False,
    settings: Settings = [],  # noqa: B006
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """Hold plans against one device, tensor by tensor; exit code 1 if any differs, 3 if rounding hides it."""
    from evenly.cli.verify import run_verify

    asked = {"steps": steps, "dtype": dtype, "settings": settings, "keep_casts": keep_casts, "json_only": json_only}
    raise typer.Exit(run_verify(job, plans, devices=devices, **asked))  # pyright: ignore[reportArgumentType]


@app.command("plan")
def plan_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="JOB.py|MODEL",
            help="A job file; or a model by name, as transformer:layers=24,hidden=2048,heads=16, or by config.json.",
        ),
    ],
    cluster: Clusters = [],  # noqa: B006
    price: Prices = [],  # noqa: B006
    tokens: Tokens = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="What plans have to state, for example tensor=2.")] = "auto",
    top: Annotated[int | None, typer.Option(min=1, help="Plans to show (default: 5).")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples of a step (default: of about a million tokens).")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a sample (default: the model's).")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a device: 80GB, 40GiB (default: its kind's).")
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(min=0, max=90, metavar="PERCENT", help="Of the memory, that plans leave free (default: 8)."),
    ] = None,
    max_devices: Annotated[int | None, typer.Option(min=1, metavar="N", help="Devices that may be used.")] = None,
    step_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Find the fewest devices whose step takes no longer.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory, time and the schedule.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell what is split of a job's model, where it is cut, and why.")
    ] = False,
    settings: Settings = [],  # noqa: B006
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """Which plans fit, how fast they are, and why, without GPU and without starting processes; exit code 1 if none."""
    from evenly.cli.plan import PlanOptions, plan

    options = PlanOptions(
        target=target,
        only=only,
        clusters=cluster,
        prices=price,
        tokens=tokens,
        batch=global_batch,
        sequence=sequence,
        memory=memory,
        reserve=reserve,
        max_devices=max_devices,
        step_s=step_time,
        top=top,
        html=html,
        settings=settings,
        explain=explain,
        json_only=json_only,
    )
    raise typer.Exit(plan(options))


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folder of a run (runs/NAME-N), or several.")],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page (default: DIR/report.html; of several runs comparison.html)."),
    ] = None,
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """Show how a run went, where its time and every device's memory went, and draw it; of several, how they differ."""
    from evenly.cli.report import report

    raise typer.Exit(report(folders, out=html, json_only=json_only))


@app.command("board")
def board_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of runs.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="To listen on; beyond 127.0.0.1 a token is asked for.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8265,
    debug: Debug = False,
) -> None:
    """Serve the runs in a folder as live pages, until interrupted."""
    from evenly.cli.board import board

    raise typer.Exit(board(folder, host=host, port=port))


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run: runs/NAME-N.")],
    to: Annotated[Path, typer.Option(metavar="DIR2", help="Folder to write: new, or empty.")],
    step: Annotated[str, typer.Option(metavar="N|best", help="Which checkpoint.")] = "newest",
    average: Annotated[bool, typer.Option("--average", help="Write the averaged weights, as the job keeps.")] = False,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="The most that a file holds.")] = "5GB",
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Copy the tokenizer's files from there.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter of a peft model.")] = False,
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights as safetensors, which from_pretrained loads if it is a transformers model."""
    from evenly.cli.export import ExportOptions, run_export

    options = ExportOptions(step, average, shard_size, tokenizer, adapter)
    raise typer.Exit(run_export(run, to, options, json_only=json_only))


@app.command("checkpoints")
def checkpoints_command(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run: runs/NAME-N.")],
    check: Annotated[bool, typer.Option("--check", help="Read all files and hold them against their digests.")] = False,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Remove all but the N newest sound ones and the best.")
    ] = None,
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """List a run's checkpoints; exit code 1 if anything is wrong with one."""
    from evenly.cli.checkpoints import checkpoints

    raise typer.Exit(checkpoints(run, check=check, keep=keep, json_only=json_only))


bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")


@bench_app.command("comm")
def bench_comm_command(
    devices: Devices = None,
    operations: Annotated[str, typer.Option(help="Names, separated by commas.")] = "all",
    most: Annotated[str, typer.Option(metavar="SIZE", help="Largest size, for example 256M.")] = "256M",
    out: Annotated[Path | None, typer.Option(help="Folder for comm.json and comm.html (pictures).")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the links as a cluster file.")] = None,
    nodes: NodeCount = 1,
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    secret_file: SecretFile = None,
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """Time and bandwidth of every operation, over sizes from 1 byte: between ranks, of one node or several."""
    from evenly.cli.bench import bench_comm
    from evenly.cli.on_nodes import NodePlace

    place = NodePlace(nodes, node_rank, rendezvous, secret_file)
    raise typer.Exit(
        bench_comm(
            devices=devices, operations=operations, most=most, out=out, save=save, json_only=json_only, place=place
        )
    )


@bench_app.command("device")
def bench_device_command(
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the rates in a cluster file, besides what it holds.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Measure so many at the same time; the slowest counts (default: one).")
    ] = None,
    nodes: NodeCount = 1,
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    secret_file: SecretFile = None,
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """What this machine's device reaches: matmuls by precision and size, and its memory. Takes some seconds."""
    from evenly.cli.bench import bench_device
    from evenly.cli.on_nodes import NodePlace

    place = NodePlace(nodes, node_rank, rendezvous, secret_file)
    raise typer.Exit(bench_device(save=save, json_only=json_only, devices=devices, place=place))


@app.command("doctor")
def doctor_command(
    world: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks to try every operation between (default: 2, on one GPU 1)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder that nodes are to share (default: this one).")
    ] = None,
    nodes: NodeCount = 1,
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    secret_file: SecretFile = None,
    json_only: Json = False,
    debug: Debug = False,
) -> None:
    """Look at this machine, or at all nodes of a run together, and say what would keep a run from working.

    Exit code 1 if anything does. On several nodes it is started on each, as `evenly run` is, and node 0 says it.
    """
    from evenly.cli.doctor import doctor
    from evenly.cli.on_nodes import NodePlace

    place = NodePlace(nodes, node_rank, rendezvous, secret_file)
    raise typer.Exit(doctor(world=world, json_only=json_only, place=place, out=out))


def process() -> NoReturn:
    """The process of a command."""
    gc.set_threshold(ALLOCATIONS)
    end_with_code(main)


def main() -> None:
    """Runs the command line; an `EvenlyError` ends in its message and its exit code."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:cut]
    if words[:1] != ["submit"]:  # whose options of `evenly run` come after
        sys.argv[1:] = words[cut + 1 :]  # of the job file, in this process and in those that it starts
    try:
        with named_signals():
            app(words[:cut] if words[:1] in (["plan"], ["verify"]) else words)
    except EvenlyError as error:
        _end(error, debug=debug)
    except OSError as error:  # of a path that a user has named
        if error.filename is None:
            raise
        name, do = str(error.filename), "name a path that can be used"
        _end(UserError(f"use {name if len(name) < 200 else name[:200] + '...'}", str(error.strerror), do), debug=debug)
    except RecursionError:
        _end(UserError("read what was given", "it is nested too deeply", "give a flatter text"), debug=debug)


def _end(error: EvenlyError, *, debug: bool) -> None:
    remote: Any = getattr(error, "traceback", "")
    if debug:
        print(remote or "".join(traceback.format_exception(error)), file=sys.stderr)
    print_wrapped(f"evenly: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
