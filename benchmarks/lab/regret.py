"""What following `--plan auto` costs: every family of plans is run in labs, and held against what was predicted.

python -m benchmarks.lab.regret --folder F                 all pairs of a job and a lab; what is there is not run again
python -m benchmarks.lab.regret --folder F --only gpt2     pairs whose name (`gpt2 on 2x1-50`) has these words
python -m benchmarks.lab.regret --folder F --table         the table of what is there
python -m benchmarks.lab.regret --list

For each lab, `evenly bench device` and `evenly bench comm` write F/LAB.toml, by which `evenly plan` predicts the best
plan of each family, and `evenly run --plan auto --cluster` chooses. Plans are run in turns, one after another, so that
what disturbs the machine disturbs all; F/rows.jsonl has a line for each run, and the table compares within turns.
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
from statistics import median
from types import FrameType
from typing import Any

from benchmarks.faults.__main__ import commit_of
from benchmarks.lab.commands import run_on_all
from benchmarks.lab.lab import ROOT, Lab, down, guarded
from benchmarks.lab.pairs import AUTO, JOBS, LABS, PAIRS, Pair
from benchmarks.lab.regret_table import table

TURNS = 3
WARM_UP = 4  # steps of a run that do not count
SECONDS_OF_A_RUN, LEAST_STEPS, MOST_STEPS = 15.0, 10, 40
LIMIT = "600"  # seconds of a run
OPERATIONS = "send,broadcast,all_reduce,all_gather,reduce_scatter,all_to_all"
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
    print(table([row for row in read_rows(rows) if row["pair"] in set(map(str, pairs))]))
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
    there = {(row["turn"], row["asked"]) for row in read_rows(rows) if row["pair"] == str(pair)}
    due = [(turn, asked) for turn in range(turns) for asked in (*pair.families, AUTO) if (turn, asked) not in there]
    if not due:
        return False
    with _up(LABS[pair.lab]) as lab:
        cluster = folder / f"{pair.lab}.toml"
        if not cluster.exists():
            _measure(lab, cluster)
        plans = {asked: _predicted(pair, asked, cluster) for asked in dict.fromkeys(asked for _, asked in due)}
        for turn, asked in due:
            row = _row(pair, lab, asked, plans[asked], cluster)
            with rows.open("a") as out:
                out.write(json.dumps({"pair": str(pair), "turn": turn, "asked": asked, **row}) + "\n")
            print(f"{pair}, turn {turn}, {asked}: {row.get('step_s') or row['refused']}", flush=True)
    return True


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
    stated = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [str(ROOT / "examples" / f"{name}.py"), *stated]


def _predicted(pair: Pair, asked: str, cluster: Path) -> dict[str, Any]:
    """The best plan of a family, and its step; only why not where there is none."""
    words = ["plan", *_job(pair), "--cluster", str(cluster), "--only", asked, "--top", "1", "--json"]
    began_s = time.monotonic()
    done = subprocess.run([*EVENLY, *words], capture_output=True, text=True)
    if done.returncode:
        return {"refused": done.stderr.strip().replace("\n", " ")}
    best = json.loads(done.stdout)["plans"][0]
    took_s = time.monotonic() - began_s
    return {"plan": best["plan"], "predicted_s": best["step_s"], "time_s": best["time_s"], "planning_s": took_s}


def _row(pair: Pair, lab: Lab, asked: str, plan: dict[str, Any], cluster: Path) -> dict[str, Any]:
    """A run of a plan: what was predicted, and the median step."""
    if "plan" not in plan:
        return plan
    steps = max(LEAST_STEPS, min(MOST_STEPS, int(SECONDS_OF_A_RUN / plan["predicted_s"]))) + WARM_UP
    chosen = ["--plan", AUTO, "--cluster", str(cluster.resolve())] if asked == AUTO else ["--plan", plan["plan"]]
    about = {"commit": commit_of(ROOT), "load": os.getloadavg()[0], "steps": steps}
    with tempfile.TemporaryDirectory(prefix="regret-") as out:
        place = [*_place(), "--devices", "{devices}", "--steps", str(steps), "--quiet", "--out", f"{out}/run"]
        try:
            _all_nodes(lab, ["run", *_job(pair), *chosen, *place])
        except RuntimeError as refused:
            return {**plan, **about, "refused": str(refused)[-500:]}
        lines = Path(out, "run", "metrics.jsonl").read_text().splitlines()
        taken = json.loads(Path(out, "run", "plan.json").read_text())
    times = [row["step_s"] for row in map(json.loads, lines) if "step_s" in row]
    return {**plan, **about, "plan": taken["plan"], "step_s": median(times[WARM_UP:])}


if __name__ == "__main__":
    sys.exit(main())
