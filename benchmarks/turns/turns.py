"""Two versions of evenly in one run, step by step in turns: whether a change made a step slower.

    git worktree add ../old COMMIT
    python benchmarks/turns/turns.py ../old [W1 W2 W3 W4 T2 growing W1-bitwise W4-bitwise] [--rounds 10]

W1 to W4 are those of peers/ under `ddp`, also with `exact=bitwise`, T2 that of tensor/ under `tensor=2`, and
growing that of pipeline/uneven.py under `pipeline=2`. Each version is started by the scripts of its own checkout: the
job of W3 has `linear_cross_entropy` where the version has it. The ratio is that of the new version's step to the old
one's, the median over pairs of the same step. The peak is that of a rank's tensors in a run of two steps, apart.
Kept in benchmarks/results/turns.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))

import contenders
from bench import leave_on_sigterm, median_interval, take_turns, whole_run
from contenders import EVENLY, Contender
from results import environment, save

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "turns.json"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
PEERS = "benchmarks/peers/runners/evenly_.py"
CONTENDERS = {  # scripts in a checkout
    "W1": Contender(EVENLY, PEERS),
    "W4": Contender(EVENLY, PEERS),
    "W2": Contender(EVENLY, PEERS),
    "W3": Contender(EVENLY, PEERS),
    "T2": Contender(EVENLY, "benchmarks/tensor/train.py", ("evenly",), env={"EVENLY_PLAN": "tensor=2"}),
    "growing": Contender(EVENLY, "benchmarks/turns/growing.py"),
    **{f"{w}-bitwise": Contender(EVENLY, PEERS, env={"EVENLY_EXACT": "bitwise"}) for w in ("W1", "W4")},
}


def measure(workload: str, args: argparse.Namespace) -> dict[str, float]:
    """The new version's step beside the old one's, and its peak."""
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    for name, tree in trees.items():
        contender = CONTENDERS[workload]
        env = {**contender.env, **LOOPBACK, "PYTHONPATH": str(tree)}
        contenders.CONTENDERS[name] = replace(contender, script=str(tree / contender.script), env=env)
    loads = [os.getloadavg()[0]]
    model = workload.removesuffix("-bitwise")
    series = take_turns([*trees], model, args, "turns")
    loads.append(os.getloadavg()[0])
    old, new = series["old"].seconds, series["new"].seconds
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    low, high = median_interval(ratios)
    return {
        "old_s": statistics.median(old), "new_s": statistics.median(new), "steps": len(ratios),
        "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high,
        "load_before": loads[0], "load_after": loads[1],
        **{f"{name}_peak_bytes": peak_bytes(name, model) for name in trees},
    }  # fmt: skip


def peak_bytes(name: str, workload: str) -> int:
    """Most bytes that tensors of a rank take at once in two steps."""
    return max(whole_run(name, workload, 2, "turns_memory", env={"PEER_MEMPROF": "1"})["tensor_peak_per_rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("workloads", nargs="*", metavar="|".join(CONTENDERS))
    parser.add_argument("--new", type=Path, default=HERE.parents[1], help="another checkout than this one")
    for option, default in (("--warm", 4), ("--turn", 4), ("--rounds", 10)):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    if unknown := {*args.workloads} - CONTENDERS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(CONTENDERS)}")
    leave_on_sigterm()
    environment()
    for workload in args.workloads or CONTENDERS:
        row = measure(workload, args)
        print(
            f"{workload:8} old {row['old_s'] * 1e3:8.2f} ms  new {row['new_s'] * 1e3:8.2f} ms"
            f"  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}..{row['ratio_high']:.3f}]  {row['steps']} steps"
            f"  peak {row['old_peak_bytes'] / 2**20:.0f} and {row['new_peak_bytes'] / 2**20:.0f} MiB,"
            f" {row['new_peak_bytes'] / row['old_peak_bytes']:.2f}"
            f"  load {row['load_before']:.1f} to {row['load_after']:.1f}",
            flush=True,
        )
        save("turns", workload, {"new": row}, RESULTS)


if __name__ == "__main__":
    main()
