"""The campaign: runs are disturbed, one row each, and have to come to the numbers of a run that nothing disturbs.

python -m benchmarks.faults --list                       the rows, as they will be run
python -m benchmarks.faults --rows rows.jsonl            all of them; those that are there are not run again
python -m benchmarks.faults --rows rows.jsonl --stale    those of another commit are run again
python -m benchmarks.faults --rows rows.jsonl --short    those that fell short are run again
python -m benchmarks.faults --rows rows.jsonl --few      twenty of them
python -m benchmarks.faults --case 17                    one row
python -m benchmarks.faults --rows rows.jsonl --summary  benchmarks/results/faults.json, docs/faults.md
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import Case, cases, chosen, few

COUNT, SEED, LANES = 1000, 0, 2
RENEW = 60  # rows after which launchers are started anew
ROOT = Path(__file__).parents[2]
IN_NAMESPACE = "EVENLY_FAULTS_NAMESPACE"


def main() -> int:
    asked = _arguments()
    every = cases(asked.count, asked.seed)
    mine = chosen(few(every) if asked.few else every, asked.only)
    mine = [case for case in mine if asked.case is None or case.number == asked.case]
    if asked.list:
        print("\n".join(map(str, mine)))
        return 0
    if asked.summary:
        from benchmarks.faults.summary import write_summary

        write_summary(read_rows(asked.rows), every)
        return 0
    rows, commit = read_rows(asked.rows), commit_of(ROOT)
    part, parts = (int(number) for number in asked.part.split("/"))
    due = [case for case in mine if asked.case is not None or _is_due(case, rows, asked, commit)][part - 1 :: parts]
    if parts == 1 and asked.case is None and asked.lanes > 1:
        return _lanes(asked.lanes)
    _own_mounts()
    return _run_all(due, asked.rows if asked.case is None else None, commit)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--case", type=int, help="its number")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", help="faults, places or plans, separated by ','")
    parser.add_argument("--few", action="store_true", help="one case of most faults, as the tests run them")
    parser.add_argument("--rows", type=Path, default=Path("faults.jsonl"), help="the last row of a case counts")
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--lanes", type=int, default=LANES, help="rows beside each other")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N lanes")
    return parser.parse_args()


def _is_due(case: Case, rows: dict[int, dict[str, Any]], asked: argparse.Namespace, commit: str) -> bool:
    row = rows.get(case.number)
    return row is None or (asked.stale and row["commit"] != commit) or (asked.short and bool(row["short"]))


def read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """The rows so far, by case; the last counts. A line that was cut short is passed over."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["case"]] = row
    return found


def commit_of(folder: Path) -> str:
    """The commit of what is run, marked where files differ from it."""
    git = ["git", "-C", str(folder)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "evenly"], capture_output=True, text=True)
    return commit + ("-dirty" if changed.stdout.strip() else "")


def _lanes(count: int) -> int:
    """Runs the campaign in so many processes, each with its part."""
    words = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
    lanes = [subprocess.Popen([*words, "--part", f"{n}/{count}"], cwd=Path.cwd()) for n in range(1, count + 1)]
    signal.signal(signal.SIGTERM, lambda *_: [lane.terminate() for lane in lanes])
    try:
        return max(lane.wait() for lane in lanes)
    except KeyboardInterrupt:
        return max(lane.wait() for lane in lanes)


def _own_mounts() -> None:
    """Where it may, this process gets a view of its own of file systems, with a shared memory that is nobody else's."""
    if os.geteuid() or IN_NAMESPACE in os.environ or not shutil.which("unshare"):
        return
    words = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    if tried.returncode == 0:
        os.environ[IN_NAMESPACE] = "1"
        own = 'mount -t tmpfs none /dev/shm && exec "$@"'
        os.execvp("unshare", ["unshare", "--mount", "sh", "-c", own, "sh", *words])


def _run_all(due: list[Case], rows: Path | None, commit: str) -> int:
    """Runs the rows; the number of those that fell short, at most 1."""
    from benchmarks.faults.row import Bench, run_case

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    short = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        bench = Bench(Path(name))
        try:
            for number, case in enumerate(due, start=1):
                row = asdict(run_case(case, bench)) | {"commit": commit}
                short += bool(row["short"])
                print(f"{number}/{len(due)} {_line(case, row)}", flush=True)
                if rows is None:
                    print(json.dumps(row, indent=1))
                else:
                    _append(rows, row)
                if number % RENEW == 0:
                    bench.renew()
        finally:
            bench.close()
    return min(short, 1)


def _line(case: Case, row: dict[str, Any]) -> str:
    if row["skipped"]:
        return f"{case}  skipped: {row['skipped']}"
    noticed = "" if row["noticed_s"] is None else f"  noticed after {row['noticed_s']:.1f} s"
    return f"{case}  {row['seconds']:.0f} s{noticed}  {'; '.join(row['short']) or 'ok'}"


def _append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line in one write, so that several lanes may share a file."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(opened, (json.dumps(row) + "\n").encode())
    finally:
        os.close(opened)


if __name__ == "__main__":
    sys.exit(main())
