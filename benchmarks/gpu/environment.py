"""What is there: the device, its driver, and versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("evenly", "torch", "triton", "numpy", "transformers", "scikit-learn")


def environment(*, cpu: bool) -> dict[str, Any]:
    """The facts; raises where a GPU is asked for and there is none."""
    found: dict[str, Any] = {
        "device": "cpu",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "compiler": Path(shutil.which(os.environ.get("CXX") or "g++") or "").name,
    }
    return found if cpu else found | _gpu()


def _gpu() -> dict[str, Any]:
    about = torch.cuda.get_device_properties(0)
    nccl: Any = torch.cuda.nccl
    return {
        "device": about.name,
        "gpus": torch.cuda.device_count(),
        "gpu_bytes": about.total_memory,
        "capability": [about.major, about.minor],
        "nccl": list(nccl.version()),
        "driver": _driver(),
    }


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
