"""What a step costs the host: processor time of Python and torch on one rank, computing next to nothing.

python benchmarks/host/run.py                                   all variants of both models; see README.md
python benchmarks/host/run.py --only plain,tensor=2,dtensor --model gpt --rounds 20
python benchmarks/host/run.py --only tensor=2 --old ../old   the same of another checkout of evenly, in turns
python benchmarks/host/run.py --only tensor=2 --profile DIR     where the time goes, as text
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results" / "host.json"
NAMES = {
    "gpt": [
        *("plain", "plain-half", "single", "recompute", "ddp", "bitwise", "zero1", "zero2", "zero3"),
        *("tensor=2", "tensor=2 sequence", "tensor=4", "pipeline=2"),
        *("ddp by hand", "fsdp by hand", "megatron", "dtensor"),
    ],
    "gpt2": ["plain", "single", "ddp", "zero3", "tensor=2", "ddp by hand", "fsdp by hand"],
}
BY_HAND = ("plain", "plain-half", "ddp by hand", "fsdp by hand", "megatron", "dtensor")
BASE = {"pipeline=2": "plain-half"}
OLD = " (before)"


class Worker:
    """A variant in a process of its own, stopped between its turns."""

    def __init__(self, name: str, kind: str, package: Path) -> None:
        self.name, self.seconds, self.loss = name, [], 0.0
        environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), name, kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, text: str):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.answer()

    def turn(self, steps: int) -> None:
        found = self.ask(f"steps {steps}")
        self.seconds += found["seconds"]
        self.loss = found["loss"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def take_turns(names: list[str], kind: str, args: argparse.Namespace) -> dict[str, Worker]:
    """All variants, step by step in turns; what is not by hand once more from `args.old`."""
    with ExitStack() as contexts:
        workers = {}
        for name in names:
            packages = {name: ROOT}
            if args.old and name not in BY_HAND:
                packages[name + OLD] = args.old.resolve()
            for shown, package in packages.items():
                workers[shown] = Worker(name, kind, package)
                contexts.callback(workers[shown].close)
        for _ in range(args.rounds):
            for worker in workers.values():
                worker.turn(args.steps)
        for shown, worker in workers.items():
            if args.profile:
                args.profile.mkdir(parents=True, exist_ok=True)
                worker.ask(f"profile {args.steps} {args.profile / (kind + '-' + shown.replace(' ', '-') + '.txt')}")
    return workers


def rows(workers: dict[str, Worker]) -> list[dict]:
    """Ratios are medians over pairs of the same step."""
    found = []
    for shown, worker in workers.items():
        name, row = worker.name, {"name": shown, "step_ms": statistics.median(worker.seconds) * 1e3}
        base = BASE.get(name, "plain")
        for column, other in {"plain": base, "before": name + OLD}.items():
            if other in workers and other != shown:
                row[column] = ratio(worker, workers[other])
        found.append({**row, "base": base, "steps": len(worker.seconds), "loss": worker.loss})
    return found


def ratio(one: Worker, other: Worker) -> float:
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def show(kind: str, found: list[dict]) -> None:
    print(f"\n| {kind} | ms a step | to plain | to before |\n|---|---|---|---|")
    for row in found:
        ratios = " | ".join(f"{row[column]:.2f}" if column in row else "" for column in ("plain", "before"))
        print(f"| {row['name']} | {row['step_ms']:.1f} | {ratios} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=NAMES, help="one of the models; by default both")
    parser.add_argument("--only", help="names of variants, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in a turn")
    parser.add_argument("--old", type=Path, help="another checkout of evenly")
    parser.add_argument("--profile", type=Path, help="folder for where the time goes, a file for each variant")
    parser.add_argument("--json", type=Path, help=f"file for the rows, by default none; those kept are in {RESULTS}")
    args = parser.parse_args()
    kept = {}
    for kind in [args.model] if args.model else NAMES:
        names = [name for name in NAMES[kind] if not args.only or name in args.only.split(",")]
        kept[kind] = rows(take_turns(names, kind, args))
        show(kind, kept[kind])
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(args), "rows": kept}, indent=1) + "\n")


def environment(args: argparse.Namespace) -> dict:
    beside = None
    if args.old:
        command = ["git", "-C", str(args.old), "rev-parse", "--short", "HEAD"]
        beside = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "load": [round(one, 2) for one in os.getloadavg()],
        "before": beside,
        "what": "processor time of one rank; other programs shared the machine",
    }


if __name__ == "__main__":
    main()
