"""What happens when a rank dies or hangs.

faults.py kill [--only a,b] [--rank 1] [--step 10]     SIGKILL one rank after a step
faults.py recover                                      the same under torchrun --max-restarts=1
faults.py stuck [--only a,b] [--wait 2100]             one rank sleeps forever; all contenders at once
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench import leave_on_sigterm, names_of
from contenders import TORCHRUN, TORCHRUN_STATIC
from results import environment, save
from runs import Run

WORKLOAD = "W4"
STEPS = 40
START_TIMEOUT_S = 180.0
CONTENDERS = ["ddp", "evenly", "fsdp2", "accelerate", "fabric", "lightning", "hf", "zero0", "zero2", "zero3"]
MESSAGE = re.compile(
    r"Error|error|Connection|closed|reset|SIG|signal|Signal|exit|kill|terminat|timed? ?out|Timed", re.I
)
# What the recorders of all ranks write down after every step: time, steps done, process.
Beat = tuple[float, int, int]


def beats(out: Path, rank: int) -> list[Beat]:
    file = out.with_suffix(f".beat{rank}")
    lines = file.read_text().splitlines() if file.exists() else []
    return [(float(at), int(step), int(pid)) for at, step, pid in map(str.split, lines)]


def fault_time(run: Run) -> float | None:
    """When the fault fired; None if it has not."""
    flag = run.out.with_suffix(".fault")
    text = flag.read_text() if flag.exists() else ""
    return float(text) if text else None


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; of no process: those of a dead one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ["X"]


def running(pid: int) -> bool:
    return stat(pid)[0] not in "ZX"


def cpu_seconds(pid: int) -> float | None:
    ticks = stat(pid)[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") if ticks else None


def messages(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line.strip()[:300] for line in lines if MESSAGE.search(line)][:25]


def await_fault(run: Run) -> float | None:
    """When the fault fired; None if the run ended or stood still before."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (at := fault_time(run)) is None and run.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    return at


def await_end(run: Run, survivor: int, at: float, limit_s: float) -> dict[str, float | None]:
    """Seconds from the fault until survivor and launcher are gone; None for what outlasts the limit."""
    gone: dict[str, float | None] = {"survivor": None, "launcher": None}
    while time.time() - at < limit_s and None in gone.values():
        if gone["survivor"] is None and not running(survivor):
            gone["survivor"] = time.time() - at
        if gone["launcher"] is None and not run.alive():
            gone["launcher"] = time.time() - at
        time.sleep(0.02)
    return gone


def watch(run: Run, rank: int, limit_s: float) -> dict:
    """What became of the other rank and of the launcher after the fault of `rank`."""
    at = await_fault(run)
    seen = [beats(run.out, r) for r in (0, 1)]
    if at is None or not all(seen):
        run.kill()
        return {"error": "the fault did not fire", "messages": messages(run.log)}
    pids = [of_rank[-1][2] for of_rank in seen]
    survivor = 1 - rank
    gone = await_end(run, pids[survivor], at, limit_s)
    code, cpu = run.process.poll(), cpu_seconds(pids[survivor])
    time.sleep(3)
    left = [pid for pid in pids if running(pid)]
    run.kill()
    return {
        "survivor_gone_after": gone["survivor"],
        "launcher_gone_after": gone["launcher"],
        "exit_code": code,
        "left_running": len(left),
        "survivor_cpu_seconds": cpu,
        "last_step_of_survivor": beats(run.out, survivor)[-1][1],
        "messages": messages(run.log),
    }


def recover(name: str, launcher: Sequence[str], env: dict[str, str], step: int, limit_s: float = 35) -> dict:
    """A rank is killed once under an elastic launcher: when is there a step again, and new work?"""
    with Run(name, WORKLOAD, STEPS, "fault_recover", env=env, launcher=launcher) as run:
        hung = False
        try:
            run.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung = True
        run.kill()
        at, seen = fault_time(run), beats(run.out, 0)
        if at is None or not seen:
            return {"error": "the fault did not fire", "messages": messages(run.log)}
        errors = [message for message in messages(run.log) if "RuntimeError" in message]
        result = {"hung": hung, "exit_code": run.process.wait(), "last_error": errors[-1] if errors else None}
        return result | after_restart(seen, at, step)


def after_restart(seen: list[Beat], at: float, step: int) -> dict:
    """Steps lost, seconds to a step and to one never done before, of rank 0's second process, if any."""
    first = seen[0][2]
    after = [(time_s - at, done) for time_s, done, pid in seen if pid != first]
    if not after:
        return {}
    return {
        "steps_lost": step - after[0][1] + 1,
        "seconds_to_first_step_again": after[0][0],
        "seconds_to_new_work": next((seconds for seconds, done in after if done > step), None),
    }


def recover_all(args: argparse.Namespace, env: dict[str, str]) -> None:
    unshared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ways = {"standalone": (TORCHRUN, {}), "static": (TORCHRUN_STATIC, {}), "standalone_unshared": (TORCHRUN, unshared)}
    for name in args.only or ["ddp_snapshot", "hf_save"]:
        for way, (launcher, more) in ways.items():
            launcher = [*launcher, "--max-restarts", "1"]
            trials = [recover(name, launcher, {**env, **more}, args.step) for _ in range(args.trials)]
            for trial in trials:
                print(name, way, trial, flush=True)
            save("recover", WORKLOAD, {f"{name} {way}": {"trials": trials}})


def kill_all(args: argparse.Namespace, env: dict[str, str], key: str) -> None:
    for name in args.only or CONTENDERS:
        with Run(name, WORKLOAD, STEPS, f"fault_{key}", env=env) as run:
            result = watch(run, args.rank, 120)
        save(key, WORKLOAD, {name: result})
        print(name, json.dumps(result, indent=1), flush=True)


def stuck_all(args: argparse.Namespace, env: dict[str, str], key: str) -> None:
    """All at once, for each waits long: on few cores start few."""
    names = args.only or CONTENDERS
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as pool:
        runs = {name: Run(name, WORKLOAD, STEPS, f"fault_{key}", env=env) for name in names}
        for run in runs.values():
            stack.enter_context(run)
        waiting = {name: pool.submit(watch, run, args.rank, args.wait) for name, run in runs.items()}
        for name, future in waiting.items():
            save(key, WORKLOAD, {name: future.result()})
            print(name, json.dumps(future.result(), indent=1), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["kill", "stuck", "recover"])
    parser.add_argument("--only", type=names_of)
    parser.add_argument("--rank", type=int, choices=[0, 1], default=1)
    parser.add_argument("--step", type=int, default=10)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--wait", type=float, default=2100)
    args = parser.parse_args()
    leave_on_sigterm()
    environment()
    env = {"PEER_FAULT": f"{'sleep' if args.kind == 'stuck' else 'kill'}:{args.rank}:{args.step}"}
    key = args.kind if args.rank == 1 else f"{args.kind}_rank{args.rank}"
    if "PEER_TIMEOUT" in os.environ:  # runners that know it lower the collective timeout to so many seconds
        key += f"_timeout{os.environ['PEER_TIMEOUT']}"
    if args.kind == "recover":
        recover_all(args, env)
    else:
        {"kill": kill_all, "stuck": stuck_all}[args.kind](args, env, key)


if __name__ == "__main__":
    main()
