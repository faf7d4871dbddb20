"""Runs under Open MPI and MPICH, over the two nodes of a lab. In place of ssh a script enters the node."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from benchmarks.lab.lab import ROOT, Lab
from benchmarks.schedulers.transcript import Transcript

JOB = Path(__file__).with_name("job.py")
# How each starts ranks: `{n}` of them, `{per}` on each of two hosts.
START = {
    "openmpi": "mpirun.openmpi --oversubscribe -x PATH -x PYTHONPATH -x OMP_NUM_THREADS -x EVENLY_SECRET "
    "-x MASTER_ADDR=node0 --host node0:{per},node1:{per} --bind-to none -n {n}",
    "mpich": "mpirun.mpich -genv MASTER_ADDR node0 -hosts node0:{per},node1:{per} -n {n}",
}
VARIABLES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HYDRA_LAUNCHER": "ssh"}
KILLED = {"openmpi": (137,), "mpich": (9, 255)}  # 255 where MPICH's own processes fail over it
STOPPED = {"openmpi": (1,), "mpich": (130,)}
AGENT = """#!/bin/sh
[ "$1" = -x ] && shift
host=$1; shift
cd {root} && exec {python} -m benchmarks.lab on --name {lab} "${{host#node}}" -- sh -c "cd {folder} && $*"
"""


def mpi(kind: str, lab: Lab, folder: Path) -> None:
    """Prints the runs under `kind`; raises where one is not as it should be."""
    agent = folder / "agent"
    agent.write_text(AGENT.format(root=ROOT, python=sys.executable, lab=lab.name, folder=folder))
    agent.chmod(0o755)
    launchers = {"OMPI_MCA_plm_rsh_agent": str(agent), "HYDRA_LAUNCHER_EXEC": str(agent)}
    runs = Transcript(lab, folder, VARIABLES | launchers)
    (folder / "job.py").write_text(JOB.read_text())
    runs.run("evenly run job.py --devices 1 --out one-device")
    _runs_of(kind, runs)


def _runs_of(kind: str, runs: Transcript) -> None:
    ranks, nodes = START[kind].format(n=4, per=2), START[kind].format(n=2, per=1)
    runs.say("a task for each rank")
    runs.run(f"{ranks} evenly run job.py --out {kind}-ranks")
    runs.check_same(f"{kind}-ranks", "one-device")
    runs.say("a task for each node, which starts the ranks there")
    runs.run(f"{nodes} evenly run job.py --devices 2 --plan zero3 --out {kind}-nodes")
    runs.check_same(f"{kind}-nodes", "one-device")
    runs.say("a rank that fails")
    runs.run(f"{ranks} evenly run job.py --set fails=3 --out {kind}-fails", code=(1,))
    runs.say("a rank that is killed")
    runs.run(f"{ranks} evenly run job.py --set fails=3 --set how=killed --out {kind}-killed", code=KILLED[kind])
    runs.say("Ctrl-C, and another number of ranks that goes on")
    command = f"{ranks} evenly run job.py --set steps=80 --set pause=0.1 --out {kind}-stopped"
    runs.run(command, code=STOPPED[kind], ask=signal.SIGINT, when=lambda text: "step 1/" in text)
    runs.run(f"evenly run job.py --set steps=80 --devices 1 --resume --out {kind}-stopped")
    runs.run("evenly run job.py --set steps=80 --devices 1 --out one-device-80 --autoresume")
    runs.check_same(f"{kind}-stopped", "one-device-80")
    runs.check_nothing_left()
