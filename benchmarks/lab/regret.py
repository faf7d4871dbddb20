"""What following `--plan auto` costs: every family of plans is run in labs, and held against what was predicted.

python -m benchmarks.lab.regret --folder F                 all pairs of a job and a lab; what is there is not run again
python -m benchmarks.lab.regret --folder F --only gpt2     pairs whose name (`gpt2 on 2x1-50`) has these words
python -m benchmarks.lab.regret --folder F --table         the table of what is there
python -m benchmarks.lab.regret --list

For each lab, `evenly bench device` and `evenly bench comm` write F/LAB.toml, by which `predict` finds the best plan of
each family and the one that `auto` takes; `evenly run --plan auto --cluster` is held to that. Plans are run in turns,
one after another, so that what disturbs the machine disturbs all; F/rows.jsonl has a line for each run with its steps,
and the table has each step's median over the turns. Where the planner has changed, `predict` and `--table` say what it
would lose now, and a further run what has not been measured of it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.faults.__main__ import commit_of
from benchmarks.lab.commands import run_on_all
from benchmarks.lab.lab import ROOT, Lab, down, guarded
from benchmarks.lab.pairs import AUTO, JOBS, LABS, PAIRS, Pair
from benchmarks.lab.predict import WARM_UP, read_predicted
from benchmarks.lab.regret_table import table

TURNS = 3
LIMIT = "600"  # seconds of a run
OPERATIONS = "send,all_reduce,all_gather,reduce_scatter"  # of the jobs here
EVENLY = [sys.executable, "-m", "evenly"]


def main() -> int:
    asked = _arguments()
    pairs = [pair for pair in PAIRS if all(word in str(pair) for word in asked.only.split())]
    if asked.list:
        print("\n".join(map(str, pairs)))
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    rows = asked.folder / "rows.jsonl"
    if not asked.table:
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "EVENLY_SECRET": "of a lab"}
        signal.signal(signal.SIGTERM, _leave)
        for pair in pairs:
            began_s = time.monotonic()
            if _run_pair(pair, asked.folder, rows, asked.turns):
                print(f"{pair}: {time.monotonic() - began_s:.0f} s", flush=True)
    predicted = read_predicted(asked.folder)
    print(table({pair: predicted[pair] for pair in map(str, pairs) if pair in predicted}, read_rows(rows)))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("regret"))
    parser.add_argument("--only", default="", help="words in the names of pairs")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def _leave(signum: int, _: FrameType | None) -> None:
    sys.exit(128 + signum)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows so far; a line that was cut short is passed over."""
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


# ---------------------------------------------------------------------------------------------------------- one pair
def _run_pair(pair: Pair, folder: Path, rows: Path, turns: int) -> bool:
    """Runs what of a pair is not there yet; whether anything was."""
    if str(pair) in read_predicted(folder) and not _due(pair, folder, rows, turns):
        return False
    with _up(LABS[pair.lab]) as lab:
        cluster = folder / f"{pair.lab}.toml"
        if not cluster.exists():
            _measure(lab, cluster)
        if str(pair) not in read_predicted(folder):
            words = ["benchmarks.lab.predict", str(folder), *str(pair).split()]
            subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True)
        predicted = read_predicted(folder)[str(pair)]
        for turn, asked in _due(pair, folder, rows, turns):
            row = _row(pair, lab, asked, predicted[asked], cluster)
            with rows.open("a") as out:
                out.write(json.dumps({"pair": str(pair), "turn": turn, "asked": asked, **row}) + "\n")
            print(f"{pair}, turn {turn}, {asked}: {row.get('steps_s') or row['refused']}", flush=True)
    return True


def _due(pair: Pair, folder: Path, rows: Path, turns: int) -> list[tuple[int, str]]:
    """(turn, what is asked) of all that is to be run: every plan once a turn, and once what `auto` takes by itself."""
    predicted = read_predicted(folder).get(str(pair), {})
    there = [row for row in read_rows(rows) if row["pair"] == str(pair)]
    run = {(row["turn"], row["plan"]) for row in there}
    found: list[tuple[int, str]] = []
    for turn in range(turns):
        for asked, one in predicted.items():
            by_itself = asked == AUTO and not turn and not any(row["asked"] == AUTO for row in there)
            if "plan" in one and (by_itself or (turn, one["plan"]) not in run):
                found.append((turn, asked))
                run.add((turn, one["plan"]))
    return found


@contextmanager
def _up(lab: Lab) -> Generator[Lab]:
    down(lab.name)
    with guarded(lab):
        yield lab


def _measure(lab: Lab, cluster: Path) -> None:
    part = cluster.with_suffix(".part")
    part.unlink(missing_ok=True)
    place = [*_place(), "--devices", "{devices}", "--save", str(part.with_suffix(".new.toml"))]
    for words in (["bench", "device", *place], ["bench", "comm", "--operations", OPERATIONS, *place]):
        _all_nodes(lab, words)
    part.with_suffix(".new.toml").replace(cluster)


def _place() -> list[str]:
    return ["--nodes", "{nodes}", "--node-rank", "{node}", "--rendezvous", "node0:29500"]


def _all_nodes(lab: Lab, words: Sequence[str]) -> None:
    out = io.StringIO()
    codes = run_on_all(lab, ["timeout", LIMIT, *EVENLY, *words], out)
    if any(codes):
        raise RuntimeError(f"{words}: {codes}\n{out.getvalue()}")


def _job(pair: Pair) -> list[str]:
    name, settings = JOBS[pair.job]
    stated = [word for key, value in {"example": name, **settings}.items() for word in ("--set", f"{key}={value}")]
    return [str(Path(__file__).with_name("training_only.py")), *stated]


def _row(pair: Pair, lab: Lab, asked: str, predicted: dict[str, Any], cluster: Path) -> dict[str, Any]:
    """A run of what was asked: the plan that was run, and its steps."""
    chosen = ["--plan", AUTO, "--cluster", str(cluster.resolve())] if asked == AUTO else ["--plan", predicted["plan"]]
    about = {"plan": predicted["plan"], "commit": commit_of(ROOT), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="regret-") as out:
        steps = ["--steps", str(WARM_UP + pair.steps), "--quiet", "--out", f"{out}/run"]
        try:
            _all_nodes(lab, ["run", *_job(pair), *chosen, *_place(), "--devices", "{devices}", *steps])
        except RuntimeError as refused:
            return {**about, "refused": str(refused)[-500:]}
        lines = Path(out, "run", "metrics.jsonl").read_text().splitlines()
        taken = json.loads(Path(out, "run", "plan.json").read_text())
    times = [row["step_s"] for row in map(json.loads, lines) if "step_s" in row]
    if asked == AUTO and taken["plan"] != predicted["plan"]:
        print(f"{pair}: auto took {taken['plan']}, where {predicted['plan']} was predicted", flush=True)
        about["taken"] = taken["plan"]
    return {**about, "steps_s": times[WARM_UP:]}


if __name__ == "__main__":
    sys.exit(main())
