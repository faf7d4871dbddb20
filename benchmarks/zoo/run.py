"""The campaign: every subject under every plan, one JSON line a row. Rows that are there are not run again.

python benchmarks/zoo/run.py --out rows.jsonl                       all libraries, all plans
python benchmarks/zoo/run.py --out rows.jsonl --part 1/2            one of two lanes beside each other, with one file
python benchmarks/zoo/run.py --out rows.jsonl --only llama,timm:convnext,peft: --plans "tensor=2" --redo different
python benchmarks/zoo/run.py --out rows.jsonl --stale               what was run on another commit is run again
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ranks

HERE = Path(__file__).resolve().parent
PLANS = "zero=2;zero=3;tensor=2;pipeline=2;3d"
STATUSES = ("equal", "rounding", "different", "refused", "late", "error", "timeout", "unbuilt")
LIMIT_S = 60.0


def main() -> None:
    asked = _arguments()
    _set_environment()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ranks are ended on the way out
    campaign = _campaign(asked)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        started = ranks.Ranks(Path(folder), campaign.libraries)
        for number, (name, due) in enumerate(campaign.due.items()):
            for row in _rows_of(name, due, started, asked.limit):
                row |= {"commit": campaign.commit, "versions": campaign.versions_of(name)}
                _append(asked.out, row)
                counts[row["plan"], row["status"]] += 1
                print(f"{number + 1}/{len(campaign.due)} {_line(row)}", flush=True)
    for (plan, status), count in sorted(counts.items()):
        print(f"{plan:12} {status:10} {count}")


def _set_environment() -> None:
    """For the libraries, and for the server that the ranks are forked from."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        TOKENIZERS_PARALLELISM="false",
        PYTHONPATH=os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default=PLANS, help=f"separated by ';' (default: {PLANS})")
    parser.add_argument(
        "--only", default="", help="subjects, separated by ','; 'timm:' is all of timm; @FILE: a line each"
    )
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the subjects")
    parser.add_argument("--redo", default="", help=f"statuses to run again: {', '.join(STATUSES)}")
    parser.add_argument("--stale", action="store_true", help="run again what was run on another commit")
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"), help="the rows; the last of a pair counts")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one row")
    return parser.parse_args()


@dataclass(frozen=True)
class Campaign:
    """What is to be run; due: the plans of each subject that has some."""

    due: dict[str, list[str]]
    commit: str
    libraries: tuple[str, ...]

    def versions_of(self, name: str) -> dict[str, str]:
        """The versions of the libraries that a row depends on."""
        import subjects

        names = dict.fromkeys(("torch", subjects.split(name)[0], *(["transformers"] if "peft:" in name else [])))
        return {one: importlib.metadata.version(one) for one in names}


def _campaign(asked: argparse.Namespace) -> Campaign:
    import subjects

    rows, commit = read_rows(asked.out), ranks.commit_of(HERE)
    plans = [plan.strip() for plan in asked.plans.split(";") if plan.strip()]
    redo = set(filter(None, asked.redo.split(",")))

    def is_due(name: str, plan: str) -> bool:
        row = rows.get((name, plan))
        return row is None or row["status"] in redo or (asked.stale and row.get("commit") != commit)

    part, parts = (int(number) for number in asked.part.split("/"))
    names = [*dict.fromkeys(_names(asked.only))][part - 1 :: parts]
    due = {name: mine for name in names if (mine := [plan for plan in plans if is_due(name, plan)])}
    libraries = {of for name in due for of in (subjects.split(name)[0], *(["transformers"] if "peft:" in name else []))}
    for library in sorted(libraries):
        subjects.library(library)  # before anything runs: it may not be installed
    return Campaign(due, commit, tuple(sorted(libraries)))


