"""Start contenders, interleave them, compare them.

  bench.py speed  W1 [--only a,b] [--warm 2 --turn 3 --rounds 6]   paired throughput and memory
  bench.py equal  W1s W2s ... [--only a,b]                         against the single process
  bench.py launch W4 [--rounds 3]                                  launch to first step
  bench.py memory W3                                               peak CPU tensor bytes (profiler)
  bench.py table                                                   print what results/peers.json holds

All times are of the machine running: what its host took from it as a whole is left out (stalls.py).

Speed: all contenders of a group are alive in one run and take turns, A B C A B C ...: each waits at
a fifo after its turn, so import and warm-up are paid once, and every step is compared with the same
step of the others, a moment apart.  Every group holds the baseline.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from contenders import BASELINE, CONTENDERS, GROUPS, groups, pick
from results import environment, print_tables, save
from runs import Run, Turns
from stalls import Stalls
from workloads import WORKLOADS


# ---------------------------------------------------------------- speed
@dataclass(frozen=True)
class Series:
    """What one contender did in its turns.

    result: as the recorder wrote it. warm: steps before the first turn. stalls: of the machine meanwhile.
    """

    result: dict
    warm: int
    stalls: Stalls

    @cached_property
    def seconds(self) -> list[float]:
        """Of each step that counts, stalls left out."""
        steps = zip(self.result["step_begins"], self.result["step_times"], strict=True)
        return [self.stalls.ran(begin, seconds) for begin, seconds in steps][self.warm :]

    def rates(self) -> list[float]:
        """Real tokens (samples) per second of each step."""
        tokens = self.result["tokens_or_samples"][self.warm :]
        return [count / seconds for count, seconds in zip(tokens, self.seconds, strict=True)]


def take_turns(names: list[str], workload: str, args: argparse.Namespace, tag: str) -> dict[str, Series]:
    """Run the group to its end; those that fail are reported and left out."""
    with ExitStack() as stack:
        stalls = stack.enter_context(Stalls())
        runs: dict[str, Turns] = {}
        for name in names:  # one after another: each imports and warms up alone
            turns = Turns(name, workload, tag, warm=args.warm, turn=args.turn, rounds=args.rounds)
            runs[name] = stack.enter_context(turns)
            if not turns.warm_up():
                report_failure(runs.pop(name).run)
        for _ in range(args.rounds):
            for name, turns in list(runs.items()):
                if not turns.take_turn():
                    report_failure(runs.pop(name).run)
        results = {name: turns.run.result() for name, turns in runs.items()}
    return {name: Series(result, args.warm, stalls) for name, result in results.items()}


def report_failure(run: Run) -> None:
    result = run.result(5)
    print(run.name, "failed:", result.get("error", "did not come to its end"), flush=True)


def paired(mine: Series, other: Series) -> list[float]:
    """Ratio of the rates in every step; all contenders train on the same samples in the same step."""
    return [a / b for a, b in zip(mine.rates(), other.rates(), strict=True)]


def median_interval(values: list[float]) -> tuple[float, float]:
    """Between these the median lies in 95 of 100 cases, whatever the distribution: two of the ordered values.

    Their ranks are those of the sign test, by its normal approximation.
    """
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(values) / 2 - half), int(len(values) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def speed_row(name: str, group: dict[str, Series]) -> dict:
    mine, base = group[name], group[BASELINE]
    ratios, result = paired(mine, base), mine.result
    low, high = median_interval(ratios)
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "against": {n: statistics.median(paired(mine, s)) for n, s in group.items() if n != name},
        "rate": statistics.median(mine.rates()),
        "steps": len(ratios),
        "step_median": statistics.median(mine.seconds),
        "stalled_share": 1 - sum(mine.seconds) / sum(result["step_times"][mine.warm :]),
        "stalls_known": mine.stalls.known,
        "peak_rss_per_rank": result["peak_rss_per_rank"],
        "rss_after_imports": result["rss_after_imports"],
        "padded_share": 1 - sum(result["tokens_or_samples"]) / sum(result["padded"]),
        "checksum": result["final_param_checksum"],
    }


def print_speed(workload: str, name: str, row: dict) -> None:
    print(
        f"{workload} {name:18s} x{row['ratio']:.3f} [{row['ratio_low']:.3f}..{row['ratio_high']:.3f}]"
        f" rate {row['rate']:9.1f}/s step {row['step_median'] * 1e3:8.2f} ms"
        f" ({row['steps']} steps, machine stood still {row['stalled_share']:.0%})"
        f" rss {[size >> 20 for size in row['peak_rss_per_rank']]} MiB",
        flush=True,
    )


def speed(workload: str, args: argparse.Namespace) -> None:
    for number, names in enumerate(groups(workload, args.only)):
        if len(names) < 2:
            continue
        series = take_turns(names, workload, args, f"speed{number}")
        if BASELINE not in series:
            print(f"{workload} group {number}: without {BASELINE} there is nothing to compare with", flush=True)
            continue
        rows = {row_name(name, number): speed_row(name, series) for name in series}
        for name, row in rows.items():
            print_speed(workload, name, row)
        save("speed", workload, rows)


def row_name(name: str, group: int) -> str:
    """The baseline is measured in every group: only the first keeps the plain name."""
    return name if group == 0 or name not in GROUPS[0] else f"{name}#{group}"


# ---------------------------------------------------------------- equality
def difference(mine: dict, reference: dict) -> dict:
    """How far a run is from the single process: final parameters, losses, samples, evaluation."""
    import torch

    a, b = torch.load(reference["final_params"]), torch.load(mine["final_params"])
    losses = list(zip(mine["losses"], reference["losses"], strict=False))  # as many as the shorter has
    evaluated = mine["eval"] and reference["eval"]
    return {
        "param": max((a[k] - b[k].to(a[k].dtype)).abs().max().item() for k in a),
        "loss": max(abs(x - y) for x, y in losses),
        "first_reported_loss": mine["mean_of_means"][0] - reference["losses"][0],
        "steps": len(mine["losses"]),
        "reference_steps": len(reference["losses"]),
        "samples_seen": sum(mine["samples"]),
        "reference_samples": sum(reference["samples"]),
        "samples_last_step": mine["samples"][-1] if mine["samples"] else 0,
        "never_applied": mine["samples_never_applied"],
        "eval_samples": (mine["eval"] or {}).get("samples"),
        "eval_error": mine["eval"]["loss"] - reference["eval"]["loss"] if evaluated else None,
    }


def whole_run(name: str, workload: str, steps: int, tag: str, **options) -> dict:
    with Run(name, workload, steps, tag, **options) as run:
        return run.result()


def equal(workload: str, args: argparse.Namespace) -> None:
    steps = 4 if WORKLOADS[workload].remainder else args.steps
    options = {"arguments": ["--eval"]}
    references: dict[str, dict] = {}

    def row(name: str, form: str) -> dict:
        if form not in references:
            references[form] = whole_run("single1", form, steps, "equal", **options)
        mine = whole_run(name, form, steps, "equal", **options)
        failed = references[form] if "error" in references[form] else mine
        judged = {"error": failed["error"]} if "error" in failed else difference(mine, references[form])
        return judged if form == workload else {**judged, "dtype": "float32"}

    names = [name for name in pick(workload, args.only) if not name.startswith("single")]
    forms = {name: workload if CONTENDERS[name].float64 else float32_form(workload) for name in names}
    rows = {name: (name, form) for name, form in forms.items()}
    if set(forms.values()) != {workload}:
        rows["ddp_float32"] = ("ddp", float32_form(workload))  # the noise floor of float32
    for key, (name, form) in rows.items():
        judged = row(name, form)
        save("equal", workload, {key: judged})
        shown = {k: (f"{v:.2e}" if isinstance(v, float) else v) for k, v in judged.items()}
        print(workload, key, shown, flush=True)


def float32_form(workload: str) -> str:
    """The name of the same workload in float32."""
    return workload + "f" if workload + "f" in WORKLOADS else workload


# ---------------------------------------------------------------- launch and memory
def launch(workload: str, args: argparse.Namespace) -> None:
    names = pick(workload, args.only)
    runs: dict[str, list[dict]] = {name: [] for name in names}
    with Stalls() as stalls:
        for _ in range(args.rounds):
            for name in names:
                result = whole_run(name, workload, 2, "launch")
                if "error" in result:
                    print(name, "failed:", result["error"], flush=True)
                else:
                    runs[name].append(result)
    rows = {name: launch_row(results, stalls) for name, results in runs.items() if results}
    for name, row in rows.items():
        if BASELINE in rows:
            row["ratio"] = row["first_step"] / rows[BASELINE]["first_step"]
        print(
            f"{workload} {name:18s} import {row['import']:.2f}s  to first step {row['first_step']:.2f}s"
            f" [{min(row['first_steps']):.2f}..{max(row['first_steps']):.2f}]"
            + (f" x{row['ratio']:.3f}" if "ratio" in row else "")
        )
    save("launch", workload, rows)


def launch_row(results: list[dict], stalls: Stalls) -> dict:
    """Medians over the runs of one contender, s."""
    shift = time.perf_counter() - time.time()  # of the clocks; the recorder notes starts of processes since the epoch
    imports = [stalls.ran(r["process_start"] + shift, r["import_seconds"]) for r in results]
    first_steps = [stalls.ran(r["launch"] + shift, r["time_to_first_step"]) for r in results]
    steps = [stalls.ran(r["step_begins"][0], r["step_times"][0]) for r in results]
    return {
        "import": statistics.median(imports),
        "first_step": statistics.median(first_steps),
        "of_which_after_import": statistics.median(steps),
        "first_steps": first_steps,
    }


def memory(workload: str, args: argparse.Namespace) -> None:
    rows = {}
    for name in pick(workload, args.only):
        r = whole_run(name, workload, 2, "memory", env={"PEER_MEMPROF": "1"})
        if "error" in r:
            print(name, "failed:", r["error"], flush=True)
            continue
        rows[name] = {"tensor_peak_per_rank": r["tensor_peak_per_rank"]}
        peaks = [peak / 2**20 for peak in r["tensor_peak_per_rank"]]
        print(f"{workload} {name:18s} tensor peak {peaks} MiB", flush=True)
    save("memory", workload, rows)


# ---------------------------------------------------------------- command line
def names_of(text: str) -> list[str]:
    """Names of contenders, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(CONTENDERS)}")
    return names


def leave_on_sigterm() -> None:
    """Let a SIGTERM unwind the stack, so that the runs end with this process; a second changes nothing."""

    def leave(signum: int, _frame: object) -> None:
        signal.signal(signum, signal.SIG_IGN)
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def main() -> None:
    kinds = {"speed": speed, "equal": equal, "launch": launch, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*kinds, "table"])
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--only", type=names_of)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--turn", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if args.kind == "table":
        print_tables()
        return
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"workload {', '.join(unknown)}: not among {', '.join(WORKLOADS)}")
    leave_on_sigterm()
    environment()
    for workload in args.workloads:
        kinds[args.kind](workload, args)


if __name__ == "__main__":
    main()
