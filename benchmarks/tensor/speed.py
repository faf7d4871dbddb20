"""Step time at tensor=2 on 2 ranks over gloo: `evenly` beside layers written by hand and beside DTensors.

python benchmarks/tensor/speed.py                 T1 and T2, every contender; about six minutes
python benchmarks/tensor/speed.py T2 --only megatron,dtensor,single --rounds 3        see README.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))

import contenders
from bench import Series, leave_on_sigterm, median_interval, take_turns, whole_run
from contenders import EVENLY, PYTHON, TORCHRUN_STATIC, Contender
from results import environment, save

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "tensor.json"
BASELINE, REFERENCE, YARDSTICK, TOLERANCE = "megatron", "single", "dtensor", 1e-4
BLOCKS = {"T1": 4, "T2": 2}
# Loopback alone; and what `evenly` tells the allocator, told to all (evenly/launcher/allocator.py).
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}


def contender(launcher: tuple[str, ...], kind: str, plan: str = "", ranks: int = 2) -> Contender:
    env = {"GLOO_SOCKET_IFNAME": "lo", "EVENLY_PLAN": plan, **MALLOC}
    return Contender(launcher, str(HERE / "train.py"), (kind,), ranks, env=env)


CONTENDERS = {
    "megatron": contender(TORCHRUN_STATIC, "megatron"),
    "dtensor": contender(TORCHRUN_STATIC, "dtensor"),
    "evenly": contender(EVENLY, "evenly", "tensor=2"),
    "single": contender(PYTHON, "single", ranks=1),
}
contenders.CONTENDERS.update(CONTENDERS)


def measure(model: str, args: argparse.Namespace) -> dict[str, dict]:
    """Rows by contender. Collectives are counted first, in runs of their own."""
    recorder = {"TORCH_FR_BUFFER_SIZE": "4000"}
    counted = {name: whole_run(name, model, 3, "tensor_count", env=recorder) for name in args.names}
    for name in [name for name in args.names if "error" in counted[name]]:
        print(f"{name} failed: {counted.pop(name)['error']}", flush=True)
    series = take_turns([*counted], model, args, "tensor")
    if missing := {BASELINE, REFERENCE} - series.keys():
        raise SystemExit(f"without {' and '.join(missing)} there is nothing to compare with")
    rows = {name: {**row(name, series), "collectives": counted[name]["collectives"]} for name in series}
    for name in rows.keys() - {BASELINE, REFERENCE, YARDSTICK} if YARDSTICK in rows else ():
        rows[name]["overhead_ratio"] = rows[name]["overhead_s"] / rows[YARDSTICK]["overhead_s"]
    return rows


def row(name: str, series: dict[str, Series]) -> dict:
    mine, base, reference = series[name], series[BASELINE], series[REFERENCE]
    pairs = list(zip(mine.seconds, base.seconds, strict=True))
    ratios, losses = [a / b for a, b in pairs], zip(mine.result["losses"], reference.result["losses"], strict=True)
    low, high = median_interval(ratios)
    return {
        "step_s": statistics.median(mine.seconds), "steps": len(ratios),
        "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high,
        "overhead_s": statistics.median([a - b for a, b in pairs]),
        "loss_diff": max(abs(a - b) for a, b in losses),
        "stalled_share": 1 - sum(mine.seconds) / sum(mine.result["step_times"][mine.warm :]),
    }  # fmt: skip


def count_per_block(loads: dict[str, dict[str, dict]]) -> None:
    """The models differ only in sizes and in their number of blocks."""
    for name in loads["T1"].keys() & loads["T2"].keys() - {REFERENCE}:
        sums = [{part: sum(ops.values()) for part, ops in loads[m][name]["collectives"].items()} for m in BLOCKS]
        blocks = {part: (sums[0][part] - sums[1][part]) / (BLOCKS["T1"] - BLOCKS["T2"]) for part in sums[0]}
        loads["T1"][name]["collectives_per_block"] = loads["T2"][name]["collectives_per_block"] = blocks


def print_rows(model: str, rows: dict[str, dict]) -> None:
    print(f"\n{model:15} ms/step  ratio to {BASELINE:12} overhead   of {YARDSTICK}'s    loss  collectives, of a block")
    for name, r in rows.items():
        of = f"{r['overhead_ratio']:.2f}" if "overhead_ratio" in r else ""
        print(
            f"{name:15} {r['step_s'] * 1e3:7.2f}  {r['ratio']:.3f} [{r['ratio_low']:.3f}..{r['ratio_high']:.3f}]"
            f" {r['overhead_s'] * 1e3:+8.2f} ms {of:>12} {r['loss_diff']:7.0e}  {r['collectives']}"
            f" {r.get('collectives_per_block', '')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="T1|T2")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*CONTENDERS])
    for option, default in (("--warm", 4), ("--turn", 4), ("--rounds", 10)):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    if unknown := [*set(args.models) - BLOCKS.keys(), *set(args.only) - CONTENDERS.keys()]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join([*BLOCKS, *CONTENDERS])}")
    args.names = [name for name in CONTENDERS if name in {*args.only, BASELINE, REFERENCE}]
    leave_on_sigterm()
    environment()
    loads = {model: measure(model, args) for model in args.models or BLOCKS}
    if loads.keys() == BLOCKS.keys():
        count_per_block(loads)
    for model, rows in loads.items():
        print_rows(model, rows)
        save("speed", model, rows, RESULTS)
    if wrong := {name for rows in loads.values() for name, r in rows.items() if not r["loss_diff"] <= TOLERANCE}:
        raise SystemExit(f"another loss than {REFERENCE}: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
