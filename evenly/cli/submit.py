"""`evenly submit`: hands a run to a scheduler, or prints what it would be given."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenly.cli.run import next_folder
from evenly.errors import RunError, UserError
from evenly.launcher.kubernetes import KubernetesJob, kubernetes_manifests
from evenly.launcher.ray_job import RayJob, ray_submission
from evenly.launcher.rounds import NodeRange
from evenly.launcher.slurm_script import SlurmJob, slurm_script

# Whose options these are.
OWNERS = {
    **dict.fromkeys(("time", "sbatch"), ("--slurm",)),
    **dict.fromkeys(("image", "volume", "name"), ("--kubernetes",)),
    **dict.fromkeys(("devices", "cpu"), ("--slurm", "--kubernetes")),
    "out": ("--slurm", "--ray"),
    "workers": ("--ray",),
}


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """The command line of `evenly submit`."""

    job: Path
    slurm: bool
    kubernetes: bool
    ray: str
    workers: str
    nodes: str
    devices: int | None
    cpu: bool
    out: Path | None
    time: str | None
    stop_before_s: int
    sbatch: Sequence[str]
    image: str
    volume: str
    name: str
    namespace: str
    print_only: bool
    arguments: Sequence[str]


def submit(options: SubmitOptions) -> int:
    """The exit code. Raises `UserError` for what cannot be submitted, `RunError` where a scheduler does not take it."""
    ways = {"--slurm": _to_slurm, "--kubernetes": _to_kubernetes, "--ray": _to_ray}
    named = [way for way in ways if getattr(options, way[2:])]
    if len(named) != 1:
        found = f"{' and '.join(named)} are named" if named else "no scheduler is named"
        raise UserError("evenly submit", found, "add one of --slurm, --kubernetes and --ray ADDRESS")
    if given := [f"--{name}" for name, owners in OWNERS.items() if getattr(options, name) and named[0] not in owners]:
        raise UserError(" and ".join(given), "it is another scheduler's", "leave it out")
    return ways[named[0]](options)


def _to_slurm(options: SubmitOptions) -> int:
    """Gives the script to sbatch, which says the number of the job."""
    nodes = NodeRange.parse(options.nodes)
    if nodes.elastic:
        raise UserError(f"--nodes {options.nodes} under Slurm", "a job has all its machines or none", "name one number")
    if not options.job.is_file():
        raise UserError(f"submit {options.job}", "there is no such file", "name a job file")
    out = options.out or next_folder(options.job)
    asked = SlurmJob(
        job=options.job,
        out=out,
        nodes=nodes.most,
        devices=options.devices,
        cpu=options.cpu,
        time=options.time,
        stop_before_s=options.stop_before_s,
        arguments=options.arguments,
        options=options.sbatch,
    )
    script = slurm_script(asked)
    if options.print_only:
        print(script, end="")
        return 0
    said = _handed_over(["sbatch"], script, "Slurm")
    out.mkdir(parents=True, exist_ok=True)  # so that the next one gets another
    print(f"{said}, into {out}")
    return 0


def _to_kubernetes(options: SubmitOptions) -> int:
    """Gives the manifests to kubectl."""
    if lacking := [name for name in ("image", "volume", "devices") if not getattr(options, name)]:
        found = f"{' and '.join(f'--{name}' for name in lacking)} not given"
        do = "name an image with the job, a volume claim for the run's folder, and the devices of each node"
        raise UserError("evenly submit --kubernetes", found, do)
    asked = KubernetesJob(
        name=options.name or options.job.stem.lower().replace("_", "-"),
        job=options.job,
        image=options.image,
        volume=options.volume,
        secret=secrets.token_urlsafe(32),
        nodes=NodeRange.parse(options.nodes),
        devices=options.devices or 1,
        cpu=options.cpu,
        stop_before_s=options.stop_before_s,
        namespace=options.namespace,
        arguments=options.arguments,
    )
    text = json.dumps(kubernetes_manifests(asked), indent=2)  # which is YAML too
    print(text if options.print_only else _handed_over(["kubectl", "apply", "-f", "-"], text, "Kubernetes"))
    return 0


def _to_ray(options: SubmitOptions) -> int:
    """Has Ray run it as a job of its own, which says how to follow that."""
    if lacking := [name for name in ("workers", "out") if not getattr(options, name)]:
        found = f"{' and '.join(f'--{name}' for name in lacking)} not given"
        raise UserError("evenly submit --ray", found, "say how many workers, and where the run's folder is")
    if options.nodes != "1":
        raise UserError(f"--nodes {options.nodes} under Ray", "it places the workers", "give --workers")
    asked = RayJob(
        job=options.job,
        out=options.out or Path(),
        address=options.ray,
        workers=NodeRange.parse(options.workers, "--workers"),
        arguments=options.arguments,
    )
    command = ray_submission(asked)
    print(shlex.join(command) if options.print_only else _handed_over(command, "", "Ray"))
    return 0


def _handed_over(command: list[str], text: str, scheduler: str) -> str:
    asked = f"submit the run to {scheduler}"
    try:
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        found, do = f"there is no {command[0]} on this machine", "run it where jobs are submitted, or print it: --print"
        raise RunError(asked, found, do) from None
    if done.returncode:
        said = done.stderr.strip()
        found = said.splitlines()[-1] if said.startswith("Traceback") else said
        raise RunError(asked, found, "see what would be submitted: --print")
    return done.stdout.strip()
