"""A run on two nodes of a local Ray, one of which is lost in the middle: python lost_node.py FOLDER.

Both nodes are processes of this machine, on loopback addresses of their own. Writes what the run returned, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import evenly
import evenly.ray
from evenly.checkpoint.folder import CheckpointFolder

HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for a name of the machine's own address
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
WAITS_AT = 5  # step


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> evenly.Loss:
    x, y = batch
    return evenly.Loss((model(x) - y).square().sum() * 1.5, 0.5 * len(x))


def wait_for_the_end(waits: Path, run: evenly.Run, report: evenly.StepReport) -> None:
    """The rank on the other node stands still in one step until it is killed."""
    if run.world.size == 2 and report.step == WAITS_AT and ray.util.get_node_ip_address() == OTHER:
        waits.touch()
        time.sleep(600)


def job(waits: Path | None = None) -> evenly.Job:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, generator=draw), torch.randn(3, generator=draw)) for _ in range(44)]
    return evenly.Job(
        model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.1), nn.Tanh(), nn.Linear(7, 3)),
        loss=loss,
        data=data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        global_batch=11,
        microbatch=2,
        steps=9,
        precision="float64",
        save_every=2,
        on_step=() if waits is None else partial(wait_for_the_end, waits),
    )


def main(folder: Path) -> None:
    sessions = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, since its sockets are in it
    os.environ["RAY_TMPDIR"] = sessions
    Path(sessions, "ray").mkdir()  # where Ray notes the address of the cluster
    plain = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True, "num_cpus": 1}
    plain |= {"temp_dir": sessions, "_system_config": SOON}
    cluster = Cluster(initialize_head=True, head_node_args={**plain, "node_ip_address": HEAD})
    try:
        other = cluster.add_node(num_cpus=1, node_ip_address=OTHER)
        ray.init(address=cluster.address, _node_ip_address=HEAD, log_to_driver=False)
        threading.Thread(target=lose, args=(cluster, other, folder), daemon=True).start()
        made = partial(job, folder / "waits")
        summary = evenly.ray.run(made, workers=(1, 2), plan="zero3", out=folder / "out", failures=2)
        (folder / "summary.json").write_text(json.dumps(asdict(summary)))
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(sessions, ignore_errors=True)


def lose(cluster: Cluster, node: object, folder: Path) -> None:
    while not (folder / "waits").exists() or WAITS_AT - 1 not in CheckpointFolder(folder / "out").steps():
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
