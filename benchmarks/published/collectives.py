"""Published times of collectives held against `evenly.hardware.network`.

    python -m benchmarks.published.collectives [--all]

Reads nccl_measured.csv beside this file; prints measured and predicted bus bandwidth of every row (with --all), the
error of each system, and the error over all rows of at least 1 MiB. Rows that say too little are named with the reason.
Errors are those of the predicted time: predicted / measured - 1.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

from evenly.comm.bench import bus_factor
from evenly.hardware.cluster_text import parse_cluster
from evenly.hardware.network import LinkedRanks, seconds

FILE = Path(__file__).with_name("nccl_measured.csv")
LEAST_BYTES = 2**20
LARGE_BYTES = 16 * 2**30  # where a source says "large"

# What the source means: the cluster, and how many ranks of a node take part (0: all).
SYSTEMS = {
    "A100-80 SXM x8": ("8xA100-80", 0),
    "H100 DGX x8": ("8xH100", 0),
    "H200 x32": ("4x8xH200@400efa", 0),
    "H200 x": ("8xH200", 0),
    "B200 x32": ("4x8xB200@400efa", 0),
    "B200 x": ("8xB200", 0),
    "MI300X x": ("8xMI300X", 0),
    "PCIe4": ("8xL40S", 0),
    "PCIe5": ("8xH100-PCIe", 0),
    "V100 NVLink": ("8xV100-32", 0),
    "A100 NVLink": ("8xA100-80", 0),
    "H100 NVLink": ("8xH100", 0),
    "B200 NVLink": ("18x4xGB200", 0),
    "100GbE TCP": ("4x8xA100-80@100tcp", 1),
    "200 Gb/s RDMA": ("4x8xA100-80@200", 1),
    "400 Gb/s RDMA": ("4x8xH100@400", 1),
    "DGX A100": ("4x8xA100-80@200", 0),
    "DGX H100": ("4x8xH100@400", 0),
}
# What a tool adds to every call: the H200 of all_reduce_bench.py beside the H100 of nccl-tests, at sizes below 256 KiB.
TOOLS_S = {"all_reduce_bench.py": 20e-6}
WITHOUT_IN_NETWORK = ("NVLS off", "NVLink ring")


@dataclass(frozen=True)
class Row:
    """One published measurement and its prediction, s."""

    system: str
    operation: str
    size_bytes: int
    bus_bandwidth: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the predicted time, as a fraction."""
        return self.predicted_s / self.measured_s - 1


def predict(row: dict[str, str]) -> Row | str:
    """The row with its prediction, or why there is none."""
    system, operation = row["system"], row["op"]
    known = next((SYSTEMS[name] for name in SYSTEMS if system.startswith(name)), None)
    if operation == "p2p":
        return "a copy between devices, which no collective library made"
    if known is None or not row["bytes"]:
        return "the source names neither devices nor sizes"
    cluster = parse_cluster(known[0])
    if any(words in system for words in WITHOUT_IN_NETWORK):
        cluster = replace(cluster, in_network=False)
    per_node = known[1] or min(int(row["gpus"] or cluster.domain), cluster.domain)
    ranks = int(row["gpus"] or per_node * cluster.size // cluster.domain)
    size = LARGE_BYTES if row["bytes"] == "large" else int(row["bytes"])
    bandwidth = float(row["busbw_GBps"]) * 1e9
    tool_s = next((TOOLS_S[tool] for tool in TOOLS_S if row["tool_notes"].startswith(tool)), 0.0)
    predicted_s = tool_s + seconds(operation, size, LinkedRanks(ranks, per_node), cluster)
    return Row(system, operation, size, bandwidth, bus_factor(operation, ranks) * size / bandwidth, predicted_s)


def read() -> Iterator[tuple[str, Row | str]]:
    """Every row of the file with its prediction, or why there is none."""
    with FILE.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield f"{row['system']}, {row['op']}", predict(row)


def in_words(name: str, rows: Sequence[Row]) -> str:
    """Number of rows, median and 90th percentile of the error's size, and its bias."""
    sizes = sorted(abs(row.error) for row in rows)
    p90 = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    bias = median(row.error for row in rows)
    return f"{name[:64]:64s} {len(rows):4d} {median(sizes):7.1%} {p90:7.1%} {bias:+7.1%}"


def main() -> None:
    """Prints."""
    found = list(read())
    rows = [row for _, row in found if isinstance(row, Row)]
    if "--all" in sys.argv:
        for row in rows:
            sides = [row.bus_bandwidth, row.bus_bandwidth * row.measured_s / row.predicted_s]
            print(f"{row.system[:48]:48s} {row.operation:14s} {row.size_bytes:12d} B", end="")
            print(f"{sides[0] / 1e9:8.1f} {sides[1] / 1e9:8.1f} GB/s {row.error:+7.1%}")
    large = [row for row in rows if row.size_bytes >= LEAST_BYTES]
    print(f"{'rows of at least 1 MiB':64s} rows  median     p90    bias")
    for system in dict.fromkeys(row.system for row in large):
        print(in_words(system, [row for row in large if row.system == system]))
    print(in_words("all", large))
    for name, reason in found:
        if isinstance(reason, str):
            print(f"skipped: {name}: {reason}")


if __name__ == "__main__":
    main()
