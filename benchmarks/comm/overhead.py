"""What evenly's all_reduce costs beside torch's own, and what recording and checking add.

    python benchmarks/comm/overhead.py        2 ranks on this machine; about two minutes

In one run the four take turns, operation by operation, on the same tensor: a bare `torch.distributed.all_reduce`,
evenly's without a recorder, with one, and in checking mode. A ratio is the median over pairs of neighbouring ones;
the interval is where it lies in 95 of 100 cases (sign test). Kept in benchmarks/results/comm.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from evenly.comm.connect import connect, disconnect
from evenly.comm.groups import Group
from evenly.comm.operations import all_reduce, barrier
from evenly.launcher.agent import Launch, start_ranks
from evenly.launcher.environment import find_here
from evenly.observe.recorder import Recorder

RESULTS = Path(__file__).parents[1] / "results" / "comm.json"
ROUNDS = {4: 2000, 64 << 10: 1000, 1 << 20: 300, 16 << 20: 60}


def measure() -> dict[str, dict[str, list[float]]]:
    """Seconds of every operation by size and kind, on this rank."""
    world = connect(find_here())
    every: Group = world.group("data")
    every.recorder = None
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "record", world.rank)
        recorded, checked = Group.world("data", recorder=recorder), Group.world("data", checked=True)
        kinds = {
            "torch": lambda tensor: dist.all_reduce(tensor),
            "plain": lambda tensor: all_reduce(tensor, every),
            "recorded": lambda tensor: all_reduce(tensor, recorded),
            "checked": lambda tensor: all_reduce(tensor, checked),
        }
        seconds = {}
        for size, rounds in ROUNDS.items():
            tensor = torch.zeros(size // 4)
            times = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind, act in kinds.items():
                    barrier(every)
                    began_s = time.perf_counter()
                    act(tensor)
                    times[kind].append(time.perf_counter() - began_s)
            seconds[str(size)] = times
        recorder.close()
    disconnect(world)
    return seconds


def ratio(mine: list[float], other: list[float]) -> tuple[float, float, float]:
    """Median of the paired ratios, and the interval of the sign test."""
    ratios, half = sorted(a / b for a, b in zip(mine, other, strict=True)), 0.98 * len(mine) ** 0.5
    low, high = int(len(ratios) / 2 - half), min(int(len(ratios) / 2 + half), len(ratios) - 1)
    return statistics.median(ratios), ratios[max(low, 0)], ratios[high]


def main() -> None:
    seconds = start_ranks(measure, (), Launch(devices=2))[0]
    rows = {}
    for size, times in seconds.items():
        rows[size] = {"torch_s": statistics.median(times["torch"])}
        for kind, other in (("plain", "torch"), ("recorded", "plain"), ("checked", "plain")):
            middle, low, high = ratio(times[kind], times[other])
            added_s = statistics.median(times[kind]) - statistics.median(times[other])
            rows[size][f"{kind}/{other}"] = {"ratio": middle, "low": low, "high": high, "added_s": added_s}
            print(
                f"{size:>9} B  {kind:8} / {other:5}  {middle:.3f} [{low:.3f}..{high:.3f}]  {added_s * 1e6:+.1f} us"
                f"  (torch {rows[size]['torch_s'] * 1e6:.0f} us)"
            )
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count(), "ranks": 2}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    RESULTS.write_text(json.dumps({"date": date, "machine": machine, "all_reduce": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
