"""Random modules under random plans, one JSON line a case; what is there is not run again, what fails is made smaller.

python benchmarks/random_modules/run.py --first 0 --count 2000 --out cases.jsonl
python benchmarks/random_modules/run.py --only 17,1203

With --summary FILE the cases are counted, and what was refused by its reason (benchmarks/results/random_modules.json).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ranks

from benchmarks.random_modules.cases import Case, random_case, smaller
from benchmarks.random_modules.outcome import compare, measure_again, prepare, world_of

if TYPE_CHECKING:
    from evenly.verify.compare import Row

LIMIT_S = 120.0
BAD = ("different", "late", "error", "timeout")


def main() -> None:
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    asked = _arguments()
    seeds = [*map(int, asked.only.split(","))] if asked.only else [*range(asked.first, asked.first + asked.count)]
    lines = asked.out.read_text().splitlines() if asked.out.exists() and not asked.only else []
    known = {row["seed"]: row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory(prefix="random-") as folder:
        started = ranks.Ranks(Path(folder))
        for seed in seeds:
            if seed not in known:
                known[seed] = _row(random_case(seed), started)
                with asked.out.open("a") as file:
                    file.write(json.dumps(known[seed]) + "\n")
            if known[seed]["status"] in BAD or asked.only:
                print(seed, known[seed]["status"], known[seed]["plan"], known[seed]["reason"][:200], flush=True)
                print("   smallest:", known[seed].get("smallest"), flush=True)
    rows = [known[seed] for seed in seeds]
    print(*sorted(Counter(row["status"] for row in rows).items()))
    if asked.summary:
        asked.summary.write_text(json.dumps(summary(rows), indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=20, help="how many seeds")
    parser.add_argument("--only", default="", help="these seeds, separated by ',', and what becomes of them")
    parser.add_argument("--summary", type=Path, help="where to count the cases")
    parser.add_argument("--out", type=Path, default=Path("random_modules.jsonl"), help="a line for each case")
    return parser.parse_args()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many cases came out how, what was refused by reason, and what came out badly by seed."""
    reasons = Counter(_reason(row["reason"]) for row in rows if row["status"] == "refused")
    return {
        "commits": dict(Counter(row.get("commit", "") for row in rows)),
        "cases": len(rows),
        "statuses": dict(sorted(Counter(row["status"] for row in rows).items())),
        "refused": dict(reasons.most_common()),
        "bad": {row["seed"]: f"{row['plan']}: {row['reason'][:200]}" for row in rows if row["status"] in BAD},
    }


def _reason(text: str) -> str:
    """What was found, without the names and numbers of a case."""
    found = text.partition("found: ")[2].partition("\n")[0]
    return re.sub(r"\S*\d\S*|\(.*?\)", "...", found.partition(": ")[0])


def _row(case: Case, started: ranks.Ranks) -> dict[str, Any]:
    """The outcome of `case`; of a failing one also the smallest that fails in the same way."""
    found = outcome_of(case, started)
    row = {"seed": case.seed, "plan": case.plan, "commit": ranks.commit_of(Path(__file__).parent), **found}
    if found["status"] in BAD:
        row["smallest"] = asdict(_shrunk(case, found, started))
    return row


def _shrunk(case: Case, found: dict[str, Any], started: ranks.Ranks) -> Case:
    while True:
        for candidate in smaller(case):
            if outcome_of(candidate, started)["status"] == found["status"]:
                case = candidate
                break
        else:
            return case


def outcome_of(case: Case, started: ranks.Ranks) -> dict[str, Any]:
    """How `case` ends: {"status", "reason"}.

    equal · different · refused (before the first update) · late (an error of evenly's after one) · error (any other) ·
    timeout · no job (one device cannot train it either).
    """
    with tempfile.TemporaryDirectory(prefix="random-") as kept:
        folder = Path(kept)
        prepared = started.run(prepare, case, folder, size=1, limit_s=LIMIT_S)
        if not prepared.results:
            reason = next((error["text"] for error in prepared.errors.values()), str(prepared.ended))
            user = all(error["kind"] == "user" for error in prepared.errors.values()) and bool(prepared.errors)
            return {"status": "no job" if user else "error", "reason": f"reference: {reason}"}
        outcome = started.run(compare, case, folder, size=world_of(case), limit_s=LIMIT_S)
        whole = not (outcome.timed_out or outcome.errors or outcome.ended)
        if whole and _judged(case, outcome).status == "different":
            started.run(measure_again, case, folder, size=1, limit_s=8 * LIMIT_S)
            outcome = started.run(compare, case, folder, size=world_of(case), limit_s=LIMIT_S)
    if outcome.timed_out:
        return {"status": "timeout", "reason": outcome.log}
    if outcome.errors:
        error = min(outcome.errors.values(), key=lambda e: ("user", "evenly", "raw").index(e["kind"]))
        status = "error" if error["kind"] == "raw" else "refused" if error["step"] in (None, 1) else "late"
        return {"status": status, "reason": error["text"], "trace": error["trace"] if status == "error" else ""}
    if outcome.ended:
        return {"status": "error", "reason": f"{outcome.ended} {outcome.log}"}
    row = _judged(case, outcome)
    return {"status": row.status, "reason": row.reason, "diff": row.param_diff, "sharded": row.sharded}


def _judged(case: Case, outcome: ranks.Outcome) -> Row:
    from evenly.verify.compare import judge

    return judge(case.plan, [outcome.results[rank] for rank in sorted(outcome.results)])


if __name__ == "__main__":
    main()
