"""Where figures come from: versions, cores, the corpus. Prints JSON; builds the corpus if there is none.

Run by the interpreter of the contenders, which need not be the one that runs the benchmark.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib import metadata

from workloads import corpus

PACKAGES = ("torch", "evenly", "accelerate", "lightning", "transformers", "deepspeed")


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe() -> dict:
    """Versions, machine type, cores, and a digest of the corpus, which is the Python's own library."""
    text, functions, _ = corpus()
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "corpus": hashlib.sha256(text.tobytes() + functions.tobytes()).hexdigest()[:12],
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
