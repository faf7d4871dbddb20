"""Whether this machine may have GPUs, without torch: to import it takes a second, and to ask it starts a driver."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_GPU_FILE = re.compile(r"nvidia|nvmap$|nvhost|kfd$|dxg$")  # of NVIDIA's driver, Jetson's, AMD's, that of WSL


def may_have_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether a driver for GPUs has made its files in `devices`; on other systems than Linux always."""
    return sys.platform != "linux" or any(_GPU_FILE.match(path.name) for path in devices.iterdir())
