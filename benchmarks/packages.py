"""Debian's packages of programs that tests and benchmarks start, installed where they are missing and that is allowed.

python3 -m benchmarks.packages chromium     exit code 1 where it is not there in the end
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

SCHEDULERS = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich", "slurmctld": "slurm-wlm", "munged": "munge"}
PACKAGES = {**SCHEDULERS, "chromium": "chromium"}


def missing(programs: list[str]) -> list[str]:
    """Return those of the `programs` that are not there."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


def install(programs: list[str]) -> list[str]:
    """Install missing `programs`, as root on Debian and Ubuntu; return those that are missing then."""
    if missing(programs) and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = [PACKAGES[program] for program in missing(programs)]
        quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update", "-qq"], check=False, **quiet)
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], check=False, **quiet)
    return missing(programs)


if __name__ == "__main__":
    if lacking := install(sys.argv[1:]):
        sys.exit(f"there is no {', '.join(lacking)}, and it could not be installed")