def _names(only: str) -> Iterator[str]:
    """The subjects that are asked for; those of whole libraries without what is left out."""
    import subjects

    text = Path(only[1:]).read_text() if only.startswith("@") else only
    for name in text.replace(",", " ").split() or [f"{library}:" for library in subjects.LIBRARIES]:
        if name.endswith(":"):
            yield from subjects.names_of(name[:-1])
        else:
            yield name


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows so far, by (architecture, plan); the last counts. A line that was cut short is passed over."""
    if not path.exists():
        return {}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["architecture"], row["plan"]] = row
    return found


def _append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line in one write, so that several campaigns may share a file."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(opened, (json.dumps(row) + "\n").encode())
    finally:
        os.close(opened)


def _rows_of(name: str, plans: list[str], started: ranks.Ranks, limit_s: float) -> Iterator[dict[str, Any]]:
    """The rows of one subject under `plans`, all against one reference. No failure of one ends the campaign."""
    import zoo_jobs

    with tempfile.TemporaryDirectory(prefix="zoo-") as kept:
        folder = Path(kept)
        began = time.monotonic()
        prepared = started.run(zoo_jobs.prepare, name, folder, size=1, limit_s=limit_s)
        if not prepared.results:
            for plan in plans:
                yield {**_row(name, plan, prepared, began, limit_s), "status": "unbuilt"}
            return
        subject = prepared.results[0]
        facts = {"class": subject["class_name"], **{key: subject[key] for key in ("head", "parameters", "experts")}}
        for plan in plans:
            began = time.monotonic()
            try:
                size = zoo_jobs.plan_of(plan).ranks or 1
                arguments = (name, subject["batch"], plan, folder)
                outcome = started.run(zoo_jobs.compare, *arguments, size=size, limit_s=limit_s)
                row = _row(name, plan, outcome, began, limit_s)
                if row["status"] == "different":
                    started.run(zoo_jobs.measure_again, *arguments, size=1, limit_s=8 * limit_s)
                    outcome = started.run(zoo_jobs.compare, *arguments, size=size, limit_s=limit_s)
                    row = _row(name, plan, outcome, began, limit_s)
                yield {**row, **facts, "world": size}
            except Exception as problem:  # of the campaign itself: a rank's is in its outcome
                broken = ranks.Outcome(errors={0: ranks.describe(problem) | {"kind": "raw"}})
                yield {**_row(name, plan, broken, began, limit_s), **facts}


def _row(name: str, plan: str, outcome: ranks.Outcome, began: float, limit_s: float) -> dict[str, Any]:
    row = {"architecture": name, "plan": plan, "status": "", "reason": ""}
    if outcome.timed_out:
        row |= {"status": "timeout", "reason": f"no end within {limit_s:.0f} s", "trace": outcome.log[-300:]}
    elif outcome.errors or outcome.ended:
        row |= _failure(outcome)
    elif outcome.results and hasattr(outcome.results[0], "param_diff"):
        row |= _verdict(plan, outcome)
    return row | {"seconds": round(time.monotonic() - began, 1)}


def _failure(outcome: ranks.Outcome) -> dict[str, Any]:
    """The error that led to the others: a user's before evenly's before a raw one, lost connections last."""

    def order(error: dict[str, Any]) -> tuple[int, bool]:
        lost = any(word in error["text"] for word in ("onnection", "Gloo", "gloo", "peer"))
        return ("user", "evenly", "raw").index(error["kind"]), lost

    if not outcome.errors:
        rank, how = next(iter(sorted(outcome.ended.items())))
        return {"status": "error", "reason": f"rank {rank}: {how}", "trace": outcome.log}
    rank, error = min(outcome.errors.items(), key=lambda item: (order(item[1])[1], order(item[1])[0], item[0]))
    before_update = error["step"] in (None, 1)
    status = "error" if error["kind"] == "raw" else "refused" if before_update else "late"
    return {"status": status, "reason": error["text"], "step": error["step"], "rank": rank, "trace": error["trace"]}


def _verdict(plan: str, outcome: ranks.Outcome) -> dict[str, Any]:
    from evenly.verify.compare import judge

    row = judge(plan, [outcome.results[rank] for rank in sorted(outcome.results)])
    names = ("status", "loss_diff", "grad_norm_diff", "param_diff", "worst_param", "sharded", "reason")
    return {name: getattr(row, name) for name in names}


def _line(row: dict[str, Any]) -> str:
    reason = " | ".join(str(row["reason"]).split("\n"))
    diff = f" {row['param_diff']:.1e}" if row.get("param_diff") is not None else ""
    return f"{row['architecture']} {row['plan']}: {row['status']}{diff} {row['seconds']}s {reason[:300]}".rstrip()


if __name__ == "__main__":
    main()
