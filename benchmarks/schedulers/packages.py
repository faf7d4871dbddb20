"""Debian's packages of the schedulers, installed where they are missing and that is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess

PACKAGES = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich", "slurmctld": "slurm-wlm", "munged": "munge"}


def missing(programs: list[str]) -> list[str]:
    """Those of the `programs` that are not there."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


def install(programs: list[str]) -> list[str]:
    """Installs what is missing of them, as root on Debian and Ubuntu; those that are missing then."""
    if missing(programs) and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = [PACKAGES[program] for program in missing(programs)]
        quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update", "-qq"], check=False, **quiet)
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], check=False, **quiet)
    return missing(programs)


if __name__ == "__main__":
    install([*PACKAGES])
