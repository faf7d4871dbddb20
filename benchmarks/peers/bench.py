"""Start contenders, interleave them, compare them.

  bench.py speed  W1 [--only a,b] [--warm 2 --turn 3 --rounds 6]   paired throughput and memory
  bench.py equal  W1s W2s ... [--only a,b]                         against the single process
  bench.py launch W4 [--rounds 3]                                  launch to first step
  bench.py memory W3                                               peak CPU tensor bytes (profiler)
  bench.py table                                                   print what results/peers.json holds

Speed: all contenders of a group are alive in one run and take turns, A B C A B C ...: each waits at
a fifo after its turn, so import and warm-up are paid once and every round compares neighbours in
time.  Every group holds the baseline.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from contenders import BASELINE, CONTENDERS, GROUPS, groups, pick
from results import environment, print_tables, save
from runs import Run, Turns
from workloads import WORKLOADS

QUIET_SHARE = 0.1  # of the machine taken by others: rounds up to this count in any case
LEAST_ROUNDS = 5  # and never fewer than the quietest so many


# ---------------------------------------------------------------- the machine
def busy_seconds() -> float:
    """CPU seconds spent by everyone on this machine since boot."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def await_quiet(limit_s: float = 15, share: float = 0.15) -> None:
    """Until the others leave the cores alone for a moment (all contenders are paused), or the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = busy_seconds()
        time.sleep(0.3)
        if (busy_seconds() - before) / 0.3 < share * os.cpu_count():
            return


# ---------------------------------------------------------------- speed
@dataclass(frozen=True)
class Series:
    """What one contender did in its turns.

    result: as the recorder wrote it. busy: CPU seconds of the whole machine during each turn.
    warm:   steps before the first turn. turn: steps of one.
    """

    result: dict
    busy: list[float]
    warm: int
    turn: int

    def _sums(self, field: str) -> list[float]:
        """Of a field that has one value per step: its sum over each turn."""
        values = self.result[field][self.warm :]
        return [sum(values[k * self.turn : (k + 1) * self.turn]) for k in range(len(self.busy))]

    def rates(self) -> list[float]:
        """Real tokens (samples) per second of each turn."""
        return [
            tokens / seconds
            for tokens, seconds in zip(self._sums("tokens_or_samples"), self._sums("step_times"), strict=True)
        ]

    def foreign(self) -> list[float]:
        """Share of the machine that others took during each turn; the last also holds our shutdown."""
        turns = zip(self.busy, self._sums("cpu_times"), self._sums("step_times"), strict=True)
        shares = [(busy - mine) / (seconds * os.cpu_count()) for busy, mine, seconds in turns]
        *before, last = shares
        return [*before, 0.0 if last < 0 else min(last, max(before, default=last))]

    def cpu_per_token(self) -> float:
        """CPU seconds of all ranks and threads: neighbours on the machine hardly move it."""
        return sum(self.result["cpu_times"][self.warm :]) / sum(self.result["tokens_or_samples"][self.warm :])


def take_turns(names: list[str], workload: str, args: argparse.Namespace, tag: str) -> dict[str, Series]:
    """Run the group to its end; those that fail are reported and left out."""
    with ExitStack() as stack:
        runs: dict[str, Turns] = {}
        for name in names:  # one after another: each imports and warms up alone
            turns = Turns(name, workload, tag, warm=args.warm, turn=args.turn, rounds=args.rounds)
            runs[name] = stack.enter_context(turns)
            if not turns.warm_up():
                report_failure(runs.pop(name).run)
        busy: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, turns in list(runs.items()):
                await_quiet()
                before = busy_seconds()
                if turns.take_turn():
                    busy[name].append(busy_seconds() - before)
                else:
                    report_failure(runs.pop(name).run)
        return {name: Series(t.run.result(), busy[name], args.warm, args.turn) for name, t in runs.items()}


def report_failure(run: Run) -> None:
    result = run.result(5)
    print(run.name, "failed:", result.get("error", "did not come to its end"), flush=True)


def quiet_rounds(disturbed: list[float]) -> list[int]:
    """The rounds that count, quietest first."""
    order = sorted(range(len(disturbed)), key=disturbed.__getitem__)
    return [k for i, k in enumerate(order) if i < LEAST_ROUNDS or disturbed[k] < QUIET_SHARE]


def paired(mine: Series, other: Series) -> tuple[list[int], list[float], list[float]]:
    """Rounds that count; in each of them the ratio of the rates and the share that others took."""
    disturbed = [max(shares) for shares in zip(mine.foreign(), other.foreign(), strict=True)]
    rounds, rates, base = quiet_rounds(disturbed), mine.rates(), other.rates()
    return rounds, [rates[k] / base[k] for k in rounds], [disturbed[k] for k in rounds]


def speed_row(name: str, group: dict[str, Series]) -> dict:
    mine, base = group[name], group[BASELINE]
    rounds, ratios, disturbed = paired(mine, base)
    result, rates = mine.result, mine.rates()
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "cpu_ratio": mine.cpu_per_token() / base.cpu_per_token(),
        "against": {n: statistics.median(paired(mine, s)[1]) for n, s in group.items() if n != name},
        "ratios": ratios,
        "foreign_share": disturbed,
        "rate": statistics.median(rates[k] for k in rounds),
        "rounds": len(rounds),
        "turn": mine.turn,
        "step_median": statistics.median(result["step_times"][mine.warm :]),
        "peak_rss_per_rank": result["peak_rss_per_rank"],
        "rss_after_imports": result["rss_after_imports"],
        "time_to_first_step": result["time_to_first_step"],
        "first_step": result["step_times"][0],
        "padded_share": 1 - sum(result["tokens_or_samples"]) / sum(result["padded"]),
        "losses": result["losses"],
        "mean_of_means": result["mean_of_means"],
        "checksum": result["final_param_checksum"],
    }


def print_speed(workload: str, name: str, row: dict) -> None:
    print(
        f"{workload} {name:18s} x{row['ratio']:.3f} [{row['ratio_min']:.2f}..{row['ratio_max']:.2f}]"
        f" cpu x{row['cpu_ratio']:.3f} rate {row['rate']:9.1f}/s"
        f" ({row['rounds']} rounds, others took {statistics.median(row['foreign_share']):.0%})"
        f" rss {[size >> 20 for size in row['peak_rss_per_rank']]} MiB"
        f" first {row['time_to_first_step']:.1f}s",
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
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            r = whole_run(name, workload, 2, "launch")
            if "error" in r:
                print(name, "failed:", r["error"], flush=True)
            else:
                times[name].append((r["import_seconds"], r["time_to_first_step"], r["step_times"][0]))
    fields = ("import", "first_step", "of_which_after_import")
    medians = {name: map(statistics.median, zip(*t, strict=True)) for name, t in times.items() if t}
    rows = {name: dict(zip(fields, values, strict=True)) for name, values in medians.items()}
    for name, row in rows.items():
        if BASELINE in rows:
            row["ratio"] = row["first_step"] / rows[BASELINE]["first_step"]
        print(f"{workload} {name:18s} import {row['import']:.2f}s  to first step {row['first_step']:.2f}s")
    save("launch", workload, rows)


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
