"""Runs under Slurm: munge, a controller and a slurmd on each of the two nodes of a lab."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.lab.lab import Lab, address
from benchmarks.schedulers.transcript import Transcript, wait_until

JOB = Path(__file__).with_name("job.py")
PROGRAMS = ["slurmctld", "munged"]
CONFIGURATION = """\
ClusterName={lab}
SlurmctldHost=node0({controller})
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def slurm_up(lab: Lab, state: Path) -> dict[str, str]:
    """Starts Slurm on the nodes, which ends with the lab; the variables by which its commands find it."""
    state.mkdir(mode=0o700)
    (state / "controller").mkdir()
    nodes = "\n".join(f"NodeName=node{n} NodeAddr={address(n)} CPUs=4 State=UNKNOWN" for n in range(lab.nodes))
    configuration = state / "slurm.conf"
    text = CONFIGURATION.format(lab=lab.name, state=state, controller=address(0), nodes=nodes)
    configuration.write_text(text)
    key = state / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    variables = {"SLURM_CONF": str(configuration)}
    of_munge = [f"--{name}={state / f'munge.{name}'}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    # Its folder is root's alone, which munge takes for unsafe for others.
    _start(lab, 0, ["munged", f"--key-file={key}", *of_munge, "--force"], variables)
    _start(lab, 0, ["slurmctld"], variables)
    for node in range(lab.nodes):
        _start(lab, node, ["slurmd", "-N", f"node{node}"], variables)
    sinfo = [*lab.within(0), "sinfo", "--noheader", "--format=%T %D"]
    environment = os.environ | variables
    wait_until(
        lambda: f"idle {lab.nodes}" in subprocess.run(sinfo, env=environment, capture_output=True, text=True).stdout
    )
    return variables


def _start(lab: Lab, node: int, command: list[str], variables: dict[str, str]) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = os.environ | variables | {"PATH": path}
    subprocess.run([*lab.within(node), *command], env=environment, check=True, stdout=subprocess.DEVNULL)


def slurm(lab: Lab, folder: Path) -> None:
    """Prints the runs; raises where one is not as it should be."""
    runs = Transcript(lab, folder, slurm_up(lab, folder / ".slurm"))
    (folder / "job.py").write_text(JOB.read_text())
    runs.run("sinfo")
    runs.run("evenly run job.py --devices 1 --out one-device")
    runs.say("a task for each node, which starts the ranks there")
    runs.run("srun --nodes 2 --ntasks-per-node 1 --cpus-per-task 2 evenly run job.py --devices 2 --out nodes")
    runs.check_same("nodes", "one-device")
    runs.say("a task for each rank")
    runs.run("srun --nodes 2 --ntasks-per-node 2 evenly run job.py --plan zero3 --out ranks")
    runs.check_same("ranks", "one-device")
    runs.say("a rank that fails")
    runs.run("srun --nodes 2 --ntasks-per-node 2 evenly run job.py --set fails=3 --out fails", code=(1,))
    runs.say("a rank that is killed")
    killed = "srun --nodes 2 --ntasks-per-node 2 evenly run job.py --set fails=3 --set how=killed --out killed"
    runs.run(killed, code=(137,))
    cancelled(runs)
    requeued(runs)
    runs.check_nothing_left()


def cancelled(runs: Transcript) -> None:
    """A job that is cancelled is saved, and not queued again."""
    runs.say("a job that is cancelled is saved, and does not come back")
    runs.run("evenly submit job.py --slurm --nodes 2 --devices 1 --cpu --out off -- --set steps=900 --set pause=0.1")
    wait_until(lambda: any((runs.folder / "off" / "checkpoints").glob("step-*")))
    runs.run("scancel --name job")
    wait_until(lambda: not _queue(runs))
    print(_output(runs))


def requeued(runs: Transcript, steps: int = 400) -> None:
    """A job that needs more time than it has is saved before, queued again, and done in the end, with equal numbers."""
    runs.say("a job that needs more time than it has")
    limits = "--time 3 --stop-before 60"
    of_job = f"--set steps={steps} --set pause=0.1"
    runs.run(f"evenly submit job.py --slurm --nodes 2 --devices 1 --cpu {limits} --out long -- {of_job}")
    wait_until(lambda: bool(_queue(runs)))
    wait_until(lambda: not _queue(runs), limit_s=900.0)
    print(_output(runs))
    runs.run(f"evenly run job.py --devices 1 --set steps={steps} --out one-device-long")
    runs.check_same("long", "one-device-long")


def _queue(runs: Transcript) -> str:
    command = [*runs.lab.within(0), "squeue", "--noheader"]
    return subprocess.run(command, env=runs.environment, capture_output=True, text=True, check=True).stdout.strip()


def _output(runs: Transcript) -> str:
    """What the newest job has printed."""
    newest = max(runs.folder.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    return f"$ cat {newest.name}\n{runs.cleaned(newest.read_text())}"
