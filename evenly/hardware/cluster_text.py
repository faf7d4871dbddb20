"""A cluster as text: `4x8xH100`, `8xA100-80@100`, `local`, `cluster.toml`. No torch, except to look at this machine.

[NODESx][DEVICESx]KIND[@GBITS[NETWORK]]    devices of a node; without NODES as many nodes as the kind needs
local                                      the devices of this machine
KIND may be a variant: H100:memory=96GB,bandwidth=2.4TB/s,power=500W
FILE.toml                                  see cluster_file.py
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, prod
from pathlib import Path

from evenly.errors import UserError
from evenly.hardware.cluster import MOST_DEVICES, Cluster
from evenly.hardware.cluster_file import read_cluster
from evenly.hardware.devices import find_device, known_device
from evenly.hardware.links import network_names
from evenly.launcher.gpus import may_have_gpus

LOCAL = "local"
MOST_GBITS = 1_000_000
MOST_CPU_RANKS = 8  # beyond, processes cost more than they bring; --devices overrules it
ACCEPTED = (
    "write 8xH100, 4x8xH100 (nodes x devices x kind), 4x8xH100@400 (Gb/s per device to other nodes), local or FILE.toml"
)

COUNTS = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?((?!\d+x)[^@]+)(?:@([^@]*))?", re.IGNORECASE)
TOO_MANY = re.compile(r"(\d+x){3}", re.IGNORECASE)
BEHIND = re.compile(r"x\d+$", re.IGNORECASE)
NETWORK = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)?", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` describes. Raises `UserError`, with the nearest names for an unknown device.

    The number of nodes may be left out: 64xH100 is eight nodes of eight, since none is sold with more.
    """
    words = text.strip()
    if words.lower() == LOCAL:
        return _with_known_device(local_cluster())
    if words.lower().endswith(".toml"):
        return _with_known_device(read_cluster(Path(words)))
    return _described(text, words.replace(" ", ""))


def local_cluster(devices: int | None = None) -> Cluster:
    """This machine, with all its CUDA devices, or as many CPU processes as `evenly run` starts; or with `devices`."""
    import torch
    from psutil import virtual_memory

    from evenly.launcher.allocator import cgroup_limit_bytes  # what another cluster does without

    kind, count = kind_here(), devices or local_devices()
    cpu = kind == "cpu"
    host = min(virtual_memory().total, cgroup_limit_bytes() or inf)
    memory = host / count if cpu else torch.cuda.get_device_properties(0).total_memory
    return Cluster(1, count, kind, own={"memory_gib": memory / 2**30})


def local_devices() -> int:
    from evenly.launcher.environment import available_cores

    return local_gpus() or min(available_cores(), MOST_CPU_RANKS)


def local_gpus() -> int:
    """How many GPUs this machine has; torch, which takes a second to import, is asked only where there may be any."""
    if not may_have_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def kind_here() -> str:
    """The kind of this machine's devices; as the driver calls it where no such kind is known."""
    if not local_gpus():
        return "cpu"
    import torch

    name = torch.cuda.get_device_properties(0).name
    known = known_device(name)
    return known.name if known else name


def _described(text: str, words: str) -> Cluster:
    if TOO_MANY.match(words):
        raise _impossible(text, "it has more than two numbers before the kind of device")
    match = COUNTS.fullmatch(words)
    if match is None:
        raise _impossible(text, "it names no device")
    if any(len(count) > len(str(MOST_DEVICES)) for count in match.group(1, 2) if count):
        raise _impossible(text, f"more than {MOST_DEVICES:,} devices")
    counts = [int(count) for count in match.group(1, 2) if count]
    if not counts and BEHIND.search(match[3]):
        raise _impossible(text, "numbers stand before the kind of device")
    if 0 in counts:
        raise _impossible(text, "a count of 0")
    if prod(counts) > MOST_DEVICES:
        raise _impossible(text, f"more than {MOST_DEVICES:,} devices")
    return _networked(_counted(text, counts, find_device(match[3]).name), text, match[4])


def _counted(text: str, counts: list[int], kind: str) -> Cluster:
    if len(counts) == 2:
        return Cluster(counts[0], counts[1], kind)
    devices, node = (counts or [1])[0], find_device(kind).node
    if devices <= node:
        return Cluster(1, devices, kind)
    if devices % node:
        raise _impossible(text, f"{devices} devices do not fill nodes of {node}, with which {kind} is sold")
    return Cluster(devices // node, node, kind)


def _networked(cluster: Cluster, text: str, network: str | None) -> Cluster:
    if network is None:
        return cluster
    match = NETWORK.fullmatch(network)
    if match is None or not 0 < float(match[1]) < MOST_GBITS:
        raise _impossible(text, f"{network!r} behind @ is no number of Gb/s below {MOST_GBITS:,}")
    name = match[2].lower() if match[2] else None
    if name is not None and name not in network_names():
        raise _impossible(text, f"{name!r} is none of the networks {', '.join(network_names())}")
    return replace(cluster, network_bytes_per_s=float(match[1]) * 1e9 / 8, network=name)


def _with_known_device(cluster: Cluster) -> Cluster:
    _ = cluster.device.name
    return cluster


def _impossible(text: str, found: str) -> UserError:
    return UserError(f"the cluster {text!r}", found, ACCEPTED)
