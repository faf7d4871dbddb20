"""What a step costs the host: processor time of Python and torch on one rank, computing next to nothing.

python benchmarks/host/run.py                                   all variants of both models; see README.md
python benchmarks/host/run.py --only "tensor=2,DTensor" --model gpt --rounds 20
python benchmarks/host/run.py --only tensor=2 --old ../old   the same of another checkout of evenly, in turns
python benchmarks/host/run.py --only tensor=2 --profile FILE    where the time goes, as text
python benchmarks/host/run.py --calls --old ../old   Python calls of evenly in a step of the plans, of both checkouts
python benchmarks/host/run.py --write-docs      the tables of docs/speed.md, of the rows that are kept; measures nothing
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

from names import GROUPS, Group

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results" / "host.json"
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- host: python benchmarks/host/run.py --write-docs -->", "<!-- end of host -->"
MODELS = {"gpt": "GPT of plain layers", "gpt2": "GPT-2 of transformers"}
OLD = " (before)"
CALLED = ("single", "ddp", "zero3", "tensor=2", "pipeline=2 schedule=1f1b")


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


def take_turns(group: Group, names: list[str], kind: str, args: argparse.Namespace) -> list[dict]:
    """All variants, a few steps of each in turn; the plans once more from `args.old`. Returns their rows."""
    with ExitStack() as contexts:
        workers = {}
        for name in names:
            packages = {name: ROOT}
            if args.old and name in group.plans:
                packages[name + OLD] = args.old.resolve()
            for shown, package in packages.items():
                workers[shown] = Worker(name, kind, package)
                contexts.callback(workers[shown].close)
        for _ in range(args.rounds):
            for worker in workers.values():
                worker.turn(args.steps)
        if args.profile:
            with args.profile.open("a") as text:
                for name in names:
                    print(f"\n==== {name}, {kind}\n{workers[name].ask(f'profile {args.steps}')}", file=text)
    return [row(name, group, workers) for name in names]


def count_calls(kind: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return by plan the Python calls of evenly in a step, then of `args.old` where it is given."""
    packages = [ROOT, *([args.old.resolve()] if args.old else [])]
    found = {}
    for plan in args.only.split(",") if args.only else CALLED:
        found[plan] = []
        for package in packages:
            worker = Worker(plan, kind, package)
            found[plan].append(worker.ask(f"calls {args.steps}"))
            worker.close()
        print(f"{plan:36}", *(f"{calls:8.0f}" for calls in found[plan]), flush=True)
    return found


def row(name: str, group: Group, workers: dict[str, Worker]) -> dict:
    """Ratios are medians over pairs of the same step."""
    worker, base, before = workers[name], workers.get(group.base), workers.get(name + OLD)
    found = {"name": name, "plan": name in group.plans, "step_ms": statistics.median(worker.seconds) * 1e3}
    if base is not None and base is not worker:
        found |= {"base": group.base, "to_base": ratio(worker, base)}
    if before is not None:
        found["to_before"] = ratio(worker, before)
        found["before_to_base"] = ratio(before, base) if base is not None else None
    return {**found, "steps": len(worker.seconds), "loss": worker.loss}


def ratio(one: Worker, other: Worker) -> float:
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def table(kind: str, rows: list[dict]) -> str:
    """Of a model, as Markdown."""
    columns = {"to_base": "to that by hand"}
    if any("to_before" in one for one in rows):
        columns |= {"before_to_base": "before", "to_before": "to before"}
    lines = [f"| {MODELS[kind]} | ms a step | {' | '.join(columns.values())} |", "|---|---|" + "---|" * len(columns)]
    for one in rows:
        name = f"`{one['name']}`" if one["plan"] else one["name"]
        ratios = [f"{one[key]:.2f}" if one.get(key) is not None else "" for key in columns]
        lines.append(f"| {name} | {one['step_ms']:.1f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def page(text: str, kept: dict) -> str:
    """`text` of docs/speed.md with the tables of the rows that are kept, and when and on what they were measured."""
    before, _, rest = text.partition(BEGIN)
    where = kept["environment"]
    said = f"{where['date']}, torch {where['torch']}, {where['cores']} cores, load {where['load'][0]} at the end"
    said += f"; before: commit {where['before']}." if where["before"] else "."
    tables = [table(kind, rows) for kind, rows in kept["rows"].items()]
    return before + "\n\n".join([BEGIN, *tables, f"Measured {said}", END]) + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=GROUPS, help="one of the models; by default both")
    parser.add_argument("--only", help="names of variants, separated by commas; what they are held against comes too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in a turn")
    parser.add_argument("--old", type=Path, help="another checkout of evenly")
    parser.add_argument("--profile", type=Path, help="file for where the time goes, which is added to")
    parser.add_argument("--json", type=Path, help=f"file for the rows, by default none; those kept are in {RESULTS}")
    parser.add_argument("--calls", action="store_true", help="count evenly's Python calls instead, --only plans")
    parser.add_argument("--write-docs", action="store_true", help="write the kept rows' tables to docs/speed.md")
    args = parser.parse_args()
    if args.write_docs:
        PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    if args.calls:
        count_calls(args.model or "gpt", args)
        return
    only, kept = args.only.split(",") if args.only else None, {}
    for kind in [args.model] if args.model else GROUPS:
        kept[kind] = []
        for group in GROUPS[kind]:
            names = [name for name in group.names if only is None or name in only]
            if names:
                kept[kind] += take_turns(group, [*dict.fromkeys([group.base, *names])], kind, args)
        print(f"\n{table(kind, kept[kind])}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(args), "rows": kept}, indent=1) + "\n")


def environment(args: argparse.Namespace) -> dict:
    before = None
    if args.old:
        command = ["git", "-C", str(args.old), "rev-parse", "--short", "HEAD"]
        before = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "load": [round(one, 2) for one in os.getloadavg()],
        "before": before,
        "what": "processor time of one rank; other programs shared the machine",
    }


if __name__ == "__main__":
    main()
