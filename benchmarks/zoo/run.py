"""The campaign: every architecture under every plan, one JSON line a row. Rows that are there are not run again.

python benchmarks/zoo/run.py --plans "zero=2;zero=3" --out results.jsonl
python benchmarks/zoo/run.py --only llama,t5 --plans "tensor=2" --out /tmp/rows.jsonl --redo different,error
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false"
)

import ranks

PLANS = "zero=2;zero=3;tensor=2;pipeline=2;3d"
STATUSES = ("equal", "different", "refused", "late", "error", "timeout", "unbuilt")
LIMIT_S = 60.0


def main() -> None:
    asked = _arguments()
    rows = read_rows(asked.out)
    names = _names(asked.only)
    plans = [plan.strip() for plan in asked.plans.split(";") if plan.strip()]
    redo = set(filter(None, asked.redo.split(",")))
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        started = ranks.Ranks(Path(folder))
        for number, name in enumerate(names):
            due = [p for p in plans if (name, p) not in rows or rows[name, p]["status"] in redo]
            for row in _rows_of(name, due, started, asked.limit):
                _append(asked.out, row)
                counts[row["plan"], row["status"]] += 1
                print(f"{number + 1}/{len(names)} {_line(row)}", flush=True)
    for (plan, status), count in sorted(counts.items()):
        print(f"{plan:12} {status:10} {count}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default=PLANS, help=f"separated by ';' (default: {PLANS})")
    parser.add_argument("--only", default="", help="architectures, separated by ','; @FILE reads them, one a line")
    parser.add_argument("--redo", default="", help=f"statuses to run again: {', '.join(STATUSES)}")
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"), help="the rows; the last of a pair counts")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one row")
    return parser.parse_args()


def _names(only: str) -> list[str]:
    if only.startswith("@"):
        return Path(only[1:]).read_text().split()
    if only:
        return only.split(",")
    import subjects

    return [*subjects.architectures()]


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows so far, by (architecture, plan); the last counts."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {(row["architecture"], row["plan"]): row for row in rows}


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _rows_of(name: str, plans: list[str], started: ranks.Ranks, limit_s: float) -> Iterator[dict[str, Any]]:
    """The rows of one architecture under `plans`, all against one reference."""
    if not plans:
        return
    import jobs

    with tempfile.TemporaryDirectory(prefix="zoo-") as kept:
        folder = Path(kept)
        began = time.monotonic()
        prepared = started.run(jobs.prepare, name, folder, size=1, limit_s=limit_s)
        if not prepared.results:
            for plan in plans:
                yield {**_row(name, plan, prepared, began), "status": "unbuilt"}
            return
        subject = prepared.results[0]
        for plan in plans:
            began = time.monotonic()
            size = jobs.plan_of(plan).ranks or 1
            outcome = started.run(jobs.compare, name, subject["batch"], plan, folder, size=size, limit_s=limit_s)
            facts = {"class": subject["class_name"], "head": subject["head"], "parameters": subject["parameters"]}
            yield {**_row(name, plan, outcome, began), **facts, "world": size}


def _row(name: str, plan: str, outcome: ranks.Outcome, began: float) -> dict[str, Any]:
    row = {"architecture": name, "plan": plan, "status": "", "reason": ""}
    if outcome.timed_out:
        row |= {"status": "timeout", "reason": outcome.log[-300:]}
    elif outcome.errors or outcome.ended:
        row |= _failure(outcome)
    elif outcome.results and hasattr(outcome.results[0], "param_diff"):
        row |= _verdict(plan, outcome)
    return row | {"seconds": round(time.monotonic() - began, 1), "versions": _versions()}


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


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _line(row: dict[str, Any]) -> str:
    reason = " | ".join(str(row["reason"]).split("\n"))
    diff = f" {row['param_diff']:.1e}" if row.get("param_diff") is not None else ""
    return f"{row['architecture']} {row['plan']}: {row['status']}{diff} {row['seconds']}s {reason[:300]}".rstrip()


if __name__ == "__main__":
    main()
