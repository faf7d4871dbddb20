"""Runs under the schedulers that people have, in a lab of two nodes; prints what docs/clusters.md has. Needs root.

python -m benchmarks.schedulers install            Debian's packages of all of them
python -m benchmarks.schedulers openmpi
python -m benchmarks.schedulers mpich
python -m benchmarks.schedulers slurm
python -m benchmarks.schedulers ray                and Ray from PyPI, where it is missing
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.lab.lab import Lab, guarded, why_not
from benchmarks.packages import SCHEDULERS, install
from benchmarks.schedulers import mpi, ray_nodes, slurm


def main() -> int:
    asked = sys.argv[1] if len(sys.argv) == 2 else ""
    kinds = {kind: ([f"mpirun.{kind}"], partial(mpi.mpi, kind)) for kind in mpi.START}
    kinds |= {"slurm": (slurm.PROGRAMS, slurm.slurm), "ray": ([], ray_nodes.ray)}
    if asked not in (*kinds, "install"):
        print(__doc__, file=sys.stderr)
        return 2
    programs, runs = kinds.get(asked, ([*SCHEDULERS], None))
    if lacking := install(programs) or (ray_nodes.missing() if asked == "ray" else []):
        print(f"there is no {', '.join(lacking)}, and it could not be installed", file=sys.stderr)
        return 1
    if runs is None:
        return 0
    if why := why_not():
        print(f"no lab: {why}", file=sys.stderr)
        return 1
    name = f"sched{os.getpid() % 10**7}"
    with tempfile.TemporaryDirectory(prefix="evenly-schedulers-") as folder, guarded(Lab(name=name, nodes=2)) as lab:
        runs(lab, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
